"""Nested persistent schedules: the class that `rotor` and `revolve` search, as numbers and as operations.

A schedule of the stages s..t begins with a[s-1] and delta[t] on the device and ends with delta[s-1]. It is one of

- `all`: forward s with all it saves (in one of the stage's ways), a schedule of s+1..t, backward s;
- `split` at p: forward s keeping its input, forward s+1..p-1 without saving, a schedule of p..t, one of s..p-1.

What stands beside the stages s..t while they are processed is delta[t] and the weight gradients of all stages after t,
`Costs.beside`. The bytes available to s..t are the budget less what is fixed and less what the schedules around it
store, a[s-1] included; `Costs.beside` counts against them.

What s..t ends with, forward t and at once backward t, is after the backward of t+1, so that nobody wants a[t] any more:
for t < n that forward takes `rerun_seconds`.

| rotor | here |
| --- | --- |
| C_BP(s, t, m) | `least_seconds + slower(s, t, m)`: tables hold the time above the fastest schedule of s..t |
| C_all, C_ck | the two cases above |
| m_all, m_∅ | `Costs.way_forward`, `Costs.way_backward`; `Costs.activation` and `Costs.forward_extra` |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward

Bytes = NDArray[np.int64]
Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]


class Costs(NamedTuple):
    """A chain of n stages as arrays that compiled code reads; entry k belongs to stage k, entry 0 to the input.

    A way is one variant of one stage; the ways of stage k are `first_way[k]` to `first_way[k + 1] - 1`.
    """

    saves_ahead: bool
    """Whether the schedule of s+1..t inside `all` may be more than nothing: False in automatic differentiation."""
    activation: Bytes
    """a[k]"""
    beside: Bytes
    """delta[t] and the weight gradients of the stages after t."""
    forward_extra: Bytes
    forward_until: Seconds
    """The seconds of forward 1..k, as variant 0."""
    split_until: Seconds
    """`split_until[p] - forward_until[s-1]` is what a split of s..t at p costs above the fastest schedule.

    It never falls with p: what is not run at the end of s..p-1 is part of its forward."""
    first_way: Indices
    way_saved: Bytes
    """What abar takes."""
    way_forward: Bytes
    """The peak of the forward, `beside` not counted."""
    way_backward: Bytes
    """The peak of the backward, everything counted."""
    way_slower: Seconds
    """Forward and backward this way, above the stage's fastest way."""
    way_slower_last: Seconds
    """The same where the stage is the last of s..t."""
    fastest_seconds: float
    """The time of the fastest schedule of 1..n."""

    @property
    def num_stages(self) -> int:
        """n, the number of stages."""
        return len(self.activation) - 1


def costs_of(chain: Chain, *, saves_ahead: bool = True, variants: bool = True, reruns: bool = True) -> Costs:
    """The numbers of a chain that nested schedules depend on.

    Args:
        chain: the network.
        saves_ahead: allow a forward `all` well before its backward (rotor); False: only right before it (revolve).
        variants: try every variant of a stage for `all`; False: variant 0 alone.
        reruns: count forwards that may end early with `rerun_seconds`; False: every forward in full.
    """
    n = chain.num_stages
    made = [0 if chain.grads_resident else stage.weight_grad_bytes for stage in chain.stages]
    made_after = [sum(made), *(sum(made) - np.cumsum(made, dtype=np.int64))]
    beside = [chain.gradient_bytes(k) + int(made_after[k]) for k in range(n + 1)]
    forward_until = np.concatenate(([0.0], np.cumsum([stage.forward_seconds for stage in chain.stages])))
    delay = 1 if saves_ahead else 2  # without saving ahead, each forward but the last runs twice anyway
    seconds = 0.0 if saves_ahead else float(forward_until[n - 1])
    ways: list[tuple[int, int, int, float, float]] = []
    first_way = [0, 0]
    gains = [0.0]  # of the fastest way of stage k, what ending early at the end of s..k spares
    for k, stage in enumerate(chain.stages, start=1):
        own = [stage.variant(v) for v in range(stage.num_variants if variants else 1)]
        fastest = min(way.forward_seconds + way.backward_seconds for way in own)
        may_end_early = reruns and k < n
        last_seconds = [
            (way.rerun_seconds if may_end_early else way.forward_seconds) + way.backward_seconds for way in own
        ]
        fastest_last = min(last_seconds)
        gains.append(fastest - fastest_last)
        seconds += fastest if saves_ahead else fastest_last
        for way, as_last in zip(own, last_seconds, strict=True):
            during_backward = beside[k] + chain.gradient_bytes(k - 1) + made[k - 1] + way.backward_extra_bytes
            ways.append(
                (
                    way.saved_bytes,
                    way.saved_bytes + way.forward_extra_bytes,
                    way.saved_bytes + during_backward,
                    way.forward_seconds + way.backward_seconds - fastest,
                    as_last - fastest_last,
                )
            )
        first_way.append(len(ways))
    saved, forward, backward, slower, slower_last = zip(*ways, strict=True)
    split_until = np.array([forward_until[max(p - delay, 0)] for p in range(n + 1)])
    if saves_ahead:
        split_until[1:] -= gains[:-1]
    return Costs(
        saves_ahead=saves_ahead,
        activation=np.array([chain.activation_bytes(k) for k in range(n + 1)], np.int64),
        beside=np.array(beside, np.int64),
        forward_extra=np.array([0, *(stage.forward_extra_bytes for stage in chain.stages)], np.int64),
        forward_until=forward_until,
        split_until=split_until,
        first_way=np.array(first_way, np.int64),
        way_saved=np.array(saved, np.int64),
        way_forward=np.array(forward, np.int64),
        way_backward=np.array(backward, np.int64),
        way_slower=np.array(slower, np.float64),
        way_slower_last=np.array(slower_last, np.float64),
        fastest_seconds=seconds,
    )


def outside_bytes(chain: Chain) -> int:
    """What is not available to the stages 1..n: all that is fixed, and a[0]."""
    return chain.fixed_bytes + chain.input_bytes


def operations_of(
    costs: Costs, decisions: NDArray[Any], stages: tuple[int, int] | None = None
) -> tuple[Forward | Backward, ...]:
    """The schedule of the stages s..t (None: of all) that a list of decisions stands for.

    Args:
        costs: the chain.
        decisions: in the order in which the sub-schedules run, for each of them its way for `all`, or minus the stage
            at which it splits.
        stages: s and t.
    """
    return tuple(_walk(costs, decisions, stages or (1, costs.num_stages)))


def _walk(costs: Costs, decisions: NDArray[Any], stages: tuple[int, int]) -> Iterator[Forward | Backward]:
    pending: list[tuple[int, int]] = [stages]  # (k, 0) stands for backward k
    upcoming = iter(decisions.tolist())
    while pending:
        s, t = pending.pop()
        if t == 0:
            yield Backward(s)
            continue
        decision = next(upcoming)
        if decision >= 0:
            yield Forward(s, "all", decision - int(costs.first_way[s]))
            pending.append((s, 0))
            if s < t:
                pending.append((s + 1, t))
        else:
            p = -decision
            yield Forward(s, "keep")
            yield from (Forward(k, "drop") for k in range(s + 1, p))
            pending.append((s, p - 1))
            pending.append((p, t))
