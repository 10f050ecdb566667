"""Solving for the executor: a stage is run again where that is worth it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chains import random_chains

import lowtide
from lowtide import Chain, Stage
from lowtide.chain import Variant
from lowtide.runtime.execute.checks import Checks
from lowtide.runtime.fitting import solving
from lowtide.runtime.fitting.solving import (
    Settings,
    leanest_of,
    leanest_solution,
    solution_for,
    solved_for_executor,
    with_reruns_counted,
)
from lowtide.simulate import simulate
from lowtide.trace import Trace

EXTRA = 50e-6  # as the module has it
LINK = 55 * 10**9
CHAINS = Path(__file__).parents[3] / "examples" / "chains" / "h200"


def asked(budget: int, strategy: str = "rotor") -> Settings:
    return Settings(
        budget, strategy, bandwidth=0, host_memory_budget=None, optimizer=None, loss=None, stages=None,
        grads_resident=False, keeps_result=True, slots=None, checks=Checks.NONE, progress=None,
    )  # fmt: skip


def a_rock_and_dust() -> Chain:
    """A stage that saves as much as many short ones together, and takes 1 % longer than they do; then these."""
    dust = [Stage(f"dust{k}", 20e-6, 40e-6, output_bytes=1, saved_bytes=11) for k in range(20)]
    rock = Stage("rock", 20 * 20.2e-6, 1e-3, output_bytes=1, saved_bytes=211)
    return Chain("dusty", [rock, *dust, Stage("loss", 20e-6, 20e-6, output_bytes=1, saved_bytes=1)], input_bytes=1)


def test_the_least_budget_is_asked_for_until_it_works_and_not_without_end() -> None:
    leasts = {1: 5, 5: 9}

    def solved(memory_budget: int) -> int:
        if memory_budget in leasts:
            raise lowtide.InfeasibleBudgetError("more", minimum_bytes=leasts[memory_budget])
        return memory_budget

    assert leanest_of(solved) == 9  # type: ignore[arg-type, comparison-overlap]
    leasts[9] = 9  # a solver that names what does not work for it
    with pytest.raises(lowtide.InfeasibleBudgetError, match="more"):
        leanest_of(solved)  # type: ignore[arg-type]


def test_one_stage_is_run_again_rather_than_many_that_gain_next_to_nothing() -> None:
    chain = a_rock_and_dust()
    budget = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all").peak_bytes - 190
    optimal, chosen = lowtide.solve(chain, memory_budget=budget, strategy="rotor"), solution_for(chain, asked(budget))
    assert optimal.trace.num_recomputed >= 15
    assert chosen.trace.num_recomputed <= 2
    assert optimal.seconds <= chosen.seconds <= 1.02 * optimal.seconds
    assert chosen.peak_bytes <= budget


def test_what_is_said_of_the_schedule_is_said_of_the_chain_itself() -> None:
    chain = a_rock_and_dust()
    chosen = solution_for(chain, asked(500, "auto"))
    assert chosen.chain == chain
    trace = simulate(chain, chosen.schedule)
    assert (chosen.seconds, chosen.peak_bytes) == (trace.seconds, trace.peak_bytes)
    assert chosen.schedule.predicted is not None
    assert chosen.schedule.predicted.seconds == trace.seconds
    assert (chosen.candidates, chosen.lower_bound_seconds, chosen.model_seconds) == ((), None, None)


def test_every_forward_counts_alike() -> None:
    ways = (Variant("lean", 2e-3, 3e-3, saved_bytes=5),)
    stage = Stage("a", 1e-3, 2e-3, output_bytes=4, saved_bytes=9, rerun_seconds=0.5e-3, variants=ways)
    counted = with_reruns_counted(Chain("one", [stage], input_bytes=3)).stages[0]
    assert counted.forward_seconds == pytest.approx(1e-3 + EXTRA)
    assert counted.rerun_seconds == pytest.approx(0.5e-3 + EXTRA)
    assert counted.variants[0].forward_seconds == pytest.approx(2e-3 + EXTRA)
    rest = dataclasses.replace(counted, forward_seconds=1e-3, rerun_seconds=0.5e-3, variants=ways)
    assert rest == stage


@pytest.mark.parametrize(("bandwidth", "num_solved"), [(10**9, 1), (10**4, 2)], ids=["no wait", "waits"])
def test_nothing_is_solved_twice_where_no_computation_waits(
    monkeypatch: pytest.MonkeyPatch, bandwidth: int, num_solved: int
) -> None:
    chain = Chain("even", [Stage(str(k), 1e-3, 2e-3, output_bytes=10, saved_bytes=100) for k in range(6)])
    solved = list[Chain]()
    solve = solving.solve
    monkeypatch.setattr(solving, "solve", lambda each, **options: solved.append(each) or solve(each, **options))
    chosen = solved_for_executor(chain, memory_budget=400, bandwidth=bandwidth, strategy="offload")
    assert chosen.trace.moved_bytes
    assert (len(solved), chosen.idle_seconds > 0) == (num_solved, num_solved == 2)


def in_the_middle(chain: Chain) -> int:
    """A budget halfway between the least for recomputation and plain training's peak."""
    most = lowtide.solve(chain, memory_budget="1000TiB", strategy="store-all").peak_bytes
    return (least_for_recomputing(chain) + most) // 2


