"""Tables 2 and 3 and figure 5 of Hong et al., executed: peak and time of sets of checkpoints on VGG-19 and AlexNet.

    python -m papers.selection --device cuda --seconds 150 --output DIR
    python -m papers.selection --device cuda --resume DIR/selection-h200.json --output DIR   # go on where a run ended
    python -m papers.selection --tiny                            # seconds on any CPU

Every network is cut into the paper's layers, and its chain is measured. Each method chooses its set from the plain
sizes of the layers' outputs, as in the paper; the set becomes a schedule, and real steps are run under it. Beside the
paper's columns stand `dynamic-selection`, lowtide's own choice for the least peak with everything counted, and the sets
that the paper prints, where they differ from those found here.

Writes selection-MACHINE.json and .md after every row, so that a run that is cut leaves whatever it had, and the figure
at the end.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.refusing import Parser, refuse_unless_chosen
from torch import nn

import lowtide
from lowtide.runtime.measure.measure import capture_and_measure
from lowtide.strategies.checkpoints.schedule import checkpoint_schedule
from papers.selection.networks import FIGURE_5_SET, NARROW, PAPER_SETS, checkpoint_sets, make, sizes_of
from papers.selection.phases import Phase, mean_error, measured_phases, predicted_phases
from papers.selection.results import Figure, Row, draw, report_lines

RESULTS = Path(__file__).parent / "results"

# The paper's batch sizes, those of both networks that say most first.
SETTINGS = [
    ("vgg19", 128),
    ("alexnet", 128),
    ("vgg19", 400),
    ("alexnet", 4096),
    ("vgg19", 256),
    ("vgg19", 320),
    ("vgg19", 384),
]
TINY = [("alexnet", 2)]

STRATEGIES = ("dynamic-selection", "chen")


def own_method(strategy: str) -> str:
    """What the table calls a strategy of lowtide's."""
    return f"lowtide's {strategy}"


LAST_METHOD = own_method(STRATEGIES[-1])

# What a row takes on a GPU before the first was timed.
GUESS_SECONDS = 4.0


