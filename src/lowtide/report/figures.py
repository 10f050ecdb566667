"""Figures for papers, with matplotlib: the frontier and the memory curve, as PNG, SVG or PDF.

matplotlib's global state is not touched: figures are made by hand and settings hold only while one is drawn.
"""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError
from lowtide.report.palette import LAYER_TITLES, LAYERS, LIGHT
from lowtide.report.survey import STORE_ALL, Survey
from lowtide.report.timeline import Layers, spans
from lowtide.trace import Trace
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")

# The width of a page's text in the usual two-column styles, and a column of it, in inches.
_PAGE_INCHES = 7.0
_COLUMN_INCHES = 3.4
_HEIGHT_INCHES = 2.7
_DOTS_PER_INCH = 200

# More steps than a printed page can resolve: a longer list is cut into this many pieces, each as high as its highest.
_LARGEST_NUM_STEPS = 2000

# Text stays text in SVG and PDF; the salt makes two runs write the same file.
_SETTINGS: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 6.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "lowtide",
    "pdf.fonttype": 42,
}

# Beside its colour each strategy has a mark of its own: lines stay apart in print without colour.
_MARKERS = "osD^vP*X<>hdp8"


def save_figure(
    path: str | os.PathLike[str],
    *,
    survey: Survey | None = None,
    trace: Trace | None = None,
    memory_budget: int | None = None,
    over: str = "operations",
) -> None:
    """Draw the frontier of a survey, the memory of a trace, or both side by side, and write the file.

    Args:
        path: its ending says the format: `.png`, `.svg` or `.pdf`.
        survey: what to draw the frontier of.
        trace: what to draw the memory of.
        memory_budget: the bytes that are allowed: a line in both.
        over: `"operations"` or `"time"`: what the memory is drawn over.

    Raises:
        LowtideError: for another ending, where there is nothing to draw, where the file cannot be written, and where
            matplotlib is not installed.
    """
    kind = figure_format(path)
    matplotlib = required_matplotlib()
    if survey is None and trace is None:
        raise LowtideError("there is nothing to draw: give a survey for the frontier, a trace for the memory, or both")
    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(survey, trace, memory_budget, over)
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else {}
        try:
            figure.savefig(path, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
        except OSError as error:
            why = error.strerror or error
            raise LowtideError(f"{os.fspath(path)}: cannot be written: {why}; name another file") from None


def required_matplotlib() -> Any:
    """The module; where it is not installed, an error that says how to install it."""
    try:
        return importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise LowtideError("figures need matplotlib, which is not installed; pip install 'lowtide[plot]'") from None


def figure_format(path: str | os.PathLike[str]) -> str:
    """One of `FORMATS`, by the ending of a file's name; another ending is refused."""
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise LowtideError(f"{os.fspath(path)}: a figure's name ends in {', '.join('.' + name for name in FORMATS)}")
    return kind


def _figure(survey: Survey | None, trace: Trace | None, memory_budget: int | None, over: str) -> Figure:
    from matplotlib.figure import Figure

    both = survey is not None and trace is not None
    figure = Figure(figsize=(_PAGE_INCHES if both else 1.4 * _COLUMN_INCHES, _HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots(1, 2 if both else 1, squeeze=False)[0]
    if survey is not None:
        draw_frontier(axes[0], survey, memory_budget=memory_budget)
    if trace is not None:
        draw_memory(axes[-1], trace, memory_budget=memory_budget, over=over)
    return figure


def draw_frontier(axes: Axes, survey: Survey, *, memory_budget: int | None = None) -> None:
    """Draw step time against memory, a line for each strategy, on matplotlib axes of the caller's."""
    plain, most = survey.store_all.seconds, survey.store_all.peak_bytes
    unit, name = _unit(most)
    right = 1.05 * max(most, memory_budget or 0) / unit
    for index, curve in enumerate(curve for curve in survey.curves if curve.strategy != STORE_ALL):
        if not curve.points:
            continue
        memory = [point.peak_bytes / unit for point in curve.points]
        times = [point.seconds / plain if plain else 0.0 for point in curve.points]
        axes.plot(
            [*memory, right],
            [*times, times[-1]],
            drawstyle="steps-post",
            color=_strategy_colour(index),
            linewidth=0.9,
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=2.6,
            markevery=range(len(memory)),
            label=curve.strategy,
        )
    axes.plot([most / unit], [1.0], "o", color=LIGHT.ink, markersize=4, label=f"store-all, {format_seconds(plain)}")
    axes.axvline(survey.minimum_bytes / unit, color=LIGHT.layers["base"], linewidth=0.8, linestyle=":")
    if memory_budget is not None:
        axes.axvline(memory_budget / unit, color=LIGHT.ink, linewidth=0.8, linestyle="--", label="budget")
    axes.set_xlim(right=right)
    axes.set_xlabel(f"memory ({name})")
    axes.set_ylabel("step time / plain training")
    axes.legend(loc="upper right")


def draw_memory(axes: Axes, trace: Trace, *, memory_budget: int | None = None, over: str = "operations") -> None:
    """Draw the memory of a schedule as stacked areas, on matplotlib axes of the caller's."""
    if over not in ("operations", "time"):
        raise LowtideError(f"memory is drawn over 'operations' or 'time', not over {over!r}")
    edges, stacks = over_operations(trace) if over == "operations" else over_time(trace)
    time_name = "s"
    if over == "time" and trace.seconds < 1:
        edges, time_name = [1e3 * edge for edge in edges], "ms"
    top = max(trace.peak_bytes, memory_budget or 0)
    unit, name = _unit(top)
    below = [0.0] * len(stacks)
    for layer, title in enumerate(LAYERS):
        if not any(stack[layer] for stack in stacks):
            continue
        above = [low + stack[layer] / unit for low, stack in zip(below, stacks, strict=True)]
        axes.stairs(above, edges, baseline=below, fill=True, color=LIGHT.layers[title], label=LAYER_TITLES[title])
        below = above
    if memory_budget is not None:
        axes.axhline(memory_budget / unit, color=LIGHT.ink, linewidth=0.8, linestyle="--")
    _mark_peak(axes, trace.peak_bytes, edges, stacks, top=top, unit=unit)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.2 * top / unit)
    axes.set_xlabel("operation" if over == "operations" else f"time ({time_name})")
    axes.set_ylabel(f"memory ({name})")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, columnspacing=1.0, handlelength=1.0)


def _mark_peak(axes: Axes, peak_bytes: int, edges: list[float], stacks: list[Layers], *, top: int, unit: int) -> None:
    """A mark on the first bar that reaches the peak, its label above everything that is drawn."""
    index = max(range(len(stacks)), key=lambda index: sum(stacks[index]))
    middle = (edges[index] + edges[index + 1]) / 2
    share = middle / edges[-1] if edges[-1] else 0.5
    axes.annotate(
        f"peak {format_bytes(peak_bytes)}",
        (middle, sum(stacks[index]) / unit),
        (middle, 1.06 * top / unit),
        arrowprops={"arrowstyle": "-|>", "color": LIGHT.ink, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0},
        ha="left" if share < 0.2 else "right" if share > 0.8 else "center",
        va="bottom",
        fontsize=6.5,
    )


def over_operations(trace: Trace) -> tuple[list[float], list[Layers]]:
    """The edges and the layers of the bars of memory over the operation list."""
    stacks = [span.during for span in spans(trace)]
    pieces = min(len(stacks), _LARGEST_NUM_STEPS)
    cuts = [len(stacks) * piece // pieces for piece in range(pieces + 1)]
    return [float(cut) for cut in cuts], [max(stacks[begin:end], key=sum) for begin, end in itertools.pairwise(cuts)]


def over_time(trace: Trace) -> tuple[list[float], list[Layers]]:
    """The edges and the layers of the bars of memory over time; what takes no time is not seen."""
    edges, stacks = [0.0], []
    for span in spans(trace):
        for begin, end, layers in span.pieces:
            if end > begin:
                edges.append(end)
                stacks.append(layers)
    return edges, stacks


def _unit(num_bytes: int) -> tuple[int, str]:
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return 1024**power, name
    return 1, "bytes"


def _strategy_colour(index: int) -> str:
    colours = [LIGHT.layers[name] for name in ("saved", "recomputed", "gradients", "in flight", "activations")]
    return [*colours, LIGHT.layers["transient"], LIGHT.layers["weights"]][index % 7]
