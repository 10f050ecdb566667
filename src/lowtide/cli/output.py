"""What the subcommands print: one JSON object for programs, pairs and tables for people.

rich is imported only where a table is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError
from lowtide.report.survey import Survey
from lowtide.trace import Trace
from lowtide.units import format_bytes, format_seconds

# Wider than any table: nothing is cut off.
_UNLIMITED_WIDTH = 100_000

# Blanks between two columns of `print_table`.
COLUMN_GAP = 2


@contextlib.contextmanager
def output_of_others_aside() -> Iterator[None]:
    """Send to standard error what solvers and models print meanwhile: standard output is for results alone.

    HiGHS, for one, writes a line there now and then that no option turns off, and not through `sys.stdout`.
    """
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a process that was started without one of the two
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object, on one line of standard output."""
    print(json.dumps(value, allow_nan=False))


def curve_values(found: Survey) -> list[dict[str, Any]]:
    """Time against memory for each strategy, as plain data."""
    return [
        {
            "strategy": curve.strategy,
            "minimum_bytes": curve.minimum_bytes,
            "points": [{"peak_bytes": point.peak_bytes, "seconds": point.seconds} for point in curve.points],
        }
        for curve in found.curves
    ]


@contextlib.contextmanager
def infeasible_as_json(asked: bool) -> Iterator[None]:
    """Where JSON is asked for and no schedule fits, print one object that names the least budget that works."""
    try:
        yield
    except InfeasibleBudgetError as error:
        if asked:
            print_json({"output": None, "feasible": False, "minimum_bytes": error.minimum_bytes})
        raise


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"{name:<{width}}  {value}")


def step_time(seconds: float, chain: Chain, update_seconds: float = 0.0) -> str:
    """The time of a step, and how it compares with plain training where that takes any.

    `update_seconds` are those of the optimizer steps in it: plain training takes them, too.
    """
    plain = chain.compute_seconds + update_seconds
    return f"{format_seconds(seconds)} a step" + (f" ({seconds / plain:.3f} x store-all)" if plain else "")


def moved(trace: Trace) -> str:
    """What a schedule moves between device and host, and how long it waits for that."""
    copies = f"{format_bytes(trace.moved_bytes)} in {len(trace.copies)} copies"
    return f"{copies}, compute idle {format_seconds(trace.idle_seconds)}"


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1, wraps: int | None = None
) -> None:
    """Print a table. Its cells stay whole, so that a name can be searched for and copied.

    Args:
        columns: their headings.
        rows: a cell each; rich's markup is not interpreted.
        num_left: how many columns, from the first, are aligned to the left; the others to the right.
        wraps: the column of prose that is wrapped where the table is wider than the terminal (80 columns where the
            output is none); None: long lines stay long.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(columns):
        justify: Literal["left", "right"] = "left" if index < num_left else "right"
        table.add_column(Text(heading), justify=justify, no_wrap=index != wraps)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout, highlight=False, width=_UNLIMITED_WIDTH if wraps is None else None)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())
