"""Training under a schedule gives, bit by bit, what plain training gives."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime import models
from tests.runtime.schedules import random_schedule
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide import Backward, Forward, Offload, Prefetch, Release, Schedule
from lowtide.runtime.meter import Meter
from lowtide.runtime.model.split import Split, StageSplit, Unit
from lowtide.runtime.plan.attach import attach, check_legal

NUM_STAGES = len(models.stages_of_every_kind())
SEEDS = st.integers(0, 2**32)


@functools.cache
def plain_numbers() -> dict[str, torch.Tensor]:
    return train(models.stages_of_every_kind(), batches((6, models.WIDTH), 3))


def run_under(schedule: Schedule, **options) -> lowtide.runtime.plan.plan.Plan:
    model = models.stages_of_every_kind()
    with attach(model, schedule) as plan:
        assert_equal(train(model, batches((6, models.WIDTH), 3), **options), plain_numbers())
    return plan


def backwards(first: int, last: int) -> list[Backward]:
    return [Backward(k) for k in range(first, last - 1, -1)]


def forwards(first: int, last: int, save: str) -> list[Forward]:
    return [Forward(k, save) for k in range(first, last + 1)]


def store_all(n: int = NUM_STAGES) -> Schedule:
    return Schedule("store-all", [*forwards(1, n, "all"), *backwards(n, 1)])


def recompute_all(n: int = NUM_STAGES) -> Schedule:
    """Keep the input alone, and start again from it for each backward."""
    operations = [*[Forward(1, "keep"), *forwards(2, n, "drop")][: n - 1], Forward(n, "all"), Backward(n)]
    for k in range(n - 1, 0, -1):
        operations += [*[Forward(1, "keep"), *forwards(2, k, "drop")][: k - 1], Forward(k, "all"), Backward(k)]
    return Schedule("recompute all", operations)


def two_halves(n: int = NUM_STAGES) -> Schedule:
    half = n // 2
    operations = [Forward(1, "keep"), *forwards(2, half, "drop"), *forwards(half + 1, n, "all")]
    operations += [*backwards(n, half + 1), *forwards(1, half, "all"), *backwards(half, 1)]
    return Schedule("two halves", operations)


@pytest.mark.parametrize("make", [store_all, recompute_all, two_halves])
def test_schedules_by_hand(make):
    check_legal(make(), NUM_STAGES)
    run_under(make())


MOVED = [Forward(1, "keep"), Offload("a", 1), Forward(2, "all"), Release("a", 1), Forward(3, "all"), Backward(3)]
MOVED += [Prefetch("a", 1), Backward(2), Forward(1, "all"), Backward(1)]
MADE_AGAIN = [Forward(1, "all"), Forward(2, "keep"), Forward(3, "all"), Backward(3), Forward(2, "all"), Backward(2)]
MADE_AGAIN += [Backward(1)]


@pytest.mark.parametrize("operations", [MOVED, MADE_AGAIN], ids=["input moved", "made again"])
def test_what_a_stage_saved_goes_bit_by_bit(operations):
    deep = nn.Sequential(*(nn.Tanh() for _ in range(12)))
    model, x = nn.Sequential(nn.Linear(16, 16), deep, nn.Linear(16, 16)), torch.randn(256, 16)
    live_bytes: list[int] = []
    for layer in (deep[9], deep[2]):  # in backward the later layer comes first
        layer.register_full_backward_pre_hook(lambda *_: live_bytes.append(meter.live_bytes))
    split = Split(tuple(StageSplit(path, (Unit(path),)) for path in "012"))
    with attach(model, Schedule("by hand", operations), split=split), Meter("cpu") as meter:
        model(x).sum().backward()
    assert live_bytes[0] - live_bytes[1] == 7 * x.nbytes


def test_recomputations_are_counted():
    plan = run_under(two_halves())
    assert plan.stats().num_steps == 3
    assert plan.stats().recomputed_per_step == NUM_STAGES // 2
    assert plan.stats().moved_bytes_per_step == 0


@settings(max_examples=14, deadline=None)
@given(seed=SEEDS, drops=st.sampled_from([0.0, 0.5, 1.0]))
def test_any_legal_recomputation(seed, drops):
    schedule = random_schedule(NUM_STAGES, seed, drops=drops)
    check_legal(schedule, NUM_STAGES)
    run_under(schedule)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, moves=st.sampled_from([0.2, 0.5, 0.7]), drops=st.sampled_from([0.0, 0.5]))
def test_any_legal_schedule_with_copies(seed, moves, drops):
    schedule = random_schedule(NUM_STAGES, seed, moves=moves, drops=drops)
    check_legal(schedule, NUM_STAGES)
    run_under(schedule)


def accumulated(model: nn.Module) -> dict[str, torch.Tensor]:
    return train(model, batches((6, models.WIDTH), 4), micro_batches=4)


@functools.cache
def plainly_accumulated() -> dict[str, torch.Tensor]:
    return accumulated(models.stages_of_every_kind())


@settings(max_examples=6, deadline=None)
@given(seed=SEEDS)
def test_accumulation_over_micro_batches(seed):
    model = models.stages_of_every_kind()
    with attach(model, random_schedule(NUM_STAGES, seed, moves=0.3)):
        assert_equal(accumulated(model), plainly_accumulated())


def tangle_split(depth: int = 3) -> Split:
    stages = [StageSplit("embed", (Unit("embed"),))]
    stages += [StageSplit(f"block {k}", (Unit(f"blocks.{k}"),)) for k in range(depth)]
    return Split((*stages, StageSplit("head", (Unit("norm"), Unit("head")))))


def fine_tangle_split(depth: int = 3) -> Split:
    stages = [StageSplit("embed", (Unit("embed"),), trailing_glue=True)]
    for k in range(depth):
        units = tuple(Unit(f"blocks.{k}.{name}") for name in ("norm", "first", "second"))
        stages.append(StageSplit(f"block {k}", units, trailing_glue=True))
    return Split((*stages, StageSplit("head", (Unit("norm"), Unit("head")))))


def tangled(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 13, (2, 5), generator=generator) for _ in range(3)]
    return train(model, ids, loss=lambda logits: logits.square().mean())


@functools.cache
def plainly_tangled() -> dict[str, torch.Tensor]:
    return tangled(models.tangle())


@settings(max_examples=14, deadline=None)
@given(seed=SEEDS, moves=st.sampled_from([0.0, 0.4]), fine=st.booleans())
def test_any_legal_schedule_on_a_model_with_glue(seed, moves, fine):
    split = fine_tangle_split() if fine else tangle_split()
    schedule = random_schedule(split.num_stages, seed, moves=moves)
    model = models.tangle()
    with attach(model, schedule, split=split):
        assert_equal(tangled(model), plainly_tangled())


def test_what_a_forward_drops_is_freed_while_it_goes_on():
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))), torch.zeros(4096, 8)
    backward = [[Forward(1, "keep"), *(Forward(j, "drop") for j in range(2, k))] for k in range(2, 12)]
    operations = [Forward(1, "keep"), *(Forward(k, "drop") for k in range(2, 12)), Forward(12, "all"), Backward(12)]
    for k in range(11, 0, -1):
        operations += [*(backward[k - 2] if k > 1 else ()), Forward(k, "all"), Backward(k)]
    with attach(model, Schedule("from the start", operations)), Meter("cpu") as meter:
        model(x)
        assert meter.peak_bytes - meter.start_bytes < 5 * x.nbytes  # of the twelve
