"""Weights, gradients and optimizer state leave the device and come back: the same numbers as without."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.chains import random_chain
from tests.runtime import models
from tests.runtime.models import SHAPE, N
from tests.runtime.schedules import (
    mixed,
    offloading,
    parking,
    random_schedule,
    recomputing,
    repeating,
    stepping_in_backward,
    storing,
)
from tests.runtime.training import Numbers, assert_equal, batches, gradients, seed_all, square_loss
from torch import nn

import lowtide
from lowtide import Backward, Offload, Prefetch, Release, Schedule, Update
from lowtide.errors import ExecutionError, PlanError
from lowtide.runtime.execute.program import as_executed, num_late_fetches, with_late_fetches
from lowtide.runtime.execute.weights import Parked
from lowtide.runtime.meter import Meter
from lowtide.runtime.transfer import file_tier

Make = Callable[[Any], torch.optim.Optimizer]


class Decayed(torch.optim.SGD):
    """Steps by the step of its base class, whose hooks then run once more."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
        return super().step(closure)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "one of the user's own": lambda p: Decayed(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
}
make_adamw = OPTIMIZERS["adamw"]


def noted(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Numbers:
    numbers = {f"{index} parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    numbers |= {f"{index} buffer {name}": b.clone() for name, b in model.named_buffers()}
    for i, state in enumerate(optimizer.state.values()):
        numbers |= {f"{index} state {i} {name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return numbers


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    num_steps: int = 3,
    before_step: Callable[[nn.Module], None] = lambda model: None,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    set_to_none: bool = True,
    micro_batches: int = 1,
) -> Numbers:
    """Every number of the steps, by name."""
    seed_all(5)
    numbers: Numbers = {}
    for index, x in enumerate(batches(SHAPE, num_steps * micro_batches)):
        x = x.requires_grad_()
        loss = square_loss(model(x))
        loss.backward()
        numbers[f"{index} loss"] = loss.detach()
        numbers[f"{index} input gradient"] = x.grad
        if (index + 1) % micro_batches == 0:
            before_step(model)
            numbers |= {f"{index} gradient of {name}": g for name, g in gradients(model)}
            optimizer.step()
            numbers |= {f"{index} gradient after the step of {name}": g for name, g in gradients(model)}
            after_step(model)
            optimizer.zero_grad(set_to_none=set_to_none)
            numbers |= noted(model, optimizer, index)
    return numbers


def compare(
    make: Make = make_adamw,
    base: Schedule | None = None,
    model_of: Callable[[], nn.Module] = models.stages_of_every_kind,
    **settings: Any,
) -> None:
    """Train plainly and with everything parked."""
    expected, in_the_end = (trained_plainly if settings else trained_plainly_once)(make, model_of, **settings)
    model = model_of()
    optimizer = make(model.parameters())
    with lowtide.attach(model, parking(base or storing(len(model))), optimizer=optimizer) as plan:
        assert_equal(train(model, optimizer, **settings), expected)
        assert plan.stats().moved_bytes_per_step > 0
    assert_equal(noted(model, optimizer, 0), in_the_end)  # on the device again


def trained_plainly(make: Make, model_of: Callable[[], nn.Module], **settings: Any) -> tuple[Numbers, Numbers]:
    """The numbers of the steps, and those in the end."""
    model = model_of()
    optimizer = make(model.parameters())
    return train(model, optimizer, **settings), noted(model, optimizer, 0)


trained_plainly_once = functools.lru_cache(maxsize=1)(trained_plainly)  # tests of one optimizer follow each other


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name):
    compare(OPTIMIZERS[name])


@pytest.mark.parametrize("base", [recomputing(N), offloading(N), mixed(N), repeating(N)], ids=lambda s: s.strategy)
def test_with_recomputation_and_offloading(base):
    compare(base=base)


@pytest.mark.parametrize("seed", range(4))
def test_with_any_schedule(seed):
    compare(base=random_schedule(N, seed, moves=0.3))


def test_weights_are_on_the_device_only_while_they_are_needed():
    """Of eight stages of a megabyte each, never more than one is there, with its gradient and state."""
    width, n = 256, 8
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(n)))
    one = width * width * 4
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(1, width)
    with Meter("cpu") as meter:
        others = meter.live_bytes - n * one
    with lowtide.attach(model, parking(repeating(n)), optimizer=optimizer), Meter("cpu") as meter:
        for _ in range(2):
            assert meter.live_bytes - others < one
            model(x).sum().backward()
            assert meter.live_bytes - others < one
            optimizer.step()
            assert all(p.grad is not None for p in model.parameters())
            optimizer.zero_grad()
        # weights, gradient, two moments, and two temporaries of a step of one parameter
        assert 4 * one < meter.peak_bytes - others < 6.1 * one
    assert all(p.untyped_storage().nbytes() == one for p in model.parameters())


