"""Where the copies of given gaps go, compiled; `transfers` says by which rules."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.strategies.numerics.kernels import kernel, kernel_part
from lowtide.strategies.numerics.sorting import sorted_rows

NEVER = np.int64(2**62)  # a position after every computation

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]
Seconds = NDArray[np.float64]


class GapArrays(NamedTuple):
    """The gaps of an order of computations, sorted by `made`; positions are those of `transfers.Gap`."""

    made: Positions
    begin: Positions
    end: Positions
    num_bytes: NDArray[np.int64]
    value: Positions
    """Which value it is; gaps of one value share its copy to the host."""
    by_need: Positions
    """The gaps sorted by `end`."""


@kernel
def place_copies(
    seconds: Seconds,
    excess: Positions,
    gaps: GapArrays,
    allowed: Flags,
    bandwidth: float,
    duplex: bool,
) -> tuple[float, Positions, Positions, Positions]:
    """Choose where each allowed gap is offloaded, released and fetched.

    Args:
        seconds: the time of each computation.
        excess: its peak with nothing moved, less the budget.
        gaps: the gaps.
        allowed: which gaps may be used.
        bandwidth: bytes per second each way.
        duplex: whether the two directions have a channel of their own.

    Returns:
        the makespan (-1: no room), and the positions of the offloads, releases and fetches (`NEVER`: the value stays).
    """
    usable = allowed.copy()
    while True:
        feasible, release = _releases(seconds, excess, gaps, usable, bandwidth)
        if not feasible:
            return -1.0, release, release, release
        changed = False
        for gap in range(release.size):  # what never has to go is not copied, and the others' copies are sooner done
            if usable[gap] and release[gap] == NEVER:
                usable[gap] = False
                changed = True
        if not changed:
            break
    slack = _slack(excess, gaps, release)
    last_release = 0
    for gap in range(release.size):
        if release[gap] < NEVER:
            last_release = max(last_release, int(release[gap]))
    best = -1.0
    best_offload = release
    best_fetch = release
    # Four ways to settle what the rules leave open; each is legal, the clocks say which is best.
    for way in range(4 if duplex else 8):
        offload = _offloads(gaps, release, way % 2 == 1)
        earliest = last_release if way >= 4 else 0
        fetch = _fetches(slack.copy(), gaps, release, way % 4 < 2, earliest)
        makespan = run_clocks(seconds, gaps, offload, release, fetch, bandwidth, duplex)
        if best < 0 or makespan < best:
            best, best_offload, best_fetch = makespan, offload, fetch
    return best, best_offload, release, best_fetch


@kernel_part
def _releases(
    seconds: Seconds,
    excess: Positions,
    gaps: GapArrays,
    usable: Flags,
    bandwidth: float,
) -> tuple[bool, Positions]:
    """Where each gap's value has to go: as late as memory allows, the one whose copy ends first."""
    made, begin, end, num_bytes, value = gaps.made, gaps.begin, gaps.end, gaps.num_bytes, gaps.value
    num_gaps = made.size
    release = np.full(num_gaps, NEVER)
    copied = np.full(num_gaps, -1.0)  # by value: when its copy ends
    returning = np.zeros(seconds.size + 1, dtype=np.int64)
    clock = 0.0
    link_free = 0.0
    away = np.int64(0)
    queued = 0
    for position in range(seconds.size):
        while queued < num_gaps and made[queued] < position:
            if usable[queued] and copied[value[queued]] < 0:
                link_free = max(link_free, clock) + num_bytes[queued] / bandwidth
                copied[value[queued]] = link_free
            queued += 1
        away -= returning[position]
        missing = excess[position] - away
        while missing > 0:
            chosen = -1
            for gap in range(queued):
                if not usable[gap] or release[gap] < NEVER or not begin[gap] < position < end[gap]:
                    continue
                if chosen < 0:
                    chosen = gap
                    continue
                sooner = copied[value[gap]] - copied[value[chosen]]
                if sooner < 0 or (sooner == 0 and end[gap] > end[chosen]):
                    chosen = gap
            if chosen < 0:
                return False, release
            release[chosen] = position
            clock = max(clock, copied[value[chosen]])
            missing -= num_bytes[chosen]
        for gap in range(queued):  # the last one may have made room for others to stay
            if release[gap] == position and num_bytes[gap] <= -missing:
                missing += num_bytes[gap]
                release[gap] = NEVER
        for gap in range(queued):
            if release[gap] == position:
                away += num_bytes[gap]
                returning[end[gap]] += num_bytes[gap]
        clock += seconds[position]
    return True, release


