"""Rows of the table over nested persistent schedules: where they lie, and what they say between slots.

Row (s, t) holds, for each number of slots m, how much longer s..t takes with m slots than its fastest schedule. It
never rises with m, is infinite below the least memory of s..t and 0 from its ample memory on, so only the part between
is stored, in whole blocks. A number of bytes that is not a whole number of slots is taken at a value between the two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.strategies.nested.costs import Costs, Indices, Seconds
from lowtide.strategies.nested.least import Least
from lowtide.strategies.numerics.kernels import fast_kernel_part, kernel, kernel_part
from lowtide.strategies.slots import rounded_down, rounded_up

# Rows are stored and compared in blocks of so many slots: two cache lines of float64.
BLOCK = 16


class Rows(NamedTuple):
    """The rows of one table: slot m of a row is `values[origin + m]`.

    Stored are the blocks from the one that holds `lowest` to the one before `highest`; what they hold below `lowest` is
    infinite, from `highest` on 0.
    """

    lowest: NDArray[np.int32]
    """Fewer slots do not suffice."""
    highest: NDArray[np.int32]
    """From here on the fastest schedule fits, or no budget of the table reaches so far."""
    origin: Indices
    values: Seconds
    floors: Seconds
    """Of each row, the last and so the smallest value of every block, stored or not."""


def make_rows(costs: Costs, least: Least, unit_bytes: int, num_slots: int, *, with_input: bool) -> Rows:
    """Rows without values.

    Args:
        costs: the chain.
        least: its least memory.
        unit_bytes: the bytes of a slot.
        num_slots: the slots of the largest budget.
        with_input: False: the slots of row (s, t) are what s..t has, and its index is (s, t). True: they hold a[s-1]
            too, and its index is (t, s).
    """
    square = least.least_bytes.shape
    lowest, highest = np.zeros(square, np.int32), np.zeros(square, np.int32)
    origin = np.zeros(square, np.int64)
    size = _lay(costs, least, unit_bytes, num_slots, with_input, lowest, highest, origin)
    return Rows(lowest, highest, origin, np.empty(size), np.empty((*square, (num_slots + 1) // BLOCK + 1)))


def empty_rows(num_stages: int) -> Rows:
    """The rows where even the fastest schedule fits: nothing between infinite and 0 will be asked for."""
    ends = np.zeros((num_stages + 2, num_stages + 2), np.int32)
    return Rows(ends, ends, ends.astype(np.int64), np.empty(0), np.empty((0, 0, 0)))


@kernel
def _lay(
    costs: Costs,
    least: Least,
    unit_bytes: int,
    num_slots: int,
    with_input: bool,
    lowest: NDArray[np.int32],
    highest: NDArray[np.int32],
    origin: Indices,
) -> int:
    """Note the lowest and highest slot of each row and where it lies; return how many values all have together."""
    n = costs.activation.shape[0] - 1
    size = 0
    for s in range(2 if with_input else 1, n + 1):
        held = costs.activation[s - 1] if with_input else 0
        # Inside a larger schedule, a[s-1] is stored by itself or within abar[s-1].
        most = num_slots if with_input or s == 1 else num_slots - rounded_down(costs.activation[s - 1], unit_bytes)
        for t in range(s, n + 1):
            low = min(rounded_up(held + least.least_bytes[s, t], unit_bytes), num_slots + 1)
            high = max(low, min(rounded_up(held + least.ample_bytes[s, t], unit_bytes), most + 1))
            place = (t, s) if with_input else (s, t)
            lowest[place], highest[place], origin[place] = low, high, size - low // BLOCK * BLOCK
            size += (rounded_up(high, BLOCK) - low // BLOCK) * BLOCK
    return size


@kernel_part
def opened(rows: Rows, i: int, j: int) -> Seconds:
    """The stored part of row (i, j) from its lowest slot to its highest, what lies around it in its blocks set."""
    values, low, high, origin = rows.values, rows.lowest[i, j], rows.highest[i, j], rows.origin[i, j]
    for m in range(low // BLOCK * BLOCK, low):
        values[origin + m] = np.inf
    for m in range(high, rounded_up(high, BLOCK) * BLOCK):
        values[origin + m] = 0.0
    return values[origin + low : origin + high]


@kernel_part
def closed(rows: Rows, i: int, j: int) -> None:
    """Note the floors of row (i, j), whose values are final."""
    values, floors, origin = rows.values, rows.floors, rows.origin[i, j]
    first, end = rows.lowest[i, j] // BLOCK, rounded_up(rows.highest[i, j], BLOCK)
    for block in range(floors.shape[2]):
        if block < first:
            floors[i, j, block] = np.inf
        else:
            floors[i, j, block] = values[origin + (block + 1) * BLOCK - 1] if block < end else 0.0


@kernel_part
def made_falling(row: Seconds) -> None:
    """What fits in fewer slots fits in more."""
    for i in range(1, row.shape[0]):
        if row[i] > row[i - 1]:
            row[i] = row[i - 1]


@fast_kernel_part
def shifted(
    least: Least, rows: Rows, unit_bytes: int, s: int, t: int, held_bytes: int, begin: int, result: Seconds
) -> None:
    """What s..t takes where `held_bytes` hold something else: for each number of slots from `begin` on."""
    values, origin, low, high = rows.values, rows.origin[s, t], rows.lowest[s, t], rows.highest[s, t]
    limits = (least.least_bytes[s, t], least.slower[s, t], least.ample_bytes[s, t])
    whole = rounded_down(held_bytes, unit_bytes)
    share = held_bytes / unit_bytes - whole
    end = begin + result.shape[0]
    # From `first` to `last` - 1 both neighbours are stored; there the mean is a vector operation.
    first = min(end, max(begin, low + whole + 1))
    last = max(first, min(end, high + whole))
    for m in range(begin, first):
        result[m - begin] = between(values, origin, low, high, limits, unit_bytes, m * unit_bytes - held_bytes)
    if first < last:
        _mean(
            result[first - begin : last - begin],
            values[origin + first - whole : origin + last - whole],
            values[origin + first - whole - 1 : origin + last - whole - 1],
            share,
        )
    for m in range(last, end):
        result[m - begin] = between(values, origin, low, high, limits, unit_bytes, m * unit_bytes - held_bytes)


@fast_kernel_part
def _mean(result: Seconds, one: Seconds, other: Seconds, share: float) -> None:
    for i in range(result.shape[0]):
        result[i] = one[i] + share * (other[i] - one[i])


@kernel_part
def slower_by_rows(least: Least, rows: Rows, unit_bytes: int, s: int, t: int, available_bytes: int) -> float:
    """What s..t takes above its fastest schedule with this many bytes, as far as the table knows."""
    limits = (least.least_bytes[s, t], least.slower[s, t], least.ample_bytes[s, t])
    origin, low, high = rows.origin[s, t], rows.lowest[s, t], rows.highest[s, t]
    return between(rows.values, origin, low, high, limits, unit_bytes, available_bytes)


@kernel_part
def between(
    values: Seconds,
    origin: int,
    low: int,
    high: int,
    limits: tuple[int, float, int],
    unit_bytes: int,
    available_bytes: int,
) -> float:
    """The value of a row at a number of bytes; `limits` are the row's entries of `Least`."""
    least_bytes, least_slower, ample_bytes = limits
    if available_bytes >= ample_bytes:
        return 0.0
    if available_bytes < least_bytes:
        return np.inf
    slot = rounded_down(available_bytes, unit_bytes)
    if low == high or slot + 1 < low:
        return least_slower
    if slot < low:
        here, here_bytes = least_slower, least_bytes
    else:
        slot = min(slot, high - 1)
        here, here_bytes = values[origin + slot], slot * unit_bytes
    if slot + 1 < high:
        there = values[origin + slot + 1]
    else:
        there = 0.0 if high * unit_bytes >= ample_bytes else here
    return float(here + (available_bytes - here_bytes) / ((slot + 1) * unit_bytes - here_bytes) * (there - here))


@fast_kernel_part
def lower(row: Seconds, other: Seconds, seconds: float) -> None:
    """Lower a row to another one that takes `seconds` more."""
    for i in range(row.shape[0]):
        value = other[i] + seconds
        row[i] = value if value < row[i] else row[i]
