"""The backward phase of pofo: what it costs to recompute and differentiate the stages i..j while values are fetched.

The paper's C_Δ(i, j, A, Δ) is the shortest time to process stages i..j with A bytes stored beside them while Δ bytes
arrive. Take one sequence S of forwards and backwards for i..j. By lemma 1 it takes

    T_S + max(0, K_S + (A + Δ - M) / β),     K_S = max over its operations o of (M_o / β - d_o),

where M_o is what operation o uses, d_o the time from its end to the end of the sequence, and M the memory; and it can
run at all if no M_o exceeds the room m = M - A. So, with L = T + K, a sequence is two numbers,

    C_Δ(i, j, A, Δ) = min over the sequences that fit of max(T_S, L_S + (Δ - m) / β),

and the table holds, for every i..j and every room in slots, the T and L of a few sequences: those that are best for
Δ = 0 (the shortest), for Δ = m (the least late), and between. They follow from those of shorter sub-chains, by the two
cases of appendix B.3 (a right part r, a left part l):

    all:   T = u_F + u_B + T_r            L = max(T + M_B/β, u_F + L_r + ā_i/β, u_F + M_F/β)
    keep:  T = Σu_F + T_r + T_l           L = Σu_F + max(T_r + L_l, L_r + a_i'/β, max (M_∅/β - the forwards after it))

Both numbers are exact for any Δ: only the room is rounded, and only until the sequence is read off, which counts bytes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.strategies.nested.table import Least
from lowtide.strategies.numerics.arrays import ChainArrays, Floats, Integers
from lowtide.strategies.numerics.kernels import fast_kernel_part, kernel, kernel_part
from lowtide.strategies.slots import Slots, rounded_up

Singles = NDArray[np.float32]

# How many sequences are kept for each room; sequence q is the best for Δ = q / (NUM_KEPT - 1) of the room.
NUM_KEPT = 3
# Of two sequences that take the same time for the Δ in question the one with less T + L serves other Δ better.
_TIE = 1e-4
# Fewer rows take less time than to hand them to a thread.
_FEWEST_ROWS = 8


class Blocks(NamedTuple):
    """T and L of sub-chain i..j in slot s, sequence q: `seconds[row[i, j], q, s]`, `late[row[i, j], q, s]`.

    Sub-chains that take longer than they may have no row (-1).
    """

    row: NDArray[np.int32]
    seconds: Singles
    late: Singles
    num_distinct: NDArray[np.int32]
    """By row: 1 where all sequences kept are the same."""
    ahead: Floats
    """For the light forwards i..i', by (i, i'): their time, their greatest use, max(use/β - the time of those after);
    the input of i and what stands beside are not counted."""
    fastest: Floats
    """`fastest[j] - fastest[i-1]`: forward and backward of i..j once, each in its fastest way."""
    least_bytes: Integers
    least_slower: Floats
    unit_bytes: int
    bandwidth: float
    per_byte: float
    slots_per_byte: float
    """1 / β and 1 / unit: multiplying is quicker."""


def blocks_of(
    chain: ChainArrays, least: Least, room_bytes: int, bandwidth: float, slots: int, spare_seconds: float
) -> Blocks:
    """The table for rooms up to `room_bytes`.

    Args:
        chain: the network.
        least: its least memory (`nested_table.least_memory`).
        room_bytes: the most that any sub-chain gets.
        bandwidth: β, bytes per second, above 0.
        slots: how finely rooms are told apart.
        spare_seconds: sub-chains whose forwards alone take longer are left out; no schedule that recomputes them is
            within that time of plain training.
    """
    n = chain.output.size - 1
    sizes = Slots.for_budget(max(room_bytes, 1), slots)
    forward = np.concatenate(([0.0], np.cumsum(chain.light_seconds[1:])))
    row = np.full((n + 2, n + 2), -1, dtype=np.int32)
    num_rows = 0
    for length in range(1, n):
        for i in range(1, n - length + 1):
            if forward[i + length - 1] - forward[i - 1] <= spare_seconds:
                row[i, i + length - 1] = num_rows
                num_rows += 1
    shape = (max(1, num_rows), NUM_KEPT, sizes.num_slots + 1)
    fastest = np.concatenate(([0.0], np.cumsum((chain.forward_seconds + chain.backward_seconds)[1:].min(axis=1))))
    blocks = Blocks(
        row,
        np.full(shape, np.inf, dtype=np.float32),
        np.full(shape, np.inf, dtype=np.float32),
        np.zeros(num_rows, dtype=np.int32),
        _forwards_ahead(chain, bandwidth),
        fastest,
        least.least_bytes,
        least.slower,
        sizes.unit_bytes,
        float(bandwidth),
        1 / bandwidth,
        (1 + 1e-15) / sizes.unit_bytes,
    )
    num_threads = os.cpu_count() or 1
    with ThreadPoolExecutor(num_threads) as pool:
        for length in range(1, n):
            firsts = [i for i in range(1, n - length + 1) if row[i, i + length - 1] >= 0]
            step = max(_FEWEST_ROWS, -(-len(firsts) // (4 * num_threads)))
            parts = [np.array(firsts[begin : begin + step]) for begin in range(0, len(firsts), step)]

            def fill(part: Integers, length: int = length) -> None:
                _fill(chain, blocks, part, length)

            list(pool.map(fill, parts) if len(parts) > 1 else map(fill, parts))
    return blocks


@kernel
def _forwards_ahead(chain: ChainArrays, bandwidth: float) -> Floats:
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


@kernel
def _fill(chain: ChainArrays, blocks: Blocks, firsts: Integers, length: int) -> None:
    """Fill the rows of the sub-chains of one length that begin at `firsts`; all shorter ones are there."""
    num_slots = blocks.seconds.shape[2]
    score = np.empty((NUM_KEPT, num_slots), dtype=np.float32)
    shift = np.empty((NUM_KEPT, num_slots), dtype=np.float32)
    for kept in range(NUM_KEPT):
        for slot in range(num_slots):
            room = slot * blocks.unit_bytes / blocks.bandwidth
            shift[kept, slot] = (kept / (NUM_KEPT - 1.0) - 1.0) * room
    for i in firsts:
        _fill_row(chain, blocks, i, i + length - 1, score, shift)


@kernel_part
def _fill_row(chain: ChainArrays, blocks: Blocks, i: int, j: int, score: Singles, shift: Singles) -> None:
    unit, bandwidth = blocks.unit_bytes, blocks.bandwidth
    row = blocks.row[i, j]
    seconds, late = blocks.seconds[row], blocks.late[row]
    num_slots = seconds.shape[1]
    fastest = blocks.fastest[j] - blocks.fastest[i - 1] + blocks.least_slower[i, j]
    lowest = rounded_up(blocks.least_bytes[i, j], unit)
    for kept in range(NUM_KEPT):
        for slot in range(min(lowest, num_slots), num_slots):
            seconds[kept, slot] = fastest
            late[kept, slot] = fastest + blocks.least_bytes[i, j] / bandwidth
            score[kept, slot] = max(fastest, late[kept, slot] + shift[kept, slot]) + _TIE * (fastest + late[kept, slot])
        score[kept, :lowest] = np.inf
    for v in range(chain.num_variants[i]):
        _try_all(chain, blocks, i, j, v, seconds, late, score, shift)
    end = num_slots
    for split in range(i, j):
        forward, use, behind = blocks.ahead[i, split]
        end = _last_useful(chain, blocks, i, j, forward, end, score, shift)
        stored = rounded_up(chain.output[split], unit)
        begin = max(
            rounded_up(np.int64(use) + chain.standing[j], unit),
            rounded_up(blocks.least_bytes[i, split], unit),
            rounded_up(blocks.least_bytes[split + 1, j], unit) + stored,
        )
        if begin >= end:
            continue
        left, right = blocks.row[i, split], blocks.row[split + 1, j]
        behind += chain.standing[j] / bandwidth
        arriving = chain.output[split] / bandwidth
        for kept in range(NUM_KEPT):
            for other in range(blocks.num_distinct[right]):
                parts = (
                    score[kept, begin:end],
                    shift[kept, begin:end],
                    blocks.seconds[left, kept, begin:end],
                    blocks.late[left, kept, begin:end],
                    blocks.seconds[right, other, begin - stored : end - stored],
                    blocks.late[right, other, begin - stored : end - stored],
                    np.float32(forward),
                    np.float32(behind),
                    np.float32(arriving),
                    np.float32(_TIE),
                )
                if _num_better(*parts):
                    _try_keep(seconds[kept, begin:end], late[kept, begin:end], *parts)
    distinct = 1
    for kept in range(1, NUM_KEPT):
        if not np.array_equal(seconds[kept], seconds[0]) or not np.array_equal(late[kept], late[0]):
            distinct = NUM_KEPT
    blocks.num_distinct[row] = distinct


@kernel_part
def _last_useful(
    chain: ChainArrays, blocks: Blocks, i: int, j: int, forward: float, end: int, score: Singles, shift: Singles
) -> int:
    """One past the last slot where running `forward` seconds of forwards once more can still lower a score.

    Falls as `forward` rises, so that all calls for a row together take one pass over its slots.
    """
    total = forward + blocks.fastest[j] - blocks.fastest[i - 1]
    latest = total + chain.backward_peak[i].min() / blocks.bandwidth
    while end > 0:
        for kept in range(NUM_KEPT):
            if max(total, latest + shift[kept, end - 1]) + _TIE * (total + latest) < score[kept, end - 1]:
                return end
        end -= 1
    return end


@fast_kernel_part
def _num_better(
    score: Singles,
    shift: Singles,
    left_seconds: Singles,
    left_late: Singles,
    right_seconds: Singles,
    right_late: Singles,
    forward: np.float32,
    behind: np.float32,
    arriving: np.float32,
    tie: np.float32,
) -> int:
    """For how many slots of a row keeping the output of i' is better; nothing is written, so the loop vectorises."""
    count = 0
    for slot in range(score.size):
        total = forward + left_seconds[slot] + right_seconds[slot]
        latest = max(right_seconds[slot] + left_late[slot], right_late[slot] + arriving)
        latest = forward + max(latest, behind)
        count += max(total, latest + shift[slot]) + tie * (total + latest) < score[slot]
    return count


