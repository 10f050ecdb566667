"""The experiments of the rotor paper, executed: throughput against measured peak memory.

    python -m papers.rotor --device cuda --seconds 200 --output DIR   # a few budgets of each network, best known first
    python -m papers.rotor --device cuda --full                       # every network, image and batch size; hours
    python -m papers.rotor --device cuda --only resnet101 --image 1000 --batch 8 --budgets 10
    python -m papers.rotor --device cuda --resume DIR/rotor-h200.json --output DIR    # go on where a run ended
    python -m papers.rotor --draw DIR/rotor-h200.json                 # table and picture again, no measuring
    python -m papers.rotor --tiny                                     # seconds on any CPU

For each network: its chain is measured once; plain training is run; then, under lowtide's executor, `segments` at
numbers from 2 to 2 sqrt(L) (what `checkpoint_sequential` does), `rotor` within the peak of each of these, `rotor`
within equal steps of plain training's peak, and `revolve` within the same. Every schedule is timed in some real steps,
and its real peak taken.

Writes rotor-MACHINE.json and .md after every network, so that a run that is cut leaves whatever it had, and the picture
at the end.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.runtime.measure import capture_and_measure
from lowtide.runtime.solving import with_reruns_counted
from lowtide.runtime.split import Split
from papers.rotor.results import Point, draw, report_lines, summary

RESULTS = Path(__file__).parent / "results"

# In the order in which they are run where time is short: one of each family, then the others.
SHORT = [
    ("resnet101", 500, 16),
    ("inception_v3", 500, 16),
    ("densenet121", 500, 16),
    ("resnet50", 500, 16),
    ("resnet101", 1000, 8),
    ("resnet18", 500, 16),
    ("resnet152", 500, 16),
    ("resnet34", 500, 16),
    ("resnet200", 500, 16),
    ("densenet161", 500, 16),
    ("densenet201", 224, 32),
    ("resnet1001", 224, 4),
    ("resnet101", 224, 32),
    ("inception_v3", 1000, 8),
    ("densenet169", 500, 16),
]
# The paper's grid: every depth, three image sizes, batch sizes in powers of two from one that fills the device.
FULL = [
    (name, image, batch)
    for name in zoo.names()
    if name.startswith(("resnet", "densenet", "inception"))
    for image, batches in ((224, (16, 32, 64, 128)), (500, (4, 8, 16, 32)), (1000, (1, 2, 4, 8)))
    for batch in batches
    if not (name == "inception_v3" and image < 299)
]
TINY = [("resnet18", 64, 2)]

# What a schedule takes on a GPU before it has been timed: attaching, warming up, some steps.
GUESS_SECONDS = 3.0


class Run(harness.Run):
    """One run: its points, its time, its files."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        super().__init__("rotor", arguments, device, RESULTS)
        self.num_budgets: int = arguments.budgets
        self.num_segments: int = arguments.segments
        self.points: list[Point] = []
        self.notes: list[str] = []
        if arguments.resume:
            self.points = [Point(**point) for point in self.resumed(arguments.resume)["points"]]

    def save(self, *, picture: bool = False) -> None:
        """Write the results; drawing takes a second, and is left for the end."""
        write(self.folder, self.stem, self.facts, self.points, self.notes, picture=picture)

    def add(self, point: Point) -> None:
        """A new point."""
        self.points.append(point)
        seconds, predicted = map(harness.seconds_cell, (point.seconds, point.predicted_seconds))
        peak, expected = map(harness.bytes_cell, (point.peak_bytes, point.predicted_peak_bytes))
        print(
            f"{self.clock.elapsed_seconds:6.0f} s  {point.network:<28} {point.strategy:<10} {seconds:>10} (predicted "
            f"{predicted:>10}) {peak:>11} (predicted {expected:>11}) {point.note}",
            flush=True,
        )

    def say_where(self) -> None:
        """Print the folder."""
        print(f"written to {self.files}")


def write(
    folder: Path, stem: str, facts: dict[str, Any], points: list[Point], notes: list[str], *, picture: bool = True
) -> None:
    """JSON, table and picture of some points."""
    values = {
        "facts": facts,
        "summary": summary(points),
        "points": [asdict(point) for point in points],
        "notes": notes,
    }
    picture_of = (lambda plt: draw(plt, facts, points)) if picture else None
    harness.write_results(folder, stem, values, report_lines(facts, points, notes), picture_of)


