"""What a chain costs at many budgets: the curves of every strategy, and the fastest schedule at each budget."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError, StrategyError
from lowtide.schedule import Schedule
from lowtide.simulate import simulate
from lowtide.solve import Progress, Solution, applicable, solve
from lowtide.strategies.base import AUTO, GIVE_BANDWIDTH, find, infeasible
from lowtide.trace import Trace

DEFAULT_NUM_BUDGETS = 20

# Curves bend close to the least feasible budget: budgets stand closer there. 1 would space them evenly.
_CROWDING = 1.5

# How long all strategies together may solve. One that is slow has fewer points then, and the survey says which.
DEFAULT_PATIENCE_SECONDS = 60.0

STORE_ALL = "store-all"

_Solve = Callable[[str, int], Solution]  # a strategy's name and a budget in bytes


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule that a strategy has found: from `peak_bytes` on, a step takes `seconds`."""

    strategy: str
    peak_bytes: int
    seconds: float
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Curve:
    """Time against memory for one strategy: the points that no other point of it beats, from little memory to much."""

    strategy: str
    minimum_bytes: int
    points: tuple[Point, ...]
    tried_bytes: tuple[int, ...]
    """The budgets that were tried."""
    num_skipped: int
    """How many were not, for lack of time."""

    def at(self, memory_budget: int) -> Point | None:
        """The fastest point that fits."""
        index = bisect.bisect_right(self.points, memory_budget, key=lambda point: point.peak_bytes)
        return self.points[index - 1] if index else None


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """One schedule to look at, and the budget that it is for."""

    memory_budget: int
    schedule: Schedule
    trace: Trace


@dataclass(frozen=True, slots=True)
class Survey:
    """A chain at many budgets.

    Attributes:
        chain: the network.
        bandwidth: bytes per second each way; 0 where nothing can be moved.
        duplex: both directions at once.
        store_all: what plain training takes.
        curves: one a strategy, in the order of the table of strategies.
        plans: the fastest schedule at each of some budgets, from the smallest up.
    """

    chain: Chain
    bandwidth: int
    duplex: bool
    store_all: Trace
    curves: tuple[Curve, ...]
    plans: tuple[ShownPlan, ...]

    @property
    def minimum_bytes(self) -> int:
        """The least budget with which any strategy works."""
        return min(curve.minimum_bytes for curve in self.curves)

    def plan_within(self, memory_budget: int) -> ShownPlan:
        """The fastest plan that fits.

        Raises:
            InfeasibleBudgetError: where none does.
        """
        index = bisect.bisect_right(self.plans, memory_budget, key=lambda plan: plan.memory_budget)
        if not index:
            needed = f"chain {self.chain.name!r} needs at the least with these strategies"
            otherwise = "allow other strategies" if self.bandwidth else GIVE_BANDWIDTH
            raise infeasible(memory_budget, self.minimum_bytes, needed, otherwise)
        return self.plans[index - 1]


def survey(
    chain: Chain,
    *,
    memory_budgets: Sequence[int] = (),
    bandwidth: int = 0,
    duplex: bool = True,
    strategies: Sequence[str] = (),
    slots: int | None = None,
    num_budgets: int = DEFAULT_NUM_BUDGETS,
    patience_seconds: float | None = DEFAULT_PATIENCE_SECONDS,
    progress: Progress | None = None,
) -> Survey:
    """Solve a chain with every strategy at many budgets, from the least feasible to that of plain training.

    Args:
        chain: the network.
        memory_budgets: budgets in bytes to be among them.
        bandwidth: bytes per second each way between device and host; 0: nothing can be moved.
        duplex: both directions at once.
        strategies: names from `lowtide strategies`; none: all that apply and leave weights on the device.
        slots: how finely strategies that discretise memory do it; None: each one's default.
        num_budgets: how many budgets, those of `memory_budgets` aside.
        patience_seconds: how long all strategies together may solve; each one's budgets are tried from coarse to fine
            until its share is spent. None: without end, which makes the outcome independent of the machine.
        progress: called with the name of what is being tried and the share done, 0 to 1.
    """
    names = _names(chain, bandwidth, strategies)
    say = progress or (lambda what, share: None)

    def solved(name: str, budget: int) -> Solution:
        return solve(
            chain, memory_budget=budget, strategy=name, bandwidth=bandwidth or None, slots=slots, duplex=duplex
        )

    minimums: dict[str, int] = {}
    for done, name in enumerate(names):
        say(f"{name}: least memory", 0.1 * done / len(names))
        minimums[name] = _minimum_bytes(solved, name)
    store_all = solved(STORE_ALL, minimums[STORE_ALL])
    budgets = _budgets(min(minimums.values()), store_all.peak_bytes, num_budgets)
    budgets = sorted({*budgets, *(budget for budget in memory_budgets if budget >= budgets[0])})
    deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
    curves = []
    for done, name in enumerate(names):
        # What the strategies before did not need is left to the others.
        left = None if deadline is None else (deadline - time.monotonic()) / (len(names) - done)
        within = sorted({minimums[name], *(budget for budget in budgets if budget >= minimums[name])})
        wanted = list(coarse_to_fine(within, first=memory_budgets))
        points: list[Point] = []
        for point in _points(solved, name, wanted, left):
            points.append(point)
            say(f"{name}: {len(points)} of {len(wanted)}", 0.1 + 0.9 * (done + len(points) / len(wanted)) / len(names))
        tried = tuple(sorted(wanted[: len(points)]))
        curves.append(Curve(name, minimums[name], _best(points), tried, len(wanted) - len(points)))
    plans = _plans(chain, curves, budgets, bandwidth, duplex)
    return Survey(chain, bandwidth, duplex, store_all.trace, tuple(curves), plans)


