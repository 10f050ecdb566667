"""From the decisions of pofo's search to an order of computations, counted in exact bytes.

The search knows the backward phase of a sub-chain only by its time for a room in slots. Here each sub-chain is decided
anew, from its exact room and the exact bytes that arrive meanwhile, down to single stages; so is the time of the whole.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.schedule import Backward, Forward, Value
from lowtide.strategies.continuous.backward import Blocks, block_seconds
from lowtide.strategies.numerics.arrays import ChainArrays
from lowtide.strategies.numerics.kernels import kernel

Computation = Forward | Backward


@dataclass(frozen=True, slots=True)
class ContinuousStep:
    """One decision of the forward phase: the stages `first` to `last`, and whether the input of `first` is moved.

    With a `variant`, `first` = `last` runs forward `all` in it; without one, the stages run light and are recomputed.
    """

    first: int
    last: int
    variant: int | None
    moved: bool


@dataclass(frozen=True, slots=True)
class ContinuousPlan:
    """A schedule of the continuous model: an order, the values that are moved during the loss, and the time."""

    order: tuple[Computation, ...]
    moved: frozenset[Value]
    seconds: float


def read_off(
    chain: ChainArrays, blocks: Blocks, steps: Sequence[ContinuousStep], memory_bytes: int, bandwidth: float
) -> ContinuousPlan:
    """The order of computations of a list of steps from stage 1 to n, and its time in the continuous model.

    Args:
        chain: the network.
        blocks: the backward phase, to decide the sub-chains.
        steps: what the forward phase does.
        memory_bytes: M, without what is fixed; the steps fit.
        bandwidth: β, bytes per second, above 0.
    """
    stored, leaving, arriving, seconds = 0, 0.0, 0.0, 0.0
    given, name = int(chain.output[0]), ("a", 0)
    ahead: list[Computation] = []
    behind: list[list[Computation]] = []
    moved: set[Value] = set()
    for step in steps:
        room = memory_bytes - stored - given
        i, j = step.first, step.last
        if step.variant is not None:
            v = step.variant
            during = int(chain.heavy_peak[i, v] + chain.standing_first[i])
            forward = float(chain.forward_seconds[i, v]) + max(0.0, (during + leaving - room) / bandwidth)
            late = (int(chain.backward_peak[i, v]) + arriving - room) / bandwidth
            backward = float(chain.backward_seconds[i, v]) + max(0.0, late)
            ahead.append(Forward(i, "all", v))
            behind.append([Backward(i)])
        else:
            forward = _light_forwards(chain, i, j, room, leaving, bandwidth)
            operations, backward = _run(_read_block(chain, blocks, i, j, room, arriving))
            ahead.extend([Forward(i, "keep"), *(Forward(k, "drop") for k in range(i + 1, j + 1))])
            behind.append(operations)
        seconds += forward + backward
        if step.moved:
            moved.add(name)
        else:
            stored += given
        leaving = max(0.0, leaving + (given if step.moved else 0) - forward * bandwidth)
        arriving = max(0.0, arriving - backward * bandwidth) + (given if step.moved else 0)
        given = int(chain.output[j] if step.variant is None else chain.saved[i, step.variant])
        name = ("a" if step.variant is None else "abar", j)
    seconds += (leaving + arriving) / bandwidth
    backwards = (operation for part in reversed(behind) for operation in part)
    return ContinuousPlan((*ahead, *backwards), frozenset(moved), seconds)


def _light_forwards(chain: ChainArrays, i: int, j: int, room: int, leaving: float, bandwidth: float) -> float:
    """The time of the light forwards i..j in the forward phase, waiting included (lemma 1)."""
    total, wait = 0.0, 0.0
    for k in range(i, j + 1):
        need = int(chain.light_peak[k] + chain.standing_first[k] + (chain.output[k - 1] if k > i else 0))
        wait = max(wait, (need + leaving - room) / bandwidth - total)
        total += float(chain.light_seconds[k])
    return total + wait


Part = tuple[list[Computation], float]
Reading = Generator["Reading", Part, Part]


def _run(reading: Reading) -> Part:
    """Run a recursion written as generators, without Python's limit on its depth."""
    stack = [reading]
    given: Part | None = None
    while True:
        try:
            stack.append(stack[-1].send(given))  # type: ignore[arg-type]  # the first value sent is None
            given = None
        except StopIteration as stop:
            stack.pop()
            given = stop.value
            if not stack:
                return stop.value  # type: ignore[no-any-return]


