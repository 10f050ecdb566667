"""Schedules for any number of stages: those with names, and random ones that are legal by construction (their tests ask
the simulator whether they are).
"""

from __future__ import annotations

import random

from lowtide.schedule import (
    Await,
    Backward,
    Forward,
    Offload,
    Operation,
    Prefetch,
    Release,
    Schedule,
    Start,
    Update,
    Value,
)


class _Builder:
    """Adds operations at random, keeping track of what is where."""

    def __init__(self, num_stages: int, rng: random.Random, *, moves: float, drops: float) -> None:
        self.rng = rng
        self.moves = moves
        self.drops = drops
        self.num_stages = num_stages
        self.device: set[Value] = {("a", 0)}
        self.host: set[Value] = set()
        self.operations: list[Operation] = []

    def build(self) -> list[Operation]:
        for k in range(1, self.num_stages + 1):
            self._move_something()
            self._need_input(k, standing_alone=False)
            self._forward(k, self._save(k))
        for k in range(self.num_stages, 0, -1):
            self._move_something()
            self._need_saved(k)
            self._need_input(k, standing_alone=False)
            self._need_saved(k, may_move=False)
            self.operations.append(Backward(k))
            for value in (("abar", k), ("a", k - 1)):
                self.device.discard(value)
        return self.operations

    def _save(self, k: int) -> str:
        choices = []
        if ("abar", k) not in self.device:
            choices.append("all")
        if ("a", k) not in self.device:
            choices.append("keep")
            if k > 1 and ("a", k - 1) in self.device and self.rng.random() < self.drops:
                choices += ["drop", "drop"]
        return self.rng.choice(choices)

    def _forward(self, k: int, save: str) -> None:
        self.operations.append(Forward(k, save))
        self.device.add(("abar", k) if save == "all" else ("a", k))
        if save == "drop":
            self.device.discard(("a", k - 1))

    def _need_saved(self, k: int, *, may_move: bool = True) -> None:
        if ("abar", k) in self.device:
            return
        if ("abar", k) in self.host and self.rng.random() < 0.7:
            self._prefetch(("abar", k))
            return
        self._need_input(k, standing_alone=False)
        self._forward(k, "all")
        if may_move:
            self._move_something()

    def _need_input(self, k: int, *, standing_alone: bool) -> None:
        """Have a[k-1], from wherever it can be had."""
        values = [("a", k - 1)] if standing_alone or k == 1 else [("a", k - 1), ("abar", k - 1)]
        if any(value in self.device for value in values):
            return
        away = [value for value in values if value in self.host]
        if away and (k == 1 or self.rng.random() < 0.6):
            self._prefetch(self.rng.choice(away))
            return
        self._need_input(k - 1, standing_alone=False)
        self._forward(k - 1, self._save(k - 1))

    def _prefetch(self, value: Value) -> None:
        self.operations.append(Prefetch(*value))
        self.device.add(value)

    def _move_something(self) -> None:
        while self.rng.random() < self.moves:
            ways = [(Offload, value) for value in sorted(self.device)]
            ways += [(Release, value) for value in sorted(self.device & self.host)] * 3
            ways += [(Prefetch, value) for value in sorted(self.host - self.device)]
            ways += [(Await, value) for value in sorted(self.device)][:1]
            way, value = self.rng.choice(ways)
            self.operations.append(way(*value))
            if way is Offload:
                self.host.add(value)
            elif way is Release:
                self.device.discard(value)
            elif way is Prefetch:
                self.device.add(value)


def random_schedule(num_stages: int, seed: int, *, moves: float = 0.0, drops: float = 0.5) -> Schedule:
    """A legal schedule.

    Args:
        num_stages: n.
        seed: which one.
        moves: how likely copies are.
        drops: how likely inputs are let go.
    """
    builder = _Builder(num_stages, random.Random(seed), moves=moves, drops=drops)
    return Schedule("random", builder.build())


