"""The lower tier of the CPU: a mapped file in a temporary folder, written and read by its own threads.

What is stored there is in the system's file cache and on the disk, no longer in the process: its pages are let go from
the mapping as soon as they are written, or read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from lowtide.errors import ExecutionError
from lowtide.runtime.meter import exclude
from lowtide.runtime.transfer.arena import Arena, Pieces, Room, rounded
from lowtide.units import format_bytes

_SMALLEST_PIECE_BYTES = 16 * 2**20


class _Piece:
    """One mapped file without a name: it is gone when the process is."""

    def __init__(self, folder: str | None, num_bytes: int) -> None:
        self.arena = Arena(num_bytes)
        try:
            with tempfile.TemporaryFile(dir=folder, prefix="lowtide-") as file:
                file.truncate(num_bytes)
                self.map = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise ExecutionError(
                f"cannot create a file of {format_bytes(num_bytes)} for offloaded values in "
                f"{folder or tempfile.gettempdir()}: {error.strerror or error}; set TMPDIR to a folder with room, or "
                "call fit without offloading (bandwidth=0)"
            ) from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def let_go(self, offset: int, num_bytes: int) -> None:
        """Take whole pages out of the process; the file keeps them."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, start, end - start)


class _FileRegion:
    """Room in a piece for some storages, and the copy that fills it."""

    __slots__ = ("num_bytes", "piece", "process", "room", "stored")

    def __init__(self, piece: _Piece, room: Room) -> None:
        self.piece = piece
        self.room = room
        self.num_bytes = room.num_bytes
        self.process = os.getpid()
        self.stored: Future[None] | None = None


