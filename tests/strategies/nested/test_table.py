"""Both ways to know the least times, staircases and rows of slots, beside a plain recursion."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.chains import NESTED_FEATURES, long_chain, random_chain, random_chains, with_random_seconds
from tests.search import Nested

from lowtide import Chain, Schedule, simulate
from lowtide.strategies.nested import fill as nested_fill
from lowtide.strategies.nested import stairs as nested_stairs
from lowtide.strategies.nested import table as nested_table
from lowtide.strategies.nested.costs import Costs, costs_of, operations_of, outside_bytes
from lowtide.strategies.nested.rows import BLOCK
from lowtide.strategies.nested.table import Table, least_memory
from lowtide.strategies.slots import Slots


def table_of(costs: Costs, available_bytes: int, *, slots: int = 10**6, try_exact: bool = False) -> Table:
    return Table.of(costs, least_memory(costs), available_bytes, slots, try_exact=try_exact)


def limits(chain: Chain, costs: Costs) -> tuple[int, int]:
    """The least and the ample budget."""
    least = least_memory(costs)
    n = chain.num_stages
    return outside_bytes(chain) + int(least.least_bytes[1, n]), outside_bytes(chain) + int(least.ample_bytes[1, n])


def check(table: Table, chain: Chain, budget: int) -> float:
    """The simulated time of what is read off for a budget, which it stays within."""
    decisions, slower = table.decisions(budget - outside_bytes(chain))
    trace = simulate(chain, Schedule("", operations_of(table.costs, decisions)))
    assert trace.peak_bytes <= budget
    assert trace.seconds == pytest.approx(table.costs.fastest_seconds + slower, rel=1e-12, abs=1e-12)
    return trace.seconds


@pytest.mark.parametrize("saves_ahead", [True, False], ids=["rotor", "revolve"])
@pytest.mark.parametrize("try_exact", [True, False], ids=["stairs", "rows"])
@pytest.mark.parametrize("num_stages", [1, 3, 8, 9, 20])
def test_one_table_answers_every_budget_below(num_stages: int, try_exact: bool, saves_ahead: bool) -> None:
    """Long enough for several tiles of rows and several blocks of slots, one byte each."""
    for chain in random_chains(18, num_stages, features=NESTED_FEATURES)[num_stages % 4 :: 4]:
        uneven = with_random_seconds(chain, seed=num_stages)
        costs = costs_of(uneven, saves_ahead=saves_ahead, variants=saves_ahead)
        least, ample = limits(uneven, costs)
        reference = Nested(uneven, saves_ahead=saves_ahead, variants=saves_ahead)
        table = table_of(costs, ample - 1 - outside_bytes(uneven), try_exact=try_exact) if ample > least else None
        for budget in range(least, ample, max(1, (ample - least) // 12)):
            assert check(table, uneven, budget) == pytest.approx(reference.seconds(budget), rel=1e-12)
        assert reference.seconds(least - 1) == float("inf")
        assert check(table_of(costs, 2**50), uneven, ample) == pytest.approx(reference.seconds(ample), rel=1e-12)


def test_stairs_are_where_the_time_falls() -> None:
    for chain in random_chains(18, 7, features=NESTED_FEATURES):
        costs = costs_of(chain)
        least, ample = limits(chain, costs)
        if least == ample:
            continue
        outside, reference = outside_bytes(chain), Nested(chain)
        steps = table_of(costs, ample - 1 - outside, try_exact=True).steps
        falls = [b for b in range(least, ample) if reference.seconds(b) < reference.seconds(b - 1)]
        assert (steps + outside).tolist() == falls
        assert table_of(costs, ample - 1 - outside, try_exact=False).steps is None


@pytest.mark.parametrize("slots", [1, 7, BLOCK, 100])
def test_few_slots_lose_time_but_never_the_budget(slots: int) -> None:
    for seed in range(5):
        chain = long_chain(22, seed)
        costs = costs_of(chain)
        least, ample = limits(chain, costs)
        outside = outside_bytes(chain)
        for budget in np.linspace(least, ample - 1, 9).astype(int).tolist():
            coarse = table_of(costs, budget - outside, slots=slots)
            assert coarse.slots is not None
            assert coarse.slots.num_slots <= slots
            exact = table_of(costs, budget - outside, try_exact=True)
            assert exact.is_exact
            assert check(coarse, chain, budget) >= check(exact, chain, budget) * (1 - 1e-12)


def test_between_slots_little_is_lost() -> None:
    ratios = []
    for seed in range(6):
        chain = long_chain(30, seed)
        costs = costs_of(chain)
        least, ample = limits(chain, costs)
        outside = outside_bytes(chain)
        for budget in np.linspace(least, ample - 1, 12).astype(int).tolist():
            coarse = check(table_of(costs, budget - outside, slots=200), chain, budget)
            ratios.append(coarse / check(table_of(costs, budget - outside, try_exact=True), chain, budget))
    assert np.mean(ratios) < 1.002
    assert max(ratios) < 1.05  # at the least budgets one step is as much


def test_a_part_of_the_chain_can_be_read_off() -> None:
    for chain in random_chains(12, 6, features=NESTED_FEATURES):
        costs = costs_of(chain)
        least = least_memory(costs)
        table = table_of(costs, int(least.ample_bytes[1, 6]) + 50, try_exact=True)
        small = table_of(costs, int(least.ample_bytes[1, 6]) - 1, try_exact=True)
        reference = Nested(chain)
        for s, t in ((1, 4), (2, 5), (3, 6)):
            available = int(least.ample_bytes[s, t])
            decisions, slower = table.decisions(available, (s, t))
            assert slower == 0.0
            operations = operations_of(costs, decisions, (s, t))
            assert {operation.stage for operation in operations} == set(range(s, t + 1))
            tight = int(least.least_bytes[s, t])
            if tight <= int(least.ample_bytes[1, 6]) - 1 - int(costs.activation[s - 1]):
                best = sum(
                    min(
                        (way.rerun_seconds if k == t < 6 else way.forward_seconds) + way.backward_seconds
                        for way in (chain.stage(k), *chain.stage(k).variants)
                    )
                    for k in range(s, t + 1)
                )
                found = small.decisions(tight, (s, t))[1]
                assert best + found == pytest.approx(reference.seconds_of(s, t, tight))


def test_what_would_take_too_long_or_too_much_is_done_with_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = long_chain(24)
    costs = costs_of(chain)
    least, ample = limits(chain, costs)
    budget = (least + ample) // 2
    available = budget - outside_bytes(chain)
    assert table_of(costs, available, try_exact=True).slots is None
    exact = check(table_of(costs, available, try_exact=True), chain, budget)
    with monkeypatch.context() as patch:
        patch.setattr(nested_stairs, "_MOST_STEPS", 1000)
        assert table_of(costs, available, slots=300, try_exact=True).slots.num_slots in (299, 300)
    for few in (64, 64 * 24):
        with monkeypatch.context() as patch:
            patch.setattr(nested_stairs, "_MOST_STAIRS", few)
            assert table_of(costs, available, slots=300, try_exact=True).slots.num_slots in (299, 300)
    monkeypatch.setattr(nested_fill, "_LARGEST_BYTES", 2**19)
    smaller = table_of(costs, available, slots=4000)
    assert smaller.slots.num_slots < 1000
    assert check(smaller, chain, budget) >= exact * (1 - 1e-12)


@pytest.mark.parametrize("num_stages", [6, 12])
def test_what_does_not_fit_stays_infinite_in_the_rows(num_stages: int) -> None:
    """Also where it is the forwards before a split that do not fit, and not what comes after them."""
    for seed in range(30):
        chain = random_chain(seed, num_stages, sizes="equal", features=("large extras", "variants"))
        costs = costs_of(chain)
        _, ample = limits(chain, costs)
        rows = nested_fill.fill_rows(costs, least_memory(costs), Slots(1, ample - outside_bytes(chain)))
        assert rows is not None
        for s, t in itertools.combinations_with_replacement(range(1, num_stages + 1), 2):
            origin, lowest = rows.origin[s, t], rows.lowest[s, t]
            if lowest < rows.highest[s, t]:
                assert np.isinf(rows.values[origin + lowest // BLOCK * BLOCK : origin + lowest]).all()


@pytest.mark.parametrize("chain", random_chains(8, 6, features=NESTED_FEATURES), ids=lambda chain: chain.name)
def test_a_shared_table_answers_as_one_of_its_own(chain: Chain) -> None:
    costs, known = costs_of(chain), dict[object, object]()
    least, (lowest, ample) = least_memory(costs), limits(chain, costs)
    for share in (0.3, 0.2, 0.6, 0.5, 0.0, 0.9, 1.0):
        budget = lowest + int(share * (ample - lowest))
        available = budget - outside_bytes(chain)
        shared = Table.shared(known, costs, least, available)
        own = Table.of(costs, least, available, 10**6)
        assert check(shared, chain, budget) == pytest.approx(check(own, chain, budget), rel=1e-12)


@pytest.mark.parametrize("saves_ahead", [True, False], ids=["rotor", "revolve"])
@pytest.mark.parametrize("num_stages", [1, 6, 20])
def test_a_table_of_one_budget_answers_as_one_of_many(num_stages: int, saves_ahead: bool) -> None:
    for chain in random_chains(18, num_stages, features=(*NESTED_FEATURES, "side values")):
        costs = costs_of(with_random_seconds(chain, seed=num_stages), saves_ahead=saves_ahead)
        least, (lowest, ample) = least_memory(costs), limits(chain, costs)
        for share in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
            available = lowest + int(share * (ample - lowest)) - outside_bytes(chain)
            tables = [Table.of_one_budget(costs, least, available), Table.of(costs, least, available, 10**6)]
            slower, expected = (table.decisions(available)[1] for table in tables)
            assert slower == pytest.approx(expected, rel=1e-12)


def test_a_table_of_one_budget_leaves_out_what_takes_longer() -> None:
    chain = long_chain(40, 0)
    costs = costs_of(chain)
    least, (lowest, ample) = least_memory(costs), limits(chain, costs)
    available = (lowest + ample) // 2 - outside_bytes(chain)
    one, many = Table.of_one_budget(costs, least, available), Table.of(costs, least, available, 10**6)
    assert one.steps is not None
    assert many.steps is not None
    assert 0 < 4 * len(one.steps) < len(many.steps)


def test_exact_times_are_worked_out_twice_at_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, made = random_chain(0, 8, sizes="heavy-tailed"), list[int]()
    costs, known = costs_of(chain), dict[object, object]()
    least, (lowest, ample) = least_memory(costs), limits(chain, costs)
    stairs_of = nested_table.stairs_of
    monkeypatch.setattr(nested_table, "stairs_of", lambda *given: made.append(given[1]) or stairs_of(*given))
    tables = [Table.shared(known, costs, least, b - outside_bytes(chain)) for b in range(lowest, ample)]
    assert made == [lowest - outside_bytes(chain), ample - 1 - outside_bytes(chain)]
    assert Table.shared(known, costs_of(chain), least, lowest - outside_bytes(chain)) is tables[-1]
    other = with_random_seconds(chain, 1)
    assert Table.shared(known, costs_of(other), least, lowest - outside_bytes(chain)) is not tables[-1]


def test_slots_are_cut_for_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_table, "stairs_of", lambda *_: None)
    chain, known = random_chain(0, 8, sizes="heavy-tailed"), dict[object, object]()
    costs = costs_of(chain)
    least, (lowest, ample) = least_memory(costs), limits(chain, costs)
    for budget in (lowest, ample - 1, (lowest + ample) // 2):
        shared = Table.shared(known, costs, least, budget - outside_bytes(chain), 50)
        assert shared.slots == Slots.for_budget(budget - outside_bytes(chain), 50)