def _points(solved: _Solve, name: str, budgets: Sequence[int], patience_seconds: float | None) -> Iterator[Point]:
    """One strategy at one budget after the other, until the next would take longer than there is patience for."""
    begin, latest = time.monotonic(), 0.0
    for tried, budget in enumerate(budgets):
        before = time.monotonic()
        if patience_seconds is not None and tried and before + latest > begin + patience_seconds:
            break
        solution = solved(name, budget)
        latest = time.monotonic() - before
        yield Point(name, solution.peak_bytes, solution.seconds, solution.schedule)


def _names(chain: Chain, bandwidth: int, strategies: Sequence[str]) -> list[str]:
    if not strategies:
        return [entry.name for entry in applicable(chain, bandwidth, manage_weights=False)]
    entries = [find(name) for name in dict.fromkeys(strategies) if name != AUTO]
    for entry in entries:
        if entry.moves and not bandwidth:
            raise StrategyError(f"strategy {entry.name!r} moves values; {GIVE_BANDWIDTH}")
    return list(dict.fromkeys([STORE_ALL, *(entry.name for entry in entries)]))


def _minimum_bytes(solved: _Solve, name: str) -> int:
    try:
        return solved(name, 0).peak_bytes
    except InfeasibleBudgetError as error:
        return error.minimum_bytes


def _budgets(least: int, most: int, num_budgets: int) -> list[int]:
    """Budgets between two, both included, closer to each other at the small end."""
    most = max(least, most)
    last = max(1, num_budgets - 1)
    return sorted({least + int((most - least) * (part / last) ** _CROWDING) for part in range(num_budgets)} | {most})


def coarse_to_fine(budgets: Sequence[int], *, first: Sequence[int] = ()) -> Iterator[int]:
    """Every budget once: those of `first`, the two ends, then halves, quarters and so on."""
    seen: set[int] = set()
    for budget in (*(b for b in first if b in budgets), budgets[0], budgets[-1]):
        if budget not in seen:
            seen.add(budget)
            yield budget
    parts = 1
    while len(seen) < len(budgets):
        parts *= 2
        for part in range(1, parts, 2):
            budget = budgets[(len(budgets) - 1) * part // parts]
            if budget not in seen:
                seen.add(budget)
                yield budget


def _best(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other has both less memory and less time than."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return tuple(kept)


def _plans(
    chain: Chain, curves: Sequence[Curve], budgets: Sequence[int], bandwidth: int, duplex: bool
) -> tuple[ShownPlan, ...]:
    """The fastest schedule at each budget, simulated."""
    best = Curve(AUTO, 0, _best([point for curve in curves for point in curve.points]), (), 0)
    traces: dict[int, Trace] = {}  # by the point's peak, which is its own among the best
    plans = []
    for budget in budgets:
        point = best.at(budget)
        if point is None:
            continue
        if point.peak_bytes not in traces:
            traces[point.peak_bytes] = simulate(chain, point.schedule, bandwidth=bandwidth or None, duplex=duplex)
        plans.append(ShownPlan(budget, replace(point.schedule, strategy=point.strategy), traces[point.peak_bytes]))
    return tuple(plans)