@kernel_part
def _try_keep(
    seconds: Singles,
    late: Singles,
    score: Singles,
    shift: Singles,
    left_seconds: Singles,
    left_late: Singles,
    right_seconds: Singles,
    right_late: Singles,
    forward: np.float32,
    behind: np.float32,
    arriving: np.float32,
    tie: np.float32,
) -> None:
    """Lower a row to what keeping the output of i' costs, for one sequence of each part."""
    for slot in range(seconds.size):
        total = forward + left_seconds[slot] + right_seconds[slot]
        latest = max(right_seconds[slot] + left_late[slot], right_late[slot] + arriving)
        latest = forward + max(latest, behind)
        value = max(total, latest + shift[slot]) + tie * (total + latest)
        if value < score[slot]:
            score[slot], seconds[slot], late[slot] = value, total, latest


@kernel_part
def _try_all(
    chain: ChainArrays,
    blocks: Blocks,
    i: int,
    j: int,
    v: int,
    seconds: Singles,
    late: Singles,
    score: Singles,
    shift: Singles,
) -> None:
    """Lower a row to what a forward `all` in variant v costs."""
    unit, bandwidth = blocks.unit_bytes, blocks.bandwidth
    u_f, u_b = chain.forward_seconds[i, v], chain.backward_seconds[i, v]
    m_f, m_b = chain.heavy_peak[i, v] + chain.standing[j], chain.backward_peak[i, v]
    begin = rounded_up(max(m_f, m_b), unit)
    stored = rounded_up(chain.saved[i, v], unit) if i < j else 0
    if i < j:
        begin = max(begin, rounded_up(blocks.least_bytes[i + 1, j], unit) + stored)
    saved = chain.saved[i, v] / bandwidth
    for slot in range(begin, seconds.shape[1]):
        for other in range(NUM_KEPT if i < j else 1):
            total, latest = u_f + u_b, u_f + m_f / bandwidth
            if i < j:
                right = blocks.row[i + 1, j]
                total += blocks.seconds[right, other, slot - stored]
                latest = max(latest, u_f + saved + blocks.late[right, other, slot - stored])
            latest = max(latest, total + m_b / bandwidth)
            for kept in range(NUM_KEPT):
                value = max(total, latest + shift[kept, slot]) + _TIE * (total + latest)
                if value < score[kept, slot]:
                    score[kept, slot] = value
                    seconds[kept, slot] = total
                    late[kept, slot] = latest


