"""From schedules of the continuous model to ones that move each value at once.

The continuous model frees and fetches memory bit by bit; a list of operations releases and fetches whole values. The
order of computations and the choice of values stay, `transfers` places the copies. What that costs depends on how much
room there is for values in flight, which the model does not know of; so, where it costs something, plans made for a
little less memory are converted too, and the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.schedule import Backward, Schedule
from lowtide.strategies.base import Problem
from lowtide.strategies.pofo_readoff import ContinuousPlan
from lowtide.strategies.pofo_search import ContinuousModel
from lowtide.strategies.transfers import Placement, Profile

# The model's best plans are close to each other, and conversion does not cost each the same.
_NUM_PLANS = 8
# The shares of the memory above the minimum for which plans are made; the rest is held back for values in flight.
_SHARES = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8)
# Conversion that costs less than this share of the time is not worth another search.
_CHEAP = 1e-3
# These further searches use a fourth of the slots.
_COARSER = 4


def converted_plans(problem: Problem, model: ContinuousModel, slots: int) -> tuple[list[Placement], float]:
    """Schedules within the budget, and the time of the best plan in the continuous model.

    Args:
        problem: with a budget of at least `model.minimum_bytes`.
        model: of the problem's chain and bandwidth.
        slots: how finely the search tells amounts of memory apart.
    """
    plans = model.plans(problem.memory_budget, slots, _NUM_PLANS)
    found = _placed(problem, plans)
    best = min(placement.seconds for placement in found)
    minimum = model.minimum_bytes
    for share in _SHARES:
        if best <= plans[0].seconds * (1 + _CHEAP):
            break
        budget = minimum + int(share * (problem.memory_budget - minimum))
        found += _placed(problem, model.plans(budget, max(1, slots // _COARSER), _NUM_PLANS))
        best = min(placement.seconds for placement in found)
    return found, plans[0].seconds


def _placed(problem: Problem, plans: Iterable[ContinuousPlan]) -> list[Placement]:
    placements = [converted(problem, plan) for plan in plans]
    return [placement for placement in placements if placement is not None]


def converted(problem: Problem, plan: ContinuousPlan) -> Placement | None:
    """One plan with its copies placed within the budget of the problem."""
    profile = Profile(problem.chain, plan.order)
    loss = plan.order.index(Backward(problem.chain.num_stages))
    moved = [index for index, gap in enumerate(profile.gaps) if gap.value in plan.moved and gap.begin < loss < gap.end]
    return profile.place(moved, problem.memory_budget, problem.bandwidth, duplex=problem.duplex)


def fastest(strategy: str, placements: Iterable[Placement | None]) -> Schedule:
    """The schedule of the fastest placement, the first of equals; there is at least one."""
    found = [placement for placement in placements if placement is not None]
    return Schedule(strategy, min(found, key=lambda placement: placement.seconds).operations)
