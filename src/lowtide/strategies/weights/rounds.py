"""The rounds of algorithm 2 of the weights paper: a period is run with chosen moves, and its list is written down.

In the gap before a computation
1. what the last computation used and may leave is queued for the host, where it has no current copy there;
2. what has arrived there leaves the device, and copies in are queued, in the order in which they are needed, while the
   budget has room, now and at each computation until they are needed;
3. where the next computation, or a copy that it needs, does not fit, the oldest copy out is waited for.

Values that leave after a forward alone go to the host early, whenever that channel would be idle (best effort).

Positions are those of `weight_selection`: 0 is backward n. Only arrays and numbers here, so that numba compiles it:
bytes are whole, times are seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.strategies.numerics.kernels import kernel_part

# The kinds of entry in a list of events.
COMPUTE, OFFLOAD, RELEASE, PREFETCH = range(4)

# Rounds within which a list must repeat; where it does not, each round ends with nothing left to wait for.
_LARGEST_NUM_ROUNDS = 5

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Course(NamedTuple):
    """The computations by position, and the values that move."""

    seconds: Floats
    bytes_at: Ints  # [position, GAP or STANDING], values that move not counted
    values_at: Ints  # [position, slot]: the values that move and that the computation needs or makes; -1: none
    changes: NDArray[np.bool_]  # likewise: whether it changes or makes that value
    value_bytes: Ints
    resident_bytes: int  # with everything on the device
    memory_budget: int
    bandwidth: float
    duplex: bool


class Moves(NamedTuple):
    """The choices taken, in the order in which they are fetched: those for the backwards first."""

    table: Ints  # [move, VALUE … COPIES]
    at_use: Ints  # [position, slot]: the moves that begin after that computation, -1: none
    early: Ints  # the moves that may be copied out before their use, by use
    num_wrapping: int  # so many of the first to be fetched are away when a round begins


class RoundState(NamedTuple):
    """What is where, and the clocks."""

    clocks: Floats  # CLOCK, TO_HOST, TO_DEVICE
    counts: Ints  # RESIDENT … NUM_EVENTS
    away: Ints  # by move: ON_DEVICE, PENDING or AWAY
    pending: Ints  # the moves about to leave, the first to be ready first
    copies: Floats  # [ARRIVED or COPIED, value]: when the last copy ends; no current copy on the host: infinity
    events: Ints  # [event, 2]: kind, and value or position


GAP, STANDING = range(2)
# COPIES: 0 never, 1 at its use, 2 at its use or before; MADE: the last computation up to USE that changes it, -1: none
# since the round began
VALUE, BYTES, USE, NEED, COPIES, MADE = range(6)
CLOCK, TO_HOST, TO_DEVICE = range(3)
RESIDENT, NEXT, NUM_PENDING, NUM_EVENTS = range(4)
ON_DEVICE, PENDING, AWAY = range(3)
ARRIVED, COPIED = range(2)


def new_state(num_positions: int, num_moves: int, num_values: int) -> RoundState:
    """A state with room for all events of a round."""
    return RoundState(
        np.zeros(3),
        np.zeros(4, np.int64),
        np.zeros(num_moves, np.int64),
        np.zeros(num_moves + 1, np.int64),
        np.zeros((2, num_values)),
        np.zeros((num_positions + 5 * num_moves, 2), np.int64),
    )


@kernel_part
def _record(state: RoundState, kind: int, index: int) -> None:
    at = state.counts[NUM_EVENTS]
    state.events[at, 0] = kind
    state.events[at, 1] = index
    state.counts[NUM_EVENTS] = at + 1


@kernel_part
def copy_end(course: Course, clocks: Floats, channel: int, value: int) -> float:
    """Queue a copy of a value on a channel now."""
    end = max(clocks[channel], clocks[CLOCK]) + course.value_bytes[value] / course.bandwidth
    clocks[channel] = end
    if not course.duplex:
        clocks[TO_HOST] = clocks[TO_DEVICE] = end
    return float(end)


@kernel_part
def _begin_leaving(course: Course, moves: Moves, state: RoundState, position: int) -> None:
    """Step 1: what the computation at `position` used, and may go."""
    for slot in range(moves.at_use.shape[1]):
        move = moves.at_use[position, slot]
        if move < 0:
            continue
        value, copies = moves.table[move, VALUE], moves.table[move, COPIES]
        if copies == 1 or (copies == 2 and state.copies[COPIED, value] == np.inf):
            _record(state, OFFLOAD, value)
            state.copies[COPIED, value] = copy_end(course, state.clocks, TO_HOST, value)
        state.away[move] = PENDING
        at = state.counts[NUM_PENDING]
        while at > 0 and _ready(moves, state, at - 1) > state.copies[COPIED, value]:
            state.pending[at] = state.pending[at - 1]
            at -= 1
        state.pending[at] = move
        state.counts[NUM_PENDING] += 1


@kernel_part
def _ready(moves: Moves, state: RoundState, at: int) -> float:
    """When a pending value has its copy on the host."""
    return float(state.copies[COPIED, moves.table[state.pending[at], VALUE]])


@kernel_part
def _drop_pending(state: RoundState, index: int) -> None:
    for at in range(index, state.counts[NUM_PENDING] - 1):
        state.pending[at] = state.pending[at + 1]
    state.counts[NUM_PENDING] -= 1


@kernel_part
def _release_first(moves: Moves, state: RoundState) -> None:
    """Free the first pending value, after waiting for its copy if necessary."""
    move = state.pending[0]
    _record(state, RELEASE, moves.table[move, VALUE])
    state.clocks[CLOCK] = max(state.clocks[CLOCK], _ready(moves, state, 0))
    state.counts[RESIDENT] -= moves.table[move, BYTES]
    state.away[move] = AWAY
    _drop_pending(state, 0)


@kernel_part
def _fetch(course: Course, moves: Moves, state: RoundState, move: int) -> None:
    value = moves.table[move, VALUE]
    _record(state, PREFETCH, value)
    state.copies[ARRIVED, value] = copy_end(course, state.clocks, TO_DEVICE, value)
    state.counts[RESIDENT] += moves.table[move, BYTES]
    state.away[move] = ON_DEVICE
    state.counts[NEXT] += 1


@kernel_part
def _starts_at(course: Course, state: RoundState, position: int) -> float:
    """When the computation could start, for all that is known: its values have arrived."""
    clock = state.clocks[CLOCK]
    for slot in range(course.values_at.shape[1]):
        value = course.values_at[position % len(course.seconds), slot]
        if value >= 0:
            clock = max(clock, state.copies[ARRIVED, value])
    return float(clock)


@kernel_part
def _has_room(
    course: Course, moves: Moves, state: RoundState, position: int, move: int, need: int, patient: bool
) -> bool:
    """Whether a copy in may be queued now: it fits in this gap, and at each computation until `need`.

    What leaves until then makes room: all of it where `patient` (computations may then have to wait for it),
    otherwise what would be gone without waiting.
    """
    num_positions, num_pending = len(course.seconds), state.counts[NUM_PENDING]
    room = course.memory_budget - state.counts[RESIDENT] - moves.table[move, BYTES]
    if course.bytes_at[position % num_positions, GAP] > room:
        return False
    clock, channel = _starts_at(course, state, position), state.clocks[TO_HOST]
    ends = np.empty(
        num_pending + moves.at_use.shape[1] * max(0, need - position)
    )  # when what is leaving will be gone, in order …
    sizes = np.empty(len(ends), np.int64)  # … and its bytes
    for at in range(num_pending):
        ends[at] = _ready(moves, state, at)
        sizes[at] = moves.table[state.pending[at], BYTES]
    first, count = 0, num_pending
    for at in range(position, need):
        here = at % num_positions
        while first < count and (patient or ends[first] <= clock):
            room += sizes[first]
            first += 1
        if course.bytes_at[here, STANDING] > room:
            return False
        clock += course.seconds[here]
        for slot in range(moves.at_use.shape[1]):
            leaving = moves.at_use[here, slot]
            if leaving >= 0:
                copies = moves.table[leaving, COPIES]
                if copies == 1 or (copies == 2 and state.copies[COPIED, moves.table[leaving, VALUE]] == np.inf):
                    channel = max(channel, clock) + moves.table[leaving, BYTES] / course.bandwidth
                ends[count] = max(clock, channel) if copies else clock
                sizes[count] = moves.table[leaving, BYTES]
                count += 1
    return True


@kernel_part
def _need_of_next(course: Course, moves: Moves, state: RoundState, begun: int) -> int:
    """The position, counted from the running round's begin, at which the next fetch is needed."""
    num_positions, num_moves = len(course.seconds), len(moves.table)
    turns = state.counts[NEXT] // num_moves - begun
    return int(moves.table[state.counts[NEXT] % num_moves, NEED] % num_positions + turns * num_positions)


