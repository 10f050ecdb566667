"""The figure of `benchmarks.variants`: step time against peak memory, a panel a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import panels
from benchmarks.peer_claim import Row, by_network

WHOLE = "whole model compiled"

# How the rows of each way are drawn: a prefix and a suffix of its name, marker and colour, and what the legend says.
_CURVES = [
    ("mix within", "GiB", "o-", "C0", "the solver's mix, exact"),
    ("mix within", "(up to rounding)", "o--", "C9", "the solver's mix, up to rounding"),
    ("whole blocks within", "", "s-", "C2", "whole blocks recomputed"),
    ("all blocks at", "", "^:", "C4", "one variant for all blocks"),
    (WHOLE, "", "x", "C3", "whole model compiled"),
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
    figure, panel_of = panels(plt, list(networks), columns=2, size=(7.5, 4.8))
    for name, own in networks.items():
        _draw_network(panel_of[name], name, own)
    figure.suptitle(f"Variants of compiled blocks, {facts['machine']}, torch {facts['torch']}", fontsize=11)
    return figure


def _draw_network(panel: Any, name: str, rows: Sequence[Row]) -> None:
    others = [row for row in rows if not row.way.startswith(WHOLE)]
    top = _OFF_SCALE * max(row.point[1] for row in others or rows)
    beyond = [row for row in rows if row.point[1] > top]
    for prefix, suffix, style, colour, label in _CURVES:
        of_way = [row for row in rows if row.way.startswith(prefix) and row.way.endswith(suffix) and row not in beyond]
        points = sorted(row.point for row in of_way)
        if points:
            panel.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=5)
    notes = [f"{row.way}: {row.point[1]:.0f} ms, {row.point[0]:.0f} GiB" for row in beyond]
    panel.set_title("\n".join([name, *notes]), fontsize=9)
    panel.set(xlabel="measured peak (GiB)", ylabel="step (ms)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
