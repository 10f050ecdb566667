"""`weights-l2l`: layer to layer, the baseline of the weights paper (sections 2 and 7).

The device holds the weights of one stage at a time. Each is fetched right before its forward and again right before
its backward, and nothing computes meanwhile; the copy back to the host runs beside the next stage's fetch. With equal
weights a period takes sum(u) + 2 sum(w) / bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.schedule import Kind, Offload, Operation, Prefetch, Release
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.weights.periods import Period, checked_period, cyclic_schedule
from lowtide.strategies.weights.relaxation import relaxed_seconds

_NAME = "weights-l2l"


@dataclass(frozen=True, slots=True)
class WeightsL2L:
    """Move one layer's weights at a time: the least memory, and the most waiting.

    Beaumont, Eyraud-Dubois, Shilova, Zhao: Weight offloading strategies for training large DNN models, section 7;
    after Pudipeddi et al., Training large neural networks with constant memory using a new execution algorithm.

    Example:
        >>> from lowtide import Chain, Stage, solve
        >>> stages = [Stage(str(k), 1.0, 2.0, output_bytes=1, saved_bytes=1, weight_bytes=10) for k in (1, 2, 3)]
        >>> solve(Chain("three", stages), memory_budget=30, strategy="weights-l2l", bandwidth=10).seconds
        15.0
    """

    def plan(self, problem: Problem) -> Answer:
        """The only schedule of this strategy; copies overlap if the budget has room for both values."""
        period = checked_period(problem, _NAME)
        if problem.memory_budget < period.least_bytes:
            raise problem.infeasible(_NAME, period.least_bytes)
        stays = _stays_over_the_seam(period, problem.memory_budget)
        operations = [*_forwards(period, stays), *_backwards(period, stays, problem.memory_budget)]
        schedule = cyclic_schedule(_NAME, period.num_stages, operations)
        best_seconds = relaxed_seconds(
            period, memory_budget=problem.memory_budget, bandwidth=problem.bandwidth, duplex=problem.duplex
        )
        return Answer(schedule, lower_bound_seconds=best_seconds)

    def minimum_bytes(self, problem: Problem) -> int:
        """Each computation with only its own stage's weights and optimizer state."""
        return checked_period(problem, _NAME).least_bytes


def _stays_over_the_seam(period: Period, memory_budget: int) -> int:
    """The first stage with weights, whose backward and next forward are neighbours: its weights wait on the device
    for that forward, and go to the host after it. 0 where stages without weights lie between and leave no room.
    """
    first = next((k for k, num_bytes in enumerate(period.weight_bytes, start=1) if num_bytes), 1)
    forwards = period.standing_bytes[: first - 1]
    backwards = period.standing_bytes[2 * period.num_stages - first + 1 :]
    between = [*forwards, *map(sum, zip(backwards, reversed(period.optimizer_bytes[: first - 1]), strict=True))]
    fits = all(needed + period.weight_bytes[first - 1] <= memory_budget for needed in between)
    return first if fits else 0


def _forwards(period: Period, stays: int) -> list[Operation]:
    """Fetch, run, free."""
    operations: list[Operation] = []
    for k in range(1, period.num_stages + 1):
        moves = period.weight_bytes[k - 1] > 0
        if moves and k != stays:
            operations.append(Prefetch("w", k))
        operations.append(period.computations[k - 1])
        if moves and k == stays:
            operations.append(Offload("w", k))
        if moves:
            operations.append(Release("w", k))
    return operations


def _backwards(period: Period, stays: int, memory_budget: int) -> list[Operation]:
    """Fetch, run, send back; copies out overlap with the next fetch if both fit."""
    n = period.num_stages
    operations: list[Operation] = []
    leaving: list[tuple[Kind, int, int]] = []  # kind, stage, bytes: offloaded, not yet released
    for j in range(n, 2 * n):
        k = 2 * n - j
        wanted = [entry for entry in _values_of(period, k) if entry[2]]
        on_device = sum(entry[2] for entry in (*wanted, *leaving))
        on_device += period.weight_bytes[stays - 1] if k < stays else 0
        fetches: list[Operation] = [Prefetch(kind, k) for kind, k, _ in wanted]
        releases: list[Operation] = [Release(kind, k) for kind, k, _ in leaving]
        if not wanted and period.standing_bytes[j] + on_device <= memory_budget:
            releases = []  # nothing to fetch meanwhile, and room for what is leaving
        else:
            leaving = []
        both_fit = period.gap_bytes[j] + on_device <= memory_budget
        operations += [*fetches, *releases] if both_fit else [*releases, *fetches]
        operations.append(period.computations[j])
        gone = [entry for entry in wanted if entry[:2] != ("w", stays)]
        operations += [Offload(kind, k) for kind, k, _ in gone]
        leaving += gone
    return [*operations, *(Release(kind, k) for kind, k, _ in leaving)]


def _values_of(period: Period, k: int) -> tuple[tuple[Kind, int, int], ...]:
    return ("w", k, period.weight_bytes[k - 1]), ("opt", k, period.optimizer_bytes[k - 1])
