"""`lowtide.frontier`: one table for every budget."""

from __future__ import annotations

import itertools

import pytest
from tests.chains import NESTED_FEATURES, long_chain, random_chain, random_chains
from tests.looping import looped
from tests.search import curve, nested_schedules

import lowtide
from lowtide import Chain, InfeasibleBudgetError, StrategyError, simulate, solve


@looped("chain", random_chains(12, 4, features=NESTED_FEATURES))
def test_it_is_the_curve_of_an_exhaustive_search(chain: Chain) -> None:
    found = lowtide.frontier(chain, num_points=1000)
    assert [(p.memory_bytes, p.seconds) for p in found.points] == curve(chain, nested_schedules(chain, 1, 4))


@looped("chain", random_chains(12, 5, features=NESTED_FEATURES))
def test_every_point_is_what_rotor_finds_at_its_budget(chain: Chain) -> None:
    for point in lowtide.frontier(chain, num_points=400).points:
        assert simulate(chain, point.schedule).peak_bytes == point.memory_bytes
        alone = solve(chain, memory_budget=point.memory_bytes, strategy="rotor")
        assert point.seconds == pytest.approx(alone.seconds)


@pytest.mark.parametrize("chain", [long_chain(9), long_chain(30), random_chain(5, 12, features=("variants",))])
def test_it_falls_from_the_least_budget_to_plain_training(chain: Chain) -> None:
    found = lowtide.frontier(chain)
    fastest = solve(chain, memory_budget=2**60, strategy="rotor")
    assert found.points[-1].seconds == pytest.approx(fastest.seconds)
    assert found.at(fastest.peak_bytes) == found.points[-1]
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy="rotor")
    assert refused.value.minimum_bytes == found.minimum_bytes
    for before, after in itertools.pairwise(found.points):
        assert before.memory_bytes < after.memory_bytes
        assert before.seconds > after.seconds


def test_any_budget_of_the_table_has_a_schedule() -> None:
    chain = long_chain(25)
    found = lowtide.frontier(chain, num_points=20)
    most = found.points[-1].memory_bytes
    before = float("inf")
    for part in range(101):
        budget = found.minimum_bytes + (most - found.minimum_bytes) * part // 100
        point = found.at(budget)
        trace = simulate(chain, point.schedule)
        assert trace.peak_bytes == point.memory_bytes <= budget
        assert trace.seconds == point.seconds == found.schedule(budget).predicted.seconds
        assert point.seconds <= before * (1 + 1e-12)
        before = point.seconds
    assert found.at(10 * most).seconds == pytest.approx(chain.compute_seconds)


def test_it_comes_close_to_a_table_for_each_budget() -> None:
    chain = long_chain(40)
    for point in lowtide.frontier(chain).points[2::9]:
        own = solve(chain, memory_budget=point.memory_bytes, strategy="rotor").seconds
        assert own <= point.seconds * 1.005
        assert point.seconds <= own * 1.02


def test_a_frontier_up_to_a_budget_refuses_more_and_less() -> None:
    chain = long_chain(12)
    whole = lowtide.frontier(chain)
    middle = whole.points[len(whole.points) // 2].memory_bytes
    part = lowtide.frontier(chain, memory_budget=middle)
    assert part.points[-1].memory_bytes <= middle
    assert part.minimum_bytes == whole.minimum_bytes
    with pytest.raises(StrategyError, match="larger memory_budget"):
        part.schedule(middle + 1)
    with pytest.raises(InfeasibleBudgetError) as refused:
        part.schedule(part.minimum_bytes - 1)
    assert refused.value.minimum_bytes == part.minimum_bytes
    with pytest.raises(InfeasibleBudgetError) as refused:
        lowtide.frontier(chain, memory_budget=part.minimum_bytes - 1)
    assert refused.value.minimum_bytes == part.minimum_bytes
    only = lowtide.frontier(chain, memory_budget=part.minimum_bytes)
    assert [point.memory_bytes for point in only.points] == [part.minimum_bytes]


def test_plain_data_and_wrong_numbers() -> None:
    chain = random_chain(0, 3)
    assert lowtide.frontier(chain.to_dict(), memory_budget="1MiB").points == lowtide.frontier(chain).points
    with pytest.raises(StrategyError, match="num_points"):
        lowtide.frontier(chain, num_points=1)
