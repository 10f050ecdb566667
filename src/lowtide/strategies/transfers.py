"""Place copies in a given order of computations: what to offload when, when to let it go, when to fetch it back.

An order of computations says which value is needed when. Between two computations that touch a value lies a *gap*; a
value that is moved is away during (a part of) its gap. `place` turns an order and a choice of gaps into a schedule:

- a copy to the host is queued as soon as its value exists, in the order in which the values are made;
- a value is released as late as memory allows, and only if some computation needs the room; among those that could go,
  the one whose copy ends first;
- a value is fetched as early as memory allows, in the order of need.

Memory follows from the order of the list alone, so the placement needs clocks only to choose which copy to wait for.
With the releases given and the order of fetches fixed, fetching as early as memory allows is best: a value that is
needed sooner holds its room at the time a later one would be fetched in any case. Which values to move, and in which
order, is a packing problem; that choice is the caller's (`lowtide.strategies.improve` searches it).

    >>> from lowtide import Chain, Stage, Forward, Backward
    >>> chain = Chain("three", [Stage(str(k), 1.0, 1.0, output_bytes=8, saved_bytes=8) for k in (1, 2, 3)])
    >>> order = [Forward(1, "all"), Forward(2, "all"), Forward(3, "all"), Backward(3), Backward(2), Backward(1)]
    >>> gaps_of(chain, order)
    (Gap(value=('abar', 1), made=0, begin=1, end=4, num_bytes=8),)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward, Offload, Operation, Prefetch, Release, Value

Order = Sequence[Forward | Backward]

NEVER = np.int64(2**62)  # a position after every computation


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of an order of computations during which a value exists and nobody touches it.

    `made`, `begin` and `end` are positions in the order: the computation that makes the value (-1: it is there from the
    start), the last one that touches it before the gap, and the one that needs it again.
    """

    value: Value
    made: int
    begin: int
    end: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A schedule with its copies, and what the placement reckons it takes."""

    operations: tuple[Operation, ...]
    seconds: float
    moved: tuple[int, ...]
    """The gaps, by index, during which the value is really away."""


class Profile:
    """An order of computations as arrays: its times, the peak of each computation with nothing moved, and its gaps.

    Args:
        chain: the network.
        order: computations only, legal where every value stays on the device until it is removed.
    """

    def __init__(self, chain: Chain, order: Order) -> None:
        self.chain = chain
        self.order = tuple(order)
        self.seconds = np.zeros(len(self.order))
        self.peak_bytes = np.zeros(len(self.order), dtype=np.int64)
        self.gaps: tuple[Gap, ...] = ()
        _Reader(self).read()
        self._gap_arrays = _arrays_of(self.gaps)

    @property
    def compute_seconds(self) -> float:
        """The time of all computations."""
        return float(self.seconds.sum())

    def need_bytes(self, moved: Collection[int] | None = None) -> int:
        """The least budget with which the order works when the gaps `moved` (None: all) may be used."""
        need = self.peak_bytes.copy()
        for index in range(len(self.gaps)) if moved is None else moved:
            gap = self.gaps[index]
            need[gap.begin + 1 : gap.end] -= gap.num_bytes
        return int(need.max())

    def place(
        self, moved: Collection[int] | None, memory_budget: int, bandwidth: int, *, duplex: bool = True
    ) -> Placement | None:
        """Place the copies of the gaps `moved`, or of any gap (None), within a budget.

        Returns:
            the schedule, or None where the budget cannot be met.
        """
        allowed = np.ones(len(self.gaps), dtype=np.bool_) if moved is None else np.zeros(len(self.gaps), dtype=np.bool_)
        if moved is not None:
            allowed[list(moved)] = True
        if not bandwidth:
            allowed[:] = False
        found = self.positions(allowed, memory_budget, bandwidth, duplex)
        if found is None:
            return None
        seconds, *positions = found
        moved_gaps = tuple(int(gap) for gap in np.flatnonzero(positions[1] < NEVER))
        return Placement(self._operations(*positions), seconds, moved_gaps)

    def positions(
        self, allowed: NDArray[np.bool_], memory_budget: int, bandwidth: int, duplex: bool
    ) -> tuple[float, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
        """The time, and for each gap where it is offloaded, released and fetched (`NEVER`: not); None: no room."""
        excess = self.peak_bytes - memory_budget
        found = place_copies(self.seconds, excess, *self._gap_arrays, allowed, float(bandwidth or 1), duplex)
        return None if found[0] < 0 else found

    def _operations(
        self, offload: NDArray[np.int64], release: NDArray[np.int64], fetch: NDArray[np.int64]
    ) -> tuple[Operation, ...]:
        """The list: before each computation its offloads, then releases, then fetches in the order of need."""
        by_need = self._gap_arrays[-1]
        by_release = np.argsort(release, kind="stable")
        groups: list[tuple[type[Offload | Release | Prefetch], NDArray[np.int64], NDArray[np.int64]]] = [
            (Offload, offload, by_release),
            (Release, release, by_release),
            (Prefetch, fetch, by_need),
        ]
        before: dict[int, list[Operation]] = {}
        for kind_of_copy, positions, order in groups:
            for gap in order:
                if positions[gap] < NEVER:
                    kind, k = self.gaps[gap].value
                    before.setdefault(int(positions[gap]), []).append(kind_of_copy(kind, k))  # type: ignore[arg-type]
        listed: list[Operation] = []
        for position, computation in enumerate(self.order):
            listed.extend(before.get(position, ()))
            listed.append(computation)
        return tuple(listed)


def gaps_of(chain: Chain, order: Order) -> tuple[Gap, ...]:
    """Every gap of an order of computations, in the order in which the values are made."""
    return Profile(chain, order).gaps


class _Reader:
    """Walks through an order once and notes what exists when."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.chain = profile.chain
        chain = self.chain
        self.sizes: dict[Value, int] = {("a", 0): chain.input_bytes}
        self.made: dict[Value, int] = {("a", 0): -1}
        self.touched: dict[Value, int] = {("a", 0): -1}
        self.variant: dict[int, int] = {}
        self.stored = chain.fixed_bytes + chain.input_bytes + chain.gradient_bytes(chain.num_stages)
        self.gaps: list[Gap] = []

    def read(self) -> None:
        """Fill the profile's arrays and gaps."""
        for position, operation in enumerate(self.profile.order):
            if isinstance(operation, Forward):
                self._forward(position, operation)
            else:
                self._backward(position, operation)
        self.profile.gaps = tuple(sorted(self.gaps, key=lambda gap: (gap.made, gap.value[1], gap.begin)))

    def _forward(self, position: int, operation: Forward) -> None:
        k, save = operation.stage, operation.save
        stage = self.chain.stage(k)
        way = stage.variant(operation.variant if save == "all" else 0)
        made: Value = ("abar", k) if save == "all" else ("a", k)
        num_bytes = way.saved_bytes if save == "all" else stage.output_bytes
        self._touch(position, ("a", k - 1) if ("a", k - 1) in self.sizes else ("abar", k - 1))
        self._note(position, way.forward_seconds, num_bytes + way.forward_extra_bytes)
        self.sizes[made] = num_bytes
        self.made[made] = self.touched[made] = position
        self.stored += num_bytes
        if save == "all":
            self.variant[k] = operation.variant
        elif save == "drop":
            self._remove(position, ("a", k - 1))

    def _backward(self, position: int, operation: Backward) -> None:
        k = operation.stage
        stage, chain = self.chain.stage(k), self.chain
        way = stage.variant(self.variant[k])
        weight_grad = 0 if chain.grads_resident else stage.weight_grad_bytes
        made = chain.gradient_bytes(k - 1) + weight_grad
        self._touch(position, ("abar", k))
        self._touch(position, ("a", k - 1) if ("a", k - 1) in self.sizes else ("abar", k - 1))
        self._note(position, way.backward_seconds, made + way.backward_extra_bytes)
        self.stored += made - chain.gradient_bytes(k)
        for value in (("abar", k), ("a", k - 1)):
            if value in self.sizes:
                self._remove(position, value)

    def _note(self, position: int, seconds: float, transient_bytes: int) -> None:
        self.profile.seconds[position] = seconds
        self.profile.peak_bytes[position] = self.stored + transient_bytes

    def _touch(self, position: int, value: Value) -> None:
        last = self.touched[value]
        if position > last + 1 and self.sizes[value]:
            self.gaps.append(Gap(value, self.made[value], last, position, self.sizes[value]))
        self.touched[value] = position

    def _remove(self, position: int, value: Value) -> None:
        if self.touched[value] < position:
            self._touch(position, value)
        self.stored -= self.sizes.pop(value)


