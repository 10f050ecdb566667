"""The experiments of the rotor paper, executed: throughput against measured peak memory.

    python -m papers.rotor --device cuda --seconds 200 --output DIR   # a few budgets of each network, best known first
    python -m papers.rotor --device cuda --full                       # every network, image and batch size; hours
    python -m papers.rotor --device cuda --only resnet101 --image 1000 --batch 8 --budgets 10
    python -m papers.rotor --device cuda --resume DIR/rotor-h200.json --output DIR    # go on where a run ended
    python -m papers.rotor --draw DIR/rotor-h200.json                 # table and figure again, no measuring
    python -m papers.rotor --tiny                                     # seconds on any CPU

For each network: its chain is measured once; plain training is run; then, under lowtide's executor, `segments` at
numbers from 2 to 2 sqrt(L) (what `checkpoint_sequential` does), `rotor` within the peak of each of these, `rotor`
within equal steps of plain training's peak, and `revolve` within the same. Every schedule is timed in some real steps,
and its real peak taken.

Writes rotor-MACHINE.json and .md after every network, so that a run that is cut leaves whatever it had, and the figure
at the end.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from benchmarks.refusing import Parser, count

import lowtide
from lowtide import zoo
from papers.execution import Network, Paper, Run, add_arguments
from papers.rotor.results import Point, draw, report_lines, summary

PAPER = Paper("rotor", Path(__file__).parent / "results", Point, summary, report_lines, draw)

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


class Experiment:
    """One network, image and batch size, and its points."""

    def __init__(self, run: Run[Point], name: str, image: int, batch: int) -> None:
        self.run = run
        self.network: Network[Point] = Network(name, image, batch, run.device)

    def plain(self) -> Point:
        """Plain training."""
        point = Point(self.network.title, "plain", self.network.batch_size)
        self.network.run_plain(point)
        self.run.add(point)
        return point

    def executed(self, strategy: str, budget: int, segments: int | None = None) -> Point | None:
        """A strategy's schedule for a budget, run; None where there is none, or no time."""
        if not self.run.allows():
            return None
        try:
            solution = self.network.solved(strategy, budget, segments=segments)
        except lowtide.InfeasibleBudgetError:
            return None
        point = Point(self.network.title, strategy, self.network.batch_size, budget, num_segments=segments)
        self.network.run(point, solution)
        self.run.add(point)
        return point


def numbers_of_segments(num_stages: int, count: int) -> list[int]:
    """At most `count` numbers from 2 to 2 sqrt(L), 2 always included; the paper takes 10."""
    most = max(2, min(num_stages, round(2 * math.sqrt(num_stages))))
    steps = max(1, min(count, most - 1))
    return sorted({2 + round((most - 2) * i / max(1, steps - 1)) for i in range(steps)})


def experiment(run: Run[Point], setting: tuple[str, int, int], num_budgets: int, num_segments: int) -> None:
    """All points of one network, the most telling first."""
    work = Experiment(run, *setting)
    plain = work.plain()
    whole = plain.peak_bytes or plain.predicted_peak_bytes
    assert whole is not None
    limit = whole
    if run.device.type == "cuda":
        limit = min(limit, torch.cuda.get_device_properties(run.device).total_memory)
    segmented = [
        work.executed("segments", 2**60, count)
        for count in numbers_of_segments(work.network.chain.num_stages, num_segments)
    ]
    for point in segmented:
        if point is not None and point.predicted_peak_bytes is not None:
            work.executed("rotor", point.predicted_peak_bytes)
    steps = range(num_budgets, 0, -1)
    for strategy in ("rotor", "revolve"):
        for step in steps:
            work.executed(strategy, limit * step // num_budgets)


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = Parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--full", action="store_true", help="the paper's grid of networks, image and batch sizes")
    parser.add_argument("--image", type=count, help="pixels a side, for every network")
    parser.add_argument("--batch", type=count, help="batch size, for every network")
    parser.add_argument("--budgets", type=count, help="budgets for rotor and revolve (default: 10; 5 with --seconds)")
    parser.add_argument("--segments", type=count, help="numbers of segments (default: 10; 3 with --seconds)")
    arguments = parser.parse_args(given)
    if arguments.draw:
        PAPER.draw_again(arguments.draw)
        return
    short = arguments.seconds is not None or arguments.tiny
    num_budgets = arguments.budgets or (5 if short else 10)
    num_segments = arguments.segments or (3 if short else 10)
    run = Run(PAPER, arguments, torch.device(arguments.device))
    settings = TINY if arguments.tiny else FULL if arguments.full else SHORT
    settings = list(dict.fromkeys((n, arguments.image or i, arguments.batch or b) for n, i, b in settings))
    done = {point.network for point in run.points}
    run.run_networks(
        settings,
        lambda title: title in done,
        lambda *setting: experiment(run, setting, num_budgets, num_segments),
    )


if __name__ == "__main__":
    main()
