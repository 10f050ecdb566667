"""`fit` with a model that is still on the CPU: its weights go to the lower tier before anything is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.training import Numbers, assert_equal, seed_all
from torch import nn

import lowtide
from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.runtime.meter import Meter

WIDTH, ROWS, DEPTH = 128, 16, 3
LINK = "2GB/s"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH, bias=False), nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


class Reading(nn.Module):
    """Reads numbers on the host, which a model without data has not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 0.5 if float(x.detach().numpy().mean()) > 100 else 1.0
        return self.blocks(x * scale)


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(DEPTH)))


def square(y: torch.Tensor) -> torch.Tensor:
    return (y**2).mean()


def made(model_of: Callable[[], nn.Module] = blocks, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = model_of()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1, num_steps: int = 3) -> Numbers:
    seed_all(seed)
    for _ in range(num_steps):
        square(model(torch.randn(ROWS, WIDTH))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    numbers = {f"state {name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for index, state in enumerate(optimizer.state.values()):
        numbers |= {f"optimizer {index} {name}": value.clone() for name, value in state.items()}
    return numbers


def others_bytes() -> int:
    gc.collect()
    with Meter("cpu") as meter:
        return meter.live_bytes


def weight_bytes(model_of: Callable[[], nn.Module] = blocks) -> int:
    return sum(parameter.nbytes for parameter in model_of().parameters())


def fitted(model: nn.Module, budget: int, **settings: Any) -> lowtide.Plan:
    settings = {"device": "cpu", "bandwidth": LINK, "loss": square, **settings}
    return lowtide.fit(model, torch.randn(ROWS, WIDTH), memory_budget=budget, **settings)


@pytest.mark.parametrize(
    ("model_of", "settings"), [(blocks, {}), (blocks, {"fused": True}), (Tied, {"fused": True}), (Reading, {})]
)
def test_it_trains_with_equal_numbers_and_is_never_there_as_a_whole(model_of, settings):
    plain, plain_optimizer = made(model_of, **settings)
    expected = train(plain, plain_optimizer)
    more = train(plain, plain_optimizer, seed=2)
    del plain, plain_optimizer
    others, own = others_bytes(), weight_bytes(model_of)
    model, optimizer = made(model_of, **settings)
    parameters = list(model.parameters())
    budget = others + int(1.3 * own)
    with Meter("cpu") as meter:
        plan = fitted(model, budget, optimizer=optimizer)
        # in the beginning the model is on the CPU; an optimizer's step is timed on copies of one stage's weights
        assert meter.peak_bytes - others < 1.4 * own
        assert meter.live_bytes - others < 0.3 * own
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    with Meter("cpu") as meter:
        numbers = train(model, optimizer)
        assert meter.peak_bytes - sum(number.nbytes for number in numbers.values()) <= budget
    assert_equal(numbers, expected)
    plan.detach()
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())  # memory of its own again
    assert_equal(train(model, optimizer, seed=2), more)


def test_what_is_there_already_comes_along():
    """State of a checkpoint, and gradients."""

    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = made()
        train(model, optimizer)
        square(model(torch.ones(ROWS, WIDTH))).backward()
        return model, optimizer

    model, optimizer = begun()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.zero_grad()
    expected = train(model, optimizer)
    del model, optimizer
    others = others_bytes()
    model, optimizer = begun()
    with fitted(model, others + 2 * weight_bytes(), optimizer=optimizer):
        assert_equal({name: parameter.grad for name, parameter in model.named_parameters()}, gradients)
        optimizer.zero_grad()
        assert_equal(train(model, optimizer), expected)


@pytest.mark.parametrize("share", [2, 3])  # of the weights; with 3 of them, some stay on the device
def test_a_plan_file_for_a_model_that_is_on_the_cpu(share, tmp_path):
    expected = train(*made(Tied))
    others = others_bytes()
    model, optimizer = made(Tied)
    with fitted(model, others + share * weight_bytes(Tied), optimizer=optimizer) as plan:
        plan.save(tmp_path / "plan.json")
    del plan, model, optimizer
    model, optimizer = made(Tied)
    with pytest.raises(PlanError, match="pass it with optimizer="):
        lowtide.load_plan(tmp_path / "plan.json", model, device="cpu")
    gc.collect()
    with Meter("cpu") as meter:
        before = meter.live_bytes
        plan = lowtide.load_plan(tmp_path / "plan.json", model, optimizer=optimizer, device="cpu")
        assert meter.live_bytes < before - 0.7 * weight_bytes(Tied)
        assert meter.peak_bytes < before + 0.3 * weight_bytes(Tied)
    assert_equal(train(model, optimizer), expected)
    assert len(plan._part.execution.machine.tier._pieces.made) == 2  # weights, and what is made for them later
    plan.detach()
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())


def test_a_model_that_fits_stays_as_it_is():
    model, optimizer = made()
    with fitted(model, others_bytes() + 40 * weight_bytes(), optimizer=optimizer) as plan:
        assert plan.schedule.manages == ()
        assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())


def test_larger_batches_are_planned_for():
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        seed_all(3)
        for num_rows in (ROWS, 2 * ROWS, ROWS):
            square(model(torch.randn(num_rows, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    expected = trained(*made())
    others = others_bytes()
    model, optimizer = made()
    with fitted(model, others + 2 * weight_bytes(), optimizer=optimizer):
        assert_equal(trained(model, optimizer), expected)


def test_a_budget_that_is_too_small_leaves_the_model_as_it_was():
    model, optimizer = made()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InfeasibleBudgetError) as caught:
        fitted(model, 10_000, optimizer=optimizer)
    assert_equal(dict(model.state_dict()), before)
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())
    least = caught.value.minimum_bytes
    del caught  # its traceback has the batch
    with fitted(model, least, optimizer=optimizer):
        train(model, optimizer, num_steps=1)


def test_host_memory_that_is_too_small_leaves_the_model_as_it_was():
    model, optimizer = made()
    with pytest.raises(lowtide.LowtideError, match="host_memory_budget"):
        fitted(model, others_bytes() + weight_bytes(), optimizer=optimizer, host_memory_budget=50_000)
    train(model, optimizer, num_steps=1)
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "cannot live on the host: the optimizer itself is not known"),
        ({"optimizer": "adamw"}, "cannot live on the host: the optimizer itself is not known"),
        ({"strategy": "rotor"}, "cannot live on the host: strategy 'rotor' moves activations alone"),
        ({"bandwidth": 0}, "cannot live on the host: nothing is offloaded"),
        ({"device": "tpu"}, "device is 'tpu', expected 'cuda'"),
        ({"device": 3.5}, "device is 3.5, expected 'cuda'"),
        ({"device": "meta"}, "lowtide trains on 'cuda' and 'cpu'"),
    ],
)
def test_what_does_not_work_is_said_in_one_line(settings, match):
    model, optimizer = made()
    if settings.keys() <= {"strategy", "bandwidth", "device"} and settings:
        settings = {"optimizer": optimizer, **settings}
    with pytest.raises(PlanError, match=match) as caught:
        fitted(model, weight_bytes(), **settings)
    assert "\n" not in str(caught.value)
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(PlanError, match="torch finds no CUDA device here; leave device= out"):
        fitted(made()[0], 10**9, device="cuda")
