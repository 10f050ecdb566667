"""Time against memory: the whole curve of `rotor` from one solve.

The dynamic program's table for one budget answers every smaller one. Each point of the curve is a schedule that was
read off the table in exact bytes and simulated, so the curve shows what can be had, not what a model promises.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.chain import Chain, as_chain
from lowtide.errors import InfeasibleBudgetError, StrategyError
from lowtide.schedule import Predicted, Schedule
from lowtide.simulate import simulate
from lowtide.units import format_bytes, parse_bytes

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
    """Time against memory, from the least feasible budget up; each point is faster than all before it."""

    chain: Chain
    points: tuple[FrontierPoint, ...]

    @property
    def minimum_bytes(self) -> int:
        """The least budget of all."""
        return self.points[0].memory_bytes

    def at(self, memory_budget: int | str) -> FrontierPoint:
        """The fastest point within a budget.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        budget = parse_bytes(memory_budget)
        index = bisect.bisect_right(self.points, budget, key=lambda point: point.memory_bytes)
        if not index:
            raise InfeasibleBudgetError(
                f"budget {format_bytes(budget)} ({budget} bytes) is below the {format_bytes(self.minimum_bytes)} "
                f"({self.minimum_bytes} bytes) that recomputation needs for chain {self.chain.name!r}; raise it, or "
                "allow offloading",
                minimum_bytes=self.minimum_bytes,
            )
        return self.points[index - 1]


def frontier(
    chain: Chain | Mapping[str, Any],
    *,
    memory_budget: int | str | None = None,
    slots: int | None = None,
    num_points: int = DEFAULT_NUM_POINTS,
) -> Frontier:
    """Compute time against memory for optimal recomputation (`rotor`), from one table.

    Args:
        chain: the network, a `Chain` or its plain data.
        memory_budget: the largest budget of interest; None: what plain training takes.
        slots: how finely the table divides memory; None: rotor's default.
        num_points: how many budgets are read off; points that are no faster than a smaller one are left out.

    Raises:
        InfeasibleBudgetError: where not even `memory_budget` is enough.

    Example:
        >>> from lowtide import Chain, Stage
        >>> chain = Chain("three", [Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2, 3)])
        >>> [(point.memory_bytes, point.seconds) for point in frontier(chain).points]
        [(70, 12.0), (80, 11.0), (110, 10.0), (140, 9.0)]
    """
    from lowtide.strategies.nested import costs_of, operations_of, outside_bytes
    from lowtide.strategies.nested_table import Table, least_memory
    from lowtide.strategies.slots import DEFAULT_NUM_SLOTS

    if num_points < 2:
        raise StrategyError(f"num_points is {num_points!r}, expected a whole number from 2 up")
    chain = as_chain(chain)
    costs = costs_of(chain)
    least = least_memory(costs)
    outside = outside_bytes(chain)
    minimum = outside + int(least.least_bytes[1, chain.num_stages])
    ample = outside + int(least.ample_bytes[1, chain.num_stages])
    largest = ample if memory_budget is None else min(ample, parse_bytes(memory_budget))
    if largest < minimum:
        raise InfeasibleBudgetError(
            f"budget {format_bytes(largest)} ({largest} bytes) is below the {format_bytes(minimum)} ({minimum} bytes) "
            f"that recomputation needs for chain {chain.name!r}; raise it, or allow offloading",
            minimum_bytes=minimum,
        )
    # With ample memory everything is saved, and no table is needed; one for a byte less knows all below.
    table = Table.of(costs, least, min(largest, ample - 1) - outside, slots or DEFAULT_NUM_SLOTS)
    budgets = sorted({minimum + (largest - minimum) * i // (num_points - 1) for i in range(num_points)})
    found = []
    for budget in budgets:
        decisions, _ = table.decisions(budget - outside)
        schedule = Schedule("rotor", operations_of(costs, decisions))
        trace = simulate(chain, schedule)
        predicted = Predicted(trace.seconds, trace.peak_bytes, trace.idle_seconds)
        found.append(
            FrontierPoint(trace.peak_bytes, trace.seconds, Schedule("rotor", schedule.operations, predicted=predicted))
        )
    return Frontier(chain, _falling(found))


def _falling(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """The points that are faster than every other with no more memory."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (point.memory_bytes, point.seconds)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return tuple(kept)
