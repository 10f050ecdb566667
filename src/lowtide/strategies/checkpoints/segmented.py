"""Checkpointing by segments: what `segments` and `chen` choose from.

The chain is cut into segments. The forward pass keeps the input of each and saves nothing inside, except in the last,
which saves everything. Going back, each segment is run once more, saving everything, before its backwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward, Operation, Schedule
from lowtide.strategies.base import Answer, NotFasterError, Problem
from lowtide.strategies.nested.costs import Costs, costs_of, outside_bytes
from lowtide.strategies.sides import freed

Starts = tuple[int, ...]
"""The first stage of each segment, from 1 on."""


@dataclass(frozen=True, slots=True)
class Segmentation:
    """One way to cut a chain, and what it costs."""

    starts: Starts
    seconds: float
    peak_bytes: int

    def schedule(self, strategy: str, chain: Chain) -> Schedule:
        """Its operations."""
        return Schedule(strategy, freed(chain, _operations(self.starts, chain.num_stages)))


def segmentation(chain: Chain, costs: Costs, starts: Starts) -> Segmentation:
    """What it costs to cut a chain without side values this way; `costs` are those of variant 0."""
    again = sum(costs.split_until[p] - costs.forward_until[s - 1] for s, p in itertools.pairwise(starts))
    return Segmentation(starts, chain.compute_seconds + float(again), outside_bytes(chain) + _peak(costs, starts))


def fastest_that_fits(problem: Problem, strategy: str, cuts: Iterable[Starts]) -> Answer:
    """The fastest way to cut the chain within the budget; among equals, the one with the lowest peak.

    Their times are known at once. Where other values have to be simulated to know their peaks, those that are of no use
    are passed over.

    Raises:
        InfeasibleBudgetError: with the least peak of all of them.
        NotFasterError: where none is that is faster than the problem asks for.
    """
    candidates = _candidates(problem, cuts)
    limit = problem.faster_than if problem.chain.has_other_values else math.inf
    useful = [each for each in candidates if each.seconds <= limit]
    possible = [each for each in useful if each.peak_bytes <= problem.memory_budget]
    possible.sort(key=lambda candidate: candidate.seconds)
    for _, equals in itertools.groupby(possible, key=lambda candidate: candidate.seconds):
        best = min((_counted(problem, each) for each in equals), key=lambda candidate: candidate.peak_bytes)
        if best.peak_bytes <= problem.memory_budget:
            return Answer(best.schedule(strategy, problem.chain), details={"num_segments": len(best.starts)})
    if len(useful) < len(candidates):
        raise NotFasterError
    raise problem.infeasible(strategy, _least_peak(problem, candidates))


def least_peak_bytes(problem: Problem, cuts: Iterable[Starts]) -> int:
    """The lowest peak of all candidates."""
    return _least_peak(problem, _candidates(problem, cuts))


def _least_peak(problem: Problem, candidates: list[Segmentation]) -> int:
    candidates = sorted(candidates, key=lambda candidate: candidate.peak_bytes)
    least = _counted(problem, candidates[0]).peak_bytes
    for each in candidates[1:]:
        if each.peak_bytes >= least:  # and with other values it has no less
            break
        least = min(least, _counted(problem, each).peak_bytes)
    return least


def _candidates(problem: Problem, cuts: Iterable[Starts]) -> list[Segmentation]:
    """With the peaks that they have without other values: they need at least as much."""
    costs = costs_of(replace(problem.chain, side_values=()), variants=False)
    return [segmentation(problem.chain, costs, starts) for starts in dict.fromkeys(cuts)]


def _counted(problem: Problem, candidate: Segmentation) -> Segmentation:
    """With the peak that it has: the simulator knows the lifetimes of other values."""
    if not problem.chain.has_other_values:
        return candidate
    return replace(candidate, peak_bytes=problem.evaluate(candidate.schedule("", problem.chain)).peak_bytes)


def _operations(starts: Starts, num_stages: int) -> Iterator[Operation]:
    ends = [*(start - 1 for start in starts[1:]), num_stages]
    for start, end in zip(starts[:-1], ends[:-1], strict=True):
        yield Forward(start, "keep")
        yield from (Forward(k, "drop") for k in range(start + 1, end + 1))
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        yield from (Forward(k, "all") for k in range(start, end + 1))
        yield from (Backward(k) for k in range(end, start - 1, -1))


def _peak(costs: Costs, starts: Starts) -> int:
    """The peak, without what lies outside the stages (see `nested.outside_bytes`)."""
    first = np.array(starts)
    last = np.append(first[1:] - 1, costs.num_stages)
    before = np.concatenate(([0], np.cumsum(costs.way_saved)[:-1]))  # what stages 1..k-1 save, at k - 1
    kept = np.cumsum(costs.activation[first - 1]) - costs.activation[0]

    def highest(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum.reduceat(values, first - 1)

    saving = highest(before + costs.way_forward) + costs.beside[last]
    going_back = highest(before + costs.way_backward)
    peaks = kept + np.maximum(saving, going_back) - before[first - 1]
    passing = costs.activation[:-1] + costs.activation[1:] + costs.forward_extra[1:]
    passing[first - 1] -= costs.activation[first - 1]  # the input of a segment is among the kept
    forward = kept + highest(passing) + costs.beside[-1]
    return int(max(peaks.max(), forward[:-1].max(initial=0)))
