from __future__ import annotations

import dataclasses
import random

import pytest
from tests.chains import long_chain, random_chain, random_chains, with_random_seconds

from lowtide import Chain, InfeasibleBudgetError, Solution, Stage, solve

HUGE = 10**18


def seconds(chain: Chain, budget: int, strategy: str, bandwidth: int, **settings: bool) -> float:
    """The simulated time, inf where the budget does not suffice."""
    try:
        return solve(chain, memory_budget=budget, strategy=strategy, bandwidth=bandwidth, **settings).seconds
    except InfeasibleBudgetError:
        return float("inf")


def minimum(chain: Chain, strategy: str, bandwidth: int) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy=strategy, bandwidth=bandwidth)
    return refused.value.minimum_bytes


def budgets(chain: Chain, bandwidth: int, count: int) -> list[int]:
    low = minimum(chain, "pofo", bandwidth)
    high = max(low, solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes)
    return [low + (high - low) * step // (count - 1) for step in range(count)]


@pytest.mark.parametrize("duplex", [True, False])
def test_it_is_no_slower_than_recomputation_or_offloading_alone(duplex: bool) -> None:
    rng = random.Random(1)
    chains = [*random_chains(6, 4), random_chain(5, 12), long_chain(18), with_random_seconds(random_chain(6, 10), 6)]
    for chain in chains:
        scale = 10**6 if chain.input_bytes >= 10**6 else 1
        bandwidth = scale * rng.choice((1, 5, 30))
        for budget in budgets(chain, bandwidth, 4):
            ours = seconds(chain, budget, "pofo", bandwidth, duplex=duplex)
            other = min(seconds(chain, budget, name, bandwidth, duplex=duplex) for name in ("rotor", "offload"))
            assert ours <= other * (1 + 1e-9)


def test_without_a_link_it_is_rotor() -> None:
    for chain in [*random_chains(12, 4), long_chain(15)]:
        least = minimum(chain, "rotor", 0)
        assert minimum(chain, "pofo", 0) == least
        for budget in (least, least + 3, 2 * least):
            assert seconds(chain, budget, "pofo", 0) == seconds(chain, budget, "rotor", 0)


def test_a_huge_bandwidth_makes_everything_free_that_fits_once() -> None:
    for seed in range(6):
        for chain in (random_chain(seed, 4), random_chain(seed, 11, sizes="heavy-tailed"), long_chain(9, seed)):
            least = minimum(chain, "offload", HUGE)
            for name in ("offload", "pofo"):
                assert seconds(chain, least, name, HUGE) == pytest.approx(chain.compute_seconds, rel=1e-9)


def test_a_budget_that_rotor_cannot_meet_is_met() -> None:
    chain = Chain("wide input", tuple(Stage(str(k), 1.0, 2.0, 10, 30) for k in range(6)), input_bytes=100)
    below = minimum(chain, "rotor", 10) - 1
    assert minimum(chain, "pofo", 10) < below
    assert seconds(chain, below, "rotor", 10) == float("inf")
    assert seconds(chain, below, "pofo", 10) < float("inf")


def test_both_figures_are_reported_and_conversion_costs_what_lies_between() -> None:
    costs = []
    for seed in range(6):
        chain = with_random_seconds(random_chain(seed, 10), seed)
        for budget in budgets(chain, 6, 4)[:-1]:
            solution: Solution = solve(chain, memory_budget=budget, strategy="pofo", bandwidth=6)
            assert solution.model_seconds is not None
            assert solution.model_seconds >= chain.compute_seconds * (1 - 1e-9)  # these chains have no variants
            costs.append(solution.seconds / solution.model_seconds - 1)
    assert min(costs) >= -0.05  # below the model only by what it does not know, as copies across the loss
    assert sum(cost < 0.01 for cost in costs) >= 0.6 * len(costs)
    assert max(costs) < 0.2  # with 10 stages one value in flight is much of the memory


@pytest.mark.parametrize("bandwidth", [1, 10**6, HUGE])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_smallest_chains(num_stages: int, bandwidth: int) -> None:
    for chain in random_chains(12, num_stages):
        for name in ("offload", "pofo"):
            if solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes:
                least = minimum(chain, name, bandwidth)
                assert seconds(chain, least, name, bandwidth) < float("inf")


def test_variants_are_chosen() -> None:
    chain = random_chain(4, 8, features=("variants",))
    used = set()
    for budget in budgets(chain, 3, 6):
        schedule = solve(chain, memory_budget=budget, strategy="pofo", bandwidth=3).schedule
        used |= {entry[3] for entry in schedule.to_dict()["operations"] if entry[0] == "forward" and len(entry) > 3}
    assert used


def test_forwards_that_may_end_early_do_not_disturb_the_search() -> None:
    """The continuous model counts them in full; only the simulated time is less."""
    bandwidth = 2 * 10**6
    for seed in (2, 4, 6):
        plain = long_chain(6, seed)
        stages = tuple(dataclasses.replace(stage, rerun_seconds=0.0) for stage in plain.stages)
        chain = dataclasses.replace(plain, stages=stages)
        least = minimum(plain, "pofo", bandwidth)
        assert minimum(chain, "pofo", bandwidth) == least
        for budget in (least, least + 10**5, least + 3 * 10**6):
            ours = solve(chain, memory_budget=budget, bandwidth=bandwidth, strategy="pofo")
            theirs = solve(plain, memory_budget=budget, bandwidth=bandwidth, strategy="pofo")
            assert ours.model_seconds == theirs.model_seconds
            assert ours.seconds <= theirs.seconds
