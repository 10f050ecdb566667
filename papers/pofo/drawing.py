"""Figures 2 and 3, and the tables, of a list of points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from papers.pofo.conclusions import Finding
from papers.pofo.experiment import ALGORITHMS, Point

STYLES = {"rotor": "C1-^", "offload": "C3-v", "opportunist": "C4-d", "autocapper": "C2-s", "pofo": "C0-o"}
# Overheads above this are cut off: offloading alone at little memory would hide the rest.
HIGHEST = 1.0


def draw(path: Path, points: Sequence[Point], figure: int, title: str) -> None:
    """One panel a network, all algorithms in it: time over plain training against α or bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pofo"  # the same points, the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters make a fifth of the bytes
    import matplotlib.pyplot as plt

    own = [point for point in points if point.figure == figure]
    networks = list(dict.fromkeys(point.network for point in own))
    columns = min(4, len(networks))
    rows = -(-len(networks) // columns)
    drawing, panels = plt.subplots(rows, columns, figsize=(3.4 * columns, 3.0 * rows + 0.6), squeeze=False)
    for panel in panels.flat[len(networks) :]:
        panel.set_visible(False)
    for panel, network in zip(panels.flat, networks, strict=False):
        shown = [point for point in own if point.network == network]
        places = [point.alpha if figure == 2 else point.bandwidth / 1e9 for point in shown]
        for name in ALGORITHMS:
            times = [None if (found := point.overhead(name)) is None else 1 + found for point in shown]
            panel.plot(
                places, [float("nan") if t is None else t for t in times], STYLES[name], label=name, markersize=4
            )
        panel.set(title=network, xlabel="memory ratio α" if figure == 2 else "bandwidth (GB/s)")
        panel.set_ylim(0.98, min(1 + HIGHEST, max(1.1, panel.get_ylim()[1])))
        panel.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("time / plain training")
    panels[0][0].legend(fontsize="small")
    drawing.suptitle(title)
    drawing.tight_layout()
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def point_lines(points: Sequence[Point], figure: int) -> list[str]:
    """A table of overheads in percent."""
    first = "α" if figure == 2 else "GB/s"
    lines = [
        f"| network | {first} | budget (GiB) | {' | '.join(ALGORITHMS)} | pofo, continuous | conversion |",
        "| --- |" + " --: |" * (len(ALGORITHMS) + 4),
    ]
    for point in points:
        if point.figure != figure:
            continue
        place = f"{point.alpha:g}" if figure == 2 else f"{point.bandwidth / 1e9:g}"
        cells = [place, f"{point.memory_budget / 2**30:.2f}", *(_percent(point.overhead(name)) for name in ALGORITHMS)]
        continuous, pofo = point.continuous_seconds, point.seconds["pofo"]
        if continuous is not None and pofo is not None:
            cells += [_percent(continuous / point.sequential_seconds - 1), f"{100 * (pofo / continuous - 1):+z.2f}"]
        else:
            cells += ["", ""]
        lines.append(f"| {point.network} | {' | '.join(cells)} |")
    return lines


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:z.1f}"


def finding_lines(found: Sequence[Finding]) -> list[str]:
    """A table of the conclusions."""
    lines = ["| | the paper says | here | figures |", "| --- | --- | --- | --- |"]
    for finding in found:
        lines.append(f"| {finding.number} | {finding.statement} | {finding.verdict} | {finding.figures} |")
    return lines
