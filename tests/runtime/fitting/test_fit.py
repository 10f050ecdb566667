"""`lowtide.fit`: within the budget, the same numbers, plans that are kept, saved, refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import re

import pytest
import torch
from tests.report.chains import data_of
from tests.runtime import models
from tests.runtime.training import assert_equal, batches, left_bytes, train
from torch import nn

import lowtide
import lowtide.progress
from lowtide.runtime.execute.execution import Clock
from lowtide.runtime.fitting import rehearsal, trials, ways
from lowtide.runtime.meter import Meter
from lowtide.runtime.plan.steps import RealSteps
from lowtide.runtime.transfer.file_tier import FileTier
from lowtide.units import format_bytes

SHAPE = (512, 32)
RECOMPUTE = {"bandwidth": 0, "strategy": "rotor"}


def deep(depth: int = 4, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block(width) for _ in range(depth)))


def block(width: int) -> nn.Sequential:
    wide = 4 * width
    return nn.Sequential(
        nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width), nn.Dropout(0.1), nn.LayerNorm(width)
    )


def peak_of_steps(model: nn.Module, inputs: list[torch.Tensor]) -> int:
    """The peak of all live tensors over whole steps, the optimizer's included."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    gc.collect()
    with Meter("cpu") as meter:
        for x in inputs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return meter.peak_bytes


def budget_of(share: float, shape: tuple[int, int] = SHAPE) -> int:
    """A share of what plain steps take, beside whatever earlier tests left behind: the meter counts that, too."""
    return left_bytes() + int(plain_bytes(shape) * share)


@functools.cache
def plain_bytes(shape: tuple[int, int]) -> int:
    """What plain steps take."""
    return -left_bytes() + peak_of_steps(deep(), batches(shape, 3))


@pytest.mark.parametrize("share", [1.3, 0.7, 0.5])
def test_the_budget_holds_over_whole_steps_with_equal_numbers(share):
    budget = budget_of(share) + 4096
    model, inputs = deep(), batches(SHAPE, 3)  # all there when the plan is made: on the CPU every live tensor counts
    options = {"optimizer": "adam", "loss": lambda output: output.square().mean()}
    with lowtide.fit(model, inputs[0], memory_budget=budget, **RECOMPUTE, **options) as plan:
        assert plan.stats().predicted_peak_bytes <= budget
        peak = peak_of_steps(model, inputs)
        assert peak <= budget
        assert plan.stats().predicted_peak_bytes == pytest.approx(plan.stats().measured_peak_bytes, rel=0.05)
        assert (plan.stats().recomputed_per_step > 0) == (share < 1)
    del plan, model  # the next budget is for one model, not for two
    gc.collect()
    model = deep()
    with lowtide.fit(model, inputs[0], memory_budget=budget, **RECOMPUTE):
        assert_equal(train(model, inputs), train(deep(), inputs))


def test_fitting_leaves_no_trace():
    model, twin = models.stages_of_every_kind(), models.stages_of_every_kind()
    for each in (model, twin):
        each[3] = nn.Identity()  # what depends on earlier calls cannot be measured
    model.eval()
    state = torch.get_rng_state()
    plan = lowtide.fit(model, batches((6, models.WIDTH), 1)[0], memory_budget="1GiB", bandwidth=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    model.train()
    assert_equal(train(model, batches((6, models.WIDTH), 2)), train(twin, batches((6, models.WIDTH), 2)))
    plan.detach()


def test_a_budget_too_small_is_refused_with_the_least():
    model, x = deep(), batches(SHAPE, 1)[0]
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, bandwidth=0)
    least = caught.value.minimum_bytes
    assert str(least) in str(caught.value)
    assert "_compiled_call_impl" not in vars(model)
    with lowtide.fit(model, x, memory_budget=int(least * 1.05), bandwidth=0):
        assert_equal(
            train(model, batches(SHAPE, 2), input_grads=False), train(deep(), batches(SHAPE, 2), input_grads=False)
        )


