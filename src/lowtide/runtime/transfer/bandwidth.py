"""Measures the link between a device and its lower tier, once per device, in both directions."""

from __future__ import annotations

import time

import torch

from lowtide.runtime.transfer.file_tier import FileTier
from lowtide.runtime.transfer.pinned_tier import PinnedTier

# Large enough that the start of a copy does not count, small enough to be copied in a hundredth of a second.
_CUDA_BYTES = 256 * 2**20
_CPU_BYTES = 32 * 2**20
_NUM_COPIES = 5

_measured: dict[tuple[str, bool], int] = {}


def measured_bandwidth(device: torch.device, *, both_ways: bool = False) -> int:
    """Bytes per second each way, the slower direction's median; the same answer each time in one process.

    Args:
        device: the device.
        both_ways: while the other direction is busy, too; False: each direction alone.
    """
    key = (str(device), both_ways)
    if key not in _measured:
        _measured[key] = _measure(device, both_ways=both_ways)
    return _measured[key]


def _measure(device: torch.device, *, both_ways: bool) -> int:
    num_bytes = _CUDA_BYTES if device.type == "cuda" else _CPU_BYTES
    tier = PinnedTier(device, 2 * num_bytes) if device.type == "cuda" else FileTier(2 * num_bytes)
    storage = torch.zeros(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
    seconds: list[float] = []
    region, ticket = tier.store([storage])
    ticket.wait()
    for _ in range(_NUM_COPIES):
        begin = _now(device)
        other, down = tier.store([storage])
        if not both_ways:
            down.wait()
            middle = _now(device)
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)  # taking it is a part of fetching
        up = tier.load(region, [memory.untyped_storage()])
        if both_ways:
            down.wait()
        up.wait()
        end = _now(device)
        seconds.append(end - begin if both_ways else max(middle - begin, end - middle))
        region = other
    tier.close()
    return int(num_bytes / sorted(seconds)[_NUM_COPIES // 2])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
