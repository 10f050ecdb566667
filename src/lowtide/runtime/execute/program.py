"""Prepares a schedule for execution: how each stage's first forward runs, and what each forward must keep.

The first forward of each stage is the model's own; everything that the schedule asks for besides is done by the
executor, in the order of the list. How the tensors that a stage saves are looked after depends on what happens to
them later:

- `NATIVE`: they stay until backward, and so does the stage's input: autograd keeps them by itself, as in plain
  training.
- `COUNT`: they are let go (`keep`, `drop`), and a later forward makes them again.
- `HOLD`: a repeated forward hands them to autograd, where they stay until backward.
- `GUARD`: they stay, too, and the stage's weights leave: whoever opens one makes sure that the weights are there.
- `SORT`: they are moved to the host, or the stage's input is moved or made again before backward, or a side value that
  it reads or makes is moved: each is known as a view of a storage, and put together again for backward.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import itemgetter
from types import MappingProxyType
from typing import cast

from lowtide.chain import SideValue
from lowtide.errors import PlanError, ScheduleError
from lowtide.runtime.execute.coarse import Coarse
from lowtide.runtime.execute.weights import MANAGED
from lowtide.schedule import (
    COMPUTATIONS,
    Await,
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


class Mode(Enum):
    """How the tensors that one forward saves are looked after."""

    NATIVE = "native"
    GUARD = "guard"
    COUNT = "count"
    HOLD = "hold"
    SORT = "sort"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights, weight gradients and optimizer state are between the parts of a step, and how it ends.

    Args:
        start: on the device when a forward begins.
        after_backward: on the device when backward has ended.
        updates: what is left of the list then, for the optimizer's step.
        steps_in_backward: the list updates weights between backwards, and nothing is left for the optimizer's step but
            the parameters that stay.
    """

    start: frozenset[Value]
    after_backward: frozenset[Value]
    updates: tuple[Operation, ...]
    steps_in_backward: bool = False


