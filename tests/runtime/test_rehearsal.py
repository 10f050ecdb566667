"""Trial steps show what training takes, where modules carry tensors over and where weights are large, too."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from tests.runtime.training import batches
from torch import nn

import lowtide
from lowtide.runtime import planning
from lowtide.runtime.meter import Meter

SHAPE = (128, 128)


def normed(kind: str) -> nn.Sequential:
    """Each forward puts a computed weight in the place of the last one's; that of spectral_norm is at first the
    parameter itself, by another name.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch advises the parametrizations, which do not do that
        norm = getattr(nn.utils, kind)
        return nn.Sequential(*(nn.Sequential(norm(nn.Linear(SHAPE[1], SHAPE[1])), nn.Tanh()) for _ in range(6)))


class WideResidual(nn.Module):
    """One stage, since two tensors cross inside, whose backward lets activations go while gradients of weights come."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SHAPE[1], SHAPE[1]) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = layer(y).tanh().sin().exp()
        return x + y


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SHAPE[1], SHAPE[1]), nn.Tanh(), nn.SiLU(), nn.Softplus(), WideResidual())


def mean_square(result: torch.Tensor) -> torch.Tensor:
    return result.square().mean()


def options_for(model: nn.Module) -> dict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    return {"optimizer": optimizer, "loss": mean_square, "bandwidth": 0}


def least_of(model: nn.Module, x: torch.Tensor, options: dict) -> int:
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, **options)
    assert str(caught.value.minimum_bytes) in str(caught.value)
    return caught.value.minimum_bytes


def peak_of_steps(model: nn.Module, inputs: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    gc.collect()
    with Meter("cpu") as meter:
        for x in inputs:
            result = model(x)
            mean_square(result).backward()
            del result
            optimizer.step()
            optimizer.zero_grad()
        return meter.peak_bytes


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm"])
@pytest.mark.parametrize("has_trained", [False, True])
def test_the_budget_holds_where_forwards_replace_weights(kind, has_trained):
    model, inputs = normed(kind), batches(SHAPE, 4)
    options = options_for(model)
    if has_trained:
        peak_of_steps(model, inputs[:1], options["optimizer"])
    least = least_of(model, inputs[0], options)
    for budget in (least, int(1.05 * least)):
        with lowtide.fit(model, inputs[0], memory_budget=budget, **options) as plan:
            assert plan.stats().predicted_peak_bytes <= budget
            peak = peak_of_steps(model, inputs, options["optimizer"])
            assert peak <= budget
            assert peak == pytest.approx(plan.stats().predicted_peak_bytes, rel=0.05)


def test_the_least_is_what_the_leanest_schedule_takes():
    model, inputs = wide(), batches(SHAPE, 4)
    options = options_for(model)
    least = least_of(model, inputs[0], options)
    with lowtide.fit(model, inputs[0], memory_budget=least, **options) as plan:
        assert plan.stats().predicted_peak_bytes <= least
        peak = peak_of_steps(model, inputs, options["optimizer"])
        assert 0.95 * least <= peak <= least
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.fit(model, inputs[0], memory_budget=int(0.97 * least), **options)


def test_a_prediction_is_corrected_by_more_than_the_base():
    stages = [lowtide.Stage(str(k), 1.0, 1.0, 4, 4, weight_bytes=20, optimizer_bytes=40) for k in range(3)]
    chain = lowtide.Chain("weights", stages, base_bytes=10)
    assert planning.corrected(chain, 30).base_bytes == 40
    for less in (5, 10, 60, 130):
        corrected = planning.corrected(chain, -less)
        assert corrected.fixed_bytes == chain.fixed_bytes - less
        assert [stage.weight_bytes for stage in corrected.stages] == [20, 20, 20]


def test_copies_of_buffers_for_afterwards_do_not_count():
    model, inputs = wide(), batches(SHAPE, 3)
    model[1].register_buffer("table", torch.zeros(2**20))
    options = options_for(model)
    budget = int(1.03 * peak_of_steps(model, inputs, options["optimizer"]))
    with lowtide.fit(model, inputs[0], memory_budget=budget, **options) as plan:
        assert plan.stats().predicted_peak_bytes <= budget
        assert peak_of_steps(model, inputs, options["optimizer"]) <= budget
