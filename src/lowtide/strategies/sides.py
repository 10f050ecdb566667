"""What side values take where each is on the device only while something will read it before it is made again.

A schedule frees a side value right after an operation if the next one that has to do with it is another forward of its
maker, or if there is none (`freed`); that costs nothing. So a side value is kept, or recomputed with its maker, as the
schedule treats the stages around it. One that `stays` is kept from the first forward of its maker to the last operation
that needs it, the backward of its first reader.

The schedules of stages s..t (see `lowtide.strategies.nested`) begin with a[s-1] and delta[t] on the device, and run
each of these stages forward before its backward. So what s..t itself makes is not there at the beginning. Of what
earlier stages make, all is there that a stage up to t reads, except where a split of s'..t' at p <= s puts off the
stages s'..p-1: what one of these makes, and another one of these is the last before t to read, is *idle* until they run
again. The gradient of a side value is there where its maker is among 1..t and its last reader is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward, Operation, Release

Bytes = NDArray[np.int64]


def standing_bytes(chain: Chain) -> Bytes:
    """Entry t: what is there beside s..t, with all that s..t itself makes and reads; gradients included."""
    standing = np.zeros(chain.num_stages + 1, np.int64)
    for side in chain.side_values:
        standing[side.readers[0] :] += side.num_bytes  # the maker is before its readers
        standing[side.maker : side.readers[-1]] += side.grad_bytes
    return standing


def made_bytes(chain: Chain) -> Bytes:
    """Entry k: what forward k makes beside its output."""
    made = np.zeros(chain.num_stages + 1, np.int64)
    for side in chain.side_values:
        made[side.maker] += side.num_bytes
    return made


def made_gradient_bytes(chain: Chain) -> Bytes:
    """Entry k: the gradients of side values that backward k makes."""
    made = np.zeros(chain.num_stages + 1, np.int64)
    for side in chain.side_values:
        made[side.readers[-1]] += side.grad_bytes
    return made


def forward_bytes(chain: Chain) -> Bytes:
    """Entry (k, t): what is there during forward k of s..t, less `standing_bytes[t]`; without side values no entries.

    Below zero where later stages have not made theirs; what is idle is not counted off.
    """
    n = chain.num_stages
    if not chain.side_values:
        return np.zeros((0, 0), np.int64)
    more = np.zeros((n + 1, n + 1), np.int64)
    for side in chain.side_values:
        more[side.maker, side.maker : side.readers[0]] += side.num_bytes
        more[: side.maker, n if side.stays else side.readers[0] :] -= side.num_bytes
    return more


class Idle(NamedTuple):
    """When side values are idle: an entry for each reader of each, those idle after forward k from `first[k]` on.

    A side value is idle where its maker and a reader are put off and its next reader, if any, is over.
    """

    first: NDArray[np.int64]
    maker: NDArray[np.int64]
    next_reader: NDArray[np.int64]
    num_bytes: Bytes


def idle_times(chain: Chain, *, at_first: bool = False) -> Idle:
    """The entries of all side values; `at_first`: in first forwards, where none is idle that is held."""
    n = chain.num_stages
    found = sorted(
        (max(reader, side.held_until) if at_first else reader, side.maker, later, side.num_bytes)
        for side in chain.side_values
        for reader, later in zip(side.readers, (*side.readers[1:], n + 1), strict=True)
        if side.num_bytes and not side.stays
    )
    readers, makers, later_readers, num_bytes = np.array(found, np.int64).reshape(-1, 4).T.copy()
    return Idle(np.searchsorted(readers, np.arange(n + 2)), makers, later_readers, num_bytes)


def ends(chain: Chain, operations: Sequence[Operation]) -> dict[int, list[int]]:
    """By the index of an operation, the side values that nothing needs after it until they are made again, if ever."""
    by_stage: dict[int, list[int]] = {}
    for i, side in enumerate(chain.side_values, start=1):
        for k in (side.maker, *side.readers) if side.num_bytes else ():
            by_stage.setdefault(k, []).append(i)
    found: dict[int, list[int]] = {}
    is_read_next: set[int] = set()
    for index in range(len(operations) - 1, -1, -1) if by_stage else ():
        operation = operations[index]
        if not isinstance(operation, Forward | Backward):
            continue
        for i in by_stage.get(operation.stage, ()):
            makes = operation.stage == chain.side_value(i).maker
            if makes and isinstance(operation, Backward):
                continue
            if i not in is_read_next:
                found.setdefault(index, []).append(i)
            if not makes:
                is_read_next.add(i)
            elif not chain.side_value(i).stays:
                is_read_next.discard(i)
    return found


def freed(chain: Chain, operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """The same operations with each side value freed as soon as nothing needs it before it is made again."""
    listed = tuple(operations)
    ended = ends(chain, listed)
    with_releases: list[Operation] = []
    for index, operation in enumerate(listed):
        with_releases.append(operation)
        with_releases.extend(Release("s", i) for i in ended.get(index, ()))
    return tuple(with_releases)
