"""What the five algorithms take at which memory and bandwidth: the points of figures 2 and 3.

The paper's words: *sequential* is plain training, M_high its peak, M_low the least that recomputation needs; the
memory ratio α stands for a budget of (1 - α) M_low + α M_high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import lowtide

ALGORITHMS = ("rotor", "offload", "opportunist", "autocapper", "pofo")
FIGURE_3_ALPHA = 0.2

# ResNet-50 in float32 at 224 px: 367 images a second on a V100 (NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch,
# DGX-1 16 GB, 1 GPU). With (500 / 224)² times the work, 16 images of 500 px take 217 ms there; the chain that was
# measured on an H200 takes 42.2 ms. The paper prints no times; this one factor is used for every network.
V100_TIME_SCALE = 5.15


@dataclass(frozen=True, slots=True)
class Setting:
    """A ratio of link to compute.

    Attributes:
        name: for files.
        title: for people.
        time_scale: by which the chains' times are multiplied.
        bandwidth: that of figure 2, bytes per second.
        bandwidths: those of figure 3.
    """

    name: str
    title: str
    time_scale: float
    bandwidth: int
    bandwidths: tuple[int, ...]


def figure_title(setting: Setting, figure: int) -> str:
    """What a figure shows."""
    fixed = f"{setting.bandwidth / 1e9:g} GB/s" if figure == 2 else f"α = {FIGURE_3_ALPHA:g}"
    return f"Figure {figure}: {setting.title}; {fixed}"


def gigabytes(*values: float) -> tuple[int, ...]:
    return tuple(int(value * 10**9) for value in values)


SETTINGS = {
    "v100": Setting(
        "v100",
        f"times of an H200 times {V100_TIME_SCALE}, for the paper's V100",
        V100_TIME_SCALE,
        12 * 10**9,
        gigabytes(12, 15, 18, 24, 30, 36),
    ),
    "double": Setting(
        "double",
        f"times of an H200 times {V100_TIME_SCALE}, twice the paper's link",
        V100_TIME_SCALE,
        24 * 10**9,
        gigabytes(24, 30, 36, 48, 60, 72),
    ),
    "h200": Setting("h200", "an H200", 1.0, 55 * 10**9, gigabytes(55, 69, 83, 110, 138, 165)),
    "slow": Setting("slow", "the chains as they are", 1.0, 12 * 10**9, gigabytes(12, 15, 18, 24, 30, 36)),
}


@dataclass(frozen=True, slots=True)
class Grid:
    """Which points are computed."""

    alphas: tuple[float, ...]
    bandwidth_step: int
    slots: int = 50


FINE = Grid((0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.625, 0.75, 0.875, 1.0), 1)
COARSE = Grid((0.1, 0.2, 0.3, 0.5, 0.75), 5)
QUICK = Grid((0.1, 0.5, 0.75), 5, slots=12)


@dataclass(frozen=True, slots=True)
class Point:
    """One network at one budget and bandwidth; `seconds` is None where an algorithm has no schedule."""

    network: str
    figure: int
    alpha: float
    bandwidth: int
    memory_budget: int
    fixed_bytes: int
    """What is on the device throughout: weights, and what is outside the stages."""
    high_bytes: int
    sequential_seconds: float
    seconds: dict[str, float | None]
    continuous_seconds: float | None
    """Of pofo, before its plan is converted."""

    def overhead(self, algorithm: str) -> float | None:
        """The time beyond plain training, as a share of it."""
        seconds = self.seconds[algorithm]
        return None if seconds is None else seconds / self.sequential_seconds - 1

    @property
    def activation_factor(self) -> float:
        """How many times less memory there is for activations than in plain training."""
        return (self.high_bytes - self.fixed_bytes) / (self.memory_budget - self.fixed_bytes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Task:
    """A point that has not been computed yet."""

    chain: lowtide.Chain
    figure: int
    alpha: float
    bandwidth: int
    slots: int

    def run(self) -> Point:
        """Solve it with every algorithm."""
        chain = self.chain
        low, high = memory_range(chain)
        budget = low + round(self.alpha * (high - low))
        solved = {name: _solved(chain, name, budget, self.bandwidth, self.slots) for name in ALGORITHMS}
        seconds = {name: None if solution is None else solution.seconds for name, solution in solved.items()}
        pofo = solved["pofo"]
        return Point(
            chain.name,
            self.figure,
            self.alpha,
            self.bandwidth,
            budget,
            chain.fixed_bytes,
            high,
            chain.compute_seconds,
            seconds,
            None if pofo is None else pofo.model_seconds,
        )


def memory_range(chain: lowtide.Chain) -> tuple[int, int]:
    """M_low and M_high."""
    high = lowtide.solve(chain, memory_budget="1000TiB", strategy="store-all").peak_bytes
    try:
        lowtide.solve(chain, memory_budget=0, strategy="rotor")
    except lowtide.InfeasibleBudgetError as error:
        return error.minimum_bytes, high
    return 0, high


def slots_of(strategy: str, slots: int) -> int | None:
    """The slots that a strategy is given; None: its own default, for those that cut memory only to recompute."""
    return slots if strategy in ("offload", "pofo") else None


def _solved(
    chain: lowtide.Chain, strategy: str, memory_budget: int, bandwidth: int, slots: int
) -> lowtide.Solution | None:
    given = slots_of(strategy, slots)
    try:
        return lowtide.solve(chain, memory_budget=memory_budget, strategy=strategy, bandwidth=bandwidth, slots=given)
    except lowtide.InfeasibleBudgetError:
        return None


def scaled(chain: lowtide.Chain, factor: float) -> lowtide.Chain:
    """The chain on a device that is slower by a factor."""
    return chain.with_times(lambda seconds: seconds * factor, lambda seconds: seconds * factor)


def tasks_of(chains: list[lowtide.Chain], setting: Setting, grid_of: Callable[[lowtide.Chain], Grid]) -> Iterator[Task]:
    """The points of both figures, network after network."""
    for given in chains:
        chain, grid = scaled(given, setting.time_scale), grid_of(given)
        for alpha in grid.alphas:
            yield Task(chain, 2, alpha, setting.bandwidth, grid.slots)
        for bandwidth in setting.bandwidths[:: grid.bandwidth_step]:
            yield Task(chain, 3, FIGURE_3_ALPHA, bandwidth, grid.slots)
