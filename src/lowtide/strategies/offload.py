"""`offload`: each computation once, and the best choice of activations to move."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.continuous.conversion import fastest, offloaded_plans, once_each
from lowtide.strategies.continuous.search import DEFAULT_NUM_SLOTS


@dataclass(frozen=True, slots=True)
class OffloadOnly:
    """Every stage saves everything; what does not fit is offloaded.

    What to move is optimal in the continuous model of pofo with forward `all` alone; on short chains every choice is
    tried. Reference: Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading for
    training DNNs", 2021, §5.2.

    Args:
        slots: how finely amounts of memory are told apart on long chains.

    Example:
        >>> from lowtide import Chain, Stage, solve
        >>> chain = Chain("four", [Stage(str(k), 1.0, 1.0, output_bytes=8, saved_bytes=8) for k in range(4)])
        >>> solve(chain, memory_budget=40, strategy="offload", bandwidth=8).seconds
        8.0
    """

    slots: int = DEFAULT_NUM_SLOTS

    def plan(self, problem: Problem) -> Answer:
        """The fastest of the converted plans, by simulation.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        minimum = self.minimum_bytes(problem)
        if problem.memory_budget < minimum:
            raise problem.infeasible("offload", minimum)
        profile = once_each(problem.chain)
        if problem.memory_budget >= profile.need_bytes(()):
            everything = profile.place(None, problem.memory_budget, problem.bandwidth, duplex=problem.duplex)
            return Answer(fastest("offload", [everything]), model_seconds=profile.compute_seconds)
        placements, seconds = offloaded_plans(problem, self.slots)
        return Answer(fastest("offload", placements), model_seconds=seconds)

    def minimum_bytes(self, problem: Problem) -> int:
        """The largest single computation with its own values; without a link, what plain training needs."""
        return once_each(problem.chain).need_bytes(None if problem.bandwidth else ())
