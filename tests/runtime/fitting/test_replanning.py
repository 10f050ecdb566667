"""Plans for other shapes that are made during training, also for batches that are too large: nothing else changes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.runtime import models
from tests.runtime.budgets import measured_once
from tests.runtime.training import above_the_least, assert_equal, batches, train
from torch import nn

import lowtide
from lowtide import Backward, Forward, Schedule
from lowtide.runtime.compile.compiled import Compilation
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.fitting.trials import Planned, RealStep
from lowtide.runtime.measure.weights import each_of
from lowtide.runtime.meter import Meter
from lowtide.runtime.model.call_site import is_compiled
from lowtide.runtime.model.split import Split, StageSplit, Unit
from lowtide.runtime.plan.attach import tier_for
from lowtide.runtime.plan.plan import Part
from lowtide.runtime.plan.steps import RealSteps

SHAPE = (128, 16)
OPTIONS = {"bandwidth": 0, "strategy": "rotor", "optimizer": "adam"}
COMPILE = {"compile_stages": {"backend": "aot_eager"}, "variants": False}


class Narrow(nn.Module):
    """Fails on batches of 300."""

    def forward(self, x):
        if len(x) == 300:
            raise IndexError("too many")
        return x


def deep(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Narrow(), *(models.Widening(SHAPE[1]) for _ in range(depth)))


def leanest(model: nn.Module, x: torch.Tensor, share: float = 1.0, **options) -> lowtide.Plan:
    """Within the least budget times a share."""
    with measured_once():
        with pytest.raises(lowtide.InfeasibleBudgetError) as refusal:
            lowtide.fit(model, x, memory_budget=1, **OPTIONS, **options)
        budget = above_the_least(share, refusal.value.minimum_bytes, model)
        return lowtide.fit(model, x, memory_budget=budget, **OPTIONS, **options)


def peak_of_step(model: nn.Module, x: torch.Tensor) -> int:
    with Meter("cpu") as meter:
        model(x).square().mean().backward()
        model.zero_grad()
    return meter.peak_bytes


@pytest.mark.parametrize("num_samples", [5000, 300])
def test_a_batch_that_is_too_large_or_fails_is_freed_without_the_collector(num_samples):
    model, x = deep(), batches(SHAPE, 1)[0]
    leanest(model, x)
    batch = torch.zeros(num_samples, SHAPE[1])
    alive = weakref.ref(batch)
    gc.disable()
    try:
        with pytest.raises(IndexError) if num_samples == 300 else pytest.warns(lowtide.LowtideWarning) as seen:
            model(batch)
        del batch, seen
        assert alive() is None
    finally:
        gc.enable()
    assert_equal(
        train(model, batches(SHAPE, 2), input_grads=False), train(deep(), batches(SHAPE, 2), input_grads=False)
    )


def test_compiled_blocks_stay_compiled_after_a_batch_that_is_too_large():
    model, x = deep(), batches(SHAPE, 1)[0]
    plan = leanest(model, x, 2.0, **COMPILE)
    assert all(map(is_compiled, model[1:]))
    with pytest.warns(lowtide.LowtideWarning, match="training continues with the leanest schedule"):
        model(torch.zeros(5_000, SHAPE[1]))
    assert all(map(is_compiled, model[1:]))
    plan.detach()
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_that_share_compiled_modules_detach_in_any_order(first):
    one, x = deep(), batches(SHAPE, 1)[0]
    other = nn.Sequential(*one)
    plans = [leanest(each, x, **COMPILE) for each in (one, other)]
    for index in (first, 1 - first):
        plans[index].detach()
    assert not any("_compiled_call_impl" in vars(module) for module in one.modules())
    assert_equal(train(one, batches(SHAPE, 2), input_grads=False), train(deep(), batches(SHAPE, 2), input_grads=False))


def test_a_module_that_another_model_has_compiled_since_stays_compiled():
    one, compilation = deep(2), Compilation({"backend": "eager"})
    other = nn.Sequential(*one)
    both, last = (Split(tuple(StageSplit(path, (Unit(path),)) for path in paths)) for paths in ("12", "2"))
    parts = [compilation.of(one, both)]
    parts[0].remove()
    parts.append(compilation.of(one, last))
    compiled = compilation.of(other, both)
    for part in parts:
        part.remove()
    assert is_compiled(other[1])
    compiled.remove()
    assert not any("_compiled_call_impl" in vars(module) for module in one.modules())


def test_a_budget_holds_after_a_model_with_the_same_modules_was_planned_for_again():
    one, x = deep(), batches(SHAPE, 1)[0]
    other = nn.Sequential(*one)
    plans = [leanest(one, x[:64], 1.5), leanest(other, x)]
    assert peak_of_step(other, x) <= plans[1].memory_budget
    for num_samples in (80, 64, 80):
        assert peak_of_step(one, x[:num_samples]) <= plans[0].memory_budget
        assert peak_of_step(other, x) <= plans[1].memory_budget
    assert plans[0].num_shapes == 2
    assert_equal(train(other, [x], input_grads=False), train(deep(), [x], input_grads=False))
    for plan in plans:
        plan.detach()
    assert not any("_compiled_call_impl" in vars(module) for module in one.modules())


def test_models_that_share_modules_go_over_to_earlier_parts_that_watch_others_of_them():
    backward = [Backward(3), *(Forward(k, "all") for k in (1, 2)), Backward(2), Backward(1)]
    again = Schedule("again", [Forward(1, "keep"), Forward(2, "drop"), Forward(3, "all"), *backward])
    once = Schedule("once", [*(Forward(k, "all") for k in (1, 2, 3)), *(Backward(k) for k in (3, 2, 1))])
    one, x = deep(2), batches(SHAPE, 1)[0]
    other = nn.Sequential(*one)
    plans = [lowtide.attach(model, again) for model in (one, other)]
    first = [plan._part for plan in plans]
    for plan, schedule in zip(plans, (again, once), strict=True):
        plan._part.execution.remove()  # it is looked for compiled stages
        plan.use(Part(Execution(plan.model, plan.split, schedule, None, tier_for(plan.model, None, 0))))
    for plan, part in zip(plans, first, strict=True):
        plan.use(part)
    for model in (one, other):
        assert_equal(train(model, [x]), train(deep(2), [x]))
        model.load_state_dict(deep(2).state_dict())
    for plan in plans:
        plan.detach()
    assert not any("_compiled_call_impl" in vars(module) for module in one.modules())


def test_the_state_of_an_optimizer_that_was_not_handed_over_counts_once():
    model, x = deep(), batches(SHAPE, 1)[0]
    plan = leanest(model, x, 1.1)
    optimizer = torch.optim.Adam(model.parameters())
    larger = torch.cat([x, x[:8]])
    for batch in (x, larger, x):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert plan.num_shapes == 2


@pytest.mark.parametrize("made_first", [True, False], ids=["made before", "made after"])
def test_the_state_of_an_earlier_optimizer_is_not_taken_for_that_of_the_next(made_first):
    model, x = deep(), batches(SHAPE, 1)[0]
    earlier = torch.optim.Adam(model.parameters())
    optimizer = torch.optim.Adam(model.parameters()) if made_first else None
    model(x).square().mean().backward()
    earlier.step()
    model.zero_grad()
    plan = leanest(model, x)
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    for _ in range(2):
        with Meter("cpu") as meter:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert meter.peak_bytes <= plan.memory_budget


class Around:
    """Stands around another optimizer and shows what that has."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self) -> None:
        self.inner.step()


