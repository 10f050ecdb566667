"""Buffers that a forward reads in one place and changes in another: what is refused, and what is not copied. That
training is equal with them: `tests/runtime/test_awkward.py`.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tests.runtime.awkward.buffers import (
    SHAPE,
    WIDTH,
    Banked,
    Counting,
    Quantized,
    Queued,
    bodies,
    two_forwards,
)
from tests.runtime.schedules import repeating, repeating_all_but_the_last
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide.runtime.model.split import Split, StageSplit, Unit
from lowtide.runtime.plan.attach import split_for


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def made_in_stages(kind: type[nn.Module]) -> tuple[nn.Module, Split]:
    model = made(kind)
    split = split_for(model, lowtide.measure(model, batches(SHAPE, 1)[0]))
    assert split.num_stages > 3
    return model, split


@pytest.mark.parametrize(("kind", "name"), [(Counting, "num_steps"), (Quantized, "codes")])
def test_a_buffer_that_a_second_forward_changes_after_its_last_reader_is_refused_by_name(kind, name):
    """The first forward's last stages read what its own change left, and only the second one would know that."""
    model, split = made_in_stages(kind)
    lowtide.attach(model, repeating(split.num_stages), split=split)
    with pytest.raises(lowtide.ExecutionError, match=f"buffer '{name}' was changed in place between"):
        two_forwards(model, batches(SHAPE, 2))


class BuiltName(Banked):
    """Reads another stage's buffer in a way that its code does not tell."""

    def forward(self, x):
        x = self.body[1](self.body[0](x) + getattr(self.bank, "mem" + "ory"))
        return self.body[3](self.bank(self.body[2](x)))


def test_a_buffer_that_is_read_by_a_name_put_together():
    """Which stage reads what is seen, and does not depend on names."""
    inputs = batches(SHAPE, 4)
    model, split = made_in_stages(BuiltName)
    lowtide.attach(model, repeating(split.num_stages), split=split)
    assert_equal(train(model, inputs), train(made(BuiltName), inputs))


class Momentum(nn.Module):
    """A second encoder that follows the first one: its parameters are given other data in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.follower = bodies(), bodies()
        self.follower.requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            for mine, its in zip(self.body.parameters(), self.follower.parameters(), strict=True):
                its.data = 0.9 * its.data + 0.1 * mine.data
        y = x
        for one, other in zip(self.body, self.follower, strict=True):
            x, y = one(x), other(y)
        return x * y.detach()


def test_a_parameter_that_is_given_other_data_is_refused_by_name_and_left_as_it_is():
    model, x = made(Momentum), batches(SHAPE, 1)[0]
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(lowtide.CaptureError, match=r"the data of its parameter 'follower.0.0.weight' .* after the opt"):
        lowtide.measure(model, x)
    assert all(map(torch.equal, before, model.parameters()))
    stages = (StageSplit("first", (Unit("body.0"),)), StageSplit("others", (Unit("body.1"),)))
    lowtide.attach(model, repeating(2), split=Split(stages))
    with pytest.raises(lowtide.ExecutionError, match=r"stage 'first' changes a tensor .* that is not its own"):
        model(x)


class Late(nn.Module):
    """Changes its buffer for the first time in its third step, and no switch tells."""

    num_rows = 1

    def __init__(self) -> None:
        super().__init__()
        self.body, self.num_calls = bodies(), 0
        self.register_buffer("average", torch.zeros(self.num_rows, WIDTH))

    def forward(self, x):
        x = self.body[1](self.body[0](x) + self.average[0])
        x = self.body[3](self.body[2](x))
        self.num_calls += 1
        if self.num_calls > 2:
            self.average.lerp_(x.detach().mean(0).expand_as(self.average), 0.5)
        return x


class LateAndLarge(Late):
    num_rows = 2**16 // (4 * WIDTH) + 1


def test_a_small_buffer_that_changes_for_the_first_time_in_a_later_step_is_equal():
    inputs = batches(SHAPE, 5)
    model, split = made_in_stages(Late)
    lowtide.attach(model, repeating_all_but_the_last(split.num_stages), split=split)
    assert_equal(train(model, inputs), train(made(Late), inputs))


def test_a_large_buffer_that_changes_for_the_first_time_in_a_later_step_costs_that_step():
    inputs = batches(SHAPE, 5)
    model, split = made_in_stages(LateAndLarge)
    plain = made(LateAndLarge)
    lowtide.attach(model, repeating_all_but_the_last(split.num_stages), split=split)
    assert_equal(train(model, inputs[:2]), train(plain, inputs[:2]))
    checkpoint, num_calls = copy.deepcopy(model.state_dict()), model.num_calls
    with pytest.raises(lowtide.ExecutionError, match=r"'average' was changed by this step's .* repeat it: from now"):
        model(inputs[2]).sum().backward()
    model.zero_grad()
    model.load_state_dict(checkpoint)
    model.num_calls = num_calls
    assert_equal(train(model, inputs[2:]), train(plain, inputs[2:]))


BEGINS = {"averaging": False}


class Averaging(nn.Module):
    """Begins to change its buffer when a global variable says so, in a way that no version counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        if BEGINS["averaging"]:
            self.average.data.lerp_(x.detach().mean(0), 0.5)
        return x + self.average


