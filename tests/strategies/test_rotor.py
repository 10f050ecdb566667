"""`rotor` against exhaustive searches."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from tests.chains import NESTED_FEATURES, SIZES, long_chain, random_chain, random_chains, with_random_seconds
from tests.looping import looped
from tests.search import Nested, check_curve, curve, fastest, nested_schedules

from lowtide import Chain, InfeasibleBudgetError, Schedule, Stage, simulate, solve


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "features", [(), *((feature,) for feature in NESTED_FEATURES)], ids=lambda given: " ".join(given)
)
def test_it_equals_an_exhaustive_search_of_its_class(sizes: str, features: tuple[str, ...]) -> None:
    for num_stages in (1, 2, 3, 4):
        chain = random_chain(num_stages, num_stages, sizes=sizes, features=features)
        check_curve(chain, "rotor", curve(chain, nested_schedules(chain, 1, num_stages)))


@looped("number", range(12))
def test_it_equals_an_exhaustive_search_with_features_mixed(number: int) -> None:
    chain = random_chains(12, 5, features=NESTED_FEATURES)[number]
    if number // 6:  # there are six kinds of sizes
        chain = with_random_seconds(chain, seed=1)
    check_curve(chain, "rotor", curve(chain, nested_schedules(chain, 1, 5)))


@pytest.mark.parametrize("num_stages", [8, 9, 17])  # of one, two and three tiles
def test_it_equals_a_plain_recursion_on_longer_chains(num_stages: int) -> None:
    for chain in random_chains(12, num_stages, features=NESTED_FEATURES)[num_stages % 3 :: 3]:
        uneven = with_random_seconds(chain, seed=num_stages)
        reference = Nested(uneven)
        top = solve(uneven, memory_budget=2**40, strategy="rotor").peak_bytes
        for budget in range(top + 1, 0, -max(1, top // 15)):
            expected = reference.seconds(budget)
            if expected == float("inf"):
                with pytest.raises(InfeasibleBudgetError):
                    solve(uneven, memory_budget=budget, strategy="rotor")
                break
            solution = solve(uneven, memory_budget=budget, strategy="rotor")
            assert solution.seconds == pytest.approx(expected, rel=1e-12)
            assert solution.lower_bound_seconds == pytest.approx(expected, rel=1e-12)
            assert solution.peak_bytes <= budget


def test_plain_recursion_and_listing_agree() -> None:
    for chain in random_chains(18, 4, features=NESTED_FEATURES):
        reference = Nested(chain)
        for peak, seconds in curve(chain, nested_schedules(chain, 1, 4)):
            assert reference.seconds(peak) == seconds


@pytest.mark.parametrize(
    "chain",
    [*random_chains(36, 3, features=NESTED_FEATURES), *random_chains(9, 4, features=NESTED_FEATURES)],
    ids=lambda chain: chain.name,
)
def test_no_persistent_schedule_beats_it(chain: Chain) -> None:
    top = solve(chain, memory_budget=2**60, strategy="rotor").peak_bytes
    least = fastest(chain, top, persistent=True)
    assert least is not None
    for budget in range(top, -1, -max(1, top // 12)):
        found = fastest(chain, budget, persistent=True)
        try:
            seconds = solve(chain, memory_budget=budget, strategy="rotor").seconds
        except InfeasibleBudgetError:
            assert found is None
            continue
        assert found is not None
        assert seconds == found[0]
        trace = simulate(chain, Schedule("exhaustive", found[1]))
        assert trace.seconds == found[0]
        assert trace.peak_bytes <= budget


def figure_2(n: int, k: int) -> Chain:
    """The paper's figure 2: L = n + 2 stages, memory for 8, F^L needs 7 and the stages before it 6."""
    sizes = [0, 1, 2, *[3] * (n - 1), 4]
    stages = []
    for number, (before, output) in enumerate(itertools.pairwise(sizes), start=1):
        needs = 7 if number == n + 2 else 6
        stages.append(
            Stage(
                f"F{number}",
                {1: k, 2: 2}.get(number, 0),
                0,
                output,
                output,
                grad_bytes=0,
                forward_extra_bytes=needs - before - output if number > 2 else 0,
            )
        )
    return Chain("figure 2", tuple(stages), input_bytes=sizes[0])


@pytest.mark.parametrize(("n", "k"), [(3, 1), (4, 1), (5, 2), (6, 2)])
def test_figure_2_of_the_paper_needs_a_schedule_that_is_not_persistent(n: int, k: int) -> None:
    chain = figure_2(n, k)
    persistent = fastest(chain, 8, persistent=True)
    any_kind = fastest(chain, 8, persistent=False)
    assert persistent is not None
    assert any_kind is not None
    assert persistent[0] == min(k + 2 * n, 3 * k + 6)
    assert any_kind[0] == min(k + 2 * n, 2 * k + 6)
    assert solve(chain, memory_budget=8, strategy="rotor").seconds == persistent[0]
    assert simulate(chain, Schedule("any kind", any_kind[1])).peak_bytes <= 8
    if (n, k) == (4, 1):
        assert (any_kind[0], persistent[0]) == (8, 9)


