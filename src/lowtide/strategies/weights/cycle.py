"""How long the lists of `rounds` take when they are repeated, and which cut is the best."""

from __future__ import annotations

import numpy as np

from lowtide.strategies.numerics.kernels import kernel, kernel_part
from lowtide.strategies.weights.rounds import (
    ARRIVED,
    CLOCK,
    COMPUTE,
    COPIED,
    NUM_EVENTS,
    OFFLOAD,
    PREFETCH,
    TO_DEVICE,
    TO_HOST,
    Course,
    Floats,
    Ints,
    Moves,
    RoundState,
    copy_end,
    run_cut,
)

# Rounds after which a cycle that has not settled is averaged, as `lowtide.simulate` does it.
_LARGEST_NUM_SETTLING_ROUNDS = 64


@kernel_part
def _replay(course: Course, events: Ints, num_events: int, clocks: Floats, copies: Floats) -> None:
    """Run a list of events once more, as `lowtide.simulate` does."""
    for at in range(num_events):
        kind, index = events[at, 0], events[at, 1]
        if kind == COMPUTE:
            for slot in range(course.values_at.shape[1]):
                if course.values_at[index, slot] >= 0:
                    clocks[CLOCK] = max(clocks[CLOCK], copies[ARRIVED, course.values_at[index, slot]])
            clocks[CLOCK] += course.seconds[index]
        elif kind == PREFETCH:
            copies[ARRIVED, index] = copy_end(course, clocks, TO_DEVICE, index)
        else:
            clocks[CLOCK] = max(clocks[CLOCK], copies[ARRIVED, index])
            if kind == OFFLOAD:
                copies[COPIED, index] = copy_end(course, clocks, TO_HOST, index)
            else:
                clocks[CLOCK] = max(clocks[CLOCK], copies[COPIED, index])


@kernel_part
def steady_period(course: Course, events: Ints, num_events: int) -> float:
    """The steady period of a list of events, as `lowtide.simulate` computes it."""
    num_values = len(course.value_bytes)
    clocks, copies = np.zeros(3), np.zeros((2, num_values))
    seams = np.zeros((_LARGEST_NUM_SETTLING_ROUNDS + 1, 2 + 2 * num_values))
    begins = np.zeros(_LARGEST_NUM_SETTLING_ROUNDS + 1)
    for turn in range(1, _LARGEST_NUM_SETTLING_ROUNDS + 1):
        _replay(course, events, num_events, clocks, copies)
        begins[turn] = clocks[CLOCK]
        for channel in range(2):
            seams[turn, channel] = max(0.0, clocks[1 + channel] - clocks[CLOCK])
            for value in range(num_values):
                ahead = max(0.0, copies[channel, value] - clocks[CLOCK])
                seams[turn, 2 + channel * num_values + value] = ahead
        for earlier in range(turn - 1, -1, -1):
            elapsed, differs = begins[turn] - begins[earlier], 0.0
            for entry in range(2 + 2 * num_values):
                differs = max(differs, abs(seams[turn, entry] - seams[earlier, entry]))
            if differs <= 1e-9 * elapsed:
                return float(elapsed / (turn - earlier))
    half = (_LARGEST_NUM_SETTLING_ROUNDS + 1) // 2
    return float((begins[-1] - begins[half]) / (_LARGEST_NUM_SETTLING_ROUNDS - half))


@kernel
def best_cut(course: Course, moves: Moves, state: RoundState, cuts: Ints, best_events: Ints) -> tuple[float, int, int]:
    """Try cuts, patiently and not; the least period, its cut (-1 where none runs) and the number of its events."""
    best, chosen, num_events = np.inf, -1, 0
    for cut in cuts:
        for patient in (False, True):
            if not run_cut(course, moves, state, cut, patient):
                continue
            period = steady_period(course, state.events, state.counts[NUM_EVENTS])
            if period < best:
                best, chosen, num_events = period, cut, state.counts[NUM_EVENTS]
                for at in range(num_events):
                    best_events[at, 0], best_events[at, 1] = state.events[at, 0], state.events[at, 1]
    return best, chosen, num_events
