"""What the subcommands print: one JSON object for programs, pairs and tables for people.

rich is imported only where a table is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowtide.chain import Chain
from lowtide.trace import Trace
from lowtide.units import format_bytes, format_seconds

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


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"{name:<{width}}  {value}")


def step_time(seconds: float, chain: Chain) -> str:
    """The time of a step, and how it compares with plain training where that takes any."""
    plain = chain.compute_seconds
    return f"{format_seconds(seconds)} a step" + (f" ({seconds / plain:.3f} x store-all)" if plain else "")


def moved(trace: Trace) -> str:
    """What a schedule moves between device and host, and how long it waits for that."""
    copies = f"{format_bytes(trace.moved_bytes)} in {len(trace.copies)} copies"
    return f"{copies}, compute idle {format_seconds(trace.idle_seconds)}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> None:
    """Print a table that fits the terminal, 80 columns where the output is none.

    Args:
        columns: their headings.
        rows: a cell each; rich's markup is not interpreted.
        num_left: how many columns, from the first, are aligned to the left; the others to the right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(columns):
        table.add_column(Text(heading), justify="left" if index < num_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())