class BlockRow(NamedTuple):
    """The table of one sub-chain."""

    seconds: Singles
    late: Singles
    least_bytes: int
    least_seconds: float
    """What a sequence takes that does with the least bytes, and how late it is at the most."""
    least_late: float
    per_byte: float
    slots_per_byte: float


@kernel_part
def block_row(blocks: Blocks, i: int, j: int) -> BlockRow:
    """The table of i..j; without a row in the table, one of no slots."""
    row = blocks.row[i, j]
    least_bytes = blocks.least_bytes[i, j]
    seconds = blocks.fastest[j] - blocks.fastest[i - 1] + blocks.least_slower[i, j]
    return BlockRow(
        blocks.seconds[row] if row >= 0 else blocks.seconds[0][:, :0],
        blocks.late[row] if row >= 0 else blocks.late[0][:, :0],
        least_bytes,
        seconds,
        seconds + least_bytes * blocks.per_byte,
        blocks.per_byte,
        blocks.slots_per_byte,
    )


@kernel_part
def row_seconds(block: BlockRow, room: int, arriving: float) -> float:
    """C_Δ(i, j, A, Δ) with `room` = M - A and `arriving` = Δ, as far as the table knows; inf: no room."""
    if room < block.least_bytes:
        return np.inf
    shift = (arriving - room) * block.per_byte
    best = np.inf
    slot = min(int(room * block.slots_per_byte), block.seconds.shape[1] - 1)
    if slot >= 0:
        for kept in range(NUM_KEPT):
            best = min(best, max(np.float64(block.seconds[kept, slot]), block.late[kept, slot] + shift))
    if best == np.inf:  # without a row, or between the least bytes and the first slot that holds them
        best = max(block.least_seconds, block.least_late + shift)
    return best


@kernel_part
def block_seconds(blocks: Blocks, i: int, j: int, room: int, arriving: float) -> float:
    """The same for any sub-chain."""
    return row_seconds(block_row(blocks, i, j), room, arriving)
