"""From a set of checkpoints to a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward, Operation, Schedule
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.sides import freed


def checkpoint_schedule(strategy: str, chain: Chain, checkpoints: Sequence[int]) -> Schedule:
    """The schedule that keeps the outputs `checkpoints` (0 and n included) and recomputes each segment once.

    Segments run forward one after the other, the last with all that it saves; then, from the last to the first, each is
    recomputed with everything it saves, then run backward. A segment of one stage that saves only its output is saved
    the first time: that takes no more memory than its checkpoint.
    """
    segments = [range(h + 1, i + 1) for h, i in pairwise(checkpoints)]
    operations: list[Operation] = []
    for segment in segments:
        once = segment is segments[-1] or _saves_output_only(chain, segment)
        operations += _saved(segment) if once else _passed(segment)
    for segment in reversed(segments):
        if not (segment is segments[-1] or _saves_output_only(chain, segment)):
            operations += _saved(segment)
        operations += (Backward(k) for k in reversed(segment))
    return Schedule(strategy, freed(chain, operations))


def planned(strategy: str, problem: Problem, checkpoints: Sequence[int]) -> Answer:
    """The answer with these checkpoints.

    Raises:
        InfeasibleBudgetError: if the schedule's peak is above the budget.
    """
    schedule = checkpoint_schedule(strategy, problem.chain, checkpoints)
    peak = problem.evaluate(schedule).peak_bytes
    if peak > problem.memory_budget:
        raise problem.infeasible(strategy, peak)
    return Answer(schedule, details={"num_checkpoints": len(checkpoints)})


def _saves_output_only(chain: Chain, segment: range) -> bool:
    stage = chain.stages[segment[0] - 1]
    return len(segment) == 1 and stage.saved_bytes == stage.output_bytes


def _saved(segment: range) -> Iterator[Operation]:
    return (Forward(k, "all") for k in segment)


def _passed(segment: range) -> Iterator[Operation]:
    """Keep the segment's input and output; drop what lies between."""
    return (Forward(k, "keep" if k == segment[0] else "drop") for k in segment)
