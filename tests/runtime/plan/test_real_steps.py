"""The budget in loops that people write: what real steps show is planned for, or said, and never ends training."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import random
import threading
import warnings
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.budgets import measured_once
from tests.runtime.training import above_the_least
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

import lowtide
from lowtide import Backward, Forward
from lowtide.runtime import meter as meter_module
from lowtide.runtime.measure.weights import optimizer_step_bytes
from lowtide.runtime.meter import Meter, StepMeter
from lowtide.runtime.plan import steps
from lowtide.runtime.plan.signature import Signature
from lowtide.units import format_bytes

OPTIONS = {"bandwidth": 0, "strategy": "rotor"}
ROWS, WIDTH = 256, 64


def deep(depth: int = 6, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def square(result: torch.Tensor) -> torch.Tensor:
    return result.square().mean()


def fitted(model: nn.Module, sample, share: float = 1.0, *, again: bool = False, **options) -> lowtide.Plan:
    """Within the least budget times a share; with `again` for what is measured a second time."""
    options = {**OPTIONS, **options}
    with contextlib.nullcontext() if again else measured_once():
        with pytest.raises(lowtide.InfeasibleBudgetError) as refusal:
            lowtide.fit(model, sample, memory_budget=1, **options)
        budget = above_the_least(share, refusal.value.minimum_bytes, model)
        return lowtide.fit(model, sample, memory_budget=budget, **options)


def peaks_of(calls, optimizer=None, loss=square) -> list[int]:
    """The peak of all live tensors in each step; one without an optimizer leaves its gradients."""
    peaks = []
    for call in calls:
        gc.collect()
        with Meter("cpu") as meter:
            loss(call()).backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(meter.peak_bytes)
    return peaks


@pytest.mark.parametrize("set_to_none", [True, False], ids=["accumulation", "zeroed gradients"])
def test_gradients_that_are_there_when_a_forward_begins_are_planned_for(set_to_none, caplog):
    model, x = deep(8, 128), torch.randn(ROWS, 128)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = fitted(model, x, 1.2, optimizer=optimizer, loss=square)
    num_backwards = 4 if set_to_none else 1
    with caplog.at_level(logging.INFO, "lowtide"):
        for index in range(3):
            peaks = peaks_of([lambda: model(x)] * num_backwards)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            if index:  # the second such step at the latest
                assert max(peaks[1:] or peaks * (index > 1), default=0) <= plan.memory_budget
    lines = [record.message for record in caplog.records if "gradients are there" in record.message]
    assert len(lines) == 1
    assert "planned again in" in lines[0]
    assert "grads_resident=True" in lines[0]
    assert plan.stats().num_steps == 3 * num_backwards
    assert plan.stats().measured_peak_bytes <= plan.memory_budget


def test_gradients_for_which_there_is_room_need_no_other_plan(caplog):
    model, x = deep(), torch.randn(ROWS, WIDTH)
    with caplog.at_level(logging.INFO, "lowtide"), lowtide.fit(model, x, memory_budget="1GiB", **OPTIONS) as plan:
        schedule = plan.schedule
        peaks_of([lambda: model(x)] * 3)
        assert plan.schedule is schedule
    assert not [record for record in caplog.records if "planned again" in record.message]


def test_the_measured_peak_is_that_of_real_steps():
    model, x = deep(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with lowtide.fit(model, x, memory_budget="1GiB", **OPTIONS, optimizer=optimizer) as plan:

        def hungry(result: torch.Tensor) -> torch.Tensor:
            return torch.cat([result] * 40).square().mean()

        rehearsed = plan.stats().measured_peak_bytes
        peaks = peaks_of([lambda: model(x)] * 2, optimizer, hungry)
        assert plan.stats().measured_peak_bytes == max(peaks) > rehearsed
        assert plan.stats().num_steps == 2
        assert plan.stats().measured_seconds > 0
    del peaks
    model(x).sum().backward()  # nothing is left behind that counts
    assert not torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"loss", "optimizer"}, "loss= should be what the loop computes"),
        ({"loss"}, "pass optimizer=optimizer to fit"),
    ],
)
def test_a_step_that_takes_more_than_the_budget_is_planned_for(given, advice):
    model, x = deep(8), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    known = {"optimizer": optimizer, "loss": square}
    plan = fitted(model, x, 1.9, **{"optimizer": "sgd"} | {name: known[name] for name in given})

    def hungry(result: torch.Tensor) -> torch.Tensor:
        return torch.cat([result] * 2).square().mean()

    with pytest.warns(lowtide.LowtideWarning, match=r"a step took .* but the budget is .*; planning again") as seen:
        peaks = peaks_of([lambda: model(x)] * 4, optimizer, hungry)
    assert f"({advice}; what the loop keeps counts too)" in str(seen[0].message)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert peaks[0] > plan.memory_budget
    assert max(peaks[2:]) <= plan.memory_budget  # the second one plans


def test_the_measured_peak_keeps_a_step_that_exceeded_the_budget():
    model, x, kept = deep(8), torch.randn(ROWS, WIDTH), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = fitted(model, x, 1.9, optimizer=optimizer, loss=square)
    peaks_of([lambda: model(x)], optimizer)
    kept.append(torch.zeros(200_000))
    largest = peaks_of([lambda: model(x)], optimizer)[0]
    assert plan.stats().measured_peak_bytes == largest > plan.memory_budget
    kept.clear()
    with pytest.warns(lowtide.LowtideWarning, match="a step took .* but the budget is"):
        peaks_of([lambda: model(x)] * 3, optimizer)
    assert plan.stats().num_steps == 5
    assert plan.stats().measured_peak_bytes == largest
    assert format_bytes(largest) in next(line for line in str(plan).splitlines() if "measured" in line)
    plan.detach()
    assert plan.stats().measured_peak_bytes == largest


def test_the_measured_peak_is_that_of_the_largest_shape():
    model, small, large = deep(), torch.randn(64, WIDTH), torch.randn(640, WIDTH)
    plan = fitted(model, small, 1.1)
    with pytest.warns(lowtide.LowtideWarning, match="training continues with the leanest schedule"):
        square(model(large)).backward()
    model.zero_grad()
    largest = plan.stats().measured_peak_bytes
    assert largest > plan.memory_budget
    for _ in range(3):
        square(model(small)).backward()
        model.zero_grad()
        assert plan.stats().measured_peak_bytes == largest


def test_training_goes_on_under_the_leanest_plan_where_nothing_stays_within_the_budget():
    model, x = deep(8), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, 1.9, optimizer=optimizer, loss=square)

    def hungry(result: torch.Tensor) -> torch.Tensor:
        return torch.cat([result] * 20).square().mean()

    with pytest.warns(lowtide.LowtideWarning, match="training continues with the leanest schedule") as seen:
        peaks_of([lambda: model(x)] * 6, optimizer, hungry)
    assert len(seen) == 1


def test_inputs_that_require_gradients_later_are_planned_for():
    model, x = deep(10), torch.randn(ROWS, WIDTH)
    for parameter in model[:9].parameters():
        parameter.requires_grad_(False)

    def asking() -> torch.Tensor:
        return model(x.detach().requires_grad_())

    optimizer = torch.optim.SGD(model[9:].parameters(), 0.1)
    plan = fitted(model, x, 1.2, optimizer=optimizer, loss=square)
    peaks = peaks_of([lambda: model(x), asking, asking, lambda: model(x)], optimizer)
    assert max(peaks[2:]) <= plan.memory_budget
    assert plan.num_shapes == 2


class Resizing(nn.Module):
    """Its work is as large as an argument, or an attribute, says."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.blocks = 16, nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()) for _ in range(6)))

    def forward(self, x, size=None):
        return self.blocks(F.interpolate(x, size=size or self.size))


