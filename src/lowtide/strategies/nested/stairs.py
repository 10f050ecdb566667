"""The least time of nested persistent schedules for every budget at once, in exact bytes: for chains that are not long.

With more memory the least time of s..t falls in steps. Where there are few stages there are few steps (less than a
thousand for a hundred stages, all of different sizes), and the recursion can be done on the steps themselves: no slots,
no rounding. The steps of a split are those of its two parts taken together; the steps of s..t are the lowest of all its
options'. What this costs grows with about the fourth power of the number of stages; where it becomes too much, rows of
slots are filled instead (`nested_fill`).

Reference: Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, theorem 1; the staircases are ours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.strategies.nested.costs import Bytes, Costs, Indices, Seconds
from lowtide.strategies.nested.least import forward_peak, idle_after, own_peak, slower_as
from lowtide.strategies.numerics.kernels import kernel, kernel_part

_NEVER = 2**62

# By what share of a step sums of its seconds in another order may differ.
_ROUNDING = 1e-9

# What an exact answer may cost, in steps of about 15 ns.
_MOST_STEPS = 2**26

# Staircases of so many stages say how the rest will grow.
_ENOUGH_STAGES = 12

# All stairs together, 16 bytes each; chains that stay within `_MOST_STEPS` have about a million.
_MOST_STAIRS = 2**22


class Stairs(NamedTuple):
    """The stairs of all s..t in one list, those of (s, t) from `first` to `end` - 1, by rising bytes."""

    first: Indices
    end: Indices
    from_bytes: Bytes
    """From so many bytes on ..."""
    slower: Seconds
    """... s..t takes so much longer than its fastest schedule."""


class _Scratch(NamedTuple):
    """Room for three staircases: the lowest so far, the option to be put under it, and the result."""

    from_bytes: Bytes
    slower: Seconds


def stairs_of(costs: Costs, available_bytes: int, most_slower: float = np.inf) -> Stairs | None:
    """The staircases of every s..t up to a budget; None where that would cost too much.

    Where a schedule of 1..n is known that takes `most_slower` longer than the fastest, no part of a better one takes
    more than that: such stairs are left out, and there are far fewer.
    """
    room = np.empty(_MOST_STAIRS, np.int64), np.empty(_MOST_STAIRS)
    stairs = empty_stairs(costs.num_stages)._replace(from_bytes=room[0], slower=room[1])
    scratch = _Scratch(np.empty((3, _MOST_STAIRS // 64), np.int64), np.empty((3, _MOST_STAIRS // 64)))
    limit = most_slower + _ROUNDING * costs.fastest_seconds
    return stairs if _fill(costs, stairs, scratch, available_bytes, limit, _MOST_STEPS) else None


def empty_stairs(num_stages: int) -> Stairs:
    """No stairs."""
    square = (num_stages + 2, num_stages + 2)
    return Stairs(np.zeros(square, np.int64), np.zeros(square, np.int64), np.empty(0, np.int64), np.empty(0))


@kernel
def _fill(
    costs: Costs, stairs: Stairs, scratch: _Scratch, available_bytes: int, most_slower: float, most_steps: int
) -> bool:
    """Fill in all staircases up to a budget; False where that would take too many steps."""
    n = costs.activation.shape[0] - 1
    num_stairs, num_steps = 0, 0
    for s in range(n, 0, -1):
        # Inside a larger schedule, a[s-1] is stored by itself or within abar[s-1], and side values may be idle.
        most = available_bytes - (costs.activation[s - 1] if s > 1 else 0)
        for k in range(2, s):
            most += idle_after(costs, 1, k, s)
        for t in range(s, n + 1):
            # What ends at t < n was split off from what follows, so that its forwards run again.
            again = costs.split_until[t + 1] - costs.forward_until[s - 1] if t < n else 0.0
            count, lowest, steps = _lowest(costs, stairs, scratch, s, t, most, most_slower - again)
            num_steps += steps
            if count < 0 or num_stairs + count > stairs.from_bytes.shape[0]:
                return False
            stairs.first[s, t], stairs.end[s, t] = num_stairs, num_stairs + count
            for i in range(count):
                stairs.from_bytes[num_stairs + i] = scratch.from_bytes[lowest, i]
                stairs.slower[num_stairs + i] = scratch.slower[lowest, i]
            num_stairs += count
        done = n - s + 1
        if num_steps > most_steps or (done >= _ENOUGH_STAGES and num_steps * (n / done) ** 4 > most_steps):
            return False
    return True


@kernel_part
def _lowest(
    costs: Costs, stairs: Stairs, scratch: _Scratch, s: int, t: int, most: int, most_slower: float
) -> tuple[int, int, int]:
    """The staircase of s..t, into the scratch: how many stairs (-1: too many), where, and what it took."""
    lowest, count, num_steps = 0, 0, 0
    most_stairs = (
        scratch.from_bytes.shape[1] // 3
    )  # an option has at most as many as two rows, and is put under a third
    if s == t or costs.saves_ahead:
        for way in range(costs.first_way[s], costs.first_way[s + 1]):
            added = _option_all(costs, stairs, scratch, way, s, t, most, most_slower)
            num_steps += added + count
            if added:
                count, lowest = _merged(scratch, lowest, count, added), 1 - lowest
            if count > most_stairs:
                return -1, lowest, num_steps
    begin, idle = 0, 0
    for p in range(s + 1, t + 1):
        begin = max(begin, forward_peak(costs, s, p - 1, t) - idle)
        idle += idle_after(costs, s, p - 1, t)
        seconds = costs.split_until[p] - costs.forward_until[s - 1]
        if begin > most or seconds > most_slower:
            break
        held = costs.activation[p - 1] - idle
        added, steps = _option_split(stairs, scratch, lowest, count, s, p, t, held, begin, most, seconds, most_slower)
        num_steps += steps
        if added:
            num_steps += added + count
            count, lowest = _merged(scratch, lowest, count, added), 1 - lowest
        if count > most_stairs:
            return -1, lowest, num_steps
    return count, lowest, num_steps


@kernel_part
def _option_all(
    costs: Costs, stairs: Stairs, scratch: _Scratch, way: int, s: int, t: int, most: int, most_slower: float
) -> int:
    """The staircase of starting s..t with `all`, into the scratch's place 2; return how many stairs it has."""
    to_bytes, to_slower = scratch.from_bytes[2], scratch.slower[2]
    peak, saved, seconds = own_peak(costs, way, s, t), costs.way_saved[way], slower_as(costs, way, s, t)
    if s == t:
        to_bytes[0], to_slower[0] = peak, seconds
        return 1 if peak <= most and seconds <= most_slower else 0
    count = 0
    for i in range(stairs.first[s + 1, t], stairs.end[s + 1, t]):
        begin = max(peak, stairs.from_bytes[i] + saved)
        if begin > most:
            break
        if stairs.slower[i] + seconds > most_slower:
            continue
        if count and to_bytes[count - 1] == begin:
            count -= 1  # the lower one counts
        to_bytes[count], to_slower[count] = begin, stairs.slower[i] + seconds
        count += 1
    return count


