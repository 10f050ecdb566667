"""Results of the pofo paper's executed schedules: headline numbers, tables, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import bytes_cell, heading, panels, seconds_cell, table

from papers import execution
from papers.execution import errors, networks_of, percent
from papers.pofo.conclusions import CLAIMED_OVERHEAD
from papers.pofo.drawing import HIGHEST, STYLES
from papers.pofo.experiment import ALGORITHMS

# Printed in the paper's abstract: "overhead below 20 %", four to six times less memory, "a third".
PAPER = {"removed": 1 / 3, "factors": [4, 6]}


@dataclass
class Point(execution.Point):
    """One schedule of one network, run: plain training, or an algorithm's within the budget of a memory ratio."""

    alpha: float | None = None
    bandwidth: int | None = None
    """Of the link to the host, bytes per second each way."""
    fixed_bytes: int = 0
    """What is on the device throughout: weights, and what is outside the stages."""
    plain_seconds: float | None = None
    """Of plain training, measured in the same run."""
    plain_peak_bytes: int | None = None
    predicted_plain_seconds: float | None = None
    moved_bytes: int | None = None
    solve_seconds: float | None = None
    same_as: str = ""
    """The point whose schedule is equal: that one was run."""

    @property
    def label(self) -> str:
        """The algorithm and the memory ratio."""
        return self.strategy if self.alpha is None else f"{self.strategy}, α {self.alpha:g}"

    @property
    def overhead(self) -> float | None:
        """The measured time beyond plain training, as a share of it."""
        return _over(self.seconds, self.plain_seconds)

    @property
    def predicted_overhead(self) -> float | None:
        """The same as it was predicted."""
        return _over(self.predicted_seconds, self.predicted_plain_seconds)

    @property
    def excess(self) -> float | None:
        """By how much the measured peak is above the budget, as a share of it; negative: below it."""
        return _over(self.peak_bytes, self.budget_bytes)

    @property
    def activation_factor(self) -> float | None:
        """How many times less memory activations took than in plain training, by the measured peaks."""
        if self.peak_bytes is None or self.plain_peak_bytes is None or self.peak_bytes <= self.fixed_bytes:
            return None
        return (self.plain_peak_bytes - self.fixed_bytes) / (self.peak_bytes - self.fixed_bytes)


