"""Where the copies of chosen trips go: the rounds of the weights paper's algorithm 2, over every kind of value.

`weights.rounds` runs a round with the trips and writes down a list; positions are counted from backward n, where memory
is fullest. Where it finds no list, each value is fetched right before the computation that needs it and leaves right
after: that always works where the trips leave enough room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from lowtide.schedule import (
    Backward,
    Forward,
    Kind,
    Offload,
    Operation,
    Prefetch,
    Release,
    Schedule,
    Start,
    Update,
    Value,
)
from lowtide.strategies.base import Problem
from lowtide.strategies.together.order import Round, Trip
from lowtide.strategies.weights.cycle import best_cut
from lowtide.strategies.weights.rounds import COMPUTE, PREFETCH, Course, Ints, Moves, new_state

# Of how many fetches may be queued ahead of backward n, so many numbers are tried at first, and then their neighbours.
_NUM_CUTS = 9


@dataclass(frozen=True, slots=True)
class PlacedMoves:
    """A list of operations, from forward 1 on, and its estimated steady period."""

    seconds: float
    listed: Callable[[], tuple[Operation, ...]]
    """Lists the operations: of many lists one is taken."""


def place(problem: Problem, order: Round, trips: Sequence[Trip]) -> PlacedMoves | None:
    """The best list with these trips that the rounds find; None where they find none."""
    if not trips:
        fits = int(order.peak_bytes.max()) <= problem.memory_budget
        return PlacedMoves(order.compute_seconds, partial(_listed, order, range(order.size))) if fits else None
    values: list[Value] = sorted({trip.value for trip in trips})
    first = order.computations.index(Backward(order.chain.num_stages))
    course = _course(problem, order, trips, values, first)
    moves = _moves(order, trips, values, first)
    state = new_state(order.size, len(trips), len(values))
    events = np.zeros_like(state.events)
    best: tuple[float, int] | None = None
    tried: set[int] = set()
    cuts = [*dict.fromkeys(moves.num_wrapping * step // (_NUM_CUTS - 1) for step in range(_NUM_CUTS))]
    kept, num_kept = np.zeros_like(events), 0
    while cuts:
        tried |= set(cuts)
        seconds, cut, num_events = best_cut(course, moves, state, np.array(cuts, np.int64), events)
        if cut < 0 or (best is not None and seconds >= best[0]):
            break
        best, num_kept = (seconds, int(cut)), num_events
        kept[:] = events
        near = {best[1] - 1, best[1] + 1, best[1] - _NUM_CUTS, best[1] + _NUM_CUTS}
        cuts = sorted(near & set(range(moves.num_wrapping + 1)) - tried)
    if best is None:
        return None
    return PlacedMoves(best[0], partial(_operations, order, values, first, kept[:num_kept]))


def _course(problem: Problem, order: Round, trips: Sequence[Trip], values: list[Value], first: int) -> Course:
    """The computations by position, with everything on the device: what is away counts below zero."""
    number = {value: index for index, value in enumerate(values)}
    touched: list[dict[int, bool]] = [{} for _ in range(order.size)]
    for trip in trips:
        own = number[trip.value]
        for index in (trip.begin, trip.end % order.size):
            touched[index].setdefault(own, False)
        if trip.made is not None:
            touched[trip.made % order.size][own] = True
    width = max(len(uses) for uses in touched)
    values_at, changes = np.full((order.size, width), -1), np.zeros((order.size, width), np.bool_)
    for index, uses in enumerate(touched):
        position = (index - first) % order.size
        values_at[position, : len(uses)] = list(uses)
        changes[position, : len(uses)] = list(uses.values())
    sizes = {trip.value: trip.num_bytes for trip in trips}
    bytes_at = np.stack((order.before_bytes, order.peak_bytes), axis=1)
    return Course(
        np.roll(order.seconds, -first),
        np.roll(bytes_at, -first, axis=0),
        values_at,
        changes,
        np.array([sizes[value] for value in values], np.int64),
        0,
        problem.memory_budget,
        float(problem.bandwidth),
        problem.duplex,
    )


def _moves(order: Round, trips: Sequence[Trip], values: list[Value], first: int) -> Moves:
    number = {value: index for index, value in enumerate(values)}
    paid = {trip.version for trip in trips if trip.made == trip.begin}

    def position(trip: Trip) -> tuple[int, int]:
        use = (trip.begin - first) % order.size
        return use, use + trip.end - trip.begin

    ordered = sorted(trips, key=lambda trip: (position(trip)[1] % order.size, trip.value))
    table = np.zeros((len(ordered), 6), np.int64)
    leaving: list[list[int]] = [[] for _ in range(order.size)]
    early: list[int] = []
    for move, trip in enumerate(ordered):
        use, need = position(trip)
        copies = 1 if trip.made == trip.begin else 2
        made = -1 if trip.made is None else use - (trip.begin - trip.made)
        table[move] = number[trip.value], trip.num_bytes, use, need, copies, max(-1, made)
        leaving[use].append(move)
        early += [move] if trip.version not in paid else []
    early.sort(key=lambda move: int(table[move, 2]))
    at_use = np.full((order.size, max(len(moves) for moves in leaving)), -1)
    for use, moves in enumerate(leaving):
        at_use[use, : len(moves)] = moves
    wrapping = table[:, 3] >= order.size
    num_wrapping = len(ordered) if wrapping.all() else int(wrapping.argmin())
    return Moves(table, at_use, np.array(early, np.int64), num_wrapping)


def _operations(order: Round, values: list[Value], first: int, events: Ints) -> tuple[Operation, ...]:
    """Events from backward n on as operations from forward 1 on; what leaves at the end leaves before the seam."""
    listed: list[Operation] = []
    turn, ends = 0, False
    for kind, number in events.tolist():
        if kind == COMPUTE:
            index = (number + first) % order.size
            listed += [order.computations[index], *order.freed.get(index, ())]
            ends = index == order.size - 1
        else:
            listed.append(_copy((Offload, Release, Prefetch)[kind - 1], values[number]))
            ends = ends and kind != PREFETCH
        turn = len(listed) if ends else turn
    return (*listed[turn:], *listed[:turn])


def _listed(order: Round, indices: Sequence[int]) -> tuple[Operation, ...]:
    return tuple(each for i in indices for each in (order.computations[i], *order.freed.get(i, ())))


def _copy(verb: type[Offload | Release | Prefetch], value: Value) -> Operation:
    kind, k = value
    return verb(cast(Kind, kind), k)


def one_by_one(order: Round, trips: Sequence[Trip]) -> tuple[Operation, ...]:
    """Each value fetched right before it is needed, and gone right after it was used."""
    fetched: dict[int, list[Value]] = {}
    for trip in trips:
        fetched.setdefault(trip.end % order.size, []).append(trip.value)
    copied: set[int] = {trip.version for trip in trips if trip.made is None}
    listed: list[Operation] = []
    for _ in range(2):  # the first only says what has a copy when the round begins
        listed = []
        for index in range(order.size):
            for trip in trips:
                if trip.made is not None and trip.made % order.size == index:
                    copied.discard(trip.version)
            listed += [_copy(Prefetch, value) for value in fetched.get(index, ())]
            listed += [order.computations[index], *order.freed.get(index, ())]
            leaving = [trip for trip in trips if trip.begin == index]
            listed += [_copy(Offload, trip.value) for trip in leaving if trip.version not in copied]
            copied |= {trip.version for trip in leaving}
            listed += [_copy(Release, trip.value) for trip in leaving]
    return tuple(listed)


def cyclic(strategy: str, num_stages: int, operations: Sequence[Operation]) -> Schedule:
    """A schedule of one round whose start is the state that its own operations lead back to."""
    kinds: tuple[Kind, ...] = ("w", "opt")
    device: set[Value] = {(kind, k) for kind in kinds for k in range(1, num_stages + 1)}
    changed = {operation.stage for operation in operations if isinstance(operation, Update)}
    moved = {op.value for op in operations if isinstance(op, Release | Prefetch) and op.kind in kinds}
    host = {value for value in moved if value[1] not in changed}  # nothing makes their copies stale
    released = {op.value for op in operations if isinstance(op, Release)}
    listed = [op for op in operations if not isinstance(op, Offload) or op.value in released]
    for operation in listed:
        if isinstance(operation, Update):
            host -= {(kind, operation.stage) for kind in kinds}
        elif isinstance(operation, Forward | Backward) or operation.kind not in kinds:
            continue
        elif isinstance(operation, Offload):
            host.add(operation.value)
        elif isinstance(operation, Release):
            device.discard(operation.value)
        elif isinstance(operation, Prefetch):
            device.add(operation.value)
    return Schedule(strategy, tuple(listed), kinds, Start(frozenset(device), frozenset(host)))
