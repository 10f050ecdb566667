"""Where random numbers decide which layers run, planning looks for a forward that calls as many as any."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.training import seed_all
from torch import nn

from lowtide.runtime.capture.watch import draw_the_fullest
from lowtide.runtime.model.sample import Sample

DECISIONS: dict[str, Callable[[torch.Tensor], float]] = {
    "random": lambda x: random.random(),
    "numpy": lambda x: numpy.random.rand(),
    "item": lambda x: torch.rand(()).item(),
    "bool": lambda x: 0.9 if torch.rand(()) > 0.6 else 0.1,
    "tolist": lambda x: torch.rand(1).tolist()[0],
    "numpy()": lambda x: float(torch.rand(1).numpy()[0]),
    "asarray": lambda x: float(numpy.asarray(torch.rand(1))[0]),
    "how many": lambda x: 0.9 if len((torch.rand(1) > 0.6).nonzero()) else 0.1,
    "dropout": lambda x: 0.9 if F.dropout(x, 0.5)[0, 0] != 0 else 0.1,
}


class LeavesOut(nn.Module):
    """Calls two of its layers, or one, as something decides."""

    def __init__(self, decide: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decide = decide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.layers[: 2 if self.decide(x) > 0.6 else 1]
        CALLS.append(len(used))
        for layer in used:
            x = layer(x)
        return x


CALLS: list[int] = []


@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)
def test_the_next_forward_leaves_out_as_little_as_possible(decide):
    model, x = LeavesOut(decide), torch.randn(8, 4)
    for seed in range(3):
        CALLS.clear()
        seed_all(seed)
        draw_the_fullest(model, Sample.of(x))
        assert len(CALLS) > 1
        model(x)
        assert CALLS[-1] == 2


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_numbers_that_stay_in_tensors_are_drawn_once(p):
    model = LeavesOut(lambda x: float(F.dropout(x, p).dim()))
    CALLS.clear()
    draw_the_fullest(model, Sample.of(torch.randn(8, 4)))
    assert CALLS == [2]
