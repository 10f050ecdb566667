import pytest

from lowtide import Chain, Stage, StrategyError, compare, solve

CHAIN = Chain(
    "six", [Stage(f"s{k}", 1.0, 2.0, output_bytes=10 + k, saved_bytes=40 + k) for k in range(6)], input_bytes=7
)
NAMES = ("store-all", "segments", "chen", "selection", "dynamic-selection")


def test_every_strategy_stands_at_every_budget():
    comparison = compare(CHAIN, strategies=NAMES)
    for budget in comparison.budgets:
        assert tuple(outcome.strategy for outcome in budget.outcomes) == NAMES
        for outcome in budget.outcomes:
            assert outcome.feasible == (budget.memory_budget >= outcome.minimum_bytes)
            if outcome.feasible:
                solution = solve(CHAIN, memory_budget=budget.memory_budget, strategy=outcome.strategy)
                assert (outcome.seconds, outcome.peak_bytes) == (solution.seconds, solution.peak_bytes)


def test_the_budgets_run_from_the_least_feasible_to_store_all():
    comparison = compare(CHAIN, strategies=NAMES)
    budgets = [budget.memory_budget for budget in comparison.budgets]
    assert budgets == sorted(budgets)
    assert budgets[0] == min(outcome.minimum_bytes for outcome in comparison.budgets[0].outcomes)
    assert budgets[-1] == comparison.store_all_bytes
    assert comparison.budgets[0].best is not None
    assert comparison.budgets[-1].best.seconds == comparison.store_all_seconds


def test_the_best_is_what_auto_takes():
    comparison = compare(CHAIN)
    for budget in comparison.budgets:
        chosen = solve(CHAIN, memory_budget=budget.memory_budget)
        assert (budget.best.seconds, budget.best.peak_bytes) == (chosen.seconds, chosen.peak_bytes)


def test_budgets_are_sorted_and_taken_once():
    comparison = compare(CHAIN, memory_budgets=["1kB", 300, 1000], strategies=["store-all"])
    assert [budget.memory_budget for budget in comparison.budgets] == [300, 1000]


@pytest.mark.parametrize("budget", ["1kB", "1000", 1000])
def test_one_budget_and_one_strategy_need_no_list(budget):
    (compared,) = compare(CHAIN, memory_budgets=budget, strategies="store-all").budgets
    assert compared.memory_budget == 1000
    assert [outcome.strategy for outcome in compared.outcomes] == ["store-all"]


def test_nothing_fits():
    (budget,) = compare(CHAIN, memory_budgets=[1], strategies=NAMES).budgets
    assert budget.best is None
    assert not any(outcome.feasible for outcome in budget.outcomes)


def test_progress_rises_to_the_end():
    told = []
    compare(CHAIN, strategies=NAMES, progress=lambda what, share: told.append((what, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] < 1


@pytest.mark.parametrize(("name", "expected"), [("auto", "leave it out"), ("pofo", "bandwidth"), ("rotr", "rotor")])
def test_strategies_that_cannot_be_compared_are_refused(name, expected):
    with pytest.raises(StrategyError, match=expected):
        compare(CHAIN, strategies=[name])
