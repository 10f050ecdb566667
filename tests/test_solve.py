"""`lowtide.solve`: settings, refusals, and `auto`."""

from __future__ import annotations

import dataclasses

import numpy
import pytest
from tests.chains import NESTED_FEATURES, long_chain, random_chain, random_chains

from lowtide import (
    Chain,
    InfeasibleBudgetError,
    LowtideError,
    Schedule,
    ScheduleError,
    SideValue,
    Stage,
    StrategyError,
    UnitError,
    compare,
    frontier,
    simulate,
    solve,
)
from lowtide.solve import applicable
from lowtide.strategies import store_all
from lowtide.strategies.base import Answer, Problem, find

CHAIN = Chain("three", tuple(Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2, 3)))


def each_alone(chain: Chain, budget: int, bandwidth: int | None) -> dict[str, float]:
    """The time of every strategy that `auto` could have chosen and that fits."""
    seconds = {}
    for entry in (entry for entry in applicable(chain, bandwidth or 0) if not entry.lists_updates):
        try:
            seconds[entry.name] = solve(chain, memory_budget=budget, strategy=entry.name, bandwidth=bandwidth).seconds
        except InfeasibleBudgetError:
            continue
    return seconds


@pytest.mark.parametrize("bandwidth", [None, 3], ids=["alone", "with a link"])
@pytest.mark.parametrize(
    "chain", [*random_chains(14, 4), random_chain(3, 7, features=("variants", "weight gradients"))]
)
def test_auto_never_loses_to_a_strategy_that_it_could_have_chosen(chain: Chain, bandwidth: int | None) -> None:
    top = solve(chain, memory_budget=2**40, strategy="store-all").peak_bytes
    for share in (1.1, 0.9, 0.7, 0.5):
        budget = int(share * top)
        alone = each_alone(chain, budget, bandwidth)
        if not alone:
            with pytest.raises(InfeasibleBudgetError):
                solve(chain, memory_budget=budget, bandwidth=bandwidth)
            continue
        chosen = solve(chain, memory_budget=budget, bandwidth=bandwidth, manage_weights=True)
        assert chosen.seconds <= min(alone.values()) * (1 + 1e-12)
        assert chosen.peak_bytes <= budget


@pytest.mark.parametrize("what", ["optimizer_bytes", "weight_grad_bytes"])
def test_auto_also_moves_what_goes_with_weights_where_these_have_no_bytes(what: str) -> None:
    chain = Chain("four", tuple(Stage(str(k), 1.0, 2.0, 1, 1, **{what: 10}) for k in range(4)))
    alone = solve(chain, memory_budget=20, strategy="weights-greedy", bandwidth=10)
    with pytest.raises(InfeasibleBudgetError):
        solve(chain, memory_budget=20, strategy="pofo", bandwidth=10)
    assert solve(chain, memory_budget=20, bandwidth=10, manage_weights=True).seconds <= alone.seconds


def test_auto_offers_what_leaves_weights_on_the_device() -> None:
    chain = Chain("four", tuple(Stage(str(k), 1.0, 2.0, 1, 40, weight_bytes=2) for k in range(4)))
    budget = solve(chain, memory_budget=2**40, strategy="store-all").peak_bytes - 1
    assert solve(chain, memory_budget=budget, bandwidth=10, manage_weights=True).schedule.manages
    found = solve(chain, memory_budget=budget, bandwidth=10)
    assert not found.schedule.manages
    assert not any(find(candidate.strategy).manages_weights for candidate in found.candidates)


def test_auto_works_from_the_least_of_all_budgets_on() -> None:
    for chain in random_chains(10, 4):
        if solve(chain, memory_budget=2**40, strategy="store-all").peak_bytes == 0:
            continue  # with nothing to store no budget is too small
        with pytest.raises(InfeasibleBudgetError) as refused:
            solve(chain, memory_budget=0)
        least = refused.value.minimum_bytes
        assert solve(chain, memory_budget=least).peak_bytes == least
        with pytest.raises(InfeasibleBudgetError) as refused:
            solve(chain, memory_budget=least - 1)
        assert refused.value.minimum_bytes == least


