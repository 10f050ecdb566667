"""What is told, freed and held of attributes and buffers that a forward changes; that training is equal with them:
`tests/runtime/test_awkward.py`.
"""

from __future__ import annotations

import gc

import pytest
import torch
from tests.runtime.awkward.attributes import Unregistered
from tests.runtime.awkward.buffers import SHAPE, CountsSteps
from tests.runtime.awkward.table import stack
from tests.runtime.schedules import recomputing
from tests.runtime.training import batches
from torch import nn

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.execute.executor import RunningStep
from lowtide.runtime.meter import Meter, no_collection


def fitted(model: nn.Module, x: torch.Tensor) -> lowtide.Plan:
    """Under a budget with which stages run again."""
    options = {"bandwidth": 0, "optimizer": "sgd"}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, **options)
    return lowtide.fit(model, x, memory_budget=caught.value.minimum_bytes + 2 * x.nbytes, **options)


class Shifted(CountsSteps):
    """Reads the buffer between its blocks, after each of them, and does not change it."""

    def forward(self, x):
        for block in self.body:
            x = block(x) * (1 + self.num_steps)
        return x


def test_a_buffer_that_is_read_between_units_must_not_change_before_backward():
    x = batches((256, SHAPE[1]), 1)[0]
    model = Shifted(reads=True)
    with fitted(model, x) as plan:
        loss = model(x).sum()
        model.num_steps += 1
        with pytest.raises(lowtide.ExecutionError, match="buffer 'num_steps' was changed in place"):
            loss.backward()
        model.num_steps -= 1
        model.zero_grad()
        model(x).sum().backward()
        assert plan.stats().recomputed_per_step > 0


def test_a_tensor_that_the_training_loop_changes_in_place_before_backward_is_told():
    model, x = stack(lambda: Unregistered("averaged"))(), batches((8, 16), 1)[0]
    with lowtide.attach(model, recomputing(len(model))):
        for block in model:
            block.average = torch.zeros(16)
        loss, average = model(x).sum(), model[1].average
        average += 1  # which the stage has made, and does not read
        loss.backward()
        loss = model(x).sum()
        average += 1  # which it has read
        with pytest.raises(lowtide.ExecutionError, match=r"'1\.average' was changed in place"):
            loss.backward()


class Summing(nn.Module):
    """Sums up a penalty in an attribute while it runs: stages find a tensor with the graph of their own step there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.penalty = stack(lambda: nn.Linear(16, 16), 4)(), torch.zeros(())

    def forward(self, x):
        self.penalty = torch.zeros(())
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.penalty = self.penalty + x.square().mean()
        return x


def test_steps_that_are_dropped_are_let_go_where_attributes_have_graphs():
    def num_steps() -> int:
        return sum(type(each) is RunningStep for each in gc.get_objects())

    model, inputs = Summing(), batches((8, 16), 4)
    split = capture(model, inputs[0])
    gc.collect()
    before = num_steps()
    with lowtide.attach(model, recomputing(split.num_stages), split=split, strict=True), no_collection():
        for x in inputs:
            model(x)
        assert num_steps() > before
        model.penalty = torch.zeros(())
        assert num_steps() == before


class Remembering(nn.Module):
    """Puts another tensor in its buffer's place at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("memory", torch.zeros(1000, 16))

    def forward(self, x):
        result = torch.tanh(self.linear(x)) * (1 + self.memory.mean(0))
        self.memory = result.detach().mean(0).expand(1000, 16).clone()
        return result


def test_a_buffer_that_is_replaced_is_held_once_beside_the_new_one():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Remembering() for _ in range(4))), torch.ones(2, 16)
    with lowtide.attach(model, recomputing(4)), Meter("cpu") as meter:
        for _ in range(3):
            before_bytes = meter.live_bytes
            loss = model(x).sum()
            more_bytes = meter.live_bytes - before_bytes
            loss.backward()
            del loss
    assert more_bytes / model[0].memory.nbytes == pytest.approx(3, abs=0.1)  # of the three blocks that run again
