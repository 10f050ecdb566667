"""What the papers' commands share that run schedules for real: a measured network, points, and a run that writes them.

A network's chain is measured once; every schedule is then run in some real steps, and its time and peak stand beside
what was predicted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from benchmarks import harness
from benchmarks.refusing import earlier_results, refuse_unless_chosen, usable_folder
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.runtime.fitting.solving import solved_for_executor
from lowtide.runtime.measure.measure import capture_and_measure
from lowtide.runtime.model.split import Split

# What a schedule takes on a GPU before it has been timed: attaching, warming up, some steps.
GUESS_SECONDS = 3.0

# What real steps take beside the prediction is a result here, so no step is held to the budget of its schedule. `fit`
# has trial steps for what no chain counts: a recomputed stage has stand-ins for the statistics of its BatchNorms.
UNWATCHED_BYTES = 2**62


@dataclass
class Point:
    """One schedule of one network, run."""

    network: str
    strategy: str
    """`"plain"`, or the strategy that made the schedule."""
    batch_size: int
    budget_bytes: int | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    num_recomputed: int | None = None
    num_stages: int | None = None
    note: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether it was run."""
        return self.seconds is not None and self.peak_bytes is not None

    @property
    def label(self) -> str:
        """What tells it from the others of its network, for people."""
        return self.strategy

    @property
    def throughput(self) -> float:
        """Pictures a second."""
        assert self.seconds is not None
        return self.batch_size / self.seconds


P = TypeVar("P", bound=Point)


def networks_of(points: Sequence[Point]) -> list[str]:
    """In the order in which they came."""
    return list(dict.fromkeys(point.network for point in points))


def mean(values: Iterable[float]) -> float | None:
    """None where there are no values."""
    known = list(values)
    return statistics.fmean(known) if known else None


def percent(value: float | None) -> str:
    """A share for a table."""
    return "–" if value is None else f"{value:.1%}"


def errors(points: Sequence[Point]) -> dict[str, Any]:
    """How far predictions were off, on average, over all schedules that were run; plain training is none."""
    measured = [p for p in points if p.is_measured and p.strategy != "plain"]
    return {
        "time_error": mean(abs((p.predicted_seconds or 0) / p.seconds - 1) for p in measured if p.seconds),
        "peak_error": mean(abs((p.predicted_peak_bytes or 0) / p.peak_bytes - 1) for p in measured if p.peak_bytes),
        "num_schedules": len(measured),
    }


