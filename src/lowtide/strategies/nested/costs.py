"""Nested persistent schedules: the class that `rotor` and `revolve` search, as numbers and as operations.

A schedule of the stages s..t begins with a[s-1] and delta[t] on the device and ends with delta[s-1]. It is one of

- `all`: forward s with all it saves (in one of the stage's ways), a schedule of s+1..t, backward s;
- `split` at p: forward s keeping its input, forward s+1..p-1 without saving, a schedule of p..t, one of s..p-1.

What stands beside the stages s..t while they are processed is delta[t], the weight gradients of all stages after t, and
side values (see `lowtide.strategies.sides`): `Costs.beside`. The bytes available to s..t are the budget less what is
fixed and less what the schedules around it store, a[s-1] included; `Costs.beside` counts against them.

What s..t ends with, forward t and at once backward t, is after the backward of t+1, so that nothing needs a[t]:
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

from lowtide.chain import Chain, Stage
from lowtide.schedule import Backward, Forward
from lowtide.strategies import sides

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
    """delta[t], the weight gradients of the stages after t, and the side values beside s..t."""
    sides: Bytes
    """`sides.forward_bytes`: side values during forward k of s..t above those in `beside`; without any, no entries."""
    idle: sides.Idle
    """When side values are idle, which `beside` counts nevertheless."""
    idle_first: sides.Idle
    """The same in first forwards."""
    forward_extra: Bytes
    outliving: Bytes
    """Entry (k, s): what the code around the stages may hold in the first forward of k on the way from s to a split of
    s..n, a[s-1] not counted; without any, no entries."""
    outliving_saving: Bytes
    """The same in a first forward k that saves all."""
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


def costs_of(chain: Chain, *, saves_ahead: bool = True, variants: bool = True) -> Costs:
    """The numbers of a chain that nested schedules depend on.

    Args:
        chain: the network.
        saves_ahead: allow a forward `all` well before its backward (rotor); False: only right before it (revolve).
        variants: try every variant of a stage for `all`; False: variant 0 alone.
    """
    n = chain.num_stages
    made = [0 if chain.grads_resident else stage.weight_grad_bytes for stage in chain.stages]
    made_after = [sum(made), *(sum(made) - np.cumsum(made, dtype=np.int64))]
    standing, made_gradients = sides.standing_bytes(chain), sides.made_gradient_bytes(chain)
    beside = [chain.gradient_bytes(k) + int(made_after[k]) + int(standing[k]) for k in range(n + 1)]
    forward_until = np.concatenate(([0.0], np.cumsum([stage.forward_seconds for stage in chain.stages])))
    ways: list[_Way] = []
    first_way, fastest, fastest_last = [0, 0], [0.0], [0.0]
    for k, stage in enumerate(chain.stages, start=1):
        made_by_backward = chain.gradient_bytes(k - 1) + made[k - 1] + int(made_gradients[k])
        num_ways = stage.num_variants if variants else 1
        own = [_way_of(stage, v, beside[k], made_by_backward, may_end_early=k < n) for v in range(num_ways)]
        fastest.append(min(way.seconds for way in own))
        fastest_last.append(min(way.last_seconds for way in own))
        ways += [
            way._replace(seconds=way.seconds - fastest[k], last_seconds=way.last_seconds - fastest_last[k])
            for way in own
        ]
        first_way.append(len(ways))
    if saves_ahead:
        spared = np.subtract(fastest, fastest_last)  # by ending early at the end of s..k
        split_until = np.concatenate(([0.0], (forward_until - spared)[:-1]))
        seconds = sum(fastest)
    else:  # each forward but the last runs twice anyway, and every last one may end early
        split_until = np.concatenate(([0.0, 0.0], forward_until[:-2]))
        seconds = float(forward_until[n - 1]) + sum(fastest_last)
    columns = _Way(*zip(*ways, strict=True))
    outliving, outliving_saving = _outliving(chain)
    return Costs(
        saves_ahead=saves_ahead,
        activation=np.array([chain.activation_bytes(k) for k in range(n + 1)], np.int64),
        beside=np.array(beside, np.int64),
        sides=sides.forward_bytes(chain),
        idle=sides.idle_times(chain),
        idle_first=sides.idle_times(chain, at_first=True),
        forward_extra=np.array([0, *(stage.forward_extra_bytes for stage in chain.stages)], np.int64),
        outliving=outliving,
        outliving_saving=outliving_saving,
        forward_until=forward_until,
        split_until=split_until,
        first_way=np.array(first_way, np.int64),
        way_saved=np.array(columns.saved, np.int64),
        way_forward=np.array(columns.forward, np.int64),
        way_backward=np.array(columns.backward, np.int64),
        way_slower=np.array(columns.seconds, np.float64),
        way_slower_last=np.array(columns.last_seconds, np.float64),
        fastest_seconds=seconds,
    )


def _outliving(chain: Chain, *, from_below: bool = False) -> tuple[Bytes, Bytes]:
    """What the code around the stages holds in first forwards: `Costs.outliving` and `Costs.outliving_saving`.

    Of a[m] with m < s - 1 it is not known here whether it is stored. From above, none of these is; from below, all are.
    """
    n = chain.num_stages
    if not any(stage.outliving for stage in chain.stages):
        return np.zeros((0, 0), np.int64), np.zeros(0, np.int64)
    found, saving = np.zeros((n + 1, n + 2), np.int64), np.zeros(n + 1, np.int64)
    for k, stage in enumerate(chain.stages, start=1):
        for m, num_bytes in stage.outliving:
            found[k, : m + 1] += num_bytes  # dropped on the way from s
            if not from_below:
                found[k, m + 2 :] += num_bytes
                saving[k] += num_bytes
    return found, saving


def from_below(costs: Costs, chain: Chain) -> Costs:
    """The costs where the code around the stages holds only what is not stored for sure."""
    outliving, saving = _outliving(chain, from_below=True)
    return costs._replace(outliving=outliving, outliving_saving=saving)


class _Way(NamedTuple):
    """One way of one stage, or a column of each; see `Costs`."""

    saved: Any
    forward: Any
    backward: Any
    seconds: Any
    """Forward and backward."""
    last_seconds: Any
    """The same where the stage is the last of s..t."""


def _way_of(stage: Stage, variant: int, beside: int, made_by_backward: int, *, may_end_early: bool) -> _Way:
    way = stage.variant(variant)
    last_forward = way.rerun_seconds if may_end_early else way.forward_seconds
    return _Way(
        way.saved_bytes,
        way.saved_bytes + way.saving_extra_bytes,
        way.saved_bytes + beside + way.backward_more_bytes(made_by_backward),
        way.forward_seconds + way.backward_seconds,
        last_forward + way.backward_seconds,
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