def test_zero_grad_without_none_and_accumulation():
    compare(set_to_none=False)
    compare(micro_batches=3)
    compare(micro_batches=2, set_to_none=False, base=recomputing(N))


def test_clipping_and_writes_to_gradients():
    compare(before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    compare(before_step=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))

    def scale(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.data.mul_(0.5)
            parameter.grad = parameter.grad + 1e-3

    compare(before_step=scale)


def test_gradients_that_are_on_their_way_back_when_they_are_clipped():
    operations = list(parking(storing(N)).operations)
    operations.insert(operations.index(Backward(1)), Prefetch("g", N))  # the last stage's are fetched early
    fetched_again = len(operations) - 1 - operations[::-1].index(Prefetch("g", N))
    del operations[fetched_again]
    early = dataclasses.replace(parking(storing(N)), operations=operations)
    plain = models.stages_of_every_kind()

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    expected = train(plain, make_adamw(plain.parameters()), before_step=clip)
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, early, optimizer=optimizer):
        assert_equal(train(model, optimizer, before_step=clip), expected)


def test_writes_to_weights_between_steps():
    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    compare(after_step=clamp)
    compare(before_step=clamp)


def test_writes_to_weights_that_stay_on_the_device_between_steps():
    """As `joint` has it: a copy that was made before the step ended does not count if the loop changes weights."""
    chain = lowtide.Chain("", [lowtide.Stage(str(k), 1.0, 2.0, 8, 8, weight_bytes=80) for k in range(N)])

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    plain = models.stages_of_every_kind()
    expected = train(plain, make_adamw(plain.parameters()), after_step=clamp)
    for budget in (400, 600, 1000):
        schedule = lowtide.solve(chain, memory_budget=budget, strategy="joint", bandwidth=100).schedule
        model = models.stages_of_every_kind()
        optimizer = make_adamw(model.parameters())
        with lowtide.attach(model, schedule, optimizer=optimizer):
            assert_equal(train(model, optimizer, after_step=clamp), expected)


class Clamped(nn.Linear):
    """Writes to its own weight in each forward, past any version."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


def test_a_stage_that_writes_to_its_own_weights():
    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Clamped(8, 8), nn.Tanh())

    compare(model_of=model_of)


class ClampedLater(nn.Linear):
    """Begins to write to its own weight in a later forward."""

    num_calls, past_versions = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).num_calls += 1
        if self.num_calls > 3:
            weight = self.weight.data if self.past_versions else self.weight.detach()
            weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def clamped_later() -> nn.Sequential:
    torch.manual_seed(0)
    ClampedLater.num_calls = 0
    return nn.Sequential(nn.Linear(8, 8), ClampedLater(8, 8).requires_grad_(False), nn.Tanh())


def test_a_stage_that_begins_to_write_to_its_own_weights(monkeypatch):
    """Versions tell; where they do not, the loss of a write is found within a round of stages."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return make_adamw([parameter for parameter in parameters if parameter.requires_grad])

    compare(make, model_of=clamped_later, num_steps=6)
    monkeypatch.setattr(ClampedLater, "past_versions", True)
    model = clamped_later()
    optimizer = make(model.parameters())
    match = r"parameter '1\.weight' was changed while its stage ran"
    with lowtide.attach(model, parking(storing(3)), optimizer=optimizer), pytest.raises(ExecutionError, match=match):
        train(model, optimizer, num_steps=7)


def with_gradients_that_stay(n: int) -> Schedule:
    """Weights and optimizer state come and go; gradients stay on the device from their backward to their update."""
    parked = parking(storing(n))
    kept = [operation for operation in parked.operations if getattr(operation, "kind", None) != "g"]
    return dataclasses.replace(parked, operations=tuple(kept))


