"""Exhaustive searches: the oracles of optimality. They share nothing with the algorithms but the simulator's rules.

`nested_schedules` lists every nested persistent schedule; `Nested` finds the fastest of them for chains too long to
list them all; `fastest` searches all sequences of operations, with or without the rule of persistence, by uniform cost
over what is on the device.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from lowtide import Backward, Chain, Forward, InfeasibleBudgetError, Release, Schedule, simulate, solve
from lowtide.schedule import Operation


def nested_schedules(
    chain: Chain, s: int, t: int, *, saves_ahead: bool = True, variants: bool = True
) -> Iterator[tuple[Operation, ...]]:
    """Every nested persistent schedule of the stages s..t; without `saves_ahead`, `all` only right before backward."""
    stage = chain.stage(s)
    for variant in range(stage.num_variants if variants else 1):
        first, last = Forward(s, "all", variant), Backward(s)
        if s == t:
            yield (first, last)
        elif saves_ahead:
            for inner in nested_schedules(chain, s + 1, t, variants=variants):
                yield (first, *inner, last)
    for split in range(s + 1, t + 1):
        ahead = (Forward(s, "keep"), *(Forward(k, "drop") for k in range(s + 1, split)))
        later = nested_schedules(chain, split, t, saves_ahead=saves_ahead, variants=variants)
        earlier = list(nested_schedules(chain, s, split - 1, saves_ahead=saves_ahead, variants=variants))
        for one, other in itertools.product(later, earlier):
            yield (*ahead, *one, *other)


def curve(chain: Chain, schedules: Iterator[tuple[Operation, ...]]) -> list[tuple[int, float]]:
    """The peaks and times of the schedules that no other one beats in both, by rising peak."""
    traces = [simulate(chain, Schedule("exhaustive", operations)) for operations in schedules]
    best: list[tuple[int, float]] = []
    for trace in sorted(traces, key=lambda trace: (trace.peak_bytes, trace.seconds)):
        if not best or trace.seconds < best[-1][1]:
            best.append((trace.peak_bytes, trace.seconds))
    return best


def check_curve(chain: Chain, strategy: str, expected: list[tuple[int, float]]) -> None:
    """Solve at each peak of an exhaustive curve and just below the next; below the first nothing fits."""
    for (peak, seconds), (next_peak, _) in zip(expected, [*expected[1:], (expected[-1][0] + 99, 0)], strict=True):
        for budget in {peak, next_peak - 1}:
            solution = solve(chain, memory_budget=budget, strategy=strategy)
            assert solution.seconds == pytest.approx(seconds, rel=1e-12, abs=1e-12), (chain, budget)
            assert solution.peak_bytes <= budget
    least = expected[0][0]
    if least:
        with pytest.raises(InfeasibleBudgetError) as refused:
            solve(chain, memory_budget=least - 1, strategy=strategy)
        assert refused.value.minimum_bytes == least


class Nested:
    """The fastest nested persistent schedule by plain recursion, budget by budget, in whole bytes."""

    def __init__(self, chain: Chain, *, saves_ahead: bool = True, variants: bool = True) -> None:
        self.chain = chain
        self.saves_ahead = saves_ahead
        self.variants = variants
        self.seconds_of = functools.cache(self._seconds)
        grads = [0 if chain.grads_resident else stage.weight_grad_bytes for stage in chain.stages]
        # beside[t]: what stands beside all stages up to t; made[s]: what the backward of s makes
        self.beside = [chain.gradient_bytes(t) + sum(grads[t:]) for t in range(chain.num_stages + 1)]
        self.made = [0, *(chain.gradient_bytes(k) + grads[k] for k in range(chain.num_stages))]
        self.ways = [(), *(self._ways(k) for k in range(1, chain.num_stages + 1))]
        self.passes = [(0, 0, 0.0), *((s.output_bytes, s.forward_extra_bytes, s.forward_seconds) for s in chain.stages)]
        self.activations = [chain.activation_bytes(k) for k in range(chain.num_stages + 1)]

    def seconds(self, budget: int) -> float:
        """The least time within a budget, infinite where nothing fits."""
        return self.seconds_of(1, self.chain.num_stages, budget - self.chain.fixed_bytes - self.chain.input_bytes)

    def _ways(self, s: int) -> tuple[tuple[int, int, int, float, float], ...]:
        """Of each way to save stage s: the bytes saved, those that its forward and all that its backward needs, and the
        times of both where the forward is the first one and where it is not.
        """
        stage, ways = self.chain.stage(s), []
        for v in range(stage.num_variants if self.variants else 1):
            way = stage.variant(v)
            backward = self.beside[s] + way.saved_bytes + self.made[s] + way.backward_extra_bytes - way.freed_bytes
            forward = way.saved_bytes + way.saving_extra_bytes
            seconds = (way.forward_seconds + way.backward_seconds, way.rerun_seconds + way.backward_seconds)
            ways.append((way.saved_bytes, forward, backward, *seconds))
        return tuple(ways)

    def _seconds(self, s: int, t: int, free: int) -> float:
        """The least time of s..t with `free` bytes, those of a[s-1] not among them."""
        best, beside = float("inf"), self.beside[t]
        # the forward that ends s..t comes after the backward of t + 1, where there is one
        ends = s == t < self.chain.num_stages
        if s == t or self.saves_ahead:
            for saved, forward, backward, first, again in self.ways[s]:
                if beside + forward <= free and backward <= free:
                    inner = self.seconds_of(s + 1, t, free - saved) if s < t else 0.0
                    best = min(best, (again if ends else first) + inner)
        ahead = 0.0
        for p in range(s + 1, t + 1):
            before = self.activations[p - 2] if p - 1 > s else 0
            output, extra, seconds = self.passes[p - 1]
            if beside + before + output + extra > free:
                break
            ahead += seconds
            later = self.seconds_of(p, t, free - output)
            best = min(best, ahead + later + self.seconds_of(s, p - 1, free))
        return best


@dataclass(frozen=True, slots=True)
class _State:
    """What is on the device: each a[k] as 0 absent, 1 just made, 2 kept; each abar[k] as -1 absent, or its variant."""

    activations: tuple[int, ...]
    saved: tuple[int, ...]
    next_backward: int
    sides: frozenset[int] = frozenset()
    """The side values that are on the device."""


def fastest(chain: Chain, budget: int, *, persistent: bool) -> tuple[float, tuple[Operation, ...]] | None:
    """The fastest sequence of forwards and backwards within a budget, or None.

    Persistent: a value that is not dropped by the very next operation stays until its backward. Side values may be
    freed at any time, and are made again by another forward of their maker.
    """
    n = chain.num_stages
    start = _State((2, *[0] * n), (-1,) * (n + 1), n)
    queue: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    came_from: dict[_State, tuple[_State, Operation]] = {}
    best = {start: 0.0}
    order = itertools.count(1)
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if seconds > best[state]:
            continue
        if state.next_backward == 0:
            return seconds, _path(state, came_from)
        for operation, after, takes, peak in _moves_with_side_values(chain, state, persistent):
            if peak <= budget and seconds + takes < best.get(after, float("inf")):
                best[after] = seconds + takes
                came_from[after] = (state, operation)
                heapq.heappush(queue, (seconds + takes, next(order), after))
    return None


def _path(state: _State, came_from: dict[_State, tuple[_State, Operation]]) -> tuple[Operation, ...]:
    operations = []
    while state in came_from:
        state, operation = came_from[state]
        operations.append(operation)
    return tuple(reversed(operations))


def _stored_bytes(chain: Chain, state: _State) -> int:
    total = chain.fixed_bytes + chain.gradient_bytes(state.next_backward)
    if not chain.grads_resident:
        total += sum(stage.weight_grad_bytes for stage in chain.stages[state.next_backward :])
    for k in range(chain.num_stages + 1):
        total += chain.activation_bytes(k) if state.activations[k] else 0
        total += chain.stage(k).variant(state.saved[k]).saved_bytes if state.saved[k] >= 0 else 0
    for i, side in enumerate(chain.side_values):
        total += side.num_bytes if i in state.sides else 0
        total += side.grad_bytes if side.maker <= state.next_backward < max(side.readers) else 0
    return total


def _moves_with_side_values(
    chain: Chain, state: _State, persistent: bool
) -> Iterator[tuple[Operation, _State, float, int]]:
    if not chain.side_values:
        yield from _moves(chain, state, persistent)
        return
    for i in state.sides:
        yield Release("s", i + 1), replace(state, sides=state.sides - {i}), 0.0, _stored_bytes(chain, state)
    for operation, after, takes, peak in _moves(chain, state, persistent):
        k, sides = operation.stage, state.sides
        if not sides >= {i for i, side in enumerate(chain.side_values) if k in side.readers}:
            continue
        own = {i for i, side in enumerate(chain.side_values) if side.maker == k}
        if isinstance(operation, Forward):
            peak += sum(chain.side_values[i].num_bytes for i in own - sides)
            sides |= own
        else:
            peak += sum(side.grad_bytes for side in chain.side_values if max(side.readers) == k)
            sides -= own
        yield operation, replace(after, sides=sides), takes, peak


def _moves(chain: Chain, state: _State, persistent: bool) -> Iterator[tuple[Operation, _State, float, int]]:
    stored = _stored_bytes(chain, state)
    for k in range(1, state.next_backward + 1):  # a later stage is of no use any more
        stage = chain.stage(k)
        alone, inside = state.activations[k - 1] > 0, state.saved[k - 1] >= 0
        if not alone and not inside:
            continue
        if state.saved[k] < 0:
            for v in range(stage.num_variants):
                way = stage.variant(v)
                after = _State(_kept(state), _with(state.saved, k, v), state.next_backward)
                peak = stored + way.saved_bytes + way.saving_extra_bytes
                # it has run before, since its next stage is done
                unwanted = k == state.next_backward < chain.num_stages
                yield Forward(k, "all", v), after, way.rerun_seconds if unwanted else way.forward_seconds, peak
        if not state.activations[k]:
            peak = stored + stage.output_bytes + stage.forward_extra_bytes
            after = _State(_with(_kept(state), k, 1), state.saved, state.next_backward)
            yield Forward(k, "keep"), after, stage.forward_seconds, peak
            if alone and (state.activations[k - 1] == 1 or not persistent):
                activations = _with(_with(_kept(state), k - 1, 0), k, 1)
                yield (
                    Forward(k, "drop"),
                    _State(activations, state.saved, state.next_backward),
                    stage.forward_seconds,
                    peak,
                )
    k = state.next_backward
    if state.saved[k] >= 0 and (state.activations[k - 1] or state.saved[k - 1] >= 0):
        way = chain.stage(k).variant(state.saved[k])
        made = chain.gradient_bytes(k - 1) + (0 if chain.grads_resident else chain.stage(k).weight_grad_bytes)
        # a[k] by itself is of no use any more, but nothing removes it.
        after = _State(_with(_kept(state), k - 1, 0), _with(state.saved, k, -1), k - 1)
        yield Backward(k), after, way.backward_seconds, stored + made + way.backward_extra_bytes - way.freed_bytes


def _kept(state: _State) -> tuple[int, ...]:
    return tuple(2 if mark else 0 for mark in state.activations)


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
