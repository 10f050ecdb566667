"""From schedules of the continuous model to ones that move each value at once.

The continuous model frees and fetches memory bit by bit; a list of operations releases and fetches whole values. The
order of computations and the choice of values stay, `transfers` places the copies. What that costs depends on how much
room there is for values in flight, which the model does not know of; so, where it costs something, a local search
looks for a better choice of values, and where it still does, plans made for a little less memory are converted too. The
fastest is taken. Where every computation runs once and few values could move, every choice of them is tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward, Schedule
from lowtide.strategies.base import Problem
from lowtide.strategies.continuous.readoff import ContinuousPlan
from lowtide.strategies.continuous.search import ContinuousModel
from lowtide.strategies.copies.gaps import Placement, Profile
from lowtide.strategies.copies.improve import descend
from lowtide.strategies.numerics.arrays import from_above

# The model's best plans are close to each other, and conversion does not cost each the same.
_NUM_PLANS = 8
# Conversion that costs less than this share of the time is not worth further work.
_CHEAP = 1e-3
# A local search over which values move comes first: it works on so many of the plans,
_NUM_SEARCHED = 3
# and takes some 0.1 s for each with 100 stages, where it is seldom cut short.
_MOST_WORK = 600_000
# Where that leaves more than this share, plans for less memory are searched, which takes longer.
_DEAR = 3e-3
# The shares of the memory above the minimum for which they are made; the rest is held back for values in flight.
_SHARES = (0.97, 0.94, 0.9, 0.85, 0.8)
# What is held back for side values where they may move, as shares of all their bytes.
_SHARES_OF_SIDE_VALUES = (0.0, 0.25, 0.5, 0.75, 1.0)
# With so many gaps there are 1024 choices, which takes some 20 ms; each gap more doubles that.
_MOST_GAPS_TRIED_OUT = 10


def once_each(chain: Chain) -> Profile:
    """Every stage saves everything: each computation runs once."""
    stages = range(1, chain.num_stages + 1)
    order: list[Forward | Backward] = [Forward(k, "all") for k in stages]
    return Profile(chain, [*order, *(Backward(k) for k in reversed(stages))])


def offloaded_plans(problem: Problem, slots: int) -> tuple[list[Placement], float | None]:
    """Schedules in which each computation runs once, and the time of the best plan of that kind in the model.

    The model keeps side values on the device: where they have to move there is no such plan, and no time.

    Args:
        problem: with a bandwidth above 0, and a budget of at least what `once_each` needs with everything moved.
        slots: how finely the search tells amounts of memory apart.
    """
    profile = once_each(problem.chain)
    model = ContinuousModel.of(from_above(problem.chain), problem.bandwidth, recompute=False)
    found: list[Placement] = []
    seconds: float | None = None
    if problem.memory_budget >= model.minimum_bytes:
        found, seconds = converted_plans(problem, model, slots)
    everything = profile.place(None, problem.memory_budget, problem.bandwidth, duplex=problem.duplex)
    found += [everything] if everything is not None else []
    found += [] if seconds is not None else _searched(problem, profile, np.ones(len(profile.gaps), dtype=np.bool_))
    waits = min(placement.seconds for placement in found) > profile.compute_seconds
    tried = _best_of_all_choices(problem, profile) if waits else None
    return [*found, *([tried] if tried is not None else [])], seconds


def _best_of_all_choices(problem: Problem, profile: Profile) -> Placement | None:
    """The fastest choice of values to move; None where there are too many to try."""
    if len(profile.gaps) > _MOST_GAPS_TRIED_OUT:
        return None
    best, fastest_seconds = None, math.inf
    for choice in itertools.product((False, True), repeat=len(profile.gaps)):
        found = profile.positions(np.array(choice), problem.memory_budget, problem.bandwidth, problem.duplex)
        if found is not None and found[0] < fastest_seconds:
            best, fastest_seconds = choice, found[0]
    return None if best is None else _place(problem, profile, np.flatnonzero(best).tolist())


def converted_plans(problem: Problem, model: ContinuousModel, slots: int) -> tuple[list[Placement], float]:
    """Schedules within the budget, and the time of the best plan in the continuous model.

    Args:
        problem: with a budget of at least `model.minimum_bytes`.
        model: of the problem's chain and bandwidth.
        slots: how finely the search tells amounts of memory apart.
    """
    budget, minimum = problem.memory_budget, model.minimum_bytes
    plans = model.plans(budget, slots, _NUM_PLANS)
    goal = plans[0].seconds
    found = _placed(problem, plans, goal)
    for share in _SHARES:
        best = min((placement.seconds for placement in found), default=math.inf)
        if best <= goal * (1 + _DEAR):
            break
        less = minimum + int(share * (budget - minimum))
        found += _placed(problem, model.plans_within(less, slots, _NUM_PLANS, best), goal)
    return found, goal


def _placed(problem: Problem, plans: Sequence[ContinuousPlan], goal_seconds: float) -> list[Placement]:
    """The plans converted, and where that leaves the best of them above the goal, searched for better choices too."""
    placements = [placement for plan in plans if (placement := converted(problem, plan)) is not None]
    if min((placement.seconds for placement in placements), default=math.inf) > goal_seconds * (1 + _CHEAP):
        for plan in plans[:_NUM_SEARCHED]:
            profile = Profile(problem.chain, plan.order)
            start = np.zeros(len(profile.gaps), dtype=np.bool_)
            start[_moved(plan, profile)] = True
            placements += _searched(problem, profile, start)
    return placements


def converted(problem: Problem, plan: ContinuousPlan) -> Placement | None:
    """One plan with its copies placed within the budget of the problem.

    What the code around the stages holds does not leave meanwhile; where that leaves no room, it may, and counts in
    every forward, as in the model.
    """
    chain = problem.chain
    for each in (chain, from_above(chain)) if any(stage.outliving for stage in chain.stages) else (chain,):
        profile = Profile(each, plan.order)
        placement = _place(problem, profile, _moved(plan, profile))
        if placement is not None:
            return placement
    return None


def plans_with_other_values_moved(problem: Problem, slots: int, seconds: float) -> list[Placement]:
    """Schedules that may move side values, too, and count what the code around the stages holds only where it is not
    stored; maybe none.

    They are planned as if both took no room, but for side values that stay, for less and less memory. What they then
    lack is found by moving. Orders whose computations alone take as long as `seconds`, or as one that was found, are
    passed over.
    """
    sides, stages = problem.chain.side_values, problem.chain.stages
    staying = tuple(side for side in sides if side.stays)
    chain = replace(problem.chain, side_values=staying, stages=tuple(replace(stage, outliving=()) for stage in stages))
    model = ContinuousModel.of(chain, problem.bandwidth, recompute=True)
    all_bytes = sum(side.num_bytes for side in sides if not side.stays)
    all_bytes += max(sum(num_bytes for _, num_bytes in stage.outliving) for stage in stages)
    found: list[Placement] = []
    for share in _SHARES_OF_SIDE_VALUES:
        budget = problem.memory_budget - int(share * all_bytes)
        if budget < model.minimum_bytes:
            break
        for plan in model.plans(budget, slots, _NUM_SEARCHED):
            profile = Profile(problem.chain, plan.order)
            if profile.compute_seconds >= min([seconds, *(placement.seconds for placement in found)]):
                continue
            start = np.array([gap.value[0] == "s" for gap in profile.gaps], dtype=np.bool_)
            start[_moved(plan, profile)] = True
            found += _searched(problem, profile, start)
    return found


def moved_as_needed(problem: Problem, profile: Profile) -> list[Placement]:
    """The same computations where all may move that is not needed, with the best choice that a local search finds."""
    return _searched(problem, profile, np.ones(len(profile.gaps), dtype=np.bool_))


def _searched(problem: Problem, profile: Profile, start: NDArray[np.bool_]) -> list[Placement]:
    """The same computations with the best choice of values to move that a local search finds, where it finds one."""
    found = descend(problem, profile, start, _MOST_WORK) if profile.gaps else None
    placement = None if found is None else _place(problem, profile, np.flatnonzero(found[0]).tolist())
    return [] if placement is None else [placement]


def _moved(plan: ContinuousPlan, profile: Profile) -> list[int]:
    """The gaps that hold the loss, of the values that a plan moves."""
    loss = plan.order.index(Backward(profile.chain.num_stages))
    return [index for index, gap in enumerate(profile.gaps) if gap.value in plan.moved and gap.begin < loss < gap.end]


def _place(problem: Problem, profile: Profile, moved: list[int]) -> Placement | None:
    return profile.place(moved, problem.memory_budget, problem.bandwidth, duplex=problem.duplex)


def fastest(strategy: str, placements: Iterable[Placement | None]) -> Schedule:
    """The schedule of the fastest placement, the first of equals; there is at least one."""
    found = [placement for placement in placements if placement is not None]
    return Schedule(strategy, min(found, key=lambda placement: placement.seconds).operations)
