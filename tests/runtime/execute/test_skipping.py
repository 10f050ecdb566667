"""Models that leave some of their layers out at random: what is freed, and what is refused. That training is equal with
them: `tests/runtime/test_awkward.py`.
"""

from __future__ import annotations

import pytest
import torch
from tests.runtime.awkward.paths import WIDTH, Skipping, whole
from tests.runtime.schedules import recomputing
from torch import nn

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.runtime.plan.attach import split_for


def test_nothing_is_left_over_after_steps_that_leave_stages_out():
    x = torch.randn(64, WIDTH)
    torch.manual_seed(0)
    complete, model = whole(), Skipping("skips", share=0.5)
    chain = lowtide.measure(complete, x)
    live = []
    with lowtide.attach(model, recomputing(chain.num_stages), split=split_for(complete, chain)), Meter("cpu") as meter:
        for _ in range(20):
            model(x).square().mean().backward()
            model.zero_grad()
            live.append(meter.live_bytes)
    assert max(live[2:]) <= live[1]


def test_another_order_is_refused():
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.turned = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), False

        def forward(self, x):
            for layer in reversed(self.layers) if self.turned else self.layers:
                x = torch.tanh(layer(x))
            return x

    model, x = Either(), torch.ones(4, WIDTH)
    split = split_for(model, lowtide.measure(model, x))
    with lowtide.attach(model, recomputing(split.num_stages), split=split):
        model.turned = True
        with pytest.raises(lowtide.ExecutionError, match="different code path"):
            model(x)
        model.turned = False
        model(x).sum().backward()
