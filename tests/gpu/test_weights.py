"""On a GPU: weights, gradients and optimizer state in pinned memory, the same numbers whatever the streams do."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: deterministic matrix products

import gc
from typing import Any

import pytest
import torch
from tests.runtime.schedules import parking, recomputing, storing
from tests.runtime.training import Numbers, assert_equal, seed_all
from torch import nn

import lowtide
from lowtide.errors import PlanError
from lowtide.runtime.execute import stepping
from lowtide.runtime.transfer.pinned_tier import PinnedTier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH, NUM_BLOCKS = 512, 4
LONG_SLEEP = 20_000_000  # clock cycles, some 12 ms

OPTIMIZERS = {
    "for-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False, fused=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
}


@pytest.fixture(autouse=True)
def _allowed(monkeypatch):
    monkeypatch.setattr(stepping, "CUDA_IS_ALLOWED", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
        for _ in range(NUM_BLOCKS)
    )
    return nn.Sequential(*blocks).to("cuda", dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> Numbers:
    """Steps with clipping and a scheduler."""
    seed_all(1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(num_steps, 64, WIDTH, generator=torch.Generator().manual_seed(2)).to("cuda", dtype)
    numbers: Numbers = {}
    for index in range(num_steps):
        loss = (model(inputs[index]).float() ** 2).mean()
        loss.backward()
        numbers[f"{index} norm"] = nn.utils.clip_grad_norm_(model.parameters(), 0.05).clone()
        numbers |= {f"{index} gradient of {name}": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)
        numbers[f"{index} loss"] = loss.detach()
    numbers |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    for index, state in enumerate(optimizer.state.values()):
        numbers |= {f"state {index} {name}": value.clone() for name, value in state.items()}
    return numbers


def compare(make: Any, base: Any, dtype: torch.dtype = torch.float32, num_steps: int = 4) -> None:
    plain = network(dtype)
    expected = train(plain, make(plain.parameters()), num_steps)
    model = network(dtype)
    optimizer = make(model.parameters())
    with lowtide.attach(model, parking(base), optimizer=optimizer):
        assert_equal(train(model, optimizer, num_steps), expected)
    assert_equal(
        {name: p.detach() for name, p in model.named_parameters()},
        {name: p.detach() for name, p in plain.named_parameters()},
    )


@pytest.mark.parametrize("base", [storing(NUM_BLOCKS), recomputing(NUM_BLOCKS)], ids=lambda s: s.strategy)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_numbers(name, base):
    compare(OPTIMIZERS[name], base)


def test_bfloat16():
    compare(OPTIMIZERS["fused"], recomputing(NUM_BLOCKS), torch.bfloat16)


def test_what_is_parked_takes_no_device_memory():
    x = torch.randn(64, WIDTH, device="cuda")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    other = network()
    step(other, torch.optim.AdamW(other.parameters(), fused=True))  # libraries take their workspaces
    del other
    model = network()
    one = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = torch.cuda.memory_allocated() - one
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        step(model, optimizer)
        assert torch.cuda.memory_allocated() - before < one / 4
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer)
        # a block's weights, gradient and two moments, and less than as much for activations and temporaries
        assert torch.cuda.max_memory_allocated() - before < 8 * one / NUM_BLOCKS
        assert all(p.is_cuda and p.untyped_storage().nbytes() for p in model.parameters())
        assert all(torch.equal(p, p.cpu().cuda()) for p in model.parameters())
    assert torch.cuda.memory_allocated() - before >= 3 * one


@pytest.mark.parametrize("method", ["copy_down", "copy_up"])
def test_late_copies(method, monkeypatch):
    plain = getattr(PinnedTier, method)
    stream = "to_host" if method == "copy_down" else "to_device"

    def slowly(self, pairs):
        with torch.cuda.stream(getattr(self, stream)):
            torch.cuda._sleep(LONG_SLEEP)
        return plain(self, pairs)

    monkeypatch.setattr(PinnedTier, method, slowly)
    compare(OPTIMIZERS["fused"], recomputing(NUM_BLOCKS), num_steps=2)


def test_late_computing():
    """A block of memory that is freed is not written by a copy while the stage that had it still computes."""
    expected = train(plain := network(), torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9), 2)
    model = network()
    for block in model:
        block.register_forward_hook(lambda *_: torch.cuda._sleep(LONG_SLEEP // 4))
        block.register_full_backward_hook(lambda *_: torch.cuda._sleep(LONG_SLEEP // 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        assert_equal(train(model, optimizer, 2), expected)


def test_the_users_own_stream():
    expected = train(plain := network(), torch.optim.AdamW(plain.parameters(), lr=1e-3), 2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.cuda.synchronize()
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        with torch.cuda.stream(torch.cuda.Stream()):
            numbers = train(model, optimizer, 2)
        torch.cuda.synchronize()
        assert_equal(numbers, expected)


def test_a_checkpoint_is_loaded_without_the_device(tmp_path):
    plain = network()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    train(plain, plain_optimizer, 2)
    torch.save({"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()}, tmp_path / "checkpoint")
    expected = train(plain, plain_optimizer, 2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        found = torch.load(tmp_path / "checkpoint", map_location="cpu")
        before = torch.cuda.memory_allocated()
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        assert torch.cuda.memory_allocated() - before <= 2**16  # numbers of steps, each in a block of its own
        assert_equal(train(model, optimizer, 2), expected)


def test_fit_within_less_than_weights_gradients_and_state():
    """The whole way: measured, planned with joint, and executed within the budget."""
    expected = train(plain := network(), torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True))
    del plain
    gc.collect()
    others = torch.cuda.memory_allocated()
    model = network()
    resident = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(64, WIDTH, device="cuda")

    def loss(result: torch.Tensor) -> torch.Tensor:
        return (result.float() ** 2).mean()

    budget = others + int(0.75 * resident) + 2**26  # and workspaces
    with lowtide.fit(model, x, memory_budget=budget, strategy="joint", optimizer=optimizer, loss=loss) as plan:
        torch.cuda.reset_peak_memory_stats()
        assert_equal(train(model, optimizer), expected)
        assert plan.stats().measured_peak_bytes <= budget


def test_without_being_asked_for_weights_stay(monkeypatch):
    monkeypatch.setattr(stepping, "CUDA_IS_ALLOWED", False)
    model = network()
    with pytest.raises(PlanError, match="not ready for CUDA devices yet"):
        lowtide.attach(model, parking(storing(NUM_BLOCKS)), optimizer=torch.optim.AdamW(model.parameters()))
