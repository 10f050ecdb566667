"""Weights, gradients, optimizer state and activations together."""

from __future__ import annotations

import random

import pytest
from tests.accountant import account
from tests.chains import SIZES, random_chain
from tests.strategies.joint_brute_force import fastest_round

from lowtide import (
    Backward,
    Chain,
    InfeasibleBudgetError,
    Prefetch,
    Release,
    Solution,
    Stage,
    StrategyError,
    Update,
    simulate,
    solve,
)

BANDWIDTH = 3


def joint(chain: Chain, budget: int, *, bandwidth: int = BANDWIDTH, step_in_backward: bool = False) -> Solution:
    return solve(chain, memory_budget=budget, strategy="joint", bandwidth=bandwidth, step_in_backward=step_in_backward)


def minimum_bytes(chain: Chain, *, bandwidth: int = BANDWIDTH, step_in_backward: bool = False) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        joint(chain, 0, bandwidth=bandwidth, step_in_backward=step_in_backward)
    return refused.value.minimum_bytes


def tiny_chain(seed: int) -> Chain:
    """Two stages without activations, with weights, gradients or optimizer state."""
    rng = random.Random(seed)
    kind = ("weight_bytes", "weight_grad_bytes", "optimizer_bytes")[seed % 3]
    stages = [
        Stage(
            str(k),
            rng.randint(1, 3),
            rng.randint(1, 3),
            0,
            0,
            **{"weight_grad_bytes": 0, kind: rng.randint(1, 4)},
            update_seconds=rng.randint(0, 2),
        )
        for k in range(2)
    ]
    return Chain(f"tiny {seed}", stages, base_bytes=1)


@pytest.mark.parametrize("step_in_backward", [False, True])
@pytest.mark.parametrize("seed", range(3, 9))
def test_on_tiny_chains_no_list_of_copies_is_faster_and_none_needs_less(seed, step_in_backward):
    chain, form = tiny_chain(seed), {"step_in_backward": step_in_backward}
    least = minimum_bytes(chain, bandwidth=2, **form)
    state = sum(stage.weight_bytes + stage.weight_grad_bytes + stage.optimizer_bytes for stage in chain.stages)
    for budget in sorted({least, max(least, state), 1 + state}):
        best, schedule = fastest_round(chain, budget, 2, **form)
        assert simulate(chain, schedule, bandwidth=2).seconds == pytest.approx(best)
        found = joint(chain, budget, bandwidth=2, **form)
        assert found.seconds == pytest.approx(best)
        assert found.lower_bound_seconds <= best
    assert fastest_round(chain, least - 1, 2, **form)[1] is None


def some_chain(seed: int) -> Chain:
    rng = random.Random(seed)
    features = rng.sample(["side values", "base", "large extras", "variants", "reruns", "grads resident"], seed % 3)
    features = ("weight gradients", "updates", *features)
    return random_chain(seed, rng.randint(2, 6), sizes=rng.choice(list(SIZES)), features=features)


def seconds_alone(chain: Chain, budget: int, strategy: str) -> float:
    """The time of another strategy with the optimizer steps added, infinite where it does not fit."""
    try:
        alone = solve(chain, memory_budget=budget, strategy=strategy, bandwidth=BANDWIDTH).seconds
    except InfeasibleBudgetError:
        return float("inf")
    return alone + sum(stage.update_seconds for stage in chain.stages)


