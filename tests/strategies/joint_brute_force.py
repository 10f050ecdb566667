"""The fastest round of tiny chains with their optimizer steps, by trying every legal list of copies.

The computations are fixed: each forward and backward once, the updates where they are told to be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from tests.strategies.weight_brute_force import TinyProblem, fastest_period

from lowtide import Backward, Chain, Forward, Schedule, Update
from lowtide.schedule import Start


class TinyRound(TinyProblem):
    """A chain without activations, a budget and a bandwidth; `updates` says where each update stands."""

    def __init__(
        self, chain: Chain, memory_budget: int, bandwidth: int, updates: tuple[Forward | Backward | Update, ...]
    ) -> None:
        self.chain, self.bandwidth, self.duplex, self.memory_budget = chain, bandwidth, True, memory_budget
        self.computations = list(updates)
        stages = chain.stages
        self.seconds = [self._seconds(computation) for computation in updates]
        sizes = {
            (kind, k): num_bytes
            for k, stage in enumerate(stages, start=1)
            for kind, num_bytes in (
                ("w", stage.weight_bytes),
                ("opt", stage.optimizer_bytes),
                ("g", stage.weight_grad_bytes),
            )
            if num_bytes
        }
        self.values, self.bytes = list(sizes), list(sizes.values())
        self.uses, self.changes = [], []
        for kind, k in self.values:
            readers = {"w": (Forward(k, "all"), Backward(k), Update(k)), "opt": (Update(k),)}
            touching = readers.get(kind, (Backward(k), Update(k)))
            self.uses.append([computation in touching for computation in updates])
            changed = Backward(k) if kind == "g" else Update(k)
            self.changes.append([computation == changed for computation in updates])
        self.used = np.array(self.uses)
        self.copy_seconds = np.array(self.bytes) / bandwidth
        self.before, self.peak = [], []
        for j in range(len(updates)):
            # weight gradients count as always there: what is not made yet, or gone, is taken off again
            absent = self._absent(j)
            self.before.append(chain.base_bytes - absent - (self._made(j)))
            self.peak.append(chain.base_bytes - absent)

    def _seconds(self, computation: Forward | Backward | Update) -> float:
        stage = self.chain.stage(computation.stage)
        names = {Forward: "forward_seconds", Backward: "backward_seconds", Update: "update_seconds"}
        return getattr(stage, names[type(computation)])

    def _made(self, j: int) -> int:
        computation = self.computations[j]
        return self.chain.stage(computation.stage).weight_grad_bytes if isinstance(computation, Backward) else 0

    def _absent(self, j: int) -> int:
        """The weight gradients that do not exist during computation j."""
        total = 0
        for k, stage in enumerate(self.chain.stages, start=1):
            if not self.computations.index(Backward(k)) <= j <= self.computations.index(Update(k)):
                total += stage.weight_grad_bytes
        return total

    def patterns(self, value: int) -> list[tuple[tuple[str, ...], bool, bool]]:
        """What one value may do; weight gradients only between their backward and their update."""
        kind, k = self.values[value]
        if kind != "g":
            return super().patterns(value)
        made, used = self.computations.index(Backward(k)), self.computations.index(Update(k))
        found = []
        for out, back in itertools.combinations(range(made + 1, used + 1), 2):
            for gone in range(out, back):
                pattern = [""] * len(self.computations)
                pattern[out] = "O"
                pattern[gone] += "R"
                pattern[back] = "P"
                found.append((tuple(pattern), True, False))
        return [((*[""] * len(self.computations),), True, False), *found]

    def schedule(self, gaps: list[list[tuple[int, str]]], states: list[tuple[bool, bool]]) -> Schedule:
        """A list as a schedule that manages both kinds."""
        start = self.start(states)
        every = {(kind, k) for kind in ("w", "opt") for k in range(1, self.chain.num_stages + 1)}
        device = {value for value in start.device if value[0] != "g"} | (every - set(self.values))
        host = {value for value in start.host if value[0] != "g"}
        operations = self.operations(gaps)
        return Schedule("brute force", operations, ("w", "opt"), Start(frozenset(device), frozenset(host)))


def orders(num_stages: int, *, step_in_backward: bool) -> Iterator[tuple[Forward | Backward | Update, ...]]:
    """Each computation once, with every order of updates that the form allows."""
    forwards = tuple(Forward(k, "all") for k in range(1, num_stages + 1))
    backwards = tuple(Backward(k) for k in range(num_stages, 0, -1))
    if step_in_backward:
        yield (*forwards, *(each for b in backwards for each in (b, Update(b.stage))))
        return
    for updates in itertools.permutations(range(1, num_stages + 1)):
        yield (*forwards, *backwards, *(Update(k) for k in updates))


def fastest_round(
    chain: Chain, memory_budget: int, bandwidth: int, *, step_in_backward: bool
) -> tuple[float, Schedule | None]:
    """The least period of all these lists, and one that has it; infinity where none fits."""
    best: tuple[float, Schedule | None] = (math.inf, None)
    for order in orders(chain.num_stages, step_in_backward=step_in_backward):
        found = fastest_period(TinyRound(chain, memory_budget, bandwidth, order))
        best = min(best, found, key=lambda pair: pair[0])
    return best
