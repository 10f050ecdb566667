"""`opportunist`: keep the link busy, and recompute what it has no time for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.schedule import Backward, Forward, Schedule, Value
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.copies.gaps import Profile
from lowtide.strategies.nested.costs import Costs, costs_of, operations_of
from lowtide.strategies.nested.plan import nested_minimum_bytes, plan_nested
from lowtide.strategies.nested.table import Least, Table, least_memory
from lowtide.strategies.numerics.arrays import ChainArrays, arrays_of, from_above
from lowtide.strategies.slots import default_num_slots

Computation = Forward | Backward


@dataclass(frozen=True, slots=True)
class _Group:
    """Stage `first` runs `all` and moves its input and what it saves; the stages after it, to `last`, run light."""

    first: int
    last: int
    given: Value
    given_bytes: int


@dataclass(frozen=True, slots=True)
class Opportunist:
    """Move a stage whenever the link is free; recompute the stages in between.

    The first stage runs `all` and moves its input and what it saves; the next ones run light as long as those copies
    last; then again, until the rest fits as it is. The backward phase recomputes each group of light stages optimally.
    Uses variant 0 of every stage. Reference: Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of
    rematerialization and offloading for training DNNs", 2021, §5.1.

    Args:
        slots: how finely memory is cut for the recomputation of groups; None: as `rotor` does.
    """

    slots: int | None = None

    def plan(self, problem: Problem) -> Answer:
        """The only schedule of this strategy; without a link, the best recomputation.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        if not problem.bandwidth:
            return plan_nested(problem, costs_of(problem.chain, variants=False), "opportunist", self.slots)
        problem = replace(problem, chain=from_above(problem.chain))
        costs = costs_of(problem.chain, variants=False)
        work = _Work.of(problem, costs)
        minimum = work.minimum_bytes()
        if problem.memory_budget < minimum:
            raise problem.infeasible("opportunist", minimum)
        order, moved = work.order(problem.memory_budget, self.slots)
        profile = Profile(problem.chain, order)
        chosen = [index for index, gap in enumerate(profile.gaps) if gap.value in moved]
        placement = profile.place(chosen, problem.memory_budget, problem.bandwidth, duplex=problem.duplex)
        assert placement is not None
        return Answer(Schedule("opportunist", placement.operations))

    def minimum_bytes(self, problem: Problem) -> int:
        """The least budget at which some first groups fit, and then the rest as it is; it depends on the bandwidth."""
        if not problem.bandwidth:
            return nested_minimum_bytes(problem, costs_of(problem.chain, variants=False))
        problem = replace(problem, chain=from_above(problem.chain))
        costs = costs_of(problem.chain, variants=False)
        return _Work.of(problem, costs).minimum_bytes()


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The groups of a chain on a link; the budget decides only how many of them are used."""

    fixed_bytes: int
    arrays: ChainArrays
    costs: Costs
    least: Least
    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, problem: Problem, costs: Costs) -> _Work:
        arrays = arrays_of(problem.chain, variants=False)
        groups = _groups(arrays, problem.bandwidth)
        return cls(problem.chain.fixed_bytes, arrays, costs, least_memory(costs), groups)

    def minimum_bytes(self) -> int:
        """With fewer groups fewer must fit, but more stages at once as they are."""
        best, so_far = 2**62, 0
        for group in self.groups:
            best = min(best, max(so_far, self._rest_bytes(group)))
            so_far = max(so_far, self._group_bytes(group))
        if self.groups[-1].last == self.arrays.output.size - 1:
            best = min(best, so_far)
        return best

    def order(self, memory_budget: int, slots: int | None) -> tuple[list[Computation], set[Value]]:
        """The computations, and the values that are moved."""
        n = self.arrays.output.size - 1
        ahead: list[Computation] = []
        behind: list[list[Computation]] = []
        moved: set[Value] = set()
        available = memory_budget - self.fixed_bytes
        table = Table.of(self.costs, self.least, available, slots or default_num_slots(n))
        for group in self.groups:
            first, last = group.first, group.last
            if self._rest_bytes(group) <= memory_budget:
                ahead.extend(Forward(k, "all") for k in range(first, n + 1))
                behind.append([Backward(k) for k in range(n, first - 1, -1)])
                break
            moved |= {group.given, ("abar", first)}
            ahead.append(Forward(first, "all"))
            own: list[Computation] = []
            if last > first:
                room = available - int(self.arrays.saved[first, 0])
                decisions, _ = table.decisions(room, (first + 1, last))
                own = list(operations_of(self.costs, decisions, (first + 1, last)))
                if last < n:
                    ahead.extend(
                        [Forward(first + 1, "keep"), *(Forward(k, "drop") for k in range(first + 2, last + 1))]
                    )
            behind.append([*own, Backward(first)])
        return [*ahead, *(operation for part in reversed(behind) for operation in part)], moved

    def _rest_bytes(self, group: _Group) -> int:
        """What the stages from the group's first on need where all of them save everything."""
        n = self.arrays.output.size - 1
        return self.fixed_bytes + group.given_bytes + int(self.least.ample_bytes[group.first, n])

    def _group_bytes(self, group: _Group) -> int:
        """What the group needs in either phase, with everything else away."""
        arrays, first, last = self.arrays, group.first, group.last
        n = arrays.output.size - 1
        saved, beside = int(arrays.saved[first, 0]), arrays.standing_first
        uses = [
            group.given_bytes + int(arrays.heavy_peak[first, 0] + beside[first]),
            group.given_bytes + int(arrays.backward_peak[first, 0]),
        ]
        if last > first:
            uses.append(saved + int(self.least.least_bytes[first + 1, last]))
        if first < last < n:
            uses.append(saved + int(arrays.light_peak[first + 1] + beside[first + 1]))
            uses.extend(
                int(arrays.output[k - 1] + arrays.light_peak[k] + beside[k]) for k in range(first + 2, last + 1)
            )
        return self.fixed_bytes + max(uses)


def _groups(arrays: ChainArrays, bandwidth: int) -> tuple[_Group, ...]:
    """Cut the chain: a stage begins a group if the copies before it are done by the time it has something to move."""
    n = arrays.output.size - 1
    groups: list[_Group] = []
    clock, link_free, first = 0.0, 0.0, 1
    given: Value = ("a", 0)
    given_bytes, to_copy = int(arrays.output[0]), int(arrays.output[0])
    while first <= n:
        link_free = max(link_free, clock) + to_copy / bandwidth
        clock += float(arrays.forward_seconds[first, 0])
        link_free = max(link_free, clock) + int(arrays.saved[first, 0]) / bandwidth
        last = first
        while last < n and clock + float(arrays.forward_seconds[last + 1, 0]) < link_free:
            last += 1
            clock += float(arrays.light_seconds[last])
        groups.append(_Group(first, last, given, given_bytes))
        light = last > first
        given = ("a" if light else "abar", last)
        given_bytes = int(arrays.output[last] if light else arrays.saved[last, 0])
        to_copy = given_bytes if light else 0  # what a stage saved is on its way already
        first = last + 1
    return tuple(groups)
