"""The curve of time against memory is what solving each budget by itself would give."""

import pytest
from tests.chains import long_chain, random_chain, random_chains

import lowtide


@pytest.mark.parametrize("chain", random_chains(30, 5), ids=lambda chain: chain.name)
def test_every_point_is_what_rotor_finds_at_its_budget(chain):
    curve = lowtide.frontier(chain, num_points=400)
    for point in curve.points:
        assert lowtide.simulate(chain, point.schedule).peak_bytes == point.memory_bytes
        alone = lowtide.solve(chain, memory_budget=point.memory_bytes, strategy="rotor")
        assert point.seconds == pytest.approx(alone.seconds)


def test_it_falls_from_the_least_budget_to_plain_training():
    chain = long_chain(30)
    curve = lowtide.frontier(chain)
    store_all = lowtide.solve(chain, memory_budget="1TiB", strategy="store-all")
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.solve(chain, memory_budget=0, strategy="rotor")
    assert curve.minimum_bytes == caught.value.minimum_bytes
    assert curve.points[-1].seconds == pytest.approx(store_all.seconds)
    memory = [point.memory_bytes for point in curve.points]
    seconds = [point.seconds for point in curve.points]
    assert memory == sorted(memory)
    assert seconds == sorted(seconds, reverse=True)
    assert curve.at(store_all.peak_bytes) == curve.points[-1]


def test_below_the_least_budget_it_says_so():
    chain = random_chain(3, 4, sizes="equal")
    curve = lowtide.frontier(chain)
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        curve.at(curve.minimum_bytes - 1)
    assert caught.value.minimum_bytes == curve.minimum_bytes
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.frontier(chain, memory_budget=curve.minimum_bytes - 1)
