"""The pofo paper's five algorithms, executed: measured time and peak of their schedules beside predicted ones.

    python -m papers.pofo.executed --device cuda --seconds 250 --output DIR   # as many networks as there is time for
    python -m papers.pofo.executed --device cuda --only resnet101 --alphas 0.1 0.3
    python -m papers.pofo.executed --device cuda --resume DIR/pofo-executed-h200.json --output DIR    # go on with a run
    python -m papers.pofo.executed --draw DIR/pofo-executed-h200.json         # table and figure again, no measuring
    python -m papers.pofo.executed --tiny                                     # a minute on any CPU

For each network: its chain is measured once, and the link to the host; plain training is run; then, for each memory
ratio α of the paper, the schedules of rotor, pofo, autocapper, opportunist and offload for one and the same budget.
Every schedule is chosen as `fit` chooses, timed in some real steps, and its real peak taken.

Writes pofo-executed-MACHINE.json and .md after every point, so that a run that is cut leaves whatever it had, and the
figure at the end. `--resume` leaves out each network and α of which all algorithms are there; of those that it runs,
a part that an earlier run left is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.refusing import Parser

import lowtide
from lowtide.runtime.fitting.solving import host_bytes
from lowtide.runtime.transfer.bandwidth import measured_bandwidth
from lowtide.units import format_bytes
from papers.execution import GUESS_SECONDS, Network, Paper, Run, add_arguments
from papers.pofo.experiment import FINE, memory_range, slots_of
from papers.pofo.measured import Point, draw, report_lines, summary

PAPER = Paper("pofo-executed", Path(__file__).parent / "results", Point, summary, report_lines, draw)

# The paper's images and batches; in the order in which they are run where time is short.
SETTINGS = [
    (name, 500, 16) for name in ("resnet101", "resnet50", "inception_v3", "resnet152", "densenet121", "resnet200")
]
TINY = [("resnet18", 64, 4)]

# The most telling first.
ALPHAS = (0.5, 0.2, 0.75)
ORDER = ("rotor", "pofo", "autocapper", "opportunist", "offload")

# On a CPU offloaded values go to a file, whose speed is the page cache's at one time and the disk's at another.
CPU_BANDWIDTH = 10**9
# Pinning 12 GiB of host memory took 16 s beside an H200.
PINNED_BYTES_PER_SECOND = 0.75 * 2**30


class Experiment:
    """One network, and its points."""

    def __init__(self, run: Run[Point], alphas: Sequence[float], name: str, image: int, batch: int) -> None:
        self.run = run
        self.network: Network[Point] = Network(name, image, batch, run.device)
        run.points = without_parts(run.points, self.network.title, alphas)
        self.low, self.high = memory_range(self.network.chain)
        self.bandwidth = measured_bandwidth(run.device) if run.device.type == "cuda" else CPU_BANDWIDTH
        self.plain = self._point("plain")
        self.network.run_plain(self.plain)
        self._add(self.plain)

    def at(self, alpha: float) -> None:
        """Every algorithm within the budget of one memory ratio."""
        missing = [algorithm for algorithm in ORDER if not self._executed(algorithm, alpha)]
        if missing:
            self.run.notes.append(f"not run for lack of time: {self.network.title}, α {alpha:g}: {', '.join(missing)}")

    def _executed(self, algorithm: str, alpha: float) -> bool:
        """Add the point of one algorithm, where there is time."""
        if not self.run.allows():
            return False
        budget = self.low + round(alpha * (self.high - self.low))
        point = self._point(algorithm, alpha, budget)
        try:
            slots = slots_of(algorithm, FINE.slots)
            solution = self.network.solved(algorithm, budget, bandwidth=self.bandwidth, slots=slots)
        except lowtide.InfeasibleBudgetError as error:
            point.note = f"no schedule below {format_bytes(error.minimum_bytes)}"
            self._add(point)
            return True
        point.moved_bytes, point.solve_seconds = solution.trace.moved_bytes, solution.solve_seconds
        known = self.network.known(solution)
        if known is not None:
            point.same_as = known.label
        elif not self.run.allows(self._guess_seconds(solution)):
            return False
        self.network.run(point, solution)
        self._add(point)
        return True

    def _guess_seconds(self, solution: lowtide.Solution) -> float:
        """What a run takes on a GPU: steps, and pinning the memory that values are moved to."""
        return GUESS_SECONDS + host_bytes(self.network.chain, solution.schedule) / PINNED_BYTES_PER_SECOND

    def _point(self, strategy: str, alpha: float | None = None, budget: int | None = None) -> Point:
        point = Point(self.network.title, strategy, self.network.batch_size, budget, alpha=alpha)
        point.bandwidth, point.fixed_bytes = self.bandwidth, self.network.chain.fixed_bytes
        if strategy != "plain":
            point.plain_seconds, point.plain_peak_bytes = self.plain.seconds, self.plain.peak_bytes
            point.predicted_plain_seconds = self.plain.predicted_seconds
        return point

    def _add(self, point: Point) -> None:
        self.run.add(point)
        self.run.save()


def whole(points: Sequence[Point], title: str, alpha: float) -> bool:
    """Whether every algorithm has a point there, if only one that says why there is no schedule."""
    return {p.strategy for p in points if p.network == title and p.alpha == alpha} >= set(ORDER)


def without_parts(points: Sequence[Point], title: str, alphas: Sequence[float]) -> list[Point]:
    """What to go on with where some memory ratios of a network are to be run: algorithms are compared within one run
    alone, so that half a ratio is run anew. What will not be run stays as it is.
    """
    anew = {alpha for alpha in alphas if not whole(points, title, alpha)}
    kept = [p for p in points if p.network != title or p.alpha not in anew]
    has_points = any(p.network == title and p.alpha is not None for p in kept)
    return [p for p in kept if has_points or p.network != title]


def experiment(run: Run[Point], alphas: Sequence[float], name: str, image: int, batch: int) -> None:
    """All points of one network, the most telling first."""
    work = Experiment(run, alphas, name, image, batch)
    for alpha in alphas:
        if not whole(run.points, work.network.title, alpha):
            work.at(alpha)


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = Parser(__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--alphas", nargs="+", type=float, default=list(ALPHAS), metavar="RATIO", help="memory ratios, in this order"
    )
    arguments = parser.parse_args(given)
    if arguments.draw:
        PAPER.draw_again(arguments.draw)
        return
    run = Run(PAPER, arguments, torch.device(arguments.device))
    run.run_networks(
        TINY if arguments.tiny else SETTINGS,
        lambda title: all(whole(run.points, title, alpha) for alpha in arguments.alphas),
        partial(experiment, run, arguments.alphas),
    )


if __name__ == "__main__":
    main()
