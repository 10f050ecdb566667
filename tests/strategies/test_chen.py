"""`chen`: what the greedy search cuts, and what it promises."""

from __future__ import annotations

import math

import pytest
from tests.chains import NESTED_FEATURES, random_chains

from lowtide import Chain, InfeasibleBudgetError, Stage, solve
from lowtide.strategies.chen import _greedy


def equal_chain(num_stages: int, saved: int = 10) -> Chain:
    return Chain("equal", tuple(Stage(str(k), 1, 2, 1, saved) for k in range(num_stages)), input_bytes=1)


def test_a_segment_ends_with_the_stage_that_exceeds_its_budget() -> None:
    assert _greedy([3, 3, 3, 3, 3, 3, 3], 5) == (1, 3, 5, 7)
    assert _greedy([3, 3, 3, 3, 3, 3, 3], 6) == (1, 4, 7)
    assert _greedy([9, 1, 1, 1, 9, 1], 5) == (1, 2, 6)
    assert _greedy([1, 1, 1], 0) == (1, 2, 3)
    assert _greedy([1, 1, 1], 3) == (1,)


@pytest.mark.parametrize("num_stages", [16, 49, 100])
def test_equal_stages_come_to_the_square_root_of_memory(num_stages: int) -> None:
    chain = equal_chain(num_stages, saved=1)
    root = math.isqrt(num_stages)
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy="chen")
    least = refused.value.minimum_bytes
    assert least <= 2 * root + 4  # as many inputs as segments, the stages of one, gradients and the input of the chain
    assert abs(solve(chain, memory_budget=least, strategy="chen").details["num_segments"] - root) <= root / 2


def test_ample_memory_is_plain_training() -> None:
    for chain in random_chains(12, 6, features=NESTED_FEATURES):
        assert solve(chain, memory_budget=2**40, strategy="chen").seconds == pytest.approx(chain.compute_seconds)


def test_it_is_never_faster_than_rotor() -> None:
    for chain in random_chains(24, 7, features=NESTED_FEATURES):
        peak = solve(chain, memory_budget=2**40, strategy="chen").peak_bytes
        for budget in range(peak, 0, -max(1, peak // 10)):
            try:
                seconds = solve(chain, memory_budget=budget, strategy="chen").seconds
            except InfeasibleBudgetError:
                break
            assert solve(chain, memory_budget=budget, strategy="rotor").seconds <= seconds
