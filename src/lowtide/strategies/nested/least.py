"""The least memory of nested persistent schedules, exact to the byte, compiled.

The same recursion as that of the least time (see `nested_table`), with the larger of two peaks where that has a sum: no
budget comes into it, so it takes O(n³) for all s..t together and needs no slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.strategies.nested.costs import Bytes, Costs, Seconds
from lowtide.strategies.numerics.kernels import kernel, kernel_part

# Above the sum of any sizes a chain can have.
_NEVER = 2**62


class Least(NamedTuple):
    """For every s..t, in bytes available to it (see `nested`), entry (s, t)."""

    least_bytes: Bytes
    """No schedule does with less."""
    slower: Seconds
    """A schedule that does with it takes this much longer than the fastest."""
    ample_bytes: Bytes
    """The fastest schedule does with this; more does not help."""


def least_memory(costs: Costs) -> Least:
    """The least memory that any s..t can do with, and the most that it can use."""
    square = (costs.num_stages + 2, costs.num_stages + 2)
    least = Least(np.zeros(square, np.int64), np.zeros(square), np.zeros(square, np.int64))
    _fill(costs, *least, np.zeros(square, np.int64), np.zeros(square))
    return least


@kernel
def _fill(
    costs: Costs, least: Bytes, slower: Seconds, ample: Bytes, least_by_end: Bytes, slower_by_end: Seconds
) -> None:
    """Fill the entries (s, t), and those that the loop over splits reads along rows also at (t, s)."""
    n = costs.activation.shape[0] - 1
    for s in range(n, 0, -1):
        for t in range(s, n + 1):
            best, best_slower, most = _least_all(costs, least, slower, ample, s, t)
            peak, idle = 0, 0
            for p in range(s + 1, t + 1):
                peak = max(peak, forward_peak(costs, s, p - 1, t) - idle)
                idle += idle_after(costs, s, p - 1, t)
                needs = max(peak, costs.activation[p - 1] - idle + least_by_end[t, p], least[s, p - 1])
                if needs <= best:
                    takes = costs.split_until[p] - costs.forward_until[s - 1] + slower_by_end[t, p] + slower[s, p - 1]
                    if needs < best or takes < best_slower:
                        best, best_slower = needs, takes
            least[s, t] = least_by_end[t, s] = best
            slower[s, t] = slower_by_end[t, s] = best_slower
            ample[s, t] = most


@kernel_part
def _least_all(costs: Costs, least: Bytes, slower: Seconds, ample: Bytes, s: int, t: int) -> tuple[int, float, int]:
    """What starting s..t with `all` needs at least, how much slower that is, and what the fastest schedule needs."""
    best, best_slower, most = _NEVER, np.inf, _NEVER
    if s < t and not costs.saves_ahead:
        during_forward = forward_peak(costs, s, s, t)
        return best, best_slower, max(during_forward, costs.activation[s] + ample[s + 1, t], ample[s, s])
    for way in range(costs.first_way[s], costs.first_way[s + 1]):
        needs = at_most = own_peak(costs, way, s, t)
        own_slower = takes = slower_as(costs, way, s, t)
        if s < t:
            needs = max(needs, costs.way_saved[way] + least[s + 1, t])
            at_most = max(at_most, costs.way_saved[way] + ample[s + 1, t])
            takes += slower[s + 1, t]
        if needs < best or (needs == best and takes < best_slower):
            best, best_slower = needs, takes
        if own_slower == 0.0:
            most = min(most, at_most)
    return best, best_slower, most


@kernel_part
def slower_as(costs: Costs, way: int, s: int, t: int) -> float:
    """What a way of stage s takes above its fastest, at the beginning of s..t."""
    return float(costs.way_slower_last[way] if s == t else costs.way_slower[way])


@kernel_part
def beside_forward(costs: Costs, k: int, t: int) -> int:
    """What stands beside s..t during forward k."""
    return int(costs.beside[t] + costs.sides[k, t]) if costs.sides.shape[0] else int(costs.beside[t])


@kernel_part
def idle_after(costs: Costs, s: int, k: int, t: int) -> int:
    """The side values that become idle after forward k on the way from s to a split of s..t."""
    idle, num_bytes = costs.idle_first if t == costs.activation.shape[0] - 1 else costs.idle, 0
    for entry in range(idle.first[k], idle.first[k + 1]):
        if idle.maker[entry] >= s and idle.next_reader[entry] > t:
            num_bytes += idle.num_bytes[entry]
    return int(num_bytes)


@kernel_part
def held_by_split(costs: Costs, s: int, p: int, t: int) -> int:
    """What a split of s..t at p takes away from p..t: a[p-1], less the side values that are idle."""
    held = int(costs.activation[p - 1])
    for k in range(s + 1, p):
        held -= idle_after(costs, s, k, t)
    return held


@kernel_part
def own_peak(costs: Costs, way: int, s: int, t: int) -> int:
    """The peak of the forward of stage s in a way, with what stands beside s..t, and of its backward."""
    during_forward = beside_forward(costs, s, t) + costs.way_forward[way]
    if t < costs.outliving_saving.shape[0] and t == costs.activation.shape[0] - 1:
        during_forward += costs.outliving_saving[s]
    return int(max(during_forward, costs.way_backward[way]))


@kernel_part
def forward_peak(costs: Costs, s: int, k: int, t: int) -> int:
    """The peak of forward k on the way from s to a split of s..t; the input of s itself is not counted, and idle side
    values are.
    """
    peak = beside_forward(costs, k, t) + int(costs.activation[k] + costs.forward_extra[k])
    if t < costs.outliving.shape[0] and t == costs.activation.shape[0] - 1:
        peak += int(costs.outliving[k, s])
    return peak + int(costs.activation[k - 1]) if k > s else peak
