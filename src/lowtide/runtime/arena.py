"""Room handed out from one piece of memory: first fit, neighbours joined again when they are given back."""

from __future__ import annotations

import threading
import weakref

# Every region starts at a multiple of this: the alignment of the CUDA allocator, enough for any dtype.
_ALIGNMENT_BYTES = 512


def rounded(num_bytes: int) -> int:
    """The room that so many bytes take."""
    return max(1, -(-num_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES


class Arena:
    """Offsets within a piece of memory of `capacity_bytes`; any thread may give back."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._free: list[tuple[int, int]] = [(0, capacity_bytes)] if capacity_bytes else []  # offset, bytes; sorted
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> int | None:
        """The offset of free room for so many bytes, None where there is none."""
        wanted = rounded(num_bytes)
        with self._lock:
            for index, (offset, size) in enumerate(self._free):
                if size >= wanted:
                    rest = [(offset + wanted, size - wanted)] if size > wanted else []
                    self._free[index : index + 1] = rest
                    return offset
        return None

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Room taken before is free again."""
        with self._lock:
            self._free.append((offset, rounded(num_bytes)))
            self._free.sort()
            joined: list[tuple[int, int]] = []
            for start, size in self._free:
                if joined and joined[-1][0] + joined[-1][1] == start:
                    joined[-1] = (joined[-1][0], joined[-1][1] + size)
                else:
                    joined.append((start, size))
            self._free = joined

    @property
    def free_bytes(self) -> int:
        """All room that is free, in whatever pieces."""
        with self._lock:
            return sum(size for _, size in self._free)


class Room:
    """A part of an arena, given back when this object dies."""

    __slots__ = ("__weakref__", "_finalizer", "num_bytes", "offset")

    def __init__(self, arena: Arena, offset: int, num_bytes: int) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self._finalizer = weakref.finalize(self, arena.give_back, offset, num_bytes)
        self._finalizer.atexit = False
