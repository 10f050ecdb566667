"""The backward phase of pofo: what it costs to recompute and differentiate the stages i..j while values are fetched.

The paper tabulates C_Δ(i, j, A, Δ), the shortest time to process stages i..j with A bytes stored beside them while Δ bytes
arrive, over slots of A and Δ. Here the table is replaced by what it is made of. Take one sequence S of forwards and
backwards for i..j. By lemma 1 it takes

    T_S + max(0, K_S + (A + Δ - M) / β),     K_S = max over its operations o of (M_o / β - d_o),

where M_o is what operation o uses, d_o the time from its end to the end of the sequence, and M the memory; and it can
run at all if P_S = max M_o <= M - A. So a sequence is a triple (P, T, L) with L = T + K:

    C_Δ(i, j, A, Δ) = min over S with P_S <= M - A of max(T_S, L_S + (A + Δ - M) / β),

and a sequence whose P, T and L are all no lower than another's can go. What is left for i..j is its *front*. Fronts of
long sub-chains are made from those of shorter ones, by the two cases of appendix B.3 (a right part r, a left part l):

    all:   T = u_F + u_B + T_r            P = max(M_B, P_r + ā_i, M_F)
           L = max(T + M_B/β, u_F + L_r + ā_i/β, u_F + M_F/β)
    keep:  T = Σu_F + T_r + T_l           P = max(P_l, P_r + a_i', max M_∅)
           L = Σu_F + max(T_r + L_l, L_r + a_i'/β, max (M_∅/β - the time of the forwards after it))

No bytes are rounded: slots only say which sequences are near enough in P for one to stand for the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from lowtide.strategies.arrays import ChainArrays, Floats, Integers

Indices = NDArray[np.int32]

# A slot of P keeps at most this many sequences that trade T against L.
_WIDEST = 6
# Sub-chains up to this length combine every left part with every right one; longer ones, slot by slot, the shortest and
# the least late ones.
_PAIRWISE = 5
# Times closer than this share of themselves are equal: sums of the same times in another order differ by less.
_SAME = 1e-12


class Blocks(NamedTuple):
    """The fronts of all sub-chains; that of i..j is rows `first[i, j]` to `first[i, j] + count[i, j]`, by rising P.

    `split` is the i' after which the right part begins, or -1 - v for a forward `all` in variant v; `left` and `right`
    are rows of the parts' sequences. `least_seconds` and `least_late` are the rows of the least T and the least L among
    the sequences of the same front with no larger P.
    """

    first: Integers
    count: Integers
    peak: Integers
    seconds: Floats
    late: Floats
    split: Indices
    left: Indices
    right: Indices
    least_seconds: Indices
    least_late: Indices


class _Front(NamedTuple):
    """A front in the making: its sequences, and for each slot of P those that nothing with a P up to there beats."""

    peak: Integers
    times: Floats  # T, L
    origin: Indices  # split, left, right
    best: Indices  # by slot: rows
    width: Integers  # by slot: how many
    size: Integers  # the rows in use, those included that have been beaten since; the row of the least P
    bound: NDArray[np.float32]  # by slot: the least T, and the least L


def blocks_of(arrays: ChainArrays, memory_bytes: int, bandwidth: float, slots: int) -> Blocks:
    """The fronts of all sub-chains.

    Args:
        arrays: the chain.
        memory_bytes: M without what is fixed; no sequence uses more beside its input.
        bandwidth: β, bytes per second, above 0.
        slots: how finely P is told apart.
    """
    memory = max(0, memory_bytes)
    unit = max(1, -(-memory // slots))
    first, count, peak, times, origin, least = _fill(arrays, memory, float(bandwidth), unit)
    return Blocks(
        first,
        count,
        peak,
        *(np.ascontiguousarray(times[:, column]) for column in range(2)),
        *(np.ascontiguousarray(origin[:, column]) for column in range(3)),
        *(np.ascontiguousarray(least[:, column]) for column in range(2)),
    )


@njit(cache=True, parallel=True)
def _fill(chain: ChainArrays, memory: int, bandwidth: float, unit: int):  # type: ignore[no-untyped-def]
    """All fronts, shorter sub-chains first; those of one length do not depend on each other."""
    n = chain.output.size - 1
    first = np.zeros((n + 2, n + 2), dtype=np.int64)
    count = np.zeros((n + 2, n + 2), dtype=np.int64)
    capacity = 1024
    peak = np.empty(capacity, dtype=np.int64)
    times = np.empty((capacity, 2))
    origin = np.empty((capacity, 3), dtype=np.int32)
    least = np.empty((capacity, 2), dtype=np.int32)
    ahead = _forwards_ahead(chain, bandwidth)
    num_slots = memory // unit + 2
    largest = num_slots * _WIDEST + 1
    bound = np.full((n + 2, n + 2, 2, num_slots), np.inf, dtype=np.float32)  # the least T and L with P up to a slot
    used = 0
    for length in range(1, n + 1):
        num_blocks = n - length + 1
        made_count = np.zeros(num_blocks, dtype=np.int64)
        made_peak = np.empty((num_blocks, largest), dtype=np.int64)
        made_times = np.empty((num_blocks, largest, 2))
        made_origin = np.empty((num_blocks, largest, 3), dtype=np.int32)
        for index in prange(num_blocks):
            front = _front(
                chain, index + 1, index + length, memory, bandwidth, unit, ahead, first, count, peak, times, least, bound
            )
            made_count[index] = _settle(front, made_peak[index], made_times[index], made_origin[index])
        needed = used + made_count.sum()
        if needed > capacity:
            capacity = 2 * needed
            peak, times = _grown_line(peak, capacity), _grown(times, capacity)
            origin, least = _grown(origin, capacity), _grown(least, capacity)
        for index in range(num_blocks):
            size = made_count[index]
            first[index + 1, index + length] = used
            count[index + 1, index + length] = size
            peak[used : used + size] = made_peak[index, :size]
            times[used : used + size] = made_times[index, :size]
            origin[used : used + size] = made_origin[index, :size]
            _note_least(peak, times, least, used, used + size, unit, bound[index + 1, index + length])
            used += size
    return first, count, peak[:used], times[:used], origin[:used], least[:used]


@njit(cache=True)
def _grown(array, capacity):  # type: ignore[no-untyped-def]
    larger = np.empty((capacity, array.shape[1]), dtype=array.dtype)
    larger[: array.shape[0]] = array
    return larger


@njit(cache=True)
def _grown_line(array, capacity):  # type: ignore[no-untyped-def]
    larger = np.empty(capacity, dtype=array.dtype)
    larger[: array.size] = array
    return larger


@njit(cache=True)
def _forwards_ahead(chain: ChainArrays, bandwidth: float):  # type: ignore[no-untyped-def]
    """For the light forwards i..i': their time, their greatest use, and max(use / β - the time of those after it)."""
    n = chain.output.size - 1
    ahead = np.zeros((n + 2, n + 2, 3))
    for i in range(1, n + 1):
        total, use, late = 0.0, 0.0, -np.inf
        for k in range(i, n + 1):
            need = chain.light_peak[k] + (chain.output[k - 1] if k > i else 0)
            total += chain.light_seconds[k]
            use = max(use, need)
            late = max(late - chain.light_seconds[k], need / bandwidth)
            ahead[i, k, 0], ahead[i, k, 1], ahead[i, k, 2] = total, use, late
    return ahead


