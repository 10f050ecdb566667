"""The lower tier of a CUDA device: pinned host memory, copied on two separate streams.

Memory follows from the order of the list alone: a copy down starts after what the compute stream was given before it,
and whoever frees the storage makes the compute stream wait for the copy first; a copy up goes into memory that was
allocated on the compute stream at its place in the list, and starts after what that stream was given before. All of it
is ordered by events; nothing is left to `record_stream`. The compute stream is whichever is current at each call.

Pinned memory is taken once, in one slab of the size that the schedules need, and registered as it is: PyTorch's own
pinned allocator would round it up to a power of two. Its pages are made before, by all cores and as large as the
system has them: registering pages that are not there yet takes most of a second for each gigabyte.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from lowtide.errors import ExecutionError, LowtideWarning
from lowtide.runtime.meter import exclude
from lowtide.runtime.transfer.arena import Arena, Pieces, Room, rounded
from lowtide.runtime.transfer.host_memory import check_host_has
from lowtide.units import format_bytes

# More pinned memory than planned is needed only where shapes grow; pieces are then no smaller than this.
_SMALLEST_PIECE_BYTES = 64 * 2**20

# Pages are made so many bytes at a time, and progress is told after each.
_BYTES_AT_ONCE = 2**30

# What waits for the end of a capture, until more is registered.
_still_registered: list[tuple[int, mmap.mmap]] = []

Progress = Callable[[str, float], None]
"""Is told the current task and the share done."""


class _Slab:
    """One piece of pinned memory."""

    def __init__(self, progress: Progress | None, num_bytes: int) -> None:
        self.arena = Arena(num_bytes)
        self.memory, self.is_pinned = _host_memory(num_bytes, progress)

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """A part of it."""
        return self.memory[offset : offset + num_bytes]


class _Copy(NamedTuple):
    """A copy that was queued, or several."""

    event: torch.cuda.Event
    era: int
    """Copies of earlier eras than the current one have been waited for."""
    number: int
    """How many were queued before, or with it."""


class _Guard:
    """The last copy up out of room that was given back since: whoever is given that room waits for it.

    Copies up end in the order in which they were queued. To wait for the last of all of them would be enough, too, and
    would let copies down wait for copies up throughout.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: _Copy | None = None

    def note(self, load: _Copy | None) -> None:
        """Room that such a copy reads, or has read, is given back."""
        if load is not None and (self.last is None or load.number > self.last.number):
            self.last = load


class _PinnedRegion:
    """Room in a slab for some storages, the last copy that reads or writes it, and the last one that reads it."""

    __slots__ = ("_guard", "last_copy", "last_load", "num_bytes", "parts", "room")

    def __init__(self, guard: _Guard, slab: _Slab, room: Room, sizes: Sequence[int]) -> None:
        self._guard = guard
        self.last_load: _Copy | None = None
        self.room = room
        self.num_bytes = room.num_bytes
        self.parts: list[torch.Tensor] = []
        self.last_copy: _Copy | None = None
        offset = room.offset
        for num_bytes in sizes:
            self.parts.append(slab.bytes_at(offset, num_bytes))
            offset += rounded(num_bytes)

    def __del__(self) -> None:
        self._guard.note(self.last_load)


class _PinnedTicket:
    __slots__ = ("_device", "_stream", "_tier", "copy")

    def __init__(self, copy: _Copy, tier: PinnedTier) -> None:
        self.copy = copy
        self._tier = tier
        self._device = tier.device
        self._stream = torch.cuda.current_stream(self._device)  # to which memory that is copied into belongs

    def wait(self) -> None:
        """Let the compute stream wait for the copy."""
        self._tier.wait_for(torch.cuda.current_stream(self._device), self.copy)

    def hand_back(self) -> None:
        """Freed memory goes to the stream that took it; where another one used it, that one comes first."""
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            self._stream.wait_stream(current)


class _Mapped:
    """Pinned memory as CUDA sees it; a tensor made of it keeps it, and with it the slab and the room."""

    def __init__(self, slab: _Slab, room: Room, host: torch.Tensor) -> None:
        self._kept = (slab, room)
        self.__cuda_array_interface__ = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


