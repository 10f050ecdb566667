"""Every awkward model under every kind of schedule trains as it does without lowtide, bit for bit."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from benchmarks.gradient_check import check_gradients
from tests.runtime import schedules
from tests.runtime.awkward.table import ROWS, Awkward
from tests.runtime.budgets import measured_once
from tests.runtime.training import Numbers, assert_equal, generator_states, seed_all, train
from torch import nn

import lowtide
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import split_for
from lowtide.schedule import Forward, Schedule

SCHEDULES = {
    "store": lambda n, _: schedules.storing(n),
    "recompute": lambda n, _: schedules.recomputing(n),
    "repeat": lambda n, _: schedules.repeating(n),
    "repeat the first": lambda n, _: schedules.repeating_the_first(n),
    "offload": lambda n, _: schedules.offloading(n),
    # another one for each row
    "random": lambda n, row: schedules.random_schedule(n, ROWS.index(row), moves=0.4, drops=0.8),
}


@pytest.fixture(scope="module", autouse=True)
def _emptied() -> Iterator[None]:
    """What is kept for the tests of this file does not stay for others, whose memory it would be."""
    yield
    split_of.cache_clear()
    plain.cache_clear()


@functools.cache
def split_of(row: Awkward) -> Split:
    """Its stages as they are measured, once; measuring must leave no trace."""
    model = row.make_measured()
    if row.refused:
        return split_for(model, None)
    buffers, attributes, states = dict(model.named_buffers()), attributes_of(model), generator_states()
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    split = split_for(model, lowtide.measure(model, row.inputs()[0]))
    assert split.num_stages >= row.num_stages
    assert check_gradients(model, split, row.inputs()[0]).equal
    after = dict(model.named_buffers())
    assert after.keys() == buffers.keys()
    assert all(after[name] is buffers[name] and torch.equal(after[name], values[name]) for name in buffers)
    assert attributes_of(model) == attributes
    assert all(map(torch.equal, generator_states(), states))
    return split


@functools.lru_cache(maxsize=1)  # the schedules of a row follow each other, and meters look at all tensors
def plain(row: Awkward) -> tuple[Numbers, list[Any]]:
    """What training without lowtide gives, and what the modules have in their attributes afterwards."""
    model = row.make()
    seed_all(5)
    numbers = row.loop(model, row.inputs())
    return numbers, attributes_of(model)


def attributes_of(model: nn.Module) -> list[Any]:
    return [
        (path, name, comparable(value))
        for path, module in model.named_modules()
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
    ]


def comparable(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Tensors as their numbers, containers with what is in them, other objects by their type."""
    if value is None or type(value) in (int, float, str, bool):
        return value
    if id(value) in above:
        return "itself"
    inner = functools.partial(comparable, above=(*above, id(value)))
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().numpy().tobytes()
    if isinstance(value, Mapping):
        return type(value), [(key, inner(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [inner(each) for each in value]
    return value if isinstance(value, int | float | str | bool | None) else type(value)


def num_repeated(schedule: Schedule) -> int:
    forwards = [operation.stage for operation in schedule.operations if isinstance(operation, Forward)]
    return len(forwards) - len(set(forwards))


@pytest.mark.parametrize("row", [row for row in ROWS if row.fitted], ids=lambda row: row.name)
def test_planned_training_is_equal(row: Awkward) -> None:
    """From measuring to training: planning, a refused budget too, leaves no trace."""
    model, twin, inputs = row.make(), row.make(), row.inputs(row.fitted)
    options = {"bandwidth": 0, "optimizer": "adam"}
    with measured_once():
        with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
            lowtide.fit(model, inputs[0], memory_budget=1000, **options)
        # a little more, as other tests may have left something in memory
        plan = lowtide.fit(model, inputs[0], memory_budget=caught.value.minimum_bytes + 2 * inputs[0].nbytes, **options)
    with warnings.catch_warnings(), plan:
        if row.skips:  # steps with more layers than the sample's take more, which is told
            warnings.simplefilter("ignore", lowtide.LowtideWarning)
        found = [(seed_all(5), row.loop(each, inputs))[1] for each in (model, twin)]
        assert_equal(*found)
        assert plan.stats().recomputed_per_step > 0
    assert attributes_of(model) == attributes_of(twin)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_training_is_equal(row: Awkward, kind: str) -> None:
    split = split_of(row)
    numbers, attributes = plain(row)
    schedule, model = SCHEDULES[kind](split.num_stages, row), row.make()
    with lowtide.attach(model, schedule, split=split, strict=kind == "repeat") as plan:
        seed_all(5)
        assert_equal(row.loop(model, row.inputs()), numbers)
        repeated = plan.stats().recomputed_per_step
        assert repeated == num_repeated(schedule) or (row.skips and repeated > 0)
    assert attributes_of(model) == attributes


@pytest.mark.parametrize("row", [row for row in ROWS if row.loop is train], ids=lambda row: row.name)
def test_accumulated_gradients_and_a_forward_without_backward(row: Awkward) -> None:
    inputs, found = row.inputs()[:4], []
    split = split_of(row)
    planned, unplanned = row.make(), row.make()
    with lowtide.attach(planned, schedules.repeating_all_but_the_last(split.num_stages), split=split):
        for model in (planned, unplanned):
            seed_all(5)
            model(inputs[-1])
            found.append((train(model, inputs, micro_batches=2), attributes_of(model)))
    assert_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    parts = [weakref.ref(module) for module in planned.modules()]
    del model, planned, unplanned
    gc.collect()
    assert not any(part() for part in parts)  # also where it keeps results with their graphs