def test_where_offloading_was_tried_too_a_refusal_does_not_advise_it(monkeypatch):
    real = trials._tried

    def more_with_copies(model, sample, planned, settings, **options):
        tried = real(model, sample, planned, settings, **options)
        copies = any(isinstance(each, lowtide.Offload) for each in planned.solution.schedule.operations)
        return dataclasses.replace(tried, peak_bytes=tried.peak_bytes * (10 if copies else 1))

    monkeypatch.setattr(trials, "_tried", more_with_copies)
    with pytest.raises(lowtide.InfeasibleBudgetError, match=r"recomputation alone \(with offloading: .*; raise it \(w"):
        lowtide.fit(deep(), torch.randn(*SHAPE), memory_budget="100KiB", bandwidth="100GB/s")


@pytest.mark.parametrize(("times", "alone", "is_said"), [(1.2, True, False), (1.3, True, True), (1.3, False, False)])
def test_where_launching_decides_graphs_are_advised(times, alone, is_said, monkeypatch):
    real, measure_split = trials._tried, trials.measure_split

    def launched(*given, **options):  # the device takes half of what a step takes that launches each stage
        chain = measure_split(*given, **options)
        half = [[stage.forward_seconds / 2, stage.backward_seconds / 2] for stage in chain.stages]
        return dataclasses.replace(chain, provenance={**chain.provenance, "device_seconds": half})

    def timed(model, sample, planned, settings, **options):
        tried = real(model, sample, planned, settings, **options)
        return dataclasses.replace(tried, seconds=times / 2 * planned.solution.seconds)

    monkeypatch.setattr(trials, "is_timed", lambda device: True)
    monkeypatch.setattr(trials, "is_distributed", lambda: not alone)
    monkeypatch.setattr(trials, "measure_split", launched)
    monkeypatch.setattr(trials, "_tried", timed)
    with lowtide.fit(deep(), torch.randn(*SHAPE), memory_budget=budget_of(1.3), **RECOMPUTE) as plan:
        assert any('try cuda_graphs="auto"' in note for note in plan.notes) == is_said