class Experiment:
    """One network, image and batch size: a chain that was measured once, and schedules that are run."""

    def __init__(self, run: Run, name: str, image: int, batch: int) -> None:
        torch.manual_seed(0)
        self.run, self.batch_size = run, batch
        self.title = f"{name}, {image} px, batch {batch}"
        self.model: nn.Module
        self.batch: dict[str, Any]
        with torch.device(run.device):
            self.model, self.batch = zoo.make(name, device=str(run.device), image=image, batch=batch)
        self.split: Split
        self.split, self.chain = capture_and_measure(self.model, self.batch, name=self.title)
        self._run_before: dict[Any, Point] = {}

    def plain(self) -> Point:
        """Plain training; without figures where it does not fit."""
        whole = lowtide.solve(self.chain, memory_budget="1000TiB", strategy="store-all")
        point = self._point("plain", None, whole)
        point.num_stages = self.chain.num_stages
        try:
            timed = harness.time_steps(harness.training_step(self.model, self.model, self.batch), self.run.device)
            point.seconds, point.peak_bytes = timed.seconds, timed.peak_bytes
        except torch.OutOfMemoryError as error:
            point.note = harness.reason(error)
        self.run.add(point)
        return point

    def executed(self, strategy: str, budget: int, segments: int | None = None) -> Point | None:
        """A strategy's schedule for a budget, run; None where there is none, or no time."""
        if not self.run.clock.allows(GUESS_SECONDS if self.run.device.type == "cuda" else 0.0):
            return None
        try:
            # as `fit` solves: what the executor takes for a repeated stage is in no chain
            counted = with_reruns_counted(self.chain)
            solution = lowtide.solve(counted, memory_budget=budget, strategy=strategy, segments=segments).on(self.chain)
        except lowtide.InfeasibleBudgetError:
            return None
        known = self._run_before.get(solution.schedule.operations)
        if known is not None:  # the same schedule for another budget or another name
            point = replace(known, strategy=strategy, budget_bytes=budget, num_segments=segments)
        else:
            point = self._timed(strategy, budget, solution)
            point.num_segments = segments
            self._run_before[solution.schedule.operations] = point
        self.run.add(point)
        return point

    def _timed(self, strategy: str, budget: int, solution: lowtide.Solution) -> Point:
        point = self._point(strategy, budget, solution)
        try:
            with lowtide.attach(self.model, solution, split=self.split):
                timed = harness.time_steps(harness.training_step(self.model, self.model, self.batch), self.run.device)
            point.seconds, point.peak_bytes = timed.seconds, timed.peak_bytes
        except (torch.OutOfMemoryError, lowtide.LowtideError) as error:
            point.note = harness.reason(error)
        harness.release(self.run.device)
        return point

    def _point(self, strategy: str, budget: int | None, solution: lowtide.Solution) -> Point:
        return Point(
            self.title,
            strategy,
            self.batch_size,
            budget_bytes=budget,
            predicted_seconds=solution.seconds,
            predicted_peak_bytes=solution.peak_bytes,
            num_recomputed=solution.trace.num_recomputed,
        )


def numbers_of_segments(num_stages: int, count: int) -> list[int]:
    """At most `count` numbers from 2 to 2 sqrt(L), 2 always included; the paper takes 10."""
    most = max(2, min(num_stages, round(2 * math.sqrt(num_stages))))
    steps = max(1, min(count, most - 1))
    return sorted({2 + round((most - 2) * i / max(1, steps - 1)) for i in range(steps)})


def experiment(run: Run, name: str, image: int, batch: int) -> None:
    """All points of one network, the most telling first."""
    work = Experiment(run, name, image, batch)
    plain = work.plain()
    whole = plain.peak_bytes or plain.predicted_peak_bytes
    assert whole is not None
    limit = whole
    if run.device.type == "cuda":
        limit = min(limit, torch.cuda.get_device_properties(run.device).total_memory)
    segmented = [
        work.executed("segments", 2**60, count)
        for count in numbers_of_segments(work.chain.num_stages, run.num_segments)
    ]
    for point in segmented:
        if point is not None and point.predicted_peak_bytes is not None:
            work.executed("rotor", point.predicted_peak_bytes)
    steps = range(run.num_budgets, 0, -1)
    for strategy in ("rotor", "revolve"):
        for step in steps:
            work.executed(strategy, limit * step // run.num_budgets)


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_common_arguments(parser)
    parser.add_argument("--full", action="store_true", help="the paper's grid of networks, image and batch sizes")
    parser.add_argument("--image", type=int, help="pixels a side, for every network")
    parser.add_argument("--batch", type=int, help="batch size, for every network")
    parser.add_argument("--budgets", type=int, help="budgets for rotor and revolve (default: 10; 5 with --seconds)")
    parser.add_argument("--segments", type=int, help="numbers of segments (default: 10; 3 with --seconds)")
    parser.add_argument("--resume", type=Path, help="results of an earlier run; networks in it are left out")
    parser.add_argument("--draw", type=Path, help="write table and picture of earlier results, and measure nothing")
    arguments = parser.parse_args(given)
    if arguments.draw:
        values = json.loads(arguments.draw.read_text())
        points = [Point(**point) for point in values["points"]]
        write(arguments.draw.parent, arguments.draw.stem, values["facts"], points, values["notes"])
        return
    short = arguments.seconds is not None or arguments.tiny
    arguments.budgets = arguments.budgets or (5 if short else 10)
    arguments.segments = arguments.segments or (3 if short else 10)
    run = Run(arguments, torch.device(arguments.device))
    settings = TINY if arguments.tiny else FULL if arguments.full else SHORT
    settings = list(dict.fromkeys((n, arguments.image or i, arguments.batch or b) for n, i, b in settings))
    done = {point.network for point in run.points}
    try:
        with run.clock.enforced():
            for name, image, batch in settings:
                title = f"{name}, {image} px, batch {batch}"
                if title in done or not harness.is_chosen(name, arguments.only):
                    continue
                if not run.clock.allows(4 * GUESS_SECONDS if run.device.type == "cuda" else 0.0):
                    run.notes.append(f"not run for lack of time: {title}")
                    continue
                try:
                    experiment(run, name, image, batch)
                except Exception as error:  # one network must not take the others with it
                    run.notes.append(f"{title}: {harness.reason(error)}")
                    print(run.notes[-1], flush=True)
                harness.release(run.device)
                run.save()
    except harness.OutOfTimeError:
        run.notes.append("the run was cut at its time limit; the last network is not complete")
    run.save(picture=True)
    print("\n".join(report_lines(run.facts, run.points, run.notes)))
    run.say_where()


if __name__ == "__main__":
    main()
