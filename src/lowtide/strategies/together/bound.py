"""A lower bound on every round that trains within a budget, whatever it recomputes and moves.

Every stage runs forward and backward at least once and is updated once; what its backwards need has to stay, to move or
to be recomputed, as in pofo's bound for a device that holds nothing but activations. At any moment of a
round, what is not on the device is on the host, and comes back before the same moment of the next round: weights for
their forward, optimizer state and weight gradients for their update. So the link brings at least those bytes a round.
If all updates come after the last backward, it brings what is on the host then in the time of the updates alone, while
no forward and no backward runs.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.strategies.base import Problem
from lowtide.strategies.continuous.search import ContinuousModel
from lowtide.strategies.together.order import updated_stages, without_weights


def least_seconds(problem: Problem, *, step_in_backward: bool) -> float:
    """No round within the budget is shorter."""
    chain, updated = problem.chain, updated_stages(problem.chain)
    bare = replace(without_weights(chain), side_values=())
    bare = replace(bare, stages=tuple(replace(stage, outliving=()) for stage in bare.stages))
    model = ContinuousModel.of(bare, problem.bandwidth, recompute=True)
    passes = model.bound_seconds(problem.memory_budget)
    updates = sum(chain.stage(k).update_seconds for k in updated)
    gradients = sum(stage.weight_grad_bytes for stage in chain.stages)
    frozen = sum(stage.weight_bytes for k, stage in enumerate(chain.stages, start=1) if k not in updated)
    changed = sum(chain.stage(k).weight_bytes + chain.stage(k).optimizer_bytes for k in updated)
    standing = chain.base_bytes + (gradients if chain.grads_resident else 0)
    away = standing + frozen + changed + _largest_computation(problem) - problem.memory_budget
    arriving = max(0, away)
    leaving = max(0, away - frozen)  # what nothing changes never has to leave again
    link = arriving if problem.duplex else arriving + leaving
    bound = max(passes + updates, link / problem.bandwidth)
    if not step_in_backward:
        made = 0 if chain.grads_resident else gradients
        waiting = standing + changed + made + chain.gradient_bytes(0) - problem.memory_budget
        bound = max(bound, passes + max(updates, max(0, waiting) / problem.bandwidth))
    return bound * (1 - 1e-9)  # sums in another order differ in the last digits


def _largest_computation(problem: Problem) -> int:
    """What some backward has on the device besides weights: what it reads, what it makes, and its extra bytes."""
    chain, largest = problem.chain, 0
    for k, stage in enumerate(chain.stages, start=1):
        ways = [stage.variant(v) for v in range(stage.num_variants)]
        own = min(way.saved_bytes + way.backward_extra_bytes - way.freed_bytes for way in ways)
        made = chain.gradient_bytes(k - 1) + (0 if chain.grads_resident else stage.weight_grad_bytes)
        largest = max(largest, own + made + chain.activation_bytes(k - 1) + stage.grad_bytes)
    return largest