def test_gradients_that_stay_are_copied_while_backward_runs():
    """So the update that frees them does not wait for a copy, unless they have changed since."""

    def moved(change: Callable[[torch.Tensor], Any]) -> float:
        model = models.stages_of_every_kind()
        optimizer = make_adamw(model.parameters())
        with lowtide.attach(model, with_gradients_that_stay(len(model)), optimizer=optimizer) as plan:
            for x in batches(SHAPE, 3):
                square_loss(model(x)).backward()
                for parameter in model.parameters():
                    change(parameter.grad)
                optimizer.step()
                assert all(parameter.grad is not None for parameter in model.parameters())
                optimizer.zero_grad()
            return plan.stats().moved_bytes_per_step

    num_bytes = sum(parameter.nbytes for parameter in models.stages_of_every_kind().parameters())
    assert moved(lambda gradient: gradient.mul_(0.5)) - moved(lambda gradient: None) == num_bytes


@pytest.mark.parametrize("num_slow_copies", [0, 2 * N])
@pytest.mark.parametrize("past_versions", [False, True])
def test_gradients_that_stay_and_are_changed(past_versions, num_slow_copies, monkeypatch):
    """Training loops of all ages clamp `p.grad.data`, which no version tells; in the first steps, which compare,
    perhaps before the copy that backward began has ended.
    """
    fill, numbers = file_tier._fill_mirrors, itertools.count()

    def fill_late(copies: Any) -> None:
        time.sleep(0.02 if next(numbers) < num_slow_copies else 0.0)
        fill(copies)

    monkeypatch.setattr(file_tier, "_fill_mirrors", fill_late)

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            (parameter.grad.data if past_versions else parameter.grad).clamp_(-1e-3, 1e-3)

    plain, model = models.stages_of_every_kind(), models.stages_of_every_kind()
    plain_optimizer, optimizer = make_adamw(plain.parameters()), make_adamw(model.parameters())
    expected = train(plain, plain_optimizer, before_step=clamp, num_steps=5)
    with lowtide.attach(model, with_gradients_that_stay(len(model)), optimizer=optimizer):
        assert_equal(train(model, optimizer, before_step=clamp, num_steps=5), expected)


def test_gradients_that_stay_and_are_given_other_memory():
    """Late, so that no comparison of the first steps tells of it."""
    steps = itertools.count(1)

    def halve(model: nn.Module) -> None:
        if next(steps) % 5 == 4:
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data * 0.5

    plain, model = models.stages_of_every_kind(), models.stages_of_every_kind()
    plain_optimizer, optimizer = make_adamw(plain.parameters()), make_adamw(model.parameters())
    expected = train(plain, plain_optimizer, before_step=halve, num_steps=5)
    with lowtide.attach(model, with_gradients_that_stay(len(model)), optimizer=optimizer):
        assert_equal(train(model, optimizer, before_step=halve, num_steps=5), expected)


def test_gradients_that_stay_and_begin_to_be_changed():
    """Where no version tells, it is found within a round of stages, and said."""
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    match = "the gradient of parameter '.*' was changed through .data after backward"
    with lowtide.attach(model, with_gradients_that_stay(len(model)), optimizer=optimizer):
        train(model, optimizer)

        def clamp(model: nn.Module) -> None:
            for parameter in model.parameters():
                parameter.grad.data.clamp_(-1e-3, 1e-3)

        with pytest.raises(ExecutionError, match=match):
            train(model, optimizer, before_step=clamp, num_steps=len(model) + 1)