@dataclass(frozen=True, slots=True)
class MovedSide:
    """A side value that leaves the device and comes back.

    Args:
        maker: the stage that makes it.
        readers: the stages that read it.
        tensor: its number among the tensors of its maker.
        last_fetch: the index in the list of the last time that it is fetched.
    """

    maker: int
    readers: frozenset[int]
    tensor: int
    last_fetch: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule and what follows from it.

    Args:
        operations: the list.
        num_stages: n.
        first: the index of each stage's first forward, by stage (entry 0 is unused).
        backward: the index of each stage's backward.
        modes: the mode of each forward, by its index in the list.
        taped: the stages that are recorded: those that are recomputed, and those whose saved tensors are sorted.
        watched: the stages whose tensors must be known: those before a recorded one, those whose output is moved, those
            that make side values of recorded ones, and those before whose backward there is something to do.
        moved: the values that are copied to the host.
        last_prefetch: for each value that is fetched, the index of the last time.
        variants: as which variant each stage's backward runs, by stage (entry 0 is unused).
        sizes: how many of the schedule's own stages each stage here stands for.
        last_reads: the repeated forwards, by their index in the list, after which nobody reads the stage's input: what
            its backward needs of it autograd has.
        unwanted: the repeated forwards, by their index in the list, whose output nobody wants: the backward of the next
            stage is over.
        repeats: for each stage that runs again, the indices of its repeated forwards.
        placement: of weights, gradients and optimizer state, where the schedule moves them.
        moved_sides: the side values that are copied to the host, by their place in the chain.
    """

    operations: tuple[Operation, ...]
    num_stages: int
    first: tuple[int, ...]
    backward: tuple[int, ...]
    modes: dict[int, Mode]
    taped: frozenset[int]
    watched: frozenset[int]
    moved: frozenset[Value]
    last_prefetch: dict[Value, int]
    variants: tuple[int, ...]
    sizes: tuple[int, ...]
    last_reads: frozenset[int]
    unwanted: frozenset[int]
    repeats: dict[int, list[int]]
    placement: Placement | None = None
    moved_sides: Mapping[int, MovedSide] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        coarse: Coarse,
        side_values: Sequence[SideValue] = (),
        side_tensors: Sequence[int] = (),
        *,
        grads_resident: bool = False,
    ) -> Program:
        """Read a schedule that the simulator has found legal, over the stages that it was joined to.

        Args:
            schedule: the schedule.
            coarse: its operations over the stages that it was joined to.
            side_values: of the schedule's own stages, where they are known; others stay until their readers' backward.
            side_tensors: the number of each among the tensors of its maker.
            grads_resident: weight gradients are on the device from the start.

        Raises:
            PlanError: where the schedule updates weights in backward, or runs one stage as two variants.
        """
        num_stages, placement, listed = coarse.split.num_stages, None, coarse.operations
        if schedule.manages:
            executed = as_executed(replace(schedule, operations=coarse.operations), grads_resident=grads_resident)
            listed, placement = _placed(executed, num_stages, grads_resident=grads_resident)
        sides = _moved_sides(listed, coarse, side_values, side_tensors)
        operations = _without_leftovers(listed, sides)
        sides = {i: replace(side, last_fetch=_last_fetch(operations, i)) for i, side in sides.items()}
        first, backward = _places(operations, num_stages)
        guards = placement is not None
        leaving = _leaving_sides(operations, sides)
        modes = {
            index: _mode(
                operations, index, backward, leaving, is_first=first[operation.stage] == index, is_guarded=guards
            )
            for index, operation in enumerate(operations)
            if isinstance(operation, Forward)
        }
        repeats: dict[int, list[int]] = {}
        for index in modes:
            if first[operations[index].stage] != index:
                repeats.setdefault(operations[index].stage, []).append(index)
        sorted_stages = {operations[index].stage for index, mode in modes.items() if mode is Mode.SORT}
        moved = {op.value for op in operations if isinstance(op, Offload | Prefetch | Release)}
        taped = frozenset(repeats.keys() | sorted_stages | {side.maker for side in sides.values()})
        stage_of = coarse.stage_of
        makers = {stage_of(side.maker) for side in side_values if not taped.isdisjoint(map(stage_of, side.readers))}
        watched = {
            k
            for k in range(num_stages + 1)
            if guards
            or k in taped
            or k + 1 in taped
            or ("a", k) in moved
            or ("abar", k) in moved
            or k in makers
            or (k and not isinstance(operations[backward[k] - 1], Backward) and backward[k] - 1 != first[num_stages])
        }
        return cls(
            operations,
            num_stages,
            first,
            backward,
            modes,
            taped,
            frozenset(watched),
            frozenset(moved),
            {op.value: index for index, op in enumerate(operations) if isinstance(op, Prefetch)},
            _variants(operations, num_stages),
            coarse.sizes,
            frozenset(i for i, mode in modes.items() if mode is Mode.HOLD and _is_last_read(operations, i, backward)),
            frozenset(
                index
                for index, mode in modes.items()
                if mode is Mode.HOLD and (k := operations[index].stage) < num_stages and backward[k + 1] < index
            ),
            repeats,
            placement,
            sides,
        )

    def sides_read(self, k: int) -> list[int]:
        """The side values, of those that move, that stage k reads."""
        return [i for i, side in self.moved_sides.items() if k in side.readers]

    @property
    def moved_origins(self) -> frozenset[tuple[int, int]]:
        """The makers of the side values that move, each with the number of the tensor."""
        return frozenset((side.maker, side.tensor) for side in self.moved_sides.values())

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The stages whose recomputation saves what backward needs."""
        forwards = ((index, op) for index, op in enumerate(self.operations) if isinstance(op, Forward))
        return tuple(sorted({op.stage for i, op in forwards if op.save == "all" and self.first[op.stage] != i}))

    @property
    def unwatched(self) -> frozenset[int]:
        """The stages that autograd looks after alone: nothing needs to be known of what they make."""
        return frozenset(range(1, self.num_stages + 1)) - self.watched - self.taped

    def next_repeat(self, k: int, index: int) -> int:
        """The index of the first repeated forward of stage k after an index; beyond the list if there is none."""
        found = self.repeats.get(k, ())
        place = bisect.bisect_right(found, index)
        return found[place] if place < len(found) else len(self.operations)

    def origin_of(self, k: int) -> int:
        """The first of the schedule's own stages that stage k represents."""
        return 1 + sum(self.sizes[: k - 1])

    def keeps_outputs(self, k: int) -> bool:
        """Whether anything besides autograd needs the output of stage k (of the caller, for k = 0)."""
        return k + 1 in self.taped or ("a", k) in self.moved or ("abar", k) in self.moved


