"""`segments`: periodic checkpointing, what `torch.utils.checkpoint.checkpoint_sequential` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.errors import StrategyError
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.checkpoints.segmented import Starts, fastest_that_fits, least_peak_bytes


@dataclass(frozen=True, slots=True)
class Segments:
    """The chain in K segments of n // K stages each; the last takes the rest, and runs only once.

    Reference: Chen et al., "Training deep nets with sublinear memory cost", 2016; Beaumont et al., "Optimal
    checkpointing for heterogeneous chains", 2019, §5.3 ("sequential").

    Args:
        segments: K; None: the fastest K that fits.

    Raises:
        StrategyError: from `plan` and `minimum_bytes`, where the chain has fewer than K stages.
    """

    segments: int | None = None

    def plan(self, problem: Problem) -> Answer:
        """The fastest number of segments within the budget, or the number asked for.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        return fastest_that_fits(problem, "segments", self._cuts(problem.chain.num_stages))

    def minimum_bytes(self, problem: Problem) -> int:
        """The lowest peak over all numbers of segments, or that of the number asked for."""
        return least_peak_bytes(problem, self._cuts(problem.chain.num_stages))

    def _cuts(self, num_stages: int) -> Iterator[Starts]:
        if self.segments is not None and self.segments > num_stages:
            raise StrategyError(f"segments is {self.segments}, but the chain has {num_stages} stages; ask for fewer")
        for count in range(1, num_stages + 1) if self.segments is None else (self.segments,):
            size = num_stages // count
            yield tuple(1 + index * size for index in range(count))
