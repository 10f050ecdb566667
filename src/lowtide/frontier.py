"""Time against memory: every budget from one table of the dynamic program behind `rotor`.

The table for one budget answers every smaller one. Each point of the curve is a schedule that was read off the table in
bytes and simulated: the curve shows what can be had, not what a model promises.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.chain import Chain, as_chain
from lowtide.errors import InfeasibleBudgetError, StrategyError
from lowtide.schedule import Predicted, Schedule
from lowtide.simulate import simulate
from lowtide.strategies.base import infeasible
from lowtide.strategies.numerics.compiling import announce_compilation
from lowtide.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lowtide.strategies.nested.table import Table

# Enough for a curve without visible corners; a schedule of 100 stages is read off and simulated in a few milliseconds.
DEFAULT_NUM_POINTS = 60


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One schedule of the curve: with `memory_bytes` or more, a step takes `seconds`."""

    memory_bytes: int
    """The schedule's peak: the least budget that it fits in."""
    seconds: float
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Frontier:
    """The fastest recomputation for every budget; made by `lowtide.frontier`.

    Attributes:
        chain: the network.
        memory_budget: the largest budget that it answers.
        points: from the least memory up, each faster than all before it; the last is plain training where that fits.
    """

    chain: Chain
    memory_budget: int
    points: tuple[FrontierPoint, ...]
    _table: Table = field(repr=False, compare=False)

    def __str__(self) -> str:
        least, last = (
            f"{format_bytes(point.memory_bytes)} ({format_seconds(point.seconds)} a step)"
            for point in (self.points[0], self.points[-1])
        )
        return (
            f"{self.chain.name}, {self.chain.num_stages} stages: {len(self.points)} schedules, from {least} to {last}"
        )

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget that works."""
        return self.points[0].memory_bytes

    def at(self, memory_budget: int | str) -> FrontierPoint:
        """Return the fastest schedule within a budget; more memory is never slower.

        `lowtide.solve` with `strategy="rotor"` makes a table for that budget alone, which is finer.

        Args:
            memory_budget: bytes, at most those for which the frontier was computed.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
            StrategyError: above the frontier's own budget, unless plain training fits in that.
        """
        budget = parse_bytes(memory_budget)
        if budget < self.minimum_bytes:
            raise _infeasible(self.chain, budget, self.minimum_bytes)
        ample = int(self._table.least.ample_bytes[1, self.chain.num_stages])
        if budget > self.memory_budget < _outside(self.chain) + ample:
            raise StrategyError(
                f"budget {format_bytes(budget)} is above the {format_bytes(self.memory_budget)} for which this "
                "frontier was computed; compute it with a larger memory_budget"
            )
        own = _point(self.chain, self._table, budget)
        smaller = self.points[bisect.bisect_right(self.points, budget, key=lambda point: point.memory_bytes) - 1]
        return smaller if smaller.seconds <= own.seconds else own

    def schedule(self, memory_budget: int | str) -> Schedule:
        """The schedule of `at(memory_budget)`."""
        return self.at(memory_budget).schedule


def frontier(
    chain: Chain | Mapping[str, Any],
    *,
    memory_budget: int | str | None = None,
    slots: int | None = None,
    num_points: int = DEFAULT_NUM_POINTS,
) -> Frontier:
    """Compute time against memory for optimal recomputation (`rotor`).

    Args:
        chain: the network, a `Chain` or its plain data.
        memory_budget: the largest budget of interest, in bytes or as a string such as `"8GiB"`; None: what plain
            training takes.
        slots: how finely memory is cut for a long chain (see `Rotor`); None: 500.
        num_points: how many budgets are read off; points that are no faster than a smaller one are left out.

    Raises:
        InfeasibleBudgetError: if not even `memory_budget` is enough.

    Example:
        >>> from lowtide import Chain, Stage
        >>> chain = Chain("three", [Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2, 3)])
        >>> [(point.memory_bytes, point.seconds) for point in frontier(chain).points]
        [(70, 12.0), (80, 11.0), (110, 10.0), (140, 9.0)]
    """
    from lowtide.strategies.nested.costs import costs_of
    from lowtide.strategies.nested.table import Table, least_memory
    from lowtide.strategies.slots import default_num_slots

    if num_points < 2:
        raise StrategyError(f"num_points is {num_points!r}, expected a whole number of at least 2")
    chain = as_chain(chain)
    costs, outside = costs_of(chain), _outside(chain)
    announce_compilation()
    least = least_memory(costs)
    minimum = outside + int(least.least_bytes[1, chain.num_stages])
    ample = outside + int(least.ample_bytes[1, chain.num_stages])
    largest = ample if memory_budget is None else parse_bytes(memory_budget)
    if largest < minimum:
        raise _infeasible(chain, largest, minimum)
    # With ample memory everything is saved, and no table is needed; one for a byte less knows all below.
    available = max(minimum, min(largest, ample - 1)) - outside
    table = Table.of(costs, least, available, slots or default_num_slots(chain.num_stages))
    budgets = _budgets(table, minimum - outside, min(largest, ample) - outside, num_points)
    points = [_point(chain, table, outside + budget) for budget in budgets]
    return Frontier(chain, largest, _falling(points), table)


def _budgets(table: Table, least: int, most: int, num_points: int) -> list[int]:
    """Budgets to evaluate: where the time falls, if that is known and not too often; otherwise evenly spaced."""
    steps = table.steps
    if steps is not None and len(steps) < num_points:
        return sorted({least, most, *steps.tolist()})
    return sorted({least + (most - least) * i // (num_points - 1) for i in range(num_points)})


def _point(chain: Chain, table: Table, budget: int) -> FrontierPoint:
    """The schedule for a budget, simulated."""
    from lowtide.strategies.nested.costs import operations_of
    from lowtide.strategies.sides import freed

    decisions, _ = table.decisions(budget - _outside(chain))
    operations = freed(chain, operations_of(table.costs, decisions))
    trace = simulate(chain, Schedule("rotor", operations))
    predicted = Predicted(trace.seconds, trace.peak_bytes, trace.idle_seconds)
    return FrontierPoint(trace.peak_bytes, trace.seconds, Schedule("rotor", operations, predicted=predicted))


def _falling(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """The points that no other point beats in both time and memory."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (point.memory_bytes, point.seconds)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return tuple(kept)


def _outside(chain: Chain) -> int:
    from lowtide.strategies.nested.costs import outside_bytes

    return outside_bytes(chain)


def _infeasible(chain: Chain, budget: int, minimum_bytes: int) -> InfeasibleBudgetError:
    needed = f"recomputation needs for chain {chain.name!r}"
    return infeasible(budget, minimum_bytes, needed, "allow offloading with lowtide.solve(bandwidth=...)")