class Run(harness.Run):
    """One run: its rows, its time, its files."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        super().__init__("selection", arguments, device, RESULTS)
        self.rows: list[Row] = []
        self.figure: Figure | None = None
        self.skipped: list[str] = []
        if arguments.resume:
            with self.resumed(arguments.resume) as values:
                rows = [Row(**row) for row in values["rows"]]
                self.figure = Figure.from_dict(values["figure_5"]) if values["figure_5"] else None
            whole = {(row.network, row.batch) for row in rows if row.method == LAST_METHOD}
            self.rows = [row for row in rows if (row.network, row.batch) in whole]

    def has(self, network: str, batch: int) -> bool:
        """Whether an earlier run completed a network and batch size."""
        return any((row.network, row.batch) == (network, batch) for row in self.rows)

    def allows(self, what: str) -> bool:
        """Whether there is time for one more row."""
        if self.clock.allows(GUESS_SECONDS if self.device.type == "cuda" else 0.0):
            return True
        self.skipped.append(what)
        return False

    def add(self, row: Row) -> None:
        """A new row."""
        self.rows.append(row)
        self.save()
        seconds, predicted = map(harness.seconds_cell, (row.seconds, row.predicted_seconds))
        peak, expected = map(harness.bytes_cell, (row.peak_bytes, row.predicted_peak_bytes))
        print(
            f"{self.clock.elapsed_seconds:6.0f} s  {row.network:<8} {row.batch:>5}  {row.method:<28} {peak:>11} "
            f"(predicted {expected:>11}) {seconds:>10} (predicted {predicted:>10}) {row.note}",
            flush=True,
        )

    def save(self, *, picture: bool = False) -> None:
        """Write the results; drawing takes a second, and is left for the end."""
        values = {
            "facts": self.facts,
            "rows": [asdict(row) for row in self.rows],
            "figure_5": None if self.figure is None else asdict(self.figure),
            "skipped": self.skipped,
        }
        lines = report_lines(self.facts, self.rows, self.figure, self.skipped)
        picture_of = (lambda plt: draw(plt, self.facts, self.figure)) if picture else None
        harness.write_results(self.folder, self.stem, values, lines, picture_of)

    def say_where(self) -> None:
        """Print the folder."""
        print(f"written to {self.files}")


class Experiment:
    """One network and batch size: a chain in the paper's layers, and sets of checkpoints that are run."""

    def __init__(self, run: Run, name: str, batch: int) -> None:
        torch.manual_seed(0)
        self.run, self.name, self.batch_size = run, name, batch
        self.model: nn.Module
        self.batch: dict[str, Any]
        self.model, self.batch = make(name, str(run.device), batch, narrow=run.is_tiny)
        title = f"{name}, batch {batch}"
        self.split, self.chain = capture_and_measure(self.model, self.batch, stages=["network.*"], name=title)
        self.sizes = sizes_of(self.chain, self.batch, NARROW if run.is_tiny else 1000)

    def row(self, method: str, schedule: lowtide.Schedule, checkpoints: tuple[int, ...] | None) -> Row:
        """A schedule, run and added."""
        trace = lowtide.simulate(self.chain, schedule)
        row = Row(self.name, self.batch_size, method, checkpoints)
        row.predicted_peak_bytes, row.predicted_seconds = trace.peak_bytes, trace.seconds
        step = harness.training_step(self.model, self.model, self.batch)
        try:
            if method == "plain":
                timed = harness.time_steps(step, self.run.device)
            else:
                with lowtide.attach(self.model, schedule, split=self.split):
                    timed = harness.time_steps(step, self.run.device)
            row.seconds, row.peak_bytes = timed.seconds, timed.peak_bytes
        except (torch.OutOfMemoryError, lowtide.LowtideError) as error:
            row.note = harness.reason(error)
        harness.release(self.run.device)
        self.run.add(row)
        return row

    def tables(self) -> None:
        """The rows of tables 2 and 3."""
        sets = checkpoint_sets(self.sizes)
        printed = {
            f"{method}, the paper's set": chosen
            for (network, method), chosen in PAPER_SETS.items()
            if network == self.name and len(self.chain.stages) == chosen[-1] and chosen != sets[method]
        }
        known: dict[tuple[int, ...], Row] = {}
        whole = lowtide.solve(self.chain, memory_budget=2**60, strategy="store-all").schedule
        if self.run.allows(f"{self.name} {self.batch_size}: plain"):
            self.row("plain", whole, None)
        for method, chosen in {**sets, **printed}.items():
            if chosen in known:  # two methods with one set are one schedule
                self.run.add(known[chosen].as_method(method))
            elif self.run.allows(f"{self.name} {self.batch_size}: {method}"):
                known[chosen] = self.row(method, checkpoint_schedule(method, self.chain, chosen), chosen)
        for strategy in STRATEGIES:
            if self.run.allows(f"{self.name} {self.batch_size}: {strategy}"):
                least = least_budget(self.chain, strategy)
                solution = lowtide.solve(self.chain, memory_budget=least, strategy=strategy)
                self.row(own_method(strategy), solution.schedule, None)

    def figure_5(self) -> None:
        """Memory over the phases of a step."""
        num_layers = self.chain.num_stages
        chosen = FIGURE_5_SET if self.name == "vgg19" else checkpoint_sets(self.sizes)["sqrt(n)"]
        schedule = checkpoint_schedule("figure 5", self.chain, chosen)
        network: Any = self.model
        predicted = predicted_phases(self.chain, schedule)
        measured: list[Phase] = measured_phases(
            self.model, self.batch, network.network, schedule, self.split, self.run.device
        )
        assert len(predicted) == len(measured) == 2 * num_layers
        self.run.figure = Figure(
            f"{self.name}, batch {self.batch_size}",
            chosen,
            predicted,
            measured,
            mean_error(predicted, measured, "stored_bytes"),
            mean_error(predicted, measured, "peak_bytes"),
        )
        self.run.save()


def least_budget(chain: lowtide.Chain, strategy: str) -> int:
    """The least budget with which a strategy works."""
    try:
        lowtide.solve(chain, memory_budget=1, strategy=strategy)
    except lowtide.InfeasibleBudgetError as error:
        return error.minimum_bytes
    return 1


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = Parser(__doc__)
    harness.add_common_arguments(parser)
    parser.add_argument("--resume", type=Path, help="continue an earlier run on the same machine, from its results")
    arguments = parser.parse_args(given)
    settings = TINY if arguments.tiny else SETTINGS
    refuse_unless_chosen("--only", arguments.only, [name for name, _ in settings])
    run = Run(arguments, torch.device(arguments.device))
    try:
        with run.clock.enforced():
            for name, batch in settings:
                if run.has(name, batch) or not harness.is_chosen(name, arguments.only):
                    continue
                if not run.allows(f"{name}, batch {batch}"):
                    continue
                try:
                    experiment = Experiment(run, name, batch)
                    experiment.tables()
                    if run.figure is None:
                        experiment.figure_5()
                except Exception as error:  # one network must not take the others with it
                    run.skipped.append(f"{name}, batch {batch}: {harness.reason(error)}")
                    print(run.skipped[-1], flush=True)
                experiment = None  # type: ignore[assignment]
                harness.release(run.device)
    except harness.OutOfTimeError:
        run.skipped.append("what followed")
    run.save(picture=True)
    print("\n".join(report_lines(run.facts, run.rows, run.figure, run.skipped)))
    run.say_where()


if __name__ == "__main__":
    main()
