"""A plan in the terminal: a few lines of figures and a compact chart of memory over time.

In colour on a terminal, plain text where the output is piped, and plain ASCII where it cannot carry more.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.chain import Chain
from lowtide.progress import random_numbers_kept
from lowtide.report.timeline import PHASES, spans
from lowtide.solve import Solution
from lowtide.trace import CATEGORIES, Trace
from lowtide.units import format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.text import Text

_NUM_ROWS = 8
_LABEL_WIDTH = 11
_PIPED_WIDTH = 80
_LARGEST_WIDTH = 100
# A budget further above the peak than this would only squeeze the curve: it is named and not drawn.
_LARGEST_HEADROOM = 1.6

# The terminal's own colours follow its theme, light or dark.
_STYLES = {"forward": "blue", "recompute": "yellow", "backward": "green", "copy": "magenta", None: "bright_black"}


@dataclass(frozen=True, slots=True)
class _Glyphs:
    """What a chart is drawn with. `levels` are the fillings of one cell, from empty to full."""

    levels: str
    axis: str
    tick: str
    corner: str
    floor: str
    budget: str
    copy: str
    idle: str
    dot: str


_UNICODE = _Glyphs(" ▁▂▃▄▅▆▇█", "│", "┤", "└", "─", "┄", "━", "·", "·")
_ASCII = _Glyphs("  ...::##", "|", "+", "+", "-", "-", "=", ".", "|")


def plan_text(
    chain: Chain,
    trace: Trace,
    *,
    strategy: str = "",
    memory_budget: int | None = None,
    bandwidth: int | None = None,
    width: int | None = None,
    colour: bool | None = None,
) -> str:
    """What a schedule does, for people: verdict, costs, and memory and lanes over time.

    Args:
        chain: the network.
        trace: what the simulator said of the schedule.
        strategy: who made it.
        memory_budget: the bytes that were allowed, where known.
        bandwidth: the bytes per second of the copies, where there are any.
        width: columns; None: the terminal's, or 80 where the output is piped.
        colour: whether to colour; None: only on a terminal, and not where `NO_COLOR` is set.

    Returns:
        Lines of text, without a newline at the end.

    Example:
        >>> from lowtide import Backward, Chain, Forward, Schedule, Stage, simulate
        >>> chain = Chain("one", [Stage("a", 1.0, 2.0, output_bytes=4, saved_bytes=6)])
        >>> trace = simulate(chain, Schedule("by hand", [Forward(1, "all"), Backward(1)]))
        >>> print(plan_text(chain, trace, memory_budget=10).splitlines()[1])
        fits: peak 10 B of 10 B (100 %)
    """
    heading = _heading(chain, trace, strategy, memory_budget, bandwidth)
    lines = [part for line in heading for part in _wrapped(line, width or _line_width())]
    lines += [_line(), *_chart(trace, memory_budget, _glyphs(), _num_columns(width))]
    return _joined(lines, colour)


def solution_text(solution: Solution, *, width: int | None = None, colour: bool | None = None) -> str:
    """`plan_text` of a solution."""
    return plan_text(
        solution.chain,
        solution.trace,
        strategy=solution.strategy,
        memory_budget=solution.memory_budget,
        bandwidth=solution.bandwidth,
        width=width,
        colour=colour,
    )


def chart_text(
    trace: Trace, *, memory_budget: int | None = None, width: int | None = None, colour: bool | None = None
) -> str:
    """The chart of `plan_text` by itself: memory over time, and beneath it what compute and copies do."""
    with random_numbers_kept():
        return _joined(_chart(trace, memory_budget, _glyphs(), _num_columns(width)), colour)


def _line_width() -> int:
    """The columns of a line: the terminal's, as far as a line is still read easily."""
    return min(shutil.get_terminal_size().columns, _LARGEST_WIDTH) if sys.stdout.isatty() else _PIPED_WIDTH


def _num_columns(width: int | None) -> int:
    """The columns of the drawing in lines of `width`."""
    return max(16, (width or _line_width()) - _LABEL_WIDTH - 1)


