"""Table 1 and figure 4 of the weights paper: run, compare with what is printed, write table, plot and JSON.

    python -m papers.weights

Writes results.json, results.md and figure-4.png beside this file; takes a few minutes, most of them for the bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import lowtide
from lowtide.solve import Solution
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.improve_weights import improve, is_close
from papers.weights import instances
from papers.weights.instances import BANDWIDTHS, FIGURE_4, GIGABYTE_A_SECOND, TABLE_1, Row

HERE = Path(__file__).parent
BOUND_SECONDS = 20.0
STRATEGIES = {"greedy": "weights-greedy", "nodiscount": "weights-greedy-nodiscount", "l2l": "weights-l2l"}


def durations(row: Row, gigabytes_a_second: float) -> dict[str, Any]:
    """All figures for one chain and bandwidth, durations in milliseconds."""
    chain, bandwidth = row.chain(), int(gigabytes_a_second * GIGABYTE_A_SECOND)
    given: dict[str, Any] = {"memory_budget": row.memory_budget, "bandwidth": bandwidth}
    solved = {name: lowtide.solve(chain, strategy=strategy, **given) for name, strategy in STRATEGIES.items()}
    proven = lowtide.bound(chain, time_limit=BOUND_SECONDS, **given)
    return {
        "name": row.name,
        "bandwidth": gigabytes_a_second,
        "memory_budget": row.memory_budget,
        "compute": chain.compute_seconds * 1e3,
        "bound": proven.seconds * 1e3,
        "bound_gap": proven.gap,
        "bound_solve_seconds": proven.solve_seconds,
        **{name: solution.seconds * 1e3 for name, solution in solved.items()},
        "improved": improved_seconds(solved["greedy"]) * 1e3,
        "greedy_solve_seconds": solved["greedy"].solve_seconds,
    }


def improved_seconds(greedy: Solution) -> float:
    """What `auto` makes of the greedy answer."""
    chain, bandwidth = greedy.chain, greedy.bandwidth

    def evaluate(schedule: lowtide.Schedule) -> lowtide.Trace:
        return lowtide.simulate(chain, schedule, bandwidth=bandwidth)

    answer = Answer(greedy.schedule, None, greedy.lower_bound_seconds)
    if is_close(answer, greedy.seconds):
        return greedy.seconds
    better = improve(Problem(chain, greedy.memory_budget, bandwidth, True, evaluate), answer, greedy.seconds)
    return greedy.seconds if better is None else evaluate(better.schedule).seconds


def table_1_lines(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| row | limit (GiB) | sum of u | bound | greedy | (paper) | Greedy* | (paper) | L2L | (paper) | above bound |",
        "| --- |" + " --: |" * 10,
    ]
    for row, ours in zip(TABLE_1, results, strict=True):
        cells = [f"{row.memory_budget / 2**30:.1f}", f"{row.compute}", f"{ours['bound']:.0f}"]
        for name, printed in (("greedy", row.greedy), ("nodiscount", row.nodiscount), ("l2l", row.l2l)):
            cells += [f"{ours[name]:.0f}", f"{printed}"]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {ours['greedy'] / ours['bound'] - 1:.2%} |")
    return lines


def figure_4_lines(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| row | GB/s | bound | greedy | above bound | improved | above bound | Greedy* | discount wins | L2L |",
        "| --- |" + " --: |" * 9,
    ]
    for ours in results:
        cells = [f"{ours['bandwidth']:g}", f"{ours['bound']:.0f}"]
        for name in ("greedy", "improved"):
            cells += [f"{ours[name]:.0f}", f"{ours[name] / ours['bound'] - 1:.1%}"]
        cells += [f"{ours['nodiscount']:.0f}", f"{ours['nodiscount'] / ours['greedy'] - 1:.1%}", f"{ours['l2l']:.0f}"]
        lines.append(f"| {ours['name']} | {' | '.join(cells)} |")
    return lines


def draw_figure_4(results: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(FIGURE_4), figsize=(11, 4.2), sharex=True)
    shown = (("bound", "k--"), ("improved", "C2-s"), ("greedy", "C0-o"), ("nodiscount", "C1-^"), ("l2l", "C3-v"))
    for panel, row in zip(panels, FIGURE_4, strict=True):
        own = [ours for ours in results if ours["name"] == row.name]
        for name, style in shown:
            seconds = [ours[name] / 1e3 for ours in own]
            panel.plot([ours["bandwidth"] for ours in own], seconds, style, label=name, markersize=4)
        panel.set(title=row.name, xlabel="bandwidth (GB/s)", ylabel="period (s)", xscale="log", yscale="log")
        panel.legend()
    figure.tight_layout()
    figure.savefig(HERE / "figure-4.png", dpi=120)


def main() -> None:
    """Run everything and write the results."""
    argparse.ArgumentParser(
        prog="python -m papers.weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    figure_jobs = [(row, bandwidth) for row in FIGURE_4 for bandwidth in BANDWIDTHS]
    jobs = [(row, 12.0) for row in TABLE_1] + figure_jobs
    results = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("weights", total=len(jobs))
        for row, bandwidth in jobs:
            progress.update(task, description=f"{row.name}, {bandwidth:g} GB/s")
            results.append(durations(row, bandwidth))
            progress.advance(task)
    table, figure = results[: len(TABLE_1)], results[len(TABLE_1) :]
    values = {"assumptions": instances.__doc__, "table_1": table, "figure_4": figure}
    (HERE / "results.json").write_text(json.dumps(values, indent=1) + "\n")
    lines = ["# Table 1, in ms", "", *table_1_lines(table), "", "# Figure 4, in ms", "", *figure_4_lines(figure), ""]
    (HERE / "results.md").write_text("\n".join(lines))
    draw_figure_4(figure)
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