GapArrays = tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]
]


def _arrays_of(gaps: Sequence[Gap]) -> GapArrays:
    """made, begin, end, bytes, the value's index (gaps of one value share its copy), and the order of need."""
    index: dict[tuple[Value, int], int] = {}
    for gap in gaps:
        index.setdefault((gap.value, gap.made), len(index))
    columns = [
        [gap.made for gap in gaps],
        [gap.begin for gap in gaps],
        [gap.end for gap in gaps],
        [gap.num_bytes for gap in gaps],
        [index[(gap.value, gap.made)] for gap in gaps],
        sorted(range(len(gaps)), key=lambda g: (gaps[g].end, gaps[g].begin, g)),
    ]
    made, begin, end, num_bytes, value, by_need = (np.array(column, dtype=np.int64) for column in columns)
    return made, begin, end, num_bytes, value, by_need


@njit(cache=True)
def place_copies(
    seconds: NDArray[np.float64],
    excess: NDArray[np.int64],
    made: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    value: NDArray[np.int64],
    by_need: NDArray[np.int64],
    allowed: NDArray[np.bool_],
    bandwidth: float,
    duplex: bool,
) -> tuple[float, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Choose where each allowed gap is offloaded, released and fetched.

    Args:
        seconds: the time of each computation.
        excess: its peak with nothing moved, less the budget.
        made, begin, end, num_bytes, value, by_need: the gaps, sorted by `made`.
        allowed: which gaps may be used.
        bandwidth: bytes per second each way.
        duplex: whether the two directions have a channel of their own.

    Returns:
        the makespan (-1: no room), and the positions of the offloads, releases and fetches (`NEVER`: the value stays).
    """
    usable = allowed.copy()
    while True:
        feasible, release = _releases(seconds, excess, made, begin, end, num_bytes, value, usable, bandwidth)
        if not feasible:
            return -1.0, release, release, release
        kept = release < NEVER
        if np.array_equal(kept, usable):
            break
        usable = kept  # what never has to go is not copied, and the others' copies are sooner done
    slack = _slack(excess, release, end, num_bytes)
    last_release = np.int64(0)
    for gap in range(release.size):
        if release[gap] < NEVER:
            last_release = max(last_release, release[gap])
    best = -1.0
    best_offload = release
    best_fetch = release
    # Four ways to settle what the rules leave open; each is legal, the clocks say which is best.
    for way in range(4 if duplex else 8):
        offload = _offloads(made, value, release, way % 2 == 1)
        earliest = last_release if way >= 4 else np.int64(0)
        fetch = _fetches(slack.copy(), release, end, num_bytes, by_need, way % 4 < 2, earliest)
        makespan = run_clocks(seconds, end, num_bytes, value, by_need, offload, release, fetch, bandwidth, duplex)
        if best < 0 or makespan < best:
            best, best_offload, best_fetch = makespan, offload, fetch
    return best, best_offload, release, best_fetch


@njit(cache=True)
def _releases(
    seconds: NDArray[np.float64],
    excess: NDArray[np.int64],
    made: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    value: NDArray[np.int64],
    usable: NDArray[np.bool_],
    bandwidth: float,
) -> tuple[bool, NDArray[np.int64]]:
    """Where each gap's value has to go: as late as memory allows, the one whose copy ends first."""
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


@njit(cache=True)
def _slack(
    excess: NDArray[np.int64], release: NDArray[np.int64], end: NDArray[np.int64], num_bytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The room left at each computation when every released value comes back at the last moment."""
    slack = -excess
    for gap in range(release.size):
        if release[gap] < NEVER:
            for position in range(release[gap], end[gap]):
                slack[position] += num_bytes[gap]
    return slack


@njit(cache=True)
def _offloads(
    made: NDArray[np.int64], value: NDArray[np.int64], release: NDArray[np.int64], by_release: bool
) -> NDArray[np.int64]:
    """Where each released value's copy is queued (at its first released gap): as soon as the value exists.

    `by_release`: no copy goes ahead of one whose value has to go sooner; otherwise in the order of making.
    """
    offload = np.full(release.size, NEVER)
    queued = np.zeros(release.size, dtype=np.bool_)
    previous = np.int64(0)
    order = np.argsort(release, kind="mergesort") if by_release else np.arange(release.size)
    for gap in order:
        if release[gap] < NEVER and not queued[value[gap]]:
            queued[value[gap]] = True
            offload[gap] = max(made[gap] + 1, previous)
            if by_release:
                previous = offload[gap]
    return offload


@njit(cache=True)
def _fetches(
    slack: NDArray[np.int64],
    release: NDArray[np.int64],
    end: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    by_need: NDArray[np.int64],
    ordered: bool,
    earliest: int,
) -> NDArray[np.int64]:
    """Where each released value is fetched: as early as memory allows, in the order of need.

    `ordered`: no fetch overtakes one that is needed sooner; otherwise a small one may, while a large one finds no room.
    """
    fetch = np.full(release.size, NEVER)
    previous = np.int64(earliest)
    for gap in by_need:
        if release[gap] == NEVER:
            continue
        floor = min(max(release[gap], previous), end[gap])
        position = end[gap]
        while position > floor and slack[position - 1] >= num_bytes[gap]:
            position -= 1
            slack[position] -= num_bytes[gap]
        fetch[gap] = position
        if ordered:
            previous = position
    return fetch


@njit(cache=True)
def run_clocks(
    seconds: NDArray[np.float64],
    end: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    value: NDArray[np.int64],
    by_need: NDArray[np.int64],
    offload: NDArray[np.int64],
    release: NDArray[np.int64],
    fetch: NDArray[np.int64],
    bandwidth: float,
    duplex: bool,
) -> float:
    """The makespan of a placement, by the rules of the simulator."""
    num_gaps = end.size
    copied = np.zeros(num_gaps)
    arrival = np.zeros(num_gaps)
    by_release = np.argsort(release, kind="mergesort")
    by_offload = by_release[np.argsort(offload[by_release], kind="mergesort")]
    by_fetch = by_need[np.argsort(fetch[by_need], kind="mergesort")]
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
