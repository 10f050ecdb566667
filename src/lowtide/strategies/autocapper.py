"""`autocapper`: recompute for a larger memory, then move what exceeds the budget; the best of 40 memories."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.schedule import Backward, Forward, Schedule
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.copies.gaps import Placement, Profile
from lowtide.strategies.nested.costs import costs_of, operations_of, outside_bytes
from lowtide.strategies.nested.plan import nested_minimum_bytes, plan_nested
from lowtide.strategies.nested.table import Table, least_memory

Order = tuple[Forward | Backward, ...]


@dataclass(frozen=True, slots=True)
class Autocapper:
    """For several M' from the budget up to what plain training needs: the best recomputation within M', then, until the
    budget holds, the activation of the lowest index that is there at the peak is moved.

    Uses variant 0 of every stage. Reference: Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of
    rematerialization and offloading for training DNNs", 2021, §5.1.

    Args:
        slots: how finely memory is cut for the recomputation; None: as `rotor` does.
        num_budgets: how many M' are tried; the paper's 40.
    """

    slots: int | None = None
    num_budgets: int = 40

    def plan(self, problem: Problem) -> Answer:
        """The fastest of its schedules; without a link, the best recomputation.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        if not problem.bandwidth:
            return plan_nested(problem, costs_of(problem.chain, variants=False), "autocapper", self.slots)
        recomputation = _Recomputation(problem, self.slots)
        minimum = self._minimum_bytes(recomputation)
        budget = problem.memory_budget
        if budget < minimum:
            raise problem.infeasible("autocapper", minimum)
        tried = recomputation.orders(budget, self.num_budgets)
        best = _fastest(problem, tried)
        if best is None:  # with so little memory only the orders that the minimum was found with are sure to do
            best = _fastest(problem, recomputation.orders(recomputation.least_bytes, self.num_budgets))
        assert best is not None
        return Answer(Schedule("autocapper", best.operations))

    def minimum_bytes(self, problem: Problem) -> int:
        """The least that a recomputation needs when everything that can be moved is: the best of as many M', from the
        least that recomputation alone can do with.
        """
        if not problem.bandwidth:
            return nested_minimum_bytes(problem, costs_of(problem.chain, variants=False))
        return self._minimum_bytes(_Recomputation(problem, self.slots))

    def _minimum_bytes(self, recomputation: _Recomputation) -> int:
        orders = recomputation.orders(recomputation.least_bytes, self.num_budgets)
        return min(Profile(recomputation.chain, order).need_bytes() for order in orders)


class _Recomputation:
    """The best recomputation for any memory."""

    def __init__(self, problem: Problem, slots: int | None) -> None:
        self.chain = problem.chain
        self.outside = outside_bytes(problem.chain)
        self.costs = costs_of(problem.chain, variants=False)
        self.least = least_memory(self.costs)
        n = self.costs.num_stages
        self.least_bytes = self.outside + int(self.least.least_bytes[1, n])
        self.ample_bytes = self.outside + int(self.least.ample_bytes[1, n])
        self.known = problem.known
        self.slots = slots
        # One byte below what the fastest schedule needs, the table is complete.
        self.table = Table.shared(self.known, self.costs, self.least, self.ample_bytes - self.outside - 1, slots)

    def orders(self, lowest: int, count: int) -> list[Order]:
        """The orders for `count` memories, evenly from `lowest` to what plain training needs; each order once."""
        found: dict[Order, None] = {}
        for step in range(count):
            memory = lowest + (self.ample_bytes - lowest) * step // max(1, count - 1)
            if memory >= self.least_bytes:
                table = self.table
                if step == 0 and memory < self.ample_bytes:
                    table = Table.shared(self.known, self.costs, self.least, memory - self.outside, self.slots)
                decisions, _ = table.decisions(memory - self.outside)
                found.setdefault(operations_of(self.costs, decisions))
        return list(found)


def _fastest(problem: Problem, orders: list[Order]) -> Placement | None:
    best: Placement | None = None
    for order in orders:
        profile = Profile(problem.chain, order)
        moved = capped(profile, problem.memory_budget)
        if moved is None:
            continue
        placement = profile.place(moved, problem.memory_budget, problem.bandwidth, duplex=problem.duplex)
        if placement is not None and (best is None or placement.seconds < best.seconds):
            best = placement
    return best


def capped(profile: Profile, memory_budget: int) -> list[int] | None:
    """The gaps to use so that the order fits: at the highest peak, again and again, the value of the lowest index.

    Returns:
        None where at some peak everything that is not in use has been moved already.
    """
    peaks = profile.peak_bytes.copy()
    by_index = sorted(range(len(profile.gaps)), key=lambda index: (profile.gaps[index].value[1], index))
    moved: list[int] = []
    while peaks.size and peaks.max() > memory_budget:
        peak = int(np.argmax(peaks))
        for index in by_index:
            gap = profile.gaps[index]
            if gap.begin < peak < gap.end:
                break
        else:
            return None
        by_index.remove(index)
        moved.append(index)
        peaks[gap.begin + 1 : gap.end] -= gap.num_bytes
    return moved
