"""Results of the rotor paper's experiments: headline numbers, a table, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import bytes_cell, heading, panels, seconds_cell, table

from papers import execution
from papers.execution import errors, mean, networks_of, percent

# Real peaks of schedules within the same budget differ by what the allocator rounds: so much is the same memory.
SAME_MEMORY = 0.005

# Printed in section 5 of the paper.
PAPER = {"gain_over_best_segments": 0.172, "time_error": 0.078, "peak_error": 0.037}


@dataclass
class Point(execution.Point):
    """One schedule of one network, run: plain training, `segments`, `revolve` or `rotor`."""

    num_segments: int | None = None


def gain(points: Sequence[Point]) -> float | None:
    """By how much rotor is faster than the fastest `segments` of a network, at equal measured memory.

    The paper's figure: "the ratio between the highest throughput obtained by sequential and the throughput achieved by
    optimal with the corresponding memory usage".
    """
    measured = [point for point in points if point.is_measured]
    segments = [point for point in measured if point.strategy == "segments"]
    if not segments:
        return None
    best = max(segments, key=lambda point: point.throughput)
    return gain_over(best, measured)


def gain_over(segments: Point, points: Sequence[Point]) -> float | None:
    """By how much the fastest rotor that fits in the memory of one `segments` is faster; None: none was run."""
    assert segments.peak_bytes is not None
    limit = segments.peak_bytes * (1 + SAME_MEMORY)
    fitting = [
        point
        for point in points
        if point.strategy == "rotor" and point.is_measured and (point.peak_bytes or 0) <= limit
    ]
    if not fitting:
        return None
    return max(point.throughput for point in fitting) / segments.throughput - 1


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """The headline: gains over `segments`, and how far predictions were off."""
    gains = {name: gain([p for p in points if p.network == name]) for name in networks_of(points)}
    known = [value for value in gains.values() if value is not None]
    every = [
        value
        for segments in points
        if segments.strategy == "segments" and segments.is_measured
        for value in [gain_over(segments, [p for p in points if p.network == segments.network])]
        if value is not None
    ]
    return {
        "paper": PAPER,
        "gains": gains,
        "gain_over_best_segments": mean(known),
        "gain_over_every_segments": mean(every),
        **errors(points),
    }


def report_lines(facts: dict[str, Any], points: Sequence[Point], notes: Sequence[str]) -> list[str]:
    """The headline beside the paper's, and every point."""
    found = summary(points)
    lines = ["# Optimal checkpointing for heterogeneous chains, executed", "", heading(facts), ""]
    rows = [
        [
            "mean gain in throughput of `rotor` over the fastest `segments`, at no more memory",
            "gain_over_best_segments",
        ],
        ["the same over every number of segments", "gain_over_every_segments"],
        ["mean error of predicted time", "time_error"],
        ["mean error of predicted peak", "peak_error"],
    ]
    cells = [[text, percent(PAPER.get(key)), percent(found[key])] for text, key in rows]
    lines += [*table(["", "paper (V100)", "here"], cells), ""]
    lines += [f"{found['num_schedules']} schedules of {len(networks_of(points))} networks were run.", ""]
    for name in networks_of(points):
        own = [point for point in points if point.network == name]
        lines += [f"## {name}", "", f"Gain over the fastest `segments`: {percent(found['gains'][name])}.", ""]
        lines += [*_point_lines(own), ""]
    return [*lines, *(f"- {note}" for note in notes)]


def _point_lines(points: Sequence[Point]) -> list[str]:
    def cells(point: Point) -> list[str]:
        count = "" if point.num_segments is None else f" {point.num_segments}"
        return [
            f"{point.strategy}{count}",
            bytes_cell(point.budget_bytes) if point.strategy in ("rotor", "revolve") else "",
            f"{point.throughput:.1f}" if point.is_measured else "–",
            seconds_cell(point.seconds),
            seconds_cell(point.predicted_seconds),
            bytes_cell(point.peak_bytes),
            bytes_cell(point.predicted_peak_bytes),
            point.note,
        ]

    columns = ["strategy", "budget", "images/s", "step", "predicted", "peak", "predicted", "note"]
    return table(columns, [cells(point) for point in points])


_STYLES = {"plain": ("C3", "s"), "segments": ("C4", "x"), "revolve": ("C2", "o"), "rotor": ("C0", "^")}


def draw(plt: Any, facts: dict[str, Any], points: Sequence[Point]) -> Any:
    """Throughput against measured peak, a panel a network, as in the paper's figures 3 to 13."""
    names = [name for name in networks_of(points) if any(p.network == name and p.is_measured for p in points)]
    if not names:
        return None
    figure, panel_of = panels(plt, names, columns=3, size=(4.6, 3.6))
    for name, panel in panel_of.items():
        for strategy, (colour, marker) in _STYLES.items():
            own = [p for p in points if p.network == name and p.strategy == strategy and p.is_measured]
            found = sorted((p.peak_bytes / 2**30, p.throughput) for p in own if p.peak_bytes)
            if found:
                line = "-" if strategy in ("rotor", "revolve") else ""
                panel.plot(*zip(*found, strict=True), marker + line, color=colour, label=strategy, markersize=5)
        panel.set(title=name, xlabel="measured peak (GiB)", ylabel="images per second")
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(f"{facts['machine']}, torch {facts['torch']}", fontsize=10)
    return figure
