"""Every awkward model: captured, its gradients are those of plain training, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.gradient_check import GradientCheck, check_gradients, plain_noise, plain_spread
from tests.runtime.awkward import structure as awkward
from torch import nn

from lowtide.runtime.capture.capture import capture
from lowtide.runtime.model.split import Split, StageSplit, Unit

Made = tuple[nn.Module, Any]

MODELS: dict[str, Callable[[], Made]] = {
    "transformer": lambda: (awkward.Transformerlike(), torch.randn(4, 6, 8)),
    "dropout": lambda: (awkward.Transformerlike(dropout=0.3), torch.randn(4, 6, 8)),
    "in place": lambda: (awkward.InplaceResnet(), torch.randn(2, 3, 8, 8)),
    "list assignment": lambda: (awkward.HighResolution(), torch.randn(4, 8)),
    "dense": lambda: (awkward.Dense(), torch.randn(2, 3, 8, 8)),
    "auxiliary": lambda: (awkward.Auxiliary(), torch.randn(4, 6, 16)),
    "encoder-decoder": lambda: (
        awkward.EncoderDecoder(),
        {"source": torch.randn(4, 6, 8), "target": torch.randn(4, 6, 8)},
    ),
    "cross attention": lambda: (awkward.CrossAttending(), (torch.randn(2, 6, 8), torch.randn(2, 6, 8))),
    "recurrent": lambda: (awkward.Recurrent(), torch.randn(4, 8)),
    "tied": lambda: (awkward.Tied(), torch.randint(0, 11, (2, 5))),
    "side channel": lambda: (awkward.SideChannel(), torch.randn(4, 8)),
    "two streams": lambda: (awkward.TwoStreams(), torch.randn(4, 8)),
    "low rank": lambda: (
        nn.Sequential(*(layer for _ in range(3) for layer in (awkward.LowRank(), nn.Tanh()))),
        torch.randn(4, 16),
    ),
    "called for parts": lambda: (nn.Sequential(*(awkward.InParts() for _ in range(3))), torch.randn(8, awkward.WIDTH)),
    "custom functions": lambda: (awkward.CustomFunctions(), torch.randn(4, 8)),
    "backward hooks": lambda: (awkward.hooked(), torch.randn(4, 8, requires_grad=True)),
    "input gradient": lambda: (awkward.Transformerlike(), torch.randn(4, 6, 8, requires_grad=True)),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal(name: str) -> None:
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    split = capture(model, sample)
    check = check_gradients(model, split, sample)
    assert check.equal, check
    assert check.num_compared >= 1 + sum(p.requires_grad for p in model.parameters())


def test_autocast() -> None:
    torch.manual_seed(0)
    model, x = awkward.Recurrent(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        check = check_gradients(model, capture(model, x), x)
    assert check.equal, check


def test_a_given_loss() -> None:
    torch.manual_seed(0)
    model, x = awkward.Auxiliary(), torch.randn(4, 16)

    def loss(answer: awkward.Answer) -> torch.Tensor:
        assert answer.auxiliary is not None
        return answer.logits.square().mean() + answer.auxiliary.exp().mean()

    check = check_gradients(model, capture(model, x, loss=loss), x, loss=loss)
    assert check.equal, check


class Forgetful(nn.Module):
    """What this stage gives depends on how often it has run, which nobody can put back: no schedule can repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.linear = itertools.count(1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * next(self.runs)


def test_a_stage_that_gives_other_numbers_is_found_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Forgetful(), nn.Tanh(), nn.Linear(8, 8))
    split = Split(tuple(StageSplit(str(index), (Unit(str(index)),)) for index in range(4)))
    check = check_gradients(model, split, torch.randn(4, 8))
    assert not check.equal
    assert check.largest_difference > 0


class Unsteady(nn.Module):
    """Gradients that differ in one of several steps, as those of kernels that add in any order do; its output does not.

    Args:
        odd: the steps, from 0, that are different.
    """

    def __init__(self, odd: set[int]) -> None:
        super().__init__()
        self.steps, self.odd, self.linear = itertools.count(), odd, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        if next(self.steps) in self.odd:
            output.register_hook(lambda grad: grad * (1 + 2**-10))
        return output


def test_the_spread_is_that_of_several_plain_steps() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    split = Split(tuple(StageSplit(str(index), (Unit(str(index)),)) for index in range(2)))
    steady = nn.Sequential(nn.Linear(8, 8), Unsteady(set()))
    assert plain_spread(steady, split, x) == {}
    assert plain_noise(steady, split, x) == 0
    model = nn.Sequential(nn.Linear(8, 8), Unsteady({5}))  # the first two agree
    spread = plain_spread(model, split, x)
    assert set(spread) == {f"parameter {name}" for name, _ in model.named_parameters()}
    assert all(2**-11 < size < 2**-9 for size in spread.values())


def test_a_difference_beyond_the_spread_stays_one() -> None:
    check = GradientCheck(3, {"a": 1e-4, "b": 1e-4, "c": float("inf")})
    assert check.beyond({"a": 1e-4, "c": float("inf")}, 2) == ("b", "c")  # b is the same in all plain steps
    assert check.beyond({"a": 1e-5, "b": 1e-4}, 2) == ("a", "c")
