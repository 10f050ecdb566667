"""Models whose own code uses the transforms of torch.func."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.schedules import offloading, random_schedule, recomputing
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide.runtime.plan.attach import split_for

WIDTH = 8


class Mapped(nn.Module):
    """Calls a submodule for each sample by itself, or along a direction."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x):
        if self.way == "jvp":
            return torch.func.jvp(lambda each: torch.tanh(self.linear(each)), (x,), (x,))[1]
        return torch.func.vmap(lambda each: torch.tanh(self.linear(each)) * each.sum())(x)


class Masked(nn.Module):
    """Makes a mask by vmap between its submodules: no gradient flows through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        mask = torch.vmap(lambda k: (torch.arange(WIDTH) >= k).float())(torch.arange(WIDTH))
        for layer in self.layers:
            x = torch.tanh(layer(x) @ mask)
        return x


class Between(nn.Module):
    """Differentiates through vmap between its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.func.vmap(lambda each: torch.tanh(each) * each.sum())(layer(x))
        return x


def mapped(way: str) -> nn.Module:
    return nn.Sequential(*(Mapped(way) for _ in range(4)))


def with_a_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Between(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


@pytest.mark.parametrize(
    "make",
    [lambda: mapped("vmap"), lambda: mapped("jvp"), Masked, with_a_block],
    ids=["vmap", "jvp", "mask", "between"],
)
def test_numbers_are_equal(make):
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    inputs = batches((32, WIDTH), 3)
    expected = train(made(), inputs)
    model = made()
    split = split_for(model, lowtide.measure(model, inputs[0]))
    n = split.num_stages
    for schedule in (recomputing(n), offloading(n), random_schedule(n, 1, moves=0.4)) if n > 2 else (recomputing(2),):
        model = made()
        with lowtide.attach(model, schedule, split=split):
            assert_equal(train(model, inputs), expected)


def test_a_model_whose_own_code_differentiates_through_a_transform_is_refused_in_one_line():
    with pytest.raises(lowtide.CaptureError, match=r"transform of torch.func .* inside a submodule"):
        lowtide.measure(Between(), torch.ones(4, WIDTH))
