from __future__ import annotations

import random

import numpy as np
import pytest
from tests.chains import long_chain, random_chain, random_chains, with_random_seconds

from lowtide import Backward, Chain, Forward, InfeasibleBudgetError, Schedule, simulate, solve
from lowtide.strategies.base import Problem
from lowtide.strategies.copies.gaps import Profile
from lowtide.strategies.copies.improve import descend, improve


def problem_of(chain: Chain, budget: int, bandwidth: int, *, duplex: bool = True) -> Problem:
    return Problem(chain, budget, bandwidth, duplex, lambda s: simulate(chain, s, bandwidth=bandwidth, duplex=duplex))


def computations(schedule: Schedule) -> list[Forward | Backward]:
    return [operation for operation in schedule.operations if isinstance(operation, Forward | Backward)]


def store_all(chain: Chain) -> Profile:
    stages = range(1, chain.num_stages + 1)
    return Profile(chain, [*(Forward(k, "all") for k in stages), *(Backward(k) for k in reversed(stages))])


@pytest.mark.parametrize("duplex", [True, False])
def test_it_is_faster_within_the_budget_and_computes_the_same(duplex: bool) -> None:
    rng = random.Random(2)
    num_better = 0
    for seed in range(25):
        chain = with_random_seconds(random_chain(seed, 9), seed)
        profile = store_all(chain)
        budget = (profile.need_bytes() + profile.need_bytes(())) // 2
        bandwidth = rng.choice((4, 15))
        problem = problem_of(chain, budget, bandwidth, duplex=duplex)
        placement = profile.place(None, budget, bandwidth, duplex=duplex)
        assert placement is not None
        schedule = Schedule("offload", placement.operations)
        better = improve(problem, schedule)
        if better is not None:
            num_better += 1
            trace = simulate(chain, better, bandwidth=bandwidth, duplex=duplex)
            assert trace.seconds < simulate(chain, schedule, bandwidth=bandwidth, duplex=duplex).seconds
            assert trace.peak_bytes <= budget
            assert computations(better) == computations(schedule)
            assert improve(problem, schedule) == better
    assert num_better > 5


def test_where_compute_never_waits_there_is_nothing_to_gain() -> None:
    chain = random_chain(1, 6)
    profile = store_all(chain)
    problem = problem_of(chain, profile.need_bytes(()), 5)
    assert improve(problem, Schedule("store-all", profile.order)) is None


def test_auto_is_never_slower_than_any_strategy() -> None:
    rng = random.Random(9)
    for chain in (*random_chains(6, 5), with_random_seconds(random_chain(8, 11), 8), long_chain(12)):
        bandwidth = (10**6 if chain.input_bytes >= 10**6 else 1) * rng.choice((2, 25))
        high = solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes
        budget = int(rng.uniform(0.5, 0.9) * high)
        times = []
        for name in ("rotor", "offload", "opportunist", "autocapper", "pofo"):
            try:
                times.append(solve(chain, memory_budget=budget, strategy=name, bandwidth=bandwidth).seconds)
            except InfeasibleBudgetError:
                continue
        if times:
            best = solve(chain, memory_budget=budget, bandwidth=bandwidth, manage_weights=False)
            assert best.seconds <= min(times) * (1 + 1e-12)
            assert best.peak_bytes <= budget


def test_nothing_is_tried_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other choice of what moves takes less than the computations."""
    chain = with_random_seconds(random_chain(0, 9), 0)
    profile = store_all(chain)
    budget = (profile.need_bytes() + profile.need_bytes(())) // 2
    positions, calls = Profile.positions, []
    monkeypatch.setattr(Profile, "positions", lambda *args: calls.append(args) or positions(*args))
    found = descend(problem_of(chain, budget, 10**9), profile, np.ones(len(profile.gaps), np.bool_), 10**6)
    assert found is not None
    assert found[1] == pytest.approx(profile.compute_seconds)
    assert len(calls) == 2
