"""On a GPU: the budget in loops that people write, and spot checks. What they promise: `docs/guarantees.md`."""

from __future__ import annotations

import gc
import itertools
import logging

import pytest
import torch
from torch import nn

import lowtide

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# Weights, gradients and activations of several MiB each: what is left for the allocator's rounding is 4 MiB.
WIDTH, DEPTH, ROWS = 1024, 10, 4096
OPTIONS = {"bandwidth": 0, "strategy": "rotor"}
OFFSET = {"value": 0.0}


@pytest.fixture(autouse=True)
def clean():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH))).cuda()


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device="cuda")


def square(result: torch.Tensor) -> torch.Tensor:
    return result.float().square().mean()


def least(model: nn.Module, sample: torch.Tensor, **options: object) -> int:
    gc.collect()
    with pytest.raises(lowtide.InfeasibleBudgetError) as refusal:
        lowtide.fit(model, sample, memory_budget=1000, **{**OPTIONS, **options})
    return refusal.value.minimum_bytes


def peak_of(step) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["accumulation", "zeroed gradients"])
def test_gradients_that_are_there_when_a_forward_begins_are_planned_for(set_to_none, caplog):
    model, x = deep(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    budget = int(1.6 * least(model, x, optimizer=optimizer, loss=square))
    plan = lowtide.fit(model, x, memory_budget=budget, optimizer=optimizer, loss=square, **OPTIONS)

    def step() -> None:
        for _ in range(3 if set_to_none else 1):
            square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    with caplog.at_level(logging.INFO, "lowtide"):
        peaks = [peak_of(step) for _ in range(4)]
    assert max(peaks[2:]) <= budget
    assert 0.99 * peaks[-1] <= plan.stats().measured_peak_bytes <= max(peaks)  # of all steps, without planning
    assert sum("gradients are there" in record.message for record in caplog.records) <= 1
    plan.detach()


def images() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = itertools.pairwise((3, 32, 64, 64, 64, 64))
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.SiLU()) for a, b in pairs)).cuda()


@pytest.mark.parametrize("way", ["cudnn.benchmark", "autocast"])
def test_the_least_budget_is_the_same_twice_and_works(way, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", way == "cudnn.benchmark")
    model, x = images(), torch.randn(16, 3, 128, 128, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    options = {"optimizer": optimizer, "loss": square}
    with torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
        first, before = least(model, x, **options), torch.cuda.memory_allocated()
        second = least(model, x, **options)
        assert torch.cuda.memory_allocated() - before < 2**20
        plan = lowtide.fit(model, x, memory_budget=second, **OPTIONS, **options)
    assert first == pytest.approx(second, rel=0.01)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
            loss = square(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # cudnn searches
    assert max(peak_of(step) for _ in range(3)) <= second
    plan.detach()


def test_nothing_that_takes_more_than_the_budget_ends_training():
    model, x, larger = deep(), batch(), batch(2 * ROWS)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    budget = int(1.1 * least(model, x, optimizer=optimizer, loss=square))
    plan = lowtide.fit(model, x, memory_budget=budget, optimizer=optimizer, loss=square, **OPTIONS)

    def steps(x: torch.Tensor, copies: int, num_steps: int) -> None:
        for _ in range(num_steps):
            result = model(x)
            square(torch.cat([result] * copies) if copies > 1 else result).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(x, 1, 1)
    with pytest.warns(lowtide.LowtideWarning, match=r"\[8192, 1024\].*training continues with the leanest schedule"):
        steps(larger, 1, 1)
    with pytest.warns(lowtide.LowtideWarning, match=r"a step took .* but the budget is"):
        steps(x, 8, 3)
    plan.detach()


class Shifted(nn.Module):
    """Reads a number that is neither its own nor an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.inner(x) + OFFSET["value"])


def test_a_recomputation_that_differs_is_found_within_one_round_of_stages(monkeypatch):
    model, x = nn.Sequential(*(Shifted() for _ in range(4))).cuda(), batch(256)
    plan = lowtide.fit(model, x, memory_budget="1GiB", bandwidth=0, strategy="revolve")
    for _ in range(4):
        model(x).sum().backward()

    def round_of_steps() -> None:
        for _ in range(5):  # on a GPU a difference is told two steps later at the latest
            loss = model(x).sum()
            monkeypatch.setitem(OFFSET, "value", 1.0)
            loss.backward()
            torch.cuda.synchronize()
            monkeypatch.setitem(OFFSET, "value", 0.0)

    with pytest.raises(lowtide.ExecutionError, match=r"stage '\d' saved different values .*\(tensor \d"):
        round_of_steps()
    plan.detach()
