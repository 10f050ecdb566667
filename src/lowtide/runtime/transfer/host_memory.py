"""How much memory the host has to give: what is free, and what the system keeps of files only until it is needed."""

from __future__ import annotations

import os
from pathlib import Path

from lowtide.errors import ExecutionError
from lowtide.units import format_bytes

_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_host_bytes(system: Path = _SYSTEM, group: Path = _GROUP) -> int:
    """What this process can take: of the system, and of its container where that has a limit.

    Args:
        system: Linux's table of memory.
        group: the folder of the container's figures.
    """
    return min(_of_system(system), _of_group(group))


def check_host_has(num_bytes: int) -> None:
    """Refuse to take more than there is: a system that promises it ends the process when it is used.

    Raises:
        ExecutionError: with what is available.
    """
    available = available_host_bytes()
    if num_bytes > available:
        raise ExecutionError(
            f"{format_bytes(num_bytes)} of host memory are needed for offloaded values, and {format_bytes(available)} "
            "are available; free some, set host_memory_budget= and raise memory_budget, or call fit without offloading "
            "(bandwidth=0)"
        )


def _of_system(path: Path) -> int:
    """Without swapping; a checkpoint that was just read, and is still in the cache of files, can go from there."""
    try:
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group(folder: Path) -> int:
    try:
        limit = int((folder / "memory.max").read_text())  # "max" where there is none
        used = int((folder / "memory.current").read_text())
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(fields["inactive_file"]))
    except (OSError, KeyError, ValueError):
        return 2**62