def _wrapped(line: Text, width: int) -> Iterator[Text]:
    """A line of prose in as many lines as it takes, indented from the second on."""
    from rich.console import Console
    from rich.text import Text

    indent = "  "
    first, *others = line.wrap(Console(width=width), width - len(indent))
    yield first
    for other in others:
        yield Text.assemble(indent, other)


def _joined(lines: Sequence[Text], colour: bool | None) -> str:
    if colour is None:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return "\n".join(_rendered(line, colour) for line in lines)


def _heading(chain: Chain, trace: Trace, strategy: str, memory_budget: int | None, bandwidth: int | None) -> list[Text]:
    peak = f"peak {format_bytes(trace.peak_bytes)}"
    if memory_budget is None:
        verdict = _line((peak, "bold"))
    else:
        fits = trace.peak_bytes <= memory_budget
        share = 100 * trace.peak_bytes / memory_budget if memory_budget else 0.0
        verdict = _line(
            ("fits" if fits else "does not fit", "bold green" if fits else "bold red"),
            (f": {peak} of {format_bytes(memory_budget)} ({share:.0f} %)", ""),
        )
    plain = chain.compute_seconds + trace.update_seconds
    cost = f"step {format_seconds(trace.seconds)}"
    if plain:
        cost += f", {100 * (trace.seconds / plain - 1):.1f} % above plain training ({format_seconds(plain)})"
    spent = [f"{trace.num_recomputed} of {_num_forwards(trace)} forwards recomputed"]
    if trace.copies:
        rate = f" at {format_bandwidth(bandwidth)}" if bandwidth else ""
        spent.append(f"{format_bytes(trace.moved_bytes)} moved{rate}")
        spent.append(f"{format_seconds(trace.idle_seconds)} waiting for it")
    name = "".join(letter if letter.isprintable() else "?" for letter in chain.name)  # a file may hold escape codes
    title = _line((name, "bold"), (f", {chain.num_stages} stages" + (f", {strategy}" if strategy else ""), ""))
    return [title, verdict, _line((cost, "")), _line((", ".join(spent), ""))]


