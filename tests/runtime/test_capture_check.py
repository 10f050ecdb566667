"""Every awkward model: captured, its gradients are those of plain training, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime import awkward
from torch import nn

from lowtide.runtime.capture import capture
from lowtide.runtime.capture_check import check_gradients
from lowtide.runtime.split import Split, StageSplit, Unit

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
    """What this stage gives depends on how often it has run: no schedule can repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.linear = 0, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.linear(x) * self.runs


def test_a_stage_that_gives_other_numbers_is_found_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Forgetful(), nn.Tanh(), nn.Linear(8, 8))
    split = Split(tuple(StageSplit(str(index), (Unit(str(index)),)) for index in range(4)))
    check = check_gradients(model, split, torch.randn(4, 8))
    assert not check.equal
    assert check.largest_difference > 0
