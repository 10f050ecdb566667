"""Place copies in a given order of computations: when to offload, free and fetch each value.

An order of computations says which value is needed when. Between two computations that touch a value lies a *gap*; a
value that is moved is away during (a part of) its gap. `place` turns an order and a choice of gaps into a schedule:

- a copy to the host is queued as soon as its value exists, in the order in which the values are made;
- a value is released as late as memory allows, and only if some computation needs the room; among those that could go,
  the one whose copy ends first;
- a value is fetched as early as memory allows, in the order of need.

Memory follows from the order of the list alone, so the placement needs clocks only to choose which copy to wait for.
A side value leaves right after a computation if nothing needs it before its maker makes it again. It moves only as it
was made first.

With the releases given and the order of fetches fixed, fetching as early as memory allows is best: a value that is
needed sooner holds its room at the time a later one would be fetched in any case. Which values to move, and in which
order, is a packing problem; that choice is the caller's (`lowtide.strategies.copies.improve` searches it).

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
from numpy.typing import NDArray

from lowtide.chain import Chain, SideValue
from lowtide.schedule import Backward, Forward, Offload, Operation, Prefetch, Release, Value
from lowtide.strategies import sides
from lowtide.strategies.copies.placement import NEVER, GapArrays, place_copies

Order = Sequence[Forward | Backward]


@dataclass(frozen=True, slots=True)
class Gap:
    """A part of an order of computations during which a value exists and is not used.

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
    """A schedule with its copies, and its estimated time."""

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
        self.after_bytes = np.zeros(len(self.order), dtype=np.int64)  # what is stored after each, with nothing moved
        self.gaps: tuple[Gap, ...] = ()
        self.freed: dict[int, list[Release]] = {}  # by position, the side values that nothing needs as they are
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
        found = place_copies(self.seconds, excess, self._gap_arrays, allowed, float(bandwidth or 1), duplex)
        return None if found[0] < 0 else found

    def _operations(
        self, offload: NDArray[np.int64], release: NDArray[np.int64], fetch: NDArray[np.int64]
    ) -> tuple[Operation, ...]:
        """The list: before each computation its offloads, then releases, then fetches in the order of need."""
        by_need = self._gap_arrays.by_need
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
                    before.setdefault(int(positions[gap]), []).append(kind_of_copy(kind, k))
        listed: list[Operation] = []
        for position, computation in enumerate(self.order):
            listed.extend(before.get(position, ()))
            listed.append(computation)
            listed.extend(self.freed.get(position, ()))
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
        self.next_backward = chain.num_stages
        self.stored = chain.fixed_bytes + chain.input_bytes + chain.gradient_bytes(chain.num_stages)
        self.gaps: list[Gap] = []
        self.has_run: set[int] = set()
        self.ends = sides.ends(chain, profile.order)
        self.side_values: dict[int, list[tuple[int, SideValue]]] = {}  # by the stages that make and read them
        self.made_gradients: dict[int, int] = {}  # of side values, by the stage whose backward makes them
        self.used_gradients: dict[int, int] = {}
        for i, side in enumerate(chain.side_values, start=1):
            for k, gradients in ((side.readers[-1], self.made_gradients), (side.maker, self.used_gradients)):
                gradients[k] = gradients.get(k, 0) + side.grad_bytes
            for k in (side.maker, *side.readers) if side.num_bytes else ():
                self.side_values.setdefault(k, []).append((i, side))
        self.made_first: dict[Value, int] = {}
        self.held_long = [(i, side) for i, side in enumerate(chain.side_values, start=1) if side.held_until]

    def read(self) -> None:
        """Fill the profile's arrays and gaps."""
        for position, operation in enumerate(self.profile.order):
            if isinstance(operation, Forward):
                self._forward(position, operation)
            else:
                self._backward(position, operation)
            self.profile.after_bytes[position] = self.stored
        self.profile.gaps = tuple(sorted(self.gaps, key=lambda gap: (gap.made, gap.value[1], gap.begin)))

    def _forward(self, position: int, operation: Forward) -> None:
        k, save = operation.stage, operation.save
        stage = self.chain.stage(k)
        way = stage.variant(operation.variant if save == "all" else 0)
        made: Value = ("abar", k) if save == "all" else ("a", k)
        num_bytes = way.saved_bytes if save == "all" else stage.output_bytes
        self._touch(position, ("a", k - 1) if ("a", k - 1) in self.sizes else ("abar", k - 1))
        self._side_values(position, k)
        is_unwanted = save == "all" and k == self.next_backward < self.chain.num_stages
        seconds = way.rerun_seconds if is_unwanted else way.forward_seconds
        extra_bytes = way.saving_extra_bytes if save == "all" else stage.forward_extra_bytes
        self._note(position, seconds, num_bytes + extra_bytes + self._outliving(position, k))
        self.sizes[made] = num_bytes
        self.made[made] = self.touched[made] = position
        self.stored += num_bytes
        if save == "all":
            self.variant[k] = operation.variant
        elif save == "drop":
            self._remove(position, ("a", k - 1))
        self._free_side_values(position)

    def _backward(self, position: int, operation: Backward) -> None:
        k = operation.stage
        stage, chain = self.chain.stage(k), self.chain
        way = stage.variant(self.variant[k])
        weight_grad = 0 if chain.grads_resident else stage.weight_grad_bytes
        made = chain.gradient_bytes(k - 1) + weight_grad
        made += self.made_gradients.get(k, 0)
        self._touch(position, ("abar", k))
        self._touch(position, ("a", k - 1) if ("a", k - 1) in self.sizes else ("abar", k - 1))
        self._side_values(position, k)
        self._note(position, way.backward_seconds, way.backward_more_bytes(made))
        self.stored += made - chain.gradient_bytes(k)
        self.stored -= self.used_gradients.get(k, 0)
        for value in (("abar", k), ("a", k - 1)):
            if value in self.sizes:
                self._remove(position, value)
        self._free_side_values(position)
        self.next_backward = k - 1

    def _outliving(self, position: int, k: int) -> int:
        """What the code around stage k holds in its first forward and nothing stores; what is stored cannot leave."""
        more_bytes = 0
        for m, num_bytes in () if k in self.has_run else self.chain.stage(k).outliving:
            stored = [value for value in (("a", m), ("abar", m)) if value in self.sizes]
            more_bytes += 0 if stored else num_bytes
            for value in stored:
                self._touch(position, value)
        for i, side in self.held_long if k not in self.has_run else ():
            is_freed = ("s", i) in self.made_first and ("s", i) not in self.sizes
            more_bytes += side.num_bytes if k <= side.held_until and is_freed else 0
        self.has_run.add(k)
        return more_bytes

    def _side_values(self, position: int, k: int) -> None:
        """Touch what a computation of stage k reads, and make what its forward makes."""
        for i, side in self.side_values.get(k, ()):
            value = ("s", i)
            if k != side.maker or value in self.sizes:
                self._touch(position, value)
            elif isinstance(self.profile.order[position], Forward):
                self.sizes[value] = side.num_bytes
                self.made[value] = self.touched[value] = position
                self.made_first.setdefault(value, position)
                self.stored += side.num_bytes

    def _free_side_values(self, position: int) -> None:
        for i in self.ends.get(position, ()):
            self.stored -= self.sizes.pop(("s", i))
            self.profile.freed.setdefault(position, []).append(Release("s", i))

    def _note(self, position: int, seconds: float, transient_bytes: int) -> None:
        self.profile.seconds[position] = seconds
        self.profile.peak_bytes[position] = self.stored + transient_bytes

    def _touch(self, position: int, value: Value) -> None:
        last = self.touched[value]
        may_move = value[0] != "s" or (
            not self.chain.side_value(value[1]).stays and self.made[value] == self.made_first[value]
        )
        if position > last + 1 and self.sizes[value] and may_move:
            self.gaps.append(Gap(value, self.made[value], last, position, self.sizes[value]))
        self.touched[value] = position

    def _remove(self, position: int, value: Value) -> None:
        if self.touched[value] < position:
            self._touch(position, value)
        self.stored -= self.sizes.pop(value)


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
    return GapArrays(*(np.array(column, dtype=np.int64) for column in columns))