def test_a_budget_that_only_the_prediction_exceeds_is_met(monkeypatch):
    model, x = deep(), batches(SHAPE, 1)[0]
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, **RECOMPUTE)
    budget, more = int(caught.value.minimum_bytes * 1.02), caught.value.minimum_bytes // 8
    measured = trials.measure_split

    def too_much(*given, **options):
        chain = measured(*given, **options)
        return dataclasses.replace(chain, base_bytes=chain.base_bytes + more)

    monkeypatch.setattr(trials, "measure_split", too_much)
    with lowtide.fit(model, x, memory_budget=budget, **RECOMPUTE) as plan:
        assert "the prediction was corrected" in str(plan.notes)
        assert plan.stats().measured_peak_bytes <= budget
        assert plan.stats().predicted_peak_bytes <= budget
        assert_equal(
            train(model, batches(SHAPE, 2), input_grads=False), train(deep(), batches(SHAPE, 2), input_grads=False)
        )
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        lowtide.fit(model, x, memory_budget=budget // 2, **RECOMPUTE)
    assert refused.value.minimum_bytes > budget // 2


def test_other_shapes():
    model, x = deep(), batches(SHAPE, 1)[0]
    budget = budget_of(0.85)
    plan = lowtide.fit(model, x, memory_budget=budget, **RECOMPUTE)
    inputs = [x, x[:20], torch.cat([x, x[:8]]), x, x[:7]]
    assert_equal(train(model, inputs, input_grads=False), train(deep(), inputs, input_grads=False))
    assert plan.num_shapes == 2  # smaller ones run under the plan of a larger one
    plan = lowtide.fit(model, x, memory_budget=budget, **RECOMPUTE, replan=False)
    with pytest.raises(lowtide.PlanError, match=r"\[20, 32\] float32, but the plan is for \[512, 32\] float32"):
        model(x[:20])
    model.eval()
    model(x[:20])
    plan.detach()


def test_a_real_step_corrects_the_schedule_it_ran_under_and_not_the_one_planned_last(monkeypatch):
    model, twin, x = deep(), deep(), batches(SHAPE, 1)[0]
    budget = budget_of(0.9)
    with lowtide.fit(model, x, memory_budget=budget, **RECOMPUTE) as plan:
        first = plan.chain
        inputs = [x, torch.cat([x, x[:8]]), x]
        assert_equal(train(model, inputs, input_grads=False), train(twin, inputs, input_grads=False))
        assert plan.num_shapes == 2
        assert plan.chain == first
        monkeypatch.setattr(RealSteps, "peak_bytes", property(lambda _: budget + 64))  # as CUDA might say
        with pytest.warns(lowtide.LowtideWarning, match="planning again"):
            model(x)
        monkeypatch.undo()
        assert [stage.saved_bytes for stage in plan.chain.stages] == [stage.saved_bytes for stage in first.stages]
        assert plan.chain.base_bytes > first.base_bytes
        assert_equal(train(model, inputs, input_grads=False), train(twin, inputs, input_grads=False))


def test_peaks_of_planning_are_forgotten_for_each_shape(monkeypatch):
    events, tried = [], trials._tried
    monkeypatch.setattr(trials, "_tried", lambda *args, **more: events.append("tried") or tried(*args, **more))
    monkeypatch.setattr(RealSteps, "forget", lambda _: events.append("forgotten"))
    model, x = deep(), batches(SHAPE, 1)[0]
    with lowtide.fit(model, x, memory_budget=budget_of(0.85), **RECOMPUTE):
        assert events.pop() == "forgotten"
        train(model, [x, torch.cat([x, x[:8]])], input_grads=False)
        assert events.pop() == "forgotten"
        assert "forgotten" not in events


def test_fitting_twice_replaces_the_plan():
    model, x = deep(), batches(SHAPE, 1)[0]
    first = lowtide.fit(model, x, memory_budget=budget_of(2), **RECOMPUTE)
    second = lowtide.fit(model, x, memory_budget=budget_of(0.7), **RECOMPUTE)
    assert not first.is_attached
    assert second.is_attached
    assert first.schedule != second.schedule


def test_it_can_be_printed():
    model, x = deep(), batches(SHAPE, 1)[0]
    with lowtide.fit(model, x, memory_budget=budget_of(0.7), **RECOMPUTE) as plan:
        text = str(plan)
        assert re.search(r"\d\.\d\d x plain", text)
        assert "(before the first step)" in text
        assert "budget" in text
        assert "recomputed" in text
        model(x).sum().backward()
        assert "(1 step)" in str(plan)
        assert re.search(r"measured   .* a step, peak .* \(1 step\)\na step     [1-9]\d* stages", str(plan.stats()))
        assert "attached" in repr(plan)
        assert "detached" not in str(plan)
    assert str(plan).startswith("lowtide plan for Sequential, detached (the model runs without it): strategy")


def test_it_can_be_looked_at(tmp_path):
    model, x = deep(), batches(SHAPE, 1)[0]
    budget = budget_of(0.7)
    with lowtide.fit(model, x, memory_budget=budget, **RECOMPUTE) as plan:
        model(x).sum().backward()
        plan.report(tmp_path / "plan.html", patience_seconds=1.0)
        data = data_of((tmp_path / "plan.html").read_text())
        shown = data["plans"][data["own"]]
        assert shown["budget"] == budget
        assert shown["peak"] == plan.stats().predicted_peak_bytes
        assert data["measured"]["peak_bytes"] == plan.stats().measured_peak_bytes
        assert data["measured"]["num_steps"] == 1
        assert data["measured"]["seconds"] == plan.stats().measured_seconds
        assert data["measured"]["device"] == "the CPU"
        assert data["notes"] == list(plan.notes)  # what the console says, the page says too
        assert data["attached"]


def test_models_with_glue_and_a_loss_inside():
    others = left_bytes()
    ids = torch.randint(0, 13, (4, 16), generator=torch.Generator().manual_seed(1))
    plain, model = models.tangle(width=32, depth=4), models.tangle(width=32, depth=4)
    sample = {"ids": ids, "labels": ids}
    budget = "1GiB"
    for _ in range(2):
        with lowtide.fit(model, sample, memory_budget=budget, **RECOMPUTE) as plan:
            for each in (plain, model):
                torch.manual_seed(0)
                each.zero_grad()
                each(ids, labels=ids)["loss"].backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                assert p.grad is None or torch.equal(p.grad, q.grad), name
            budget = others + int((plan.stats().predicted_peak_bytes - others) * 0.95)
    assert plan.stats().recomputed_per_step > 0


@pytest.mark.parametrize("share", [0.7, 0.55])  # recomputation alone: a sixth longer, or a third
def test_copies_that_turn_out_slow_are_not_used(monkeypatch, share):
    store, clock = FileTier.store, [0.0]

    def slow(tier, storages):
        clock[0] += 1000.0
        return store(tier, storages)

    monkeypatch.setattr(FileTier, "store", slow)
    monkeypatch.setattr(Clock, "_now", lambda _: clock[0])
    budget, x = budget_of(share), batches(SHAPE, 1)[0]
    with lowtide.fit(deep(), x, memory_budget=budget, bandwidth="1TB/s", strategy="pofo") as plan:
        assert any(isinstance(operation, lowtide.Offload) for operation in plan.schedule.operations)
    with lowtide.fit(deep(), x, memory_budget=budget, bandwidth="1TB/s") as plan:
        assert not any(isinstance(operation, lowtide.Offload) for operation in plan.schedule.operations)
        assert "nothing is offloaded" in str(plan)


class Taking(nn.Module):
    """Takes its target out of the batch, multiplies by a sparse matrix, and by a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = deep(2), deep(2), nn.BatchNorm1d(32).eval()
        self.scale = torch.ones(32, requires_grad=True)

    def forward(self, batch, *, graph):
        target = batch.pop("target")
        hidden = torch.sparse.mm(graph, self.first(batch["x"])) * self.scale
        return (self.second(self.norm(hidden)) - target).square().mean()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_batches_that_are_taken_apart_and_tensors_of_other_kinds(layout):
    x, target = batches((64, 32), 2)
    graph = torch.eye(64).to_sparse(layout=layout)

    def step(model: Taking) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model({"x": x, "target": target}, graph=graph).backward()
        return [model.scale.grad, *(p.grad for p in model.parameters())]

    model = Taking()
    sample = lowtide.runtime.model.sample.Sample(({"x": x, "target": target},), {"graph": graph})
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, sample, memory_budget=1, **RECOMPUTE)
    with lowtide.fit(model, sample, memory_budget=caught.value.minimum_bytes + 4096, **RECOMPUTE) as plan:
        assert model.scale.grad is None
        assert not model.norm.training
        got = step(model)
        assert plan.stats().recomputed_per_step > 0
    for one, other in zip(got, step(Taking()), strict=True):
        assert torch.equal(one, other)


def test_a_sparse_buffer():
    def make() -> nn.Module:
        model = deep(3)
        model[1].register_buffer("graph", torch.eye(4).to_sparse())
        return model

    model, x = make(), batches((64, 32), 1)[0]
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1, **RECOMPUTE)
    with lowtide.fit(model, x, memory_budget=caught.value.minimum_bytes + 4096, **RECOMPUTE) as plan:
        model(x).sum().backward()
        assert plan.stats().recomputed_per_step > 0


def test_a_device_that_has_less_memory_than_the_budget_is_planned_for(monkeypatch):
    shape = (4 * SHAPE[0], SHAPE[1])  # so large that a tenth of what earlier tests left behind is little beside it
    budget, real = budget_of(1.3, shape), trials._tried
    tried = []

    def limited(model, sample, planned, settings, **more):
        tried.append(settings.memory_budget)
        if planned.solution.peak_bytes > 0.75 * budget:
            raise torch.OutOfMemoryError("the device is full")
        return real(model, sample, planned, settings, **more)

    monkeypatch.setattr(trials, "_tried", limited)
    model, inputs = deep(), batches(shape, 3)
    with lowtide.fit(model, inputs[0], memory_budget=budget, **RECOMPUTE) as plan:
        assert plan.stats().predicted_peak_bytes <= 0.75 * budget
        assert sum("ran out of device memory" in note for note in plan.notes) == 3  # 1, 0.9 and 0.81 of it
        assert_equal(train(model, inputs), train(deep(), inputs))
    assert tried[:4] == [budget, *(pytest.approx(budget * 0.9**k, abs=3) for k in (1, 2, 3))]


def test_where_a_tenth_less_is_too_little_the_leanest_schedule_is_planned_for(monkeypatch):
    model, inputs, real = deep(), batches(SHAPE, 3), trials._tried
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, inputs[0], memory_budget=1, **RECOMPUTE, optimizer="adam")
    budget, tried = int(1.08 * caught.value.minimum_bytes), []

    def full_at_first(model, sample, planned, settings, **more):
        tried.append(settings.memory_budget)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no block is large enough")
        return real(model, sample, planned, settings, **more)

    monkeypatch.setattr(trials, "_tried", full_at_first)
    with lowtide.fit(model, inputs[0], memory_budget=budget, **RECOMPUTE, optimizer="adam") as plan:
        assert plan.stats().predicted_peak_bytes < budget
        assert sum("ran out of device memory" in note for note in plan.notes) == 1
        assert_equal(train(model, inputs, input_grads=False), train(deep(), inputs, input_grads=False))
    assert 0.9 * budget < tried[-1] < budget


def test_a_second_step_that_runs_out_of_memory_is_planned_for(monkeypatch):
    real, num_runs = rehearsal._run, []

    def full_at_second(*step):
        num_runs.append(1)
        if len(num_runs) == 2:
            raise torch.OutOfMemoryError("no block is large enough")
        return real(*step)

    monkeypatch.setattr(rehearsal, "_MORE_STEPS", {"cpu": 1})
    monkeypatch.setattr(rehearsal, "_run", full_at_second)
    budget, model, inputs = budget_of(1.3), deep(), batches(SHAPE, 3)
    with lowtide.fit(model, inputs[0], memory_budget=budget, **RECOMPUTE) as plan:
        assert plan.stats().predicted_peak_bytes <= 0.9 * budget
        assert sum("ran out of device memory" in note for note in plan.notes) == 1
        assert len(num_runs) >= 4
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_equal(train(model, inputs), train(deep(), inputs))


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (None, {}, "expected an nn.Module"),
        (nn.Linear, {}, "expected an nn.Module"),
        (deep(), {"strategy": "rotr"}, "did you mean 'rotor'"),
    ],
)
def test_what_is_wrong_from_the_start_is_said_before_anything_is_measured(model, options, reason, monkeypatch):
    monkeypatch.setattr(ways, "measured_for", None)
    with pytest.raises(lowtide.LowtideError, match=reason):
        lowtide.fit(model, torch.zeros(SHAPE), memory_budget="1GiB", **options)


def test_a_bolder_schedule_that_runs_out_of_memory_leaves_the_one_that_was_seen_to_fit(monkeypatch):
    budget, real = budget_of(1.3), trials._tried
    tried = []

    def full_at_second(model, sample, planned, settings, **more):
        if tried:
            raise torch.OutOfMemoryError("the device is full")
        tried.append(planned.solution.schedule.operations)
        # less than predicted, so that a schedule that should just fill the budget is tried next
        return dataclasses.replace(real(model, sample, planned, settings, **more), peak_bytes=budget // 2)

    monkeypatch.setattr(trials, "_tried", full_at_second)
    model, inputs = deep(), batches(SHAPE, 3)
    with lowtide.fit(model, inputs[0], memory_budget=budget, **RECOMPUTE) as plan:
        assert plan.schedule.operations == tried[0]
        assert not any("ran out of device memory" in note for note in plan.notes)
        assert_equal(train(model, inputs, input_grads=False), train(deep(), inputs, input_grads=False))


def test_several_schedules_that_take_a_little_more_than_the_budget_do_not_make_it_too_small(monkeypatch):
    budget, real = budget_of(1.3), trials._tried
    tried = []

    def a_little_more(model, sample, planned, settings, **more):
        tried.append(planned.solution.schedule.operations)
        found = real(model, sample, planned, settings, **more)
        return dataclasses.replace(found, peak_bytes=budget + budget // 100) if len(tried) <= 4 else found

    monkeypatch.setattr(trials, "_tried", a_little_more)
    model, inputs = deep(), batches(SHAPE, 3)
    with lowtide.fit(model, inputs[0], memory_budget=budget, **RECOMPUTE) as plan:
        assert plan.stats().measured_peak_bytes <= budget
        assert plan.stats().predicted_peak_bytes <= budget
        assert_equal(train(model, inputs), train(deep(), inputs))
    assert len(tried) >= 5


def test_a_device_without_memory_is_said_to_be_so(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(trials, "_tried", full)
    with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
        lowtide.fit(deep(), batches(SHAPE, 1)[0], memory_budget=budget_of(3), **RECOMPUTE)
    little = 1
    for _ in range(3):  # first the optimizer's step is too large, then the leanest schedule, then the device is full
        with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
            lowtide.fit(deep(), batches(SHAPE, 1)[0], memory_budget=little, **RECOMPUTE)
        little = int(1.02 * caught.value.minimum_bytes)
    assert "ran out of device memory" in str(caught.value)


def test_copies_that_take_more_than_predicted_do_not_make_a_budget_too_small(monkeypatch):
    model, x = deep(), batches(SHAPE, 1)[0]
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, bandwidth=0)
    tried = trials._tried

    def more_with_copies(model, sample, planned, settings, **options):
        rehearsal = tried(model, sample, planned, settings, **options)
        moves = any(isinstance(operation, lowtide.Offload) for operation in planned.solution.schedule.operations)
        return dataclasses.replace(rehearsal, peak_bytes=rehearsal.peak_bytes * (2 if moves else 1))

    monkeypatch.setattr(trials, "_tried", more_with_copies)
    budget = int(caught.value.minimum_bytes * 1.02)
    with lowtide.fit(model, x, memory_budget=budget, bandwidth="1TB/s") as plan:
        assert not any(isinstance(operation, lowtide.Offload) for operation in plan.schedule.operations)
        assert plan.stats().measured_peak_bytes <= budget


# Files


@pytest.fixture(scope="module")
def fitted():
    """Fitted once; each test gets a file of its own."""
    budget = budget_of(0.7)
    with lowtide.fit(deep(), batches(SHAPE, 1)[0], memory_budget=budget, **RECOMPUTE) as plan:
        return plan


@pytest.fixture
def saved(tmp_path, fitted):
    fitted.save(tmp_path / "plan.json")
    return tmp_path / "plan.json", fitted


def test_a_plan_can_be_saved_and_loaded(saved):
    path, plan = saved
    model = deep()
    with lowtide.load_plan(path, model) as loaded:
        assert loaded.schedule == plan.schedule
        assert loaded.memory_budget == plan.memory_budget
        assert_equal(train(model, batches(SHAPE, 2)), train(deep(), batches(SHAPE, 2)))
        with pytest.raises(lowtide.PlanError, match=r"\[600, 32\]"):
            model(torch.zeros(600, 32))


def test_plans_for_something_else_are_refused(saved):
    path, _ = saved
    with pytest.raises(lowtide.PlanError, match=r"plan\.json: the model's modules"):
        lowtide.load_plan(path, deep(depth=3))
    with pytest.raises(lowtide.PlanError, match="parameters"):
        lowtide.load_plan(path, deep(width=16))
    values = json.loads(path.read_text())
    values["model"]["device"] = "NVIDIA H200"
    path.write_text(json.dumps(values))
    with pytest.raises(lowtide.PlanError, match=r"device 'NVIDIA H200'.*'cpu'"):
        lowtide.load_plan(path, deep())


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: text.replace("lowtide.plan/1", "lowtide.plan/2"),
        lambda text: text.replace('"operations"', '"operation"'),
        lambda text: text.replace('"backward"', '"backwards"', 1),
        lambda text: text.replace('"units"', '"unit"', 1),
        lambda text: text.replace('"saved_bytes"', '"saved"', 1),
        lambda text: text.replace('"memory_budget": ', '"memory_budget": -'),
        lambda text: text.replace('"tensors"', '"tensor"', 1),
    ],
)
def test_broken_files_are_one_line(saved, edit):
    path, _ = saved
    model = deep()
    path.write_text(edit(path.read_text()))
    with pytest.raises(lowtide.PlanError) as caught:
        lowtide.load_plan(path, model)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert "_compiled_call_impl" not in vars(model)


def test_garbage_and_missing_files(tmp_path):
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 100)
    for name in ("garbage", "missing"):
        with pytest.raises(lowtide.PlanError, match=name):
            lowtide.load_plan(tmp_path / name, deep())


def test_compiled_stages_give_what_the_compiled_model_gives():
    options = {"backend": "aot_eager"}
    plain, model = deep(), deep()
    for each in plain:
        each.compile(dynamic=False, **options)
    stages = [str(k) for k in range(len(model))]
    budget = budget_of(0.8)
    x = batches(SHAPE, 1)[0]
    with lowtide.fit(
        model, x, memory_budget=budget, **RECOMPUTE, stages=stages, compile_stages=options, variants=False
    ) as plan:
        assert_equal(train(model, batches(SHAPE, 2)), train(plain, batches(SHAPE, 2)))
        assert plan.stats().recomputed_per_step > 0
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_the_steps_by_themselves():
    model, x = deep(), batches(SHAPE, 1)[0]
    chain = lowtide.Chain.from_dict(json.loads(json.dumps(lowtide.measure(model, x, optimizer="adam").to_dict())))
    solution = lowtide.solve(chain, memory_budget=budget_of(0.7), strategy="rotor", manage_weights=False)
    with lowtide.attach(model, solution) as plan:
        inputs = batches(SHAPE, 2)
        assert_equal(train(model, inputs, input_grads=False), train(deep(), inputs, input_grads=False))
        assert plan.stats().recomputed_per_step > 0


class Carrying(nn.Module):
    """Hands what it made to its next call: from the second step on there is more in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.carried = block(32), None

    def forward(self, x):
        y = self.block(x) if self.carried is None else self.block(x) + 0.1 * self.carried
        self.carried = y.detach()
        return y


def test_the_budget_holds_where_modules_carry_something_over():
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Carrying() for _ in range(5)))

    model, inputs = make(), batches(SHAPE, 4)
    options = {**RECOMPUTE, "optimizer": "adam", "loss": lambda result: result.square().mean()}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, inputs[0], memory_budget=1000, **options)
    budget = int(1.1 * caught.value.minimum_bytes)
    with lowtide.fit(model, inputs[0], memory_budget=budget, **options) as plan:
        assert peak_of_steps(model, inputs) <= budget
        assert plan.stats().recomputed_per_step > 0


