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

_measured: dict[str, int] = {}


def measured_bandwidth(device: torch.device) -> int:
    """Bytes per second each way, the slower direction's median; the same answer each time in one process."""
    key = str(device)
    if key not in _measured:
        _measured[key] = _measure(device)
    return _measured[key]


def _measure(device: torch.device) -> int:
    num_bytes = _CUDA_BYTES if device.type == "cuda" else _CPU_BYTES
    tier = PinnedTier(device, num_bytes) if device.type == "cuda" else FileTier(num_bytes)
    storage = torch.zeros(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
    down, up = [], []
    region, ticket = tier.store([storage])
    ticket.wait()
    for _ in range(_NUM_COPIES):
        begin = _now(device)
        region, ticket = tier.store([storage])
        ticket.wait()
        down.append(_now(device) - begin)
        begin = _now(device)
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)  # taking it is a part of fetching
        tier.load(region, [memory.untyped_storage()]).wait()
        up.append(_now(device) - begin)
        del region
    tier.close()
    slower = max(sorted(down)[_NUM_COPIES // 2], sorted(up)[_NUM_COPIES // 2])
    return int(num_bytes / slower)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
