"""A budget that is out of reach where activations may move is tried with recomputation alone: that is never refused
because offloading was allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from benchmarks.coverage_shapes import UNet
from tests.runtime.models import residuals
from tests.runtime.training import Numbers, assert_equal, train
from torch import nn

import lowtide
from lowtide import InfeasibleBudgetError
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.fitting import trials, ways
from lowtide.runtime.fitting.trials import Planned
from lowtide.runtime.measure.figures import Measurer
from lowtide.runtime.measure.stage_figures import StageFigures


class Precise(nn.Module):
    """Computes in double precision, and saves a copy of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def network() -> nn.Module:
    torch.manual_seed(0)
    return UNet(4, 2)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def refusing(monkeypatch: pytest.MonkeyPatch, *least: int) -> list[int]:
    """The first plans are refused with these budgets as the least; the link of every plan is noted."""
    seen: list[int] = []
    tried = trials.tried_schedule

    def refuse(*args: object, **options: object) -> Planned:
        seen.append(args[4].bandwidth)  # type: ignore[attr-defined]
        if len(seen) <= len(least):
            raise InfeasibleBudgetError(f"plan {len(seen)}", minimum_bytes=least[len(seen) - 1])
        return tried(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(trials, "tried_schedule", refuse)
    return seen


def test_a_plan_without_copies_trains_with_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(model: nn.Module) -> Numbers:
        return train(model, [x, x + 1, x - 1], loss=loss, input_grads=False)

    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    seen, model = refusing(monkeypatch, 2**30), network()
    with lowtide.fit(model, x, memory_budget="1GiB", bandwidth="1GB/s", loss=loss):
        found = trained(model)
    assert seen == [10**9, 0]
    assert_equal(found, trained(network()))


@pytest.mark.parametrize("least", [(2000, 1000), (1000, 2000)])
def test_the_lesser_of_both_budgets_is_named(monkeypatch: pytest.MonkeyPatch, least: tuple[int, int]) -> None:
    refusing(monkeypatch, *least)
    alone = r"that this model needs with recomputation alone \(with offloading: 1.95 KiB\); raise it \(weights"
    message = "plan 1" if least[0] == 1000 else alone
    with pytest.raises(InfeasibleBudgetError, match=message) as caught:
        lowtide.fit(network(), torch.randn(2, 3, 16, 16), memory_budget=1, bandwidth="1GB/s")
    assert caught.value.minimum_bytes == 1000


def test_stages_are_measured_once_for_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    measured = Measurer.measured

    def note(self: Measurer, k: int, inputs: Sequence[torch.Tensor]) -> StageFigures:
        kinds.append(self._staged.split.stages[k - 1].kind)
        return measured(self, k, inputs)

    monkeypatch.setattr(Measurer, "measured", note)
    seen = refusing(monkeypatch, 2000, 1000)
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(InfeasibleBudgetError):
        lowtide.fit(network(), x, memory_budget=1, bandwidth="1GB/s", loss=loss)
    assert len(seen) == 2
    last = {capture(network(), x, loss=loss).stages[-1].kind}  # the caller has the last one's result
    assert {kind for kind in kinds if kinds.count(kind) > 1} <= last


@pytest.mark.parametrize("options", [{"bandwidth": 0}, {"bandwidth": "1GB/s", "strategy": "pofo"}])
def test_there_is_one_way_without_a_link_or_with_a_strategy_by_name(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    seen = refusing(monkeypatch, 1000, 1000)
    with pytest.raises(InfeasibleBudgetError, match="plan 1"):
        lowtide.fit(network(), torch.randn(2, 3, 16, 16), memory_budget=1, **options)
    assert len(seen) == 1


def test_allowing_offloading_never_raises_the_least_budget() -> None:
    """Inputs that go by themselves count as saved where they may be moved."""
    least = []
    for bandwidth in ("1GB/s", 0):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), Precise()) for _ in range(6)))
        with pytest.raises(InfeasibleBudgetError) as caught:
            lowtide.fit(model, torch.randn(256, 64), memory_budget=1, bandwidth=bandwidth, loss=loss)
        least.append(caught.value.minimum_bytes)
    assert least[0] <= least[1]


@pytest.mark.parametrize("bandwidth", [0, "10GB/s"])
def test_where_memory_is_short_a_model_is_cut_more_finely(bandwidth: int | str) -> None:
    def trained(model: nn.Module) -> Numbers:
        return train(model, batches, loss=loss, input_grads=False)

    batches = list(torch.randn(3, 1024, 16, generator=torch.Generator().manual_seed(1)))
    x = batches[0]
    options: dict[str, Any] = {"bandwidth": bandwidth, "loss": loss, "optimizer": "adam"}
    chain = lowtide.measure(residuals(16), x, loss=loss, optimizer="adam")
    with pytest.raises(InfeasibleBudgetError) as coarse:
        lowtide.solve(chain, memory_budget=1, bandwidth=bandwidth or None)
    with pytest.raises(InfeasibleBudgetError) as fine:
        lowtide.fit(residuals(16), x, memory_budget=1, **options)
    room = coarse.value.minimum_bytes - fine.value.minimum_bytes
    others = chain.base_bytes  # what else lives in this process counts, too
    assert room > 0.15 * (coarse.value.minimum_bytes - others)
    model = residuals(16)
    options["optimizer"] = torch.optim.Adam(model.parameters())  # its counters of steps count, too
    with lowtide.fit(model, x, memory_budget=fine.value.minimum_bytes + room // 2, **options) as plan:
        assert plan.chain.num_stages > chain.num_stages
        found = trained(model)
    assert_equal(found, trained(residuals(16)))
    options["optimizer"] = "adam"
    with lowtide.fit(residuals(16), x, memory_budget="1GiB", **options) as plan:
        assert plan.chain.num_stages == chain.num_stages


@pytest.mark.parametrize("why", ["the largest cannot be cut", "by hand"])
def test_nothing_is_measured_where_finer_cuts_do_not_help(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    measured = []
    measured_for = ways.measured_for
    monkeypatch.setattr(ways, "measured_for", lambda *args: measured.append(args[2]) or measured_for(*args))
    model, options = residuals(16), {}
    if why == "by hand":
        options["stages"] = ["*"]
    else:
        model = nn.Sequential(*model, nn.Linear(16, 512), nn.Softmax(-1))
    with pytest.raises(InfeasibleBudgetError):
        lowtide.fit(model, torch.randn(1024, 16), memory_budget=1, bandwidth=0, loss=loss, **options)
    assert [settings.finest for settings in measured] == [False]


def test_what_offloading_needs_is_named_where_only_the_other_way_is_cut_more_finely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(ways, "_frees_more", lambda *_: next(answers))
    refusing(monkeypatch, 2000, 1500, 1000)
    with pytest.raises(InfeasibleBudgetError, match=r"recomputation alone \(with offloading: 1.95 KiB\)"):
        lowtide.fit(network(), torch.randn(2, 3, 16, 16), memory_budget=1, bandwidth="1GB/s")