@pytest.mark.parametrize("step_in_backward", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_list_is_simulated_as_it_is_executed(seed, step_in_backward):
    """What stays is copied when the next step begins, and the list is executed as it is: nothing is done besides."""
    chain = random_chain(seed, 4, features=("weight gradients", "updates"))

    def solved(budget: int) -> lowtide.Solution:
        return lowtide.solve(
            chain, memory_budget=budget, strategy="joint", bandwidth=3, step_in_backward=step_in_backward
        )

    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        solved(0)
    least, ample = (
        refused.value.minimum_bytes,
        lowtide.solve(chain, memory_budget=2**50, strategy="store-all").peak_bytes,
    )
    planned = solved(least + (ample - least) // 3)
    executed = as_executed(planned.schedule, grads_resident=chain.grads_resident)
    assert as_executed(executed, grads_resident=chain.grads_resident) == executed
    trace = lowtide.simulate(chain, executed, bandwidth=3)
    assert trace.peak_bytes == planned.peak_bytes
    assert trace.seconds >= planned.seconds * (1 - 1e-9)
    copied = {operation.value for operation in executed.operations if isinstance(operation, Offload)}
    updated = {operation.stage for operation in executed.operations if isinstance(operation, Update)}
    assert step_in_backward or {("g", k) for k in updated} <= copied
    for index, operation in enumerate(executed.operations):
        if isinstance(operation, Offload) and operation.kind in ("w", "opt"):
            assert Release(operation.kind, operation.stage) in executed.operations[index:]
    for number in range(num_late_fetches(planned.schedule) + 1):
        late = with_late_fetches(planned.schedule, number)
        assert len(late.start.device) == len(planned.schedule.start.device) - number
        executed = as_executed(late, grads_resident=chain.grads_resident)
        assert as_executed(executed, grads_resident=chain.grads_resident) == executed
        assert lowtide.simulate(chain, executed, bandwidth=3).peak_bytes <= planned.peak_bytes


def test_fetches_for_the_next_step_that_are_made_when_it_begins():
    """They arrive while it runs; what is fetched at the end of a step has to arrive before the user's code runs."""
    n = 3
    parked = stepping_in_backward(storing(n))
    fetched = [Prefetch("w", k) for k in range(1, n + 1)]
    first = {index for index, operation in enumerate(parked.operations) if operation in fetched}
    first = {min(index for index in first if parked.operations[index] == each) for each in fetched}
    kept = [operation for index, operation in enumerate(parked.operations) if index not in first]
    start = dataclasses.replace(parked.start, device=frozenset(("w", k) for k in range(1, n + 1)))
    schedule = dataclasses.replace(parked, operations=(*kept, *fetched), start=start)
    chain = lowtide.Chain("three", [lowtide.Stage(str(k), 1.0, 1.0, 1, 1, weight_bytes=4) for k in range(n)])
    assert num_late_fetches(schedule) == n
    late = with_late_fetches(schedule, 2)
    assert late.operations[:2] == (Prefetch("w", 2), Prefetch("w", 3))
    assert late.start.device == {("w", 1)}
    seconds = [
        lowtide.simulate(chain, as_executed(with_late_fetches(schedule, number)), bandwidth=4).seconds
        for number in range(n + 1)
    ]
    assert seconds[2] < seconds[0]
    for number in range(n + 1):
        plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(n)))
        model = copy.deepcopy(plain)
        optimizers = [make_adamw(each.parameters()) for each in (plain, model)]
        with lowtide.attach(model, with_late_fetches(schedule, number), optimizer=optimizers[1]):
            for x in batches((4, 8), 3):
                for each, optimizer in zip((plain, model), optimizers, strict=True):
                    square_loss(each(x)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    with torch.no_grad():
                        each[1].weight.data.clamp_(-0.3, 0.3)
            assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_autocast():
    def model_of() -> nn.Sequential:
        class Cast(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return super().forward(x)

        torch.manual_seed(0)
        return Cast(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4)))

    compare(model_of=model_of)
    compare(model_of=model_of, base=recomputing(4))


