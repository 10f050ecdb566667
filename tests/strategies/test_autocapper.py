from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.chains import long_chain, random_chains
from tests.search import nested_schedules

from lowtide import Backward, Chain, Forward, InfeasibleBudgetError, Stage, simulate, solve
from lowtide.strategies.autocapper import capped
from lowtide.strategies.copies.gaps import Profile


def minimum(chain: Chain, strategy: str, bandwidth: int) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy=strategy, bandwidth=bandwidth)
    return refused.value.minimum_bytes


def test_what_is_moved_first_is_the_lowest_index_at_the_peak() -> None:
    chain = Chain("even", tuple(Stage(str(k), 1.0, 1.0, 8, 8) for k in range(6)), input_bytes=8)
    order = [*(Forward(k, "all") for k in range(1, 7)), *(Backward(k) for k in range(6, 0, -1))]
    profile = Profile(chain, order)
    values = [[profile.gaps[index].value for index in capped(profile, high) or []] for high in (56, 55, 48, 40)]
    plain = profile.need_bytes(())
    chosen = [profile.gaps[index].value for index in capped(profile, plain - 1) or []]
    assert chosen == [("a", 0)]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(values))


def test_capping_fails_only_where_everything_is_away_already() -> None:
    for chain in random_chains(30, 4):
        for order in list(nested_schedules(chain, 1, 4))[::7]:
            profile = Profile(chain, order)
            least = profile.need_bytes()
            moved = capped(profile, least)
            assert moved is not None
            assert profile.need_bytes(moved) <= least
            assert capped(profile, least - 1) is None
            assert np.all(profile.peak_bytes >= 0)


def test_it_goes_as_low_as_rotor_and_as_offloading() -> None:
    for chain in random_chains(18, 5):
        if solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes == 0:
            continue
        own = minimum(chain, "autocapper", 3)
        assert own <= minimum(chain, "offload", 3)
        if not any(stage.variants for stage in chain.stages):
            assert own <= minimum(chain, "rotor", 3)


@pytest.mark.parametrize("duplex", [True, False])
def test_every_budget_from_the_least_on_is_kept_and_rotor_is_never_faster(duplex: bool) -> None:
    for chain in (*random_chains(8, 6), long_chain(14)):
        scale = 10**6 if chain.input_bytes >= 10**6 else 1
        high = solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes
        for bandwidth in (scale, 20 * scale):
            least = minimum(chain, "autocapper", bandwidth) if high else 0
            for budget in {least, (least + high) // 2, max(least, high)}:
                solution = solve(chain, memory_budget=budget, strategy="autocapper", bandwidth=bandwidth, duplex=duplex)
                trace = simulate(chain, solution.schedule, bandwidth=bandwidth, duplex=duplex)
                assert trace.peak_bytes <= budget
                if not any(stage.variants for stage in chain.stages) and budget >= minimum(chain, "rotor", bandwidth):
                    rotor = solve(chain, memory_budget=budget, strategy="rotor").seconds
                    assert solution.seconds <= rotor * (1 + 1e-9)
