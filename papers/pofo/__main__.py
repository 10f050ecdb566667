"""Figures 2 and 3 of the pofo paper for any chains: draw them, write table and JSON, check the paper's conclusions.

    python -m papers.pofo [CHAIN.json …] [--setting v100|double|h200|slow] [--bandwidth 12GB/s] [--time-scale 1]
                          [--quick] [--coarse-above 100] [--keep] [--output DIR]

Without files: the chains of the paper's networks (batch of 16, 500 px) that were measured on an H200. A setting is a
ratio of link to compute; the default is the paper's. `--bandwidth` and `--time-scale` make another one. Chains of more
than `--coarse-above` stages get fewer points. `--quick`, with few points and few slots, takes seconds for a chain of up
to 50 stages and about a minute for one of 190. Its results, and those of chains that are named, go to a folder of their
own without `--output`; `--keep` puts the named chains among the stored results, whose other networks stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks import harness
from benchmarks.refusing import Parser, above_0, earlier_results, refuse
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import lowtide
from lowtide.units import parse_bandwidth
from papers.pofo.conclusions import findings
from papers.pofo.drawing import draw, finding_lines, point_lines
from papers.pofo.experiment import COARSE, FINE, QUICK, SETTINGS, Point, Setting, figure_title, gigabytes, tasks_of

HERE = Path(__file__).parent
CHAINS = HERE.parent.parent / "examples" / "chains" / "h200"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment and write its results."""
    options = _parser().parse_args(arguments)
    try:
        setting = _setting(options)
        chains = [lowtide.Chain.load(path) for path in options.chains or sorted(CHAINS.glob("*-b16-500.json"))]
    except lowtide.LowtideError as error:
        refuse(str(error))
    is_trial = options.quick or (bool(options.chains) and not options.keep)
    folder = harness.output_folder(options.output, HERE / "results", is_trial=is_trial)
    kept = _kept(folder / f"{setting.name}.json") if options.keep else []
    points = _run(chains, setting, quick=options.quick, coarse_above=options.coarse_above)
    lines = write(folder, setting, _merged(kept, points) if options.keep else points)
    sys.stdout.write("\n".join(lines))
    print(f"written to {folder}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("chains", nargs="*", type=Path, metavar="CHAIN.json")
    parser.add_argument("--setting", choices=SETTINGS, default="v100")
    parser.add_argument("--bandwidth", help="of figure 2; figure 3 goes from there to three times as much")
    parser.add_argument("--time-scale", type=above_0, help="multiply the chains' times")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--coarse-above", type=int, default=100, metavar="STAGES")
    parser.add_argument("--output", type=Path, help="a folder for the results (default: beside this command)")
    return parser


def _setting(options: argparse.Namespace) -> Setting:
    setting = SETTINGS[options.setting]
    if options.bandwidth is None and options.time_scale is None:
        return setting
    bandwidth = setting.bandwidth if options.bandwidth is None else parse_bandwidth(options.bandwidth)
    scale = setting.time_scale if options.time_scale is None else options.time_scale
    several = gigabytes(*(bandwidth / 1e9 * factor for factor in (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)))
    return Setting("own", f"times of the chains times {scale:g}", scale, bandwidth, several)


def _run(chains: list[lowtide.Chain], setting: Setting, *, quick: bool, coarse_above: int) -> list[Point]:
    grids = {chain.name: QUICK if quick else COARSE if chain.num_stages > coarse_above else FINE for chain in chains}
    tasks = list(tasks_of(chains, setting, lambda chain: grids[chain.name]))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    points = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("pofo", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=f"{task.chain.name}, α {task.alpha:g}, {task.bandwidth / 1e9:g} GB/s")
            points.append(task.run())
            progress.advance(bar)
    return points


def _kept(path: Path) -> list[Point]:
    if not path.exists():
        return []
    with earlier_results(path) as values:
        return [Point(**entry) for entry in values["points"]]


def _merged(kept: list[Point], points: list[Point]) -> list[Point]:
    """New points in place of kept ones of the same network; networks by name."""
    new = {point.network for point in points}
    return sorted([*(point for point in kept if point.network not in new), *points], key=lambda point: point.network)


def write(folder: Path, setting: Setting, points: list[Point]) -> list[str]:
    """Write figures, JSON and tables of one setting; returns the lines of the tables."""
    found = findings(points)
    facts = harness.machine_facts(torch.device("cpu"))
    values = {
        "facts": facts,
        "setting": {"title": setting.title, "time_scale": setting.time_scale, "bandwidth": setting.bandwidth},
        "conclusions": [finding.to_dict() for finding in found],
        "points": [point.to_dict() for point in points],
    }
    (folder / f"{setting.name}.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    lines = [
        f"# {setting.title}",
        "",
        f"Simulated on {harness.heading(facts)}",
        "",
        "## The paper's conclusions",
        "",
        *finding_lines(found),
        "",
    ]
    for figure in (2, 3):
        draw(folder / f"{setting.name}-figure-{figure}.svg", points, figure, figure_title(setting, figure))
        lines += [f"## Figure {figure}: overhead over plain training, in percent", "", *point_lines(points, figure), ""]
    (folder / f"{setting.name}.md").write_text("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()
