from __future__ import annotations

import itertools

import pytest
from tests.report.chains import MIB, deep_chain, small_chain

from lowtide import InfeasibleBudgetError, StrategyError, solve
from lowtide.report.survey import coarse_to_fine, survey

STRATEGIES = ("segments", "rotor")


@pytest.fixture(scope="module")
def found():
    return survey(deep_chain(24), strategies=STRATEGIES, memory_budgets=[2 * 2**30], patience_seconds=None)


def test_each_plan_is_the_fastest_of_its_budget(found):
    for plan in found.plans:
        best = float("inf")
        for strategy in ("store-all", *STRATEGIES):
            try:
                best = min(best, solve(found.chain, memory_budget=plan.memory_budget, strategy=strategy).seconds)
            except InfeasibleBudgetError:
                continue
        assert plan.trace.seconds == best
        assert plan.trace.peak_bytes <= plan.memory_budget


def test_the_budgets_reach_from_the_least_to_plain_training(found):
    budgets = [plan.memory_budget for plan in found.plans]
    assert budgets == sorted(budgets)
    assert budgets[0] == found.minimum_bytes
    assert budgets[-1] == found.store_all.peak_bytes
    assert 2 * 2**30 in budgets
    assert len(budgets) == 21
    with pytest.raises(InfeasibleBudgetError):
        solve(found.chain, memory_budget=budgets[0] - 1, strategy="rotor")


def test_curves_fall(found):
    assert [curve.strategy for curve in found.curves] == ["store-all", *STRATEGIES]
    for curve in found.curves:
        assert curve.num_skipped == 0
        for one, other in itertools.pairwise(curve.points):
            assert one.peak_bytes < other.peak_bytes
            assert one.seconds > other.seconds
        assert curve.at(curve.minimum_bytes - 1) is None
        assert curve.at(curve.minimum_bytes).peak_bytes <= curve.minimum_bytes


def test_a_plan_within_a_budget(found):
    assert found.plan_within(2 * 2**30).memory_budget == 2 * 2**30
    assert found.plan_within(10**12).trace.seconds == found.store_all.seconds
    with pytest.raises(InfeasibleBudgetError) as caught:
        found.plan_within(1)
    assert caught.value.minimum_bytes == found.minimum_bytes


def test_without_patience_each_strategy_is_tried_once(found):
    hasty = survey(found.chain, strategies=STRATEGIES, memory_budgets=[2 * 2**30], patience_seconds=0.0)
    for curve, full in zip(hasty.curves[1:], found.curves[1:], strict=True):
        assert curve.tried_bytes == (2 * 2**30,)
        assert curve.num_skipped == len(full.tried_bytes) - 1
        assert len(curve.points) == 1
    assert hasty.plan_within(2 * 2**30).trace.seconds == found.plan_within(2 * 2**30).trace.seconds


def test_a_budget_below_all_is_left_out():
    found = survey(small_chain(), strategies=["store-all"], memory_budgets=[MIB])
    assert [plan.memory_budget for plan in found.plans] == [found.store_all.peak_bytes]


def test_what_moves_needs_a_link():
    with pytest.raises(StrategyError, match="give --bandwidth"):
        survey(small_chain(), strategies=["offload"])


def test_coarse_to_fine_tries_each_once():
    budgets = list(range(0, 210, 10))
    order = list(coarse_to_fine(budgets, first=[70, 5]))
    assert sorted(order) == budgets
    assert order[:4] == [70, 0, 200, 100]
    assert list(coarse_to_fine([7])) == [7]
