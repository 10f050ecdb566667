"""What holds for every strategy in the table, whatever it is."""

from __future__ import annotations

import importlib.util

import pytest
from tests.chains import NESTED_FEATURES, random_chain, random_chains

from lowtide import Chain, InfeasibleBudgetError, LowtideError, Solution, simulate, solve
from lowtide.solve import applicable
from lowtide.strategies.base import REGISTRY, Entry, Problem

BANDWIDTH = 3

HERE = [entry for entry in REGISTRY.values() if importlib.util.find_spec(entry.module)]


def chains_for(entry: Entry) -> list[Chain]:
    chains = [
        *random_chains(12, 3, features=NESTED_FEATURES),
        *random_chains(6, 1, features=NESTED_FEATURES),
        random_chain(0, 9),
        random_chain(1, 14, sizes="rising"),
        *(random_chain(seed, 4, features=("side values", "large extras")) for seed in range(4)),
        *(random_chain(seed, 6, sizes="equal", features=("side values", "variants", "reruns")) for seed in range(3)),
        *(random_chain(seed, 5, features=("outliving", "side values")) for seed in range(3)),
        *(random_chain(seed, 6, features=("outliving", "lean saving", "large extras")) for seed in range(4)),
    ]
    if entry.manages_weights:
        chains += [random_chain(seed, 4, features=("weight gradients", "base")) for seed in range(6)]
        chains += [
            random_chain(seed, 4, features=("weight gradients", "side values", "outliving")) for seed in range(3)
        ]
    return [chain for chain in chains if entry in applicable(chain, BANDWIDTH)]


def bandwidth_for(entry: Entry) -> int | None:
    return BANDWIDTH if entry.moves else None


def minimum_bytes(chain: Chain, entry: Entry) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy=entry.name, bandwidth=bandwidth_for(entry))
    return refused.value.minimum_bytes


def check(solution: Solution, chain: Chain, entry: Entry, budget: int) -> None:
    trace = simulate(chain, solution.schedule, bandwidth=bandwidth_for(entry))
    assert trace.peak_bytes == solution.peak_bytes <= budget
    assert trace.seconds == solution.seconds
    assert solution.strategy == solution.schedule.strategy == entry.name
    if not entry.moves:
        assert solution.seconds >= sum(
            min(stage.variant(v).forward_seconds + stage.variant(v).backward_seconds for v in range(stage.num_variants))
            for stage in chain.stages
        )


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.name)
def test_it_is_legal_within_the_budget_and_its_minimum_is_exact(entry: Entry) -> None:
    for chain in chains_for(entry):
        if simulate_empty(chain) == 0:
            continue  # with nothing to store no budget is too small
        least = minimum_bytes(chain, entry)
        for budget in (least, least + 1, 2 * least):
            solution = solve(chain, memory_budget=budget, strategy=entry.name, bandwidth=bandwidth_for(entry))
            check(solution, chain, entry, budget)
        with pytest.raises(InfeasibleBudgetError) as refused:
            solve(chain, memory_budget=least - 1, strategy=entry.name, bandwidth=bandwidth_for(entry))
        assert refused.value.minimum_bytes == least
        assert isinstance(refused.value, LowtideError)
        assert "\n" not in str(refused.value)


def simulate_empty(chain: Chain) -> int:
    """The peak of plain training, 0 where the chain has no bytes at all."""
    return solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.name)
def test_minimum_bytes_reads_no_budget(entry: Entry) -> None:
    for chain in chains_for(entry)[:6]:
        if simulate_empty(chain) == 0:
            continue
        least = minimum_bytes(chain, entry)
        for budget in (0, least, 10 * least):
            problem = Problem(
                chain,
                budget,
                bandwidth_for(entry) or 0,
                True,
                lambda schedule, chain=chain: simulate(chain, schedule, bandwidth=BANDWIDTH),
            )
            assert entry.make().minimum_bytes(problem) == least


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.name)
def test_the_same_question_has_the_same_answer(entry: Entry) -> None:
    chain = chains_for(entry)[0]
    budget = minimum_bytes(chain, entry) + 5
    one, other = (
        solve(chain, memory_budget=budget, strategy=entry.name, bandwidth=bandwidth_for(entry)) for _ in range(2)
    )
    assert one.schedule == other.schedule


@pytest.mark.parametrize("entry", [entry for entry in HERE if not entry.moves], ids=lambda entry: entry.name)
def test_more_memory_is_never_slower(entry: Entry) -> None:
    for chain in (random_chain(2, 8), random_chain(3, 12, sizes="heavy-tailed", features=("variants", "large extras"))):
        least = minimum_bytes(chain, entry)
        before = float("inf")
        for budget in range(least, max(least, simulate_empty(chain)) + 1):
            seconds = solve(chain, memory_budget=budget, strategy=entry.name).seconds
            assert seconds <= before
            before = seconds
