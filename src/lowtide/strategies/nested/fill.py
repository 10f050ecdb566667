"""Fill the rows of the least time of nested persistent schedules: the dynamic program over slots, compiled.

A schedule of s..t begins with `all`, which leaves s+1..t what is not saved, or splits at p, which leaves p..t what
a[p-1] does not take and s..p-1 everything. What p..t takes beside a[p-1] is needed for every s, so it has rows of its
own, `later` (see `nested_rows`). Where side values are idle meanwhile, p..t has as many whole slots more.

Rows are filled in tiles, those of one distance t - s at the same time. Of a tile first the splits are tried whose parts
both lie outside it, a few p at a time, so that what they read stays in the cache. A block of slots is skipped where the
lowest value that a split could give there is no lower than the highest value that is there already.

Reference: Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, theorem 1 and algorithm 1. Two
things are said differently: the peak of the forwards before a split at p counts only the stages up to p - 1, since with
variants the later ones may run in a way that takes less; and delta[s-1] counts in the peak of backward s.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.strategies.nested.costs import Costs, Seconds
from lowtide.strategies.nested.least import Least, forward_peak, idle_after, own_peak, slower_as
from lowtide.strategies.nested.rows import (
    BLOCK,
    Rows,
    closed,
    lower,
    made_falling,
    make_rows,
    opened,
    shifted,
)
from lowtide.strategies.numerics.kernels import fast_kernel_part, kernel, kernel_part
from lowtide.strategies.slots import Slots, rounded_down, rounded_up

# Rows of 500 float64 take 4 kB: those that 8 splits of a tile of 8 x 8 read fill half a megabyte, a second-level cache.
_TILE = 8

# A table may take so much; a chain of 1000 stages with 500 slots takes 4 GiB. Longer ones are given fewer slots.
_LARGEST_BYTES = 6 * 2**30


class _Tile(NamedTuple):
    """The rows (s, t) of s_first <= s < s_end, t_first <= t < t_end while they are filled."""

    s_first: int
    s_end: int
    t_first: int
    t_end: int
    bounds: Seconds
    """The first and so the highest value of each block of row (s, t), at (s - s_first, t - t_first)."""
    begins: NDArray[np.int32]
    """With fewer slots the forwards of s..t before a split at p do not fit, at (s - s_first, t - t_first, p)."""
    idle: NDArray[np.int32]
    """How many slots of side values are idle while p..t runs, in the same places."""
    num_slots: int
    work: Seconds
    """Room for one row."""


def _make_tile(num_stages: int, num_slots: int, num_blocks: int, s_first: int, t_first: int) -> _Tile:
    return _Tile(
        s_first,
        min(s_first + _TILE, num_stages + 1),
        t_first,
        min(t_first + _TILE, num_stages + 1),
        np.empty((_TILE, _TILE, num_blocks)),
        np.empty((_TILE, _TILE, num_stages + 2), np.int32),
        np.empty((_TILE, _TILE, num_stages + 2), np.int32),
        num_slots,
        np.empty((num_blocks + 1) * BLOCK),
    )


@kernel
def _fill_tile(costs: Costs, least: Least, rows: Rows, later: Rows, unit_bytes: int, tile: _Tile) -> None:
    """Fill one tile; every shorter s..t is there."""
    for s in range(tile.s_first, tile.s_end):
        for t in range(max(s, tile.t_first), tile.t_end):
            row, seconds = opened(rows, s, t), least.slower[s, t]
            for i in range(row.shape[0]):
                row[i] = seconds
            for block in range(tile.bounds.shape[2]):
                tile.bounds[s - tile.s_first, t - tile.t_first, block] = seconds
            _set_begins(costs, rows, tile, unit_bytes, s, t)
    for p in range(tile.s_end, tile.t_first + 1, _TILE):
        p_end = min(p + _TILE, tile.t_first + 1)
        _try_splits(costs, rows, later, tile, (tile.s_first, tile.s_end), (tile.t_first, tile.t_end), (p, p_end))
    for s in range(tile.s_end - 1, tile.s_first - 1, -1):
        for t in range(max(s, tile.t_first), tile.t_end):
            _finish_row(costs, least, rows, later, tile, unit_bytes, s, t)


@kernel_part
def _finish_row(
    costs: Costs, least: Least, rows: Rows, later: Rows, tile: _Tile, unit_bytes: int, s: int, t: int
) -> None:
    """Try on row (s, t) what refers to its own tile, then make its counterpart in `later`."""
    first = rows.origin[s, t]
    row = rows.values[first + rows.lowest[s, t] : first + rows.highest[s, t]]
    if s == t or costs.saves_ahead:
        _try_all(costs, least, rows, row, tile.work, unit_bytes, s, t)
    made_falling(row)
    for block in range(rows.lowest[s, t] // BLOCK, rounded_up(rows.highest[s, t], BLOCK)):
        first_slot = max(block * BLOCK, rows.lowest[s, t])
        tile.bounds[s - tile.s_first, t - tile.t_first, block] = rows.values[first + first_slot]
    _try_splits(costs, rows, later, tile, (s, s + 1), (t, t + 1), (s + 1, min(tile.s_end, t + 1)))
    _try_splits(costs, rows, later, tile, (s, s + 1), (t, t + 1), (max(tile.s_end, tile.t_first + 1), t + 1))
    made_falling(row)
    closed(rows, s, t)
    if s > 1:
        held = costs.activation[s - 1]
        shifted(least, rows, unit_bytes, s, t, held, later.lowest[t, s], opened(later, t, s))
        closed(later, t, s)


@kernel_part
def _set_begins(costs: Costs, rows: Rows, tile: _Tile, unit_bytes: int, s: int, t: int) -> None:
    """With how many slots the forwards before each split of s..t fit, and how many are idle after them."""
    begins, i, j = tile.begins, s - tile.s_first, t - tile.t_first
    begin, high = rows.lowest[s, t], rows.highest[s, t]
    highest_peak, idle = 0, 0
    for p in range(s + 1, t + 1):
        peak = forward_peak(costs, s, p - 1, t) - idle
        idle += idle_after(costs, s, p - 1, t)
        tile.idle[i, j, p] = min(rounded_down(idle, unit_bytes), tile.num_slots)
        if peak > highest_peak:
            highest_peak = peak
            begin = max(begin, min(high, rounded_up(peak, unit_bytes)))
        begins[i, j, p] = begin


@kernel_part
def _try_all(
    costs: Costs, least: Least, rows: Rows, row: Seconds, work: Seconds, unit_bytes: int, s: int, t: int
) -> None:
    """Lower a row to what starting with `all` costs, over the ways of stage s."""
    low, high = rows.lowest[s, t], rows.highest[s, t]
    for way in range(costs.first_way[s], costs.first_way[s + 1]):
        begin = max(low, rounded_up(own_peak(costs, way, s, t), unit_bytes))
        flat = begin
        if s < t:
            saved = costs.way_saved[way]
            begin = max(begin, rounded_up(least.least_bytes[s + 1, t] + saved, unit_bytes))
            flat = max(begin, rounded_up(least.ample_bytes[s + 1, t] + saved, unit_bytes))
            end = min(flat, high)
            if begin < end:
                shifted(least, rows, unit_bytes, s + 1, t, saved, begin, work[: end - begin])
                lower(row[begin - low : end - low], work[: end - begin], costs.way_slower[way])
        if flat < high:
            row[flat - low] = min(row[flat - low], slower_as(costs, way, s, t))


@fast_kernel_part
def _try_splits(
    costs: Costs,
    rows: Rows,
    later: Rows,
    tile: _Tile,
    s_range: tuple[int, int],
    t_range: tuple[int, int],
    p_range: tuple[int, int],
) -> None:
    """Lower rows (s, t) to what splits at p cost, row (p, t) of `later` plus row (s, p - 1): s, t and p in ranges."""
    # Records are taken apart here, once: each time it is done counts references, which the loops below cannot afford.
    split_until, forward_until = costs.split_until, costs.forward_until
    lowest, highest, origin, values, floors = rows
    later_lowest, later_highest, later_origin, later_values, later_floors = later
    s_first, _, t_first, _, bounds, begins, idle, num_slots, _ = tile
    for s in range(s_range[0], s_range[1]):
        for t in range(t_range[0], t_range[1]):
            i, j = s - s_first, t - t_first
            low, high, own = lowest[s, t], highest[s, t], origin[s, t]
            end_block = rounded_up(high, BLOCK)
            for p in range(p_range[0], p_range[1]):
                seconds = split_until[p] - forward_until[s - 1]
                if idle[i, j, p] and later_lowest[t, p] <= num_slots:
                    if bounds[i, j, low // BLOCK] > seconds:
                        _lower_where_idle(rows, later, tile, s, t, p, seconds)
                    continue
                parts_begin = max(later_lowest[t, p], lowest[s, p - 1])
                begin = max(begins[i, j, p], parts_begin)
                if begin >= high:
                    continue
                if bounds[i, j, low // BLOCK] <= seconds:
                    break  # and so for every later p: none is cheaper than what its forwards cost
                one, other = later_origin[t, p], origin[s, p - 1]
                block = begin // BLOCK
                if begin > parts_begin and begin % BLOCK:
                    # Both parts may fit in the slots of this block below, which are not to be lowered.
                    for m in range(begin, min((block + 1) * BLOCK, high)):
                        value = seconds + (later_values[one + m] if m < later_highest[t, p] else 0.0)
                        value += values[other + m] if m < highest[s, p - 1] else 0.0
                        values[own + m] = min(values[own + m], value)
                    block += 1
                while block < end_block:
                    if bounds[i, j, block] <= later_floors[t, p, block] + floors[s, p - 1, block] + seconds:
                        block += 1
                        continue
                    end = block + 1
                    while end < end_block and (
                        bounds[i, j, end] > later_floors[t, p, end] + floors[s, p - 1, end] + seconds
                    ):
                        end += 1
                    m = block * BLOCK
                    one_end = max(m, min(rounded_up(later_highest[t, p], BLOCK), end) * BLOCK)
                    other_end = max(m, min(rounded_up(highest[s, p - 1], BLOCK), end) * BLOCK)
                    both_end = min(one_end, other_end)
                    _lower_to_sum(values, own + m, later_values, one + m, other + m, both_end - m, seconds)
                    _lower_to(values, own + both_end, later_values, one + both_end, one_end - both_end, seconds)
                    _lower_to(values, own + both_end, values, other + both_end, other_end - both_end, seconds)
                    flat = max(one_end, other_end)
                    if flat < end * BLOCK:
                        values[own + max(flat, low)] = min(values[own + max(flat, low)], seconds)
                    for lowered in range(block, end):
                        bounds[i, j, lowered] = values[own + max(lowered * BLOCK, low)]
                    block = end + 1


@fast_kernel_part
def _lower_where_idle(rows: Rows, later: Rows, tile: _Tile, s: int, t: int, p: int, seconds: float) -> None:
    """Lower row (s, t) to what a split at p costs where side values are idle while p..t runs.

    The table does not reach beyond its budget: what p..t could use there counts as the most that it knows.
    """
    more = tile.idle[s - tile.s_first, t - tile.t_first, p]
    values, own, other, one = rows.values, rows.origin[s, t], rows.origin[s, p - 1], later.origin[t, p]
    other_high, one_high = rows.highest[s, p - 1], later.highest[t, p]
    last = later.values[one + one_high - 1] if one_high > tile.num_slots else 0.0
    begin = max(tile.begins[s - tile.s_first, t - tile.t_first, p], later.lowest[t, p] - more, rows.lowest[s, p - 1])
    for m in range(begin, rows.highest[s, t]):
        value = seconds + (later.values[one + m + more] if m + more < one_high else last)
        if m < other_high:
            value += values[other + m]
        values[own + m] = min(values[own + m], value)


@fast_kernel_part
def _lower_to_sum(values: Seconds, own: int, others: Seconds, one: int, other: int, count: int, seconds: float) -> None:
    """Lower `count` values from `own` on to those from `one` on in `others` plus those from `other` on in `values`."""
    x, y, z = np.uint64(own), np.uint64(one), np.uint64(other)  # without a sign there is no counting from the end
    for i in range(np.uint64(max(count, 0))):
        value = others[y + i] + values[z + i] + seconds
        values[x + i] = value if value < values[x + i] else values[x + i]


@fast_kernel_part
def _lower_to(values: Seconds, own: int, others: Seconds, one: int, count: int, seconds: float) -> None:
    """Lower `count` values from `own` on to those from `one` on in `others`."""
    x, y = np.uint64(own), np.uint64(one)
    for i in range(np.uint64(max(count, 0))):
        value = others[y + i] + seconds
        values[x + i] = value if value < values[x + i] else values[x + i]


def fill_rows(costs: Costs, least: Least, slots: Slots) -> Rows | None:
    """The rows (s, t) for every budget up to that of `slots`; None where they would take too much memory."""
    n = costs.num_stages
    rows = make_rows(costs, least, slots.unit_bytes, slots.num_slots, with_input=False)
    later = make_rows(costs, least, slots.unit_bytes, slots.num_slots, with_input=True)
    # Of the floors only the half is touched that belongs to s <= t.
    if sum(one.values.nbytes + one.floors.nbytes // 2 for one in (rows, later)) > _LARGEST_BYTES:
        return None
    firsts, num_blocks = range(1, n + 1, _TILE), rows.floors.shape[2]

    def fill(tile: _Tile) -> None:
        _fill_tile(costs, least, rows, later, slots.unit_bytes, tile)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, len(firsts))) as pool:
        for distance in range(len(firsts)):
            corners = zip(firsts, firsts[distance:], strict=False)
            tiles = [_make_tile(n, slots.num_slots, num_blocks, *corner) for corner in corners]
            # One alone, as of a short chain, takes less time than to start a thread.
            list(pool.map(fill, tiles) if len(tiles) > 1 else map(fill, tiles))
    return rows
