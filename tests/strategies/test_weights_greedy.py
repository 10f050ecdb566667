import dataclasses
from pathlib import Path

import pytest
from tests.looping import looped
from tests.strategies.weight_brute_force import fastest_period
from tests.strategies.weight_chains import MiB, equal_chain, random_weight_chain, tiny_problem, transformer_chain

from lowtide import Chain, InfeasibleBudgetError, Offload, Prefetch, Release, Stage, StrategyError, simulate, solve
from lowtide.strategies.weights.choices import choices_of, select_greedily
from lowtide.strategies.weights.periods import cyclic_schedule, period_of, without_vain_copies
from lowtide.strategies.weights.transfers import place

EXAMPLES = Path(__file__).parents[2] / "examples" / "chains"
GREEDY, NODISCOUNT = "weights-greedy", "weights-greedy-nodiscount"


@looped("seed", range(12))
def test_it_works_from_its_minimum_on_and_not_below(seed: int) -> None:
    chain = random_weight_chain(seed, num_stages=1 + seed % 9, optimizer=seed % 3 == 0)
    period = period_of(chain)
    link = {"bandwidth": 1 + seed % 9, "duplex": seed % 5 != 0}
    for strategy in (GREEDY, NODISCOUNT):
        with pytest.raises(InfeasibleBudgetError) as refusal:
            solve(chain, memory_budget=period.least_bytes - 1, strategy=strategy, **link)
        assert refusal.value.minimum_bytes == period.least_bytes
    for share in (0, 1, 3, 8):
        budget = period.least_bytes + max(0, period.most_bytes - period.least_bytes) * share // 8
        found = {name: solve(chain, memory_budget=budget, strategy=name, **link) for name in (GREEDY, NODISCOUNT)}
        for solution in found.values():
            assert solution.peak_bytes <= budget
            assert chain.compute_seconds * (1 - 1e-8) <= solution.lower_bound_seconds <= solution.seconds
        assert found[GREEDY].seconds <= found[NODISCOUNT].seconds * (1 + 1e-9)


@looped("seed", range(40))
def test_the_machine_and_the_simulator_agree(seed: int) -> None:
    chain = random_weight_chain(seed, num_stages=2 + seed % 8, optimizer=seed % 3 == 0)
    period, choices = period_of(chain), choices_of(period_of(chain))
    budget = period.least_bytes + (period.most_bytes - period.least_bytes) * (seed % 4) // 5
    for reserve in (0, 10, 30):
        taken = select_greedily(period, choices, budget - reserve)
        for discount in (True, False) if taken is not None else ():
            link = {"bandwidth": 1 + seed % 5, "duplex": seed % 4 != 0}
            placed = place(period, [choices[i] for i in taken], memory_budget=budget, discount=discount, **link)
            if placed is not None:
                trace = simulate(chain, cyclic_schedule("test", period.num_stages, placed.operations), **link)
                assert trace.seconds == pytest.approx(placed.seconds, rel=1e-6)
                assert trace.peak_bytes <= budget


@looped("seed", range(30))
def test_it_is_not_faster_than_the_fastest_list(seed: int) -> None:
    problem = tiny_problem(seed, 2, optimizer=False)
    link = {"bandwidth": problem.bandwidth, "duplex": problem.duplex}
    best, _ = fastest_period(problem)
    solution = solve(problem.chain, memory_budget=problem.memory_budget, strategy=GREEDY, **link)
    assert best * (1 - 1e-9) <= solution.seconds


@pytest.mark.parametrize("budget", ["8GiB", "12GiB", "16GiB"])
@pytest.mark.parametrize(
    ("compute_ms", "share"), [(47421, 0.01), (23697, 0.01), (11612, 0.02)], ids=["b64", "b32", "b16"]
)
def test_table_1_at_12_gigabytes_a_second(compute_ms: int, share: float, budget: str) -> None:
    chain = transformer_chain(72, compute_ms / 1e3, activation_bytes=20 * MiB)
    solution = solve(chain, memory_budget=budget, strategy=GREEDY, bandwidth=12000 * MiB)
    assert solution.seconds <= (1 + share) * solution.lower_bound_seconds


