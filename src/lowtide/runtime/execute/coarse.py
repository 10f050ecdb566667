"""Stages that a schedule always treats alike run as one.

The executor's own work is done once a stage, so it is done for as few stages as the schedule lets it be: a segment that
is always freed and recomputed as a whole is one stage to it, and so is everything that autograd simply keeps. Nothing
else changes: the same computations run in the same order, and the same tensors are kept and freed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.chain import SideValue
from lowtide.errors import PlanError
from lowtide.runtime.model.split import Split, StageSplit
from lowtide.schedule import COMPUTATIONS, Backward, Forward, Operation, Prefetch, Release, Schedule, Value

# What may stand in two forwards one after the other, the first of stage k and the second of stage k+1. Both are made
# again as one where both are let go and a[k] with them, and saved as one where all is saved.
_ALIKE = {("keep", "drop"), ("drop", "drop"), ("all", "all")}


@dataclass(frozen=True, slots=True)
class Coarse:
    """A schedule over as few stages as possible.

    Args:
        split: the stages, some of them joined.
        operations: the schedule's list, in terms of these.
        sizes: how many of the schedule's own stages are in each.
    """

    split: Split
    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]

    @classmethod
    def finest(cls, split: Split, schedule: Schedule) -> Coarse:
        """Nothing joined.

        Raises:
            PlanError: if the schedule names stages that the split does not have.
        """
        return cls(split, _executed(split, schedule), (1,) * split.num_stages)

    def stage_of(self, k: int) -> int:
        """The stage here that stands for stage k of the schedule."""
        return bisect.bisect_left(list(itertools.accumulate(self.sizes)), k) + 1


def coarsened(split: Split, schedule: Schedule, side_values: Sequence[SideValue] = ()) -> Coarse:
    """Join the stages that a schedule always treats alike; one that makes a side value that moves is not joined.

    Raises:
        PlanError: if the schedule names stages that the split does not have.

    Example:
        >>> from lowtide.runtime.model.split import Unit
        >>> split = Split((StageSplit("a", (Unit("a"),)), StageSplit("b", (Unit("b"),))))
        >>> plain = Schedule("plain", (Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1)))
        >>> coarsened(split, plain).operations
        (Forward(stage=1, save='all', variant=0), Backward(stage=1))
    """
    listed = _executed(split, schedule)
    groups: list[list[int]] = []
    moved = {operation.stage for operation in listed if _is_side(operation)}
    makers = {side.maker for i, side in enumerate(side_values, start=1) if i in moved}
    joined = _joined(listed, split.num_stages) - makers - {k - 1 for k in makers}
    for k in range(1, split.num_stages + 1):
        if k - 1 in joined:
            groups[-1].append(k)
        else:
            groups.append([k])
    number = {0: 0, **{k: index for index, group in enumerate(groups, start=1) for k in group}}
    first = {group[0] for group in groups}
    last = {group[-1] for group in groups}
    operations = tuple(
        operation if _is_side(operation) else replace(operation, stage=number[operation.stage])
        for operation in listed
        if not (isinstance(operation, Forward) and operation.stage not in first)
        and not (isinstance(operation, Backward) and operation.stage not in last)
    )
    stages = tuple(StageSplit.joined([split.stages[k - 1] for k in group]) for group in groups)
    return Coarse(replace(split, stages=stages), operations, tuple(map(len, groups)))


def _executed(split: Split, schedule: Schedule) -> tuple[Operation, ...]:
    """The schedule's list without what is done with side values that never come back: the executor frees each as soon
    as no recomputation needs it before it is made anew.
    """
    fetched = {op.stage for op in schedule.operations if isinstance(op, Prefetch) and op.kind == "s"}
    listed = [op for op in schedule.operations if not _is_side(op) or op.stage in fetched]
    largest = max((operation.stage for operation in listed if not _is_side(operation)), default=0)
    if largest > split.num_stages:
        raise PlanError(f"the schedule names stage {largest}, but the model has {split.num_stages} stages")
    return tuple(listed)


def _is_side(operation: Operation) -> bool:
    return not isinstance(operation, COMPUTATIONS) and operation.kind == "s"


def _joined(operations: tuple[Operation, ...], num_stages: int) -> set[int]:
    """The stages k that are always run together with stage k+1."""
    joined = set(range(1, num_stages))
    for before, after in zip((None, *operations), (*operations, None), strict=True):
        if isinstance(before, Forward) and not _together(before, after):
            joined.discard(before.stage)
        if isinstance(after, Forward) and not (isinstance(before, Forward) and _together(before, after)):
            joined.discard(after.stage - 1)
        if isinstance(before, Backward) and after != Backward(before.stage - 1):
            joined.discard(before.stage - 1)
        if isinstance(after, Backward) and before != Backward(after.stage + 1):
            joined.discard(after.stage)
        if after is not None and not isinstance(after, COMPUTATIONS) and not _is_side(after):
            joined -= _apart(after.value)
    return joined - _readers_of_released(operations)


def _readers_of_released(operations: tuple[Operation, ...]) -> set[int]:
    """The stages that are saved while the value that they read leaves the device.

    What such a stage saves has to be sorted; what the next ones save is left to autograd, as long as they are others.
    """
    saved: set[int] = set()
    readers: set[int] = set()
    for operation in operations:
        if isinstance(operation, Forward) and operation.save == "all":
            saved.add(operation.stage)
        elif isinstance(operation, Backward):
            saved.discard(operation.stage)
        elif isinstance(operation, Release) and operation.kind != "s" and operation.stage + 1 in saved:
            readers.add(operation.stage + 1)
    return readers


def _together(one: Forward, other: Operation | None) -> bool:
    return (
        isinstance(other, Forward)
        and other.stage == one.stage + 1
        and (one.save, other.save) in _ALIKE
        and one.variant == other.variant == 0
    )


def _apart(value: Value) -> set[int]:
    """The stages that cannot be joined with the next one if this value is moved separately."""
    kind, k = value
    return {k} if kind == "a" else {k - 1, k}