@kernel_part
def _option_split(
    stairs: Stairs,
    scratch: _Scratch,
    lowest: int,
    num_lowest: int,
    s: int,
    p: int,
    t: int,
    held: int,
    begin: int,
    most: int,
    seconds: float,
    most_slower: float,
) -> tuple[int, int]:
    """The staircase of splitting s..t at p, as far as it lies below the lowest so far, into the scratch's place 2.

    Returns how many stairs it has, and what it took.
    """
    from_bytes, slower = stairs.from_bytes, stairs.slower
    low_bytes, low_slower = scratch.from_bytes[lowest], scratch.slower[lowest]
    to_bytes, to_slower = scratch.from_bytes[2], scratch.slower[2]
    one, one_last = stairs.first[p, t], stairs.end[p, t] - 1
    other, other_last = stairs.first[s, p - 1], stairs.end[s, p - 1] - 1
    if one > one_last or other > other_last:
        return 0, 0
    lowest_value = seconds + slower_by_stairs(stairs, p, t, most - held) + slower_by_stairs(stairs, s, p - 1, most)
    here, count, below, num_steps = max(begin, from_bytes[one] + held, from_bytes[other]), 0, -1, 0
    while here <= most:
        while one < one_last and from_bytes[one + 1] + held <= here:
            one += 1
        while other < other_last and from_bytes[other + 1] <= here:
            other += 1
        while below + 1 < num_lowest and low_bytes[below + 1] <= here:
            below += 1
        num_steps += 1
        if below >= 0 and low_slower[below] <= lowest_value:
            break  # no split at p is lower than with all the memory that there is
        value = slower[one] + slower[other] + seconds
        if value <= most_slower and (below < 0 or value < low_slower[below]):
            to_bytes[count], to_slower[count] = here, value
            count += 1
        next_one = from_bytes[one + 1] + held if one < one_last else _NEVER
        next_other = from_bytes[other + 1] if other < other_last else _NEVER
        here = min(next_one, next_other)
    return count, num_steps


@kernel_part
def _merged(scratch: _Scratch, lowest: int, num_lowest: int, num_added: int) -> int:
    """The lower of two staircases, that at `lowest` and that at 2, into place 1 - `lowest`; return how many stairs."""
    low_bytes, low_slower = scratch.from_bytes[lowest], scratch.slower[lowest]
    add_bytes, add_slower = scratch.from_bytes[2], scratch.slower[2]
    to_bytes, to_slower = scratch.from_bytes[1 - lowest], scratch.slower[1 - lowest]
    i, j, count, last = 0, 0, 0, np.inf
    while i < num_lowest or j < num_added:
        if j == num_added or (i < num_lowest and low_bytes[i] <= add_bytes[j]):
            here, value = low_bytes[i], low_slower[i]
            i += 1
        else:
            here, value = add_bytes[j], add_slower[j]
            j += 1
        if value < last:
            if count and to_bytes[count - 1] == here:
                count -= 1
            to_bytes[count], to_slower[count] = here, value
            count += 1
            last = value
    return count


@kernel_part
def slower_by_stairs(stairs: Stairs, s: int, t: int, available_bytes: int) -> float:
    """What s..t takes above its fastest schedule with this many bytes."""
    first = stairs.first[s, t]
    low, high = first, stairs.end[s, t]
    while low < high:
        middle = (low + high) >> 1
        if stairs.from_bytes[middle] <= available_bytes:
            low = middle + 1
        else:
            high = middle
    return float(stairs.slower[low - 1]) if low > first else np.inf
