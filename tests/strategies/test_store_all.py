"""`store-all`: plain training."""

from __future__ import annotations

import pytest
from tests.chains import random_chains

from lowtide import Backward, Forward, InfeasibleBudgetError, solve


def test_every_forward_then_every_backward() -> None:
    for chain in random_chains(6, 4):
        solution = solve(chain, memory_budget=2**40, strategy="store-all")
        assert solution.schedule.operations == (
            *(Forward(k, "all") for k in (1, 2, 3, 4)),
            *(Backward(k) for k in (4, 3, 2, 1)),
        )
        assert solution.seconds == chain.compute_seconds


def test_its_peak_is_its_minimum() -> None:
    for chain in random_chains(12, 4):
        peak = solve(chain, memory_budget=2**40, strategy="store-all").peak_bytes
        if peak:
            with pytest.raises(InfeasibleBudgetError) as refused:
                solve(chain, memory_budget=peak - 1, strategy="store-all")
            assert refused.value.minimum_bytes == peak
