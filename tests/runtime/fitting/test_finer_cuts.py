"""A budget that is out of reach with the first choice of cuts is tried with a finer one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from benchmarks.coverage_shapes import UNet
from tests.runtime.training import Numbers, assert_equal, train
from torch import nn

import lowtide
from lowtide import InfeasibleBudgetError
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.fitting import trials
from lowtide.runtime.fitting.trials import Planned
from lowtide.runtime.measure.figures import Measurer
from lowtide.runtime.measure.stage_figures import StageFigures


def network() -> nn.Module:
    torch.manual_seed(0)
    return UNet(4, 2)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def refusing(monkeypatch: pytest.MonkeyPatch, *least: int) -> list[int]:
    """The first plans are refused with these budgets as the least; the stages of every plan are noted."""
    seen: list[int] = []
    tried = trials.tried_schedule

    def refuse(*args: object, **options: object) -> Planned:
        seen.append(args[2].num_stages)  # type: ignore[attr-defined]
        if len(seen) <= len(least):
            raise InfeasibleBudgetError(f"plan {len(seen)}", minimum_bytes=least[len(seen) - 1])
        return tried(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(trials, "tried_schedule", refuse)
    return seen


def test_a_plan_with_finer_cuts_trains_with_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(model: nn.Module) -> Numbers:
        return train(model, [x, x + 1, x - 1], loss=loss, input_grads=False)

    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    seen, model = refusing(monkeypatch, 2**30), network()
    with lowtide.fit(model, x, memory_budget="1GiB", bandwidth=0, loss=loss, strategy="revolve") as plan:
        assert plan.stats().num_steps == 0
        found = trained(model)
        assert plan.stats().recomputed_per_step > 0
    assert len(seen) == 2
    assert capture(network(), x).num_stages < seen[1]
    assert_equal(found, trained(network()))


@pytest.mark.parametrize("least", [(2000, 1000), (1000, 2000)])
def test_the_lesser_of_both_budgets_is_named(monkeypatch: pytest.MonkeyPatch, least: tuple[int, int]) -> None:
    refusing(monkeypatch, *least)
    with pytest.raises(InfeasibleBudgetError, match=f"plan {least.index(1000) + 1}") as caught:
        lowtide.fit(network(), torch.randn(2, 3, 16, 16), memory_budget=1, bandwidth=0)
    assert caught.value.minimum_bytes == 1000


def test_stages_that_both_cuts_have_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    measured = Measurer.measured

    def note(self: Measurer, k: int, inputs: Sequence[torch.Tensor]) -> StageFigures:
        kinds.append(self._staged.split.stages[k - 1].kind)
        return measured(self, k, inputs)

    monkeypatch.setattr(Measurer, "measured", note)
    seen = refusing(monkeypatch, 2000, 1000)
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(InfeasibleBudgetError):
        lowtide.fit(network(), x, memory_budget=1, bandwidth=0, loss=loss)
    first, second = (capture(network(), x, loss=loss, finer=finer) for finer in (False, True))
    assert seen == [first.num_stages, second.num_stages]
    last = {first.stages[-1].kind, second.stages[-1].kind}  # the caller has the last one's result
    repeated = {kind for kind in kinds if kinds.count(kind) > 1}
    assert repeated <= last
    assert {stage.kind for stage in first.stages} & {stage.kind for stage in second.stages} - last


def test_a_model_that_cannot_be_cut_more_finely_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = refusing(monkeypatch, 1000, 1000)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(InfeasibleBudgetError, match="plan 1"):
        lowtide.fit(model, torch.randn(2, 4), memory_budget=1, bandwidth=0)
    assert seen == [2]


def test_stages_that_are_given_by_hand_are_not_cut_further(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = refusing(monkeypatch, 1000, 1000)
    with pytest.raises(InfeasibleBudgetError, match="plan 1"):
        lowtide.fit(network(), torch.randn(2, 3, 16, 16), memory_budget=1, bandwidth=0, stages=["down.*", "bottom"])
    assert len(seen) == 1
