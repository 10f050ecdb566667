"""The dynamic program over nested persistent schedules, compiled.

Three parts, each a kernel over `nested.Costs`:

- `least_memory`: for every s..t the least bytes with which it can be done at all, in exact bytes, O(n³);
- `Table`: for every s..t and every number of slots m the least time with m slots. Row (s, t) holds only the slots from
  the least that suffice up to where more memory cannot help, so that rows are short and free of infinities;
- `Table.decisions`: the schedule for any budget up to the table's. It carries bytes, not slots, from a schedule to the
  schedules inside it and decides anew for each, so it is never slower than the table says and wins back what rounding
  gave away.

Rows are filled tile by tile in order of t - s; the tiles of one distance do not depend on each other and run on a
thread each. Decisions are not stored: finding them again takes O(n) for each of the at most 2n sub-schedules.

Reference: Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, theorem 1 and algorithms 1 and 2.
Two things are said differently: the peak of the forwards before a split at p counts only the stages up to p - 1, since
with variants the later ones may run in a way that takes less; and delta[s-1] counts in the peak of backward s.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lowtide.strategies.nested import Bytes, Costs, Indices, Seconds
from lowtide.strategies.slots import Slots, rounded_down, rounded_up

# Above the sum of any sizes a chain can have.
_NEVER = 2**62

# Rows of 500 float64 take 4 kB: the rows that a tile of 8 x 8 reads for one split stay in a second-level cache.
_TILE = 8

# No NaN and no signed zero occurs here; saying so lets the compiler use the vector minimum.
_FAST = {"nnan", "nsz"}


class Least(NamedTuple):
    """For every s..t, in bytes available to it (see `nested`), entry (s, t)."""

    least_bytes: Bytes
    """No schedule does with less."""
    slower: Seconds
    """A schedule that does with it takes this much longer than the fastest."""
    ample_bytes: Bytes
    """The fastest schedule does with this; more does not help."""


class Rows(NamedTuple):
    """Where row (s, t) lies: slot m is `values[offset + m - lowest]` for lowest <= m < highest."""

    lowest: NDArray[np.int32]
    """Fewer slots do not suffice."""
    highest: NDArray[np.int32]
    """From here on the fastest schedule fits, or no budget of the table reaches so far."""
    offset: Indices


@njit(cache=True, nogil=True)
def least_memory(costs: Costs) -> Least:
    """The least and the most memory that any s..t can use."""
    n = costs.activation.shape[0] - 1
    least = np.zeros((n + 2, n + 2), np.int64)
    slower = np.zeros((n + 2, n + 2))
    ample = np.zeros((n + 2, n + 2), np.int64)
    # The same by (t, s): the loop over splits reads both along rows.
    least_by_end = np.zeros((n + 2, n + 2), np.int64)
    slower_by_end = np.zeros((n + 2, n + 2))
    for s in range(n, 0, -1):
        for t in range(s, n + 1):
            best, best_slower, most = _least_all(costs, least, slower, ample, s, t)
            peak = 0
            for p in range(s + 1, t + 1):
                peak = max(peak, _forward_peak(costs, s, p - 1))
                needs = max(costs.beside[t] + peak, costs.activation[p - 1] + least_by_end[t, p], least[s, p - 1])
                if needs <= best:
                    takes = costs.split_until[p] - costs.forward_until[s - 1] + slower_by_end[t, p] + slower[s, p - 1]
                    if needs < best or takes < best_slower:
                        best, best_slower = needs, takes
            least[s, t] = least_by_end[t, s] = best
            slower[s, t] = slower_by_end[t, s] = best_slower
            ample[s, t] = most
    return Least(least, slower, ample)


@njit(cache=True, nogil=True)
def _least_all(costs: Costs, least: Bytes, slower: Seconds, ample: Bytes, s: int, t: int) -> tuple[int, float, int]:
    """What starting s..t with `all` needs at least, how much slower that is, and what the fastest schedule needs."""
    best, best_slower, most = _NEVER, np.inf, _NEVER
    if s < t and not costs.saves_ahead:
        during_forward = costs.beside[t] + _forward_peak(costs, s, s)
        return best, best_slower, max(during_forward, costs.activation[s] + ample[s + 1, t], ample[s, s])
    for way in range(costs.first_way[s], costs.first_way[s + 1]):
        needs = at_most = _own_peak(costs, way, t)
        takes = costs.way_slower[way]
        if s < t:
            needs = max(needs, costs.way_saved[way] + least[s + 1, t])
            at_most = max(at_most, costs.way_saved[way] + ample[s + 1, t])
            takes += slower[s + 1, t]
        if needs < best or (needs == best and takes < best_slower):
            best, best_slower = needs, takes
        if costs.way_slower[way] == 0.0:
            most = min(most, at_most)
    return best, best_slower, most


@njit(cache=True, nogil=True)
def _own_peak(costs: Costs, way: int, t: int) -> int:
    """The peak of a way's forward, with what stands beside s..t, and of its backward."""
    return int(max(costs.beside[t] + costs.way_forward[way], costs.way_backward[way]))


