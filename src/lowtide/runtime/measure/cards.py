"""GPUs for estimates, with the figures their vendors publish.

Figures are of the datasheets: memory, memory bandwidth, dense peak rates (without sparsity) of the matrix units for
16-bit numbers and of the arithmetic units for 32-bit ones, and one direction of the link to the host (PCIe: 80 % of the
nominal rate, which is what pinned copies reach).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.errors import CaptureError, shown

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU.

    Args:
        name: as people call it.
        memory_bytes: its memory.
        bandwidth_bytes_per_second: of that memory.
        half_flops: dense operations per second on 16-bit numbers.
        single_flops: on 32-bit numbers, without TF32.
        link_bytes_per_second: to host memory, each way.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    half_flops: float
    single_flops: float
    link_bytes_per_second: int

    def flops(self, dtype: torch.dtype) -> float:
        """Operations per second on numbers of a type."""
        return self.half_flops if dtype in (torch.float16, torch.bfloat16) else self.single_flops


def _card(name: str, gib: int, terabytes: float, half: float, single: float, link: int) -> Card:
    return Card(name, gib * _GIB, terabytes * 1e12, half * 1e12, single * 1e12, link * 10**9)


_PCIE3, _PCIE4, _PCIE5 = 12, 25, 50  # GB/s, 16 lanes

CARDS = {
    card.name: card
    for card in (
        _card("t4", 16, 0.320, 65, 8.1, _PCIE3),
        _card("v100", 32, 0.900, 125, 15.7, _PCIE3),
        _card("3090", 24, 0.936, 71, 35.6, _PCIE4),
        _card("4090", 24, 1.008, 165, 82.6, _PCIE4),
        _card("5090", 32, 1.792, 209, 104.8, _PCIE5),
        _card("a10", 24, 0.600, 125, 31.2, _PCIE4),
        _card("l4", 24, 0.300, 121, 30.3, _PCIE4),
        _card("l40s", 48, 0.864, 362, 91.6, _PCIE4),
        _card("a6000", 48, 0.768, 155, 38.7, _PCIE4),
        _card("a100", 80, 2.039, 312, 19.5, _PCIE4),
        _card("h100", 80, 3.350, 989, 67.0, _PCIE5),
        _card("h200", 141, 4.800, 989, 67.0, _PCIE5),
    )
}


def find_card(name: str) -> Card:
    """Find a card by its name, in upper or lower case.

    Raises:
        CaptureError: where it is not in the list, with the list.

    Example:
        >>> find_card("A100").memory_bytes // 2**30
        80
    """
    card = CARDS.get(name.lower()) if isinstance(name, str) else None
    if card is None:
        raise CaptureError(f"unknown device {shown(name)}; expected one of {', '.join(map(repr, CARDS))}")
    return card
