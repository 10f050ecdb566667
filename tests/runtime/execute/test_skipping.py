"""Models that leave some of their layers out at random (LayerDrop, stochastic depth, early exit)."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.schedules import offloading, random_schedule, recomputing
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.runtime.plan.attach import split_for

WIDTH = 8
NUM_STEPS = 8


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Skipping(nn.Module):
    """Leaves each block out with a probability; `way` "ends": from the first one on all of them, and the head."""

    def __init__(self, way: str, share: float, norm: type[nn.Module]) -> None:
        super().__init__()
        self.way, self.share = way, share
        self.blocks, self.head = nn.ModuleList(Block(norm) for _ in range(6)), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            if torch.rand([]) >= self.share:
                x = block(x)
            elif self.way == "ends":
                return x[:, :2] * x.mean()
        return self.head(x)


def made(way: str, share: float = 0.4, norm: type[nn.Module] = nn.BatchNorm1d) -> Skipping:
    torch.manual_seed(0)
    return Skipping(way, share, norm)


@pytest.mark.parametrize("way", ["skips", "ends"])
def test_numbers_are_equal(way):
    inputs = batches((16, WIDTH), NUM_STEPS)
    expected = train(made(way), inputs)
    whole = made(way, share=0.0)
    split = split_for(whole, lowtide.measure(whole, inputs[0]))
    n = split.num_stages
    schedules = [recomputing(n), offloading(n), *(random_schedule(n, seed, moves=0.4) for seed in range(4))]
    for schedule in schedules:
        model = made(way)
        with lowtide.attach(model, schedule, split=split):
            assert_equal(train(model, inputs), expected)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_numbers_are_equal_where_the_sample_leaves_some_out_too(share):
    inputs = batches((16, WIDTH), NUM_STEPS)
    expected = train(made("skips", share, nn.LayerNorm), inputs)
    model = made("skips", share, nn.LayerNorm)
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        lowtide.fit(model, inputs[0], memory_budget=1)
    with lowtide.fit(model, inputs[0], memory_budget=refused.value.minimum_bytes) as plan:
        assert_equal(train(model, inputs), expected)
    assert plan.stats().recomputed_per_step > 0


def test_nothing_is_left_over_after_steps_that_leave_stages_out():
    x = torch.randn(64, WIDTH)
    whole = made("skips", share=0.0)
    chain = lowtide.measure(whole, x)
    model = made("skips", share=0.5)
    live = []
    with lowtide.attach(model, recomputing(chain.num_stages), split=split_for(whole, chain)), Meter("cpu") as meter:
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
        with pytest.raises(lowtide.ExecutionError, match="another way"):
            model(x)
        model.turned = False
        model(x).sum().backward()
