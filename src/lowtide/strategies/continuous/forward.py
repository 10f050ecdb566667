"""The forward phase of pofo: what to keep, what to move, what to recompute, from stage 1 to the loss.

A state of appendix B is (i, x, A, Δ_F, Δ_B): the input of stage i is a[i-1] (x = 0) or abar[i-1] (x = 1 + its
variant), A bytes of earlier inputs stay on the device, Δ_F bytes have still to leave it, Δ_B bytes have to be back
before backward i-1. What runs before F_i and from B_{i-1} on is decided when a state is reached, and so is its time:
states are labels that grow from (1, 0, 0, 0, 0) on, in exact bytes.

Which labels are dropped, and why the best one stays:

- those that cannot be completed within the memory (`pofo_bounds.least_forward`);
- those that cannot come below a time that is known to be reachable (`pofo_bounds.least_rest`);
- those that another label of the same (i, x) dominates: that one stores no more and is no later even after waiting
  for what it has more in Δ_F and Δ_B;
- on chains of more than `EXACT_STAGES` stages, of the labels in one slot of (A, Δ_F, Δ_B) all but the one with the
  least bound, and of all that are left in (i, x) those with the greatest bounds, beyond a number. Only this can lose
  the optimum; more slots lose less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.strategies.continuous.backward import Blocks, block_row, row_seconds
from lowtide.strategies.continuous.bounds import Bounds, least_rest, rest_of
from lowtide.strategies.numerics.arrays import ChainArrays, Floats, Integers
from lowtide.strategies.numerics.kernels import kernel, kernel_part
from lowtide.strategies.numerics.sorting import sorted_rows

# Chains up to this length have few enough labels to keep all that are not dominated.
EXACT_STAGES = 8
# Half a slot more in A is no reason to keep a label that is as good otherwise.
_SAME_SLOT = 0.5

# The columns of a label.
STAGE, KIND, PARENT, MOVED, STORED = range(5)
LEAVING, ARRIVING, SECONDS, AT_LEAST = range(4)


Flags = NDArray[np.bool_]
Rows = NDArray[np.int32]


class Found(NamedTuple):
    """What a search found: all labels, and the completed ones, best first.

    `numbers` has the columns i, x, the row of the label before (-1: none), whether that one's input is moved, A;
    `amounts` has Δ_F, Δ_B, the time so far, the least total. `ends` has the rows of completed labels and the variants
    of their last stage, `totals` their times.
    """

    numbers: Integers
    amounts: Floats
    ends: Integers
    totals: Floats


class _Pool(NamedTuple):
    """Labels as rows (see `Found`), and how many there are."""

    numbers: Integers
    amounts: Floats
    size: Integers


class _Forwards(NamedTuple):
    """For the light forwards i..j of the forward phase; what stands beside them is counted, the input of i is not."""

    seconds: Floats
    use: Integers
    """The greatest use of those after i."""
    lead: Floats
    """max(use / β - the time of those before it)"""


class _Work(NamedTuple):
    """What stays the same during a search."""

    chain: ChainArrays
    blocks: Blocks
    forwards: _Forwards
    least: Integers
    bounds: Bounds
    grid: Rows
    """By slot of (A, Δ_F, Δ_B), the row of the label that is there, -1: none; empty between two (i, x)."""
    memory: int
    bandwidth: float
    per_byte: float
    """1 / β: multiplying is quicker."""
    num_slots: int
    most_labels: int
    exact: bool
    limit: float


Next = tuple[float, float, float]
"""The time after a decision, and the bytes then left to leave and to arrive; below 0: the link had time left."""


@kernel
def search(
    chain: ChainArrays,
    blocks: Blocks,
    least: Integers,
    bounds: Bounds,
    recompute: bool,
    memory: int,
    bandwidth: float,
    num_slots: int,
    most_labels: int,
    limit: float,
) -> Found:
    """Grow the labels from stage 1 to the loss.

    Args:
        chain: the network.
        blocks: the backward phase.
        least: `pofo_bounds.least_forward`.
        bounds: `pofo_bounds.bounds_of`.
        recompute: allow case 2; without it every forward runs once.
        memory: M, without what is fixed.
        bandwidth: β, bytes per second, above 0.
        num_slots: how finely A, Δ_F and Δ_B are told apart.
        most_labels: how many labels of one (i, x) are kept.
        limit: only labels that may come to no more than this time are kept.
    """
    n = chain.output.size - 1
    num_kinds = chain.saved.shape[1] + 1
    exact = n <= EXACT_STAGES
    grid = np.full(1 if exact else (num_slots + 1) ** 3, np.int32(-1))
    forwards = _forwards(chain, bandwidth)
    work = _Work(
        chain,
        blocks,
        forwards,
        least,
        bounds,
        grid,
        memory,
        bandwidth,
        1 / bandwidth,
        num_slots,
        most_labels,
        exact,
        limit,
    )
    pool = _new_pool(1024)
    pool.numbers[0, STAGE], pool.numbers[0, PARENT] = 1, -1
    pool.size[0] = 1
    first = np.zeros((n + 2, num_kinds + 1), dtype=np.int64)
    first[1, 1:] = 1
    for stage in range(2, n + 1):
        for kind in range(num_kinds):
            first[stage, kind] = pool.size[0]
            if kind == 0 and recompute:
                pool = _keep_best(work, pool, _labels_keep(work, pool, first, stage))
            elif 0 < kind <= chain.num_variants[stage - 1]:
                pool = _keep_best(work, pool, _labels_all(work, pool, first, stage, kind))
        first[stage, num_kinds] = pool.size[0]
    ends, totals = _completed(work, pool, first[n, 0], first[n, num_kinds])
    return Found(pool.numbers[: pool.size[0]], pool.amounts[: pool.size[0]], ends, totals)


@kernel_part
def _forwards(chain: ChainArrays, bandwidth: float) -> _Forwards:
    n = chain.output.size - 1
    seconds, lead = np.zeros((n + 2, n + 2)), np.zeros((n + 2, n + 2))
    use = np.zeros((n + 2, n + 2), dtype=np.int64)
    for i in range(1, n + 1):
        total = 0.0
        most = np.int64(0)
        need = chain.light_peak[i] + chain.standing_first[i]
        first = need / bandwidth
        for k in range(i, n + 1):
            if k > i:
                need = chain.output[k - 1] + chain.light_peak[k] + chain.standing_first[k]
                most = max(most, need)
                first = max(first, need / bandwidth - total)
            total += chain.light_seconds[k]
            seconds[i, k], use[i, k], lead[i, k] = total, most, first
    return _Forwards(seconds, use, lead)


@kernel_part
def _given(chain: ChainArrays, stage: int, kind: int) -> int:
    """The bytes of a stage's input."""
    return int(chain.output[stage - 1] if kind == 0 else chain.saved[stage - 1, kind - 1])


