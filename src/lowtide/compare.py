"""All strategies side by side: what each costs at several budgets, against plain training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.chain import Chain, as_chain
from lowtide.errors import InfeasibleBudgetError, StrategyError
from lowtide.solve import Progress, applicable, solve
from lowtide.strategies.base import AUTO, GIVE_BANDWIDTH, Entry, find
from lowtide.units import format_bytes, format_seconds, parse_bandwidth, parse_bytes

# From the least feasible budget to that of plain training, both included: as many as a table on a terminal shows.
DEFAULT_NUM_BUDGETS = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one strategy comes to at one budget; times and peak are None where it does not fit."""

    strategy: str
    minimum_bytes: int
    """The least budget with which the strategy works."""
    seconds: float | None = None
    peak_bytes: int | None = None
    idle_seconds: float | None = None
    solve_seconds: float | None = None

    @property
    def feasible(self) -> bool:
        """Whether it fits."""
        return self.seconds is not None


@dataclass(frozen=True, slots=True)
class BudgetComparison:
    """Every strategy at one budget."""

    memory_budget: int
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome | None:
        """The fastest that leaves weights on the device, the one with the lower peak among equals: what `auto` takes.

        None where nothing fits.
        """
        feasible = [each for each in self.outcomes if each.feasible and not find(each.strategy).manages_weights]
        return min(feasible, key=lambda outcome: (outcome.seconds, outcome.peak_bytes), default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every strategy at every budget.

    Attributes:
        chain: the network.
        bandwidth: bytes per second each way; 0 where nothing can be moved.
        store_all_seconds: the time of plain training.
        store_all_bytes: its peak.
        budgets: from the smallest budget up.
    """

    chain: Chain
    bandwidth: int
    store_all_seconds: float
    store_all_bytes: int
    budgets: tuple[BudgetComparison, ...]

    def __str__(self) -> str:
        plain = f"store-all: {format_seconds(self.store_all_seconds)} a step, {format_bytes(self.store_all_bytes)}"
        lines = [f"{self.chain.name}, {self.chain.num_stages} stages; {plain}"]
        for budget in self.budgets:
            best = budget.best
            found = "nothing fits" if best is None else f"{best.strategy}, {format_seconds(best.seconds or 0.0)} a step"
            lines.append(f"within {format_bytes(budget.memory_budget)}: {found}")
        return "\n".join(lines)


def compare(
    chain: Chain | Mapping[str, Any],
    *,
    memory_budgets: int | str | Iterable[int | str] = (),
    strategies: str | Sequence[str] = (),
    bandwidth: int | str | None = None,
    slots: int | None = None,
    duplex: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Solve a chain with every strategy at several budgets.

    Args:
        chain: the network, a `Chain` or its plain data.
        memory_budgets: bytes on the device, ints or strings such as `"8GiB"`, one or several; none: a handful, from the
            least with which any strategy works to what plain training takes.
        strategies: one or several names from `lowtide strategies`; none: all that apply.
        bandwidth: bytes per second each way between device and host; None: nothing can be moved.
        slots: how finely strategies that discretise memory do it; None: each one's default.
        duplex: both directions at once.
        progress: called with the name of what is being tried and the share done, 0 to 1.

    Raises:
        StrategyError: for an unknown strategy, or one that needs a bandwidth where there is none.

    Example:
        >>> from lowtide import Chain, Stage
        >>> chain = Chain("three", [Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2, 3)])
        >>> compare(chain, memory_budgets=[140], strategies=["store-all"]).budgets[0].best.strategy
        'store-all'
    """
    chain = as_chain(chain)
    rate = 0 if bandwidth is None else parse_bandwidth(bandwidth)
    entries = _entries(chain, rate, [strategies] if isinstance(strategies, str) else strategies)
    given = [memory_budgets] if isinstance(memory_budgets, int | str) else memory_budgets
    settings: dict[str, Any] = {"bandwidth": bandwidth, "slots": slots, "duplex": duplex}
    store_all_bytes = _minimum_bytes(chain, "store-all", settings)
    say = progress or (lambda what, share: None)
    minimums: dict[str, int] = {}
    for done, entry in enumerate(entries):
        say(f"{entry.name}: least memory", 0.2 * done / len(entries))  # a guess: a tenth or so of all the work
        minimums[entry.name] = _minimum_bytes(chain, entry.name, settings)
    budgets = sorted({parse_bytes(budget) for budget in given})
    budgets = budgets or _default_budgets(min(minimums.values()), store_all_bytes)
    compared = []
    for done, budget in enumerate(budgets):
        outcomes = []
        for tried, entry in enumerate(entries):
            share = (done + tried / len(entries)) / len(budgets)
            say(f"{entry.name}: budget {done + 1} of {len(budgets)}", 0.2 + 0.8 * share)
            outcomes.append(_outcome(chain, entry.name, budget, minimums[entry.name], settings))
        compared.append(BudgetComparison(budget, tuple(outcomes)))
    return Comparison(chain, rate, chain.compute_seconds, store_all_bytes, tuple(compared))


def _entries(chain: Chain, bandwidth: int, strategies: Sequence[str]) -> list[Entry]:
    if not strategies:
        return applicable(chain, bandwidth)
    if AUTO in strategies:
        raise StrategyError(f"{AUTO!r} is the best of a comparison, not a part of it; leave it out")
    entries = [find(name) for name in dict.fromkeys(strategies)]
    for entry in entries:
        if entry.moves and not bandwidth:
            raise StrategyError(f"strategy {entry.name!r} moves values; {GIVE_BANDWIDTH}")
    return entries


def _minimum_bytes(chain: Chain, strategy: str, settings: Mapping[str, Any]) -> int:
    try:
        return solve(chain, memory_budget=0, strategy=strategy, **settings).peak_bytes
    except InfeasibleBudgetError as error:
        return error.minimum_bytes


def _outcome(chain: Chain, strategy: str, budget: int, minimum_bytes: int, settings: Mapping[str, Any]) -> Outcome:
    if budget < minimum_bytes:
        return Outcome(strategy, minimum_bytes)
    begin = time.perf_counter()
    solution = solve(chain, memory_budget=budget, strategy=strategy, **settings)
    return Outcome(
        strategy,
        minimum_bytes,
        solution.seconds,
        solution.peak_bytes,
        solution.idle_seconds,
        time.perf_counter() - begin,
    )


def _default_budgets(least: int, most: int) -> list[int]:
    parts = DEFAULT_NUM_BUDGETS - 1
    return sorted({least + (most - least) * part // parts for part in range(DEFAULT_NUM_BUDGETS)})