def test_auto_lists_what_it_tried() -> None:
    solution = solve(CHAIN, memory_budget=100)
    tried = {candidate.strategy: candidate for candidate in solution.candidates}
    assert tried["store-all"].seconds is None
    assert tried["store-all"].minimum_bytes == 140
    assert tried["rotor"].seconds == solution.seconds == min(c.seconds for c in tried.values() if c.seconds is not None)
    assert solution.strategy in tried
    told: list[tuple[str, float]] = []
    solve(CHAIN, memory_budget=100, progress=lambda name, share: told.append((name, share)))
    assert [name for name, _ in told][: len(tried)] == list(tried)
    assert all(0 <= share <= 1 for _, share in told)


def test_auto_stops_where_nothing_can_be_faster() -> None:
    assert [candidate.strategy for candidate in solve(CHAIN, memory_budget="1MB").candidates] == ["store-all"]


def test_auto_tries_first_what_may_be_as_fast_as_plain_training() -> None:
    chain = Chain("six", tuple(Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in range(6)))
    solution = solve(chain, memory_budget=160, bandwidth=400)
    assert solution.seconds == chain.compute_seconds
    assert [candidate.strategy for candidate in solution.candidates] == ["store-all", "offload"]


def test_auto_passes_over_what_must_be_slower() -> None:
    chain = Chain("six", tuple(Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in range(6)))
    solution = solve(chain, memory_budget=220)
    tried = {candidate.strategy for candidate in solution.candidates}
    assert tried == {entry.name for entry in applicable(chain, 0)} - {"revolve"}  # which runs forwards twice
    assert solution.seconds < solve(chain, memory_budget=220, strategy="revolve").seconds
    least = solve(chain, memory_budget=2**40, strategy="revolve").seconds
    assert least == 6 * 3.0 + 5 * 1.0 > solution.seconds
    skipping = dataclasses.replace(chain, side_values=[SideValue("skip", 1, 1, (6,))])
    solution = solve(skipping, memory_budget=230)
    slower = [solve(skipping, memory_budget=230, strategy=name).seconds for name in ("segments", "chen")]
    assert solution.strategy == "rotor"
    assert solution.seconds < min(slower)
    assert {candidate.strategy for candidate in solution.candidates} == tried - {"segments", "chen"}