def _moved_sides(
    operations: tuple[Operation, ...], coarse: Coarse, side_values: Sequence[SideValue], tensors: Sequence[int]
) -> dict[int, MovedSide]:
    """The side values that the list moves, in terms of the stages that its own were joined to."""
    moved = {operation.stage for operation in operations if isinstance(operation, Prefetch) and operation.kind == "s"}
    if moved and max(moved) > min(len(side_values), len(tensors)):
        raise PlanError(
            "the schedule moves side values, and it is not known which tensors of the model they are; attach a "
            "solution for a chain that lowtide.measure made of this model"
        )
    found = {}
    for i in sorted(moved):
        side = side_values[i - 1]
        readers = frozenset(map(coarse.stage_of, side.readers))
        found[i] = MovedSide(coarse.stage_of(side.maker), readers, tensors[i - 1])
    return found


def _last_fetch(operations: tuple[Operation, ...], i: int) -> int:
    return max(index for index, op in enumerate(operations) if isinstance(op, Prefetch) and op.value == ("s", i))


def _leaving_sides(operations: tuple[Operation, ...], sides: Mapping[int, MovedSide]) -> dict[int, frozenset[int]]:
    """By the index of each release after which a side value comes back, the stages that may have saved it."""
    return {
        index: sides[op.stage].readers | {sides[op.stage].maker}
        for index, op in enumerate(operations)
        if isinstance(op, Release) and op.kind == "s" and index < sides[op.stage].last_fetch
    }


def _without_leftovers(
    operations: tuple[Operation, ...], sides: Mapping[int, MovedSide] = MappingProxyType({})
) -> tuple[Operation, ...]:
    """The list without what makes or moves values of stages whose backward is over: nobody needs those."""
    done: set[int] = set()
    kept: list[Operation] = []
    for operation in operations:
        stage = operation.stage if isinstance(operation, COMPUTATIONS) else operation.value[1]
        if not isinstance(operation, COMPUTATIONS) and operation.kind == "s":
            stage = sides[operation.stage].maker
        if stage not in done or isinstance(operation, Update) or _is_managed(operation):
            kept.append(operation)
        if isinstance(operation, Backward):
            done.add(stage)
    return tuple(kept)


def _is_managed(operation: Operation) -> bool:
    return not isinstance(operation, COMPUTATIONS) and operation.kind in MANAGED


def _placed(schedule: Schedule, num_stages: int, *, grads_resident: bool) -> tuple[tuple[Operation, ...], Placement]:
    """The list up to the last backward with the copies right after it, and where values are around it."""
    listed = schedule.operations
    end = max(index for index, operation in enumerate(listed) if isinstance(operation, Backward)) + 1
    if not schedule.has_updates:
        raise PlanError(
            "the schedule updates weights inside backward without saying when, which can only be simulated; solve with "
            "strategy='joint'"
        )
    steps_in_backward = is_stepping_in_backward(listed)
    if steps_in_backward and grads_resident:
        raise PlanError(
            "the schedule steps in backward, which does not go with accumulated gradients (grads_resident); solve "
            "without step_in_backward"
        )
    while end < len(listed) and (steps_in_backward or isinstance(listed[end], Offload | Release | Await)):
        end += 1
    resident = {("g", k) for k in range(1, num_stages + 1)} if grads_resident else set()
    start = schedule.start.device | resident
    there = set(start)
    for operation in listed[:end]:
        if isinstance(operation, Backward):
            there.add(("g", operation.stage))
        elif isinstance(operation, Update):
            there.discard(("g", operation.stage))
        elif _is_managed(operation) and isinstance(operation, Release):
            there.discard(operation.value)
        elif _is_managed(operation) and isinstance(operation, Prefetch):
            there.add(operation.value)
    return listed[:end], Placement(frozenset(start), frozenset(there), listed[end:], steps_in_backward)


def is_stepping_in_backward(operations: Sequence[Operation]) -> bool:
    """Whether a list updates weights before its last backward, and so uses their gradients up."""
    last = max(index for index, operation in enumerate(operations) if isinstance(operation, Backward))
    return any(isinstance(operation, Update) for operation in operations[:last])