def test_a_persistent_schedule_outside_the_nested_class_can_be_faster() -> None:
    # Stage 1 runs `all` between backward 3 and backward 2: earlier abar[1] is in the way of stage 3, later delta[1] is
    # in the way of stage 1. A nested schedule has to run stage 2 twice.
    chain = Chain(
        "outside",
        (
            Stage("1", 1, 0, output_bytes=0, saved_bytes=5, grad_bytes=3, forward_extra_bytes=4),
            Stage("2", 1, 0, output_bytes=0, saved_bytes=1, grad_bytes=0),
            Stage("3", 1, 0, output_bytes=0, saved_bytes=1, grad_bytes=0, forward_extra_bytes=8),
        ),
    )
    found = fastest(chain, 10, persistent=True)
    assert found is not None
    assert found[0] == 4
    assert solve(chain, memory_budget=10, strategy="rotor").seconds == 5


@pytest.mark.parametrize("num_stages", [1, 2, 4, 5])
def test_megabytes_are_as_exact_as_bytes(num_stages: int) -> None:
    for seed in range(4):
        chain = long_chain(num_stages, seed)
        check_curve(chain, "rotor", curve(chain, nested_schedules(chain, 1, num_stages)))


@pytest.mark.parametrize("slots", [1, 40, 500])
@pytest.mark.parametrize("num_stages", [1, 25, 130])
def test_no_feasible_budget_is_turned_away(num_stages: int, slots: int) -> None:
    chain = long_chain(num_stages)
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=0, strategy="rotor", slots=slots)
    least = refused.value.minimum_bytes
    ample = solve(chain, memory_budget=2**60, strategy="store-all")
    for budget in (least, least + 1, least + 10**6, (least + ample.peak_bytes) // 2, max(least, ample.peak_bytes - 1)):
        solution = solve(chain, memory_budget=budget, strategy="rotor", slots=slots)
        assert solution.peak_bytes <= budget
        assert solution.seconds >= ample.seconds * (1 - 1e-12)
    solution = solve(chain, memory_budget=ample.peak_bytes, strategy="rotor", slots=slots)
    assert solution.seconds == pytest.approx(ample.seconds, rel=1e-12)
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(chain, memory_budget=least - 1, strategy="rotor", slots=slots)
    assert refused.value.minimum_bytes == least


def test_many_slots_are_hardly_faster_than_the_default() -> None:
    chain = long_chain(130)
    plain = solve(chain, memory_budget=2**60, strategy="store-all")
    for share in (0.15, 0.7):
        budget = int(share * plain.peak_bytes)
        default = solve(chain, memory_budget=budget, strategy="rotor")
        fine = solve(chain, memory_budget=budget, strategy="rotor", slots=4000)
        assert default.details["slots"] <= 1000
        assert default.seconds <= 1.003 * fine.seconds


def test_variants_are_chosen_stage_by_stage() -> None:
    own = Stage("own", 2, 2, output_bytes=1, saved_bytes=9)
    chain = Chain("ways", (own, own, own), input_bytes=1)
    frugal = {"name": "frugal", "forward_seconds": 2, "backward_seconds": 3, "saved_bytes": 1}
    values = chain.to_dict()
    for stage in values["stages"]:
        stage["variants"] = [frugal]
    ample = solve(chain, memory_budget=2**20, strategy="rotor").peak_bytes
    for saved, budget in enumerate(range(ample, ample - 24, -8)):
        solution = solve(values, memory_budget=budget, strategy="rotor")
        assert solution.seconds == 12 + saved
        assert solution.peak_bytes <= budget


def test_a_stage_without_bytes_or_seconds_is_a_stage() -> None:
    empty = Stage("empty", 0, 0, 0, 0)
    assert solve(Chain("empty", (empty,) * 4), memory_budget=0, strategy="rotor").seconds == 0


def test_sizes_far_beyond_the_budget_are_no_obstacle() -> None:
    huge = dataclasses.replace(random_chain(0, 4).stages[0], saved_bytes=2**50)
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(Chain("huge", (huge,) * 4), memory_budget=10, strategy="rotor")
    assert refused.value.minimum_bytes > 2**50
    least = refused.value.minimum_bytes
    assert solve(Chain("huge", (huge,) * 4), memory_budget=least, strategy="rotor").peak_bytes == least