def test_sizes_that_grow_through_an_argument_are_planned_for():
    model, x = Resizing(), torch.randn(8, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = fitted(model, (x, 16), 1.9, optimizer=optimizer, loss=square)
    peaks = peaks_of([lambda: model(x, 16), *([lambda: model(x, 20)] * 2), lambda: model(x, 16)], optimizer)
    assert max(peaks[2:]) <= plan.memory_budget
    assert plan.num_shapes == 2


def test_a_number_that_sets_no_size_is_planned_for_once(caplog):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = deep(3)

        def forward(self, x, step):
            return self.blocks(x) * step

    model, x = Scaled(), torch.randn(ROWS, WIDTH)
    with caplog.at_level(logging.INFO, "lowtide"), fitted(model, (x, 0), 1.5) as plan:
        peaks_of([lambda step=step: model(x, step) for step in range(5)], torch.optim.SGD(model.parameters(), 0.1))
        assert plan.stats().num_steps == 5
    assert len([record for record in caplog.records if "planned again" in record.message]) == 1


def test_sizes_that_grow_through_an_attribute_are_said():
    model, x = Resizing(), torch.randn(8, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, 1.2, optimizer=optimizer, loss=square)
    peaks_of([lambda: model(x)] * 5, optimizer)
    model.size = 40
    with pytest.warns(lowtide.LowtideWarning, match="a step took"):
        peaks_of([lambda: model(x)] * 3, optimizer)


class Batch:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@dataclass
class Record:
    x: torch.Tensor


@pytest.mark.parametrize("kind", [Batch, Slotted, Record, lambda x: UserDict(x=x), lambda x: Batch(Batch(x))])
def test_the_signature_sees_tensors_inside_objects(kind):
    small, large = (Signature.of((kind(torch.zeros(rows, 4)),), {}, "cpu") for rows in (2, 3))
    assert small.tensors == (((2, 4), "float32", ""),)
    assert small.fits_within(large)
    assert not large.fits_within(small)
    assert "[3, 4] float32" in large.difference(small)


def test_a_batch_that_is_too_large_does_not_end_training():
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = deep()

        def forward(self, batch):
            return self.blocks(batch.x)

    model, small, large = Taking(), Batch(torch.randn(64, WIDTH)), Batch(torch.randn(512, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = fitted(model, (small,), loss=square, optimizer=optimizer)
    schedule = plan.schedule
    message = r"\[512, 64\] float32, but the plan is for \[64, 64\] .*that this model needs.* with the leanest schedule"
    with pytest.warns(lowtide.LowtideWarning, match=message) as seen:
        peaks_of([lambda: model(large)] * 3, optimizer)
    assert len(seen) == 1
    model(small)
    assert plan.schedule == schedule


def test_a_plan_from_a_file_takes_smaller_batches_and_says_when_a_step_takes_more(tmp_path):
    model, x = deep(8), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fitted(model, x, 1.3, optimizer=optimizer, loss=square) as plan:
        plan.save(tmp_path / "plan.json")
        budget = plan.memory_budget

    def hungry(result: torch.Tensor) -> torch.Tensor:
        return torch.cat([result] * 20).square().mean()

    with lowtide.load_plan(tmp_path / "plan.json", model) as loaded:
        assert max(peaks_of([lambda: model(x), lambda: model(x[: ROWS // 3])], optimizer)) <= budget
        assert loaded.stats().num_steps == 2
        with pytest.warns(lowtide.LowtideWarning, match="a step took .* but the budget is .* Call fit again") as seen:
            peaks_of([lambda: model(x)] * 6, optimizer, hungry)
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_what_the_loop_keeps_counts():
    model, x = deep(8), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, 1.3, optimizer=optimizer, loss=square)
    peaks_of([lambda: model(x)] * 3, optimizer)
    average = [parameter.detach().clone() for parameter in model.parameters()] + [torch.zeros(100_000)]
    with pytest.warns(lowtide.LowtideWarning, match="a step took .* but the budget is"):
        peaks_of([lambda: model(x)] * 3, optimizer)
    del average


def test_what_the_loop_begins_to_keep_later_counts(monkeypatch):
    monkeypatch.setattr(steps, "_TIMES_BETWEEN_LOOKS", 0)
    model, x = deep(8), torch.randn(ROWS, WIDTH)
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), []
    fitted(model, x, 1.3, optimizer=optimizer, loss=square)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            square(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(10)
    kept.append(torch.zeros(100_000))  # the next that is measured in any case is the 16th
    with pytest.warns(lowtide.LowtideWarning, match="a step took .* but the budget is"):
        train(2)


def test_what_an_aborted_backward_leaves_is_freed():
    model, x = deep(8), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, 1.6, optimizer=optimizer, loss=square)
    before = peaks_of([lambda: model(x)] * 6, optimizer)
    hook = model[6][0].weight.register_hook(lambda _: 1 / 0)
    with Meter("cpu") as meter:  # from before the abort: what autograd's engine keeps is nowhere in Python
        with pytest.raises(ZeroDivisionError):
            square(model(x)).backward()
        hook.remove()
        optimizer.zero_grad()
        meter.reset_peak()
        peaks_of([lambda: model(x)], optimizer)
    assert meter.peak_bytes <= max(before)


def test_a_plan_is_kept_where_the_leanest_would_take_more():
    model, x, kept = deep(8), torch.randn(ROWS, WIDTH), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = fitted(model, x, 1.3, optimizer=optimizer, loss=square)
    schedule = plan.schedule
    for index, block in enumerate(model):  # keeps what recomputations make, with all that it hangs on
        block.register_forward_hook(lambda _, __, result, index=index: kept.update({index: result}))
    with pytest.warns(lowtide.LowtideWarning, match="with the same schedule, since the leanest would take no"):
        peaks = peaks_of([lambda: model(x)] * 4, optimizer)
    assert plan.schedule == schedule
    assert peaks[-1] <= peaks[0]


def test_one_tensor_is_not_called_tensors():
    one, two = (Signature.of((torch.zeros(2),) * count, {}, "cpu") for count in (1, 2))
    assert one.difference(two) == "the call has 1 tensor, but the plan is for 2"


def test_a_parameter_that_was_replaced_is_let_go_and_watched():
    model, x = deep(6, 128), torch.randn(ROWS, 128)
    plan = fitted(model, x, optimizer="sgd", loss=square)
    for block in model[1:]:
        block[0].weight = nn.Parameter(block[0].weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert max(peaks_of([lambda: model(x)] * 3, optimizer)[1:]) <= plan.memory_budget
    output = model(x)
    with torch.no_grad():
        model[2][0].weight.mul_(3)
    with pytest.raises(lowtide.ExecutionError, match=r"2\.0\.weight"):
        output.sum().backward()


def test_autocast_and_channels_last_are_noticed(caplog):
    model, x = Resizing(), torch.randn(8, 3, 16, 16)
    with caplog.at_level(logging.INFO, "lowtide"), lowtide.fit(model, x, memory_budget="1GiB", **OPTIONS) as plan:
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        model(x.to(memory_format=torch.channels_last))
        assert plan.num_shapes == 3
    reasons = [record.message for record in caplog.records if "planned again" in record.message]
    assert ["autocast is bfloat16" in reasons[0], "channels last" in reasons[1]] == [True, True]


@pytest.mark.parametrize("is_refused", [True, False])
def test_fit_leaves_no_casts_in_the_cache_of_autocast(is_refused):
    model, x = deep(), torch.randn(8, WIDTH)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        with Meter("cpu") as meter:
            before = meter.live_bytes
            try:
                lowtide.fit(model, x, memory_budget=1 if is_refused else "1GiB", **OPTIONS).detach()
            except lowtide.InfeasibleBudgetError:
                assert is_refused
            gc.collect()
            assert meter.live_bytes - before < model[0][0].weight.nbytes // 2


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["NAdam", "RAdam", "Adadelta", "Rprop", "AdamW", "SGD"])
def test_what_the_step_of_an_optimizer_takes_is_measured(kind, foreach):
    parameters = [nn.Parameter(torch.randn(64, n)) for n in (64, 128, 64)]
    optimizer = getattr(torch.optim, kind)(parameters, lr=1e-3, foreach=foreach)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with Meter("cpu") as meter:
            optimizer.step()
        taken = meter.peak_bytes - meter.live_bytes
    found = optimizer_step_bytes(optimizer, parameters)
    assert taken - 64 <= found <= taken + 2 * parameters[1].nbytes  # numbers of a few bytes are in no share


class Orthogonal(torch.optim.Optimizer):
    """Takes products of its gradients, as Muon does, and parameters in groups alone."""

    def __init__(self, groups):
        assert all({"params", "lr", "is_turned"} == group.keys() for group in groups)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * (parameter.grad @ (parameter.grad.T @ parameter.grad))


@pytest.mark.parametrize(
    "shapes", [[(128, 128)], [(64, 256)], [(256, 64)], [(2048, 32), (64, 64), (192, 192)]], ids=str
)
def test_what_a_step_takes_that_multiplies_matrices_depends_on_their_proportions(shapes):
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = Orthogonal([{"params": parameters, "lr": 1e-3, "is_turned": True}])
    OneCycleLR(optimizer, 1e-3, total_steps=2, cycle_momentum=False)  # puts something of its own into the group
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Meter("cpu") as meter:
        Orthogonal.step(optimizer)
    assert optimizer_step_bytes(optimizer, parameters) == meter.peak_bytes - meter.live_bytes


def test_a_loop_that_keeps_its_result_until_the_next_one():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            with torch.no_grad():
                factor = torch.cdist(x.repeat(8, 1), x.repeat(8, 1)).mean()
            return self.inner(x) * factor

    model, x = nn.Sequential(Wide(), *deep(3), nn.Linear(WIDTH, 2000)), torch.randn(128, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    plan = fitted(model, x, optimizer=optimizer, loss=square)
    with Meter("cpu") as meter:
        for _ in range(3):
            output = model(x)
            square(output).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert meter.peak_bytes <= plan.memory_budget


class DropsRows(nn.Module):
    """Stochastic depth: of some rows the block is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.inner(x) * (torch.rand(len(x), 1) < 0.7) / 0.7


class Dense(nn.Module):
    """Puts its result beside all that came before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(width), nn.Linear(width, 32)

    def forward(self, x):
        return torch.cat([x, self.inner(torch.relu(self.norm(x)))], 1)


def without_biases() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(5)))


@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [
        (
            lambda: nn.Sequential(*(DropsRows() for _ in range(5))),
            torch.optim.SGD,
            {"strategy": "pofo", "bandwidth": "2GB/s"},
        ),
        (lambda: nn.Sequential(*(Dense(WIDTH + 32 * k) for k in range(6))), torch.optim.SGD, {}),
        (without_biases, functools.partial(torch.optim.AdamW, foreach=False), {}),
    ],
    ids=["stochastic depth, offloaded", "a dense network", "AdamW's for-loop, no biases"],
)
def test_the_least_budget_that_is_named_holds(make, kind, options):
    torch.manual_seed(0)
    model, x = make(), torch.randn(ROWS, WIDTH)
    optimizer = kind(model.parameters(), lr=1e-3)
    with fitted(model, x, again=True, optimizer=optimizer, loss=square, **options) as plan:
        assert max(peaks_of([lambda: model(x)] * 4, optimizer)) <= plan.memory_budget


class Both:
    """Two optimizers that a loop steps one after the other: of the rest, and of matrices, which takes the most."""

    def __init__(self, model: nn.Module) -> None:
        own = list(model.parameters())
        self.each = [
            torch.optim.SGD([p for p in own if p.dim() != 2], lr=1e-3, momentum=0.9),
            torch.optim.AdamW([p for p in own if p.dim() == 2], lr=1e-3, foreach=True),
        ]

    def step(self) -> None:
        for each in self.each:
            each.step()

    def zero_grad(self) -> None:
        for each in self.each:
            each.zero_grad()


def test_the_state_of_several_optimizers_counts():
    model, x = deep(), torch.randn(8, WIDTH)  # the most is there in the last optimizer's step
    both = Both(model)
    with fitted(model, x, again=True, optimizer=both.each, loss=square) as plan:
        peaks = peaks_of([lambda: model(x)] * 4, both)
        assert max(peaks) <= plan.memory_budget
        assert max(peaks) - 2048 <= plan.stats().measured_peak_bytes <= max(peaks)
    matrices, rest = WIDTH * WIDTH * 4, WIDTH * 4
    counted = [stage.optimizer_bytes for stage in plan.chain.stages]
    assert sum(counted) == 6 * (2 * matrices + rest + 4)  # AdamW counts its steps
    for options in ({"strategy": "joint", "bandwidth": "1GB/s"}, {"step_in_backward": True, "bandwidth": "1GB/s"}):
        with pytest.raises(lowtide.PlanError, match="several optimizers"):
            lowtide.fit(model, x, memory_budget="1GiB", optimizer=both.each, **options)


@pytest.mark.parametrize(("given", "most"), [("sgd", 0), ("one of them", WIDTH * 4)])
def test_several_optimizers_that_steps_have_shown_are_planned_for(given, most):
    model, x = deep(), torch.randn(ROWS, WIDTH)
    both = Both(model)
    optimizer = both.each[0] if given == "one of them" else given
    with lowtide.fit(model, x, memory_budget="1GiB", optimizer=optimizer, loss=square, **OPTIONS) as plan:
        assert max(stage.optimizer_bytes for stage in plan.chain.stages) == most
        peaks_of([lambda: model(x), lambda: model(torch.randn(2 * ROWS, WIDTH))], both)
        assert all(stage.optimizer_bytes > 2 * WIDTH * WIDTH * 4 for stage in plan.chain.stages)


def test_what_a_loop_does_after_steps_of_some_optimizers_is_no_part_of_them():
    """One steps every third time, so that it is not known whether it will."""
    model, x = deep(), torch.randn(ROWS, WIDTH)
    both = Both(model)
    with fitted(model, x, optimizer=both.each, loss=square) as plan, warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        for number in range(6):
            square(model(x)).backward()
            for each in both.each[number % 3 != 0 :]:
                each.step()
            model.zero_grad()
            torch.zeros(plan.memory_budget)
        assert plan.stats().measured_peak_bytes <= plan.memory_budget


def test_an_optimizer_that_cannot_be_tried_and_has_stepped_ends_no_training():
    model, x = deep(), torch.randn(ROWS, WIDTH)
    last, others = list(model[-1].parameters()), list(model[:-1].parameters())
    adam, lbfgs = torch.optim.AdamW(others, lr=1e-3), torch.optim.LBFGS(last, lr=1e-3, max_iter=1)
    with lowtide.fit(model, x, memory_budget="1GiB", optimizer="adamw", loss=square, **OPTIONS) as plan:
        for rows in (ROWS, 2 * ROWS):
            loss = square(model(torch.randn(rows, WIDTH)))
            loss.backward()
            adam.step()
            lbfgs.step(lambda loss=loss: loss.detach())
        assert plan.num_shapes == 2


def test_optimizers_that_step_in_backward_end_no_step():
    """One for each parameter; what a step takes is measured to its end."""
    wide = nn.Sequential(nn.Linear(WIDTH, 32 * WIDTH), nn.Tanh(), nn.Linear(32 * WIDTH, WIDTH))  # its backward is last
    model, x = nn.Sequential(wide, *deep(3)), torch.randn(ROWS, WIDTH)
    each = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in each]
    with fitted(model, x, optimizer=list(each.values()), loss=square) as plan:
        peaks = peaks_of([lambda: model(x)] * 4)
        assert max(peaks) <= plan.memory_budget
        assert max(peaks) - 2048 <= plan.stats().measured_peak_bytes <= max(peaks)
    for hook in hooks:  # else the model stays: hooks of parameters are nothing that a collector sees
        hook.remove()


class Skips(nn.Module):
    """Leaves its whole block out, at random: what a step takes differs from step to step."""

    chance = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x if torch.rand(()).item() < self.chance else x + self.inner(x)


def test_steps_that_take_more_than_any_before_are_said(monkeypatch):
    model, x = nn.Sequential(*deep(4), *(Skips() for _ in range(4))), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, optimizer=optimizer, loss=square)
    peaks_of([lambda: model(x)] * 2, optimizer)
    monkeypatch.setattr(Skips, "chance", 0.0)
    with pytest.warns(lowtide.LowtideWarning, match="a step took"):
        peaks_of([lambda: model(x)] * 4, optimizer)


def test_steps_that_differ_every_fourth_time_are_all_measured():
    model, x = deep(4), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, optimizer=optimizer, loss=square)

    def step(loss) -> None:
        peaks_of([lambda: model(x)], optimizer, loss)

    def hungry(result: torch.Tensor) -> torch.Tensor:
        return torch.cat([result] * 40).square().mean()

    def later_steps() -> None:
        for index in range(16):  # the fifth, ninth, ... of all take more
            step(square if index % 4 else hungry)

    for _ in range(4):
        step(square)
    with pytest.warns(lowtide.LowtideWarning, match="a step took"):
        later_steps()


def test_steps_that_take_more_than_was_said_are_said_again():
    model, x = deep(8), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, optimizer=optimizer, loss=square)
    peaks: list[int] = []

    def step(num_copies: int) -> None:
        peaks.extend(
            peaks_of([lambda: model(x)], optimizer, lambda result: torch.cat([result] * num_copies).square().mean())
        )

    def steps() -> None:
        for num_copies in (20, 20, 20, 60, 60):
            step(num_copies)

    with pytest.warns(lowtide.LowtideWarning) as seen:
        steps()
    said = [str(warning.message) for warning in seen if "a step took" in str(warning.message)]
    assert len(said) == 2
    assert f"a step took {format_bytes(max(peaks))}, more than the " in said[1]