@pytest.mark.parametrize("seed", [67, 306, 572])
def test_rotor_claims_no_bound_where_side_values_may_be_counted_twice(seed: int) -> None:
    features = ("side values", *(("outliving",) if seed % 3 == 0 else ()), *NESTED_FEATURES[seed % 4 :: 4])
    chain = random_chain(seed, 3 + seed % 8, sizes=("mixed", "heavy-tailed", "equal")[seed % 3], features=features)
    top = solve(chain, memory_budget=2**40, strategy="store-all").peak_bytes
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy="rotor")
    least, is_beaten = refused.value.minimum_bytes, False
    for budget in (least, least + (top - least) // 20, least + (top - least) // 5):
        rotor, alone = solve(chain, memory_budget=budget, strategy="rotor"), each_alone(chain, budget, None)
        is_beaten |= min(alone.values()) < rotor.seconds
        assert rotor.lower_bound_seconds is None or rotor.lower_bound_seconds <= min(alone.values())
        assert solve(chain, memory_budget=budget).seconds <= min(alone.values())
    assert is_beaten


def test_the_solution_says_what_the_simulator_says() -> None:
    solution = solve(CHAIN, memory_budget="100B", strategy="rotor")
    trace = simulate(CHAIN, solution.schedule)
    assert (solution.seconds, solution.peak_bytes, solution.idle_seconds) == (trace.seconds, trace.peak_bytes, 0.0)
    assert dataclasses.astuple(solution.schedule.predicted) == (trace.seconds, trace.peak_bytes, 0.0)
    assert solution.memory_budget == 100
    assert solution.strategy == "rotor"
    assert str(solution) == "rotor for three, 3 stages: 11.00 s a step (1.222 x plain training), peak 80 B of 100 B"
    assert str(CHAIN) == "three, 3 stages, 9.00 s a plain step"
    assert solution.solve_seconds > 0
    assert solution.candidates == ()
    assert solve(CHAIN.to_dict(), memory_budget=100, strategy="rotor").schedule == solution.schedule


def test_what_is_printed_is_short() -> None:
    trace = solve(CHAIN, memory_budget=100, strategy="rotor").trace
    assert str(trace) == f"{len(trace.steps)} operations, 11.00 s a step, peak 80 B"
    assert str(frontier(CHAIN)) == "three, 3 stages: 4 schedules, from 70 B (12.00 s a step) to 140 B (9.00 s a step)"
    assert str(compare(CHAIN, memory_budgets=[50, 140])).splitlines() == [
        "three, 3 stages; store-all: 9.00 s a step, 140 B",
        "within 50 B: nothing fits",
        "within 140 B: store-all, 9.00 s a step",
    ]


def test_counts_may_be_whole_numbers_of_numpy() -> None:
    segments = solve(CHAIN, memory_budget=200, strategy="segments", segments=numpy.int64(2))
    assert segments.schedule == solve(CHAIN, memory_budget=200, strategy="segments", segments=2).schedule
    assert solve(CHAIN, memory_budget=100, strategy="rotor", slots=numpy.int32(50)).peak_bytes == 80


def test_a_solution_in_the_place_of_its_schedule_is_told() -> None:
    with pytest.raises(ScheduleError, match=r"give its \.schedule$"):
        simulate(CHAIN, solve(CHAIN, memory_budget=200))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"memory_budget": 100, "strategy": "rotr"}, StrategyError, "did you mean 'rotor'"),
        ({"memory_budget": 100, "strategy": "ROTOR"}, StrategyError, "did you mean 'rotor'"),
        ({"memory_budget": 100, "strategy": None}, StrategyError, "strategy is None, expected a name"),
        ({"memory_budget": 100, "strategy": ["rotor"]}, StrategyError, r"strategy is \['rotor'\], expected a name"),
        ({"memory_budget": 10**5000}, UnitError, "thousands of digits"),
        ({"memory_budget": 100, "slots": 0}, StrategyError, "slots is 0"),
        ({"memory_budget": 100, "slots": 2.5}, StrategyError, "slots is 2.5"),
        ({"memory_budget": 100, "slots": -(10**5000)}, StrategyError, "slots is .*thousands of digits"),
        ({"memory_budget": 100, "segments": True, "strategy": "segments"}, StrategyError, "segments is True"),
        ({"memory_budget": 100, "segments": 2, "strategy": "chen"}, StrategyError, "no setting 'segments'"),
        ({"memory_budget": 1.5e9}, UnitError, "1500000000.0"),
        ({"memory_budget": "8 gibibytes"}, UnitError, "8 gibibytes"),
        ({"memory_budget": 100, "bandwidth": "fast"}, UnitError, "fast"),
        ({"memory_budget": 10, "strategy": "rotor"}, InfeasibleBudgetError, "70 bytes"),
        ({"memory_budget": 10}, InfeasibleBudgetError, "70 bytes"),
    ],
)
def test_what_cannot_be_solved_is_refused_in_one_line(settings: dict, error: type[LowtideError], says: str) -> None:
    with pytest.raises(error, match=says) as refused:
        solve(CHAIN, **settings)
    assert "\n" not in str(refused.value)


def test_an_answer_above_the_budget_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(self: store_all.StoreAll, problem: Problem) -> Answer:
        return Answer(Schedule("store-all", solve(CHAIN, memory_budget="1MB", strategy="rotor").schedule.operations))

    monkeypatch.setattr(store_all.StoreAll, "plan", too_large)
    with pytest.raises(AssertionError, match="this is a bug in lowtide"):
        solve(CHAIN, memory_budget=100, strategy="store-all")


def test_rising_budgets_never_slow_a_long_chain_down() -> None:
    chain = long_chain(60)
    plain = solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes
    seconds = [solve(chain, memory_budget=plain * part // 16).seconds for part in range(4, 18)]
    assert seconds == sorted(seconds, reverse=True)
