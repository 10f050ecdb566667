"""Lists that a forward appends to: planning leaves nothing there, and a repeated run neither."""

from __future__ import annotations

import gc
from collections import deque

import pytest
import torch
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.runtime.state.cells import Cells
from lowtide.runtime.state.environment import Environment

SHAPE = (512, 64)
OPTIONS = {"bandwidth": 0, "optimizer": "sgd"}


class Expert(nn.Module):
    """Appends its auxiliary loss to a list that all layers and the model share."""

    def __init__(self, losses: list[torch.Tensor], *, detached: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SHAPE[1], 256), nn.GELU(), nn.Linear(256, SHAPE[1]))
        self.losses, self.detached = losses, detached

    def forward(self, x):
        y = self.inner(x)
        self.losses.append((y.detach() if self.detached else y).square().mean())
        return x + y


class Mixture(nn.Module):
    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(Expert(self.losses, detached=detached) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def least_bytes(model: nn.Module, x: torch.Tensor, **options) -> int:
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, **{**OPTIONS, **options})
    return caught.value.minimum_bytes


def steps(model: Mixture, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The losses, terms and gradients of steps whose loop adds the auxiliary losses and clears the list."""
    found = []
    for x in xs:
        loss = model(x).square().mean()
        terms = list(model.losses)
        model.losses.clear()
        assert len(terms) == len(model.blocks)
        total = loss + sum(terms)
        total.backward()
        found += [total.detach(), *(term.detach() for term in terms), *(p.grad for p in model.parameters())]
        model.zero_grad()
        assert model.losses == []
    return found


@pytest.mark.parametrize("detached", [True, False])
def test_auxiliary_losses_are_appended_once_a_step(detached):
    xs = batches(SHAPE, 3)
    model = Mixture(detached=detached)
    expected = steps(Mixture(detached=detached), xs)
    least = least_bytes(model, xs[0])
    assert model.losses == []
    with lowtide.fit(model, xs[0], memory_budget=least, **OPTIONS) as plan:
        assert model.losses == []
        found = steps(model, xs)
        assert plan.stats().recomputed_per_step > 0
    assert all(map(torch.equal, found, expected))


def test_what_stays_in_lists_does_not_count_as_memory():
    x = batches(SHAPE, 1)[0]

    without_graphs = least_bytes(Mixture(detached=True), x)
    with_graphs = least_bytes(Mixture(detached=False), x)
    # with its graph, each of the six terms holds the output of its block until backward
    assert with_graphs <= without_graphs + 6 * x.nbytes


def test_a_list_that_is_not_cleared_before_backward_does_not_grow_in_it():
    x = batches(SHAPE, 1)[0]
    model = Mixture(detached=True)
    with lowtide.fit(model, x, memory_budget=least_bytes(model, x), **OPTIONS):
        for num_steps in (1, 2, 3):
            model(x).sum().backward()
            assert len(model.losses) == 6 * num_steps


class Remembers(nn.Module):
    """Its output depends on what it has appended, in a list that grows, a bounded one, or a deque."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SHAPE[1], 128), nn.Linear(128, SHAPE[1])
        self.kind = kind
        self.history = {"values": deque(maxlen=2) if kind == "deque" else []}

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        values = self.history["values"]
        values.append(float(y.detach().abs().mean()))
        if self.kind == "bounded" and len(values) > 2:
            values.pop(0)
        return x + y * (1 + sum(values) + len(values))


@pytest.mark.parametrize("kind", ["growing", "bounded", "deque"])
def test_a_repeated_run_finds_a_short_history_as_the_first_run_did(kind):
    xs = batches(SHAPE, 4)

    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Remembers(kind) for _ in range(6)))

    model, plain = stack(), stack()
    recompute = [lowtide.Forward(k, "keep") for k in range(1, 6)] + [lowtide.Forward(6, "all"), lowtide.Backward(6)]
    for k in range(5, 0, -1):
        recompute += [lowtide.Forward(k, "all"), lowtide.Backward(k)]
    with lowtide.attach(model, lowtide.Schedule("by hand", recompute)) as plan:
        assert_equal(train(model, xs), train(plain, xs))
        assert plan.stats().recomputed_per_step == 5
    assert [block.history for block in model] == [block.history for block in plain]


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
