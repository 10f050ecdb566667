"""A lower bound on the period of every schedule that moves weights: the program of the weights paper, summed up.

Section 6 of the paper states what any schedule must satisfy with variables for each weight and computation, some 6 n²
of them. Here the weights are summed by the kind of trip they make, after their backward, after their forward, or
(optimizer state) around the whole period. Trips of one kind are nested in each other or follow each other, so that
hardly anything is lost, and the program has some 60 n variables. Each row is a sum of what holds for each weight:

- bytes that are away at the start of a computation make up for what exceeds the budget there (equation 4);
- they left after their use and are back before their need: they are within the bytes of the trips that cover it (5);
- they leave only once copied to the host, after the last computation that changed them (6);
- what is copied during a computation and the idle time after it is at most the bandwidth times both (2), and what
  that computation itself changed is copied in the idle time alone (3);
- a trip is made with all of a value or not at all (7, 8), and one copy to the host serves both trips of a weight.

As corrected in the paper's own terms: the layer's own weight counts once, and equation 6 reads sum of (P - D) <= 0.

Positions are those of `weight_selection`, backward n first, followed here from 0 to 3n: a trip that begins in one
period ends in the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lowtide.strategies.numerics.linear_program import LinearProgram
from lowtide.strategies.weights.choices import from_backward
from lowtide.strategies.weights.periods import Period


@dataclass(frozen=True, slots=True)
class _Trips:
    """One kind of trip, a list entry a stage: whether it is made, whether it is copied out for it, and when."""

    made: list[int]
    copied: list[int]
    sizes: list[float]
    changed: list[int]
    use: list[int]
    need: list[int]


@dataclass(frozen=True, slots=True)
class _Flow:
    """A kind of trip along the grid: variables at its points (`away`, `uncopied`) and between them."""

    away: list[int]
    into: list[int]
    out: list[int]
    uncopied: list[int]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The program, and what its figures mean.

    Attributes:
        program: in units of `unit_seconds`, the time to copy the largest value.
        idle: the variables whose sum is the idle time.
        after_backward: by stage, whether w[k] leaves after its backward: the paper's D^(0).
        after_forward: by stage, whether w[k] leaves after its forward: D^(1).
        around: by stage, whether opt[k] leaves.
    """

    program: LinearProgram
    idle: list[int]
    after_backward: list[int]
    after_forward: list[int]
    around: list[int]
    unit_seconds: float
    compute_seconds: float

    def seconds(self, idle: float) -> float:
        """The period that a proven idle time stands for, less what sums of floating-point numbers may differ by."""
        return (self.compute_seconds + idle * self.unit_seconds) * (1.0 - 1e-9)


def relaxation_of(
    period: Period,
    *,
    memory_budget: int,
    bandwidth: int,
    duplex: bool = True,
    whole_values: bool = False,
    num_points: int | None = None,
) -> Relaxation:
    """Write the program down.

    Args:
        period: the computations.
        memory_budget: bytes.
        bandwidth: bytes per second each way, above 0.
        duplex: both directions at once.
        whole_values: bind also what lists of operations add to the paper's model: a value that is arriving while a
            computation runs takes its room from the start of that computation.
        num_points: look at no more than this many positions of the period, those of the highest need among
            neighbours, and sum up what happens between them; None: at all of them.
    """
    n, program = period.num_stages, LinearProgram()
    unit = max(1, *period.weight_bytes, *period.optimizer_bytes)
    seconds = (from_backward(period, period.seconds) * (bandwidth / unit)).tolist()
    excess = (period.resident_bytes + from_backward(period, period.standing_bytes) - memory_budget) / unit
    points = _points(excess, num_points)
    grid = [*points, *(2 * n + point for point in points if point < n), 3 * n]
    idle = program.variables(len(points))
    weights, again, states = _kinds_of_trips(period, program, unit)
    kinds = [trips for trips in (weights, again, states) if any(trips.sizes)]
    flows = [_flow(program, trips, grid) for trips in kinds]
    for index, point in enumerate(points):
        here = [at for at in (index, index + len(points)) if at < len(grid) - 1]
        spent = math.fsum(seconds[point : [*points, 2 * n][index + 1]])
        arriving = [(flow.into[at], 1.0) for flow in flows for at in here]
        leaving = [(flow.out[at], 1.0) for flow in flows for at in here]
        for copies in [arriving, leaving] if duplex else [arriving + leaving]:
            program.row([*copies, (idle[index], -1.0)], -math.inf, spent)
        room = [(flow.away[at], 1.0) for flow in flows for at in here]
        if whole_values:
            (during,) = program.variables(1, seconds[point])
            program.row([*arriving, (during, -1.0), (idle[index], -1.0)], -math.inf, spent - seconds[point])
            room.append((during, -1.0))
        program.row(room, max(0.0, float(excess[point])), math.inf)
        _copy_after_computing(program, kinds, flows, index, grid, idle[index])
    unit_seconds, compute_seconds = unit / bandwidth, math.fsum(period.seconds)
    return Relaxation(program, idle, weights.made, again.made, states.made, unit_seconds, compute_seconds)