@njit(cache=True, nogil=True)
def _forward_peak(costs: Costs, s: int, k: int) -> int:
    """The peak of forward k on the way from s to a split; the input of s itself is not counted."""
    peak = int(costs.activation[k] + costs.forward_extra[k])
    return peak + int(costs.activation[k - 1]) if k > s else peak


@njit(cache=True, nogil=True)
def _lay_rows(costs: Costs, least: Least, unit_bytes: int, num_slots: int) -> tuple[Rows, int]:
    """Where each row lies, and how long all are together."""
    n = costs.activation.shape[0] - 1
    lowest = np.zeros((n + 2, n + 2), np.int32)
    highest = np.zeros((n + 2, n + 2), np.int32)
    offset = np.zeros((n + 2, n + 2), np.int64)
    size = 0
    for s in range(1, n + 1):
        # Inside a larger schedule, a[s-1] is stored by itself or within abar[s-1].
        most = num_slots - (rounded_up(costs.activation[s - 1], unit_bytes) if s > 1 else 0)
        for t in range(s, n + 1):
            low = min(rounded_up(least.least_bytes[s, t], unit_bytes), num_slots + 1)
            high = max(low, min(rounded_up(least.ample_bytes[s, t], unit_bytes), most + 1))
            lowest[s, t], highest[s, t], offset[s, t] = low, high, size
            size += high - low
    return Rows(lowest, highest, offset), size


@njit(cache=True, nogil=True, fastmath=_FAST)
def _fill_tile(
    costs: Costs, least: Least, rows: Rows, values: Seconds, unit_bytes: int, s_first: int, t_first: int, tile: int
) -> None:
    """Fill the rows of s_first <= s < s_first + tile, t_first <= t < t_first + tile; all shorter s..t are there."""
    n = costs.activation.shape[0] - 1
    for s in range(min(s_first + tile - 1, n), s_first - 1, -1):
        for t in range(max(s, t_first), min(t_first + tile - 1, n) + 1):
            num_values = rows.highest[s, t] - rows.lowest[s, t]
            if num_values > 0:
                row = values[rows.offset[s, t] : rows.offset[s, t] + num_values]
                row[:] = least.slower[s, t]
                if s == t or costs.saves_ahead:
                    _try_all(costs, rows, values, row, unit_bytes, s, t)
                _make_falling(row)
                _try_splits(costs, rows, values, row, unit_bytes, s, t)
                _make_falling(row)


@njit(cache=True, nogil=True, fastmath=_FAST)
def _try_all(costs: Costs, rows: Rows, values: Seconds, row: Seconds, unit_bytes: int, s: int, t: int) -> None:
    """Lower a row to what starting with `all` costs, over the ways of stage s."""
    low, high = rows.lowest[s, t], rows.highest[s, t]
    for way in range(costs.first_way[s], costs.first_way[s + 1]):
        begin = max(low, rounded_up(_own_peak(costs, way, t), unit_bytes))
        flat = begin
        if s < t:
            shift = rounded_up(costs.way_saved[way], unit_bytes)
            begin = max(begin, rows.lowest[s + 1, t] + shift)
            flat = max(begin, rows.highest[s + 1, t] + shift)
            end = min(flat, high)
            if begin < end:
                first = rows.offset[s + 1, t] + begin - shift - rows.lowest[s + 1, t]
                _lower(row[begin - low : end - low], values[first : first + end - begin], costs.way_slower[way])
        if flat < high:
            row[flat - low] = min(row[flat - low], costs.way_slower[way])