def least_for_recomputing(chain: Chain) -> int:
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        lowtide.solve(chain, memory_budget=0, strategy="rotor")
    return refused.value.minimum_bytes


@pytest.mark.parametrize("strategy", ["pofo", "auto"])
def test_copies_are_planned_for_the_times_that_were_measured_where_that_is_better(strategy: str) -> None:
    chain = Chain.from_dict(json.loads((CHAINS / "inception_v3-b16-500.json").read_text()))
    budget = in_the_middle(chain)
    given = {"memory_budget": budget, "strategy": strategy, "bandwidth": LINK}
    counted = lowtide.solve(with_reruns_counted(chain), manage_weights=False, **given).on(chain)
    as_measured = lowtide.solve(chain, manage_weights=False, **given)
    assert counted.idle_seconds > as_measured.idle_seconds + 1e-4  # copies that longer forwards would have hidden
    best = solution_for(chain, dataclasses.replace(asked(budget, strategy), bandwidth=LINK))
    assert best.seconds == as_measured.seconds < counted.seconds
    assert best.chain == chain


def test_a_schedule_for_one_way_of_counting_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = a_rock_and_dust()
    least = least_for_recomputing(chain)

    def solve(given: Chain, **settings: Any) -> lowtide.Solution:
        if given != chain:
            raise lowtide.InfeasibleBudgetError("too little", minimum_bytes=2 * least)
        return lowtide.solve(given, **settings)

    monkeypatch.setattr(solving, "solve", solve)
    given = {"strategy": "rotor", "bandwidth": LINK}
    assert solved_for_executor(chain, memory_budget=least, **given).peak_bytes <= least
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        solved_for_executor(chain, memory_budget=least - 1, **given)
    assert refused.value.minimum_bytes == least  # the lesser of the two


def test_a_schedule_that_stays_within_the_budget_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = a_rock_and_dust()
    most = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all").peak_bytes

    def solve(given: Chain, *, memory_budget: int, **settings: Any) -> lowtide.Solution:
        bold = given != chain  # as where copies end later than forwards that were counted longer let expect
        return lowtide.solve(given, memory_budget=most if bold else memory_budget, **settings)

    monkeypatch.setattr(solving, "solve", solve)
    monkeypatch.setattr(Trace, "moved_bytes", 1)
    assert (
        solved_for_executor(chain, memory_budget=most - 190, strategy="rotor", bandwidth=LINK).peak_bytes <= most - 190
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9), st.integers(0, 30)), min_size=2, max_size=7),
    st.floats(0.0, 1.0),
)
def test_no_schedule_is_better_by_more_than_its_repeats_count(sizes: list[tuple[int, int, int]], share: float) -> None:
    stages = [
        Stage(f"s{k}", t * 1e-6, 2e-6 * t, output_bytes=o, saved_bytes=o + s) for k, (t, o, s) in enumerate(sizes)
    ]
    chain = Chain("any", stages, input_bytes=2)
    most = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all").peak_bytes
    try:
        lowtide.solve(chain, memory_budget=1, strategy="rotor")
        least = 1
    except lowtide.InfeasibleBudgetError as error:
        least = error.minimum_bytes
    budget = int(least + share * (most - least))
    optimal, chosen = lowtide.solve(chain, memory_budget=budget, strategy="rotor"), solution_for(chain, asked(budget))
    fewer = optimal.trace.num_recomputed - chosen.trace.num_recomputed
    assert chosen.peak_bytes <= budget
    assert chosen.seconds <= optimal.seconds + fewer * EXTRA + 1e-12


@pytest.mark.parametrize("bandwidth", [0, 10], ids=["recomputed", "offloaded"])
def test_the_leanest_schedule_is_the_same_on_a_slower_machine(bandwidth: int) -> None:
    for chain in random_chains(40, 7):
        if not lowtide.solve(chain, memory_budget=2**40, strategy="store-all").peak_bytes:
            continue
        wanted = dataclasses.replace(asked(0, "auto"), bandwidth=bandwidth)
        found = []
        for times in (1e-5, 4e-5, 1e-3, 1.0):
            slower = chain.with_times(times.__mul__, times.__mul__)
            with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
                solution_for(slower, wanted)
            found.append(leanest_solution(slower, wanted))
            assert found[-1].peak_bytes <= caught.value.minimum_bytes
            assert found[-1].seconds == found[-1].on(slower).seconds
        assert len({solution.schedule.operations for solution in found}) == 1