class Recurrent(nn.Module):
    """Keeps hidden states with their graph, in a list, a tuple and by themselves; whoever trains it detaches them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.hidden = nn.ModuleList(block(32) for _ in range(4)), None

    def forward(self, x):
        kept = [x, (x,), x] if self.hidden is None else self.hidden
        x = self.blocks[1](self.blocks[0](x + kept[0]) + kept[1][0])
        y = self.blocks[2](x + kept[2])
        self.hidden = [x, (y,), y]
        return self.blocks[3](y)

    def detach(self) -> None:
        x, (y,), z = self.hidden
        self.hidden = [x.detach(), (y.detach(),), z.detach()]


def test_hidden_states_that_the_loop_detaches():
    def numbers(model: Recurrent) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)  # blocks have dropout
        for x in batches(SHAPE, 3):
            model(x).square().mean().backward()
            model.detach()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    torch.manual_seed(0)
    model = Recurrent()
    plain = copy.deepcopy(model)
    with lowtide.fit(model, batches(SHAPE, 1)[0], memory_budget="1GiB", bandwidth=0, strategy="revolve") as plan:
        assert model.hidden is None
        assert_equal(numbers(model), numbers(plain))
        assert plan.stats().recomputed_per_step > 0


def test_a_plan_prints_plain_training_beside_it_and_what_fills_the_memory():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    x = torch.randn(256, 32)
    with lowtide.fit(model, x, memory_budget="1GiB", bandwidth=0, optimizer="adamw") as plan:
        text = str(plan)
        weights = format_bytes(sum(p.nbytes for p in model.parameters()))
        state = format_bytes(2 * sum(p.nbytes for p in model.parameters()))
        assert re.search(r"  plain .*peak .*everything stored", text)
        assert re.search(rf"  at peak +weights {weights}, optimizer {state}, .*activations", text)
        assert max(map(len, text.splitlines())) <= 100
        assert plan._repr_html_().startswith("<pre>lowtide plan for Sequential")


@pytest.mark.parametrize("progress", [True, False, None])
def test_progress_is_shown_where_it_is_asked_for(progress, monkeypatch, capsys):
    monkeypatch.setattr(lowtide.progress, "_PATIENCE_SECONDS", 0.0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    with lowtide.fit(model, torch.zeros(2, 4), memory_budget="1GiB", bandwidth=0, progress=progress):
        assert bool(capsys.readouterr().err) == (progress is True)
