"""Table 1 and figure 4 of the weights paper: run, compare with what is printed, write table, plot and JSON.

    python -m papers.weights                    # a few minutes, most of them for the bounds
    python -m papers.weights --tiny             # one row of each, in seconds; written elsewhere

Writes weights.json, .md and .png (figure 4), with the machine, the versions and the date.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.refusing import Parser
from rich.console import Console
from rich.progress import Progress

import lowtide
from lowtide.solve import Solution
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.weights.improve import improve, is_close
from papers.weights import instances
from papers.weights.instances import BANDWIDTHS, FIGURE_4, GIGABYTE_A_SECOND, TABLE_1, Row

RESULTS = Path(__file__).parent / "results"
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
    rows = {row.name: row for row in TABLE_1}
    for ours in results:
        row = rows[ours["name"]]
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


def draw_figure_4(plt: Any, results: list[dict[str, Any]]) -> Any:
    """A panel for each network: the periods against the bandwidth."""
    shown = (("bound", "k--"), ("improved", "C2-s"), ("greedy", "C0-o"), ("nodiscount", "C1-^"), ("l2l", "C3-v"))
    names = list(dict.fromkeys(ours["name"] for ours in results))
    figure, panel_of = harness.panels(plt, names, columns=2, size=(5.5, 4.2))
    for title, panel in panel_of.items():
        own = [ours for ours in results if ours["name"] == title]
        for name, style in shown:
            seconds = [ours[name] / 1e3 for ours in own]
            panel.plot([ours["bandwidth"] for ours in own], seconds, style, label=name, markersize=4)
        panel.set(title=title, xlabel="bandwidth (GB/s)", ylabel="period (s)", xscale="log", yscale="log")
        panel.legend()
    return figure


def main(given: Sequence[str] | None = None) -> None:
    """Run everything and write the results."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, help="a folder for the results (default: beside this command)")
    parser.add_argument("--tiny", action="store_true", help="one row of each, to see that it works")
    arguments = parser.parse_args(given)
    folder = harness.output_folder(arguments.output, RESULTS, is_trial=arguments.tiny)
    part = slice(-1, None) if arguments.tiny else slice(None)
    table = [(row, 12.0) for row in TABLE_1[part]]
    figure = [(row, bandwidth) for row in FIGURE_4[part] for bandwidth in BANDWIDTHS[part]]
    results = _run([*table, *figure])
    write(folder, results[: len(table)], results[len(table) :])


def _run(jobs: Sequence[tuple[Row, float]]) -> list[dict[str, Any]]:
    results = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("weights", total=len(jobs))
        for row, bandwidth in jobs:
            progress.update(task, description=f"{row.name}, {bandwidth:g} GB/s")
            results.append(durations(row, bandwidth))
            progress.advance(task)
    return results


def write(folder: Path, table: list[dict[str, Any]], figure: list[dict[str, Any]]) -> None:
    """Table, figure and JSON."""
    facts = harness.machine_facts(torch.device("cpu"))
    values = {"facts": facts, "assumptions": instances.__doc__, "table_1": table, "figure_4": figure}
    lines = ["# Weight offloading, simulated", "", harness.heading(facts), "", "## Table 1, in ms", ""]
    lines += [*table_1_lines(table), "", "## Figure 4, in ms", "", *figure_4_lines(figure)]
    harness.write_results(folder, "weights", values, lines, lambda plt: draw_figure_4(plt, figure))
    print("\n".join(lines))
    print(f"written to {harness.written_files(folder, 'weights')}")


if __name__ == "__main__":
    main()
