"""`segments` against torch's own cutting, and against trying every K."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.chains import NESTED_FEATURES, random_chains
from tests.looping import looped

from lowtide import Chain, InfeasibleBudgetError, Schedule, SideValue, Stage, StrategyError, simulate, solve
from lowtide.strategies.base import NotFasterError, Problem
from lowtide.strategies.segments import Segments


def equal_chain(num_stages: int) -> Chain:
    return Chain("equal", tuple(Stage(str(k), 1, 2, 1, 4) for k in range(1, num_stages + 1)), input_bytes=1)


def test_three_segments_of_eight_stages_as_checkpoint_sequential_cuts_them() -> None:
    solution = solve(equal_chain(8), memory_budget=2**20, strategy="segments", segments=3)
    listed = [operation.to_list() for operation in solution.schedule.operations]
    assert listed == [
        ["forward", 1, "keep"],
        ["forward", 2, "drop"],
        ["forward", 3, "keep"],
        ["forward", 4, "drop"],
        *(["forward", k, "all"] for k in (5, 6, 7, 8)),
        *(["backward", k] for k in (8, 7, 6, 5)),
        *(["forward", k, "all"] for k in (3, 4)),
        *(["backward", k] for k in (4, 3)),
        *(["forward", k, "all"] for k in (1, 2)),
        *(["backward", k] for k in (2, 1)),
    ]
    assert solution.seconds == 8 * 3 + 4


def test_the_cuts_are_those_of_torch() -> None:
    """`checkpoint_sequential` loops over range(0, size * (K - 1), size) and runs the rest by itself."""
    for num_stages in range(1, 13):
        for count in range(1, num_stages + 1):
            solution = solve(equal_chain(num_stages), memory_budget=2**20, strategy="segments", segments=count)
            size = num_stages // count
            starts = [start + 1 for start in range(0, size * (count - 1), size)]
            kept = [operation.stage for operation in solution.schedule.operations if is_keep(operation)]
            assert kept == starts


def test_what_is_not_fast_enough_is_not_looked_for() -> None:
    chain = equal_chain(9)
    simulated = list[Schedule]()
    problem = Problem(chain, 30, 0, True, lambda schedule: simulated.append(schedule) or simulate(chain, schedule))
    found = simulate(chain, Segments().plan(problem).schedule)
    assert Segments().plan(replace(problem, faster_than=found.seconds)).schedule == Segments().plan(problem).schedule
    side = replace(problem, chain=replace(chain, side_values=[SideValue("skip", 1, 1, (9,))]))
    simulated.clear()
    with pytest.raises(NotFasterError):
        Segments().plan(replace(side, faster_than=chain.compute_seconds - 0.5))
    assert not simulated


def is_keep(operation: object) -> bool:
    return getattr(operation, "save", None) == "keep"


@looped("chain", random_chains(18, 7, features=NESTED_FEATURES))
def test_the_default_is_the_fastest_number_that_fits(chain: Chain) -> None:
    every = [solve(chain, memory_budget=2**40, strategy="segments", segments=k) for k in range(1, 8)]
    for budget in {solution.peak_bytes - less for solution in every for less in (0, 1)}:
        fitting = [solution for solution in every if solution.peak_bytes <= budget]
        if fitting:
            solution = solve(chain, memory_budget=budget, strategy="segments")
            assert solution.seconds == min(other.seconds for other in fitting)
            assert solution.peak_bytes <= budget
        else:
            with pytest.raises(InfeasibleBudgetError) as refused:
                solve(chain, memory_budget=budget, strategy="segments")
            assert refused.value.minimum_bytes == min(other.peak_bytes for other in every)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_number_of_segments_has_a_minimum_of_its_own(count: int) -> None:
    chain = equal_chain(7)
    peak = solve(chain, memory_budget=2**20, strategy="segments", segments=count).peak_bytes
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=peak - 1, strategy="segments", segments=count)
    assert refused.value.minimum_bytes == peak


def test_more_segments_than_stages_are_refused() -> None:
    with pytest.raises(StrategyError, match="segments is 9, but the chain has 8 stages"):
        solve(equal_chain(8), memory_budget=2**20, strategy="segments", segments=9)
    with pytest.raises(StrategyError, match="segments"):
        solve(equal_chain(8), memory_budget=2**20, strategy="rotor", segments=2)


def test_one_segment_is_plain_training() -> None:
    chain = equal_chain(5)
    one = solve(chain, memory_budget=2**20, strategy="segments", segments=1)
    plain = solve(chain, memory_budget=2**20, strategy="store-all")
    assert one.schedule.operations == plain.schedule.operations
    assert simulate(chain, Schedule("", one.schedule.operations)).peak_bytes == plain.peak_bytes
