"""Allocates from pieces of memory: first fit; free neighbours are merged."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from lowtide.errors import ExecutionError
from lowtide.units import format_bytes

# Every region starts at a multiple of this: the alignment of the CUDA allocator, enough for any dtype.
_ALIGNMENT_BYTES = 512


def rounded(num_bytes: int) -> int:
    """The room that so many bytes take."""
    return max(1, -(-num_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES


class Arena:
    """Offsets within a piece of memory of `capacity_bytes`; any thread may take and give back.

    Giving back waits for nobody: room may be given back by the garbage collector, at any place of any thread, also of
    one that is taking some.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._free: list[tuple[int, int]] = [(0, capacity_bytes)] if capacity_bytes else []  # offset, bytes; sorted
        self._returned = deque[tuple[int, int]]()  # free, too, and not among the others yet
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> int | None:
        """The offset of free room for so many bytes, None where there is none."""
        wanted = rounded(num_bytes)
        with self._lock:
            self._join_returned()
            for index, (offset, size) in enumerate(self._free):
                if size >= wanted:
                    rest = [(offset + wanted, size - wanted)] if size > wanted else []
                    self._free[index : index + 1] = rest
                    return offset
        return None

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Room taken before is free again."""
        self._returned.append((offset, rounded(num_bytes)))

    def free_rooms(self) -> list[tuple[int, int]]:
        """Where free room begins, and how many bytes it has; neighbours are one."""
        with self._lock:
            self._join_returned()
            return list(self._free)

    @property
    def free_bytes(self) -> int:
        """All room that is free, in whatever pieces."""
        return sum(size for _, size in self.free_rooms())

    def _join_returned(self) -> None:
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort()
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._free = joined


class Room:
    """A part of an arena, given back when this object dies."""

    __slots__ = ("__weakref__", "_finalizer", "num_bytes", "offset")

    def __init__(self, arena: Arena, offset: int, num_bytes: int) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self._finalizer = weakref.finalize(self, arena.give_back, offset, num_bytes)
        self._finalizer.atexit = False


class Piece(Protocol):
    """A piece of memory."""

    arena: Arena
    """Which parts of it are free."""


P = TypeVar("P", bound=Piece)


class Pieces(Generic[P]):
    """Room in pieces of host memory, which are made as they are needed; any thread may take.

    Args:
        make: makes a piece of so many bytes.
        expected_bytes: how much will be taken, see `expect`; 0: nobody knows.
        smallest_bytes: no other piece is smaller, so that small values do not each get their own.
        limit_bytes: never have more than this; None: no limit.
    """

    def __init__(
        self, make: Callable[[int], P], expected_bytes: int, smallest_bytes: int, limit_bytes: int | None
    ) -> None:
        self._make = make
        self._expected_bytes = expected_bytes
        self._smallest_bytes = smallest_bytes
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self.made: list[P] = []

    @property
    def capacity_bytes(self) -> int:
        """The bytes of all pieces made so far."""
        return sum(piece.arena.capacity_bytes for piece in self.made)

    def expect(self, num_bytes: int) -> None:
        """So many bytes will be taken from now on: have them in one piece when the first of them are.

        A piece that has them already serves again; pieces that are too small and that nobody uses are given up.
        """
        self._expected_bytes = num_bytes

    def take(self, num_bytes: int) -> tuple[P, Room]:
        """Room for so many bytes, and the piece that it is in.

        Raises:
            ExecutionError: where the limit leaves none.
        """
        with self._lock:
            self._make_expected()
            for piece in self.made:
                offset = piece.arena.take(num_bytes)
                if offset is not None:
                    return piece, Room(piece.arena, offset, num_bytes)
            piece = self._add(num_bytes, max(num_bytes, self._smallest_bytes))
            offset = piece.arena.take(num_bytes)
            assert offset is not None
            return piece, Room(piece.arena, offset, num_bytes)

    def _make_expected(self) -> None:
        wanted, self._expected_bytes = self._expected_bytes, 0
        if not wanted or any(size >= wanted for piece in self.made for _, size in piece.arena.free_rooms()):
            return
        self.give_up_unused()
        if self._limit_bytes is None or self.capacity_bytes < self._limit_bytes:  # else what is free has to do
            self._add(0, wanted)

    def give_up_unused(self) -> None:
        """Have no pieces any more that nobody uses."""
        self.made = [piece for piece in self.made if piece.arena.free_bytes < piece.arena.capacity_bytes]

    def _add(self, num_bytes: int, wanted: int) -> P:
        if self._limit_bytes is not None:
            left = self._limit_bytes - self.capacity_bytes
            if left < num_bytes:
                raise ExecutionError(
                    f"host_memory_budget {format_bytes(self._limit_bytes)} has no room for {format_bytes(num_bytes)} "
                    "more; raise it, or call fit again for these shapes"
                )
            wanted = min(wanted, left)
        self.made.append(self._make(wanted))
        return self.made[-1]
