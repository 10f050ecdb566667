"""The continuous model of pofo by exhaustive search: every nested persistent schedule, every choice of values to move.

Shares nothing with the strategy: schedules come from `tests.search`, memory from the simulator, and the time from
running the link beside the computations, forwards up to the loss and, backwards in time, from the end to the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.search import nested_schedules

from lowtide import Backward, Chain, Forward, Schedule, simulate
from lowtide.schedule import Operation

Parts = tuple[tuple[Operation, ...], tuple[Operation, ...], tuple[int, ...]]


def schedules(chain: Chain, i: int = 1, *, recompute: bool = True) -> Iterator[Parts]:
    """Each way to run the stages from i on: the forward phase, the backward phase, the stages whose input is kept."""
    n = chain.num_stages
    for variant in range(chain.stage(i).num_variants if recompute else 1):
        first, last = Forward(i, "all", variant), Backward(i)
        if i == n:
            yield (first,), (last,), ()
            continue
        for ahead, behind, kept in schedules(chain, i + 1, recompute=recompute):
            yield (first, *ahead), (*behind, last), (i, *kept)
    for j in range(i, n) if recompute else ():
        light = (Forward(i, "keep"), *(Forward(k, "drop") for k in range(i + 1, j + 1)))
        for ahead, behind, kept in schedules(chain, j + 1):
            for block in nested_schedules(chain, i, j):
                yield (*light, *ahead), (*behind, *block), (i, *kept)


def best_seconds(chain: Chain, budget: int, bandwidth: float, *, recompute: bool = True) -> float:
    """The least time of any schedule and any choice of moved inputs; inf: none fits."""
    best = float("inf")
    for ahead, behind, kept in schedules(chain, recompute=recompute):
        trace = simulate(chain, Schedule("exhaustive", (*ahead, *behind)))
        if trace.compute_seconds >= best:
            continue
        peaks = [step.peak_bytes for step in trace.steps]
        spans = [(step.start_seconds, step.end_seconds) for step in trace.steps]
        seconds = [end - begin for begin, end in spans]
        away = [_absence(chain, (*ahead, *behind), len(ahead), i) for i in kept]
        for moved in itertools.product((False, True), repeat=len(kept)):
            chosen = [absence for absence, flag in zip(away, moved, strict=True) if flag]
            best = min(best, _seconds(peaks, seconds, len(ahead), chosen, budget, bandwidth))
    return best


def _absence(chain: Chain, order: tuple[Operation, ...], loss: int, i: int) -> tuple[int, int, int]:
    """The input of stage i, when moved: its last use before the loss, its first use after it, its bytes."""
    begin = next(t for t in range(loss) if isinstance(order[t], Forward) and order[t].stage == i)
    end = next(t for t in range(loss, len(order)) if order[t].stage == i)
    before = [order[t] for t in range(begin) if isinstance(order[t], Forward) and order[t].stage == i - 1]
    if before and before[-1].save == "all":
        end = min(end, next(t for t in range(loss, len(order)) if order[t].stage == i - 1))
        return begin, end, chain.stage(i - 1).variant(before[-1].variant).saved_bytes
    return begin, end, chain.activation_bytes(i - 1)


def _seconds(
    peaks: list[int],
    seconds: list[float],
    loss: int,
    away: list[tuple[int, int, int]],
    budget: int,
    bandwidth: float,
) -> float:
    """The time of one schedule: both phases are the same walk, the second one backwards in time."""
    used = [peak - sum(num_bytes for begin, end, num_bytes in away if begin < t < end) for t, peak in enumerate(peaks)]
    ahead = _phase(
        [(used[t], seconds[t], sum(b for begin, _, b in away if begin == t), True) for t in range(loss)],
        budget,
        bandwidth,
    )
    behind = _phase(
        [
            (used[t], seconds[t], sum(b for _, end, b in away if end == t), False)
            for t in range(len(peaks) - 1, loss - 1, -1)
        ],
        budget,
        bandwidth,
    )
    return ahead + behind


def _phase(steps: list[tuple[int, float, int, bool]], budget: int, bandwidth: float) -> float:
    """Run computations beside a link that empties at `bandwidth` what has been handed to it.

    Each step has what it uses (without what waits for the link), its seconds, and the bytes that it hands over: when it
    begins (forward phase: the link may take what the forward reads), or when it has ended.
    """
    clock, waiting = 0.0, 0.0
    for used, seconds, handed, at_begin in steps:
        if used > budget:
            return float("inf")
        wait = max(0.0, used + waiting - budget) / bandwidth
        clock += wait + seconds
        waiting = max(0.0, waiting - wait * bandwidth)
        waiting = max(0.0, waiting + (handed if at_begin else 0) - seconds * bandwidth)
        waiting += 0 if at_begin else handed
    return clock + waiting / bandwidth