@kernel_part
def _labels_all(work: _Work, pool: _Pool, first: Integers, stage: int, kind: int) -> _Pool:
    """Case 1: the labels of `stage` after a forward `all` of the stage before it."""
    begin, end = first[stage - 1, 0], first[stage - 1, -1]
    after = np.empty((end - begin, 3))
    may_stay = np.ones(end - begin, dtype=np.bool_)
    for row in range(begin, end):
        seconds, leaving, arriving = _after_all(work, pool, row, kind - 1)
        after[row - begin, 0], after[row - begin, 1], after[row - begin, 2] = seconds, leaving, arriving
    return _branched(work, pool, begin, after, may_stay, _new_pool(64), stage, kind)


@kernel_part
def _labels_keep(work: _Work, pool: _Pool, first: Integers, stage: int) -> _Pool:
    """Case 2: the labels of `stage` after light forwards from any stage before it."""
    made = _new_pool(64)
    spare = work.limit - work.bounds.total[1]
    for i in range(stage - 1, 0, -1):
        if work.blocks.row[i, stage - 1] < 0 or work.forwards.seconds[i, stage - 1] > spare:
            break  # and so for every stage before i: more forwards would be recomputed
        begin, end = first[i, 0], first[i, -1]
        after, may_stay = np.empty((end - begin, 3)), np.empty(end - begin, dtype=np.bool_)
        _after_keep(work, pool, begin, end, i, stage - 1, after, may_stay)
        made = _branched(work, pool, begin, after, may_stay, made, stage, 0)
    return made


@kernel_part
def _after_all(work: _Work, pool: _Pool, row: int, v: int) -> Next:
    """After a label, a forward `all` in variant v and its backward; the time is inf where they do not fit."""
    chain, memory, bandwidth = work.chain, work.memory, work.bandwidth
    i, kind, stored = pool.numbers[row, STAGE], pool.numbers[row, KIND], pool.numbers[row, STORED]
    leaving, arriving = pool.amounts[row, LEAVING], pool.amounts[row, ARRIVING]
    used = stored + _given(chain, i, kind)
    during_forward = used + chain.heavy_peak[i, v] + chain.standing_first[i]
    during_backward = used + chain.backward_peak[i, v]
    if max(during_forward, during_backward) > memory:
        return np.inf, 0.0, 0.0
    forward = chain.forward_seconds[i, v] + max(0.0, (during_forward + leaving - memory) / bandwidth)
    backward = chain.backward_seconds[i, v] + max(0.0, (during_backward + arriving - memory) / bandwidth)
    after = pool.amounts[row, SECONDS] + forward + backward
    return after, leaving - forward * bandwidth, arriving - backward * bandwidth


