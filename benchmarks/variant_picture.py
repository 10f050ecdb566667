"""The picture of `benchmarks.variants`: step time against peak memory, a panel a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peer_claim import Row, by_network

# How the rows of each way are drawn: a prefix and a suffix of its name, marker and colour, and what the legend says.
_CURVES = [
    ("mix within", "GiB", "o-", "C0", "the solver's mix, exact"),
    ("mix within", "(up to rounding)", "o--", "C9", "the solver's mix, up to rounding"),
    ("whole blocks within", "", "s-", "C2", "whole blocks run again"),
    ("all blocks at", "", "^:", "C4", "one variant for all blocks"),
    ("whole model compiled", "", "x", "C3", "whole model compiled"),
    ("compiled blocks", "", "D", "C7", "compiled blocks"),
    ("plain, eager", "", "x", "C1", "plain, eager"),
]
# Ways that take longer than this times all others of lowtide's are named in the title, and do not stretch the panel.
_OFF_SCALE = 1.5


def draw(plt: Any, facts: dict[str, Any], rows: Sequence[Row]) -> Any:
    """The figure; None where nothing was measured."""
    networks = by_network([row for row in rows if row.is_measured])
    if not networks:
        return None
    width = min(2, len(networks))
    height = -(-len(networks) // width)
    figure, panels = plt.subplots(height, width, figsize=(7.5 * width, 4.8 * height), squeeze=False)
    for panel in panels.flat[len(networks) :]:
        panel.set_axis_off()
    for panel, (name, own) in zip(panels.flat, networks.items(), strict=False):
        _draw_network(panel, name, own)
    figure.suptitle(f"Variants of compiled blocks, {facts['machine']}, torch {facts['torch']}", fontsize=11)
    return figure


def _draw_network(panel: Any, name: str, rows: Sequence[Row]) -> None:
    def place(row: Row) -> tuple[float, float]:
        return (row.peak_bytes or 0) / 2**30, (row.seconds or 0) * 1e3

    others = [row for row in rows if not row.way.startswith("whole model")]
    top = _OFF_SCALE * max(place(row)[1] for row in others or rows)
    beyond = [row for row in rows if place(row)[1] > top]
    for prefix, suffix, style, colour, label in _CURVES:
        of_way = [row for row in rows if row.way.startswith(prefix) and row.way.endswith(suffix) and row not in beyond]
        points = sorted(place(row) for row in of_way)
        if points:
            panel.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=5)
    notes = [f"{row.way}: {place(row)[1]:.0f} ms, {place(row)[0]:.0f} GiB" for row in beyond]
    panel.set_title("\n".join([name, *notes]), fontsize=9)
    panel.set(xlabel="measured peak (GiB)", ylabel="step (ms)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