@njit(cache=True)
def _front(
    chain, i, j, memory, bandwidth, unit, ahead, first, count, peak, times, least, bound
):  # type: ignore[no-untyped-def]
    """The front of i..j in the making, from the fronts of shorter sub-chains."""
    num_slots = memory // unit + 2
    front = _Front(
        np.empty(64, dtype=np.int64),
        np.empty((64, 2)),
        np.empty((64, 3), dtype=np.int32),
        np.empty((num_slots, _WIDEST), dtype=np.int32),
        np.zeros(num_slots, dtype=np.int64),
        np.zeros(2, dtype=np.int64),
        np.full((2, num_slots), np.inf, dtype=np.float32),
    )
    for v in range(chain.num_variants[i]):
        front = _offer_all(front, chain, i, j, v, memory, bandwidth, unit, first, count, peak, times)
    standing = chain.standing[j]
    for split in range(i, j):
        forward, use, late = ahead[i, split, 0], ahead[i, split, 1] + standing, ahead[i, split, 2]
        if use > memory:
            break
        lefts, rights = count[i, split], count[split + 1, j]
        if not lefts or not rights:
            continue
        stored = chain.output[split]
        late += standing / bandwidth
        left0, right0 = first[i, split], first[split + 1, j]
        if j - i < _PAIRWISE:
            for left in range(left0, left0 + lefts):
                for right in range(right0, right0 + rights):
                    front = _offer_keep(
                        front, split, left, right, forward, use, late, stored, memory, bandwidth, unit, peak, times
                    )
            continue
        lowest = max(np.int64(use), peak[left0], peak[right0] + stored)
        left, right = left0 - 1, right0 - 1
        for slot in range((lowest + unit - 1) // unit, num_slots):
            other = min(max(slot - stored // unit, 0), num_slots - 1)
            seconds = forward + bound[i, split, 0, slot] + bound[split + 1, j, 0, other]
            if seconds >= front.bound[0, slot]:
                latest = forward + max(
                    bound[split + 1, j, 0, other] + bound[i, split, 1, slot],
                    bound[split + 1, j, 1, other] + stored / bandwidth,
                    late,
                )
                if latest >= front.bound[1, slot]:
                    continue
            room = min(slot * unit, memory)
            while left + 1 < left0 + lefts and peak[left + 1] <= room:
                left += 1
            while right + 1 < right0 + rights and peak[right + 1] + stored <= room:
                right += 1
            if left < left0 or right < right0:
                continue
            for which in range(4):
                if which % 2 == 1 and least[left, 1] == least[left, 0]:
                    continue
                if which >= 2 and least[right, 1] == least[right, 0]:
                    continue
                front = _offer_keep(
                    front, split, least[left, which % 2], least[right, which // 2], forward, use, late, stored, memory,
                    bandwidth, unit, peak, times,
                )
    return front


@njit(cache=True)
def _offer_all(front, chain, i, j, v, memory, bandwidth, unit, first, count, peak, times):  # type: ignore[no-untyped-def]
    """Case 1: forward i saves all, in variant v."""
    u_f, u_b = chain.forward_seconds[i, v], chain.backward_seconds[i, v]
    m_f, m_b = chain.heavy_peak[i, v] + chain.standing[j], chain.backward_peak[i, v]
    if max(m_f, m_b) > memory:
        return front
    if i == j:
        late = max(u_f + u_b + m_b / bandwidth, u_f + m_f / bandwidth)
        return _offer(front, max(m_f, m_b), u_f + u_b, late, -1 - v, 0, 0, memory, unit)
    saved = chain.saved[i, v]
    for right in range(first[i + 1, j], first[i + 1, j] + count[i + 1, j]):
        seconds = u_f + u_b + times[right, 0]
        late = max(seconds + m_b / bandwidth, u_f + times[right, 1] + saved / bandwidth, u_f + m_f / bandwidth)
        front = _offer(front, max(m_f, m_b, peak[right] + saved), seconds, late, -1 - v, 0, right, memory, unit)
    return front


@njit(cache=True)
def _offer_keep(
    front, split, left, right, forward, use, late, stored, memory, bandwidth, unit, peak, times
):  # type: ignore[no-untyped-def]
    """Case 2: the forwards up to `split` are light, their last output is kept for the right part."""
    return _offer(
        front,
        max(np.int64(use), peak[left], peak[right] + stored),
        forward + times[left, 0] + times[right, 0],
        forward + max(times[right, 0] + times[left, 1], times[right, 1] + stored / bandwidth, late),
        split,
        left,
        right,
        memory,
        unit,
    )


@njit(cache=True)
def _offer(front, peak, seconds, late, split, left, right, memory, unit):  # type: ignore[no-untyped-def]
    """Add a sequence, unless one of a P in the same slot or below is as good in T and L."""
    if peak > memory:
        return front
    slot = (peak + unit - 1) // unit
    near = 1.0 + _SAME
    near_T=1e-4*seconds
    near_L=1e-3*late
    for place in range(front.width[slot]):
        row = front.best[slot, place]
        if front.times[row, 0] <= seconds * near + near_T and front.times[row, 1] <= late * near + near_L:
            if seconds <= front.times[row, 0] * near and late <= front.times[row, 1] * near and peak < front.peak[row]:
                front.peak[row] = peak
                front.origin[row, 0], front.origin[row, 1], front.origin[row, 2] = split, left, right
            return front
    row = front.size[0]
    if row == front.peak.size:
        front = _Front(
            _grown_line(front.peak, 2 * row),
            _grown(front.times, 2 * row),
            _grown(front.origin, 2 * row),
            front.best,
            front.width,
            front.size,
            front.bound,
        )
    front.peak[row] = peak
    front.times[row, 0], front.times[row, 1] = seconds, late
    front.origin[row, 0], front.origin[row, 1], front.origin[row, 2] = split, left, right
    front.size[0] += 1
    if row == 0 or peak < front.peak[front.size[1]]:
        front.size[1] = row  # the least P stays whatever it costs: it decides what is feasible
    for later in range(slot, front.width.size):
        front.bound[0, later] = min(front.bound[0, later], seconds)
        front.bound[1, later] = min(front.bound[1, later], late)
        kept = 0
        beaten = False
        for place in range(front.width[later]):
            other = front.best[later, place]
            if front.times[other, 0] <= seconds and front.times[other, 1] <= late:
                beaten = True
                break
            if not (seconds <= front.times[other, 0] and late <= front.times[other, 1]):
                front.best[later, kept] = other
                kept += 1
        if beaten:
            break
        if kept < _WIDEST:
            front.best[later, kept] = row
            kept += 1
        front.width[later] = kept
    return front


@njit(cache=True)
def _settle(front, peak, times, origin):  # type: ignore[no-untyped-def]
    """Write the sequences that are left, by rising P; returns their number."""
    alive = np.zeros(front.size[0], dtype=np.bool_)
    if alive.size == 0:
        return 0
    alive[front.size[1]] = True
    for slot in range(front.width.size):
        for place in range(front.width[slot]):
            alive[front.best[slot, place]] = True
    rows = np.flatnonzero(alive)
    rows = rows[np.argsort(front.peak[rows], kind="mergesort")]
    for index in range(rows.size):
        peak[index] = front.peak[rows[index]]
        times[index] = front.times[rows[index]]
        origin[index] = front.origin[rows[index]]
    return rows.size


@njit(cache=True)
def _note_least(peak, times, least, begin, end, unit, bound):  # type: ignore[no-untyped-def]
    for row in range(begin, end):
        for which in range(2):
            before = least[row - 1, which] if row > begin else row
            least[row, which] = row if times[row, which] < times[before, which] else before
            slot = (peak[row] + unit - 1) // unit
            bound[which, slot:] = times[least[row, which], which]


@njit(cache=True)
def block_seconds(blocks: Blocks, i: int, j: int, room: int, arriving: float, bandwidth: float) -> tuple[float, int]:
    """C_Δ(i, j, A, Δ) with `room` = M - A and `arriving` = Δ: the time (inf: no room) and the row of its sequence."""
    begin, end = blocks.first[i, j], blocks.first[i, j] + blocks.count[i, j]
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        if blocks.peak[middle] <= room:
            low = middle + 1
        else:
            high = middle
    if low == begin:
        return np.inf, -1
    best = blocks.least_seconds[low - 1]
    shift = (arriving - room) / bandwidth
    seconds = max(blocks.seconds[best], blocks.late[best] + shift)
    if seconds > blocks.seconds[best]:
        for row in range(begin, low):
            other = max(blocks.seconds[row], blocks.late[row] + shift)
            if other < seconds:
                best, seconds = row, other
    return seconds, best
