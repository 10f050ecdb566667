"""What holds for the strategies that move activations, on the example networks, at every kind of budget and link."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide import Chain, InfeasibleBudgetError, Solution, simulate, solve

CHAINS = Path(__file__).parent.parent.parent / "examples" / "chains"
NETWORKS = (
    "alexnet-b128.json",
    "gpt-24x1024-b8.json",
    "resnet50-b64.json",
    "h200/inception_v3-b16-500.json",
    "h200/resnet50-b16-500.json",
)
MOVING = ("offload", "opportunist", "autocapper", "pofo")
BANDWIDTHS = (10**8, 12 * 10**9, 10**11)
HUGE = 10**24  # more than 64 bits hold


@pytest.fixture(params=NETWORKS, ids=lambda name: Path(name).stem)
def chain(request: pytest.FixtureRequest) -> Chain:
    return Chain.load(CHAINS / request.param)


def minimum(chain: Chain, strategy: str, bandwidth: int) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy=strategy, bandwidth=bandwidth)
    return refused.value.minimum_bytes


def plain_bytes(chain: Chain) -> int:
    return solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes


def checked(chain: Chain, strategy: str, budget: int, bandwidth: int) -> Solution:
    """The answer, which is legal, within the budget and takes what it says."""
    solution = solve(chain, memory_budget=budget, strategy=strategy, bandwidth=bandwidth)
    trace = simulate(chain, solution.schedule, bandwidth=bandwidth)
    assert trace.peak_bytes == solution.peak_bytes <= budget
    assert trace.seconds == solution.seconds
    return solution


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_every_budget_is_kept_and_pofo_is_the_fastest_of_the_exact_ones(chain: Chain, bandwidth: int) -> None:
    high = plain_bytes(chain)
    least = {name: minimum(chain, name, bandwidth) for name in (*MOVING, "rotor")}
    low = least["pofo"]
    budgets = [low, low + (high - low) // 4, low + (high - low) * 2 // 3, high]
    for budget in budgets if bandwidth == BANDWIDTHS[1] else budgets[::2]:
        feasible = [name for name in least if budget >= least[name]]
        seconds = {name: checked(chain, name, budget, bandwidth).seconds for name in feasible}
        others = [seconds[name] for name in ("rotor", "offload") if name in seconds]
        assert seconds["pofo"] <= 1.02 * min(others, default=float("inf"))


def test_without_a_link_it_is_rotor(chain: Chain) -> None:
    least = minimum(chain, "rotor", 0)
    assert minimum(chain, "pofo", 0) == least
    assert minimum(chain, "offload", 0) == plain_bytes(chain)
    for budget in (least, (least + plain_bytes(chain)) // 2):
        assert checked(chain, "pofo", budget, 0).seconds == checked(chain, "rotor", budget, 0).seconds


def test_with_an_endless_link_nothing_costs_time(chain: Chain) -> None:
    least = minimum(chain, "offload", HUGE)
    for name in ("offload", "pofo"):
        for budget in (least, (least + plain_bytes(chain)) // 2):
            assert checked(chain, name, budget, HUGE).seconds == pytest.approx(chain.compute_seconds, rel=1e-9)


def test_pofo_goes_as_low_as_any_and_one_byte_less_is_refused(chain: Chain) -> None:
    bandwidth = 12 * 10**9
    least = minimum(chain, "pofo", bandwidth)
    assert least <= min(minimum(chain, name, bandwidth) for name in ("rotor", "offload"))
    checked(chain, "pofo", least, bandwidth)
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=least - 1, strategy="pofo", bandwidth=bandwidth)
    assert refused.value.minimum_bytes == least


def test_some_network_runs_in_less_than_recomputation_needs() -> None:
    chain = Chain.load(CHAINS / "alexnet-b128.json")
    least = minimum(chain, "pofo", 12 * 10**9)
    assert least < minimum(chain, "rotor", 12 * 10**9)
    checked(chain, "pofo", least, 12 * 10**9)