def test_a_scheduler_and_groups_with_their_own_weight_decay():
    def train_with_scheduler(model: nn.Module, plan_of: Callable[[Any], Any]) -> Numbers:
        parameters = list(model.parameters())
        groups = [{"params": parameters[::2], "weight_decay": 0.3}, {"params": parameters[1::2], "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        with plan_of(optimizer):
            later = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return train(model, optimizer, after_step=lambda _: (scheduler.step(), later.step()))

    model = models.stages_of_every_kind()
    expected = train_with_scheduler(models.stages_of_every_kind(), lambda _: torch.enable_grad())
    got = train_with_scheduler(
        model, lambda optimizer: lowtide.attach(model, parking(recomputing(N)), optimizer=optimizer)
    )
    assert_equal(got, expected)


def test_a_closure():
    def train_with_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = square_loss(model(batches(SHAPE, 1)[0]))
            loss.backward()
            return loss

        seed_all(1)
        losses = {f"loss {index}": optimizer.step(closure).detach() for index in range(3)}
        return losses | noted(model, optimizer, 0)

    plain = models.stages_of_every_kind()
    expected = train_with_closure(plain, make_adamw(plain.parameters()))
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, parking(storing(N)), optimizer=optimizer):
        assert_equal(train_with_closure(model, optimizer), expected)


def test_a_scaler_that_skips_a_step():
    def train_scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        seed_all(1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for index, x in enumerate(batches(SHAPE, 5)):
            optimizer.zero_grad()
            scaler.scale(square_loss(model(x)) * (float("inf") if index == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return noted(model, optimizer, 0) | {"scale": torch.tensor(scaler.get_scale())}

    plain = models.stages_of_every_kind()
    expected = train_scaled(plain, make_adamw(plain.parameters()))
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, parking(recomputing(N)), optimizer=optimizer):
        assert_equal(train_scaled(model, optimizer), expected)


class Tied(nn.Sequential):
    """The first and the last stage have one weight."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(*(nn.Linear(SHAPE[1], SHAPE[1]) for _ in range(4)))
        self[3].weight = self[0].weight


def frozen_and_adapted() -> nn.Sequential:
    """Frozen stages first, then frozen weights with small trained ones, as for LoRA."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SHAPE[1], SHAPE[1]).requires_grad_(False)
            self.down, self.up = nn.Linear(SHAPE[1], 2, bias=False), nn.Linear(2, SHAPE[1], bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.up(torch.tanh(self.down(x)))

    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(SHAPE[1], SHAPE[1]).requires_grad_(False), Adapted(), Adapted(), nn.Tanh())


@pytest.mark.parametrize("base", [storing(4), recomputing(4)], ids=lambda s: s.strategy)
@pytest.mark.parametrize("model_of", [Tied, frozen_and_adapted])
def test_tied_and_frozen_weights(model_of, base):
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)

    compare(make, base, model_of)


def test_an_average_of_weights_and_evaluation_between_steps():
    def train_averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        seen: list[torch.Tensor] = []

        def evaluate(model: nn.Module) -> None:
            averaged.update_parameters(model)
            model.eval()
            with torch.no_grad():
                seen.append(model(batches(SHAPE, 1)[0]))
            model.train()

        numbers = train(model, optimizer, after_step=evaluate)
        numbers |= {f"average {name}": p.clone() for name, p in averaged.module.named_parameters()}
        return numbers | {f"evaluation {index}": result for index, result in enumerate(seen)}

    plain = models.stages_of_every_kind()
    expected = train_averaged(plain, make_adamw(plain.parameters()))
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, parking(mixed(N)), optimizer=optimizer):
        assert_equal(train_averaged(model, optimizer), expected)


def test_a_checkpoint_from_the_midst_goes_both_ways():
    def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()

    def load(checkpoint: bytes, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        found = torch.load(io.BytesIO(checkpoint))
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    plain = models.stages_of_every_kind()
    plain_optimizer = make_adamw(plain.parameters())
    train(plain, plain_optimizer)
    checkpoint = saved(plain, plain_optimizer)
    expected = train(plain, plain_optimizer)

    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, parking(recomputing(N)), optimizer=optimizer):
        train(model, optimizer)
        midst = saved(model, optimizer)
        load(checkpoint, model, optimizer)  # while everything is parked
        assert_equal(train(model, optimizer), expected)
    fresh = models.stages_of_every_kind()
    fresh_optimizer = make_adamw(fresh.parameters())
    load(midst, fresh, fresh_optimizer)
    assert_equal(train(fresh, fresh_optimizer), expected)


def test_detaching_brings_everything_back_and_training_goes_on():
    plain = models.stages_of_every_kind()
    plain_optimizer = make_adamw(plain.parameters())
    expected = [train(plain, plain_optimizer) for _ in range(3)]
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    addresses = [p.untyped_storage()._cdata for p in model.parameters()]
    got = []
    for base in (parking(storing(N)), None, parking(recomputing(N))):
        if base is None:
            got.append(train(model, optimizer))
            continue
        with lowtide.attach(model, base, optimizer=optimizer):
            got.append(train(model, optimizer))
        assert [p.untyped_storage()._cdata for p in model.parameters()] == addresses
    for one, other in zip(got, expected, strict=True):
        assert_equal(one, other)


def test_detaching_without_room_for_everything(monkeypatch):
    plain = models.stages_of_every_kind()
    plain_optimizer = make_adamw(plain.parameters())
    expected = [train(plain, plain_optimizer) for _ in range(2)]
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    plan = lowtide.attach(model, parking(storing(N)), optimizer=optimizer)
    assert_equal(train(model, optimizer), expected[0])

    def no_room(self: Any) -> int:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Parked, "prefetch", no_room)
    with pytest.raises(ExecutionError, match="the device has no room for all weights"):
        plan.detach()
    assert not plan.is_attached
    assert_equal(train(model, optimizer), expected[1])  # where everything is


