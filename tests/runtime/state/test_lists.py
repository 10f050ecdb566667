"""Containers that a forward changes: planning leaves nothing there, and they do not count as memory. That training is
equal with them: `tests/runtime/test_awkward.py`.
"""

from __future__ import annotations

import gc
from collections import deque

import pytest
import torch
from tests.runtime.awkward.containers import SHAPE, Mixture
from tests.runtime.training import batches
from torch import nn

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.runtime.state.cells import Cells
from lowtide.runtime.state.environment import Environment

OPTIONS = {"bandwidth": 0, "optimizer": "sgd"}


def least_bytes(model: nn.Module, x: torch.Tensor, **options) -> int:
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, **{**OPTIONS, **options})
    return caught.value.minimum_bytes


def test_what_stays_in_lists_does_not_count_as_memory():
    x = batches(SHAPE, 1)[0]

    without_graphs = least_bytes(Mixture(detached=True), x)
    with_graphs = least_bytes(Mixture(detached=False), x)
    # with its graph, each of the six terms holds the output of its block until backward
    assert with_graphs <= without_graphs + 6 * x.nbytes


class Collects(nn.Module):
    """Changes containers of all kinds, nested ones too, and one that contains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SHAPE[1], SHAPE[1])
        self.seen = ["first"]
        self.shapes = {SHAPE}
        self.last = deque(["old"], maxlen=2)
        self.nested = {"lists": [[], ({"deep": []},)]}
        self.nested["itself"] = self.nested

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        self.seen.append(y.mean())
        self.shapes.add(len(self.seen))
        self.last.append(y.sum())
        self.nested["lists"][0].append(1)
        self.nested["lists"][1][0]["deep"].append(y)
        self.nested["new"] = y
        return x + y


@pytest.mark.parametrize("budget", [1000, "1GiB"])
def test_planning_leaves_containers_as_they_are(budget):
    model = nn.Sequential(*(Collects() for _ in range(4)))
    containers = [(block.seen, block.shapes, block.last, block.nested["lists"]) for block in model]
    first = model[0].seen[0]
    try:
        lowtide.fit(model, torch.zeros(SHAPE), memory_budget=budget, **OPTIONS).detach()
    except lowtide.InfeasibleBudgetError:
        assert budget == 1000
    lowtide.measure(model, torch.zeros(SHAPE))
    for block, (seen, shapes, last, lists) in zip(model, containers, strict=True):
        assert block.seen is seen
        assert seen == ["first"]
        assert block.shapes is shapes
        assert shapes == {SHAPE}
        assert block.last is last
        assert list(last) == ["old"]
        assert block.nested["lists"] is lists
        assert lists == [[], ({"deep": []},)]
        assert list(block.nested) == ["lists", "itself"]
    assert model[0].seen[0] is first


def test_a_stage_measured_many_times_does_not_pile_up_graphs():
    x = batches(SHAPE, 1)[0]

    def peak_bytes(detached: bool) -> int:
        model = Mixture(detached=detached)
        gc.collect()
        with Meter("cpu") as meter:
            before_bytes = meter.live_bytes
            lowtide.measure(model, x, optimizer="sgd")
        return meter.peak_bytes - before_bytes

    without_graphs = peak_bytes(True)
    assert peak_bytes(False) <= 2 * without_graphs  # one graph at a time, of dozens


def test_a_repeated_run_finds_lists_as_they_were_and_leaves_them_as_they_are():
    module = nn.Module()
    environment = Environment([("", module)])
    environment.mark()
    module.late = [1]
    mark = environment.mark()
    module.late.append(2)
    module.later = []
    with environment.rewound(mark):
        assert module.late == [1]
        assert not hasattr(module, "later")
        module.late.append(3)
        module.late = ["another"]
    assert module.late == [1, 2]
    assert module.later == []


def test_a_container_that_the_loop_takes_away_before_backward_is_made_anew_for_a_recomputation():
    module = nn.Module()
    module.losses, module.shapes = [1], {"seen": {2}}
    environment = Environment([("", module)])
    mark = environment.mark()
    module.losses = None
    del module.shapes
    with environment.rewound(mark):
        assert module.losses == [1]
        assert module.shapes == {"seen": {2}}
    assert module.losses is None
    assert not hasattr(module, "shapes")


def test_a_look_puts_back_the_very_same_objects():
    module, entry = nn.Module(), [object()]
    module.outer = outer = {"a": entry, "b": {1, 2}}
    look = Cells([("", module)]).look()
    outer["a"] = list(entry)
    entry.append(None)
    outer["b"].clear()
    look.restore()
    assert outer["a"] is entry
    assert len(entry) == 1
    assert outer["b"] == {1, 2}