class _PinnedMirror:
    """A tensor in pinned memory, which kernels read and write over the link.

    Copies go through `host`, the same memory as the CPU sees it, so that copy engines do them.
    """

    __slots__ = ("_guard", "host", "last_copy", "last_load", "tensor")

    def __init__(self, guard: _Guard, slab: _Slab, room: Room, like: torch.Tensor, device: torch.device) -> None:
        self._guard = guard
        self.last_load: _Copy | None = None
        if not slab.is_pinned:
            raise ExecutionError(
                "weights can only be moved to pinned host memory, and the system refuses to pin it; raise the limit of "
                "locked memory (ulimit -l)"
            )
        self.host = slab.bytes_at(room.offset, like.numel() * like.element_size())
        self.last_copy: _Copy | None = None
        memory = torch.as_tensor(_Mapped(slab, room, self.host), device=device)
        assert memory.data_ptr() == self.host.data_ptr()
        # Not a view of the bytes, which it would hold: whoever counts the names of this memory finds one.
        empty = torch.empty(0, dtype=like.dtype, device=device)
        self.tensor = exclude(empty.set_(memory.untyped_storage(), 0, like.shape, like.stride()))

    def fill(self, tensor: torch.Tensor) -> None:
        """Take over what a tensor of the CPU holds, whose strides are the same."""
        self.host.copy_(_flat_bytes(tensor))

    def __del__(self) -> None:
        self._guard.note(self.last_load)


