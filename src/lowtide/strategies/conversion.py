"""From a schedule of the continuous model to one that moves each value at once.

The continuous model frees and fetches memory bit by bit; a list of operations releases and fetches whole values. The
order of computations and the choice of values stay, `transfers` places the copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.schedule import Backward, Schedule
from lowtide.strategies.base import Problem
from lowtide.strategies.pofo_readoff import ContinuousPlan
from lowtide.strategies.transfers import Placement, Profile


def converted(problem: Problem, plan: ContinuousPlan) -> Placement | None:
    """The plan with its copies placed within the budget of the problem."""
    profile = Profile(problem.chain, plan.order)
    loss = plan.order.index(Backward(problem.chain.num_stages))
    moved = [index for index, gap in enumerate(profile.gaps) if gap.value in plan.moved and gap.begin < loss < gap.end]
    return profile.place(moved, problem.memory_budget, problem.bandwidth, duplex=problem.duplex)


def fastest(problem: Problem, strategy: str, placements: Iterable[Placement | None]) -> Schedule | None:
    """The schedule that the simulator finds fastest, the first of equals; None where there is none."""
    best: tuple[float, Schedule] | None = None
    for placement in placements:
        if placement is not None:
            schedule = Schedule(strategy, placement.operations)
            seconds = problem.evaluate(schedule).seconds
            if best is None or seconds < best[0]:
                best = (seconds, schedule)
    return None if best is None else best[1]
