"""Values as sets of storages that move as a whole; tensors are views of them, rebuilt when needed.

Saved tensors are often strided views of one buffer. A cargo knows each storage once, whatever the number of views, so
that each is copied once, and views come back with the strides that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Ticket(Protocol):
    """A copy that is under way."""

    def wait(self) -> None:
        """Let what follows on the compute stream (on the CPU: the caller) wait until the copy has ended."""

    def hand_back(self) -> None:
        """The memory that was copied into is about to be freed: whoever gets it next waits for what is queued now."""


class Mirror(Protocol):
    """A tensor's place on the lower tier, for as long as anything refers to it."""

    tensor: torch.Tensor
    """That place as a tensor of the same device, shape and strides: every operation can read and write it."""

    def fill(self, tensor: torch.Tensor) -> None:
        """Take over what a tensor of the CPU holds, whose strides are the same."""


class Region(Protocol):
    """Room on the lower tier for some storages; given back when the object dies."""

    num_bytes: int


class Tier(Protocol):
    """The lower tier: where storages go."""

    smallest_bytes: int
    """Storages smaller than this stay where they are: a copy costs more than their room is worth."""

    def expect(self, num_bytes: int) -> None:
        """So many bytes will be stored: take room for them in one piece, when the first of them come."""

    def give_up_unused(self) -> None:
        """Give back the memory that nothing is stored in."""

    def store(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Region, Ticket]:
        """Queue copies of storages down."""

    def load(self, region: Region, storages: Sequence[torch.UntypedStorage]) -> Ticket:
        """Queue copies of a region up into storages on the device, as large as those that it was made of."""

    def mirror(self, tensor: torch.Tensor) -> Mirror:
        """Make a place, on the tier's device, for a tensor without gaps; nothing is copied."""

    def copy_down(self, pairs: Sequence[tuple[torch.Tensor, Mirror]]) -> Ticket:
        """Queue copies of tensors to their places; the tensors stay until the ticket has been waited for."""

    def finish(self) -> None:
        """Wait until all copies have ended: their memory may be given back afterwards."""

    def join(self) -> None:
        """Let what follows on the compute stream wait for all copies that were queued."""

    def forget(self) -> None:
        """Copies that were queued so far are over, or were captured and never ran: nobody has to wait for one."""

    def copy_up(self, pairs: Sequence[tuple[torch.Tensor, Mirror]]) -> Ticket:
        """Queue copies into tensors from their places."""


class Box:
    """One storage, on the device or not."""

    __slots__ = ("device", "num_bytes", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.device = storage.device
        self.num_bytes = storage.nbytes()

    def with_memory(self) -> torch.UntypedStorage:
        """Take memory on the device for it."""
        if self.storage is None:
            self.storage = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        elif self.storage.nbytes() != self.num_bytes:
            self.storage.resize_(self.num_bytes)
        return self.storage


class View:
    """A tensor as a view of a box."""

    __slots__ = ("box", "dtype", "is_conj", "is_neg", "offset", "size", "stride")

    def __init__(self, box: Box | None, tensor: torch.Tensor) -> None:
        self.box = box
        self.dtype = tensor.dtype
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        # What the memory holds is not yet what the tensor holds: `conj()`, and `imag` of that, are views with a mark.
        self.is_conj = tensor.is_conj()
        self.is_neg = tensor.is_neg()

    def tensor(self) -> torch.Tensor:
        """The tensor; its storage is on the device."""
        assert self.box is not None
        assert self.box.storage is not None
        return self.on(self.box.storage)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view of another storage of the same size."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        view = empty.set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            view = view.conj()
        return torch._neg_view(view) if self.is_neg else view


class Cargo:
    """The storages of one value.

    Args:
        empties: a storage that leaves is emptied, and filled again when it comes back: whoever has a tensor in it still
            has one. Else it is given up, and another one takes its place.
    """

    __slots__ = ("_arriving", "_boxes", "_empties", "_leaving", "_moved", "_region")

    def __init__(self, *, empties: bool = False) -> None:
        self._empties = empties
        self._boxes: dict[int, Box] = {}  # by the address of the storage's record, which the box keeps alive
        self._moved: list[Box] | None = None  # those of them that were copied down; None: not yet
        self._region: Region | None = None
        self._leaving: Ticket | None = None
        self._arriving: Ticket | None = None

    def __del__(self) -> None:
        # Memory that a copy is still writing must not be handed to others: let them wait for the copy.
        self.arrive()

    def view(self, tensor: torch.Tensor) -> View:
        """Take a tensor in."""
        storage = tensor.untyped_storage()
        return View(self.box(storage, storage._cdata), tensor)

    def box(self, storage: torch.UntypedStorage, address: int) -> Box:
        """Take in a storage, whose record is at that address."""
        box = self._boxes.get(address)
        if box is None:
            box = self._boxes[address] = Box(storage)
        return box

    def offload(self, tier: Tier) -> int:
        """Queue copies down; returns the bytes that move."""
        self.arrive()
        moved = self._moved = [box for box in self._boxes.values() if box.num_bytes >= tier.smallest_bytes]
        storages = [box.storage for box in moved if box.storage is not None]
        assert len(storages) == len(moved)
        if storages:
            self._region, self._leaving = tier.store(storages)
        return sum(box.num_bytes for box in moved)

    def prefetch(self, tier: Tier) -> int:
        """Make room on the device and queue copies up; returns the bytes that move."""
        if not self._moved:
            return 0
        assert self._region is not None
        self._arriving = tier.load(self._region, [box.with_memory() for box in self._moved])
        return sum(box.num_bytes for box in self._moved)

    def arrive(self) -> None:
        """Wait for copies that write the storages."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def leave(self) -> None:
        """Wait for copies that read or write the storages, then free them on the device."""
        self.arrive()
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        for box in self._boxes.values() if self._moved is None else self._moved:
            if self._empties and box.storage is not None:
                box.storage.resize_(0)
            else:
                box.storage = None
