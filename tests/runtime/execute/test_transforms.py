"""The transforms of torch.func: models whose own code uses them and is refused (that training is equal with the others:
`tests/runtime/test_awkward.py`), and a backward that runs inside of one.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.runtime.awkward.paths import WIDTH, Between
from tests.runtime.execute.test_weights import make_adamw, parking
from tests.runtime.schedules import offloading, recomputing, repeating
from torch import nn

import lowtide


def test_a_model_whose_own_code_differentiates_through_a_transform_is_refused_in_one_line():
    with pytest.raises(lowtide.CaptureError, match=r"transform of torch.func .* inside a submodule"):
        lowtide.measure(Between(), torch.ones(4, WIDTH))


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)),
        nn.Linear(WIDTH, WIDTH),
    )


def batched(model: nn.Module, *, by_vmap: bool) -> list[torch.Tensor]:
    """Gradients for several rows at once, twice, and what generators draw then."""
    torch.manual_seed(1)
    x, rows = torch.randn(3, WIDTH, requires_grad=True), torch.randn(2, 3, WIDTH)
    found = []
    for _ in range(2):
        out, wanted = model(x), [x, *model.parameters()]
        if by_vmap:
            grad = torch.func.vmap(lambda row, out=out, wanted=wanted: torch.autograd.grad(out, wanted, row))
            found += grad(rows)
        else:
            found += torch.autograd.grad(out, wanted, rows, is_grads_batched=True)
    return [*found, torch.rand(3)]


@pytest.mark.parametrize("by_vmap", [False, True], ids=["is_grads_batched", "vmap"])
@pytest.mark.parametrize("schedule", [recomputing(5), repeating(5), offloading(5)], ids=["all", "each", "offload"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_backward_for_several_gradients_at_once(schedule, by_vmap, strict):
    expected = batched(dropping(), by_vmap=by_vmap)
    model = dropping()
    lowtide.attach(model, schedule, strict=strict)
    got = batched(model, by_vmap=by_vmap)
    assert all(itertools.starmap(torch.equal, zip(got, expected, strict=True)))


def test_several_gradients_at_once_where_weights_move():
    expected = batched(dropping(), by_vmap=False)
    model = dropping()
    with lowtide.attach(model, parking(recomputing(5)), optimizer=make_adamw(model.parameters())):
        got = batched(model, by_vmap=False)
    assert all(itertools.starmap(torch.equal, zip(got, expected, strict=True)))