def as_executed(schedule: Schedule, *, grads_resident: bool = False) -> Schedule:
    """A list that moves weights as a loop of the user's runs it, whose code has its turn between the parts of a step.

    That code may change what is on the device, so what stays there from one step to the next is copied when the next
    one begins, and not before. Whatever is on its way arrives before that code runs. And the gradients that an update
    frees can be read afterwards: where the list does not move them, they are copied while backward runs, or, where
    they are accumulated, right before their update.
    """
    if not schedule.manages or not schedule.has_updates:
        return schedule
    listed, start = _copied_at_start(schedule.operations, schedule.start)
    forward = next(i for i, op in enumerate(listed) if isinstance(op, Backward)) - 1
    while not isinstance(listed[forward], Forward):
        forward -= 1
    backward = max(index for index, operation in enumerate(listed) if isinstance(operation, Backward))
    ends = [forward + 1]
    if not is_stepping_in_backward(listed):
        ends.append(backward + 1)
    listed = _with_arrivals(listed, ends)
    if len(ends) > 1:
        listed = _with_gradients_copied(listed, is_late=grads_resident)
    return replace(schedule, operations=tuple(listed), start=start)


def with_late_fetches(schedule: Schedule, number: int) -> Schedule:
    """A list whose last fetches for the next step, so many of them, are its first operations instead.

    What is on its way when a step ends has to arrive before the user's code runs; what is fetched when the next step
    begins arrives while it runs, and need not be copied to the host before it leaves again.
    """
    last: dict[Value, int] = {}
    for index, operation in enumerate(schedule.operations):
        for value in _touched(operation):
            last.pop(value, None)
            if isinstance(operation, Prefetch) and operation.kind in ("w", "opt"):
                last[value] = index
    late = dict(sorted(last.items(), key=itemgetter(1))[max(0, len(last) - number) :] if number else ())
    fetches = [schedule.operations[index] for index in late.values()]
    rest = [operation for index, operation in enumerate(schedule.operations) if index not in late.values()]
    start = Start(schedule.start.device - late.keys(), schedule.start.host | late.keys())
    return replace(schedule, operations=(*fetches, *rest), start=start)


def num_late_fetches(schedule: Schedule) -> int:
    """How many fetches `with_late_fetches` could move."""
    found = with_late_fetches(schedule, len(schedule.operations))
    return len(schedule.start.device) - len(found.start.device)


def _touched(operation: Operation) -> tuple[Value, ...]:
    """The weights and optimizer state that an operation needs or moves."""
    if isinstance(operation, Update):
        return ("w", operation.stage), ("opt", operation.stage)
    if isinstance(operation, Forward | Backward):
        return (("w", operation.stage),)
    return (operation.value,)


def _copied_at_start(operations: Sequence[Operation], start: Start) -> tuple[list[Operation], Start]:
    """Copy what is on the device at the start, and is freed without another copy, first of all."""
    first: dict[Value, Operation] = {}
    released: set[Value] = set()
    kept: list[Operation] = []
    for operation in reversed(operations):
        if not isinstance(operation, COMPUTATIONS):
            if isinstance(operation, Release):
                released.add(operation.value)
            if isinstance(operation, Offload) and operation.kind in ("w", "opt") and operation.value not in released:
                continue  # it stays
            first.pop(operation.value, None)
            first[operation.value] = operation
        kept.append(operation)
    copied = [value for value in first if value in start.device and isinstance(first[value], Release)]
    copied.reverse()  # what leaves first is copied first
    listed = [*(Offload(cast(Kind, kind), k) for kind, k in copied), *reversed(kept)]
    return listed, Start(start.device, _on_host_at_end(listed, start))


def _on_host_at_end(operations: Sequence[Operation], start: Start) -> frozenset[Value]:
    """Which weights and optimizer state have a current copy on the host when a list has run."""
    host = set(start.host)
    for operation in operations:
        if isinstance(operation, Update):
            host -= {("w", operation.stage), ("opt", operation.stage)}
        elif isinstance(operation, Offload) and operation.kind in ("w", "opt"):
            host.add(operation.value)
    return frozenset(host)


