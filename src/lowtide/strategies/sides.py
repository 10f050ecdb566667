"""What side values take where each stays from the first forward of its maker to the last operation that needs it.

The last is the backward of its first reader. A schedule frees it right after that, which costs nothing (`freed`). A
forward of the maker that runs later makes it again: it is freed right after, too, and counts during that forward alone.

The schedules of stages s..t (see `lowtide.strategies.nested`) begin with a[s-1] and delta[t] on the device. For t < n
every stage up to t has run forward before, so all side values are there that a stage up to t makes and another one up
to t reads. For t = n they are made while s..n runs forward for the first time. The gradient of a side value is there
where its maker is among 1..t and its last reader is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward, Operation, Release

Bytes = NDArray[np.int64]


def standing_bytes(chain: Chain) -> Bytes:
    """Entry t: what is there beside s..t, with all that s..t itself makes where t = n; gradients included."""
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

    Below zero for t = n, where later stages have not made theirs.
    """
    n = chain.num_stages
    if not chain.side_values:
        return np.zeros((0, 0), np.int64)
    more = np.zeros((n + 1, n + 1), np.int64)
    for side in chain.side_values:
        more[side.maker, side.maker : side.readers[0]] += side.num_bytes
        more[: side.maker, n] -= side.num_bytes
    return more


def last_uses(chain: Chain, operations: Sequence[Operation]) -> dict[int, int]:
    """By side value, the index of the last operation that needs it; one of no bytes is left out."""
    readers: dict[int, list[int]] = {}
    for i, side in enumerate(chain.side_values, start=1):
        for k in side.readers if side.num_bytes else ():
            readers.setdefault(k, []).append(i)
    found: dict[int, int] = {}
    if readers:
        for index, operation in enumerate(operations):
            if isinstance(operation, Forward | Backward):
                for i in readers.get(operation.stage, ()):
                    found[i] = index
    return found


def freed(chain: Chain, operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """The same operations with each side value freed as soon as nothing needs it any more."""
    listed = tuple(operations)
    last = last_uses(chain, listed)
    if not last:
        return listed
    makers: dict[int, list[int]] = {}
    for i in last:
        makers.setdefault(chain.side_value(i).maker, []).append(i)
    with_releases: list[Operation] = []
    for index, operation in enumerate(listed):
        with_releases.append(operation)
        ended = [i for i, position in last.items() if position == index]
        if isinstance(operation, Forward):
            ended += [i for i in makers.get(operation.stage, ()) if last[i] < index]
        with_releases.extend(Release("s", i) for i in ended)
    return tuple(with_releases)
