"""The best nested persistent schedule for any budget: what is known of every s..t, and how a schedule is read off it.

Where it costs little the least times are known exactly (`nested_stairs`), else for a number of slots (`nested_rows`).
A schedule is read off with bytes, not slots: from a schedule to those inside it, each decided anew, and only what fits.
So it never exceeds the budget, and is optimal where the times are exact or a slot is one byte. Decisions are not
stored: finding one again takes O(n), and a schedule consists of less than 2n.

Reference: Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lowtide.strategies.nested.costs import Bytes, Costs, Indices
from lowtide.strategies.nested.fill import fill_rows
from lowtide.strategies.nested.least import (
    Least,
    forward_peak,
    held_by_split,
    idle_after,
    least_memory,
    own_peak,
    slower_as,
)
from lowtide.strategies.nested.rows import Rows, empty_rows, slower_by_rows
from lowtide.strategies.nested.stairs import Stairs, empty_stairs, slower_by_stairs, stairs_of
from lowtide.strategies.numerics.kernels import kernel, kernel_part
from lowtide.strategies.slots import Slots, default_num_slots

__all__ = ["Least", "Table", "least_memory"]


# So many show a schedule that takes a few hundredths more time than the best, beyond the fastest: enough for a bound.
_FEW_SLOTS = 32

# For longer chains few slots take half as long as many, and exact times too long nevertheless where memory is short.
_MOST_BOUNDED = 128


class _Known(NamedTuple):
    """What is known of every s..t, as stairs or as rows; compiled code takes both, the one that is not used empty."""

    is_exact: bool
    stairs: Stairs
    least: Least
    rows: Rows
    unit_bytes: int


def _content(values: Any) -> Any:
    """What a record of arrays holds, to compare it with others."""
    if isinstance(values, np.ndarray):
        return values.shape, values.tobytes()
    return tuple(map(_content, values)) if isinstance(values, tuple) else values


@kernel_part
def _slower(known: _Known, s: int, t: int, available_bytes: int) -> float:
    """What s..t takes above its fastest schedule with this many bytes, as far as is known."""
    if available_bytes >= known.least.ample_bytes[s, t]:
        return 0.0
    if known.is_exact:
        return slower_by_stairs(known.stairs, s, t, available_bytes)
    return slower_by_rows(known.least, known.rows, known.unit_bytes, s, t, available_bytes)


@kernel_part
def _decide(costs: Costs, known: _Known, s: int, t: int, available_bytes: int) -> int:
    """The best way for `all`, or minus the best split of s..t, with this many bytes; they must suffice."""
    best, decision = np.inf, 0
    if s == t or costs.saves_ahead:
        for way in range(costs.first_way[s], costs.first_way[s + 1]):
            if own_peak(costs, way, s, t) <= available_bytes:
                seconds = slower_as(costs, way, s, t)
                if s < t:
                    seconds += _slower(known, s + 1, t, available_bytes - costs.way_saved[way])
                if seconds < best:
                    best, decision = seconds, way
    peak, idle = 0, 0
    for p in range(s + 1, t + 1):
        peak = max(peak, forward_peak(costs, s, p - 1, t) - idle)
        idle += idle_after(costs, s, p - 1, t)
        seconds = costs.split_until[p] - costs.forward_until[s - 1]
        if peak > available_bytes or seconds >= best:
            break
        seconds += _slower(known, p, t, available_bytes - costs.activation[p - 1] + idle)
        seconds += _slower(known, s, p - 1, available_bytes)
        if seconds < best:
            best, decision = seconds, -p
    return decision


@kernel
def _read_off(costs: Costs, known: _Known, decisions: Indices, pending: Indices) -> tuple[int, float]:
    """Note the decisions in the order in which they run; return their number and the time above the fastest schedule.

    `pending` has room for n sub-schedules (s, t, available bytes) that are still to be decided; the first is there.
    """
    num_pending, num_decisions, seconds = 1, 0, 0.0
    while num_pending:
        num_pending -= 1
        s, t, available = pending[num_pending, 0], pending[num_pending, 1], pending[num_pending, 2]
        decision = _decide(costs, known, s, t, available)
        decisions[num_decisions] = decision
        num_decisions += 1
        if decision < 0:
            p = -decision
            seconds += costs.split_until[p] - costs.forward_until[s - 1]
            num_pending = _put(pending, num_pending, s, p - 1, available)
            num_pending = _put(pending, num_pending, p, t, available - held_by_split(costs, s, p, t))
        else:
            seconds += slower_as(costs, decision, s, t)
            if s < t:
                num_pending = _put(pending, num_pending, s + 1, t, available - costs.way_saved[decision])
    return num_decisions, seconds


@kernel_part
def _put(pending: Indices, num_pending: int, s: int, t: int, available_bytes: int) -> int:
    pending[num_pending, 0], pending[num_pending, 1], pending[num_pending, 2] = s, t, available_bytes
    return num_pending + 1


@dataclass(frozen=True, slots=True)
class Table:
    """The least time of every s..t for every budget up to one; made by `Table.of`.

    Attributes:
        costs: the chain.
        least: its least memory.
        slots: how the budget is cut; None where the times are exact.
    """

    costs: Costs
    least: Least
    slots: Slots | None
    _known: _Known

    @classmethod
    def of(
        cls,
        costs: Costs,
        least: Least,
        available_bytes: int,
        most_slots: int,
        *,
        try_exact: bool = True,
        most_slower: float = np.inf,
    ) -> Table:
        """The table for every budget up to `available_bytes`.

        Args:
            costs: the chain.
            least: its least memory, from `least_memory(costs)`.
            available_bytes: what there is for the stages 1..n (see `nested`), at least `least_bytes[1, n]`.
            most_slots: into how many slots they are cut, at most, where exact times cost too much.
            try_exact: whether exact times may be tried.
            most_slower: only what takes at most so much longer than the fastest schedule is asked for.
        """
        n = costs.num_stages
        no_rows, no_stairs = empty_rows(n), empty_stairs(n)
        if available_bytes >= int(least.ample_bytes[1, n]):
            return cls(costs, least, None, _Known(True, no_stairs, least, no_rows, 1))
        stairs = stairs_of(costs, available_bytes, most_slower) if try_exact else None
        if stairs is not None:
            return cls(costs, least, None, _Known(True, stairs, least, no_rows, 1))
        slots = Slots.for_budget(available_bytes, most_slots)
        rows = fill_rows(costs, least, slots)
        while rows is None:
            slots = Slots.for_budget(available_bytes, max(1, slots.num_slots // 2))
            rows = fill_rows(costs, least, slots)
        return cls(costs, least, slots, _Known(False, no_stairs, least, rows, slots.unit_bytes))

    @classmethod
    def of_one_budget(cls, costs: Costs, least: Least, available_bytes: int, most_slots: int | None = None) -> Table:
        """As `of`, to be asked for the whole budget alone: what takes longer than a schedule that few slots have shown
        is left out, which is most. Half way to ample memory, that takes 0.1 s instead of 1.0 s for 110 stages.
        """
        slots, slower = most_slots or default_num_slots(costs.num_stages), np.inf
        if costs.num_stages <= _MOST_BOUNDED:
            rough = cls.of(costs, least, available_bytes, _FEW_SLOTS, try_exact=False)
            _, slower = rough.decisions(available_bytes)
        return cls.of(costs, least, available_bytes, slots, most_slower=slower)

    @classmethod
    def shared(
        cls, known: dict[Any, Any], costs: Costs, least: Least, available_bytes: int, most_slots: int | None = None
    ) -> Table:
        """As `of`, where exact times that others have asked for serve again.

        Where they are known for less memory only, they are worked out for all of it: that costs little more, and
        whoever asks next is served.

        Args:
            known: what was worked out, by its costs (see `Problem.known`).
            costs: the chain.
            least: its least memory.
            available_bytes: what there is for the stages 1..n.
            most_slots: as for `of`; None: the default for the number of stages.
        """
        n = costs.num_stages
        slots, key = most_slots or default_num_slots(n), (cls, _content(costs))
        if available_bytes >= int(least.ample_bytes[1, n]):
            return cls.of(costs, least, available_bytes, slots)
        before: tuple[int, Table] | None = known.get(key)
        if before is not None and available_bytes <= before[0]:
            return before[1]
        limit = available_bytes if before is None else int(least.ample_bytes[1, n]) - 1
        table = cls.of(costs, least, limit, slots)
        if table.slots is not None:  # slots are cut for one budget
            return table if limit == available_bytes else cls.of(costs, least, available_bytes, slots)
        known[key] = (limit, table)
        return table

    @property
    def is_exact(self) -> bool:
        """Whether its schedules are optimal for budgets of whole bytes."""
        return self.slots is None or self.slots.unit_bytes == 1

    @property
    def steps(self) -> Bytes | None:
        """The available bytes at which the time of 1..n falls, up to the budget; None where they are not known."""
        if not self._known.is_exact:
            return None
        stairs, n = self._known.stairs, self.costs.num_stages
        return stairs.from_bytes[stairs.first[1, n] : stairs.end[1, n]]

    def decisions(self, available_bytes: int, stages: tuple[int, int] | None = None) -> tuple[Indices, float]:
        """The schedule of the stages s..t (None: of all) for a budget.

        Args:
            available_bytes: at least `least_bytes[s, t]`, and at most the table's less a[s-1] where s > 1.
            stages: s and t.

        Returns:
            What it consists of (see `nested.operations_of`), and its time above the fastest schedule of s..t.
        """
        n = self.costs.num_stages
        decisions, pending = np.empty(2 * n, np.int64), np.empty((n + 1, 3), np.int64)
        pending[0] = (*(stages or (1, n)), available_bytes)
        count, seconds = _read_off(self.costs, self._known, decisions, pending)
        return decisions[:count], seconds