def _with_arrivals(operations: Sequence[Operation], ends: Sequence[int]) -> list[Operation]:
    """Wait for what is on its way at some places, after what leaves there, and at the end of the list."""
    pending, listed, arriving = sorted(ends), list[Operation](), dict[Value, None]()

    def arrive() -> None:
        listed.extend(Await(cast(Kind, kind), k) for kind, k in arriving)
        arriving.clear()

    for index, operation in enumerate(operations):
        if pending and index >= pending[0] and not isinstance(operation, Offload | Release | Await):
            pending.pop(0)
            arrive()
        listed.append(operation)
        if isinstance(operation, Update):
            arriving.pop(("g", operation.stage), None)
        elif _is_managed(operation) and isinstance(operation, Prefetch):
            arriving[operation.value] = None
        elif not isinstance(operation, COMPUTATIONS):
            arriving.pop(operation.value, None)
    arrive()
    return listed


def _with_gradients_copied(operations: Sequence[Operation], *, is_late: bool) -> list[Operation]:
    """Copy the gradients that do not move: those of a stage right after its backward, or right before its update."""
    moved = {operation.stage for operation in operations if isinstance(operation, Offload) and operation.kind == "g"}
    copied = {operation.stage for operation in operations if isinstance(operation, Update)} - moved
    listed: list[Operation] = []
    for operation in operations:
        if is_late and isinstance(operation, Update) and operation.stage in copied:
            listed.append(Offload("g", operation.stage))
        listed.append(operation)
        if not is_late and isinstance(operation, Backward) and operation.stage in copied:
            listed.append(Offload("g", operation.stage))
    return listed


def _places(operations: tuple[Operation, ...], num_stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first, backward = [-1] * (num_stages + 1), [-1] * (num_stages + 1)
    for index, operation in enumerate(operations):
        if isinstance(operation, Forward) and first[operation.stage] < 0:
            first[operation.stage] = index
        elif isinstance(operation, Backward):
            backward[operation.stage] = index
    if min(*first[1:], *backward[1:]) < 0:
        missing = next(k for k in range(1, num_stages + 1) if min(first[k], backward[k]) < 0)
        raise ScheduleError(f"the schedule has no forward or no backward of stage {missing}, but the model has one")
    return tuple(first), tuple(backward)


def _variants(operations: tuple[Operation, ...], num_stages: int) -> tuple[int, ...]:
    variants: list[int | None] = [None] * (num_stages + 1)
    for operation in operations:
        if isinstance(operation, Forward) and operation.save == "all":
            if variants[operation.stage] not in (None, operation.variant):
                raise PlanError(
                    f"the schedule saves stage {operation.stage} as variant {variants[operation.stage]} and later as "
                    f"variant {operation.variant}; a stage must use one variant within a step"
                )
            variants[operation.stage] = operation.variant
    return tuple(variant or 0 for variant in variants)


def _is_last_read(operations: tuple[Operation, ...], index: int, backward: tuple[int, ...]) -> bool:
    """Whether the input of the stage that runs at an index is neither read nor moved from there to its backward."""
    k = operations[index].stage
    for later in operations[index + 1 : backward[k]]:
        if isinstance(later, Forward) and later.stage == k:
            return False
        if not isinstance(later, COMPUTATIONS) and later.value in (("a", k - 1), ("abar", k - 1)):
            return False
    return True


def _mode(
    operations: tuple[Operation, ...],
    index: int,
    backward: tuple[int, ...],
    leaving: Mapping[int, frozenset[int]],
    *,
    is_first: bool,
    is_guarded: bool,
) -> Mode:
    operation = operations[index]
    assert isinstance(operation, Forward)
    if operation.save != "all":
        return Mode.COUNT
    k = operation.stage
    own, inputs = ("abar", k), (("a", k - 1), ("abar", k - 1))
    again = False
    if any(index < place < backward[k] and k in stages for place, stages in leaving.items()):
        return Mode.SORT  # a side value that it may have saved goes
    for later in operations[index + 1 : backward[k]]:
        if isinstance(later, Offload | Release | Prefetch) and later.value == own:
            return Mode.SORT
        if isinstance(later, Release) and later.value in inputs:
            return Mode.SORT
        if isinstance(later, Forward) and later.stage == k:
            if later.save == "drop":
                return Mode.SORT  # a[k-1] goes
            again = again or later.save == "all"
    if is_first and not again:
        return Mode.GUARD if is_guarded else Mode.NATIVE
    return Mode.HOLD
