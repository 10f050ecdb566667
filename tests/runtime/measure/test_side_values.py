"""Values that skip stages: what is measured of them, and that steps take what the chain says."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from benchmarks.coverage_shapes import UNet
from tests.runtime.budgets import measured_once
from tests.runtime.training import Numbers, assert_equal, train
from torch import nn

import lowtide
from lowtide import Backward, Forward, Offload, Release, Schedule
from lowtide.chain import SideValue
from lowtide.errors import ScheduleError
from lowtide.runtime.measure.measure import capture_and_measure
from lowtide.runtime.meter import Meter
from lowtide.runtime.plan.attach import split_for


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def step(model: nn.Module, x: torch.Tensor) -> None:
    loss(model(x)).backward()
    model.zero_grad()


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return UNet(8, 3), torch.randn(2, 3, 32, 32)


def measured(model: nn.Module, x: torch.Tensor) -> lowtide.Chain:
    return lowtide.measure(model, x, loss=loss, moves_activations=False)


def test_skip_connections_have_bytes_a_maker_and_readers() -> None:
    model, x = network()
    chain = measured(model, x)
    first = chain.side_values[0]
    names = [stage.name for stage in chain.stages]
    assert first.num_bytes == 2 * 8 * 32 * 32 * 4
    assert first.grad_bytes == 2 * first.num_bytes  # a view of the gradient of what it is concatenated to
    assert names[first.maker - 1].startswith("down.0")
    assert first.maker + 1 in first.readers
    assert any(names[k - 1].startswith("grow.2") for k in first.readers)
    assert not first.stays
    assert lowtide.Chain.from_dict(chain.to_dict()) == chain
    # neither the stage that makes it nor the one that reads it counts it
    assert chain.stage(first.maker).output_bytes == 0


def test_steps_take_what_is_predicted() -> None:
    model, x = network()
    chain = measured(model, x)
    plain = lowtide.solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.solve(chain, memory_budget=1, strategy="rotor")
    least, base = caught.value.minimum_bytes, chain.base_bytes  # what else lives in this process counts, too
    assert least - base < 0.75 * (plain - base)
    for share, strict in [(0.0, False), (0.0, True), (0.3, True), (0.6, False), (0.9, True)]:
        solution = lowtide.solve(chain, memory_budget=int(least + share * (plain - least)), strategy="rotor")
        with warnings.catch_warnings(), lowtide.attach(model, solution, strict=strict):
            warnings.simplefilter("ignore", lowtide.LowtideWarning)  # no trial step has corrected the prediction
            step(model, x)
            with Meter("cpu") as meter:
                step(model, x)
        assert 0.95 * meter.peak_bytes <= solution.peak_bytes <= 1.05 * meter.peak_bytes


@pytest.mark.parametrize(("strategy", "bandwidth"), [("rotor", 0), ("pofo", "1GB/s")])
def test_planned_training_is_equal(strategy: str, bandwidth: int | str) -> None:
    def trained(model: nn.Module) -> Numbers:
        return train(model, [x, x + 1, x - 1], loss=loss, input_grads=False)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return UNet(4, 2)

    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    options = {"strategy": strategy, "bandwidth": bandwidth, "optimizer": "adam", "loss": loss}
    model = network()
    with measured_once():
        with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
            lowtide.fit(model, x, memory_budget=1000, **options)
        budget = caught.value.minimum_bytes + 6 * x.nbytes  # the batches of this test, and what others have left
        plan = lowtide.fit(model, x, memory_budget=budget, **options)
    with warnings.catch_warnings(), plan:
        warnings.simplefilter("ignore", lowtide.LowtideWarning)  # this loop keeps all numbers of earlier steps
        found = trained(model)
        assert plan.stats().recomputed_per_step + plan.stats().moved_bytes_per_step > 0
    assert_equal(found, trained(network()))


class Weaving(nn.Module):
    """Two values skip stages, one of them over another's maker."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.layers[0](x)
        b = self.layers[1](a)
        c = self.layers[2](b)
        d = self.layers[3](c) + a
        e = self.layers[4](d) * b
        return self.layers[5](e) + a


ORDERS = {
    # what reads the first layer's output runs again before it does, and after it has
    "readers first": [6, 5, 4, 3, 2, 1],
    "in segments": [4, 5, 6, 1, 2, 3],
}


def repeated(order: str) -> Schedule:
    operations = [Forward(k, "keep") for k in range(1, 7)]
    if order == "readers first":
        for k in ORDERS[order]:
            operations += [Forward(k, "all"), Backward(k)]
        return Schedule("by hand", operations)
    operations = [Forward(1, "keep"), Forward(2, "drop"), Forward(3, "drop"), Forward(4, "keep"), Forward(5, "drop")]
    operations += [Forward(6, "drop"), Forward(4, "drop"), Forward(5, "all"), Forward(6, "all"), Backward(6)]
    operations += [Backward(5), Forward(1, "keep"), Forward(2, "all"), Forward(3, "all"), Forward(4, "all")]
    return Schedule("by hand", [*operations, Backward(4), Backward(3), Backward(2), Forward(1, "all"), Backward(1)])


