"""Joining stages: what is joined, what never is, and that the numbers stay the same."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from tests.chains import random_chain

import lowtide
from lowtide.errors import PlanError
from lowtide.runtime.execute.coarse import Coarse, coarsened
from lowtide.runtime.model.split import Split, StageSplit, Unit
from lowtide.schedule import Backward, Forward, Offload, Prefetch, Release, Schedule


def split_of(num_stages: int) -> Split:
    return Split(tuple(StageSplit(f"s{k}", (Unit(f"s{k}"),)) for k in range(1, num_stages + 1)))


def lists(coarse: Coarse) -> list[list[object]]:
    return [operation.to_list() for operation in coarse.operations]


def test_plain_training_is_one_stage():
    operations = [Forward(k, "all") for k in (1, 2, 3)] + [Backward(k) for k in (3, 2, 1)]
    coarse = coarsened(split_of(3), Schedule("store-all", tuple(operations)))
    assert lists(coarse) == [["forward", 1, "all"], ["backward", 1]]
    assert coarse.sizes == (3,)
    assert coarse.split.stages[0].name == "s1 + s2 + s3"


def test_a_segment_is_one_stage():
    operations = [Forward(1, "keep"), Forward(2, "drop"), Forward(3, "drop"), Forward(4, "all"), Forward(5, "all")]
    operations += [Backward(5), Backward(4), Forward(1, "all"), Forward(2, "all"), Forward(3, "all")]
    operations += [Backward(3), Backward(2), Backward(1)]
    coarse = coarsened(split_of(5), Schedule("segments", tuple(operations)))
    assert coarse.sizes == (3, 2)
    assert lists(coarse) == [
        ["forward", 1, "keep"],
        ["forward", 2, "all"],
        ["backward", 2],
        ["forward", 1, "all"],
        ["backward", 1],
    ]


def test_what_is_moved_by_itself_stays_by_itself():
    operations = [Forward(k, "all") for k in (1, 2, 3)]
    operations += [Offload("abar", 2), Release("abar", 2), Forward(4, "all"), Prefetch("abar", 2)]
    operations += [Backward(k) for k in (4, 3, 2, 1)]
    assert coarsened(split_of(4), Schedule("offload", tuple(operations))).sizes == (1, 1, 1, 1)
    operations = [Forward(k, "all") for k in (1, 2)]
    operations += [Offload("a", 2), Forward(3, "keep"), Release("a", 2), Forward(4, "all"), Backward(4)]
    operations += [Prefetch("a", 2), Forward(3, "all"), *(Backward(k) for k in (3, 2, 1))]
    coarse = coarsened(split_of(4), Schedule("offload", tuple(operations)))
    assert coarse.sizes == (2, 1, 1)
    assert ["offload", "a", 1] in lists(coarse)


def test_only_the_reader_of_what_leaves_is_kept_apart():
    operations = [Forward(1, "keep"), Offload("a", 1), *(Forward(k, "all") for k in (2, 3, 4)), Release("a", 1)]
    operations += [Forward(5, "all"), Backward(5), Prefetch("a", 1), *(Backward(k) for k in (4, 3, 2))]
    operations += [Forward(1, "all"), Backward(1)]
    assert coarsened(split_of(5), Schedule("offload", tuple(operations))).sizes == (1, 1, 2, 1)


def test_variants_stay_by_themselves():
    operations = [Forward(1, "all", 1), Forward(2, "all", 1), Backward(2), Backward(1)]
    assert coarsened(split_of(2), Schedule("any", tuple(operations))).sizes == (1, 1)


def test_a_schedule_for_more_stages_is_refused():
    with pytest.raises(PlanError, match="stage 3, but the model has 2"):
        coarsened(split_of(2), Schedule("any", (Forward(3, "all"),)))


@pytest.mark.parametrize("strategy", ["rotor", "segments", "revolve"])
def test_schedules_of_random_chains_stay_legal_and_run_the_same_forwards(strategy):
    num_joined = 0
    for seed, num_stages, share in itertools.product(range(4), (2, 5, 9), (0.9, 0.6, 0.3)):
        chain = random_chain(seed, num_stages)
        budget = int(lowtide.solve(chain, memory_budget="1TiB", strategy="store-all").peak_bytes * share)
        try:
            schedule = lowtide.solve(chain, memory_budget=budget, strategy=strategy).schedule
        except lowtide.InfeasibleBudgetError:
            continue
        coarse = coarsened(split_of(num_stages), schedule)
        num_joined += num_stages - len(coarse.sizes)
        assert Counter(runs_of(coarse)) == Counter(op.stage for op in schedule.operations if isinstance(op, Forward))
        alike = lowtide.Chain("any", tuple(lowtide.Stage(f"s{k}", 1.0, 1.0, 1, 1) for k in coarse.sizes), 1)
        lowtide.simulate(alike, Schedule("any", coarse.operations))  # legal
    assert num_joined or strategy == "revolve"  # which stores one activation at a time


def runs_of(coarse: Coarse) -> list[int]:
    """The schedule's own stages, as often as they run forward."""
    starts = list(itertools.accumulate(coarse.sizes, initial=1))
    forwards = [operation.stage for operation in coarse.operations if isinstance(operation, Forward)]
    return [k for stage in forwards for k in range(starts[stage - 1], starts[stage])]