def _points(excess: NDArray[np.float64], num_points: int | None) -> list[int]:
    """The positions to look at: 0, and of each group of neighbours the one with the highest need."""
    num_groups = min(len(excess), num_points or len(excess))
    edges = [len(excess) * group // num_groups for group in range(num_groups + 1)]
    best = {begin + int(np.argmax(excess[begin:end])) for begin, end in pairwise(edges)}
    return sorted({0, *best})


def _kinds_of_trips(period: Period, program: LinearProgram, unit: int) -> tuple[_Trips, _Trips, _Trips]:
    """Weights after their backward, weights after their forward, optimizer state."""
    n, stages = period.num_stages, range(1, period.num_stages + 1)
    weights = [size / unit for size in period.weight_bytes]
    states = [size / unit for size in period.optimizer_bytes]
    backward, forward = [n - k for k in stages], [n + k - 1 for k in stages]
    following = [2 * n + position for position in backward]
    first, second, third = (program.variables(n, 1.0, integral=True) for _ in range(3))
    own_copy = program.variables(n, 1.0)  # of a weight that leaves after its forward alone
    for k in range(n):
        # A trip that covers no computation makes no room at one; left out of the sums, no row is broken by it. Nor by
        # counting two trips between the same uses as one long one.
        program.upper[first[k]] = 1.0 if weights[k] and forward[k] - backward[k] > 1 else 0.0
        program.upper[second[k]] = 1.0 if weights[k] and following[k] - forward[k] > 1 else 0.0
        program.upper[third[k]] = 1.0 if states[k] else 0.0
        program.row([(own_copy[k], 1.0), (second[k], -1.0), (first[k], 1.0)], 0.0, math.inf)
    return (
        _Trips(first, first, weights, backward, backward, forward),
        _Trips(second, own_copy, weights, backward, forward, following),
        _Trips(third, third, states, backward, backward, following),
    )


def _flow(program: LinearProgram, trips: _Trips, grid: list[int]) -> _Flow:
    """The bytes of one kind of trip along the grid: away, copied in, copied out, and how they depend."""
    end = len(grid) - 1
    away, covered = program.variables(end + 1), program.variables(end + 1)
    into, gone, out = program.variables(end), program.variables(end), program.variables(end)
    uncopied, ready = program.variables(end + 1), program.variables(end + 1)
    for start in (away, covered, uncopied, ready):
        program.upper[start[0]] = 0.0
    program.upper[away[end]] = 0.0
    at_change, at_use = _by_interval(trips.changed, grid), _by_interval(trips.use, grid)
    at_need = _by_interval([need - 1 for need in trips.need], grid)  # covered up to the position before
    for at in range(end):
        made = [(trips.made[k], -trips.sizes[k]) for k in at_use[at]]
        ended = [(trips.made[k], trips.sizes[k]) for k in at_need[at]]
        changed = [(trips.copied[k], -trips.sizes[k]) for k in at_change[at]]
        program.row([(covered[at + 1], 1.0), (covered[at], -1.0), *made, *ended])
        program.row([(away[at], 1.0), (covered[at], -1.0)], -math.inf)
        program.row([(away[at + 1], 1.0), (away[at], -1.0), (into[at], 1.0), (gone[at], -1.0)])
        # What comes back was away when a computation started; between distant points it left after a use, at least.
        source = [(away[at], -1.0)] if grid[at + 1] - grid[at] == 1 else [(covered[at], -1.0), *made]
        program.row([(into[at], 1.0), *source], -math.inf)
        program.row([(uncopied[at + 1], 1.0), (uncopied[at], -1.0), (out[at], 1.0), *changed])
        # Copied and not yet gone; a weight that is on the host since its backward needs no copy after its forward.
        free = made + [(trips.copied[k], trips.sizes[k]) for k in at_use[at]]
        free = free if trips.made is not trips.copied else []
        program.row([(ready[at + 1], 1.0), (ready[at], -1.0), (out[at], -1.0), (gone[at], 1.0), *free])
    program.row([*((at, 1.0) for at in into), *((m, -s) for m, s in zip(trips.made, trips.sizes, strict=True))])
    program.row([*((at, 1.0) for at in out), *((c, -s) for c, s in zip(trips.copied, trips.sizes, strict=True))])
    return _Flow(away, into, out, uncopied)


def _by_interval(positions: list[int], grid: list[int]) -> list[list[int]]:
    """For each interval of the grid, which entries of `positions` lie in it."""
    found: list[list[int]] = [[] for _ in grid[1:]]
    for k, at in enumerate(np.searchsorted(grid, positions, side="right").tolist()):
        found[at - 1].append(k)
    return found


def _copy_after_computing(
    program: LinearProgram, kinds: Sequence[_Trips], flows: Sequence[_Flow], index: int, grid: list[int], idle: int
) -> None:
    """Equation 3: what the last computation before a point changes is copied after it, so only in the idle time."""
    last = grid[index + 1] - 1
    own = [
        [(trips.copied[k], -trips.sizes[k]) for k, changed in enumerate(trips.changed) if changed == last]
        for trips in kinds
    ]
    left = [(flow.uncopied[index + 1], 1.0) for flow in flows]
    for terms, rest in zip(own, left, strict=True):
        if terms:
            program.row([rest, (idle, 1.0), *terms], 0.0, math.inf)
    if any(own):
        program.row([*left, (idle, 1.0), *(term for terms in own for term in terms)], 0.0, math.inf)


# For the bound that goes with every answer. On chains like those of the paper's table 1 it is then within 1 % of the
# bound at all positions (4 % for 1000 stages) and takes 0.1 s (1 s).
_NUM_POINTS_OF_ANSWERS = 32


def relaxed_seconds(period: Period, *, memory_budget: int, bandwidth: int, duplex: bool) -> float:
    """A lower bound in a fraction of a second: the program without integrality, at few points."""
    relaxation = relaxation_of(
        period,
        memory_budget=memory_budget,
        bandwidth=bandwidth,
        duplex=duplex,
        whole_values=True,
        num_points=_NUM_POINTS_OF_ANSWERS,
    )
    return relaxation.seconds(relaxation.program.minimize(relaxation.idle, relaxed=True).proven)
