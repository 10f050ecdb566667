"""Improve a schedule by local search over which values move, and so over where their copies go.

The order of computations stays. A choice of gaps is judged by `transfers`, whose clocks are the simulator's; from the
choice that a schedule makes, the search goes to the first better one that differs in one gap, or that uses one gap
instead of another. It knows no chance and ends where no such change helps, or after a number of tries.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward, Release, Schedule, Value
from lowtide.strategies.base import Problem
from lowtide.strategies.copies.gaps import Profile
from lowtide.strategies.copies.placement import NEVER

# A try costs a pass over computations and gaps, some 0.1 ms with 100 stages: this bounds the search to a few seconds.
MOST_WORK = 6_000_000

# What is gained must be more than what sums in another order differ by.
_LEAST_GAIN = 1e-9

Flags = NDArray[np.bool_]


def improve(problem: Problem, schedule: Schedule) -> Schedule | None:
    """A faster schedule with the same computations in the same order, within the budget; None if none is found.

    Args:
        problem: with a bandwidth above 0.
        schedule: legal and within the budget; it manages no weights.
    """
    order = [operation for operation in schedule.operations if isinstance(operation, Forward | Backward)]
    profile = Profile(problem.chain, order)
    if not profile.gaps:
        return None
    seconds = problem.evaluate(schedule).seconds
    start = np.zeros(len(profile.gaps), dtype=np.bool_)
    away = _releases(problem.chain, schedule)
    start[[index for index, gap in enumerate(profile.gaps) if (gap.value, gap.begin) in away]] = True
    found = descend(problem, profile, start, MOST_WORK)
    if found is None or found[1] >= seconds * (1 - _LEAST_GAIN):
        return None
    placement = profile.place(
        np.flatnonzero(found[0]).tolist(), problem.memory_budget, problem.bandwidth, duplex=problem.duplex
    )
    if placement is None:
        return None
    better = Schedule(schedule.strategy, placement.operations)
    trace = problem.evaluate(better)
    return better if trace.seconds < seconds and trace.peak_bytes <= problem.memory_budget else None


def _releases(chain: Chain, schedule: Schedule) -> set[tuple[Value, int]]:
    """Each released value with the position, among the computations, of the last one that touched it."""
    touched: dict[Value, int] = {("a", 0): -1}
    sides = [(("s", i), {side.maker, *side.readers}) for i, side in enumerate(chain.side_values, start=1)]
    found: set[tuple[Value, int]] = set()
    position = 0
    for operation in schedule.operations:
        if isinstance(operation, Release):
            found.add((operation.value, touched[operation.value]))
        elif isinstance(operation, Forward | Backward):
            k = operation.stage
            made = ("abar", k) if isinstance(operation, Backward) or operation.save == "all" else ("a", k)
            for value in (made, ("a", k - 1), ("abar", k - 1)):
                touched[value] = position
            touched.update((value, position) for value, stages in sides if k in stages)
            position += 1
    return found


def descend(problem: Problem, profile: Profile, start: Flags, most_work: int) -> tuple[Flags, float] | None:
    """Improve a choice of gaps step by step.

    Args:
        problem: with a bandwidth above 0.
        profile: of the order of computations.
        start: for each gap, whether it may be used.
        most_work: an upper limit on the work, in computations and gaps looked at.

    Returns:
        the best choice found and its time; None where neither the start nor the use of every gap fits.
    """
    tries = max(2, most_work // (len(profile.order) + 4 * len(profile.gaps)))
    return _Search(problem, profile, tries).descend(start)


class _Search:
    """Descent over choices of gaps."""

    def __init__(self, problem: Problem, profile: Profile, num_tries: int) -> None:
        self.problem = problem
        self.profile = profile
        self.tries_left = num_tries

    def descend(self, start: Flags) -> tuple[Flags, float] | None:
        """See the function of the same name."""
        best = self._judged(start)
        every = self._judged(np.ones_like(start))
        if best is None or (every is not None and every[1] < best[1]):
            best = every
        if best is None:
            return None
        improved, floor = True, self.profile.compute_seconds  # nothing waits
        while improved and self.tries_left > 0 and floor < best[1] * (1 - _LEAST_GAIN):
            improved = False
            for choice in self._neighbours(best[0]):
                if self.tries_left <= 0:
                    break
                judged = self._judged(choice)
                if judged is not None and judged[1] < best[1] * (1 - _LEAST_GAIN):
                    best, improved = judged, True
                    break
        return best

    def _judged(self, choice: Flags) -> tuple[Flags, float] | None:
        """The gaps of a choice that are really used, and the time."""
        problem = self.problem
        self.tries_left -= 1
        found = self.profile.positions(choice, problem.memory_budget, problem.bandwidth, problem.duplex)
        return None if found is None else (found[2] < NEVER, found[0])

    def _neighbours(self, choice: Flags) -> Iterator[Flags]:
        """One gap more or less; then one gap for another, those of similar size first."""
        for index in range(choice.size):
            changed = choice.copy()
            changed[index] = not changed[index]
            yield changed
        sizes = np.array([gap.num_bytes for gap in self.profile.gaps])
        used, unused = np.flatnonzero(choice), np.flatnonzero(~choice)
        pairs = [(abs(int(sizes[one]) - int(sizes[other])), int(one), int(other)) for one in used for other in unused]
        for _, one, other in sorted(pairs):
            changed = choice.copy()
            changed[one], changed[other] = False, True
            yield changed
