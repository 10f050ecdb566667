"""Attributes and statistics that a repeated forward must find as the first one did."""

from __future__ import annotations

import gc
from typing import Any

import numpy
import pytest
import torch
from tests.runtime.schedules import random_schedule, recomputing
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.execute.executor import Step
from lowtide.runtime.meter import Meter, no_collection

SHAPE = (512, 64)


class Annealed(nn.Module):
    """A factor that changes for the first time long after planning."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SHAPE[1], 128), nn.Linear(128, SHAPE[1])
        self.period, self.num_calls, self.factor = period, 0, 1.0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls % self.period == 0:
            self.factor *= 0.5
        return x + self.down(torch.tanh(self.up(x) / self.factor))


class Centre:
    def shifted(self, x, norm):
        return x + norm.running_mean


class ReadsStatistics(nn.Module):
    """Reads BatchNorm's statistics in ways that do not name them in its own code."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(SHAPE[1], 128), nn.BatchNorm1d(128), nn.Linear(128, SHAPE[1])
        self.way, self.helper = way, Centre()

    def forward(self, x):
        y = self.norm(self.up(x))
        if self.way == "helper":
            y = self.helper.shifted(y, self.norm)
        elif self.way == "named_buffers":
            y = y + dict(self.norm.named_buffers())["running_mean"]
        else:
            y = y + getattr(self.norm, "running_" + "mean")
        return x + self.down(torch.tanh(y))


def stack(make, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(depth)))


def fitted(model: nn.Module, x: torch.Tensor) -> lowtide.Plan:
    """Under a budget with which stages run again."""
    options = {"bandwidth": 0, "optimizer": "sgd"}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, **options)
    return lowtide.fit(model, x, memory_budget=int(1.1 * caught.value.minimum_bytes), **options)


def test_an_attribute_that_counts_from_the_first_call_on_is_measured_as_it_is_found():
    inputs = batches(SHAPE, 3)
    model, plain = stack(lambda: Annealed(1)), stack(lambda: Annealed(1))  # each call computes something else
    with fitted(model, inputs[0]) as plan:
        assert_equal(train(model, inputs), train(plain, inputs))
        assert plan.stats().recomputed_per_step > 0
    assert [block.num_calls for block in model] == [block.num_calls for block in plain] == [3] * 6


def test_an_attribute_that_changes_in_a_later_step_is_put_back():
    inputs = batches(SHAPE, 50)
    model, plain = stack(lambda: Annealed(48)), stack(lambda: Annealed(48))
    with fitted(model, inputs[0]) as plan:
        assert_equal(train(model, inputs), train(plain, inputs))
        assert plan.stats().recomputed_per_step > 0
    assert [block.factor for block in model] == [block.factor for block in plain] == [0.5] * 6


def test_an_attribute_that_is_changed_between_two_forwards_is_as_each_found_it():
    x = batches(SHAPE, 1)[0]

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        results = []
        for factor in (2.0, 0.5):
            for block in model:
                block.factor = factor
            results.append(model(x))
        (results[0] * results[1]).mean().backward()
        assert all(block.factor == 0.5 for block in model)
        return [parameter.grad for parameter in model.parameters()]

    model, plain = stack(lambda: Annealed(10_000)), stack(lambda: Annealed(10_000))
    with fitted(model, x):
        assert all(map(torch.equal, gradients(model), gradients(plain)))


class CountsSteps(nn.Module):
    """Has a buffer of its own that changes at the end of its forward; a stage before may read it."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(SHAPE[1], SHAPE[1]), nn.Tanh()) for _ in range(8))
        self.register_buffer("num_steps", torch.zeros(()))
        self.reads = reads

    def forward(self, x):
        for index, block in enumerate(self.body):
            x = block(x)
            if self.reads and index == 3:
                x = x + self.num_steps
        self.num_steps += 1
        return x


@pytest.mark.parametrize("reads", [False, True])
def test_a_buffer_that_the_model_itself_changes_is_changed_once_a_step(reads):
    inputs = batches(SHAPE, 4)
    model, plain = CountsSteps(reads=reads), CountsSteps(reads=reads)
    with fitted(model, inputs[0]) as plan:
        assert_equal(train(model, inputs), train(plain, inputs))
        assert plan.stats().recomputed_per_step > 0
    assert model.num_steps == plain.num_steps == 4


class Shifted(CountsSteps):
    """Reads the buffer between its blocks, after each of them, and does not change it."""

    def forward(self, x):
        for block in self.body:
            x = block(x) * (1 + self.num_steps)
        return x


def test_a_buffer_that_is_read_between_units_must_not_change_before_backward():
    x = batches(SHAPE, 1)[0]
    model = Shifted(reads=True)
    with fitted(model, x) as plan:
        loss = model(x).sum()
        model.num_steps += 1
        with pytest.raises(lowtide.ExecutionError, match="buffer 'num_steps' was changed in place"):
            loss.backward()
        model.num_steps -= 1
        model(x).sum().backward()
        assert plan.stats().recomputed_per_step > 0


@pytest.mark.parametrize("way", ["helper", "named_buffers", "built name"])
def test_statistics_that_are_read_without_being_named(way):
    inputs = batches(SHAPE, 3)
    model = stack(lambda: ReadsStatistics(way))
    with fitted(model, inputs[0]) as plan:
        assert_equal(train(model, inputs), train(stack(lambda: ReadsStatistics(way)), inputs))
        assert plan.stats().recomputed_per_step > 0


class Unregistered(nn.Module):
    """Keeps what it has seen in attributes that are no buffers, and reads it in the next call."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(16, 16), way
        self.average, self.carried, self.pair, self.table = torch.zeros(16), None, (0, 1.0), {"factor": 1.0}

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y * getattr(self, self.way)(y)

    def averaged(self, y):
        found, self.average = self.average, 0.9 * self.average + 0.1 * y.detach().mean(0)
        return 1 + found

    def only_counted(self, y):
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return 1

    def handed_to_the_next(self, y):
        found, self.carried = self.carried, y.detach().mean(0)
        return 1 if found is None else 1 + found

    def with_its_graph(self, y):
        found, self.carried = self.carried, y.mean(0)
        return 1 if found is None else 1 + found.detach()

    def in_a_tuple(self, y):
        self.pair = self.pair[0] + 1, self.pair[1] * 0.5
        return self.pair[1]

    def in_a_dict(self, y):
        self.table["factor"] *= 0.5
        return self.table["factor"]

    def made_in_the_first_call(self, y):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return 1 / self.num_calls


