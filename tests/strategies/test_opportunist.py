from __future__ import annotations

import pytest
from tests.chains import NESTED_FEATURES, long_chain, random_chains

from lowtide import Chain, Forward, InfeasibleBudgetError, Offload, Stage, simulate, solve

# Saving takes 30 bytes and the link 10 bytes a second: with its input (10), a stage's copies take 4 of these forwards.
EVEN = Chain("even", tuple(Stage(str(k), 1.0, 2.0, 10, 30) for k in range(12)), input_bytes=10)


def minimum(chain: Chain, bandwidth: int) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy="opportunist", bandwidth=bandwidth)
    return refused.value.minimum_bytes


def test_it_moves_a_stage_whenever_the_link_is_free() -> None:
    budget = minimum(EVEN, 10)
    operations = solve(EVEN, memory_budget=budget, strategy="opportunist", bandwidth=10).schedule.operations
    forwards = [operation for operation in operations if isinstance(operation, Forward)]
    first_run = {operation.stage: operation.save for operation in reversed(forwards)}
    assert [k for k in range(1, 12) if first_run[k] == "all"][:2] == [1, 4]
    assert [first_run[k] for k in (2, 3)] == ["keep", "drop"]
    assert {operation.value for operation in operations if isinstance(operation, Offload)} >= {("a", 0), ("abar", 1)}


def test_with_enough_memory_it_is_plain_training() -> None:
    high = solve(EVEN, memory_budget=2**60, strategy="store-all").peak_bytes
    solution = solve(EVEN, memory_budget=high, strategy="opportunist", bandwidth=10)
    assert solution.seconds == EVEN.compute_seconds
    assert not any(isinstance(operation, Offload) for operation in solution.schedule.operations)


def test_a_fast_link_leaves_nothing_to_recompute() -> None:
    solution = solve(EVEN, memory_budget=minimum(EVEN, 10**15), strategy="opportunist", bandwidth=10**15)
    assert solution.seconds == pytest.approx(EVEN.compute_seconds)
    assert solution.trace.num_recomputed == 0


def test_without_a_link_it_recomputes_as_rotor_does() -> None:
    for chain in (EVEN, long_chain(12)):
        least = solve_minimum(chain, "rotor")
        for budget in (least, 2 * least):
            ours, rotor = (solve(chain, memory_budget=budget, strategy=name) for name in ("opportunist", "rotor"))
            assert ours.seconds == rotor.seconds


def solve_minimum(chain: Chain, strategy: str) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy=strategy)
    return refused.value.minimum_bytes


@pytest.mark.parametrize("duplex", [True, False])
def test_every_budget_from_the_least_on_is_kept(duplex: bool) -> None:
    for chain in (*random_chains(12, 6, features=NESTED_FEATURES), long_chain(14)):
        scale = 10**6 if chain.input_bytes >= 10**6 else 1
        high = solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes
        for bandwidth in (scale, 20 * scale):
            least = minimum(chain, bandwidth) if high else 0
            for budget in {least, (least + high) // 2, max(least, high)}:
                solution = solve(
                    chain, memory_budget=budget, strategy="opportunist", bandwidth=bandwidth, duplex=duplex
                )
                trace = simulate(chain, solution.schedule, bandwidth=bandwidth, duplex=duplex)
                assert trace.peak_bytes <= budget
