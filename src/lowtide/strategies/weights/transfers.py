"""When the chosen weights move: algorithm 2 of the weights paper (section 5), on lists of operations.

Copies out run first in, first out; copies in run in the order in which the computations need them; both as early as
they can. What is free to choose is how many of the copies in for backward n, n-1, … have been queued before backward n
begins: the cut. For each cut the period is run round after round (`rounds`) until a round ends as it began:
that round's list is a periodic schedule. The best of all cuts is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.schedule import Offload, Operation, Prefetch, Release, Value
from lowtide.strategies.weights.choices import Choice, from_backward
from lowtide.strategies.weights.cycle import best_cut
from lowtide.strategies.weights.periods import Period
from lowtide.strategies.weights.rounds import COMPUTE, PREFETCH, Course, Ints, Moves, new_state


@dataclass(frozen=True, slots=True)
class Placed:
    """The best schedule of a selection: its steady period, and its operations from forward 1 on."""

    seconds: float
    cut: int
    operations: tuple[Operation, ...]


def place(
    period: Period,
    chosen: Sequence[Choice],
    *,
    memory_budget: int,
    bandwidth: int,
    duplex: bool = True,
    discount: bool = True,
    cuts: Sequence[int] | None = None,
) -> Placed | None:
    """Algorithm 2: the best periodic schedule of the chosen moves over all cuts, None where no cut runs.

    Args:
        period: the computations.
        chosen: the choices taken.
        memory_budget: bytes.
        bandwidth: bytes per second each way, above 0.
        duplex: both directions at once.
        discount: a value that is on the host since its backward leaves after its forward without another copy.
        cuts: try only these; None: all.
    """
    if not chosen:
        fits = period.most_bytes <= memory_budget
        return Placed(sum(period.seconds), 0, period.computations) if fits else None
    values: list[Value] = sorted({(choice.kind, choice.stage) for choice in chosen})
    course = _course_of(period, values, memory_budget, bandwidth, duplex)
    moves = _moves_of(period, chosen, values, discount)
    state = new_state(period.num_stages, len(chosen), len(values))
    events = np.zeros_like(state.events)
    tried = [cut for cut in cuts or range(moves.num_wrapping + 1) if cut <= moves.num_wrapping]
    seconds, cut, num_events = best_cut(course, moves, state, np.array(tried, np.int64), events)
    if cut < 0:
        return None
    return Placed(seconds, int(cut), _operations(period, values, events[:num_events]))


def _course_of(period: Period, values: list[Value], memory_budget: int, bandwidth: int, duplex: bool) -> Course:
    n = period.num_stages
    values_at = np.full((2 * n, 2), -1)
    for index, (kind, k) in enumerate(values):
        values_at[n - k, 0 if kind == "w" else 1] = index
        if kind == "w":
            values_at[n + k - 1, 0] = index
    sizes = {"w": period.weight_bytes, "opt": period.optimizer_bytes}
    bytes_at = [from_backward(period, listed).astype(np.int64) for listed in (period.gap_bytes, period.standing_bytes)]
    return Course(
        from_backward(period, period.seconds).astype(np.float64),
        np.stack(bytes_at, axis=1),
        values_at,
        np.array([sizes[kind][k - 1] for kind, k in values], np.int64),
        period.resident_bytes,
        memory_budget,
        float(bandwidth),
        duplex,
    )


def _moves_of(period: Period, chosen: Sequence[Choice], values: list[Value], discount: bool) -> Moves:
    num_positions = 2 * period.num_stages
    ordered = sorted(chosen, key=lambda choice: (choice.need % num_positions, choice.kind))
    index_of = {value: index for index, value in enumerate(values)}
    sent = {(choice.kind, choice.stage) for choice in chosen if not choice.clean}
    table = np.zeros((len(ordered), 5), np.int64)
    at_use = np.full((num_positions, 2), -1)
    early = []
    for move, choice in enumerate(ordered):
        value = (choice.kind, choice.stage)
        copies = 1
        if choice.clean:
            copies = 2 if value not in sent else 0 if discount else 1
        table[move] = index_of[value], choice.num_bytes, choice.use, choice.need, copies
        at_use[choice.use, 0 if choice.kind == "w" else 1] = move
        early += [move] if copies == 2 else []
    early.sort(key=lambda move: ordered[move].use)
    num_wrapping = sum(choice.need >= num_positions for choice in ordered)
    return Moves(table, at_use, np.array(early, np.int64), num_wrapping)


def _operations(period: Period, values: list[Value], events: Ints) -> tuple[Operation, ...]:
    """Events from backward n on as operations from forward 1 on.

    What leaves after backward 1 leaves at the end of the list, up to the first copy in: with the next round its input
    and the gradient of its output are there, and the rounds saw to room beside these for the copies in alone.
    """
    n = period.num_stages
    listed: list[Operation] = []
    turn, ends = 0, False  # where forward 1's round begins; whether the round before it is ending
    for kind, index in events.tolist():
        if kind == COMPUTE:
            listed.append(period.computations[(index + n) % (2 * n)])
            ends = index == n - 1
        else:
            listed.append((Offload, Release, Prefetch)[kind - 1](*values[index]))
            ends = ends and kind != PREFETCH
        turn = len(listed) if ends else turn
    return (*listed[turn:], *listed[:turn])
