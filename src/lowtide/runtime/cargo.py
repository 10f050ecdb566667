"""Values as sets of storages that move as a whole; tensors are views of them, put together where they are needed.

Saved tensors are often strided views of one buffer. A cargo knows each storage once, whatever the number of views, so
that each is copied once, and views come back with the strides that they had.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ticket(Protocol):
    """A copy that is under way."""

    def wait(self) -> None:
        """Let what follows on the compute stream (on the CPU: the caller) wait until the copy has ended."""


class Region(Protocol):
    """Room on the lower tier for one storage; given back when the object dies."""

    num_bytes: int


class Tier(Protocol):
    """The lower tier: where storages go."""

    def store(self, storage: torch.UntypedStorage) -> tuple[Region, Ticket]:
        """Queue a copy of a storage down."""

    def load(self, region: Region, device: torch.device) -> tuple[torch.UntypedStorage, Ticket]:
        """Make a storage of the region's size on the device, and queue a copy up into it."""


class Box:
    """One storage, on the device or not."""

    __slots__ = ("device", "num_bytes", "region", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.device = storage.device
        self.num_bytes = storage.nbytes()
        self.region: Region | None = None


class View:
    """A tensor as a view of a box."""

    __slots__ = ("box", "dtype", "offset", "requires_grad", "size", "stride")

    def __init__(self, box: Box | None, tensor: torch.Tensor) -> None:
        self.box = box
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.requires_grad = tensor.requires_grad

    def tensor(self) -> torch.Tensor:
        """The tensor; its storage is on the device."""
        assert self.box is not None
        assert self.box.storage is not None
        return self.on(self.box.storage)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view of another storage of the same size."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Cargo:
    """The storages of one value."""

    __slots__ = ("_arriving", "_boxes", "_leaving", "on_device")

    def __init__(self) -> None:
        self._boxes: dict[int, Box] = {}  # by the address of the storage's record, which the box keeps alive
        self._leaving: list[Ticket] = []
        self._arriving: list[Ticket] = []
        self.on_device = True

    def __del__(self) -> None:
        # Memory that a copy is still writing must not be handed to others: let them wait for the copy.
        self.arrive()

    def view(self, tensor: torch.Tensor) -> View:
        """Take a tensor in."""
        storage = tensor.untyped_storage()
        box = self._boxes.get(storage._cdata)
        if box is None:
            box = self._boxes[storage._cdata] = Box(storage)
        return View(box, tensor)

    @property
    def num_bytes(self) -> int:
        """All storages, each once."""
        return sum(box.num_bytes for box in self._boxes.values())

    def offload(self, tier: Tier) -> int:
        """Queue copies down; returns the bytes that move."""
        self.arrive()
        for box in self._boxes.values():
            assert box.storage is not None
            box.region, ticket = tier.store(box.storage)
            self._leaving.append(ticket)
        return self.num_bytes

    def prefetch(self, tier: Tier) -> int:
        """Make room on the device and queue copies up; returns the bytes that move."""
        for box in self._boxes.values():
            assert box.region is not None
            box.storage, ticket = tier.load(box.region, box.device)
            self._arriving.append(ticket)
        self.on_device = True
        return self.num_bytes

    def arrive(self) -> None:
        """Wait for copies that write the storages."""
        for ticket in self._arriving:
            ticket.wait()
        self._arriving.clear()

    def leave(self) -> None:
        """Wait for copies that read or write the storages, and let these go from the device."""
        self.arrive()
        for ticket in self._leaving:
            ticket.wait()
        self._leaving.clear()
        for box in self._boxes.values():
            box.storage = None
        self.on_device = False
