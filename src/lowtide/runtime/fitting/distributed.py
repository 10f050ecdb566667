"""Processes that train one model together share one plan: rank 0's."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from lowtide.errors import PlanError


def is_first() -> bool:
    """Whether this process is rank 0."""
    return dist.get_rank() == 0


def share(values: dict[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """Send rank 0's plain data to every rank.

    Args:
        values: on rank 0 the data; None where it failed, so that the others do not wait forever.
        device: where the model is; with gloo the CPU is used.

    Raises:
        PlanError: on the other ranks, where rank 0 has none; rank 0 has an error of its own.
    """
    place = device if dist.get_backend() == "nccl" else torch.device("cpu")
    text = b"" if values is None else json.dumps(values).encode()
    length = torch.tensor([len(text)], dtype=torch.long, device=place)
    dist.broadcast(length, src=0)
    if not int(length.item()):
        if is_first():
            return {}
        raise PlanError("rank 0 could not make a plan; see its own error")
    data = torch.empty(int(length.item()), dtype=torch.uint8, device=place)
    if text:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    received: dict[str, Any] = json.loads(bytes(data.cpu().numpy().tobytes()))
    return received
