import dataclasses

import pytest
from tests.looping import looped
from tests.strategies.weight_chains import MiB, equal_chain, random_weight_chain, transformer_chain

from lowtide import InfeasibleBudgetError, StrategyError, simulate, solve
from lowtide.strategies.weights.periods import period_of

LARGE = 2**60


@pytest.mark.parametrize(
    ("compute_ms", "printed_ms"), [(47421, 52707), (23697, 28983), (11612, 16898)], ids=["b64", "b32", "b16"]
)
def test_table_1_of_the_weights_paper(compute_ms: int, printed_ms: int) -> None:
    chain = transformer_chain(72, compute_ms / 1e3)
    solution = solve(chain, memory_budget="16GiB", strategy="weights-l2l", bandwidth=12000 * MiB)
    assert solution.seconds * 1e3 == pytest.approx(printed_ms, abs=1e-6)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 9])
@pytest.mark.parametrize("bandwidth", [1, 4, 1000])
def test_equal_weights_wait_for_two_copies_each(num_stages: int, bandwidth: int) -> None:
    chain = equal_chain(num_stages)
    solution = solve(chain, memory_budget=LARGE, strategy="weights-l2l", bandwidth=bandwidth)
    assert solution.seconds == pytest.approx(chain.compute_seconds + 2 * num_stages * 10 / bandwidth)


@looped("seed", range(30))
def test_it_works_from_its_minimum_on_and_not_below(seed: int) -> None:
    chain = random_weight_chain(seed, num_stages=1 + seed % 7, optimizer=seed % 3 == 0)
    period = period_of(chain)
    with pytest.raises(InfeasibleBudgetError) as refusal:
        solve(chain, memory_budget=period.least_bytes - 1, strategy="weights-l2l", bandwidth=3)
    assert refusal.value.minimum_bytes == period.least_bytes
    tight = solve(chain, memory_budget=period.least_bytes, strategy="weights-l2l", bandwidth=3)
    roomy = solve(chain, memory_budget=LARGE, strategy="weights-l2l", bandwidth=3)
    assert tight.peak_bytes == period.least_bytes
    assert chain.compute_seconds <= roomy.seconds <= tight.seconds
    half = solve(chain, memory_budget=LARGE, strategy="weights-l2l", bandwidth=3, duplex=False)
    assert half.seconds >= roomy.seconds


@looped("seed", range(20))
def test_one_stage_at_a_time(seed: int) -> None:
    chain = random_weight_chain(seed, num_stages=5, optimizer=seed % 2 == 0, zeros=False)
    period = period_of(chain)
    solution = solve(chain, memory_budget=period.least_bytes, strategy="weights-l2l", bandwidth=2)
    trace = simulate(chain, solution.schedule, bandwidth=2)
    computed = [step for step in trace.steps if step.operation in period.computations]
    for step, gap, own in zip(computed, period.gap_bytes, _own_bytes(chain), strict=True):
        assert step.stored_before_bytes == gap + own


def _own_bytes(chain):
    forward = [stage.weight_bytes for stage in chain.stages]
    return forward + [stage.weight_bytes + stage.optimizer_bytes for stage in reversed(chain.stages)]


def test_accumulated_gradients_are_refused() -> None:
    chain = dataclasses.replace(equal_chain(2), grads_resident=True)
    with pytest.raises(StrategyError, match="grads_resident"):
        solve(chain, memory_budget=LARGE, strategy="weights-l2l", bandwidth=1)


def test_no_bandwidth_is_refused() -> None:
    with pytest.raises(StrategyError, match="bandwidth"):
        solve(equal_chain(2), memory_budget=LARGE, strategy="weights-l2l")