@pytest.mark.parametrize("order", ORDERS)
def test_side_values_are_made_anew_with_their_maker(order: str) -> None:
    torch.manual_seed(0)
    model, x = Weaving(), torch.randn(4, 16)
    loss(model(x)).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    chain = lowtide.measure(model, x, stages=["layers.*"])
    assert {(side.maker, side.readers) for side in chain.side_values} == {(1, (2, 5, 6)), (2, (3, 6))}
    schedule = repeated(order)
    lowtide.simulate(chain, schedule)
    for strict in (False, True):
        with lowtide.attach(model, schedule, split=split_for(model, chain), strict=strict):
            for _ in range(2):
                model.zero_grad()
                loss(model(x)).backward()
                assert all(map(torch.equal, plain, (parameter.grad for parameter in model.parameters())))


def test_side_values_that_stay_are_not_moved() -> None:
    stages = [lowtide.Stage(str(k), 1.0, 1.0, 8, 8) for k in range(4)]
    chain = lowtide.Chain("skip", stages, side_values=[SideValue("skip", 100, 1, (4,), 0, stays=True)])
    moving = [Forward(1, "all"), Offload("s", 1), *(Forward(k, "all") for k in (2, 3, 4))]
    schedule = Schedule("by hand", [*moving, *(Backward(k) for k in (4, 3, 2, 1))])
    with pytest.raises(ScheduleError, match="stays on the device"):
        lowtide.simulate(chain, schedule, bandwidth=1)
    lowtide.simulate(replace(chain, side_values=[SideValue("skip", 100, 1, (4,), 0)]), schedule, bandwidth=1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    solution = lowtide.solve(chain, memory_budget=1000)
    with pytest.raises(ScheduleError, match="stays on the device"):
        lowtide.attach(model, replace(solution, schedule=schedule))
    # what a strategy frees is not moved, and nothing keeps stages apart for it
    assert any(isinstance(operation, Release) for operation in solution.schedule.operations)
    with lowtide.attach(model, solution) as plan:
        model(torch.ones(1, 4)).sum().backward()
        assert plan.stats().num_steps == 1


@pytest.mark.parametrize("strategy", ["offload", "pofo", "autocapper", "opportunist"])
def test_strategies_that_move_leave_those_that_stay_where_they_are(strategy: str) -> None:
    stages = [lowtide.Stage(str(k), 1.0, 1.0, 50, 100) for k in range(6)]
    sides = [SideValue("wide", 60, 1, (6,), 0, stays=True), SideValue("narrow", 30, 2, (5,), 0, stays=True)]
    chain = lowtide.Chain("skips", stages, 50, side_values=sides)
    plain = lowtide.solve(chain, memory_budget=2**40, strategy="store-all").peak_bytes
    solution = lowtide.solve(chain, memory_budget=int(0.8 * plain), strategy=strategy, bandwidth="100B/s")
    moved = [operation for operation in solution.schedule.operations if isinstance(operation, Offload)]
    assert moved
    assert all(operation.kind != "s" for operation in moved)


def test_what_the_models_own_code_holds_is_counted_where_nothing_stores_it() -> None:
    """A concatenation is an argument of the block that reads it, so it lives until that block returns."""
    torch.manual_seed(0)
    model, x = UNet(4, 3), torch.randn(16, 3, 64, 64)
    split, chain = capture_and_measure(model, x, loss=loss, moves_activations=False, keeps_result=False)
    names = [stage.name for stage in chain.stages]
    concatenated = names.index("grow.2") + 1
    last = next(k for k, name in enumerate(names, start=1) if name.startswith("up.2.4"))
    assert (concatenated, 2 * chain.side_values[0].num_bytes) in chain.stage(last).outliving
    step(model, x)
    with Meter("cpu") as meter:
        step(model, x)
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.solve(chain, memory_budget=1, strategy="rotor")
    least, base = caught.value.minimum_bytes, chain.base_bytes  # what else lives in this process counts, too
    assert least - base < 0.34 * (meter.peak_bytes - base)
    for share in (0.0, 0.3):
        solution = lowtide.solve(chain, memory_budget=int(least + share * (meter.peak_bytes - least)), strategy="rotor")
        with warnings.catch_warnings(), lowtide.attach(model, solution, split=split):
            warnings.simplefilter("ignore", lowtide.LowtideWarning)  # no trial step has corrected the prediction
            step(model, x)
            with Meter("cpu") as taken:
                step(model, x)
        assert 0.99 * taken.peak_bytes <= solution.peak_bytes <= 1.05 * taken.peak_bytes


def test_the_first_step_that_moves_values_takes_no_more_than_later_ones() -> None:
    """While a stage ends, its last call still has its arguments; measuring knows that nobody reads them."""
    torch.manual_seed(0)
    model, x = UNet(4, 2), torch.randn(8, 3, 32, 32)
    chain = lowtide.measure(model, x, loss=loss)
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.solve(chain, memory_budget=1, strategy="offload", bandwidth="2GB/s")
    least = caught.value.minimum_bytes
    solution = lowtide.solve(chain, memory_budget=least, strategy="offload", bandwidth="2GB/s")
    peaks = []
    with lowtide.attach(model, solution):
        for _ in range(3):
            with Meter("cpu") as meter:
                step(model, x)
            peaks.append(meter.peak_bytes)
    assert peaks[0] <= 1.01 * peaks[2]
    assert max(peaks) <= 1.05 * least
