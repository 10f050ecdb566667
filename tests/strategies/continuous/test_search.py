from __future__ import annotations

import math
import random

import numpy as np
import pytest
from tests.chains import long_chain, random_chain, random_chains, with_random_seconds
from tests.continuous import best_seconds, schedules

from lowtide import Chain, Schedule, simulate
from lowtide.strategies.continuous import backward
from lowtide.strategies.continuous.bounds import least_rest, rest_of
from lowtide.strategies.continuous.search import ContinuousModel

BANDWIDTHS = (1, 2, 5, 20)


def highest(chain: Chain) -> int:
    ahead, behind, _ = next(schedules(chain, recompute=False))
    return simulate(chain, Schedule("store-all", (*ahead, *behind))).peak_bytes


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_value_is_that_of_an_exhaustive_search(num_stages: int, recompute: bool) -> None:
    rng = random.Random(f"{num_stages} {recompute}")
    for seed, given in enumerate(random_chains(18, num_stages)):
        chain = with_random_seconds(given, seed) if seed % 2 else given
        bandwidth = rng.choice(BANDWIDTHS)
        model = ContinuousModel.of(chain, bandwidth, recompute=recompute)
        budget = rng.randint(model.minimum_bytes, max(model.minimum_bytes, highest(chain)))
        expected = best_seconds(chain, budget, bandwidth, recompute=recompute)
        assert model.plans(budget, 50, 3)[0].seconds == pytest.approx(expected, rel=1e-9), chain.name


def test_rows_filled_in_several_threads_are_those_filled_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ContinuousModel.of(long_chain(20), 10**8, recompute=True)
    tables = []
    for fewest in (1, 100):
        monkeypatch.setattr(backward, "_FEWEST_ROWS", fewest)
        tables.append(backward.blocks_of(model.arrays, model.least_block, 10**9, 1e8, 50, math.inf))
    one, other = tables
    assert np.isfinite(one.seconds).any(axis=(1, 2)).all()
    assert np.array_equal(one.seconds, other.seconds)
    assert np.array_equal(one.late, other.late)


def test_sizes_that_slots_round_change_nothing() -> None:
    rng = random.Random(2)
    for seed in range(10):
        chain, bandwidth = long_chain(4, seed), rng.choice((10**7, 10**8))
        model = ContinuousModel.of(chain, bandwidth, recompute=True)
        budget = rng.randint(model.minimum_bytes, highest(chain))
        assert model.plans(budget, 50, 3)[0].seconds == pytest.approx(best_seconds(chain, budget, bandwidth), rel=1e-9)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_minimum_is_that_of_an_exhaustive_search(recompute: bool) -> None:
    for chain in random_chains(18, 3):
        least = ContinuousModel.of(chain, 2, recompute=recompute).minimum_bytes
        assert best_seconds(chain, least, 2, recompute=recompute) < math.inf
        assert best_seconds(chain, least - 1, 2, recompute=recompute) == math.inf


def test_the_bound_never_exceeds_the_best() -> None:
    rng = random.Random(4)
    for seed, given in enumerate(random_chains(24, 3)):
        chain, bandwidth = with_random_seconds(given, seed), rng.choice(BANDWIDTHS)
        model = ContinuousModel.of(chain, bandwidth, recompute=True)
        budget = rng.randint(model.minimum_bytes, max(model.minimum_bytes, highest(chain)))
        room = budget - chain.fixed_bytes - chain.input_bytes
        bound = least_rest(rest_of(model.bounds, 1), room / bandwidth, 0.0, 0.0)
        assert bound <= best_seconds(chain, budget, bandwidth) * (1 + 1e-9)


def test_a_chain_of_five_with_every_feature() -> None:
    chain = with_random_seconds(random_chain(3, 5, sizes="mixed", features=("large extras", "weight gradients")), 3)
    model = ContinuousModel.of(chain, 3, recompute=True)
    budget = (model.minimum_bytes + highest(chain)) // 2
    assert model.plans(budget, 50, 1)[0].seconds == pytest.approx(best_seconds(chain, budget, 3), rel=1e-9)


def test_more_slots_change_a_long_chain_by_less_than_a_percent() -> None:
    chain = random_chain(1, 24)
    model = ContinuousModel.of(chain, 3, recompute=True)
    budget = (model.minimum_bytes + highest(chain)) // 2
    few, many = (model.plans(budget, slots, 1)[0].seconds for slots in (50, 200))
    assert many <= few * (1 + 1e-9)
    assert few <= 1.01 * many