@kernel_part
def _slack(excess: Positions, gaps: GapArrays, release: Positions) -> Positions:
    """The room left at each computation when every released value comes back at the last moment."""
    slack = np.empty_like(excess)
    for position in range(excess.size):
        slack[position] = -excess[position]
    for gap in range(release.size):
        if release[gap] < NEVER:
            for position in range(release[gap], gaps.end[gap]):  # by element: slices take seconds to compile
                slack[position] += gaps.num_bytes[gap]
    return slack


@kernel_part
def _offloads(gaps: GapArrays, release: Positions, by_release: bool) -> Positions:
    """Where each released value's copy is queued (at its first released gap): as soon as the value exists.

    `by_release`: no copy goes ahead of one whose value has to go sooner; otherwise in the order of making.
    """
    offload = np.full(release.size, NEVER)
    queued = np.zeros(release.size, dtype=np.bool_)
    previous = np.int64(0)
    order = np.arange(release.size)
    for gap in sorted_rows(order, release) if by_release else order:
        if release[gap] < NEVER and not queued[gaps.value[gap]]:
            queued[gaps.value[gap]] = True
            offload[gap] = max(gaps.made[gap] + 1, previous)
            if by_release:
                previous = offload[gap]
    return offload


@kernel_part
def _fetches(slack: Positions, gaps: GapArrays, release: Positions, ordered: bool, earliest: int) -> Positions:
    """Where each released value is fetched: as early as memory allows, in the order of need.

    `ordered`: no fetch overtakes one that is needed sooner; otherwise a small one may, while a large one finds no room.
    """
    fetch = np.full(release.size, NEVER)
    previous = earliest
    for gap in gaps.by_need:
        if release[gap] == NEVER:
            continue
        floor = min(max(release[gap], previous), gaps.end[gap])
        position = gaps.end[gap]
        while position > floor and slack[position - 1] >= gaps.num_bytes[gap]:
            position -= 1
            slack[position] -= gaps.num_bytes[gap]
        fetch[gap] = position
        if ordered:
            previous = position
    return fetch


@kernel_part
def run_clocks(
    seconds: Seconds,
    gaps: GapArrays,
    offload: Positions,
    release: Positions,
    fetch: Positions,
    bandwidth: float,
    duplex: bool,
) -> float:
    """The makespan of a placement, by the rules of the simulator."""
    end, num_bytes, value, by_need = gaps.end, gaps.num_bytes, gaps.value, gaps.by_need
    num_gaps = end.size
    copied = np.zeros(num_gaps)
    arrival = np.zeros(num_gaps)
    by_release = sorted_rows(np.arange(num_gaps), release)
    by_offload = sorted_rows(by_release, offload)
    by_fetch = sorted_rows(by_need, fetch)
    clock = 0.0
    to_host = 0.0
    to_device = 0.0
    queued = 0
    released = 0
    fetched = 0
    needed = 0
    for position in range(seconds.size):
        while queued < num_gaps and offload[by_offload[queued]] <= position:
            gap = by_offload[queued]
            to_host = max(to_host if duplex else max(to_host, to_device), clock) + num_bytes[gap] / bandwidth
            copied[value[gap]] = to_host
            queued += 1
        while released < num_gaps and release[by_release[released]] <= position:
            clock = max(clock, copied[value[by_release[released]]])
            released += 1
        while fetched < num_gaps and fetch[by_fetch[fetched]] <= position:
            gap = by_fetch[fetched]
            to_device = max(to_device if duplex else max(to_host, to_device), clock) + num_bytes[gap] / bandwidth
            arrival[gap] = to_device
            fetched += 1
        while needed < num_gaps and end[by_need[needed]] <= position:
            clock = max(clock, arrival[by_need[needed]])
            needed += 1
        clock += seconds[position]
    return clock
