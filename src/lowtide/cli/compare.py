"""`lowtide compare`: all strategies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lowtide.chain import Chain
from lowtide.cli.options import (
    Bandwidth,
    ChainFile,
    HalfDuplex,
    Json,
    Slots,
    bandwidth_option,
    bytes_option,
    strategy_names,
)
from lowtide.cli.output import COLUMN_GAP, output_of_others_aside, print_json, print_table
from lowtide.compare import BudgetComparison, Comparison, Outcome, compare
from lowtide.progress import DelayedProgress
from lowtide.strategies.base import find
from lowtide.units import format_bandwidth, format_bytes, format_seconds

Memory = Annotated[
    list[str] | None,
    typer.Option(
        "--memory",
        metavar="BYTES",
        help="A budget, such as 8GiB; give it several times. Default: five, from the least feasible to store-all.",
        show_default=False,
    ),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="Compare only these; give it several times. Default: all that apply.",
        show_default=False,
        autocompletion=strategy_names,
    ),
]

Column = tuple[str, list[str]]  # heading and cells

# The width that a terminal has at the least.
_NUM_COLUMNS = 80

EXAMPLES = (
    "lowtide compare chain.json",
    "lowtide compare chain.json --memory 4GiB --memory 6GiB --bandwidth 12GB/s",
    "lowtide compare chain.json --strategy rotor --strategy chen --json",
)


def command(
    chain_file: ChainFile,
    memory: Memory = None,
    strategy: Strategies = None,
    bandwidth: Bandwidth = None,
    slots: Slots = None,
    half_duplex: HalfDuplex = False,
    json: Json = False,
) -> None:
    """Show for each budget what each strategy costs, relative to store-all.

    The fastest within each budget that leaves weights on the device is marked; where a strategy does not fit, the least
    memory that it needs is shown.
    """
    budgets = [bytes_option("--memory", text) for text in memory or ()]
    rate = bandwidth_option(bandwidth)
    chain = Chain.load(chain_file)
    with output_of_others_aside(), DelayedProgress() as progress:
        comparison = compare(
            chain,
            memory_budgets=budgets,
            strategies=strategy or (),
            bandwidth=rate,
            slots=slots,
            duplex=not half_duplex,
            progress=progress,
        )
    if json:
        print_json(_values(comparison))
    else:
        _print(comparison)


def _values(comparison: Comparison) -> dict[str, Any]:
    return {
        "chain": comparison.chain.name,
        "num_stages": comparison.chain.num_stages,
        "bandwidth": comparison.bandwidth,
        "store_all_seconds": comparison.store_all_seconds,
        "store_all_bytes": comparison.store_all_bytes,
        "budgets": [_budget_values(budget, comparison.store_all_seconds) for budget in comparison.budgets],
    }


def _budget_values(budget: BudgetComparison, store_all_seconds: float) -> dict[str, Any]:
    best = budget.best
    return {
        "memory_budget": budget.memory_budget,
        "best": best.strategy if best is not None else None,
        "strategies": [
            {
                "strategy": outcome.strategy,
                "feasible": outcome.feasible,
                "seconds": outcome.seconds,
                "relative": _relative(outcome, store_all_seconds),
                "peak_bytes": outcome.peak_bytes,
                "idle_seconds": outcome.idle_seconds,
                "solve_seconds": outcome.solve_seconds,
                "minimum_bytes": outcome.minimum_bytes,
            }
            for outcome in budget.outcomes
        ],
    }


def _relative(outcome: Outcome, store_all_seconds: float) -> float | None:
    """The time against plain training; None where it does not fit or plain training takes no time."""
    if outcome.seconds is None or not store_all_seconds:
        return None
    return outcome.seconds / store_all_seconds


def _print(comparison: Comparison) -> None:
    chain = comparison.chain
    link = f", link {format_bandwidth(comparison.bandwidth)}" if comparison.bandwidth else ""
    print(f"{chain.name}, {chain.num_stages} stages{link}")
    print(
        f"store-all: {format_seconds(comparison.store_all_seconds)} a step, {format_bytes(comparison.store_all_bytes)}"
    )
    outcomes = comparison.budgets[0].outcomes
    names = [outcome.strategy + (" (1)" if find(outcome.strategy).manages_weights else "") for outcome in outcomes]
    leasts = [format_bytes(outcome.minimum_bytes) for outcome in outcomes]
    columns = [_column(budget, comparison.store_all_seconds) for budget in comparison.budgets]
    for part in _parts([("strategy", names), ("memory", leasts)], columns):
        print()
        headings = ("strategy", "least\nmemory", *(heading for heading, _ in part))
        rows = zip(names, leasts, *(cells for _, cells in part), strict=True)
        print_table(headings, list(rows))
    print()
    print("time by budget, relative to store-all; * the fastest; - does not fit")
    if any(name.endswith(" (1)") for name in names):
        print("(1) moves weights, and is never marked; of these only joint can be executed")


def _column(budget: BudgetComparison, store_all_seconds: float) -> Column:
    best = budget.best
    cells = [_cell(outcome, store_all_seconds, marked=outcome is best) for outcome in budget.outcomes]
    return format_bytes(budget.memory_budget).replace(" ", "\n"), cells


def _cell(outcome: Outcome, store_all_seconds: float, *, marked: bool) -> str:
    if outcome.seconds is None:
        return "-"
    ratio = _relative(outcome, store_all_seconds)
    text = f"{ratio:.3f}" if ratio is not None else format_seconds(outcome.seconds)
    return f"*{text}" if marked else text


def _parts(fixed: Sequence[Column], columns: Sequence[Column]) -> list[list[Column]]:
    """The columns in groups, such that each group fits a terminal beside the fixed ones."""
    fixed_width = sum(map(_width, fixed))
    groups: list[list[Column]] = [[]]
    used = fixed_width
    for column in columns:
        if groups[-1] and used + _width(column) > _NUM_COLUMNS:
            groups.append([])
            used = fixed_width
        groups[-1].append(column)
        used += _width(column)
    return groups


def _width(column: Column) -> int:
    heading, cells = column
    return COLUMN_GAP + max(len(line) for line in (*heading.splitlines(), *cells))