@kernel_part
def _after_keep(work: _Work, pool: _Pool, begin: int, end: int, i: int, j: int, after: Floats, may_stay: Flags) -> None:
    """After each label begin..end-1, all of stage i, light forwards i..j that are recomputed later.

    Filled in are `after` (see `Next`), with inf where they do not fit or take too long, and whether the input of i may
    stay. Everything that the loop over labels reads is at hand before it: there are millions of them.
    """
    bandwidth, per_byte, block = work.bandwidth, work.per_byte, block_row(work.blocks, i, j)
    light, use, lead = work.forwards.seconds[i, j], work.forwards.use[i, j], work.forwards.lead[i, j]
    own = work.chain.light_peak[i] + work.chain.standing_first[i]
    least = light + work.bounds.total[i]
    numbers, amounts = pool.numbers, pool.amounts
    for row in range(begin, end):
        kind, seconds = numbers[row, KIND], amounts[row, SECONDS]
        given = work.chain.output[i - 1] if kind == 0 else work.chain.saved[i - 1, kind - 1]
        room = work.memory - numbers[row, STORED] - given
        after[row - begin, 0] = np.inf
        if own > room or use > room + given or seconds + least > work.limit:
            continue
        backward = row_seconds(block, room, amounts[row, ARRIVING])
        forward = light + max(0.0, lead + (amounts[row, LEAVING] - room) * per_byte)
        after[row - begin, 0] = seconds + forward + backward
        after[row - begin, 1] = amounts[row, LEAVING] - forward * bandwidth
        after[row - begin, 2] = amounts[row, ARRIVING] - backward * bandwidth
        may_stay[row - begin] = use <= room


@kernel_part
def _branched(
    work: _Work, pool: _Pool, begin: int, after: Floats, may_stay: Flags, made: _Pool, stage: int, kind: int
) -> _Pool:
    """Offer the two labels that follow each label from `begin` on: its input stays, its input moves."""
    made = _with_room(made, 2 * may_stay.size)
    rest = rest_of(work.bounds, stage)
    least, per_byte, limit = work.least[stage, kind], work.per_byte, work.limit
    given_next = _given(work.chain, stage, kind)
    numbers, amounts, size = made.numbers, made.amounts, made.size
    grid, exact, num_slots = work.grid, work.exact, work.num_slots
    per_slot = num_slots / max(work.memory, 1)
    for index in range(may_stay.size):
        seconds = after[index, 0]
        if seconds + rest.total > limit:
            continue
        row = begin + index
        given = _given(work.chain, pool.numbers[row, STAGE], pool.numbers[row, KIND])
        for moved in range(2):
            if (moved == 0 and not may_stay[index]) or (moved == 1 and given == 0):
                continue
            stored = pool.numbers[row, STORED] + (0 if moved else given)
            if stored + least > work.memory:
                continue
            leaves = max(after[index, 1] + (given if moved else 0), 0.0)
            arrives = max(after[index, 2], 0.0) + (given if moved else 0)
            room = (work.memory - stored - given_next) * per_byte
            total = seconds + least_rest(rest, room, leaves * per_byte, arrives * per_byte)
            if total > limit:
                continue
            at = size[0]
            if not exact:  # of the labels in one slot the one with the least bound stays
                slot = slot_of(stored, leaves, arrives, per_slot, num_slots)
                if grid[slot] >= 0:
                    at = np.int64(grid[slot])
                    if total >= amounts[at, AT_LEAST]:
                        continue
                grid[slot] = at
            if at == size[0]:
                size[0] += 1
            numbers[at, STAGE], numbers[at, KIND], numbers[at, PARENT] = stage, kind, row
            numbers[at, MOVED], numbers[at, STORED] = moved, stored
            amounts[at, LEAVING], amounts[at, ARRIVING] = leaves, arrives
            amounts[at, SECONDS], amounts[at, AT_LEAST] = seconds, total
    return made


