"""What `benchmarks.peers` claims of its rows, as a table and as a figure.

The claim: at every peak memory that a peer reaches, lowtide's step is no slower, and at the peer's step time lowtide's
peak is lower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import bytes_cell, heading, panels, seconds_cell, table

# Medians of equal runs differ by so much: less than this is no difference.
NOISE = 0.01

# So do their peaks: of 24 ways that were measured in several runs on an H200, 22 were up to 0.16 % apart (the others
# 8 and 9 %, which is more than noise). Presumably the allocator's, for which plans leave 4 MiB of their budgets.
NOISE_OF_PEAKS = 0.002


@dataclass
class Row:
    """One way to train one network."""

    network: str
    way: str
    family: str
    """`"peer"`, `"lowtide"`, `"lowtide compiled"` or `"lowtide offloading"`."""
    compiled: bool = False
    budget_bytes: int | None = None
    seconds: float | None = None
    spread_seconds: float | None = None
    peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    set_up_seconds: float | None = None
    """Compiling, or measuring, solving and rehearsing."""
    note: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether there is a time and a peak."""
        return self.seconds is not None and self.peak_bytes is not None

    @property
    def point(self) -> tuple[float, float]:
        """Where it is drawn: its peak in GiB, its time in milliseconds."""
        return (self.peak_bytes or 0) / 2**30, (self.seconds or 0) * 1e3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The claim for one row of a peer."""

    row: Row
    at_its_memory: Row | None
    """lowtide's fastest row with no more memory, but for noise; None: lowtide has none."""
    at_its_time: Row | None
    """lowtide's leanest row that is no slower; None: lowtide has none."""

    @property
    def slower(self) -> float | None:
        """By which share lowtide's step is slower at the peer's memory; negative: faster."""
        return None if self.at_its_memory is None else _ratio(self.at_its_memory.seconds, self.row.seconds) - 1

    @property
    def larger(self) -> float | None:
        """By which share lowtide's peak is larger at the peer's time; negative: smaller."""
        return None if self.at_its_time is None else _ratio(self.at_its_time.peak_bytes, self.row.peak_bytes) - 1

    @property
    def holds_at_its_memory(self) -> bool:
        """No slower."""
        return self.slower is not None and self.slower <= NOISE

    @property
    def holds_at_its_time(self) -> bool:
        """No higher a peak."""
        return self.larger is not None and self.larger <= NOISE_OF_PEAKS

    @property
    def holds(self) -> bool:
        """Both halves of the claim."""
        return self.holds_at_its_memory and self.holds_at_its_time


def _ratio(first: float | None, second: float | None) -> float:
    assert first is not None
    assert second is not None
    return first / second


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """The claim for every measured row of a peer, among the rows of one network."""
    measured = [row for row in rows if row.is_measured]
    own = [row for row in measured if row.family != "peer"]
    found = []
    for peer in (row for row in measured if row.family == "peer"):
        assert peer.seconds is not None
        assert peer.peak_bytes is not None
        no_larger = [row for row in own if (row.peak_bytes or 0) <= peer.peak_bytes * (1 + NOISE_OF_PEAKS)]
        no_slower = [row for row in own if (row.seconds or 0) <= peer.seconds * (1 + NOISE)]
        fastest = min(no_larger, key=lambda row: row.seconds or 0, default=None)
        leanest = min(no_slower, key=lambda row: row.peak_bytes or 0, default=None)
        found.append(Verdict(peer, fastest, leanest))
    return found


