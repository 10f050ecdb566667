"""What the weight strategies share: one period of training, and schedules that move weights through it.

A period runs every stage forward once with all it saves, then every stage backward: computation j = 0..2n-1 is
forward 1..n, then backward n..1. Weights (and optimizer state) come and go in the gaps before the computations; the
gap before forward 1 follows backward 1 of the round before.

| weights paper | here |
| --- | --- |
| M_Fi, M_Bi less the weights | `Period.standing_bytes`, from the chain's own sizes |
| w_i | the value `("w", i)` |
| (future work) optimizer states | the value `("opt", i)`, which backward i alone needs |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.errors import StrategyError
from lowtide.schedule import Backward, Forward, Offload, Operation, Prefetch, Release, Schedule, Start, Value
from lowtide.strategies import sides
from lowtide.strategies.base import GIVE_BANDWIDTH, Problem


@dataclass(frozen=True, slots=True)
class Period:
    """The computations of one period.

    Attributes:
        computations: forward 1..n with all they save, then backward n..1.
        seconds: how long each computation takes.
        gap_bytes: what is stored right before each computation, weights and optimizer state not counted.
        standing_bytes: the peak of each computation, likewise.
        weight_bytes: w[k] of the stages 1..n, at index k-1.
        optimizer_bytes: opt[k], likewise.
    """

    computations: tuple[Forward | Backward, ...]
    seconds: tuple[float, ...]
    gap_bytes: tuple[int, ...]
    standing_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """How many stages there are, n."""
        return len(self.weight_bytes)

    @property
    def resident_bytes(self) -> int:
        """All weights and optimizer state."""
        return sum(self.weight_bytes) + sum(self.optimizer_bytes)

    @property
    def least_bytes(self) -> int:
        """The least peak of any period: each computation with nothing but its own stage's values beside it."""
        stages = range(1, self.num_stages + 1)
        needed = [self.weight_bytes[k - 1] for k in stages]
        needed += [self.weight_bytes[k - 1] + self.optimizer_bytes[k - 1] for k in reversed(stages)]
        return max(standing + own for standing, own in zip(self.standing_bytes, needed, strict=True))

    @property
    def most_bytes(self) -> int:
        """The peak with nothing moved."""
        return self.resident_bytes + max(self.standing_bytes)


def period_of(chain: Chain) -> Period:
    """The period of a chain: what stands at each computation, as the simulator counts it.

    Side values stay from the forward of their maker to its backward.
    """
    made, made_gradients = sides.made_bytes(chain).tolist(), sides.made_gradient_bytes(chain).tolist()
    computations: list[Forward | Backward] = []
    gaps: list[int] = []
    standing: list[int] = []
    stored = chain.base_bytes + chain.input_bytes + chain.gradient_bytes(chain.num_stages)
    for k, stage in enumerate(chain.stages, start=1):
        computations.append(Forward(k, "all"))
        gaps.append(stored)
        stored += stage.saved_bytes + made[k]
        standing.append(stored + stage.saving_extra_bytes)
    for k in range(chain.num_stages, 0, -1):
        stage, gradient = chain.stages[k - 1], chain.gradient_bytes(k - 1)
        computations.append(Backward(k))
        gaps.append(stored)
        standing.append(stored + stage.backward_more_bytes(gradient + made_gradients[k] + stage.weight_grad_bytes))
        stored += gradient + made_gradients[k]
        stored -= stage.grad_bytes + stage.saved_bytes + made[k]
        stored -= sum(side.grad_bytes for side in chain.side_values if side.maker == k)
    forward = [stage.forward_seconds for stage in chain.stages]
    backward = [stage.backward_seconds for stage in reversed(chain.stages)]
    return Period(
        tuple(computations),
        (*forward, *backward),
        tuple(gaps),
        tuple(standing),
        tuple(stage.weight_bytes for stage in chain.stages),
        tuple(stage.optimizer_bytes for stage in chain.stages),
    )


def checked_period(problem: Problem, strategy: str) -> Period:
    """The period of a problem's chain, where moving weights makes sense for it.

    Raises:
        StrategyError: if the weight gradients are resident, or nothing can be moved.
    """
    if problem.chain.grads_resident:
        raise StrategyError(
            f"strategy {strategy!r} updates weights inside each backward, but chain {problem.chain.name!r} "
            "accumulates weight gradients (grads_resident); use a strategy that keeps weights on the device"
        )
    if not problem.bandwidth:
        raise StrategyError(f"strategy {strategy!r} moves weights; {GIVE_BANDWIDTH}")
    return period_of(problem.chain)


def cyclic_schedule(strategy: str, num_stages: int, operations: Sequence[Operation]) -> Schedule:
    """A schedule of one period whose start is the state that its own operations lead back to.

    Args:
        strategy: its name.
        num_stages: n.
        operations: forward 1..n, backward n..1, and the copies between them. Values that are never released stay on
            the device; optimizer state is managed only where some of it moves.
    """
    moved = {operation.kind for operation in operations if isinstance(operation, Offload | Release | Prefetch)}
    manages = ("w", "opt") if "opt" in moved else ("w",)
    device: set[Value] = {(kind, k) for kind in manages for k in range(1, num_stages + 1)}
    host: set[Value] = set()
    for operation in operations:
        if isinstance(operation, Offload):
            host.add(operation.value)
        elif isinstance(operation, Backward):
            host -= {(kind, operation.stage) for kind in manages}
        elif isinstance(operation, Release):
            device.discard(operation.value)
        elif isinstance(operation, Prefetch):
            device.add(operation.value)
    return Schedule(strategy, tuple(operations), manages, Start(frozenset(device), frozenset(host)))


def without_vain_copies(operations: Sequence[Operation]) -> list[Operation]:
    """Remove copies to the host of values that never leave the device."""
    released = {operation.value for operation in operations if isinstance(operation, Release)}
    return [each for each in operations if not isinstance(each, Offload) or each.value in released]