@kernel_part
def slot_of(stored: int, leaving: float, arriving: float, per_slot: float, num_slots: int) -> int:
    """The slot of (A, Δ_F, Δ_B); `per_slot` is in slots a byte."""
    a = min(int(stored * per_slot), num_slots)
    f = min(int(leaving * per_slot), num_slots)
    b = min(int(arriving * per_slot), num_slots)
    return (a * (num_slots + 1) + f) * (num_slots + 1) + b


@kernel_part
def _keep_best(work: _Work, pool: _Pool, made: _Pool) -> _Pool:
    """Move the labels that no other one dominates to the pool, by rising bound, as many as may be kept.

    Whatever dominates a label has no greater bound, so it comes first.
    """
    size = made.size[0]
    per_slot = work.num_slots / max(work.memory, 1)
    if not work.exact:
        for row in range(size):
            leaving, arriving = made.amounts[row, LEAVING], made.amounts[row, ARRIVING]
            work.grid[slot_of(made.numbers[row, STORED], leaving, arriving, per_slot, work.num_slots)] = -1
    most = size if work.exact else work.most_labels
    more_stored = 0.0 if work.exact else _SAME_SLOT * work.memory / work.num_slots
    pool = _with_room(pool, min(size, most))
    begin = pool.size[0]
    for row in sorted_rows(np.arange(size), made.amounts[:, AT_LEAST]):
        end = pool.size[0]
        if end - begin == most:
            break
        if not _dominated(made, row, pool, begin, end, more_stored, work.bandwidth):
            _copy_label(made, row, pool, end)
            pool.size[0] += 1
    return pool


@kernel_part
def _dominated(made: _Pool, row: int, pool: _Pool, begin: int, end: int, more_stored: float, bandwidth: float) -> bool:
    """Whether one of the labels begin..end-1 of the pool is at least as good in every respect."""
    stored = made.numbers[row, STORED] + more_stored
    leaving, arriving = made.amounts[row, LEAVING], made.amounts[row, ARRIVING]
    seconds = made.amounts[row, SECONDS]
    for other in range(begin, end):
        if pool.numbers[other, STORED] <= stored and pool.amounts[other, SECONDS] <= seconds:
            wait = max(pool.amounts[other, LEAVING] - leaving, 0.0) + max(pool.amounts[other, ARRIVING] - arriving, 0.0)
            if pool.amounts[other, SECONDS] + wait / bandwidth <= seconds:
                return True
    return False


@kernel_part
def _completed(work: _Work, pool: _Pool, begin: int, end: int) -> tuple[Integers, Floats]:
    """The loss after every label of stage n: between F_n and B_n all has to have left, and to begin to come back."""
    num_ways = work.chain.num_variants[work.chain.output.size - 1]
    ends, totals = np.empty(((end - begin) * num_ways, 2), dtype=np.int64), np.empty((end - begin) * num_ways)
    size = 0
    for row in range(begin, end):
        for v in range(num_ways):
            seconds, leaving, arriving = _after_all(work, pool, row, v)
            if seconds < np.inf:
                ends[size, 0], ends[size, 1] = row, v
                totals[size] = seconds + (max(leaving, 0.0) + max(arriving, 0.0)) / work.bandwidth
                size += 1
    best_ends, best_totals = np.empty((size, 2), dtype=np.int64), np.empty(size)
    for at, row in enumerate(sorted_rows(np.arange(size), totals)):
        best_ends[at, 0], best_ends[at, 1] = ends[row, 0], ends[row, 1]
        best_totals[at] = totals[row]
    return best_ends, best_totals


@kernel_part
def _new_pool(capacity: int) -> _Pool:
    return _Pool(np.zeros((capacity, 5), dtype=np.int64), np.zeros((capacity, 4)), np.zeros(1, dtype=np.int64))


@kernel_part
def _with_room(pool: _Pool, num_more: int) -> _Pool:
    """The pool, with room for so many more labels."""
    size = pool.size[0]
    if size + num_more <= pool.amounts.shape[0]:
        return pool
    larger = _new_pool(2 * (size + num_more))
    for row in range(size):
        _copy_label(pool, row, larger, row)
    larger.size[0] = size
    return larger


@kernel_part
def _copy_label(source: _Pool, row: int, target: _Pool, at: int) -> None:
    # By element: assignments of rows take seconds to compile.
    for column in range(source.numbers.shape[1]):
        target.numbers[at, column] = source.numbers[row, column]
    for column in range(source.amounts.shape[1]):
        target.amounts[at, column] = source.amounts[row, column]