def test_a_buffer_that_begins_to_change_without_a_version_is_found_within_a_round(monkeypatch):
    model = nn.Sequential(*(Averaging() for _ in range(4)))
    x = batches(SHAPE, 1)[0]
    lowtide.attach(model, repeating_all_but_the_last(4))
    for _ in range(2):
        model(x).sum().backward()
    for block in model:
        block.average.data.add_(1.0)  # between steps, which is nobody's business
    model(x).sum().backward()
    monkeypatch.setitem(BEGINS, "averaging", True)

    def round_of_steps() -> None:
        for _ in range(4):
            model(x).sum().backward()

    with pytest.raises(lowtide.ExecutionError, match=r"stage '\d' changed '\d\.average' when it was recomputed"):
        round_of_steps()


@pytest.mark.parametrize("kind", [Queued, Counting, Quantized, Banked])
def test_large_buffers_between_units_are_copied_when_something_writes_to_them(kind, monkeypatch):
    """The first step watches all operations, so that it need not copy all that any stage might change."""
    monkeypatch.setattr("lowtide.runtime.state.environment._SMALL_BYTES", 0)
    inputs = batches(SHAPE, 4)
    model, split = made_in_stages(kind)
    lowtide.attach(model, repeating(split.num_stages), split=split)
    assert_equal(train(model, inputs), train(made(kind), inputs))


@partial(torch.compile, backend="eager")
def counted(count: torch.Tensor) -> None:
    count.add_(1)


class CountsInCompiledCode(Counting):
    """The counter is written to by a function that is compiled, whose operations nobody sees."""

    def forward(self, x):
        x = self.body[1](self.body[0](x) * (1 + self.num_steps))
        counted(self.num_steps)
        return self.body[3](self.body[2](x) / (1 + self.num_steps))


def test_a_large_buffer_that_compiled_code_between_units_writes_to(monkeypatch):
    monkeypatch.setattr("lowtide.runtime.state.environment._SMALL_BYTES", 0)
    inputs = batches(SHAPE, 3)
    model, split = made_in_stages(CountsInCompiledCode)
    lowtide.attach(model, repeating(split.num_stages), split=split)
    assert_equal(train(model, inputs), train(made(CountsInCompiledCode), inputs))


def test_a_large_buffer_that_no_stage_changes_is_not_copied_in_the_first_step_either(monkeypatch):
    model, split = made_in_stages(Queued)
    model.register_buffer("table", torch.zeros(300, 300))
    lowtide.attach(model, repeating(split.num_stages), split=split)
    copied = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t, **options: (copied.append(t.shape), clone(t, **options))[1])
    model(batches(SHAPE, 1)[0]).sum().backward()
    assert copied.count((300, 300)) == 0
    assert copied.count(model.queue.shape) > 0


def test_buffers_that_do_not_change_are_not_copied(monkeypatch):
    """After the first step, in which it is seen which ones change."""
    model, split = made_in_stages(Queued)
    model.register_buffer("constant", torch.zeros(3, 3))
    lowtide.attach(model, repeating(split.num_stages), split=split)
    x = batches(SHAPE, 1)[0]
    copied = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t, **options: (copied.append(t.shape), clone(t, **options))[1])
    model(x).sum().backward()
    assert copied.count((3, 3)) > 0
    copied.clear()
    model(x).sum().backward()
    assert copied.count((3, 3)) == 0