class Network(Generic[P]):
    """One network, image and batch size: a chain that was measured once, and schedules that are run.

    Args:
        name: in the zoo.
        image: pixels a side.
        batch: how many images.
        device: where it runs.
    """

    def __init__(self, name: str, image: int, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.batch_size = device, batch
        self.title = title_of(name, image, batch)
        self.model: nn.Module
        self.batch: dict[str, Any]
        with torch.device(device):
            self.model, self.batch = zoo.make(name, device=str(device), image=image, batch=batch)
        self.split: Split
        self.split, self.chain = capture_and_measure(self.model, self.batch, name=self.title)
        self._run_before: dict[Any, P] = {}

    def solved(self, strategy: str, budget: int, **settings: Any) -> lowtide.Solution:
        """A strategy's schedule for a budget, found as `fit` does and simulated on the measured chain.

        Raises:
            InfeasibleBudgetError: where there is none.
        """
        return solved_for_executor(self.chain, memory_budget=budget, strategy=strategy, **settings)

    def run_plain(self, point: P) -> None:
        """Plain training, into a point; without figures where it does not fit."""
        _predict(point, lowtide.solve(self.chain, memory_budget="1000TiB", strategy="store-all"))
        point.num_stages = self.chain.num_stages
        try:
            self._time(point)
        except torch.OutOfMemoryError as error:
            point.note = harness.reason(error)

    def run(self, point: P, solution: lowtide.Solution) -> None:
        """A schedule, into a point: what was predicted and what was measured; equal schedules are run once."""
        _predict(point, solution)
        known = self.known(solution)
        if known is not None:  # the same schedule for another budget or another name
            point.seconds, point.peak_bytes, point.note = known.seconds, known.peak_bytes, known.note
            return
        try:
            with lowtide.attach(self.model, replace(solution, memory_budget=UNWATCHED_BYTES), split=self.split):
                self._time(point)
        except (torch.OutOfMemoryError, lowtide.LowtideError) as error:
            point.note = harness.reason(error)
        harness.release(self.device)
        self._run_before[solution.schedule.operations] = point

    def known(self, solution: lowtide.Solution) -> P | None:
        """The point with which an equal schedule was run before."""
        return self._run_before.get(solution.schedule.operations)

    def _time(self, point: Point) -> None:
        timed = harness.time_steps(harness.training_step(self.model, self.model, self.batch), self.device)
        point.seconds, point.peak_bytes = timed.seconds, timed.peak_bytes


def _predict(point: Point, solution: lowtide.Solution) -> None:
    point.predicted_seconds, point.predicted_peak_bytes = solution.seconds, solution.peak_bytes
    point.num_recomputed = solution.trace.num_recomputed


def title_of(name: str, image: int, batch: int) -> str:
    """What a network is called in results."""
    return f"{name}, {image} px, batch {batch}"


@dataclass(frozen=True)
class Paper(Generic[P]):
    """What is specific to a paper: where its results go, its points, and how they are summarised."""

    name: str
    results: Path
    point: type[P]
    summary: Callable[[Sequence[P]], dict[str, Any]]
    report_lines: Callable[[dict[str, Any], Sequence[P], Sequence[str]], list[str]]
    draw: Callable[[Any, dict[str, Any], Sequence[P]], Any]

    def points_of(self, values: dict[str, Any]) -> list[P]:
        """The points in a file of results."""
        return [self.point(**point) for point in values["points"]]

    def write(
        self,
        folder: Path,
        stem: str,
        facts: dict[str, Any],
        points: Sequence[P],
        notes: Sequence[str],
        *,
        picture: bool = True,
    ) -> None:
        """JSON, table and figure of some points."""
        values = {
            "facts": facts,
            "summary": self.summary(points),
            "points": [asdict(point) for point in points],
            "notes": list(notes),
        }
        picture_of = (lambda plt: self.draw(plt, facts, points)) if picture else None
        harness.write_results(folder, stem, values, self.report_lines(facts, points, notes), picture_of)

    def draw_again(self, path: Path) -> None:
        """Table and figure of earlier results."""
        with earlier_results(path) as values:
            facts, points, notes = values["facts"], self.points_of(values), list(values["notes"])
        self.write(usable_folder(path.parent), path.stem, facts, points, notes)
        print(f"written to {harness.written_files(path.parent, path.stem)}")


class Run(harness.Run, Generic[P]):
    """One run: its points, its time, its files."""

    def __init__(self, paper: Paper[P], arguments: argparse.Namespace, device: torch.device) -> None:
        super().__init__(paper.name, arguments, device, paper.results)
        self.paper = paper
        self.only: list[str] = arguments.only
        self.points: list[P] = []
        self.notes: list[str] = []
        if arguments.resume:
            with self.resumed(arguments.resume) as values:
                self.points = paper.points_of(values)

    def save(self, *, picture: bool = False) -> None:
        """Write the results; drawing takes a second, and is left for the end."""
        self.paper.write(self.folder, self.stem, self.facts, self.points, self.notes, picture=picture)

    def add(self, point: P) -> None:
        """A new point."""
        self.points.append(point)
        seconds, predicted = map(harness.seconds_cell, (point.seconds, point.predicted_seconds))
        peak, expected = map(harness.bytes_cell, (point.peak_bytes, point.predicted_peak_bytes))
        print(
            f"{self.clock.elapsed_seconds:6.0f} s  {point.network:<28} {point.label:<18} {seconds:>10} (predicted "
            f"{predicted:>10}) {peak:>11} (predicted {expected:>11}) {point.note}",
            flush=True,
        )

    def allows(self, seconds: float = GUESS_SECONDS) -> bool:
        """Whether something that takes about so long on a GPU can still be begun."""
        return self.clock.allows(seconds if self.device.type == "cuda" else 0.0)

    def run_networks(
        self,
        settings: Sequence[tuple[str, int, int]],
        is_done: Callable[[str], bool],
        experiment: Callable[[str, int, int], None],
    ) -> None:
        """All points of all networks within the time, then the figure; the notes say what was skipped.

        Args:
            settings: name, image and batch size of each.
            is_done: whether an earlier run left nothing to do for a title.
            experiment: adds the points of one network.
        """
        refuse_unless_chosen("--only", self.only, [name for name, _, _ in settings])
        try:
            with self.clock.enforced():
                for name, image, batch in settings:
                    title = title_of(name, image, batch)
                    if harness.is_chosen(name, self.only) and not is_done(title):
                        self._run_network(title, partial(experiment, name, image, batch))
        except harness.OutOfTimeError:
            self.notes.append("the run was cut at its time limit; the last network is not complete")
        self.save(picture=True)
        print("\n".join(self.paper.report_lines(self.facts, self.points, self.notes)))
        print(f"written to {self.files}")

    def _run_network(self, title: str, experiment: Callable[[], None]) -> None:
        if not self.allows(4 * GUESS_SECONDS):
            self.notes.append(f"not run for lack of time: {title}")
            return
        try:
            experiment()
        except Exception as error:  # one network must not take the others with it
            self.notes.append(f"{title}: {harness.reason(error)}")
            print(self.notes[-1], flush=True)
        harness.release(self.device)
        self.save()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that the papers' commands share."""
    harness.add_common_arguments(parser)
    parser.add_argument("--resume", type=Path, help="results of an earlier run, which are not measured again")
    parser.add_argument("--draw", type=Path, help="write table and figure of earlier results, and measure nothing")
