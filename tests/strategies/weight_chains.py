"""Chains with weights for the tests of the weight strategies."""

from __future__ import annotations

import functools
import random

from tests.strategies.weight_brute_force import TinyProblem

from lowtide import Chain, Stage
from lowtide.strategies.weights.periods import period_of

MiB = 2**20


def random_weight_chain(
    seed: int, *, num_stages: int, largest: int = 20, optimizer: bool = False, zeros: bool = True
) -> Chain:
    """Small whole sizes and times, zeros among them, so that sums are exact and ties are common."""
    pick = random.Random(seed)

    def size(top: int) -> int:
        return 0 if zeros and pick.random() < 0.2 else pick.randint(1, top)

    stages = []
    for k in range(1, num_stages + 1):
        output = size(4)
        stages.append(
            Stage(
                f"s{k}",
                float(pick.randint(0, 6)),
                float(pick.randint(0, 9)),
                output_bytes=output,
                saved_bytes=output + size(3),
                grad_bytes=size(4),
                forward_extra_bytes=size(2),
                backward_extra_bytes=size(3),
                weight_bytes=size(largest),
                weight_grad_bytes=size(largest),
                optimizer_bytes=size(2 * largest) if optimizer else 0,
            )
        )
    return Chain(f"random {seed}", stages, input_bytes=size(3), input_grad_bytes=size(3), base_bytes=size(5))


def equal_chain(num_stages: int, *, weight_bytes: int = 10, forward: float = 1.0, backward: float = 2.0) -> Chain:
    """Equal stages with no activations to speak of."""
    stage = {"output_bytes": 1, "saved_bytes": 1, "weight_bytes": weight_bytes}
    return Chain("equal", [Stage(f"s{k}", forward, backward, **stage) for k in range(1, num_stages + 1)])


def transformer_chain(num_blocks: int, compute_seconds: float, *, activation_bytes: int = 20 * MiB) -> Chain:
    """An embedding of 612 MiB, blocks of 432 MiB and a loss without weights: the sizes behind the weights paper's
    table 1 (12 x 3072² parameters a block in fp32).
    """
    block_seconds = compute_seconds / num_blocks
    block = {"output_bytes": activation_bytes, "saved_bytes": activation_bytes, "weight_bytes": 432 * MiB}
    blocks = [Stage(f"block {k}", block_seconds / 4, block_seconds * 3 / 4, **block) for k in range(num_blocks)]
    embedding = Stage("embedding", 0.0, 0.0, activation_bytes, activation_bytes, weight_bytes=612 * MiB)
    return Chain("transformer", [embedding, *blocks, Stage("loss", 0.0, 0.0, 0, 0)])


@functools.cache
def tiny_problem(seed: int, num_stages: int, *, optimizer: bool) -> TinyProblem:
    """A random chain with a budget that is mostly tight."""
    chain, pick = (
        random_weight_chain(seed, num_stages=num_stages, optimizer=optimizer, zeros=seed % 2 == 0),
        random.Random(seed),
    )
    period = period_of(chain)
    spare = max(0, period.most_bytes - period.least_bytes)
    budget = period.least_bytes + pick.randint(0, spare) * pick.choice((0, 1, 1, 2)) // 4
    return TinyProblem(chain, budget, pick.randint(1, 8), duplex=pick.random() < 0.75)
