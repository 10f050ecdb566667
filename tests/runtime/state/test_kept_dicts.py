"""Dicts that a forward makes anew and a module keeps, with tensors and their graphs: losses by name, features."""

from __future__ import annotations

import gc
from collections import OrderedDict

import pytest
import torch
from tests.runtime.schedules import recomputing
from tests.runtime.state.test_attributes import stack
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide.runtime.execute.executor import Step
from lowtide.runtime.meter import Meter
from lowtide.runtime.state.environment import Environment

SHAPE = (64, 32)


class Reports(nn.Module):
    """Keeps its hidden tensor in a dict, by itself or in a list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SHAPE[1], 64), nn.Linear(64, SHAPE[1])
        self.kind = kind

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        self.kept = {"hidden": [hidden] if self.kind == "list" else hidden, "factor": 2.0}
        return x + self.kept["factor"] * self.down(hidden)


def live_bytes() -> int:
    gc.collect()
    with Meter("cpu") as meter:
        return meter.live_bytes


@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_dicts_that_a_forward_makes_anew_are_let_go(kind):
    inputs = batches(SHAPE, 3)
    expected = train(stack(lambda: Reports(kind), 5), inputs)
    model = stack(lambda: Reports(kind), 5)
    steps_before = sum(type(each) is Step for each in gc.get_objects())
    start_bytes = live_bytes()
    lowtide.measure(model, inputs[0])
    assert live_bytes() == start_bytes
    with lowtide.attach(model, recomputing(5)) as plan:
        assert_equal(train(model, inputs), expected)
        assert plan.stats().recomputed_per_step > 0
        for block in model:
            del block.kept
            block.zero_grad()
        gc.collect()
        assert sum(type(each) is Step for each in gc.get_objects()) == steps_before


@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_after_backward_a_module_keeps_the_dict_of_its_own_forward(kind):
    model, (x, *others) = stack(lambda: Reports(kind), 5), batches(SHAPE, 4)
    with lowtide.attach(model, recomputing(5)):
        for each in others:
            model(each).sum().backward()
        output = model(x)
        kept = [block.kept for block in model]
        output.sum().backward()
        assert all(block.kept is found for block, found in zip(model, kept, strict=True))


class Sharing(nn.Module):
    """Counts its calls in a dict that all blocks have, and adds to a tensor there."""

    def __init__(self, settings: dict) -> None:
        super().__init__()
        self.inner, self.settings = nn.Linear(SHAPE[1], SHAPE[1]), settings

    def forward(self, x):
        self.settings["num_calls"] += 1
        self.settings["total"].add_(x.detach().mean())
        return torch.tanh(self.inner(x)) * (self.settings["num_calls"] + self.settings["total"])


def test_a_dict_that_modules_have_in_common_is_looked_through_once():
    def make():
        settings = {"num_calls": 0, "total": torch.zeros(()), **{f"setting{k}": k for k in range(50)}}
        return stack(lambda: Sharing(settings), 5)

    inputs = batches(SHAPE, 3)
    model, twin = make(), make()
    mark = Environment(list(model.named_modules())).mark()
    assert [content.name for content in mark.contents] == ["0.settings.total"]
    assert len(mark.copies) == 1
    with lowtide.attach(model, recomputing(5)) as plan:
        assert_equal(train(model, inputs), train(twin, inputs))
        assert plan.stats().recomputed_per_step > 0
    assert model[0].settings == twin[0].settings


class Sealed(OrderedDict):
    """As the results of transformers are."""

    def pop(self, *args):
        raise TypeError("nothing can be taken out")


class Sealing(Sharing):
    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        self.result = Sealed(hidden=hidden.detach())
        return x + hidden


def test_a_dict_that_lets_nothing_be_taken_out():
    inputs = batches(SHAPE, 3)
    model, twin = (stack(lambda: Sealing({}), 5) for _ in range(2))
    with lowtide.attach(model, recomputing(5)):
        assert_equal(train(model, inputs), train(twin, inputs))
    assert all(list(block.result) == ["hidden"] for block in model)