def storing(n: int) -> Schedule:
    """Everything that is saved stays."""
    return Schedule("store", [*(Forward(k, "all") for k in range(1, n + 1)), *(Backward(k) for k in range(n, 0, -1))])


def recomputing(n: int) -> Schedule:
    """Only the input is kept; everything but the last stage is recomputed before backward."""
    operations = [Forward(1, "keep"), *(Forward(k, "drop") for k in range(2, n)), Forward(n, "all"), Backward(n)]
    operations += [Forward(k, "all") for k in range(1, n)]
    return Schedule("recompute", [*operations, *(Backward(k) for k in range(n - 1, 0, -1))])


def repeating(n: int) -> Schedule:
    """Each stage, the last one too, is recomputed right before its backward."""
    operations: list[Operation] = [Forward(k, "keep") for k in range(1, n + 1)]
    for k in range(n, 0, -1):
        operations += [Forward(k, "all"), Backward(k)]
    return Schedule("repeat", operations)


def repeating_the_first(n: int) -> Schedule:
    """The first two stages are recomputed, later ones run once."""
    num_first = min(2, n - 1)
    operations: list[Operation] = [Forward(k, "keep") for k in range(1, num_first + 1)]
    operations += [Forward(k, "all") for k in range(num_first + 1, n + 1)]
    operations += [Backward(k) for k in range(n, num_first, -1)]
    for k in range(num_first, 0, -1):
        operations += [Forward(k, "all"), Backward(k)]
    return Schedule("repeat the first", operations)


def repeating_all_but_the_last(n: int) -> Schedule:
    """Each stage but the last is recomputed right before its backward."""
    operations: list[Operation] = [Forward(k, "keep") for k in range(1, n)]
    operations += [Forward(n, "all"), Backward(n)]
    for k in range(n - 1, 0, -1):
        operations += [Forward(k, "all"), Backward(k)]
    return Schedule("repeat all but the last", operations)


def offloading(n: int) -> Schedule:
    """Everything that is saved goes to the host and comes back."""
    operations: list[Operation] = []
    for k in range(1, n + 1):
        operations += [Forward(k, "all"), *([Release("abar", k - 1)] if k > 1 else []), Offload("abar", k)]
    operations += [Release("abar", n), Prefetch("abar", n)]
    for k in range(n, 0, -1):
        operations += [*([Prefetch("abar", k - 1)] if k > 1 else []), Backward(k)]
    return Schedule("offload", operations)


def mixed(n: int) -> Schedule:
    """Some stages stay, some are recomputed."""
    operations = [Forward(1, "all"), Forward(2, "keep"), *(Forward(k, "drop") for k in range(3, n - 1))]
    operations += [Forward(n - 1, "all"), Forward(n, "all"), Backward(n), Backward(n - 1)]
    operations += [Forward(k, "all") for k in range(2, n - 1)]
    return Schedule("mixed", [*operations, *(Backward(k) for k in range(n - 2, 0, -1))])


def parking(base: Schedule) -> Schedule:
    """The same computations; weights, gradients and optimizer state are on the device only while they are needed."""
    operations: list[Operation] = []
    for operation in base.operations:
        k = operation.stage
        if not isinstance(operation, Forward | Backward):
            operations.append(operation)
            continue
        operations += [Prefetch("w", k), operation]
        operations += [Offload("g", k), Release("g", k)] if isinstance(operation, Backward) else []
        operations.append(Release("w", k))
    n = base.num_stages
    for k in range(1, n + 1):
        operations += [Prefetch("w", k), Prefetch("g", k), Prefetch("opt", k), Update(k), Offload("w", k)]
        operations += [Offload("opt", k), Release("w", k), Release("opt", k)]
    host = frozenset((kind, k) for kind in ("w", "opt") for k in range(1, n + 1))
    return Schedule(f"park and {base.strategy}", operations, ("w", "opt"), Start(frozenset(), host))
