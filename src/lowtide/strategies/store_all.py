"""`store-all`: every stage saves everything, as plain training does."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward, Schedule
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.sides import freed


@dataclass(frozen=True, slots=True)
class StoreAll:
    """Run each forward once and save everything, then each backward: the fastest, with the most memory."""

    def plan(self, problem: Problem) -> Answer:
        """The only schedule of this strategy, if it fits."""
        minimum = self.minimum_bytes(problem)
        if problem.memory_budget < minimum:
            raise problem.infeasible("store-all", minimum)
        return Answer(_schedule(problem.chain))

    def minimum_bytes(self, problem: Problem) -> int:
        """Its peak."""
        return problem.evaluate(_schedule(problem.chain)).peak_bytes


def _schedule(chain: Chain) -> Schedule:
    stages = range(1, chain.num_stages + 1)
    forwards, backwards = (Forward(k, "all") for k in stages), (Backward(k) for k in reversed(stages))
    return Schedule("store-all", freed(chain, (*forwards, *backwards)))