@pytest.mark.parametrize("step_in_backward", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_it_keeps_the_budget_and_is_never_slower_than_activations_alone_or_weights_alone(seed, step_in_backward):
    chain = some_chain(seed)
    least = minimum_bytes(chain, step_in_backward=step_in_backward)
    plain = solve(chain, memory_budget=2**50, strategy="store-all").peak_bytes
    for budget in sorted({least, least + 3, (least + plain) // 2, max(least, plain)}):
        solution = joint(chain, budget, step_in_backward=step_in_backward)
        assert solution.peak_bytes <= budget
        assert solution.lower_bound_seconds <= solution.seconds
        seconds, peak_bytes, _ = account(chain.to_dict(), solution.schedule.to_dict(), BANDWIDTH)
        assert (seconds, peak_bytes) == (pytest.approx(solution.seconds), solution.peak_bytes)
        others = ["rotor", "pofo"]
        if step_in_backward and not chain.grads_resident:
            others.append("weights-greedy")
        alone = min(seconds_alone(chain, budget, strategy) for strategy in others)
        assert solution.seconds <= alone * (1 + 1e-9)
    with pytest.raises(InfeasibleBudgetError):
        joint(chain, least - 1, step_in_backward=step_in_backward)


def test_it_works_far_below_what_weights_alone_take():
    stages = [
        Stage(str(k), 1.0, 2.0, 4, 20, weight_bytes=100, optimizer_bytes=200, update_seconds=0.1) for k in range(8)
    ]
    chain = Chain("heavy", stages)
    resident = solve(chain, memory_budget=2**50, strategy="store-all").peak_bytes
    assert resident > 8 * 400
    budget = 1000
    after, between = (joint(chain, budget, bandwidth=400, step_in_backward=form) for form in (False, True))
    for solution in (after, between):
        moved = {op.kind for op in solution.schedule.operations if isinstance(op, Release)}
        assert {"w", "opt"} <= moved
        assert any(op.kind == "w" for op in solution.schedule.operations if isinstance(op, Prefetch))
    operations = after.schedule.operations
    last = operations.index(Backward(1))
    assert all(operations.index(Update(k)) > last for k in range(1, 9))
    steps = [op for op in between.schedule.operations if isinstance(op, Backward | Update)]
    assert steps == [each for k in range(8, 0, -1) for each in (Backward(k), Update(k))]
    assert between.seconds <= after.seconds
    assert after.details["gap_to_bound"] == pytest.approx(after.seconds / after.lower_bound_seconds - 1)


@pytest.mark.parametrize("step_in_backward", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_activations_can_be_left_where_they_are(seed, step_in_backward):
    chain = some_chain(seed)
    asked = {"strategy": "joint", "bandwidth": BANDWIDTH, "step_in_backward": step_in_backward}
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, moves_activations=False, **asked)
    least = refused.value.minimum_bytes
    assert least >= minimum_bytes(chain, step_in_backward=step_in_backward)
    for budget in (least, 2 * least):
        solution = solve(chain, memory_budget=budget, moves_activations=False, **asked)
        assert {copy.value[0] for copy in solution.trace.copies} <= {"w", "g", "opt"}
        alone = seconds_alone(chain, budget, "rotor")
        assert solution.seconds <= alone * (1 + 1e-9)


def test_weights_that_nothing_changes_are_never_copied_out():
    frozen = [Stage(str(k), 1.0, 1.0, 1, 2, weight_bytes=50, weight_grad_bytes=0) for k in range(4)]
    chain = Chain("adapted", [*frozen, Stage("head", 1.0, 1.0, 1, 2, weight_bytes=10, optimizer_bytes=20)])
    solution = joint(chain, 120, bandwidth=100)
    assert any(copy.value[0] == "w" for copy in solution.trace.copies)
    assert all(
        copy.direction == "to device" for copy in solution.trace.copies if copy.value[0] == "w" and copy.value[1] < 5
    )


def test_what_it_lacks_and_what_others_lack_is_said():
    chain = some_chain(0)
    with pytest.raises(StrategyError, match="bandwidth"):
        solve(chain, memory_budget=100, strategy="joint")
    with pytest.raises(StrategyError, match="'rotor' has no setting 'step_in_backward'"):
        solve(chain, memory_budget=100, strategy="rotor", step_in_backward=True)
    with pytest.raises(StrategyError, match="setting of the strategy 'joint'"):
        solve(chain, memory_budget=100, bandwidth=3, step_in_backward=True)
    with pytest.raises(StrategyError, match="'pofo' has no setting 'moves_activations'"):
        solve(chain, memory_budget=100, bandwidth=3, strategy="pofo", moves_activations=False)


def test_auto_does_not_offer_it():
    chain = Chain("one", [Stage("f", 1.0, 1.0, 4, 4, weight_bytes=40, optimizer_bytes=80)] * 2)
    solution = solve(chain, memory_budget=2**40, bandwidth=3, manage_weights=True)
    assert not solution.schedule.has_updates
    assert all(candidate.strategy != "joint" for candidate in solution.candidates)