def by_network(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each network, in the order in which the networks came."""
    networks: dict[str, list[Row]] = {}
    for row in rows:
        networks.setdefault(row.network, []).append(row)
    return networks


def report_lines(facts: dict[str, Any], rows: Sequence[Row], skipped: Sequence[str]) -> list[str]:
    """The tables, network by network, and whether the claim holds."""
    lines = ["# lowtide beside what people use instead", "", heading(facts), ""]
    for network, own in by_network(rows).items():
        lines += [f"## {network}", "", *_row_lines(own), "", *claim_lines(own), ""]
    if skipped:
        lines += ["Not run for lack of time: " + "; ".join(skipped) + ".", ""]
    return lines


def _row_lines(rows: Sequence[Row]) -> list[str]:
    def cells(row: Row) -> list[str]:
        predicted = f"{seconds_cell(row.predicted_seconds)}, {bytes_cell(row.predicted_peak_bytes)}"
        return [
            row.way,
            seconds_cell(row.seconds),
            bytes_cell(row.peak_bytes),
            "" if row.predicted_seconds is None else predicted,
            seconds_cell(row.set_up_seconds),
            row.note,
        ]

    columns = ["way", "step", "measured peak", "predicted", "set up", "note"]
    return table(columns, [cells(row) for row in rows])


def claim_lines(rows: Sequence[Row]) -> list[str]:
    """The claim for each peer of one network, and how often it holds."""
    checked = verdicts(rows)
    if not checked or not any(row.is_measured and row.family != "peer" for row in rows):
        return ["The claim was not checked: lowtide was not measured on this network."]

    own = [row for row in rows if row.is_measured and row.family != "peer"]
    leanest, fastest = min(row.peak_bytes or 0 for row in own), min(row.seconds or 0 for row in own)

    def cells(verdict: Verdict) -> list[str]:
        more_bytes, more_seconds = _ratio(leanest, verdict.row.peak_bytes), _ratio(fastest, verdict.row.seconds)
        at_memory = f"none so lean; the leanest takes {more_bytes - 1:+.1%}"
        at_time = f"none so fast; the fastest takes {more_seconds - 1:+.1%}"
        at_memory = at_memory if verdict.slower is None else f"{verdict.slower:+.1%}"
        at_time = at_time if verdict.larger is None else f"{verdict.larger:+.1%}"
        marks = [
            "holds" if verdict.holds_at_its_memory else "**fails**",
            "holds" if verdict.holds_at_its_time else "**fails**",
        ]
        return [verdict.row.way, at_memory, marks[0], at_time, marks[1]]

    columns = ["peer", "lowtide's time at its peak", "", "lowtide's peak at its time", ""]
    num_hold = sum(verdict.holds for verdict in checked)
    return [
        *table(columns, [cells(verdict) for verdict in checked]),
        "",
        f"Claim: at every peak memory that a peer reaches lowtide's step is no slower ({NOISE:.0%} is noise), and at "
        f"the peer's step time lowtide's peak is no higher ({NOISE_OF_PEAKS:.1%} is noise). Both hold for {num_hold} "
        f"of {len(checked)} peers; no slower at "
        f"its memory: {sum(v.holds_at_its_memory for v in checked)}; no higher at its time: "
        f"{sum(v.holds_at_its_time for v in checked)}.",
    ]


# A peer that takes this many times as long as lowtide's slowest step is drawn at the edge of the figure.
OFF_SCALE = 1.6

_STYLES = {
    "lowtide": ("C0", "o", "lowtide"),
    "lowtide compiled": ("C2", "s", "lowtide, compiled stages"),
    "lowtide offloading": ("C4", "D", "lowtide, with offloading"),
}
_PEERS = {False: ("C1", "peers"), True: ("C3", "peers, compiled as a whole (activation_memory_budget)")}

# In the figure, points that are nearer to each other than this share a name.
_CLOSE = 0.02


def draw(plt: Any, facts: dict[str, Any], rows: Sequence[Row]) -> Any:
    """Step time against peak memory, a panel a network: lowtide's curves and the peers' points."""
    networks = {
        name: own
        for name, own in by_network(rows).items()
        if any(row.is_measured and row.family != "peer" for row in own)
    }
    if not networks:
        return None
    figure, panel_of = panels(plt, list(networks), columns=3 if len(networks) in (3, 5, 6, 9) else 2, size=(6.6, 4.8))
    for name, own in networks.items():
        _draw_network(panel_of[name], name, own)
    figure.suptitle(f"Step time against peak memory, {facts['machine']}, torch {facts['torch']}", fontsize=11)
    return figure


def best_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (memory, time) that no other beats in both, from the least memory up."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _draw_network(panel: Any, name: str, rows: Sequence[Row]) -> None:
    measured = [row for row in rows if row.is_measured]
    top = OFF_SCALE * max(row.point[1] for row in measured if row.family != "peer")
    for family, (colour, marker, label) in _STYLES.items():
        points = [row.point for row in measured if row.family == family]
        if points:
            panel.plot(*zip(*points, strict=True), marker, color=colour, alpha=0.35, markersize=4)
            panel.plot(*zip(*best_of(points), strict=True), f"{marker}-", color=colour, label=label, markersize=4)
    for compiled, (colour, label) in _PEERS.items():
        peers = [row for row in measured if row.family == "peer" and row.compiled == compiled]
        if peers:
            panel.plot([], [], "x", color=colour, markersize=7, label=label, linestyle="")  # for the legend
        for index, ((gib, milliseconds), ways) in enumerate(_together((row.point, _short(row.way)) for row in peers)):
            is_beyond = milliseconds > top  # else one way that takes ten times as long would flatten all others
            marker, height = ("^", top) if is_beyond else ("x", milliseconds)
            panel.plot(gib, height, marker, color=colour, markersize=7, linestyle="")
            below = is_beyond or index % 2  # neighbours' names do not cover each other
            text = {"xytext": (5, -9 if below else 3), "textcoords": "offset points", "fontsize": 7, "color": colour}
            panel.annotate(f"{ways}: {milliseconds:.0f} ms" if is_beyond else ways, (gib, height), **text)
    panel.set(title=name, xlabel="measured peak (GiB)", ylabel="step (ms)")
    panel.set_xlim(0, 1.15 * max(row.point[0] for row in measured))
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8)


def _together(
    points: Iterable[tuple[tuple[float, float], str]],
) -> list[tuple[tuple[float, float], str]]:
    """Points (memory, time) that lie upon each other as one, with the names of all."""
    kept: list[tuple[tuple[float, float], str]] = []
    for point, name in points:
        for index, (other, names) in enumerate(kept):
            if all(math.isclose(here, there, rel_tol=_CLOSE) for here, there in zip(point, other, strict=True)):
                kept[index] = other, f"{names}, {name}"
                break
        else:
            kept.append((point, name))
    return kept


def _short(way: str) -> str:
    """A peer's name for the figure, whose colour says whether it is compiled."""
    for long, short in (
        ("checkpoint_sequential, ", ""),
        ("activation_memory_budget ", ""),
        ("transformers' gradient checkpointing", "gradient checkpointing"),
        (", compiled", ""),
        (", eager", ""),
    ):
        way = way.replace(long, short)
    return way
