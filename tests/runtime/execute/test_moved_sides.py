"""Side values that are copied to the host and back: equal numbers, less memory, and nothing read while it is away."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.coverage_shapes import UNet
from tests.runtime.skips import ORDERS, Popping, attached, gradients, loss, measured, moving, network, storing, trained
from tests.runtime.training import Numbers, assert_equal
from torch import nn

import lowtide
from lowtide import Forward, Offload, Prefetch, Release, Schedule
from lowtide.errors import PlanError, ScheduleError
from lowtide.runtime.execute.sides import MovedSides
from lowtide.runtime.meter import Meter, exclude
from lowtide.runtime.plan.attach import split_for


@functools.cache
def plain_numbers(kind: type[UNet]) -> Numbers:
    numbers = trained(*network(kind))
    for number in numbers.values():
        exclude(number)
    return numbers


@pytest.mark.parametrize(
    ("order", "kind", "strict"),
    [
        *((order, kind, False) for order in ORDERS for kind in (UNet, Popping)),
        ("recomputing", UNet, True),
        ("in two segments", UNet, True),
    ],
)
def test_equal_numbers(order: str, kind: type[UNet], strict: bool) -> None:
    model, x = network(kind)
    chain = measured(kind)
    moved_bytes = sum(side.num_bytes for side in chain.side_values if not side.stays)
    assert moved_bytes > 0
    with attached(model, chain, moving(chain, ORDERS[order](chain.num_stages)), strict=strict) as plan:
        found = trained(model, x)
        assert plan.stats().moved_bytes_per_step >= 3 * moved_bytes  # once there, and at least twice back
    assert_equal(found, plain_numbers(kind))


def peak_bytes(step: Callable[[], Any]) -> int:
    step()
    gc.collect()
    with Meter("cpu") as meter:
        step()
    return meter.peak_bytes


@pytest.mark.parametrize("order", ["storing", "recomputing"])
def test_they_leave_the_device(order: str) -> None:
    """Held by the model's own list of skips, they take no memory all the same."""
    model, x = network()
    chain = measured(UNet)
    listed = ORDERS[order](chain.num_stages)
    peaks = []
    for schedule in (Schedule("by hand", listed), moving(chain, listed)):
        predicted = lowtide.simulate(chain, schedule, bandwidth=10**9).peak_bytes
        with attached(model, chain, schedule):
            peaks.append((peak_bytes(lambda: loss(model(x)).backward()), predicted))
    (stays, stays_predicted), (leaves, leaves_predicted) = peaks
    assert leaves_predicted <= stays_predicted
    assert stays - leaves >= 0.9 * (stays_predicted - leaves_predicted)


class Queue:
    """A lower tier whose copies are operations of torch, as those to pinned memory are; it says who waited for them."""

    smallest_bytes = 1

    def __init__(self) -> None:
        self.loaded: list[Ticket] = []

    def store(self, storages: list[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Ticket]:
        return [bytes_of(storage).clone() for storage in storages], Ticket()

    def load(self, region: list[torch.Tensor], storages: list[torch.UntypedStorage]) -> Ticket:
        for part, storage in zip(region, storages, strict=True):
            bytes_of(storage).copy_(part)
        self.loaded.append(Ticket())
        return self.loaded[-1]


class Ticket:
    num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def test_copies_back_are_made_once_and_waited_for_where_the_guard_sees_them() -> None:
    tier = Queue()
    sides = MovedSides(tier)  # type: ignore[arg-type]
    value = torch.randn(8)
    expected = value.clone()
    sides.take(1, value)
    with sides.guard():
        for operation in (Offload("s", 1), Release("s", 1), Prefetch("s", 1)):
            sides.execute(operation, lambda _: 1, in_forward=True)
        assert [ticket.num_waits for ticket in tier.loaded] == [0]
        found = value + 0
    assert [ticket.num_waits for ticket in tier.loaded] == [1]
    assert torch.equal(found, expected)


def moved_network() -> tuple[nn.Module, torch.Tensor, lowtide.Plan]:
    model, x = network()
    chain = measured(UNet)
    return model, x, attached(model, chain, moving(chain, storing(chain.num_stages)))


def test_a_hook_that_reads_what_is_away_gets_it() -> None:
    """One that was added after the plan was made, and reads inside another submodule's call."""
    plain, x = network()
    collected: list[torch.Tensor] = []
    read: list[float] = []
    expected = gradients(plain, x)
    model, x, plan = moved_network()
    with plan:
        model.get_submodule("down.0").register_forward_hook(lambda *args: collected.append(args[2]))
        model.get_submodule("bottom").register_forward_hook(lambda *_: read.append(float(collected[0].detach().sum())))
        assert all(map(torch.equal, gradients(model, x), expected))
    with torch.no_grad():
        assert read == [float(network()[0].get_submodule("down.0")(x).sum())]


def test_memory_that_is_read_past_all_operations_is_there() -> None:
    model, x, plan = moved_network()
    collected: list[torch.Tensor] = []
    read: list[list[float]] = []
    with torch.no_grad():
        expected = network()[0].get_submodule("down.0")(x).tolist()
    with plan:
        model.get_submodule("down.0").register_forward_hook(lambda *args: collected.append(args[2]))
        model.get_submodule("bottom").register_forward_hook(lambda *_: read.append(collected[0].tolist()))
        loss(model(x)).backward()
    assert read == [expected]


def test_what_the_caller_holds_is_there_after_forward_and_after_backward() -> None:
    model, x, plan = moved_network()
    held: list[torch.Tensor] = []
    with plan:
        model.get_submodule("down.0").register_forward_hook(lambda *args: held.append(args[2]))
        output = model(x)
        after_forward = held[0].detach().clone()
        loss(output).backward()
        assert torch.equal(held[0], after_forward)
    with torch.no_grad():
        assert torch.equal(after_forward, network()[0].get_submodule("down.0")(x))


def test_after_an_error_nothing_is_away_and_the_next_step_is_equal() -> None:
    plain, x = network()
    expected = [gradients(plain, x), gradients(plain, x)]
    model, x, plan = moved_network()
    held: list[torch.Tensor] = []

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    with plan:
        first = gradients(model, x)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        handles = [
            model.get_submodule("down.0").register_forward_hook(lambda *args: held.append(args[2])),
            model.get_submodule("bottom").register_forward_pre_hook(fail),
        ]
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x)
        assert bool(held[0].detach().isfinite().all())
        for handle in handles:
            handle.remove()
        model.load_state_dict(state)
        second = gradients(model, x)
    assert all(map(torch.equal, first, expected[0]))
    assert all(map(torch.equal, second, expected[1]))