def test_copies_share_nothing():
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, parking(storing(N)), optimizer=optimizer):
        train(model, optimizer)
        other = copy.deepcopy(model)
        before = [p.detach().clone() for p in other.parameters()]
        train(model, optimizer)
        assert all(itertools.starmap(torch.equal, zip(before, other.parameters(), strict=True)))
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.fixture
def _one_thread():
    """A fork has none of the others, and would wait for them; and with more, sums are made in another order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork of a process with threads
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("in_backward", [False, True])
def test_killed_in_the_middle_of_a_step_the_last_checkpoint_loads(in_backward, monkeypatch, tmp_path):
    """Also in a step whose backward has updated half of the weights; and no file of the lower tier is left."""
    (tmp_path / "tier").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tier"))
    schedule = (stepping_in_backward if in_backward else parking)(recomputing(N))
    file = tmp_path / "checkpoint.pt"

    def simply(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        seed_all(5)
        for x in batches(SHAPE, 2):
            square_loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def child() -> None:
        model, optimizer = model_and_optimizer()
        lowtide.attach(model, schedule, optimizer=optimizer)
        simply(model, optimizer)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        model[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        simply(model, optimizer)

    process = os.fork()
    if not process:
        try:
            child()
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert not list((tmp_path / "tier").iterdir())
    plain, plain_optimizer = model_and_optimizer()
    simply(plain, plain_optimizer)
    found = torch.load(file)
    model, optimizer = model_and_optimizer()
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert_equal(noted(model, optimizer, 0), noted(plain, plain_optimizer, 0))


# Steps that are not as the list has them


def test_another_optimizer_than_the_one_that_was_given():
    """Its step is not taken stage by stage; it works on what is on the host where that is."""
    plain = models.stages_of_every_kind()
    expected = train(plain, make_adamw(plain.parameters()))
    chain = lowtide.Chain("", [lowtide.Stage(str(k), 1.0, 2.0, 8, 8, weight_bytes=80) for k in range(N)])
    for schedule in (
        parking(recomputing(N)),
        lowtide.solve(chain, memory_budget=600, strategy="joint", bandwidth=100).schedule,
    ):
        model = models.stages_of_every_kind()
        with lowtide.attach(model, schedule, optimizer=make_adamw(model.parameters())):
            with pytest.warns(
                lowtide.LowtideWarning, match="stepped by another optimizer than the one that fit"
            ) as seen:
                assert_equal(train(model, make_adamw(model.parameters())), expected)
            assert len(seen) == 1  # in all steps


def test_a_forward_without_a_backward_and_an_exception_on_the_way():
    class Fails(nn.Module):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise KeyError("on purpose")
            return x

    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Fails(), nn.Linear(8, 8))

    plain = model_of()
    expected = train(plain, make_adamw(plain.parameters()))
    model = model_of()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, parking(recomputing(4)), optimizer=optimizer):
        model(batches(SHAPE, 1)[0])
        model[2].fails = True
        with pytest.raises(KeyError):
            model(batches(SHAPE, 1)[0])
        model[2].fails = False
        assert_equal(train(model, optimizer), expected)


def test_going_through_a_graph_twice_and_from_its_middle():
    """Weights that have left are fetched for whoever opens what a stage saved."""

    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Tanh())

    def train_oddly(model: nn.Sequential) -> Numbers:
        inner: list[torch.Tensor] = []
        handle = model[1][0].register_forward_hook(lambda *args: inner.append(args[2]))
        x = batches(SHAPE, 1)[0].requires_grad_()
        square_loss(model(x)).backward(retain_graph=True)
        numbers = {f"once {name}": g for name, g in gradients(model)}
        inner[0].sum().backward(retain_graph=True)
        numbers |= {f"from the middle {name}": g for name, g in gradients(model)}
        handle.remove()
        loss = square_loss(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
        first, second = model(x), model(2 * x)
        square_loss(first).backward()
        square_loss(second).backward()
        return numbers | {f"twice {name}": g for name, g in gradients(model)} | {"x": x.grad}

    expected = train_oddly(model_of())
    for base in (storing(3),):
        model = model_of()
        with lowtide.attach(model, parking(base), optimizer=make_adamw(model.parameters())):
            assert_equal(train_oddly(model), expected)


def test_other_names_for_weights_stay_true():
    """A state dict holds the memory of the parameters, and so their numbers, whatever happens to them."""
    model, plain = models.stages_of_every_kind(), models.stages_of_every_kind()
    held = model.state_dict()
    optimizer, other = make_adamw(model.parameters()), make_adamw(plain.parameters())
    with lowtide.attach(model, parking(recomputing(N)), optimizer=optimizer):
        train(model, optimizer)
        train(plain, other)
        assert_equal(held, plain.state_dict())


def test_nothing_is_left_behind():
    """From step to step the same bytes, and after the plan is gone the bytes from before."""
    model = models.stages_of_every_kind()
    optimizer = make_adamw(model.parameters())
    train(model, optimizer, num_steps=1)
    gc.collect()
    with Meter("cpu") as before:
        pass
    live = []
    with lowtide.attach(model, parking(recomputing(N)), optimizer=optimizer):
        for _ in range(4):
            train(model, optimizer, num_steps=2)
            gc.collect()
            with Meter("cpu") as meter:
                live.append(meter.live_bytes)
    assert len(set(live[1:])) == 1
    gc.collect()
    with Meter("cpu") as after:
        assert after.live_bytes == before.live_bytes


# Steps in backward


@pytest.mark.parametrize("base", [storing(N), recomputing(N), mixed(N)], ids=lambda s: s.strategy)
def test_updates_in_backward(base):
    def train_simply(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        seed_all(5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        numbers: Numbers = {}
        for index, x in enumerate(batches(SHAPE, 4)):
            loss = square_loss(model(x))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)
            numbers[f"{index} loss"] = loss.detach()
        return numbers | noted(model, optimizer, 0)

    plain = models.stages_of_every_kind()
    expected = train_simply(plain, make_adamw(plain.parameters()))
    model, optimizer = model_and_optimizer()
    with lowtide.attach(model, stepping_in_backward(base), optimizer=optimizer):
        assert_equal(train_simply(model, optimizer), expected)


def test_a_gradient_that_is_complete_after_the_backward_of_its_stage():
    """A penalty that is computed before the forward comes last in backward."""

    def train_with_penalty(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        seed_all(5)
        for x in batches(SHAPE, 3):
            penalty = sum(parameter.square().sum() for parameter in list(model.parameters())[::2])
            (square_loss(model(x)) + 0.1 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
        return noted(model, optimizer, 0)

    expected = train_with_penalty(*model_and_optimizer())
    model, optimizer = model_and_optimizer()
    with lowtide.attach(model, stepping_in_backward(storing(N)), optimizer=optimizer):
        assert_equal(train_with_penalty(model, optimizer), expected)


@pytest.mark.parametrize("what", ["weights of stage 1", "settings of the optimizer", "gradients"])
def test_changes_between_updates_in_backward_and_the_step_are_refused(what):
    model, optimizer = model_and_optimizer()
    x = batches(SHAPE, 1)[0]
    with lowtide.attach(model, stepping_in_backward(storing(N)), optimizer=optimizer):
        square_loss(model(x)).backward()
        if "weights" in what:
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        elif "gradients" in what:
            model[0].weight.grad = None
        else:
            optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(ExecutionError, match=f"{what}.* changed between backward and optimizer.step"):
            optimizer.step()
        square_loss(model(x)).backward()
        optimizer.step()
        with pytest.raises(ExecutionError, match="was called again after one backward"):
            optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["adamw", "adamw foreach", "adamw fused"])
def test_updates_in_backward_beside_weights_that_stay(name, set_to_none):
    """A weight that two stages have stays; its gradient is set to zero in one call with those that were used up."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        for x in batches(SHAPE, 3):
            square_loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return noted(model, optimizer, 0)

    expected = steps(plain := Tied(), OPTIMIZERS[name](plain.parameters()))
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    with lowtide.attach(model, stepping_in_backward(recomputing(4)), optimizer=optimizer):
        assert_equal(steps(model, optimizer), expected)