def _num_forwards(trace: Trace) -> int:
    return sum(span.phase in ("forward", "recompute") for span in spans(trace))


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the chart: what compute does most of the time, and the most bytes."""

    phase: str | None
    peak_bytes: int
    to_host: bool
    to_device: bool


def _columns(trace: Trace, num_columns: int) -> list[_Column]:
    """The trace cut into equal pieces of time."""
    unit = trace.seconds / num_columns or 1.0
    peaks = [0] * num_columns
    shares: list[dict[str | None, float]] = [{} for _ in range(num_columns)]
    copied = {"to host": [False] * num_columns, "to device": [False] * num_columns}

    def pieces(begin: float, end: float) -> list[tuple[int, float]]:
        first = min(num_columns - 1, max(0, int(begin / unit)))
        last = min(num_columns - 1, max(first, int(end / unit)))
        return [(i, max(0.0, min(end, (i + 1) * unit) - max(begin, i * unit))) for i in range(first, last + 1)]

    for span in spans(trace):
        for begin, end, layers in span.pieces:
            for i, overlap in pieces(begin, end):
                if overlap > 0 or begin == end:
                    peaks[i] = max(peaks[i], sum(layers))
        for begin, end, phase in ((span.begin, span.finish, None), (span.start, span.end, span.phase)):
            for i, overlap in pieces(begin, end):
                shares[i][phase] = shares[i].get(phase, 0.0) + overlap
                # The running piece lies inside the whole: what is not waiting is taken off again.
                if phase is not None:
                    shares[i][None] -= overlap
    for copy in trace.copies:
        for i, overlap in pieces(copy.start_seconds, copy.end_seconds):
            copied[copy.direction][i] |= overlap > 0
    return [
        _Column(max(shares[i], key=lambda phase: shares[i][phase], default=None), peaks[i], host, device)
        for i, (host, device) in enumerate(zip(copied["to host"], copied["to device"], strict=True))
    ]


def _chart(trace: Trace, memory_budget: int | None, glyphs: _Glyphs, num_columns: int) -> list[Text]:
    if not trace.seconds or not trace.steps:
        return [_line(("no times are known: nothing to draw over time", ""))]
    columns = _columns(trace, num_columns)
    drawn_budget = memory_budget
    if memory_budget is not None and memory_budget > _LARGEST_HEADROOM * trace.peak_bytes:
        drawn_budget = None
    top = max(trace.peak_bytes, drawn_budget or 0, 1)
    base = trace.steps[0].stored_by_category[CATEGORIES.index("base")]
    budget_row = None if drawn_budget is None else min(_NUM_ROWS - 1, int(drawn_budget / top * _NUM_ROWS))
    lines = []
    for row in reversed(range(_NUM_ROWS)):
        label = _label(top * (row + 1) // _NUM_ROWS) if row in (_NUM_ROWS - 1, _NUM_ROWS // 2 - 1) else ""
        cells = [(f"{label:>{_LABEL_WIDTH - 1}}{glyphs.tick if label else glyphs.axis}", "dim")]
        is_base = (row + 1) * top / _NUM_ROWS <= base
        for column in columns:
            eighths = round(8 * (column.peak_bytes / top * _NUM_ROWS - row))
            filled = glyphs.levels[max(0, min(8, eighths))]
            if filled == " ":
                cells.append((glyphs.budget, "red") if row == budget_row else (" ", ""))
            else:
                cells.append((filled, _STYLES[None if is_base else column.phase]))
        lines.append(_line(*cells))
    lines.append(_line((" " * (_LABEL_WIDTH - 1) + glyphs.corner + glyphs.floor * num_columns, "dim")))
    return [*lines, *_lanes(columns, glyphs), _legend(trace, drawn_budget is not None, glyphs)]


def _label(num_bytes: int) -> str:
    """Bytes beside the axis, with a digit less where they would be wider than its column (`1008.78 KiB`)."""
    label = format_bytes(num_bytes)
    if len(label) < _LABEL_WIDTH:
        return label
    number, unit = label.split()
    return f"{float(number):.1f} {unit}"


def _lanes(columns: Sequence[_Column], glyphs: _Glyphs) -> list[Text]:
    def lane(title: str, cells: list[tuple[str, str]]) -> Text:
        return _line((f"{title:>{_LABEL_WIDTH - 1}} ", "dim"), *cells)

    letters = {phase: phase[0] for phase in PHASES}
    compute = [(letters[c.phase] if c.phase else glyphs.idle, _STYLES[c.phase]) for c in columns]
    lanes = [lane("compute", compute)]
    if any(c.to_host or c.to_device for c in columns):
        lanes.append(lane("to host", [(glyphs.copy if c.to_host else " ", _STYLES["copy"]) for c in columns]))
        lanes.append(lane("to device", [(glyphs.copy if c.to_device else " ", _STYLES["copy"]) for c in columns]))
    return lanes


def _legend(trace: Trace, has_budget: bool, glyphs: _Glyphs) -> Text:
    parts: list[tuple[str, str]] = [(" " * _LABEL_WIDTH, "")]
    present = {span.phase for span in spans(trace)}
    for phase in PHASES:
        if phase in present:
            parts += [(phase[0], _STYLES[phase]), (f" {phase}   ", "dim")]
    if trace.idle_seconds:
        parts += [(glyphs.idle, _STYLES[None]), (" waiting   ", "dim")]
    if has_budget:
        parts += [(glyphs.budget, "red"), (" budget", "dim")]
    return _line(*parts)


def _glyphs() -> _Glyphs:
    """Block characters where standard output can carry them."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "▁┄━".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _UNICODE


def _line(*parts: tuple[str, str]) -> Text:
    """A line of (text, style) parts; neighbours of one style become one run."""
    from rich.text import Text

    merged: list[tuple[str, str]] = []
    for style, run in itertools.groupby(parts, key=lambda part: part[1]):
        merged.append(("".join(text for text, _ in run), style))
    return Text.assemble(*merged)


def _rendered(line: Text, colour: bool) -> str:
    if not colour:
        return line.plain.rstrip()
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=10_000, legacy_windows=False).print(line, end="", soft_wrap=True)
    return stream.getvalue()