def test_the_optimizer_in_use_is_the_one_that_steps():
    model, other = deep(2), deep(2)
    steps = RealSteps(model, torch.device("cpu"), 2**40)
    idle = torch.optim.SGD(model.parameters())
    assert steps.optimizer is None  # none has made a step
    torch.optim.SGD(other.parameters()).step()
    assert steps.optimizer is None  # one of another model
    optimizer = torch.optim.AdamW(model.parameters())
    Around(optimizer).step()
    assert steps.optimizer is optimizer
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    optimizer.step()
    assert steps.optimizer is optimizer
    idle.step()
    assert set(each_of(steps.optimizer)) == {idle, optimizer}
    del optimizer
    gc.collect()
    assert steps.optimizer is idle
    part = RealSteps(model, torch.device("cpu"), 2**40)
    torch.optim.SGD(model[2].parameters()).step()
    assert part.optimizer is None  # one for a part of the model
    part.close()
    idle.step()
    assert part.optimizer is None  # it looks no more


def test_what_a_real_step_took_counts_also_where_the_next_plan_has_other_stages() -> None:
    def chain_of(num_stages: int) -> lowtide.Chain:
        stages = tuple(lowtide.Stage(f"{k}", 1.0, 1.0, 100, 1000) for k in range(num_stages))
        return lowtide.Chain("net", stages, input_bytes=100)

    solution = lowtide.solve(chain_of(4), memory_budget="1GiB", strategy="store-all", manage_weights=False)
    step = RealStep(Planned(None, solution, None, unknown_bytes=10), solution.peak_bytes + 100)
    assert step.unknown_bytes(chain_of(1)) == 110