class _FileTicket:
    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait for the copy; what went wrong in its thread is raised here."""
        self._future.result()

    def hand_back(self) -> None:
        """Nothing waits on the CPU."""


class _FileMirror:
    """A tensor in a mapped file; its storage keeps the room."""

    __slots__ = ("num_bytes", "offset", "piece", "process", "stored", "tensor")

    def __init__(self, piece: _Piece, room: Room, like: torch.Tensor) -> None:
        self.piece = piece
        self.offset = room.offset
        self.num_bytes = like.numel() * like.element_size()
        self.process = os.getpid()
        self.stored: Future[None] | None = None
        memory = torch.frombuffer(piece.map, dtype=torch.uint8, count=self.num_bytes, offset=room.offset)
        memory.untyped_storage().room = room  # type: ignore[attr-defined]  # given back when the last view of it dies
        # Not a view of the bytes, which it would hold: whoever counts the names of this memory finds one.
        storage = exclude(memory).untyped_storage()
        self.tensor = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, like.shape, like.stride())

    def fill(self, tensor: torch.Tensor) -> None:
        """Take over what a tensor of the CPU holds, whose strides are the same."""
        _fill_mirrors([(self, self.tensor.data_ptr(), tensor.data_ptr())])


class FileTier:
    """Storages of the CPU in files.

    Args:
        expected_bytes: made at the first use; more is added where it is not enough.
        limit_bytes: never use more than this; None: no limit.
        folder: where; None: the system's temporary folder.
    """

    smallest_bytes = 1

    def __init__(self, expected_bytes: int = 0, limit_bytes: int | None = None, folder: str | None = None) -> None:
        self._make_pieces = partial(Pieces, partial(_Piece, folder), expected_bytes, _SMALLEST_PIECE_BYTES, limit_bytes)
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self._pieces = self._make_pieces()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lowtide-to-file")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="lowtide-from-file")

    def _enter_process(self) -> None:
        """In a forked child, start over: threads do not survive a fork, and the files are the parent's."""
        if self._process != os.getpid():
            self._open()

    @property
    def capacity_bytes(self) -> int:
        """The bytes of all files made so far."""
        return self._pieces.capacity_bytes

    def expect(self, num_bytes: int) -> None:
        """So many bytes will be stored; the file is made when the first of them come."""
        self._pieces.expect(num_bytes)

    def give_up_unused(self) -> None:
        """Give back the files that nothing is stored in."""
        self._pieces.give_up_unused()

    def store(self, storages: Sequence[torch.UntypedStorage]) -> tuple[_FileRegion, _FileTicket]:
        """Queue a copy of storages to the file."""
        self._enter_process()
        region = _FileRegion(*self._pieces.take(sum(rounded(storage.nbytes()) for storage in storages)))
        region.stored = self._writer.submit(_write, region, storages)
        return region, _FileTicket(region.stored)

    def load(self, region: Any, storages: Sequence[torch.UntypedStorage]) -> _FileTicket:
        """Queue a copy of a region into storages."""
        self._enter_process()
        if region.process != self._process:
            raise ExecutionError(
                "backward needs activations that were offloaded before this process was forked; only the parent "
                "process can fetch them, so call the model in the process that calls backward"
            )
        return _FileTicket(self._reader.submit(_read, region, storages))

    def mirror(self, tensor: torch.Tensor) -> _FileMirror:
        """Make a place in a file for a tensor without gaps."""
        self._enter_process()
        return _FileMirror(*self._pieces.take(tensor.numel() * tensor.element_size()), tensor)

    def copy_down(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> _FileTicket:
        """Queue copies of tensors to their places."""
        self._enter_process()
        # Addresses and no tensors: the thread would keep them for a moment longer than anybody counts on.
        copies = [(mirror, mirror.tensor.data_ptr(), tensor.data_ptr()) for tensor, mirror in pairs]
        future = self._writer.submit(_fill_mirrors, copies)
        for _, mirror in pairs:
            mirror.stored = future
        return _FileTicket(future)

    def copy_up(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> _FileTicket:
        """Queue copies into tensors from their places."""
        self._enter_process()
        if any(mirror.process != self._process for _, mirror in pairs):
            raise ExecutionError(
                "this process was forked while weights were on the host, where only the parent process can fetch them; "
                "call plan.detach() before forking, or train in the parent"
            )
        copies = [(mirror, mirror.tensor.data_ptr(), tensor.data_ptr()) for tensor, mirror in pairs]
        return _FileTicket(self._reader.submit(_read_mirrors, copies))

    def finish(self) -> None:
        """Whoever waited for a copy has waited until its end."""

    def join(self) -> None:
        """Wait until all copies have ended."""
        self.finish()

    def forget(self) -> None:
        """Copies of a file are never captured."""

    def close(self) -> None:
        """End the threads; what is stored can no longer be read."""
        self._writer.shutdown(wait=True)
        self._reader.shutdown(wait=True)


def _write(region: _FileRegion, storages: Sequence[torch.UntypedStorage]) -> None:
    address = region.piece.address + region.room.offset
    for storage in storages:
        # memmove gives other threads the interpreter while it copies
        ctypes.memmove(address, storage.data_ptr(), storage.nbytes())
        address += rounded(storage.nbytes())
    region.piece.let_go(region.room.offset, region.num_bytes)


def _read(region: _FileRegion, storages: Sequence[torch.UntypedStorage]) -> None:
    if region.stored is not None:
        region.stored.result()
    address = region.piece.address + region.room.offset
    for storage in storages:
        ctypes.memmove(storage.data_ptr(), address, storage.nbytes())
        address += rounded(storage.nbytes())
    region.piece.let_go(region.room.offset, region.num_bytes)


def _fill_mirrors(copies: Sequence[tuple[_FileMirror, int, int]]) -> None:
    # Places by their addresses as well: `share_memory_()` moves a tensor's memory, and there they are.
    for mirror, place, address in copies:
        ctypes.memmove(place, address, mirror.num_bytes)
        mirror.piece.let_go(mirror.offset, mirror.num_bytes)


def _read_mirrors(copies: Sequence[tuple[_FileMirror, int, int]]) -> None:
    for mirror, place, address in copies:
        if mirror.stored is not None:
            mirror.stored.result()
        ctypes.memmove(address, place, mirror.num_bytes)
        mirror.piece.let_go(mirror.offset, mirror.num_bytes)