def test_what_updates_in_backward_cannot_do():
    model, optimizer = model_and_optimizer()
    x = batches(SHAPE, 1)[0]
    with lowtide.attach(model, stepping_in_backward(storing(N)), optimizer=optimizer):
        square_loss(model(x)).backward()
        for read in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            lambda: model[0].weight.grad.norm(),
        ):
            with pytest.raises(ExecutionError, match="this gradient was used up"):
                read()
        with pytest.raises(ExecutionError, match=r"optimizer\.step\(\) was not called"):
            model(x)
        loss = square_loss(model(x))
        loss.backward(retain_graph=True)
        with pytest.raises(ExecutionError, match="step_in_backward=True updates weights in the first backward"):
            loss.backward()
        optimizer.step()
        model(x)


# Wrong use


def model_and_optimizer() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = models.stages_of_every_kind()
    return model, make_adamw(model.parameters())


def test_an_optimizer_is_needed():
    model, _ = model_and_optimizer()
    with pytest.raises(PlanError, match="pass it with optimizer="):
        lowtide.attach(model, parking(storing(N)))


def test_an_optimizer_of_other_parameters():
    model, _ = model_and_optimizer()
    with pytest.raises(PlanError, match=r"does not have parameter '0\.weight'"):
        lowtide.attach(model, parking(storing(N)), optimizer=make_adamw(list(model[4:].parameters())))