def _over(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference - 1


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """The headline: how far predictions were off, whether budgets were kept, and the abstract's claims."""
    found = [name for name in ALGORITHMS if any(p.strategy == name for p in points)]
    ratios = sorted({p.alpha for p in points if p.alpha is not None})
    return {
        "paper": PAPER,
        **errors(points),
        "num_different": sum(p.is_measured and p.alpha is not None and not p.same_as for p in points),
        "by_algorithm": {
            name: {**errors(own), "within_budget": within_budget(own)}
            for name in found
            for own in [[p for p in points if p.strategy == name]]
        },
        "within_budget": within_budget(points),
        "removed": {f"{alpha:g}": removed([p for p in points if p.alpha == alpha]) for alpha in ratios},
        "reductions": {name: reduction([p for p in points if p.network == name]) for name in networks_of(points)},
    }


def within_budget(points: Sequence[Point]) -> dict[str, Any]:
    """How many measured peaks are within their budgets, and the largest excess of one that is not."""
    known = [p for p in points if p.excess is not None]
    above = [p for p in known if (p.excess or 0.0) > 0]
    worst = max(above, key=lambda p: p.excess or 0.0, default=None)
    return {
        "num_within": len(known) - len(above),
        "num_schedules": len(known),
        "largest_excess": worst and worst.excess,
        "largest_excess_bytes": worst and (worst.peak_bytes or 0) - (worst.budget_bytes or 0),
        "largest_excess_at": worst and f"{worst.network}: {worst.label}",
    }


def removed(points: Sequence[Point]) -> dict[str, Any]:
    """The share of the overhead of recomputation alone that pofo does without, at one memory ratio.

    Of all networks together, overheads are summed, as in the simulated experiment; only networks where both were run.
    """
    both = {
        name: pair
        for name in networks_of(points)
        for pair in [
            [p for s in ("rotor", "pofo") for p in points if (p.network, p.strategy) == (name, s) and p.is_measured]
        ]
        if len(pair) == 2
    }
    return {
        "measured": _removed([[p.overhead for p in pair] for pair in both.values()]),
        "predicted": _removed([[p.predicted_overhead for p in pair] for pair in both.values()]),
        "networks": {
            name: {
                "measured": _removed([[p.overhead for p in pair]]),
                "predicted": _removed([[p.predicted_overhead for p in pair]]),
            }
            for name, pair in both.items()
        },
    }


def _removed(pairs: Sequence[Sequence[float | None]]) -> float | None:
    """From overheads of rotor and pofo; None where rotor has none to remove."""
    known = [(rotor, pofo) for rotor, pofo in pairs if rotor is not None and pofo is not None]
    rotor, pofo = (sum(values) for values in zip(*known, strict=True)) if known else (0.0, 0.0)
    return 1 - pofo / rotor if rotor > 0 else None


def reduction(points: Sequence[Point]) -> dict[str, Any] | None:
    """The schedule of pofo with the least memory for activations whose measured overhead is below the paper's 20 %."""
    cheap = [
        p
        for p in points
        if p.strategy == "pofo" and p.activation_factor and p.overhead is not None and p.overhead < CLAIMED_OVERHEAD
    ]
    if not cheap:
        return None
    best = max(cheap, key=lambda p: p.activation_factor or 0.0)
    return {"factor": best.activation_factor, "alpha": best.alpha, "overhead": best.overhead}


def report_lines(facts: dict[str, Any], points: Sequence[Point], notes: Sequence[str]) -> list[str]:
    """The headline beside the paper's, and every point."""
    found = summary(points)
    links = sorted({p.bandwidth / 1e9 for p in points if p.bandwidth})
    lines = ["# Rematerialization and offloading combined, executed", "", heading(facts), ""]
    if links:
        lines += [f"The link to the host: {' and '.join(f'{link:.1f}' for link in links)} GB/s each way.", ""]
    lines += [
        f"{found['num_different']} different schedules were run, for {found['num_schedules']} points of "
        f"{len(networks_of(points))} networks.",
        "",
        *_accuracy_lines(found),
        "",
        f"The share of the overhead of recomputation alone (`rotor`) that `pofo` removes; the paper: "
        f"{PAPER['removed']:.0%}.",
        "",
        *_removed_lines(found["removed"]),
        "",
        f"How many times less memory `pofo` takes for activations than plain training, where its measured overhead is "
        f"below {CLAIMED_OVERHEAD:.0%} (the most of the memory ratios that were run); the paper: 4 to 6.",
        "",
        *_reduction_lines(found["reductions"]),
        "",
    ]
    for name in networks_of(points):
        lines += [f"## {name}", "", *_point_lines([p for p in points if p.network == name]), ""]
    return [*lines, *(f"- {note}" for note in notes)]


def _accuracy_lines(found: dict[str, Any]) -> list[str]:
    def cells(name: str, own: dict[str, Any]) -> list[str]:
        kept = own["within_budget"]
        share, num_bytes = kept["largest_excess"], kept["largest_excess_bytes"]
        return [
            name,
            str(own["num_schedules"]),
            percent(own["time_error"]),
            percent(own["peak_error"]),
            f"{kept['num_within']} of {kept['num_schedules']}",
            "" if share is None else f"{share:.2%} ({bytes_cell(num_bytes)})",
        ]

    columns = ["", "points", "mean error of time", "of peak", "peak within budget", "most above it"]
    rows = [cells(f"`{name}`", own) for name, own in found["by_algorithm"].items()]
    return table(columns, [*rows, cells("all", found)])


def _removed_lines(found: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(name for own in found.values() for name in own["networks"]))
    columns = [cell for alpha in found for cell in (f"α {alpha}: measured", "predicted")]

    def cells(name: str, of: list[dict[str, Any]]) -> list[str]:
        return [name, *(percent(own.get(key)) for own in of for key in ("measured", "predicted"))]

    rows = [cells(name, [own["networks"].get(name, {}) for own in found.values()]) for name in names]
    return table(["", *columns], [*rows, cells("all", list(found.values()))])


def _reduction_lines(found: dict[str, Any]) -> list[str]:
    rows = [
        [name, "–", "–", "–"]
        if own is None
        else [name, f"{own['factor']:.1f}", f"{own['alpha']:g}", percent(own["overhead"])]
        for name, own in found.items()
    ]
    return table(["", "times less", "at α", "overhead"], rows)


def _point_lines(points: Sequence[Point]) -> list[str]:
    def cells(point: Point) -> list[str]:
        excess = "" if point.excess is None or point.excess <= 0 else f"{point.excess:+.2%}"
        return [
            point.strategy,
            "" if point.alpha is None else f"{point.alpha:g}",
            bytes_cell(point.budget_bytes) if point.budget_bytes is not None else "",
            seconds_cell(point.seconds),
            seconds_cell(point.predicted_seconds),
            "" if point.alpha is None else percent(point.overhead),
            "" if point.alpha is None else percent(point.predicted_overhead),
            bytes_cell(point.peak_bytes),
            bytes_cell(point.predicted_peak_bytes),
            excess,
            bytes_cell(point.moved_bytes) if point.moved_bytes is not None else "",
            point.note or (point.same_as and f"same schedule as {point.same_as}"),
        ]

    columns = ["", "α", "budget", "step", "predicted", "overhead", "predicted", "peak", "predicted", "above budget"]
    return table([*columns, "moved", "note"], [cells(point) for point in points])


def draw(plt: Any, facts: dict[str, Any], points: Sequence[Point]) -> Any:
    """Overhead over plain training against memory, a panel a network: measured points, predicted lines."""
    shown = [p for p in points if p.alpha is not None and p.overhead is not None]
    names = networks_of(shown)
    if not names:
        return None
    figure, panel_of = panels(plt, names, columns=3, size=(4.6, 3.6))
    for name, panel in panel_of.items():
        for algorithm in ALGORITHMS:
            own = [p for p in shown if (p.network, p.strategy) == (name, algorithm)]
            _draw_algorithm(panel, algorithm, own)
        highest = _highest([p for p in shown if p.network == name])
        hidden = any((p.overhead or 0.0) > highest for p in shown if p.network == name)
        panel.set_ylim(-2, 100 * highest)
        panel.set(xlabel="peak (GiB)", ylabel="overhead over plain training (%)")
        panel.set_title(f"{name}{f' (some above {highest:.0%})' if hidden else ''}", fontsize=10)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(f"{facts['machine']}, torch {facts['torch']}\nmeasured: points; predicted: lines", fontsize=10)
    return figure


def _highest(points: Sequence[Point]) -> float:
    """The overhead at a panel's upper edge: offloading alone may be above it, where it would hide the rest."""
    known = [p.overhead for p in points if p.strategy != "offload" and p.overhead is not None]
    return min(HIGHEST, max(0.1, 1.3 * max(known, default=0.0)))


def _draw_algorithm(panel: Any, algorithm: str, points: Sequence[Point]) -> None:
    colour, marker = STYLES[algorithm][:2], STYLES[algorithm][-1]
    measured = [(p.peak_bytes / 2**30, 100 * p.overhead) for p in points if p.peak_bytes and p.overhead is not None]
    predicted = sorted(
        (p.predicted_peak_bytes / 2**30, 100 * p.predicted_overhead)
        for p in points
        if p.predicted_peak_bytes and p.predicted_overhead is not None
    )
    if measured:
        panel.plot(*zip(*measured, strict=True), marker, color=colour, label=algorithm, markersize=5)
    if predicted:
        panel.plot(*zip(*predicted, strict=True), "-", color=colour, linewidth=1)
