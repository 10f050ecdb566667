"""`dynamic-selection`: the checkpoints whose schedule has the lowest peak."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lowtide.chain import Chain
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.checkpoints.schedule import checkpoint_schedule, planned
from lowtide.strategies.checkpoints.sets import listed, prepared


@dataclass(frozen=True, slots=True)
class DynamicSelection:
    """One set of checkpoints for every budget: the one whose schedule has the lowest peak.

    This is Hong's recursion, equation 13, with what a segment takes as the operations of a schedule have it instead of
    equation 11: both gradients of a backward, extras, and the weight gradients of later stages. The aim is memory, not
    time: where the budget allows more, the schedule stays the same. (On plain sizes, without all that, `lowtide.select`
    solves the paper's own problem in linear time.)

    Hong, Tsai, Wang, Liu, Wu: GPU memory usage optimization for backward propagation in deep network training, §4,
    algorithm 5.

    Example:
        >>> from lowtide import Chain, Stage, solve
        >>> chain = Chain("four", [Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2, 3, 4)])
        >>> solve(chain, memory_budget=200, strategy="dynamic-selection").peak_bytes
        90
    """

    def plan(self, problem: Problem) -> Answer:
        """The only schedule of this strategy, if it fits."""
        _, checkpoints = least_peak(problem.chain)
        return planned("dynamic-selection", problem, checkpoints)

    def minimum_bytes(self, problem: Problem) -> int:
        """Its peak; the recursion knows no side values, the simulator does."""
        peak, checkpoints = least_peak(problem.chain)
        if not problem.chain.has_other_values:
            return peak
        return problem.evaluate(checkpoint_schedule("dynamic-selection", problem.chain, checkpoints)).peak_bytes


def least_peak(chain: Chain) -> tuple[int, list[int]]:
    """The lowest peak of any set of checkpoints, and that set."""
    stages, last = chain.stages, chain.num_stages
    weight_grads = [0 if chain.grads_resident else stage.weight_grad_bytes for stage in stages]
    backward = [stage.backward_extra_bytes - stage.freed_bytes for stage in stages]
    later = [*accumulate(reversed(weight_grads), initial=0)][::-1]  # later[k]: of the stages after k
    fill, follow, arrays = prepared(
        _fill,
        [chain.activation_bytes(k) for k in range(last + 1)],
        [0, *(stage.saved_bytes for stage in stages)],
        [chain.gradient_bytes(k) for k in range(last + 1)],
        [0, *(stage.forward_extra_bytes for stage in stages)],
        [0, *(stage.saving_extra_bytes for stage in stages)],
        [0, *(extra + grad for extra, grad in zip(backward, weight_grads, strict=True))],
        later,
        num_scratch=3,
        num_steps=last**2 // 2,
    )
    fill(*arrays)
    *_, least, following, visited = arrays
    return chain.fixed_bytes + int(least[0]), listed(visited, follow(following, 0, last, visited))


def _fill(
    kept: Sequence[int],
    saved: Sequence[int],
    gradient: Sequence[int],
    forward_extra: Sequence[int],
    saving_extra: Sequence[int],
    backward_extra: Sequence[int],
    later: Sequence[int],
    least: MutableSequence[int],
    following: MutableSequence[int],
    _visited: MutableSequence[int],
) -> None:
    """Equation 13: `least[h]` is the least peak of all that runs after checkpoint h, with h, without what is before it.

    For the segment of stages h+1..i, `passed` is the peak of its first forward, `again` that of the forward which saves
    everything, `back` that of its backward; each without the checkpoints up to h.
    """
    n = len(kept) - 1
    least[n], following[n] = 0, n
    for h in range(n - 1, -1, -1):
        best, chosen = -1, n
        stored = passed = again = back = 0
        for i in range(h + 1, n + 1):
            stored += saved[i]
            passed = max(passed, (kept[i - 1] if i - 1 > h else 0) + kept[i] + forward_extra[i])
            again = max(again, stored + saving_extra[i])
            back = max(back, stored + gradient[i] + gradient[i - 1] + backward_extra[i] + later[i])
            need = max(back, least[i])
            if i < n:
                need = max(need, passed + gradient[n])
            if i == n or i > h + 1 or saved[i] > kept[i]:  # else it is saved the first time (checkpoint_schedule)
                need = max(need, again + gradient[i] + later[i])
            if best < 0 or need < best:
                best, chosen = need, i
            if back >= best:  # it does not fall as the segment grows
                break
        least[h], following[h] = kept[h] + best, chosen