@kernel_part
def _fetch_what_fits(
    course: Course, moves: Moves, state: RoundState, position: int, begun: int, last_fetch: int, patient: bool
) -> None:
    """Queue copies in, in order, while there is room; `last_fetch` is the first that may not be queued yet."""
    while state.counts[NEXT] < last_fetch:
        move = state.counts[NEXT] % len(moves.table)
        need = _need_of_next(course, moves, state, begun)
        if state.away[move] == PENDING and need <= position:  # not gone, and needed now: it stays
            for at in range(state.counts[NUM_PENDING]):
                if state.pending[at] == move:
                    _drop_pending(state, at)
                    break
            state.away[move] = ON_DEVICE
            state.counts[NEXT] += 1
        elif state.away[move] == AWAY and _has_room(course, moves, state, position, move, need, patient):
            _fetch(course, moves, state, move)
        else:
            return


@kernel_part
def _fill_gap(
    course: Course,
    moves: Moves,
    state: RoundState,
    position: int,
    begun: int,
    last_fetch: int,
    floor: int,
    patient: bool,
) -> bool:
    """Steps 2 and 3 in the gap before `position`; False where the computation can never run.

    Fetches below `floor` are queued whatever it costs.
    """
    here = position % len(course.seconds)
    while True:
        while state.counts[NUM_PENDING] and _ready(moves, state, 0) <= state.clocks[CLOCK]:
            _release_first(moves, state)
        _fetch_what_fits(course, moves, state, position, begun, last_fetch, patient)
        move = state.counts[NEXT] % len(moves.table)
        due = state.counts[NEXT] < last_fetch and _need_of_next(course, moves, state, begun) <= position
        due = due or state.counts[NEXT] < floor
        room = course.memory_budget - state.counts[RESIDENT]
        if not due and course.bytes_at[here, STANDING] <= room:
            if state.counts[NUM_PENDING] == 0 or _ready(moves, state, 0) > _starts_at(course, state, position):
                return True
        elif due and state.away[move] == AWAY:
            room -= moves.table[move, BYTES]
            if max(course.bytes_at[here, GAP], course.bytes_at[here, STANDING]) <= room:
                _fetch(course, moves, state, move)
                continue
        if state.counts[NUM_PENDING] == 0:
            return False
        _release_first(moves, state)