def _read_block(chain: ChainArrays, blocks: Blocks, i: int, j: int, room: int, arriving: float) -> Reading:
    """The operations of the backward phase of i..j, and their time (appendix B.3)."""
    bandwidth = blocks.bandwidth
    decision = decide_block(chain, blocks, i, j, room, arriving)
    assert decision, f"stages {i} to {j} do not fit in {room} bytes: this is a bug in lowtide"
    if decision < 0:
        v = -1 - decision
        backward = float(chain.backward_seconds[i, v])
        backward += max(0.0, (int(chain.backward_peak[i, v]) + arriving - room) / bandwidth)
        arriving = max(0.0, arriving - backward * bandwidth)
        inner: list[Computation] = []
        seconds = 0.0
        if i < j:
            inner, seconds = yield _read_block(chain, blocks, i + 1, j, room - int(chain.saved[i, v]), arriving)
            arriving = max(0.0, arriving - seconds * bandwidth)
        during = int(chain.heavy_peak[i, v] + chain.standing[j])
        forward = float(chain.forward_seconds[i, v]) + max(0.0, (during + arriving - room) / bandwidth)
        return [Forward(i, "all", v), *inner, Backward(i)], forward + seconds + backward
    earlier, left_seconds = yield _read_block(chain, blocks, i, decision, room, arriving)
    arriving = max(0.0, arriving - left_seconds * bandwidth)
    left_room = room - int(chain.output[decision])
    later, right_seconds = yield _read_block(chain, blocks, decision + 1, j, left_room, arriving)
    arriving = max(0.0, arriving - right_seconds * bandwidth)
    total, wait = 0.0, 0.0
    for k in range(decision, i - 1, -1):
        need = int(chain.light_peak[k] + chain.standing[j] + (chain.output[k - 1] if k > i else 0))
        wait = max(wait, (need + arriving - room) / bandwidth - total)
        total += float(chain.light_seconds[k])
    light: list[Computation] = [Forward(i, "keep"), *(Forward(k, "drop") for k in range(i + 1, decision + 1))]
    return [*light, *later, *earlier], total + wait + left_seconds + right_seconds


@kernel
def decide_block(chain: ChainArrays, blocks: Blocks, i: int, j: int, room: int, arriving: float) -> int:
    """The best first decision for the backward phase of i..j: the i' to keep, or -1 - v for `all` in variant v."""
    bandwidth = blocks.bandwidth
    best, decision = np.inf, 0
    for v in range(chain.num_variants[i]):
        during = chain.heavy_peak[i, v] + chain.standing[j]
        if max(during, chain.backward_peak[i, v]) > room:
            continue
        total = chain.backward_seconds[i, v] + max(0.0, (chain.backward_peak[i, v] + arriving - room) / bandwidth)
        left = max(0.0, arriving - total * bandwidth)
        if i < j:
            right = block_seconds(blocks, i + 1, j, room - chain.saved[i, v], left)
            left = max(0.0, left - right * bandwidth)
            total += right
        total += chain.forward_seconds[i, v] + max(0.0, (during + left - room) / bandwidth)
        if total < best:
            best, decision = total, -1 - v
    for split in range(i, j):
        forward, use, behind = blocks.ahead[i, split]
        if use + chain.standing[j] > room:
            break
        total = block_seconds(blocks, i, split, room, arriving)
        if total + forward >= best:
            continue
        left = max(0.0, arriving - total * bandwidth)
        right = block_seconds(blocks, split + 1, j, room - chain.output[split], left)
        left = max(0.0, left - right * bandwidth)
        total += right + forward + max(0.0, behind + (chain.standing[j] + left - room) / bandwidth)
        if total < best:
            best, decision = total, split
    return decision