def kept_by(model: nn.Module) -> list[Any]:
    kept = [(block.average, block.carried, block.pair, block.table, vars(block).get("num_calls")) for block in model]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for values in kept for value in values]


@pytest.mark.parametrize(
    "way",
    [
        "averaged",
        "only_counted",
        "handed_to_the_next",
        "with_its_graph",
        "in_a_tuple",
        "in_a_dict",
        "made_in_the_first_call",
    ],
)
def test_attributes_that_are_no_buffers_change_once_a_step(way):
    inputs, plain = batches((8, 16), 3), stack(lambda: Unregistered(way), 5)
    expected = train(plain, inputs)
    for schedule in (recomputing(5), random_schedule(5, 2, drops=0.8)):
        model = stack(lambda: Unregistered(way), 5)
        assert lowtide.measure(model, inputs[0]).num_stages == 5
        with lowtide.attach(model, schedule):
            assert_equal(train(model, inputs), expected)
        assert kept_by(model) == kept_by(plain)


class InPlace(Unregistered):
    """Changes what it keeps in place, or makes it late."""

    def averaged(self, y):
        self.average.mul_(0.9).add_(y.detach().mean(0))
        return 1 + self.average

    def made_first(self, y):
        if self.carried is None:
            self.carried = y.detach().mean(0)
        else:
            self.carried.lerp_(y.detach().mean(0), 0.1)
        return 1 + self.carried

    def made_late(self, y):
        self.pair = (self.pair[0] + 1, 1.0)
        if self.pair[0] < 4:
            return 1
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return 1 / self.num_calls

    def as_numpy_counts(self, y):
        self.carried = numpy.float64(1) if self.carried is None else self.carried * 0.5
        return float(self.carried)


@pytest.mark.parametrize("way", ["averaged", "made_first", "made_late", "as_numpy_counts"])
def test_attributes_that_are_changed_in_place_or_made_late_change_once_a_step(way):
    inputs, plain = batches((8, 16), 6), stack(lambda: InPlace(way), 5)
    expected = train(plain, inputs)
    for schedule in (recomputing(5), random_schedule(5, 2, drops=0.8)):
        model = stack(lambda: InPlace(way), 5)
        with lowtide.attach(model, schedule):
            assert_equal(train(model, inputs), expected)
        assert kept_by(model) == kept_by(plain)


def test_a_tensor_that_the_training_loop_changes_in_place_before_backward_is_told():
    model, x = stack(lambda: Unregistered("averaged"), 5), batches((8, 16), 1)[0]
    with lowtide.attach(model, recomputing(5)):
        for block in model:
            block.average = torch.zeros(16)
        loss, average = model(x).sum(), model[1].average
        average += 1  # which the stage has made, and does not read
        loss.backward()
        loss = model(x).sum()
        average += 1  # which it has read
        with pytest.raises(lowtide.ExecutionError, match=r"'1\.average' was changed in place"):
            loss.backward()


@pytest.mark.parametrize("kind", ["buffer", "tensor", "tuple", "dict"])
def test_what_the_training_loop_replaces_before_backward_is_as_the_forward_found_it(kind):
    def numbers(model: nn.Module) -> list[torch.Tensor]:
        for x in batches((8, 16), 3):
            output = model(x)
            for block in model:
                block.decay()
            output.square().mean().backward()
        assert all(block.factor() == pytest.approx(0.9**3) for block in model)
        return [parameter.grad for parameter in model.parameters()]

    expected = numbers(stack(lambda: Scaled(kind), 5))
    for schedule in (recomputing(5), random_schedule(5, 2, drops=0.8)):
        model = stack(lambda: Scaled(kind), 5)
        with lowtide.attach(model, schedule):
            assert all(map(torch.equal, numbers(model), expected))


class Scaled(nn.Module):
    """Has a factor that the training loop changes, not in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(16, 16), kind
        self.register_buffer("buffer", torch.ones(()))
        self.tensor, self.tuple, self.dict = torch.ones(()), (1.0,), {"factor": 1.0}

    def forward(self, x):
        return x + torch.tanh(self.linear(x) * self.factor())

    def factor(self):
        value = getattr(self, self.kind)
        return value[0] if self.kind == "tuple" else value["factor"] if self.kind == "dict" else value

    def decay(self):
        self.buffer, self.tensor, self.tuple = self.buffer * 0.9, self.tensor * 0.9, (self.tuple[0] * 0.9,)
        self.dict["factor"] *= 0.9


class Summing(nn.Module):
    """Sums up a penalty in an attribute while it runs: stages find a tensor with the graph of their own step there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.penalty = stack(lambda: nn.Linear(16, 16), 4), torch.zeros(())

    def forward(self, x):
        self.penalty = torch.zeros(())
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.penalty = self.penalty + x.square().mean()
        return x


def test_steps_that_are_dropped_are_let_go_where_attributes_have_graphs():
    def num_steps() -> int:
        return sum(type(each) is Step for each in gc.get_objects())

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
