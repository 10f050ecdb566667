"""`selection`: the checkpoints that minimise their sum plus the largest segment."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.checkpoints.schedule import checkpoint_schedule, planned
from lowtide.strategies.checkpoints.sets import select_static


@dataclass(frozen=True, slots=True)
class SelectionStrategy:
    """One set of checkpoints for every budget: the one that minimises Hong's equation 6.

    A checkpoint takes a[k], a stage of a recomputed segment abar[k]. The equation counts every checkpoint throughout,
    and neither gradients nor extras; what the schedule really takes, the simulator says. The aim is memory, not time:
    where the budget allows more, the schedule stays the same.

    Hong, Tsai, Wang, Liu, Wu: GPU memory usage optimization for backward propagation in deep network training, §3,
    algorithm 3.

    Example:
        >>> from lowtide import Chain, Stage, solve
        >>> chain = Chain("four", [Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2, 3, 4)])
        >>> solve(chain, memory_budget=200, strategy="selection").peak_bytes
        90
    """

    def plan(self, problem: Problem) -> Answer:
        """The only schedule of this strategy, if it fits."""
        return planned("selection", problem, _checkpoints(problem.chain))

    def minimum_bytes(self, problem: Problem) -> int:
        """Its peak."""
        schedule = checkpoint_schedule("selection", problem.chain, _checkpoints(problem.chain))
        return problem.evaluate(schedule).peak_bytes


def _checkpoints(chain: Chain) -> list[int]:
    kept = [chain.activation_bytes(k) for k in range(chain.num_stages + 1)]
    _, checkpoints = select_static(kept, [0, *(stage.saved_bytes for stage in chain.stages)])
    return checkpoints
