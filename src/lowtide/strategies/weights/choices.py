"""Which weights leave the device, and when: the choices of the weights paper (section 5), and algorithm 1.

Choice (k, 1) takes w[k] away between forward k and backward k, choice (k, 0) between backward k and the next
forward k. Optimizer state has one choice, between backward k and the next backward k. A choice covers the
computations that run meanwhile.

Computations are counted from backward n, as in the paper: position 0..n-1 is backward n..1, n..2n-1 is forward 1..n.
A position of the next period has 2n added.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.schedule import Kind
from lowtide.strategies.numerics.kernels import kernel, kernel_part
from lowtide.strategies.weights.periods import Period

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to take one value away for a part of the period.

    Attributes:
        kind: `"w"` or `"opt"`.
        stage: k.
        num_bytes: the value's size.
        use: the position of the computation after which it leaves.
        need: the position of the computation before which it is back, after `use`.
        partner: the index of the other choice for the same value, -1 where there is none.
        clean: the computation at `use` does not change the value: the paper's d = 1.
    """

    kind: Kind
    stage: int
    num_bytes: int
    use: int
    need: int
    partner: int
    clean: bool


def choices_of(period: Period) -> list[Choice]:
    """All choices that cover a computation."""
    n = period.num_stages
    found: list[Choice] = []
    for k in range(1, n + 1):
        backward, forward = n - k, n + k - 1
        weight, state = period.weight_bytes[k - 1], period.optimizer_bytes[k - 1]
        intervals = [(backward, forward, False), (forward, 2 * n + backward, True)] if weight else []
        intervals = [interval for interval in intervals if interval[1] - interval[0] > 1]
        for index, (use, need, clean) in enumerate(intervals):
            partner = len(found) + (1 if index == 0 else -1) if len(intervals) == 2 else -1
            found.append(Choice("w", k, weight, use, need, partner, clean))
        if state:
            found.append(Choice("opt", k, state, backward, 2 * n + backward, -1, False))
    return found


def typical_bytes(choices: Collection[Choice]) -> float:
    """The mean size of what can be moved, each byte counting once."""
    sizes = [choice.num_bytes for choice in choices]
    return sum(size * size for size in sizes) / max(1, sum(sizes))


def from_backward(period: Period, values: Collection[float]) -> Floats:
    """What is listed by computation, forward 1 first, listed by position, backward n first."""
    listed = np.asarray(values)
    return np.concatenate((listed[period.num_stages :], listed[: period.num_stages]))


def select_greedily(
    period: Period, choices: list[Choice], memory_budget: int, *, discount: bool = True
) -> list[int] | None:
    """Algorithm 1: take the most profitable choice until no computation exceeds the budget.

    The profit of a choice is the excess that it removes, summed over the computations that it covers, by what it
    costs: its bytes moved out and in, or only in where the other choice for the same value has paid for the way out.

    Returns:
        The indices of the choices taken, in order, or None where not even all of them are enough.
    """
    standing = from_backward(period, period.standing_bytes).astype(np.int64)
    excess = np.tile(np.maximum(0, period.resident_bytes + standing - memory_budget), 2)
    sizes = np.unique(np.array([choice.num_bytes for choice in choices], np.int64))
    fields = [(choice.use, choice.need, choice.num_bytes, choice.partner) for choice in choices]
    table = np.zeros((len(choices), 5), np.int64)
    table[:, :4] = np.array(fields, np.int64).reshape(-1, 4)
    table[:, 4] = np.searchsorted(sizes, table[:, 2])
    taken = np.full(len(choices), -1)
    known, costs = np.full(len(choices), np.inf), np.full(len(choices), 2.0)
    num_taken = _select(excess, table, discount, known, costs, np.zeros(len(sizes), np.int64), taken)
    return None if num_taken < 0 else [int(index) for index in taken[:num_taken]]


@kernel
def _select(excess: Ints, table: Ints, discount: bool, known: Floats, costs: Floats, renewed: Ints, taken: Ints) -> int:
    """Fill `taken` from the excess over two periods; returns how many, -1 where all are not enough.

    Profits only fall while choices are taken (but for a discount), so that the last `known` ones are upper bounds:
    they are renewed for the size of the highest alone, until the highest is one of those.
    """
    num_taken = 0
    while True:
        covered = True
        for position in range(len(excess)):
            covered = covered and excess[position] == 0
        if covered:
            return num_taken
        while True:
            best = -1
            for choice in range(len(table)):
                if known[choice] > 0.0 and (best < 0 or known[choice] > known[best]):
                    best = choice
            if best < 0:
                return -1
            if renewed[table[best, 4]] == num_taken + 1:
                break
            renewed[table[best, 4]] = num_taken + 1
            _renew(known, costs, excess, table, best)
        _remove(excess, table[best])
        known[best] = 0.0
        taken[num_taken] = best
        num_taken += 1
        partner = table[best, 3]
        if discount and partner >= 0 and known[partner] > 0.0:
            known[partner], costs[partner] = np.inf, 1.0


@kernel_part
def _renew(known: Floats, costs: Floats, excess: Ints, table: Ints, like: int) -> None:
    """Compute the profits of all choices that are not taken and have the size of the choice `like`."""
    num_bytes, size = table[like, 2], table[like, 4]
    removed_up_to = np.zeros(len(excess) + 1, np.int64)
    for position in range(len(excess)):
        removed_up_to[position + 1] = removed_up_to[position] + min(excess[position], num_bytes)
    for choice in range(len(table)):
        if table[choice, 4] == size and known[choice] > 0.0:
            removed = removed_up_to[table[choice, 1]] - removed_up_to[table[choice, 0] + 1]
            known[choice] = removed / num_bytes / costs[choice]


@kernel_part
def _remove(excess: Ints, choice: Ints) -> None:
    """Take a choice's bytes from the computations that it covers, in both periods."""
    half = len(excess) // 2
    for position in range(choice[0] + 1, choice[1]):
        left = max(0, excess[position] - choice[2])
        excess[position] = left
        excess[position - half if position >= half else position + half] = left
