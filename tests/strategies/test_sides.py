"""Side values in strategies: counted to the byte while they are needed, freed right after, moved where that helps."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from tests.chains import NESTED_FEATURES, random_chain
from tests.looping import looped
from tests.search import check_curve, curve, fastest, nested_schedules

from lowtide import (
    Backward,
    Chain,
    Forward,
    InfeasibleBudgetError,
    Offload,
    Prefetch,
    Release,
    Schedule,
    ScheduleError,
    SideValue,
    Stage,
    frontier,
    simulate,
    solve,
)
from lowtide.strategies.continuous.search import ContinuousModel
from lowtide.strategies.copies.gaps import Profile
from lowtide.strategies.sides import freed

# A net that goes down and up again, with a skip connection on each level; it takes the most at its bottom.
STAGES = [
    Stage(str(k), 4.0, 8.0, output_bytes=size, saved_bytes=2 * size, forward_extra_bytes=96 if size == 4 else 0)
    for k, size in enumerate((16, 8, 4, 8, 16))
]
LEVELS = Chain("levels", STAGES, side_values=[SideValue("wide", 64, 1, (5,), 0), SideValue("narrow", 32, 2, (4,), 0)])
BANDWIDTH = 32


def chains(num_stages: int, count: int) -> list[Chain]:
    sizes = ("mixed", "heavy-tailed", "equal")
    features = [("side values",), ("side values", "large extras"), ("side values", "variants", "reruns")]
    return [random_chain(s, num_stages, sizes=sizes[s % 3], features=features[s % 3]) for s in range(count)]


def minimum_bytes(chain: Chain, strategy: str, bandwidth: int | None = None) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy=strategy, bandwidth=bandwidth)
    return refused.value.minimum_bytes


def test_a_side_value_is_freed_after_its_last_use_and_after_each_forward_that_makes_it_in_vain():
    chain = Chain("three", STAGES[:3], side_values=[SideValue("skip", 5, 1, (2, 3))])
    operations = [Forward(1, "keep"), Forward(2, "all"), Forward(3, "all"), Backward(3), Backward(2)]
    operations += [Forward(1, "all"), Backward(1)]
    release = Release("s", 1)
    assert freed(chain, operations) == (*operations[:5], release, operations[5], release, operations[6])
    assert freed(Chain("none", STAGES[:3]), operations) == tuple(operations)


@pytest.mark.parametrize("chain", [*chains(2, 6), *chains(3, 12), *chains(4, 3)], ids=lambda chain: chain.name)
def test_rotor_is_the_fastest_that_keeps_side_values_while_they_are_needed(chain):
    schedules = nested_schedules(chain, 1, chain.num_stages)
    check_curve(chain, "rotor", curve(chain, (freed(chain, operations) for operations in schedules)))


@looped("seed", range(40))
def test_segments_are_the_fastest_number_of_them_that_fits(seed):
    features = ("side values", "outliving", *NESTED_FEATURES[seed % 4 :: 4])
    chain = random_chain(seed, 2 + seed % 6, sizes=("mixed", "heavy-tailed", "equal")[seed % 3], features=features)
    numbers = range(1, chain.num_stages + 1)
    each = [solve(chain, memory_budget=2**60, strategy="segments", segments=number) for number in numbers]
    assert minimum_bytes(chain, "segments") == min(solution.peak_bytes for solution in each)
    for budget in {solution.peak_bytes for solution in each}:
        best = min((one.seconds, one.peak_bytes) for one in each if one.peak_bytes <= budget)
        found = solve(chain, memory_budget=budget, strategy="segments")
        assert (found.seconds, found.peak_bytes) == best


@pytest.mark.parametrize("chain", chains(3, 20)[9:14], ids=lambda chain: chain.name)
def test_of_three_stages_no_schedule_is_faster_whatever_it_frees_and_makes_again(chain):
    for point in frontier(chain).points:
        best = fastest(chain, point.memory_bytes, persistent=False)
        assert best is not None
        assert best[0] == point.seconds


def test_to_make_a_side_value_again_can_take_less_memory_than_rotor():
    stages = [Stage("f", 1.0, 1.0, 1, 1), *(Stage(n, 1.0, 1.0, 1, 1, forward_extra_bytes=100) for n in "gh")]
    chain = Chain("idle", [*stages, Stage("i", 1.0, 1.0, 1, 1)], side_values=[SideValue("skip", 100, 1, (4,), 0)])
    least = minimum_bytes(chain, "rotor")
    assert least > 200  # the side value stays while stages 2 and 3 run
    better = fastest(chain, least // 2 + 5, persistent=False)
    assert better is not None
    assert Release("s", 1) in better[1]


@pytest.mark.parametrize("chain", chains(3, 6), ids=lambda chain: chain.name)
def test_pofo_is_as_fast_as_any_choice_of_what_moves(chain):
    profiles = [Profile(chain, operations) for operations in nested_schedules(chain, 1, 3)]
    budget = minimum_bytes(chain, "pofo", 3) + 2
    best = float("inf")
    for profile in profiles:
        for choice in itertools.product((False, True), repeat=len(profile.gaps)):
            found = profile.positions(np.array(choice, dtype=np.bool_), budget, 3, True)
            best = min(best, found[0] if found is not None else best)
    assert solve(chain, memory_budget=budget, strategy="pofo", bandwidth=3).seconds <= best


@pytest.mark.parametrize("strategy", ["offload", "pofo"])
def test_skip_connections_wait_on_the_host(strategy):
    least = minimum_bytes(LEVELS, strategy, BANDWIDTH)
    assert least < minimum_bytes(LEVELS, "rotor")
    solution = solve(LEVELS, memory_budget=least, strategy=strategy, bandwidth=BANDWIDTH)
    assert Offload("s", 1) in solution.schedule.operations
    assert solution.peak_bytes <= least


def moves_in(order, gaps):
    """All ways to have a side value away during some of its gaps, as operations before positions of the order."""
    if not gaps:
        yield {}
        return
    (begin, end), *rest = gaps
    for later in moves_in(order, rest):
        yield later
        for gone in range(begin + 1, end + 1):
            for back in range(gone, end + 1):
                moved = {position: list(operations) for position, operations in later.items()}
                moved.setdefault(gone, []).insert(0, Release("s", 1))
                moved.setdefault(back, []).append(Prefetch("s", 1))
                yield moved


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", ["offload", "pofo"])
def test_moving_a_side_value_is_as_fast_as_the_fastest_of_all_ways(strategy, seed):
    """Every time and place to copy, free and fetch one side value, where it is all that can move."""
    rng = random.Random(seed)
    extras = (0, rng.randint(20, 90), rng.randint(20, 90), 10, rng.randint(20, 90))  # large where nothing needs it
    stages = [
        Stage(str(k), rng.randint(1, 9), rng.randint(1, 9), 0, 0, forward_extra_bytes=extras[k]) for k in range(5)
    ]
    chain = Chain("one skip", stages, side_values=[SideValue("skip", 60, 1, (4,), 0)])
    order = [*(Forward(k, "all") for k in range(1, 6)), *(Backward(k) for k in range(5, 0, -1))]
    reads = [0, *(i for i, op in enumerate(order) if op.stage == 4)]
    gaps = [(a, b) for a, b in itertools.pairwise(reads) if b > a + 1]
    for bandwidth in (4, 20):
        found = {}
        for copied in range(1, reads[1] + 1):
            for moved in moves_in(order, gaps):
                moved.setdefault(copied, []).insert(0, Offload("s", 1))
                operations = [op for i, one in enumerate(order) for op in (*moved.get(i, ()), one)]
                try:
                    trace = simulate(chain, Schedule("one way", operations), bandwidth=bandwidth)
                except ScheduleError:
                    continue
                found[trace.peak_bytes] = min(trace.seconds, found.get(trace.peak_bytes, math.inf))
        assert len(found) > 1
        for budget in found:
            best = min(seconds for peak, seconds in found.items() if peak <= budget)
            solution = solve(chain, memory_budget=budget, strategy=strategy, bandwidth=bandwidth)
            assert solution.seconds <= best + 1e-9


@looped("seed", range(30))
def test_pofo_reads_off_what_its_search_says_to_fit(seed):
    chain = random_chain(seed, 3 + seed // 5 % 2, features=("side values", "freed early", "large extras"))
    model = ContinuousModel.of(chain, 3, recompute=True)
    assert Profile(chain, model.least_order()).need_bytes(None) <= model.minimum_bytes
    least = minimum_bytes(chain, "pofo", 3)
    assert least <= model.minimum_bytes
    assert solve(chain, memory_budget=least, strategy="pofo", bandwidth=3).peak_bytes <= least


def test_what_blocks_make_and_read_themselves_is_recomputed_with_them_as_if_each_were_one_stage():
    fine = [Stage(f"{block}.{part}", 1.0, 1.0, 4, 4) for block in range(4) for part in range(3)]
    within = [SideValue(f"residual {block}", 10, 3 * block + 1, (3 * block + 3,), 0) for block in range(4)]
    whole = [Stage(str(block), 3.0, 3.0, 4, 22, forward_extra_bytes=14, saving_extra_bytes=0) for block in range(4)]
    cut, blocks = Chain("cut", fine, side_values=within), Chain("blocks", whole)
    for point in frontier(blocks).points:
        assert solve(cut, memory_budget=point.memory_bytes, strategy="rotor").seconds <= point.seconds


@looped("seed", range(12))
def test_side_values_that_are_held_count_in_first_forwards_although_they_are_freed(seed):
    chain = random_chain(seed, 3 + seed % 4, features=("side values", "freed early", "variants"))
    held = (replace(side, held_until=min(max(side.readers) + 1, chain.num_stages)) for side in chain.side_values)
    chain = replace(chain, side_values=tuple(held))
    for strategy, bandwidth in (("rotor", None), ("pofo", 3), ("offload", 3), ("autocapper", 3), ("segments", None)):
        least = minimum_bytes(chain, strategy, bandwidth)
        assert solve(chain, memory_budget=least, strategy=strategy, bandwidth=bandwidth).peak_bytes <= least
