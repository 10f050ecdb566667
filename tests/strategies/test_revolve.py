"""`revolve` against an exhaustive search of its class."""

from __future__ import annotations

import itertools

import pytest
from tests.chains import NESTED_FEATURES, SIZES, random_chain, random_chains
from tests.search import check_curve, curve, nested_schedules

from lowtide import Backward, Chain, Forward, InfeasibleBudgetError, Stage, solve


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("feature", NESTED_FEATURES)
def test_it_equals_an_exhaustive_search_of_its_class(sizes: str, feature: str) -> None:
    for num_stages in (1, 2, 3, 5):
        chain = random_chain(num_stages, num_stages, sizes=sizes, features=(feature,))
        schedules = nested_schedules(chain, 1, num_stages, saves_ahead=False, variants=False)
        check_curve(chain, "revolve", curve(chain, schedules))


def test_every_backward_follows_the_forward_that_saves_for_it() -> None:
    for chain in random_chains(12, 6, features=NESTED_FEATURES):
        top = solve(chain, memory_budget=2**40, strategy="revolve").peak_bytes
        operations = solve(chain, memory_budget=top, strategy="revolve").schedule.operations
        for before, operation in itertools.pairwise(operations):
            if isinstance(operation, Backward):
                assert before == Forward(operation.stage, "all")
            else:
                assert not isinstance(before, Forward) or before.save != "all"


def test_ample_memory_runs_every_stage_but_the_last_twice() -> None:
    chain = Chain("six", tuple(Stage(str(k), 1, 2, 3, 9) for k in range(6)))
    assert solve(chain, memory_budget=2**20, strategy="revolve").seconds == chain.compute_seconds + 5


def test_it_is_never_faster_than_rotor() -> None:
    for chain in random_chains(30, 7, features=NESTED_FEATURES):
        ample = solve(chain, memory_budget=2**40, strategy="revolve").peak_bytes
        for budget in (ample, ample - ample // 9, ample - ample // 5):
            try:
                seconds = solve(chain, memory_budget=budget, strategy="revolve").seconds
            except InfeasibleBudgetError:
                continue
            assert solve(chain, memory_budget=budget, strategy="rotor").seconds <= seconds
