import pytest
from tests.strategies.weight_brute_force import TinyProblem, fastest_period
from tests.strategies.weight_chains import random_weight_chain, tiny_problem

from lowtide import Chain, simulate
from lowtide.strategies.weights.periods import period_of
from lowtide.strategies.weights.relaxation import relaxation_of


def _bounds(problem: TinyProblem) -> dict[tuple[bool, bool, int | None], float]:
    found = {}
    for whole_values in (False, True):
        for num_points in (None, 3):
            relaxation = relaxation_of(
                period_of(problem.chain),
                memory_budget=problem.memory_budget,
                bandwidth=problem.bandwidth,
                duplex=problem.duplex,
                whole_values=whole_values,
                num_points=num_points,
            )
            for relaxed in (False, True):
                outcome = relaxation.program.minimize(relaxation.idle, relaxed=relaxed)
                found[(whole_values, relaxed, num_points)] = relaxation.seconds(outcome.proven)
    return found


def _check(problem: TinyProblem) -> bool:
    best, schedule = fastest_period(problem)
    assert schedule is not None
    trace = simulate(problem.chain, schedule, bandwidth=problem.bandwidth, duplex=problem.duplex)
    assert trace.seconds == pytest.approx(best)
    assert trace.peak_bytes <= problem.memory_budget
    bounds = _bounds(problem)
    for how, bound in bounds.items():
        assert bound <= trace.seconds, how
    exact = bounds[(True, False, None)]
    assert exact >= max(bounds.values()) * (1 - 1e-5)
    return exact > problem.chain.compute_seconds * (1 + 1e-5)


def test_no_list_of_two_stages_is_below_the_bound() -> None:
    telling = [_check(tiny_problem(seed, 2, optimizer=False)) for seed in range(20)]
    assert sum(telling) > 6  # and it is not only the time of the computations


def test_no_list_with_optimizer_state_is_below_the_bound() -> None:
    assert sum(_check(tiny_problem(seed, 2, optimizer=True)) for seed in (0, 1, 2, 20, 30)) > 2


def test_no_list_of_three_stages_is_below_the_bound() -> None:
    assert sum(_check(tiny_problem(seed, 3, optimizer=False)) for seed in (10, 30, 40, 50)) > 2


def test_a_chain_that_fits_waits_for_nothing() -> None:
    chain: Chain = random_weight_chain(4, num_stages=5)
    period = period_of(chain)
    relaxation = relaxation_of(period, memory_budget=period.most_bytes, bandwidth=1)
    assert relaxation.program.minimize(relaxation.idle).proven == 0.0