@kernel_part
def _offload_early(course: Course, moves: Moves, state: RoundState, position: int) -> None:
    """Send to the host what leaves after a later forward, where that channel would otherwise be idle."""
    window = np.inf  # until the next copy out that cannot be early
    for slot in range(moves.at_use.shape[1]):
        move = moves.at_use[position, slot]
        if move >= 0 and moves.table[move, COPIES] == 1:
            window = course.seconds[position]
    while state.clocks[TO_HOST] <= state.clocks[CLOCK]:
        best = -1
        for move in moves.early:
            use, num_bytes = moves.table[move, USE], moves.table[move, BYTES]
            if (
                position <= moves.table[move, MADE]
                or position > use
                or state.copies[COPIED, moves.table[move, VALUE]] < np.inf
            ):
                continue
            if num_bytes / course.bandwidth <= window and (best < 0 or num_bytes < moves.table[best, BYTES]):
                best = move
        if best < 0:
            return
        value = moves.table[best, VALUE]
        _record(state, OFFLOAD, value)
        state.copies[COPIED, value] = copy_end(course, state.clocks, TO_HOST, value)


@kernel_part
def _compute(course: Course, state: RoundState, position: int) -> None:
    state.clocks[CLOCK] = _starts_at(course, state, position) + course.seconds[position]
    _record(state, COMPUTE, position)
    for slot in range(course.values_at.shape[1]):
        value = course.values_at[position, slot]
        if value >= 0 and course.changes[position, slot]:
            state.copies[COPIED, value] = np.inf


@kernel_part
def _begin(course: Course, moves: Moves, state: RoundState, cut: int) -> None:
    """The state before backward n: of what left after its forward or a backward, the first `cut` are back."""
    state.clocks[:] = 0.0
    state.copies[:] = 0.0
    state.counts[:] = 0
    state.away[:] = ON_DEVICE
    state.counts[RESIDENT] = course.resident_bytes
    state.counts[NEXT] = cut
    for move in range(cut, len(moves.table)):
        if moves.table[move, NEED] >= len(course.seconds):
            state.away[move] = AWAY
            state.counts[RESIDENT] -= moves.table[move, BYTES]


@kernel_part
def _run_round(
    course: Course, moves: Moves, state: RoundState, begun: int, cut: int, patient: bool, forced: bool
) -> bool:
    """One round of the period; False where it cannot run."""
    num_positions = len(course.seconds)
    last_fetch = (begun + 1) * len(moves.table) + cut
    state.counts[NUM_EVENTS] = 0
    for position in range(num_positions + 1):
        if position > 0:
            _begin_leaving(course, moves, state, position - 1)
        floor = 0 if position < num_positions else last_fetch
        if not _fill_gap(course, moves, state, position, begun, last_fetch, floor, patient):
            return False
        if position < num_positions:
            _offload_early(course, moves, state, position)
            _compute(course, state, position)
    while forced and state.counts[NUM_PENDING]:
        _release_first(moves, state)
    return True


@kernel_part
def run_cut(course: Course, moves: Moves, state: RoundState, cut: int, patient: bool) -> bool:
    """Run a cut until a round ends as it began; its events are left in the state. False where the cut cannot run."""
    before = np.zeros(len(moves.table), np.bool_)
    uncopied = np.zeros(len(course.value_bytes), np.bool_)
    for attempt in range(2):
        _begin(course, moves, state, cut)
        for begun in range(_LARGEST_NUM_ROUNDS):
            for move in range(len(before)):
                before[move] = state.away[move] == AWAY
            for value in range(len(uncopied)):
                uncopied[value] = state.copies[COPIED, value] == np.inf
            if not _run_round(course, moves, state, begun, cut, patient, attempt == 1):
                break
            repeats = True
            for move in range(len(before)):
                repeats = repeats and before[move] == (state.away[move] == AWAY)
            for value in range(len(uncopied)):
                repeats = repeats and uncopied[value] == (state.copies[COPIED, value] == np.inf)
            if repeats:
                return True
    return False
