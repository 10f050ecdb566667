"""How much memory there is on the device and on the lower tier."""

from __future__ import annotations

import shutil
import tempfile

import torch

from lowtide.runtime.transfer.host_memory import available_host_bytes

# Of what is free on the device, this share stays free: for fragmentation and for what others take meanwhile.
_DEVICE_RESERVE = 0.1

# Of the host's free memory, or of the disk's room, at most this share is used without being told a budget.
_HOST_SHARE = 0.8


def device_budget(device: torch.device) -> int:
    """What is free plus what this process already uses, minus a reserve, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + cached) * (1 - _DEVICE_RESERVE)) + torch.cuda.memory_allocated(device)
    return int(available_host_bytes() * (1 - _DEVICE_RESERVE))


def host_budget(device: torch.device) -> int:
    """The default limit of the lower tier: host memory for CUDA, the temporary folder for the CPU."""
    if device.type == "cuda":
        return int(available_host_bytes() * _HOST_SHARE)
    return int(shutil.disk_usage(tempfile.gettempdir()).free * _HOST_SHARE)
