"""Hong's two strategies on chains: `selection` and `dynamic-selection`."""

import random
from itertools import combinations, pairwise

import pytest
from tests.looping import looped

from lowtide import Chain, InfeasibleBudgetError, Stage, simulate, solve
from lowtide.strategies.checkpoints import sets as checkpoint_sets
from lowtide.strategies.checkpoints.schedule import checkpoint_schedule
from lowtide.strategies.dynamic_selection import least_peak

NAMES = ("selection", "dynamic-selection")


def random_chain(rng, n, *, plain=False):
    """A chain of n stages; a plain one has no extras, no weights, and saves nothing but outputs."""
    top = rng.choice((1, 3, 20, 1000))

    def size(share=1.0):
        return rng.randint(0, top) if not plain and rng.random() < share else 0

    stages = []
    for k in range(n):
        output = rng.randint(0, top)
        stages.append(
            Stage(
                f"s{k}",
                rng.random(),
                rng.random(),
                output_bytes=output,
                saved_bytes=output + size(0.7),
                grad_bytes=output if plain or rng.random() < 0.5 else rng.randint(0, top),
                forward_extra_bytes=(extra := size(0.4)),
                backward_extra_bytes=size(0.4),
                weight_bytes=size(0.4),
                weight_grad_bytes=size(0.4),
                optimizer_bytes=size(0.2),
                saving_extra_bytes=rng.randint(0, extra) if extra else 0,
            )
        )
    resident = not plain and rng.random() < 0.2
    return Chain("random", stages, input_bytes=rng.randint(0, top), input_grad_bytes=size(0.3), grads_resident=resident)


def peak_by_hand(chain, checkpoints):
    """The peak of the schedule that saves nothing but checkpoints, written out operation by operation."""
    n = chain.num_stages
    operations = []
    for h, i in pairwise(checkpoints):
        for k in range(h + 1, i + 1):
            operations.append(["forward", k, "all" if i == n else "keep" if k == h + 1 else "drop"])
    for h, i in reversed(list(pairwise(checkpoints))):
        if i < n:
            operations += [["forward", k, "all"] for k in range(h + 1, i + 1)]
        operations += [["backward", k] for k in range(i, h, -1)]
    schedule = {"format": "lowtide.schedule/1", "strategy": "by hand", "operations": operations}
    return simulate(chain, schedule).peak_bytes


def all_sets(n):
    return [[0, *inner, n] for count in range(n) for inner in combinations(range(1, n), count)]


@looped("seed", range(4))
def test_dynamic_selection_has_the_least_peak_of_all_checkpoint_sets(seed):
    rng = random.Random(seed)
    for _ in range(40):
        chain = random_chain(rng, rng.randint(1, 6))
        peaks = [
            simulate(chain, checkpoint_schedule("x", chain, chosen)).peak_bytes for chosen in all_sets(chain.num_stages)
        ]
        least, chosen = least_peak(chain)
        assert least == min(peaks)
        assert simulate(chain, checkpoint_schedule("x", chain, chosen)).peak_bytes == least
        assert least <= min(peak_by_hand(chain, other) for other in all_sets(chain.num_stages))


@looped("seed", range(3))
def test_saving_a_single_stage_at_once_takes_no_more_memory_or_time(seed):
    rng = random.Random(seed)
    for _ in range(40):
        chain = random_chain(rng, rng.randint(1, 6))
        for chosen in all_sets(chain.num_stages):
            trace = simulate(chain, checkpoint_schedule("x", chain, chosen))
            assert trace.peak_bytes <= peak_by_hand(chain, chosen)
            assert trace.seconds <= 2 * chain.compute_seconds


@pytest.mark.parametrize("name", NAMES)
@looped("seed", range(4))
def test_the_least_budget_is_exact_and_more_changes_nothing(name, seed):
    rng = random.Random(seed)
    for _ in range(30):
        chain = random_chain(rng, rng.randint(1, 12))
        solution = solve(chain, memory_budget=10**9, strategy=name)
        least = solution.peak_bytes
        assert solve(chain, memory_budget=least, strategy=name).schedule == solution.schedule
        if least:
            with pytest.raises(InfeasibleBudgetError) as refusal:
                solve(chain, memory_budget=least - 1, strategy=name)
            assert refusal.value.minimum_bytes == least


@looped("seed", range(4))
def test_selection_keeps_a_set_that_is_optimal_for_equation_6(seed):
    rng = random.Random(seed)
    for _ in range(30):
        chain = random_chain(rng, rng.randint(1, 8), plain=True)
        n = chain.num_stages
        sizes = [chain.activation_bytes(k) for k in range(n + 1)]
        schedule = solve(chain, memory_budget=10**9, strategy="selection").schedule

        def cost(chosen, sizes=sizes):
            return sum(sizes[k] for k in chosen) + max(sum(sizes[h + 1 : i]) for h, i in pairwise(chosen))

        candidates = [chosen for chosen in all_sets(n) if checkpoint_schedule("selection", chain, chosen) == schedule]
        assert min(map(cost, candidates)) == min(map(cost, all_sets(n)))


def test_long_chains_are_compiled_and_agree(monkeypatch):
    chain = random_chain(random.Random(1), 60)
    interpreted = least_peak(chain)
    monkeypatch.setattr(checkpoint_sets, "_LARGEST_NUM_INTERPRETED_STEPS", 0)
    assert least_peak(chain) == interpreted