def test_an_optimizer_that_looks_across_parameters():
    class Normalised(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
            super().step()

    model, _ = model_and_optimizer()
    for optimizer in (Normalised(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters())):
        with pytest.raises(PlanError, match="does not treat each parameter by itself"):
            lowtide.attach(model, parking(storing(N)), optimizer=optimizer)


def test_an_optimizer_is_tried_whatever_the_default_device_is():
    model, optimizer = model_and_optimizer()
    with torch.device("meta"):
        plan = lowtide.attach(model, parking(storing(N)), optimizer=optimizer)
    plan.detach()


def test_several_processes(monkeypatch):
    model, optimizer = model_and_optimizer()
    x = batches(SHAPE, 1)[0]
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(PlanError, match="does not work with several processes"):
        lowtide.attach(model, parking(storing(N)), optimizer=optimizer)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with lowtide.attach(model, parking(storing(N)), optimizer=optimizer):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)  # as after DistributedDataParallel(model)
        with pytest.raises(PlanError, match="does not work with several processes"):
            model(x)


@pytest.mark.parametrize(
    ("when", "in_backward"),
    [("before backward", False), ("before backward", True), ("after backward", False)],  # with True gradients refuse
)
def test_a_model_that_was_converted_in_the_middle_of_a_step(when, in_backward):
    """What it was converted to is not lost, and nothing is updated with what it was before."""
    model, optimizer = model_and_optimizer()
    schedule = stepping_in_backward(recomputing(N)) if in_backward else parking(storing(N))
    with lowtide.attach(model, schedule, optimizer=optimizer) as plan:
        loss = square_loss(model(batches(SHAPE, 1)[0]))
        if when == "after backward":
            loss.backward()
        model.to(torch.float64)
        kept = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(PlanError, match="was moved or given other memory"):
            (optimizer.step if when == "after backward" else loss.backward)()
        plan.detach()
    assert all(itertools.starmap(torch.equal, zip(kept, model.parameters(), strict=True)))


def test_parameters_that_were_replaced_while_they_were_parked():
    model = models.stages_of_every_kind()
    model[0] = nn.Linear(*model[0].weight.shape, bias=False)  # a place without a parameter is none that was replaced
    optimizer = make_adamw(model.parameters())
    loaded = {name: value + 1 for name, value in model.state_dict().items()}
    with lowtide.attach(model, parking(storing(N)), optimizer=optimizer) as plan:
        train(model, optimizer)
        model.load_state_dict(loaded, assign=True)
        with pytest.raises(PlanError, match=r"parameter '0\.weight' was replaced \(load_state_dict\(assign=True\)"):
            model(batches(SHAPE, 1)[0])
        plan.detach()
    assert_equal(model.state_dict(), loaded)


def test_one_process_that_is_a_group_of_its_own():
    """As a script for several processes that is started with one."""
    plain, plain_optimizer = model_and_optimizer()
    model, optimizer = model_and_optimizer()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        expected = train(plain, plain_optimizer)
        with lowtide.attach(model, parking(recomputing(N)), optimizer=optimizer):
            wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            got = train(wrapped, optimizer)
    finally:
        torch.distributed.destroy_process_group()
    assert_equal({name.replace("module.", ""): value for name, value in got.items()}, expected)


def test_a_model_that_was_converted_while_it_was_parked():
    model, optimizer = model_and_optimizer()
    with lowtide.attach(model, parking(storing(N)), optimizer=optimizer) as plan:
        x = batches(SHAPE, 1)[0]
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        kept = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(PlanError, match=r"parameter '0\.weight' was moved or given other memory"):
            model(x)
        plan.detach()
    assert all(itertools.starmap(torch.equal, zip(kept, model.parameters(), strict=True)))