@pytest.mark.parametrize("gigabytes", [1, 2, 3])
@pytest.mark.parametrize("budget", ["8GiB", "12GiB", "16GiB"])
def test_slow_links_stay_near_the_bound(budget: str, gigabytes: int) -> None:
    chain = transformer_chain(72, 23.697)
    solution = solve(chain, memory_budget=budget, strategy=GREEDY, bandwidth=gigabytes * 1000 * MiB)
    plain = solve(chain, memory_budget=budget, strategy="weights-l2l", bandwidth=gigabytes * 1000 * MiB)
    assert solution.seconds <= 1.2 * solution.lower_bound_seconds
    assert solution.seconds < plain.seconds


def test_without_the_discount_each_fetch_has_a_copy_of_its_own() -> None:
    chain = equal_chain(12)
    period = period_of(chain)
    for strategy, shared in ((GREEDY, True), (NODISCOUNT, False)):
        solution = solve(chain, memory_budget=period.least_bytes + 20, strategy=strategy, bandwidth=1)
        kinds = [type(operation) for operation in solution.schedule.operations]
        assert kinds.count(Prefetch) == kinds.count(Release)
        assert (kinds.count(Offload) < kinds.count(Prefetch)) == shared


def test_what_is_never_released_is_not_copied() -> None:
    computed = list(period_of(equal_chain(3)).computations)
    moved = [Offload("w", 1), computed[0], Offload("w", 2), Release("w", 2), *computed[1:]]
    assert without_vain_copies([Offload("w", 1), *computed]) == computed
    assert without_vain_copies(moved) == moved[1:]
    alexnet = Chain.load(EXAMPLES / "alexnet-b128.json")
    operations = solve(alexnet, memory_budget="1100MiB", strategy=GREEDY, bandwidth="1GB/s").schedule.operations
    released = {operation.value for operation in operations if isinstance(operation, Release)}
    assert all(operation.value in released for operation in operations if isinstance(operation, Offload))


def test_what_fits_is_left_alone() -> None:
    chain = equal_chain(5)
    solution = solve(chain, memory_budget=period_of(chain).most_bytes, strategy=GREEDY, bandwidth=1)
    assert solution.seconds == chain.compute_seconds
    assert not solution.trace.copies
    assert solution.schedule.manages == ("w",)


def test_optimizer_state_moves_where_that_helps() -> None:
    base = equal_chain(6)
    chain = dataclasses.replace(base, stages=[dataclasses.replace(s, optimizer_bytes=20) for s in base.stages])
    solution = solve(chain, memory_budget=period_of(chain).least_bytes, strategy=GREEDY, bandwidth=5)
    assert solution.schedule.manages == ("w", "opt")
    without = 6 * 20 + 10 + 10  # all of it on the device, and one stage's weights and gradients
    assert solution.peak_bytes < without


@pytest.mark.parametrize("strategy", [GREEDY, NODISCOUNT])
def test_what_the_last_backward_used_is_gone_before_the_next_round_brings_its_gradient(strategy: str) -> None:
    stages = [Stage("s1", 1.0, 1.0, 0, 0, optimizer_bytes=10), Stage("s2", 1.0, 1.0, 0, 0, grad_bytes=10)]
    solution = solve(Chain("large gradient", stages), memory_budget=10, strategy=strategy, bandwidth=1)
    assert solution.peak_bytes == 10


def test_accumulated_gradients_are_refused() -> None:
    chain = dataclasses.replace(equal_chain(2), grads_resident=True)
    with pytest.raises(StrategyError, match="grads_resident"):
        solve(chain, memory_budget=10**6, strategy=GREEDY, bandwidth=1)
