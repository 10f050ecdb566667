"""Dicts that a forward makes anew and a module keeps, with tensors and their graphs: losses by name, features. That
training is equal with them: `tests/runtime/test_awkward.py`.
"""

from __future__ import annotations

import gc

import pytest
from tests.runtime.awkward.containers import WIDTH, Reports, sharing
from tests.runtime.awkward.table import stack
from tests.runtime.schedules import recomputing
from tests.runtime.training import batches, train

import lowtide
from lowtide.runtime.execute.executor import RunningStep
from lowtide.runtime.meter import Meter
from lowtide.runtime.state.environment import Environment

SHAPE = (64, WIDTH)


def live_bytes() -> int:
    gc.collect()
    with Meter("cpu") as meter:
        return meter.live_bytes


@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_dicts_that_a_forward_makes_anew_are_let_go(kind):
    inputs = batches(SHAPE, 3)
    model = stack(lambda: Reports(kind))()
    steps_before = sum(type(each) is RunningStep for each in gc.get_objects())
    start_bytes = live_bytes()
    lowtide.measure(model, inputs[0])
    assert live_bytes() == start_bytes
    with lowtide.attach(model, recomputing(len(model))) as plan:
        train(model, inputs)
        assert plan.stats().recomputed_per_step > 0
        for block in model:
            del block.kept
            block.zero_grad()
        gc.collect()
        assert sum(type(each) is RunningStep for each in gc.get_objects()) == steps_before


@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_after_backward_a_module_keeps_the_dict_of_its_own_forward(kind):
    model, (x, *others) = stack(lambda: Reports(kind))(), batches(SHAPE, 4)
    with lowtide.attach(model, recomputing(len(model))):
        for each in others:
            model(each).sum().backward()
        output = model(x)
        kept = [block.kept for block in model]
        output.sum().backward()
        assert all(block.kept is found for block, found in zip(model, kept, strict=True))


def test_a_dict_that_modules_have_in_common_is_looked_through_once():
    mark = Environment(list(sharing().named_modules())).mark()
    assert [label.name for label in mark.labels] == ["0.settings.total"]
    assert len(mark.copies) == 1
