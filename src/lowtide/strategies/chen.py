"""`chen`: the greedy search over segment budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.checkpoints.segmented import Starts, fastest_that_fits, least_peak_bytes

# How many budgets are tried for each doubling.
_STEPS_PER_DOUBLING = 8


@dataclass(frozen=True, slots=True)
class Chen:
    """Segments of about equal memory: stages are gathered until what they save exceeds a segment budget.

    The search starts from the geometric mean of the largest stage and of all stages together, which is best where all
    are alike (a square root of n segments), and tries budgets above and below in even ratios, from the largest stage
    alone up to the whole chain. Reference: Chen et al., "Training deep nets with sublinear memory cost", 2016,
    algorithm 3 and its search; Hong et al., "GPU memory usage optimization for backward propagation in deep network
    training", §2.2.
    """

    def plan(self, problem: Problem) -> Answer:
        """The fastest of the search's candidates within the budget.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        return fastest_that_fits(problem, "chen", _cuts(problem.chain))

    def minimum_bytes(self, problem: Problem) -> int:
        """The lowest peak among the search's candidates."""
        return least_peak_bytes(problem, _cuts(problem.chain))


def _cuts(chain: Chain) -> Iterator[Starts]:
    saved = [stage.saved_bytes for stage in chain.stages]
    largest, total = max(saved), sum(saved)
    middle = math.sqrt(largest * total)
    yield _greedy(saved, total)
    if largest:
        furthest = math.ceil(_STEPS_PER_DOUBLING * math.log2(total / middle))
        for step in range(-furthest, furthest + 1):
            yield _greedy(saved, middle * 2 ** (step / _STEPS_PER_DOUBLING))


def _greedy(saved: list[int], segment_budget: float) -> Starts:
    """Cut after each stage at which a segment exceeds its budget."""
    starts, gathered = [1], 0
    for k, num_bytes in enumerate(saved[:-1], start=1):
        gathered += num_bytes
        if gathered > segment_budget:
            starts.append(k + 1)
            gathered = 0
    return tuple(starts)
