"""Lower bounds for pofo: the least memory that the rest of a chain needs, and the least time that it takes.

Both hold whatever is recomputed and moved, so a state that they rule out can be dropped and the optimum stays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.strategies.nested.costs import Costs
from lowtide.strategies.nested.least import Least, least_memory
from lowtide.strategies.numerics.arrays import ChainArrays, Floats, Integers
from lowtide.strategies.numerics.kernels import kernel, kernel_part
from lowtide.strategies.sides import Idle

_NEVER = 2**62  # above the sum of any sizes a chain can have


def least_blocks(chain: ChainArrays) -> Least:
    """The least memory of the backward phase of every i..j, from the same figures as all that is searched and read off.

    They count side values from above, `costs_of` counts them exactly; and every forward takes its full time here.
    """
    n = chain.output.size - 1
    is_way = np.arange(chain.saved.shape[1]) < chain.num_variants[:, None]
    is_way[0] = False
    both = chain.forward_seconds + chain.backward_seconds
    fastest = both.min(axis=1)
    slower = (both - fastest[:, None])[is_way]
    forward_until = chain.light_seconds.cumsum()
    none = np.zeros((0, 0), np.int64)
    no_idle = Idle(np.zeros(n + 2, np.int64), *3 * [np.zeros(0, np.int64)])
    return least_memory(
        Costs(
            saves_ahead=True,
            activation=chain.output,
            beside=chain.standing,
            sides=none,
            idle=no_idle,
            idle_first=no_idle,
            forward_extra=chain.light_peak - chain.output,
            outliving=none,
            outliving_saving=np.zeros(0, np.int64),
            forward_until=forward_until,
            split_until=np.concatenate(([0.0], forward_until[:-1])),
            first_way=np.concatenate(([0], is_way.sum(axis=1).cumsum())),
            way_saved=chain.saved[is_way],
            way_forward=chain.heavy_peak[is_way],
            way_backward=chain.backward_peak[is_way],
            way_slower=slower,
            way_slower_last=slower,
            fastest_seconds=float(fastest[1 : n + 1].sum()),
        )
    )


@kernel
def least_forward(chain: ChainArrays, least_block: Integers, recompute: bool) -> Integers:
    """For (i, x), the least memory with which the stages from i on, their input included, can be done.

    Everything that is kept for backward is moved, which is always possible and never takes memory.

    Args:
        chain: the network.
        least_block: the least memory of the backward phase of i..j (`least_blocks`).
        recompute: False: every forward runs once.
    """
    n = chain.output.size - 1
    num_kinds = chain.saved.shape[1] + 1
    least = np.full((n + 2, num_kinds), np.int64(_NEVER))
    least[n + 1] = 0
    for i in range(n, 0, -1):
        for kind in range(num_kinds):
            given = chain.output[i - 1] if kind == 0 else chain.saved[i - 1, kind - 1]
            for v in range(chain.num_variants[i]):
                own = given + max(chain.heavy_peak[i, v] + chain.standing_first[i], chain.backward_peak[i, v])
                least[i, kind] = min(least[i, kind], max(own, least[i + 1, v + 1]))
            if not recompute:
                continue
            use = given + chain.light_peak[i] + chain.standing_first[i]
            for j in range(i, n):
                if j > i:
                    use = max(use, chain.output[j - 1] + chain.light_peak[j] + chain.standing_first[j])
                needs = max(use, given + least_block[i, j], least[j + 1, 0])
                least[i, kind] = min(least[i, kind], needs)
    return least


class Bounds(NamedTuple):
    """What the stages from i on take at least; see `least_rest`. Bytes are in seconds of the link."""

    total: Floats
    """Their computations, each once and in its fastest way."""
    fast_forward: Floats
    """Their forwards, each in the way with the fastest forward; likewise backward."""
    fast_backward: Floats
    over_forward: Floats
    """What the loss and abar of the stages i..n-1, each in its fastest way, have too much for the link, if it sends all
    the time that their forwards take in the slowest way."""
    over_backward: Floats
    """The same after the loss, but for `extra`: one that is recomputed takes no longer than its own and its extra."""
    extra: Floats
    """`extra[i, m]`: the seconds with which `spared[i, m]` of what is saved is not saved, the best bargains first."""
    spared: Floats
    num_steps: Integers


def bounds_of(chain: ChainArrays, bandwidth: float) -> Bounds:
    """The bounds of all stages."""
    n = chain.output.size - 1
    both = chain.forward_seconds + chain.backward_seconds
    own_saved = chain.saved[np.arange(n + 1), both.argmin(axis=1)]
    own_saved[n] = np.maximum(chain.heavy_peak[n] + chain.standing_first[n], chain.backward_peak[n]).min()
    bargains = sorted(
        (-spared / max(extra, 1e-12), i, extra, spared) for i in range(1, n) for extra, spared in _bargains(chain, i)
    )
    extra, spared = (np.zeros((n + 2, len(bargains) + 1)) for _ in range(2))
    num_steps = np.zeros(n + 2, dtype=np.int64)
    for i in range(1, n):
        own = np.array([step[2:] for step in bargains if step[1] >= i]).reshape(-1, 2).cumsum(axis=0)
        num_steps[i] = len(own)
        extra[i, 1 : len(own) + 1], spared[i, 1 : len(own) + 1] = own[:, 0], own[:, 1] / bandwidth
    slow_forward = np.maximum(chain.light_seconds, chain.forward_seconds.max(axis=1))
    slow_backward = np.maximum(chain.backward_seconds.max(axis=1), both.min(axis=1) - chain.light_seconds)
    return Bounds(
        total=_from_each_on(both.min(axis=1)),
        fast_forward=_from_each_on(np.minimum(chain.light_seconds, chain.forward_seconds.min(axis=1))),
        fast_backward=_from_each_on(chain.backward_seconds.min(axis=1)),
        over_forward=_from_each_on(own_saved / bandwidth - slow_forward),
        over_backward=_from_each_on(own_saved / bandwidth - slow_backward),
        extra=extra,
        spared=spared,
        num_steps=num_steps,
    )


def _from_each_on(values: Floats) -> Floats:
    """Entry i: the sum of the values i..n; entry n + 1: 0."""
    return np.append(values[::-1].cumsum()[::-1], 0)


def _bargains(chain: ChainArrays, i: int) -> list[tuple[float, float]]:
    """How a stage can save less: steps of (extra seconds, bytes spared), the best bargain first.

    The ways are its variants, and to save nothing and run its forward once more.
    """
    both = chain.forward_seconds[i] + chain.backward_seconds[i]
    ways = [(float(both[v] - both.min()), float(chain.saved[i, v])) for v in range(chain.num_variants[i])]
    ways.append((float(chain.light_seconds[i]), 0.0))
    seconds, num_bytes = 0.0, float(chain.saved[i, both.argmin()])
    steps = []
    while num_bytes > 0:
        price, to_bytes, to_seconds = min(
            ((way[0] - seconds) / (num_bytes - way[1]), way[1], way[0]) for way in ways if way[1] < num_bytes
        )
        steps.append((max(0.0, price * (num_bytes - to_bytes)), num_bytes - to_bytes))
        seconds, num_bytes = max(seconds, to_seconds), to_bytes
    return steps


class Rest(NamedTuple):
    """The bounds of one stage."""

    total: float
    fast_forward: float
    fast_backward: float
    over_forward: float
    over_backward: float
    extra: Floats
    spared: Floats
    num_steps: int


@kernel
def rest_of(bounds: Bounds, i: int) -> Rest:
    """The bounds of stage i."""
    return Rest(
        bounds.total[i],
        bounds.fast_forward[i],
        bounds.fast_backward[i],
        bounds.over_forward[i],
        bounds.over_backward[i],
        bounds.extra[i],
        bounds.spared[i],
        bounds.num_steps[i],
    )


@kernel
def least_rest(rest: Rest, room: float, leaving: float, arriving: float) -> float:
    """What is left to do from a stage on takes at least so many seconds, both phases together.

    By the loss, whatever abar of the stages i..n-1 is saved has to lie in the room that the loss leaves, or to have
    left; afterwards it has to come back. What is too much for the link, before the loss or after it, costs either
    waiting or the extra seconds of saving less. The bound is the least sum of the two where stages can be cut at will.

    Args:
        rest: the bounds of the stage.
        room: M less A and the input of i, in seconds of the link; likewise
        leaving: Δ_F, and
        arriving: Δ_B.
    """
    waiting = max(leaving, rest.fast_forward) + max(arriving, rest.fast_backward)
    over_f = rest.over_forward + leaving - room
    over_b = rest.over_backward + arriving - room
    if over_f <= 0 and over_b <= 0:
        return max(rest.total, waiting)
    extra, spared = rest.extra, rest.spared
    low, high = 0, rest.num_steps
    while low < high:  # the first step from which on saving less no longer pays: the steps are ever worse bargains
        middle = (low + high) // 2
        less, seconds = spared[middle + 1] - spared[middle], extra[middle + 1] - extra[middle]
        gain = 0.0
        if over_f > spared[middle]:
            gain += less
        if over_b > spared[middle] + extra[middle]:
            gain += less + seconds
        if seconds >= gain:
            high = middle
        else:
            low = middle + 1
    best = _cost_at(extra[low], spared[low], over_f, over_b)
    if low > 0:  # within the last step, where one of the two waits becomes nothing
        less, seconds = spared[low] - spared[low - 1], extra[low] - extra[low - 1]
        if spared[low - 1] < over_f < spared[low]:
            share = (over_f - spared[low - 1]) / less
            best = min(best, _cost_at(extra[low - 1] + share * seconds, over_f, over_f, over_b))
        if spared[low - 1] + extra[low - 1] < over_b < spared[low] + extra[low]:
            share = (over_b - spared[low - 1] - extra[low - 1]) / (less + seconds)
            best = min(best, _cost_at(extra[low - 1] + share * seconds, spared[low - 1] + share * less, over_f, over_b))
    return max(rest.total + best, waiting)


@kernel_part
def _cost_at(extra: float, spared: float, over_f: float, over_b: float) -> float:
    return extra + max(0.0, over_f - spared) + max(0.0, over_b - spared - extra)