@njit(cache=True, nogil=True, fastmath=_FAST)
def _try_splits(costs: Costs, rows: Rows, values: Seconds, row: Seconds, unit_bytes: int, s: int, t: int) -> None:
    """Lower a row to what splits at s+1..t cost."""
    low, high = rows.lowest[s, t], rows.highest[s, t]
    peak = 0
    begin_forward = 0
    for p in range(s + 1, t + 1):
        seconds = costs.split_until[p] - costs.forward_until[s - 1]
        if row[0] <= seconds:
            return  # and so for every later p: none is cheaper than what its forwards cost
        forward_peak = _forward_peak(costs, s, p - 1)
        if forward_peak > peak:
            peak = forward_peak
            begin_forward = rounded_up(costs.beside[t] + peak, unit_bytes)
        shift = rounded_up(costs.activation[p - 1], unit_bytes)
        begin = max(low, begin_forward, rows.lowest[p, t] + shift, rows.lowest[s, p - 1])
        if begin >= high:
            continue
        end = low + _first_at_most(row, begin - low, seconds)
        _try_split(rows, values, row, s, p, t, shift, begin, end, seconds)


@njit(cache=True, nogil=True, fastmath=_FAST)
def _try_split(
    rows: Rows, values: Seconds, row: Seconds, s: int, p: int, t: int, shift: int, begin: int, end: int, seconds: float
) -> None:
    """Lower slots begin..end-1 of row (s, t) to what a split at p costs: row (p, t) shifted plus row (s, p - 1)."""
    low = rows.lowest[s, t]
    later = rows.offset[p, t] - shift - rows.lowest[p, t]
    earlier = rows.offset[s, p - 1] - rows.lowest[s, p - 1]
    later_end = min(rows.highest[p, t] + shift, end)
    earlier_end = min(rows.highest[s, p - 1], end)
    both_end = min(later_end, earlier_end)
    if begin < both_end:
        _lower_sum(
            row[begin - low : both_end - low],
            values[later + begin : later + both_end],
            values[earlier + begin : earlier + both_end],
            seconds,
        )
        begin = both_end
    if begin < later_end:
        _lower(row[begin - low : later_end - low], values[later + begin : later + later_end], seconds)
        begin = later_end
    if begin < earlier_end:
        _lower(row[begin - low : earlier_end - low], values[earlier + begin : earlier + earlier_end], seconds)
        begin = earlier_end
    if begin < end:
        row[begin - low] = min(row[begin - low], seconds)


@njit(cache=True, nogil=True, fastmath=_FAST)
def _lower(row: Seconds, other: Seconds, seconds: float) -> None:
    for i in range(row.shape[0]):
        value = other[i] + seconds
        row[i] = value if value < row[i] else row[i]


@njit(cache=True, nogil=True, fastmath=_FAST)
def _lower_sum(row: Seconds, one: Seconds, other: Seconds, seconds: float) -> None:
    for i in range(row.shape[0]):
        value = one[i] + other[i] + seconds
        row[i] = value if value < row[i] else row[i]


@njit(cache=True, nogil=True)
def _first_at_most(row: Seconds, first: int, seconds: float) -> int:
    """A position from `first` on whose value, and so in the end every later one, is at most `seconds`.

    The row need not be falling yet: wherever the search ends, making it falling brings all later values down to there.
    """
    last = row.shape[0]
    while first < last:
        middle = (first + last) >> 1
        if row[middle] <= seconds:
            last = middle
        else:
            first = middle + 1
    return first


@njit(cache=True, nogil=True)
def _make_falling(row: Seconds) -> None:
    """What fits in fewer slots fits in more."""
    for i in range(1, row.shape[0]):
        if row[i] > row[i - 1]:
            row[i] = row[i - 1]


@njit(cache=True, nogil=True)
def _slower(least: Least, rows: Rows, values: Seconds, unit_bytes: int, s: int, t: int, available_bytes: int) -> float:
    """What s..t takes above its fastest schedule with this many bytes, as far as the table knows."""
    if available_bytes >= least.ample_bytes[s, t]:
        return 0.0
    if available_bytes < least.least_bytes[s, t]:
        return np.inf
    low, high = rows.lowest[s, t], rows.highest[s, t]
    slot = min(rounded_down(available_bytes, unit_bytes), high - 1)
    return float(values[rows.offset[s, t] + slot - low] if slot >= low else least.slower[s, t])


