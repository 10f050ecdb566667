"""Hong's two problems on plain sizes: which checkpoints take the least memory.

The values are d_0 (the input) to d_n (the output); 0 and n are always checkpoints. Between two neighbouring checkpoints
h < i lies a segment, the values h+1..i-1, that is dropped and recomputed from h when backward comes to i.

| Hong | here |
| --- | --- |
| static, equation 6 | the sum of all checkpoints, and of the largest segment |
| dynamic, equation 12 | the most of any segment: the checkpoints up to its end, itself, its largest gradient |
| M(i, s) of equation 8, M(i) of equation 13 | `least[i]` |

The loops are plain Python that numba compiles as it is; short inputs are not worth the time that importing it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, Literal

from lowtide.strategies.numerics.compiling import announce_compilation

Algorithm = Literal["linear", "quadratic"]

# Interpreted, so many steps of these loops take about as long as importing numba and its compiled code from disk.
_LARGEST_NUM_INTERPRETED_STEPS = 1_000_000

# Compiled loops count in 64-bit integers; sums that could reach this are left to the interpreter's whole numbers.
_LARGEST_COMPILED_BYTES = 2**62


def select_static(kept: list[int], saved: list[int]) -> tuple[int, list[int]]:
    """The least cost of equation 6 and its checkpoints: algorithm 3, in O(n) for each segment size that is tried.

    Algorithm 3 tries all O(n²) sizes that a segment can have. Here the limit only falls: the set found for a limit s
    has a largest segment s' <= s and checkpoints of c bytes, so that nothing between s' and s is better; and below s
    the checkpoints take c or more, so that a limit must lie under (best cost) - c to be worth trying. There are O(n²)
    limits at the most, and far fewer as a rule.

    Args:
        kept: what each value k = 0..n takes as a checkpoint.
        saved: what it takes as part of a segment, at least kept[k]; in the paper both are d_k. A segment then ends with
            saved[i], of which kept[i] has been counted as a checkpoint. saved[0] is not read.
    """
    last = len(kept) - 1
    num_steps = 30 * last  # some tens of passes
    fill, follow, arrays = prepared(_fill_static, kept, saved, num_scratch=4, num_steps=num_steps)
    *_, previous, queue = arrays
    chosen: list[int] = []
    limit = sum(saved)  # no segment is larger
    best = limit + sum(kept) + 1
    while limit >= 0:
        checkpoint_bytes, widest = fill(limit, *arrays)
        if widest < 0:
            break
        if checkpoint_bytes + widest < best:
            best = checkpoint_bytes + widest
            chosen = listed(queue, follow(previous, last, 0, queue))[::-1]
        limit = min(widest, best - checkpoint_bytes) - 1
    return int(best), chosen


def select_dynamic(sizes: list[int], algorithm: Algorithm) -> tuple[int, list[int]]:
    """The least cost of equation 12 and its checkpoints: algorithm 6, linear, or algorithm 5, quadratic."""
    last = len(sizes) - 1
    is_linear = algorithm == "linear"
    kernel: Callable[..., Any] = _fill_linear if is_linear else _fill_quadratic
    num_steps = 10 * last if is_linear else last**2 // 2
    fill, follow, arrays = prepared(kernel, sizes, num_scratch=5 if is_linear else 3, num_steps=num_steps)
    fill(*arrays)
    _, total, least, following, *_ = arrays
    return int(least[0]), listed(total, follow(following, 0, last, total))


def _fill_static(
    limit: int,
    kept: Sequence[int],
    saved: Sequence[int],
    total: MutableSequence[int],
    least: MutableSequence[int],
    previous: MutableSequence[int],
    queue: MutableSequence[int],
) -> tuple[int, int]:
    """The fewest bytes of checkpoints such that no segment exceeds `limit`, and the largest segment then.

    The latter is -1 where there is no way. `least[i]` is the former for the values 0..i with i a checkpoint,
    `previous[i]` the checkpoint before i. `queue` holds the checkpoints h that may still come before i, `least` rising:
    the first is the best. As i grows, a segment that starts at h only grows, so one that is too large stays so.
    """
    total[0], least[0], previous[0], queue[0] = 0, kept[0], 0, 0
    first, last = 0, 0
    for i in range(1, len(kept)):
        total[i] = total[i - 1] + saved[i]
        while first <= last and total[i] - kept[i] - total[queue[first]] > limit:
            first += 1
        if first > last:  # not even i by itself stays within the limit
            return 0, -1
        previous[i] = queue[first]
        least[i] = least[queue[first]] + kept[i]
        while first <= last and least[queue[last]] >= least[i]:
            last -= 1
        last += 1
        queue[last] = i
    widest, i = 0, len(kept) - 1
    checkpoint_bytes = least[i]
    while i > 0:
        widest = max(widest, total[i] - kept[i] - total[previous[i]])
        i = previous[i]
    return checkpoint_bytes, widest


def _fill_quadratic(
    sizes: Sequence[int],
    total: MutableSequence[int],
    least: MutableSequence[int],
    following: MutableSequence[int],
) -> None:
    """Algorithm 5, down to M(0): `least[i]` for the values i..n with i a checkpoint, `following[i]` the next one."""
    n = len(sizes) - 1
    total[0] = 0
    for j in range(1, n + 1):
        total[j] = total[j - 1] + sizes[j]
    least[n], following[n] = sizes[n], n
    for i in range(n - 1, -1, -1):
        largest, best, chosen = sizes[i], -1, n
        for j in range(i + 1, n + 1):
            value = max(least[j], total[j] - total[i] + largest)
            if best < 0 or value < best:
                best, chosen = value, j
            largest = max(largest, sizes[j])
        least[i], following[i] = sizes[i] + best, chosen


def _fill_linear(
    sizes: Sequence[int],
    total: MutableSequence[int],
    least: MutableSequence[int],
    following: MutableSequence[int],
    queue: MutableSequence[int],
    records: MutableSequence[int],
) -> None:
    """Algorithm 6, down to M(0), with ties and zeros: the same `least` as algorithm 5, in linear time.

    total[j] = sizes[1] + … + sizes[j]. U(i, j) = total[j] - total[i] + (largest size of i..j-1) does not fall as j
    grows, nor as i falls.

    `queue` holds the candidates for the next checkpoint, the farthest first; along it j falls and least[j] rises. A j
    that is farther than another and has no smaller `least` is dominated for good. The best is where U and `least`
    cross: `queue[far]`, the nearest candidate with U >= least, or `queue[far + 1]`, the first with U < least. What lies
    farther than `queue[far]` has a larger U, and always will: it is dropped.

    `records` is the stack of records i = r_top < … < r_0 of the sizes seen from i: each is larger than all before it.
    The largest size of i..j-1 is that of the record farthest from i and below j. Two positions in it are remembered,
    for `queue[far]` and `queue[far + 1]`. They move towards the top as their candidates come nearer, and fall only
    where the stack itself is cut: neither moves more than 2n times in all.
    """
    n = len(sizes) - 1
    total[0] = 0
    for j in range(1, n + 1):
        total[j] = total[j - 1] + sizes[j]
    least[n], following[n], queue[0] = sizes[n], n, n
    far, near = 0, 0  # the ends of the queue
    top, at_far, at_next = -1, 0, 0  # positions in the stack of records
    for i in range(n - 1, -1, -1):
        while top >= 0 and sizes[records[top]] <= sizes[i]:
            top -= 1
        top += 1
        records[top] = i
        at_far, at_next = min(at_far, top), min(at_next, top)
        while far < near:
            candidate = queue[far + 1]
            while records[at_next] >= candidate:
                at_next += 1
            if total[candidate] - total[i] + sizes[records[at_next]] < least[candidate]:
                break
            far, at_far = far + 1, at_next
        chosen = queue[far]
        while records[at_far] >= chosen:
            at_far += 1
        best = max(least[chosen], total[chosen] - total[i] + sizes[records[at_far]])
        if far < near and least[queue[far + 1]] < best:
            chosen = queue[far + 1]
            best = least[chosen]
        least[i], following[i] = sizes[i] + best, chosen
        while near >= far and least[queue[near]] >= least[i]:
            near -= 1
        near += 1
        queue[near] = i


def _follow(links: Sequence[int], start: int, end: int, visited: MutableSequence[int]) -> int:
    """Write the indices from `start` to `end` along `links` to `visited`, and return how many they are."""
    visited[0], count = start, 1
    while visited[count - 1] != end:
        visited[count] = links[visited[count - 1]]
        count += 1
    return count


def prepared(
    fill: Callable[..., Any], *lists: list[int], num_scratch: int, num_steps: int
) -> tuple[Callable[..., Any], Callable[..., Any], list[Any]]:
    """A loop, `_follow`, and the lists with scratch space: as they are, or compiled where there is much to do.

    Args:
        fill: a loop that numba can compile.
        lists: what it reads, of equal length; sums of all of them stay exact.
        num_scratch: how many more lists of that length it writes.
        num_steps: about how often its innermost line runs.
    """
    arrays = _arrays(lists) if num_steps > _LARGEST_NUM_INTERPRETED_STEPS else None
    if arrays is None:
        return fill, _follow, [*lists, *([0] * len(lists[0]) for _ in range(num_scratch))]
    import numpy

    scratch = numpy.empty((num_scratch, len(lists[0])), numpy.int64)
    return _compiled(fill), _compiled(_follow), [*arrays, *scratch]


def _arrays(lists: Sequence[list[int]]) -> list[Any] | None:
    """The lists as arrays of 64-bit integers, None where sums of them might not fit."""
    import numpy

    try:
        arrays = {id(values): numpy.array(values, dtype=numpy.int64) for values in lists}  # one list may come twice
    except OverflowError:
        return None
    listed = [arrays[id(values)] for values in lists]
    return listed if sum(float(array.sum(dtype=float)) for array in listed) < _LARGEST_COMPILED_BYTES else None


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from lowtide.strategies.numerics.kernels import kernel

    announce_compilation()
    return kernel(function)


def listed(visited: Any, count: int) -> list[int]:
    """The first `count` entries as a list of ints."""
    first: list[int] = visited[:count] if isinstance(visited, list) else visited[:count].tolist()
    return first
