"""Trial steps show what training takes, where modules carry tensors over and where weights are large, too."""

from __future__ import annotations

import gc
import random
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.runtime import models
from tests.runtime.training import batches
from torch import nn

import lowtide
from lowtide.runtime.fitting import trials
from lowtide.runtime.fitting.rehearsal import _Repeated
from lowtide.runtime.measure import figures as measure_figures
from lowtide.runtime.measure.timing import Timing
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


class Remembering(nn.Module):
    """Keeps its hidden tensor in an object until the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.memory = nn.Linear(SHAPE[1], SHAPE[1]), SimpleNamespace(hidden=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        self.memory.hidden = hidden.detach().clone()
        return x + torch.tanh(hidden)


@pytest.mark.parametrize("has_trained", [False, True])
def test_the_budget_holds_where_objects_carry_tensors_over(has_trained):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(Remembering() for _ in range(4))), batches((512, SHAPE[1]), 3)
    options = options_for(model)
    if has_trained:
        peak_of_steps(model, inputs[:1], options["optimizer"])
    least = least_of(model, inputs[0], options)
    with lowtide.fit(model, inputs[0], memory_budget=least, **options):
        peak = peak_of_steps(model, inputs, options["optimizer"])
        assert 0.95 * least <= peak <= least


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


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.relu, self.dropout = nn.ReLU(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.relu(self.up(self.norm(x)))))


class WithMeans(nn.Module):
    """Several of its schedules are the leanest by prediction, and they differ by 2 % when they are tried."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, means = x * 1.1, []
        for block in self.blocks:
            x = block(x)
            means.append(x.mean())
        return x, torch.stack(means), x.square().mean()


def test_the_least_does_not_hang_on_measured_times(monkeypatch):
    model, x, named = WithMeans(64), torch.randn(128, 64), set()
    for seed in (0, 1, 2):
        times = random.Random(seed)
        monkeypatch.setattr(measure_figures, "timed", lambda *_, times=times: Timing(times.choice([1e-4, 1e-3, 3e-3])))
        with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
            lowtide.fit(model, x, memory_budget=1, bandwidth=0)
        named.add(caught.value.minimum_bytes)
    assert len(named) == 1
    lowtide.fit(model, x, memory_budget=named.pop(), bandwidth=0).detach()


def test_a_prediction_is_corrected_by_more_than_the_base():
    stages = [lowtide.Stage(str(k), 1.0, 1.0, 4, 4, weight_bytes=20, optimizer_bytes=40) for k in range(3)]
    chain = lowtide.Chain("weights", stages, base_bytes=10)
    assert trials.corrected(chain, 30).base_bytes == 40
    for less in (5, 10, 60, 130):
        corrected = trials.corrected(chain, -less)
        assert corrected.fixed_bytes == chain.fixed_bytes - less
        assert [stage.weight_bytes for stage in corrected.stages] == [20, 20, 20]


@pytest.mark.parametrize("extras", [(9, 50), (150, 5)], ids=["backward", "forward"])
def test_a_prediction_is_corrected_by_more_than_what_is_there_all_the_time(extras):
    variants = (lowtide.Variant("lean", 1.0, 1.0, 30, *extras),)
    more = {"weight_bytes": 20, "optimizer_bytes": 5, "variants": variants}
    stages = [lowtide.Stage(name, 1.0, 1.0, 4, 40, 4, *extras, **more) for name in "abc"]
    chain = lowtide.Chain("extras", stages, base_bytes=10)
    for variant in (0, 1):
        forwards = [lowtide.Forward(k, "all", variant) for k in (1, 2, 3)]
        schedule = lowtide.Schedule("", [*forwards, *(lowtide.Backward(k) for k in (3, 2, 1))])
        peak_bytes = lowtide.simulate(chain, schedule).peak_bytes
        for less in (25, 26, 60, 90):
            corrected = trials.corrected(chain, -less)
            assert lowtide.simulate(corrected, schedule).peak_bytes == peak_bytes - less
    assert [stage.weight_bytes for stage in corrected.stages] == [20, 20, 20]


def test_no_plan_is_predicted_to_take_more_than_its_budget(monkeypatch):
    model, x = wide(), batches(SHAPE, 1)[0]
    measured = trials.measure_split

    def too_much(*args, **kwargs):
        chain = measured(*args, **kwargs)
        more = [replace(each, backward_extra_bytes=each.backward_extra_bytes + 2**21) for each in chain.stages]
        return replace(chain, stages=more)

    monkeypatch.setattr(trials, "measure_split", too_much)
    options = {"bandwidth": 0, "optimizer": "sgd"}
    with pytest.raises(lowtide.InfeasibleBudgetError) as refusal:
        lowtide.fit(model, x, memory_budget=1, **options)
    budget = refusal.value.minimum_bytes
    with lowtide.fit(model, x, memory_budget=budget, **options) as plan:
        assert any("instead of the predicted" in note for note in plan.notes)
        assert plan.stats().predicted_peak_bytes <= budget


def test_copies_of_buffers_for_afterwards_do_not_count():
    model, inputs = wide(), batches(SHAPE, 3)
    model[1].register_buffer("table", torch.zeros(2**20))
    options = options_for(model)
    budget = int(1.03 * peak_of_steps(model, inputs, options["optimizer"]))
    with lowtide.fit(model, inputs[0], memory_budget=budget, **options) as plan:
        assert plan.stats().predicted_peak_bytes <= budget
        assert peak_of_steps(model, inputs, options["optimizer"]) <= budget


def test_a_refusal_tells_what_is_not_the_models():
    model, x = wide(), batches(SHAPE, 1)[0]

    def refusal() -> str:
        with pytest.raises(lowtide.InfeasibleBudgetError) as error:
            lowtide.fit(model, x, memory_budget=1, bandwidth=0)
        return str(error.value)

    assert "other tensors" not in refusal()
    other = torch.zeros(2**23)  # of another model, say
    assert re.search(r"bytes, 32\.\d+ MiB of them for the batch, buffers and other tensors on the device\)", refusal())
    del other


def test_the_least_is_enough_where_weights_take_most():
    model, x = nn.Sequential(*(models.Widening(16) for _ in range(6)), nn.Linear(16, 4)), torch.zeros(8, 16)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="take alone") as refusal:
        lowtide.fit(model, x, memory_budget=1, bandwidth=0)
    lowtide.fit(model, x, memory_budget=refusal.value.minimum_bytes, bandwidth=0).detach()


@pytest.mark.parametrize(
    ("spread", "off", "is_same"),
    [
        (0.0, 0.0, True),
        (0.0, 1e-3, False),
        (1e-3, 1.5e-3, True),  # as far as equal steps are apart
        (1e-3, 5e-3, False),
        (1e-3, float("nan"), False),
        (float("nan"), 0.1, False),
        (0.0, None, False),
    ],
)
def test_a_replayed_step_may_differ_as_far_as_equal_steps_do(spread, off, is_same):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    expected = _Repeated(model)
    first = torch.full((4, 4), 1e-2)  # an entry of a sum whose terms are far larger, and cancel
    model[0].bias.grad = torch.ones(4)
    for place in range(3):
        model[0].weight.grad = first + spread if place % 2 else first.clone()
        expected.add()
    model[0].weight.grad = None if off is None else first - off
    assert (expected.difference() == "") == is_same
    if not is_same:
        assert "0.weight" in expected.difference()
    model[0].weight.grad = first.clone()
    model[0].bias.grad = torch.zeros(4)
    assert "0.bias" in expected.difference()