@njit(cache=True, nogil=True)
def _decide(
    costs: Costs, least: Least, rows: Rows, values: Seconds, unit_bytes: int, s: int, t: int, available_bytes: int
) -> int:
    """The best way for `all`, or minus the best split of s..t, with this many bytes; they must suffice."""
    best, decision = np.inf, 0
    if s == t or costs.saves_ahead:
        for way in range(costs.first_way[s], costs.first_way[s + 1]):
            if _own_peak(costs, way, t) <= available_bytes:
                seconds = costs.way_slower[way]
                if s < t:
                    left = available_bytes - costs.way_saved[way]
                    seconds += _slower(least, rows, values, unit_bytes, s + 1, t, left)
                if seconds < best:
                    best, decision = seconds, way
    peak = 0
    for p in range(s + 1, t + 1):
        peak = max(peak, _forward_peak(costs, s, p - 1))
        seconds = costs.split_until[p] - costs.forward_until[s - 1]
        if costs.beside[t] + peak > available_bytes or seconds >= best:
            break
        left = available_bytes - costs.activation[p - 1]
        seconds += _slower(least, rows, values, unit_bytes, p, t, left)
        seconds += _slower(least, rows, values, unit_bytes, s, p - 1, available_bytes)
        if seconds < best:
            best, decision = seconds, -p
    return decision


@njit(cache=True, nogil=True)
def _read_off(
    costs: Costs, least: Least, rows: Rows, values: Seconds, unit_bytes: int, available_bytes: int
) -> tuple[Indices, float]:
    """The decisions for 1..n with this many bytes, in the order in which they run, and the time above the fastest."""
    n = costs.activation.shape[0] - 1
    decisions = np.empty(2 * n, np.int64)
    pending = np.empty((n + 1, 3), np.int64)
    pending[0] = (1, n, available_bytes)
    num_pending, num_decisions, slower = 1, 0, 0.0
    while num_pending:
        num_pending -= 1
        s, t, available = pending[num_pending]
        decision = _decide(costs, least, rows, values, unit_bytes, s, t, available)
        decisions[num_decisions] = decision
        num_decisions += 1
        if decision < 0:
            p = -decision
            slower += costs.split_until[p] - costs.forward_until[s - 1]
            pending[num_pending] = (s, p - 1, available)
            pending[num_pending + 1] = (p, t, available - costs.activation[p - 1])
            num_pending += 2
        else:
            slower += costs.way_slower[decision]
            if s < t:
                pending[num_pending] = (s + 1, t, available - costs.way_saved[decision])
                num_pending += 1
    return decisions[:num_decisions], slower


@dataclass(frozen=True, slots=True)
class Table:
    """The least time of every s..t for every number of slots up to a budget; made by `Table.of`."""

    costs: Costs
    least: Least
    slots: Slots
    rows: Rows
    values: Seconds

    @classmethod
    def of(cls, costs: Costs, least: Least, available_bytes: int, most_slots: int) -> Table:
        """Fill the table for every budget up to `available_bytes`, cut into at most `most_slots` slots."""
        n = costs.num_stages
        ample = int(least.ample_bytes[1, n])
        slots = Slots.for_budget(min(available_bytes, ample), most_slots)
        if available_bytes >= ample:
            empty = np.zeros((n + 2, n + 2), np.int32)
            return cls(costs, least, slots, Rows(empty, empty, empty.astype(np.int64)), np.empty(0))
        rows, size = _lay_rows(costs, least, slots.unit_bytes, slots.num_slots)
        values: Seconds = np.empty(size)
        num_tiles = -(-n // _TILE)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, num_tiles)) as pool:
            for distance in range(num_tiles):

                def fill(tile: int, distance: int = distance) -> None:
                    s_first, t_first = tile * _TILE + 1, (tile + distance) * _TILE + 1
                    _fill_tile(costs, least, rows, values, slots.unit_bytes, s_first, t_first, _TILE)

                list(pool.map(fill, range(num_tiles - distance)))
        return cls(costs, least, slots, rows, values)

    def decisions(self, available_bytes: int) -> tuple[NDArray[Any], float]:
        """The schedule for a budget: its decisions (see `nested.operations_of`) and its time above the fastest.

        `available_bytes` is at least `least_bytes[1, n]`.
        """
        decisions, slower = _read_off(
            self.costs, self.least, self.rows, self.values, self.slots.unit_bytes, available_bytes
        )
        return decisions, slower