class PinnedTier:
    """Storages of one CUDA device in pinned host memory.

    Args:
        device: the device.
        expected_bytes: pinned at the first use; more is added where it is not enough.
        limit_bytes: never use more than this; None: no limit.
        progress: is told how far pinning is, which takes seconds where there is much of it; None: nobody is.
    """

    # Above the statistics of a normalisation, a few kilobytes each: a copy has to be launched however small it is, and
    # launching is what limits steps with copies. The figure itself was not tuned.
    smallest_bytes = 16 * 2**10

    def __init__(
        self,
        device: torch.device,
        expected_bytes: int = 0,
        limit_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.device = device
        self._slabs = Pieces(partial(_Slab, progress), expected_bytes, _SMALLEST_PIECE_BYTES, limit_bytes)
        self.to_host = torch.cuda.Stream(device)
        self.to_device = torch.cuda.Stream(device)
        self._guard = _Guard()
        self._num_queued = 0
        self._era = 0
        self._has_queued = False  # copies, in this era

    def wait_for(self, stream: torch.cuda.Stream, copy: _Copy | None) -> None:
        """Let a stream wait for a copy, unless all streams have."""
        if copy is not None and copy.era == self._era:
            stream.wait_event(copy.event)

    def join(self) -> None:
        """Let the compute stream wait for all copies that were queued; nobody has to wait for one of them any more.

        A CUDA graph ends with all streams joined, and knows no events from before it.
        """
        current = torch.cuda.current_stream(self.device)
        for stream in (self.to_host, self.to_device) if self._has_queued else ():
            # A stream without copies of this era is none of a capture's, and cannot be waited for there.
            stream.wait_stream(current)
            current.wait_stream(stream)
        self.forget()

    def forget(self) -> None:
        """Copies that were queued so far are over, or never ran: nobody has to wait for one."""
        self._era += 1
        self._has_queued = False

    @property
    def capacity_bytes(self) -> int:
        """All pinned memory taken so far."""
        return self._slabs.capacity_bytes

    def expect(self, num_bytes: int) -> None:
        """So many bytes will be stored; they are pinned when the first of them come, unless there is room already."""
        self._slabs.expect(num_bytes)

    def give_up_unused(self) -> None:
        """Give back the pinned memory that nothing is stored in; copies out of it have ended then."""
        self.finish()
        self._slabs.give_up_unused()

    def store(self, storages: Sequence[torch.UntypedStorage]) -> tuple[_PinnedRegion, _PinnedTicket]:
        """Queue copies of storages down."""
        sizes = [storage.nbytes() for storage in storages]
        region = _PinnedRegion(self._guard, *self._slabs.take(sum(map(rounded, sizes))), sizes)
        self.to_host.wait_stream(torch.cuda.current_stream(self.device))
        self.wait_for(self.to_host, self._guard.last)
        with torch.cuda.stream(self.to_host):
            for part, storage in zip(region.parts, storages, strict=True):
                part.copy_(_bytes_of(storage), non_blocking=True)
            region.last_copy = self._queued(self.to_host)
        return region, _PinnedTicket(region.last_copy, self)

    def load(self, region: Any, storages: Sequence[torch.UntypedStorage]) -> _PinnedTicket:
        """Queue copies of a region into storages, whose memory is the compute stream's."""
        memory = [_bytes_of(storage) for storage in storages]
        self.to_device.wait_stream(torch.cuda.current_stream(self.device))
        self.wait_for(self.to_device, region.last_copy)
        with torch.cuda.stream(self.to_device):
            for tensor, part in zip(memory, region.parts, strict=True):
                tensor.copy_(part, non_blocking=True)
            region.last_load = self._queued(self.to_device)
        return _PinnedTicket(region.last_load, self)

    def _queued(self, stream: torch.cuda.Stream) -> _Copy:
        """What was given to a stream last."""
        self._has_queued = True
        self._num_queued += 1
        return _Copy(stream.record_event(), self._era, self._num_queued)

    def mirror(self, tensor: torch.Tensor) -> _PinnedMirror:
        """Make a place in pinned memory for a tensor without gaps."""
        # Kernels may write there at once, and a copy for a former owner of the room may still be under way.
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.to_host)
        current.wait_stream(self.to_device)
        num_bytes = tensor.numel() * tensor.element_size()
        return _PinnedMirror(self._guard, *self._slabs.take(num_bytes), tensor, self.device)

    def copy_down(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> _PinnedTicket:
        """Queue copies of tensors to their places, after all that the compute stream was given to do with either."""
        self._wait_before(self.to_host, pairs)
        with torch.cuda.stream(self.to_host):
            for tensor, mirror in pairs:
                mirror.host.copy_(_flat_bytes(tensor), non_blocking=True)
        return self._copied(self.to_host, pairs)

    def copy_up(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> _PinnedTicket:
        """Queue copies into tensors, whose memory is the compute stream's, from their places."""
        self._wait_before(self.to_device, pairs)
        with torch.cuda.stream(self.to_device):
            for tensor, mirror in pairs:
                _flat_bytes(tensor).copy_(mirror.host, non_blocking=True)
        ticket = self._copied(self.to_device, pairs)
        for _, mirror in pairs:
            mirror.last_load = ticket.copy
        return ticket

    def _wait_before(self, stream: torch.cuda.Stream, pairs: Sequence[tuple[torch.Tensor, Any]]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for copy in {mirror.last_copy for _, mirror in pairs}:
            self.wait_for(stream, copy)

    def _copied(self, stream: torch.cuda.Stream, pairs: Sequence[tuple[torch.Tensor, Any]]) -> _PinnedTicket:
        copy = self._queued(stream)
        for _, mirror in pairs:
            mirror.last_copy = copy
        return _PinnedTicket(copy, self)

    def finish(self) -> None:
        """Wait until all copies have ended."""
        self.to_host.synchronize()
        self.to_device.synchronize()

    def close(self) -> None:
        """Wait for copies under way; the memory is freed when nothing refers to it."""
        self.finish()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _host_memory(num_bytes: int, progress: Progress | None) -> tuple[torch.Tensor, bool]:
    """Host memory, registered with CUDA; where that is refused, ordinary memory, False and one warning."""
    while _still_registered:
        _unregister(*_still_registered.pop())
    check_host_has(num_bytes)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = _filled(pages, progress)
    address = memory.data_ptr()
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, num_bytes, 0)) != 0:
        with suppress(RuntimeError):  # CUDA keeps the refusal as its last error, which the next kernel would report
            torch.ones(1, device="cuda")
        warnings.warn(
            f"{format_bytes(num_bytes)} of host memory could not be pinned, so copies will not overlap with "
            "computation and steps will be slower than predicted; raise the limit of locked memory (ulimit -l)",
            LowtideWarning,
            stacklevel=2,
        )
        return memory, False
    weakref.finalize(memory.untyped_storage(), _unregister, address, pages).atexit = False
    return memory, True


def _unregister(address: int, pages: mmap.mmap) -> None:
    """Memory is about to be freed. While a CUDA graph is captured it stays: the call would end the capture."""
    if torch.cuda.is_current_stream_capturing():
        _still_registered.append((address, pages))
    else:
        torch.cuda.cudart().cudaHostUnregister(address)


def _filled(pages: mmap.mmap, progress: Progress | None) -> torch.Tensor:
    """Mapped memory as a tensor of bytes, with its pages made: torch fills with all of its threads."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system may have none
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    for start in range(0, len(pages), _BYTES_AT_ONCE):
        memory[start : start + _BYTES_AT_ONCE].zero_()
        if progress is not None:
            progress("pinning host memory", min(1.0, (start + _BYTES_AT_ONCE) / len(pages)))
    return memory