class LayerDrop(nn.Module):
    """Calls each of its layers, or does not, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(deep(2) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            if random.random() >= 0.4:
                x = x + layer(x)
        return x


def test_a_step_that_leaves_no_layer_out_stays_within_the_budget():
    model, x = LayerDrop(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    random.seed(1)  # the sample's forward leaves some out
    plan = fitted(model, x, optimizer=optimizer, loss=square)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        assert max(peaks_of([lambda: model(x)] * 24, optimizer)[2:]) <= plan.memory_budget


def test_forwards_that_do_more_than_those_that_were_measured_are_measured(monkeypatch):
    model, x = nn.Sequential(*deep(4), *(Skips() for _ in range(4))), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, optimizer=optimizer, loss=square)
    peaks_of([lambda: model(x)] * 5, optimizer)  # the next one of which the number alone would tell is the eighth
    monkeypatch.setattr(Skips, "chance", 0.0)
    with pytest.warns(lowtide.LowtideWarning, match="a step took"):
        peaks_of([lambda: model(x)] * 3, optimizer)


def test_without_a_loss_there_is_room_for_cross_entropy():
    model, x = nn.Sequential(*deep(4), nn.Linear(WIDTH, 2000)), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    labels = torch.randint(0, 2000, (ROWS,))
    plan = fitted(model, x, optimizer=optimizer)
    peaks = peaks_of([lambda: model(x)] * 2, optimizer, lambda result: F.cross_entropy(result, labels))
    assert max(peaks) <= plan.memory_budget


def test_a_meter_of_steps_stays_out_of_the_way():
    steps = StepMeter()
    assert steps.close() is None
    assert steps.open() is not None
    with Meter("cpu") as meter:  # opened later, and still there when the step ends
        kept = torch.zeros(1000)
        assert steps.close() is not None
        assert steps.open() == meter.live_bytes
        another = torch.zeros(3000)
        assert steps.close() == meter.peak_bytes
        del another
    steps.close()
    assert not torch._C._len_torch_dispatch_stack()
    with torch._subclasses.FakeTensorMode():
        assert steps.open() is None
    del kept


class Dispatching(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_meter_of_steps_counts_below_the_modes_of_others():
    steps, first = StepMeter(), Dispatching()
    with first, Dispatching() as second:
        begin = steps.open()
        kept = torch.zeros(1000)
        assert _get_current_dispatch_mode_stack()[1:] == [first, second]
    another = torch.zeros(3000)
    assert steps.close() == begin + kept.nbytes + another.nbytes
    assert not torch._C._len_torch_dispatch_stack()
    with first:
        for _ in range(2):
            steps.open()
            assert len(_get_current_dispatch_mode_stack()) == 2
            steps.close()
        assert _get_current_dispatch_mode_stack() == [first]
    assert not is_in_torch_dispatch_mode()


def test_a_step_that_takes_more_is_seen_under_a_mode_of_the_users():
    model, x = deep(8), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, optimizer=optimizer, loss=square)

    def train() -> None:
        for _ in range(2):
            square(model(x).repeat(4, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with Dispatching(), pytest.warns(lowtide.LowtideWarning, match="a step took .* but the budget is"):
        train()


def test_a_meter_that_begins_a_step_within_another_knows_what_its_graph_holds():
    steps, x = StepMeter(), torch.zeros(1000, requires_grad=True)
    begin = steps.open()
    loss = x.exp().sum()  # the graph alone holds the result of exp
    assert steps.open() == begin + x.nbytes + loss.nbytes
    assert steps.close() == begin + x.nbytes + loss.nbytes


@pytest.mark.parametrize("where", ["in backward", "another thread"])
def test_a_meter_that_is_closed_elsewhere_leaves_the_stack_later(where):
    steps, x = StepMeter(), torch.ones(1, requires_grad=True)
    steps.open()
    if where == "in backward":  # torch puts modes back when a backward ends
        x.register_hook(lambda _: steps.close() and None)
        (x * 2).backward()
    else:
        thread = threading.Thread(target=steps.close)
        thread.start()
        thread.join()
    assert not steps.is_open
    later = StepMeter()
    assert later.open() is not None
    assert later.close() is not None
    assert not torch._C._len_torch_dispatch_stack()


def test_a_plan_that_is_collected_while_a_meter_leaves_disturbs_nothing(monkeypatch):
    model = deep()
    watched = steps.RealSteps(model, torch.device("cpu"), 2**30)
    watched.begin()
    other = StepMeter()
    other.open()
    collected = [watched]
    del watched

    def stack():
        modes = _get_current_dispatch_mode_stack()
        collected.clear()  # a collection may come at any moment
        return modes

    monkeypatch.setattr(meter_module, "_get_current_dispatch_mode_stack", stack)
    other.close()
    other.close()
    assert not _get_current_dispatch_mode_stack()
    assert not is_in_torch_dispatch_mode()


def test_a_meter_counts_nothing_from_within_a_backward():
    steps, opened, x = StepMeter(), [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: opened.append(steps.open()))
    (x * 2).backward()
    assert opened == [None]
    assert not steps.is_open


def test_a_result_that_is_kept_after_backward_keeps_nothing_else_alive():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(6)))
    operations = [*(Forward(k, "keep") for k in range(1, 6)), Forward(6, "all"), Backward(6)]
    operations += [op for k in range(5, 0, -1) for op in (Forward(k, "all"), Backward(k))]
    x = torch.randn(4, 8)
    with lowtide.attach(model, lowtide.Schedule("each", operations)):
        model(x).sum().backward()
        model.zero_grad()
        with Meter("cpu") as before:
            pass
        out = model(x)
        out.sum().backward()
        model.zero_grad()
        with Meter("cpu") as after:
            pass
    assert after.start_bytes - before.start_bytes <= out.nbytes


def test_planning_again_that_fails_does_not_end_training():
    """Parameters that are results of other tensors are planned with no longer than until a step takes more."""
    model, x = deep(4), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted(model, x, optimizer=optimizer, loss=square)

    def train() -> None:
        for _ in range(4):
            scaled = {name: parameter * 0.9 for name, parameter in model.named_parameters()}
            torch.func.functional_call(model, scaled, (x,)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(lowtide.LowtideWarning, match="planning again failed: parameters are results") as seen:
        train()
    assert {warning.category for warning in seen} == {lowtide.LowtideWarning}