def test_an_output_that_is_dropped_frees_everything() -> None:
    model, x, plan = moved_network()
    with plan:
        loss(model(x)).backward()
        model.zero_grad()
        gc.collect()
        gc.disable()
        try:
            with Meter("cpu") as meter:
                before = meter.live_bytes
                output = model(x)
                assert meter.live_bytes > before
                del output
                assert meter.live_bytes == before
        finally:
            gc.enable()


def test_backward_twice_through_a_graph_that_is_retained() -> None:
    plain, x = network()
    results = []
    model, x, plan = moved_network()
    for each in (plain, model):
        each.zero_grad()
        output = loss(each(x))
        output.backward(retain_graph=True)
        output.backward()
        results.append([parameter.grad.clone() for parameter in each.parameters() if parameter.grad is not None])
    plan.detach()
    assert all(map(torch.equal, *results))


def test_a_chain_that_does_not_say_which_tensors_they_are_is_refused() -> None:
    model, _ = network()
    chain = measured(UNet)
    schedule = moving(chain, storing(chain.num_stages))
    numbers = chain.provenance["side_tensors"]
    for wrong, message in (
        ({}, "not known which tensors"),
        ({"side_tensors": ["one"]}, "side_tensors is"),
        ({"side_tensors": numbers, "read_tensors": ["one"]}, "read_tensors is .*lists; "),
        ({"side_tensors": numbers, "read_tensors": [["one"]]}, "read_tensors is .*whole numbers"),
    ):
        provenance = {"split": chain.provenance["split"], **wrong}
        with pytest.raises(PlanError, match=message):
            attached(model, replace(chain, provenance=provenance), schedule)


def test_a_saved_plan_moves_them_too(tmp_path: Path) -> None:
    _, x, plan = moved_network()
    with plan:
        plan.save(tmp_path / "plan.json")
    model, _ = network()
    with lowtide.load_plan(tmp_path / "plan.json", model) as loaded:
        found = gradients(model, x)
        assert loaded.stats().moved_bytes_per_step > 0
    assert all(map(torch.equal, found, gradients(network()[0], x)))


def test_what_the_model_returns_stays() -> None:
    class Returning(UNet):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            features: list[torch.Tensor] = []
            handle = self.down[0].register_forward_hook(lambda *args: features.append(args[2]))
            result = super().forward(x)
            handle.remove()
            return result, features[0]

    model, x = network(Returning)
    chain = lowtide.measure(model, x, loss=lambda result: loss(result[0]) + loss(result[1]))
    returned = [i for i, side in enumerate(chain.side_values, start=1) if side.stays]
    assert returned
    with pytest.raises(ScheduleError, match="stays on the device"):
        lowtide.simulate(chain, Schedule("by hand", [Forward(1, "all"), Offload("s", returned[0])]), bandwidth=1)


@pytest.mark.parametrize("strategy", ["offload", "pofo"])
def test_strategies_move_them(strategy: str) -> None:
    model, x = network()
    chain = measured(UNet)
    options = {"strategy": strategy, "bandwidth": "100GB/s"}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.solve(chain, memory_budget=1, strategy="offload", bandwidth="100GB/s")
    solution = lowtide.solve(chain, memory_budget=caught.value.minimum_bytes, **options)
    assert any(isinstance(operation, Prefetch) and operation.kind == "s" for operation in solution.schedule.operations)
    with warnings.catch_warnings(), lowtide.attach(model, solution):
        warnings.simplefilter("ignore", lowtide.LowtideWarning)  # no trial step has corrected the prediction
        found = gradients(model, x)
    assert all(map(torch.equal, found, gradients(network()[0], x)))


def test_memory_that_came_back_goes_with_its_last_use() -> None:
    sides = MovedSides(Queue())  # type: ignore[arg-type]
    value = torch.randn(8)
    sides.take(1, value)
    for operation in (Offload("s", 1), Release("s", 1), Prefetch("s", 1)):
        sides.execute(operation, lambda _: 1, in_forward=True)
    with Meter("cpu") as meter:
        meter.see(value)
        before = meter.live_bytes
        del value
        sides.drop(1)
        assert before - meter.live_bytes == 2 * 32  # its own, and its copy's


def test_steps_without_side_values_that_move_have_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MovedSides, "guard", lambda _: pytest.fail("there is nothing to guard"))
    model, x = network()
    chain = measured(UNet)
    with attached(model, chain, Schedule("by hand", storing(chain.num_stages))):
        loss(model(x)).backward()
    assert split_for(model, chain).num_stages == chain.num_stages
