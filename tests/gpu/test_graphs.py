"""On a GPU: steps that are replayed as CUDA graphs give the same numbers, within the same memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tests.runtime import models, schedules
from tests.runtime.awkward.table import ROWS, Awkward
from tests.runtime.schedules import mixed, offloading, random_schedule, recomputing, storing
from tests.runtime.training import assert_equal, batches, seed_all, square_loss, train
from torch import nn

import lowtide
from lowtide.runtime.plan.attach import split_for
from lowtide.runtime.transfer.pinned_tier import PinnedTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

N = len(models.stages_of_every_kind())
WIDTH = 64
SHAPE = (256, WIDTH)
NUM_STEPS = 6
LONG_SLEEP = 400_000_000  # cycles of the device: about a fifth of a second


def model_on_gpu() -> nn.Sequential:
    return models.stages_of_every_kind(WIDTH).cuda()


def inputs(num_steps: int = NUM_STEPS, rows: int = SHAPE[0]) -> list[torch.Tensor]:
    return batches((rows, WIDTH), num_steps, device="cuda")


def num_replayed(plan: lowtide.Plan) -> int:
    assert plan._part.graphs is not None
    assert not plan._part.graphs.refusal
    return plan._part.graphs.num_replayed


def refusal_of(plan: lowtide.Plan) -> str:
    assert plan._part.graphs is not None
    return plan._part.graphs.refusal


SCHEDULES = [storing(N), recomputing(N), offloading(N), mixed(N)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.strategy)
def test_any_seed(schedule):
    for seed in range(3):
        expected = train(model_on_gpu(), inputs(), seed=seed)
        model = model_on_gpu()
        with lowtide.attach(model, schedule, cuda_graphs=True) as plan:
            assert_equal(train(model, inputs(), seed=seed), expected)
            assert num_replayed(plan) == NUM_STEPS - 2
            assert plan.stats().num_steps == NUM_STEPS


@pytest.mark.parametrize("seed", range(6))
def test_any_legal_schedule(seed):
    expected = train(model_on_gpu(), inputs())
    model = model_on_gpu()
    schedule = random_schedule(N, seed, moves=[0.0, 0.3, 0.6][seed % 3], drops=0.5)
    with lowtide.attach(model, schedule, cuda_graphs=True) as plan:
        assert_equal(train(model, inputs()), expected)
        assert num_replayed(plan) == NUM_STEPS - 2


def test_accumulation():
    expected = train(model_on_gpu(), inputs(12), micro_batches=3)
    model = model_on_gpu()
    with lowtide.attach(model, mixed(N), cuda_graphs=True) as plan:
        assert_equal(train(model, inputs(12), micro_batches=3), expected)
        assert num_replayed(plan) > 0


def loop(model: nn.Module, given: list[torch.Tensor], *, set_to_none: bool = True, clips: bool = False) -> list:
    """Losses, and the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    seed_all(3)
    found = []
    for x in given:
        loss = square_loss(model(x))
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        found.append(loss.detach().clone())
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "whole"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeroed"])
def test_gradients_are_the_users(set_to_none, clips):
    expected = loop(model_on_gpu(), inputs(8), set_to_none=set_to_none, clips=clips)
    model = model_on_gpu()
    with lowtide.attach(model, recomputing(N), cuda_graphs=True) as plan:
        found = loop(model, inputs(8), set_to_none=set_to_none, clips=clips)
        assert num_replayed(plan) > 0
    assert all(map(torch.equal, found, expected))


def test_memory_is_not_taken_away_while_it_is_read():
    """The last gradients are moved out of the graphs' memory when these end, which the device does later."""
    models_of_both = model_on_gpu(), model_on_gpu()
    plan = lowtide.attach(models_of_both[1], recomputing(N), cuda_graphs=True)
    for model in models_of_both:
        train(model, inputs(4))
        model.zero_grad()
        square_loss(model(inputs(1)[0].requires_grad_())).backward()  # as those of `train`
    assert num_replayed(plan) == 3
    torch.cuda._sleep(LONG_SLEEP)
    plan.detach()
    expected, found = ([p.grad for p in model.parameters()] for model in models_of_both)
    assert any(gradient is not None for gradient in expected)
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_two_shapes_in_turn_and_evaluation_in_between():
    given = [x for pair in zip(inputs(8), inputs(8, rows=128), strict=True) for x in pair]

    def run(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for begin in range(0, len(given), 4):
            found += loop(model, given[begin : begin + 4])
            model.eval()
            with torch.no_grad():
                found.append(model(given[0]))
            model.train()
        return found

    expected = run(model_on_gpu())
    model = model_on_gpu()
    with lowtide.attach(model, mixed(N), cuda_graphs=True) as plan:
        found = run(model)
        assert num_replayed(plan) == len(given) - 4
    assert all(map(torch.equal, found, expected))


def test_what_the_user_keeps_is_not_written_over():
    model, twin = model_on_gpu(), model_on_gpu()
    with lowtide.attach(model, recomputing(N), cuda_graphs=True) as plan:
        kept, expected = [], []
        for each, results in ((model, kept), (twin, expected)):
            seed_all(3)
            for x in inputs(8):
                output = each(x)
                square_loss(output).backward()
                results += [output, *(p.grad for p in each.parameters())]  # not copied
                for parameter in each.parameters():
                    parameter.grad = None
        assert num_replayed(plan) > 0
    assert all(map(torch.equal, kept, expected))


def test_two_forwards_before_their_backwards():
    def run(model: nn.Module) -> list[torch.Tensor]:
        seed_all(3)
        for x, y in zip(images(), images(), strict=True):
            first, second = model(x), model(y)
            square_loss(second).backward()
            square_loss(first).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = run(network())
    model = network()
    with lowtide.attach(model, recomputing(14), cuda_graphs=True):
        assert all(map(torch.equal, run(model), expected))


def replayed_loss(model: nn.Module) -> torch.Tensor:
    """The loss of a step that is replayed, before its backward."""
    for x in inputs(3):
        square_loss(model(x)).backward()
    return square_loss(model(inputs(1)[0]))


def test_a_second_backward_is_refused():
    model = model_on_gpu()
    with lowtide.attach(model, recomputing(N), cuda_graphs=True):
        loss = replayed_loss(model)
        loss.backward(retain_graph=True)
        with pytest.raises(lowtide.ExecutionError, match="second time"):
            loss.backward()
        square_loss(model(inputs(1)[0])).backward()


def test_parameters_that_change_before_backward_are_refused():
    model = model_on_gpu()
    with lowtide.attach(model, recomputing(N), cuda_graphs=True):
        loss = replayed_loss(model)
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(lowtide.ExecutionError, match=r"'0\.weight'.*between forward and backward"):
            loss.backward()


class ReadsOnHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.inner(x)
        return y if y.sum().item() > 0 else -y


def with_host_reads() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(3)]
    return nn.Sequential(*layers, ReadsOnHost(), nn.Linear(WIDTH, WIDTH)).cuda()


def test_a_failed_capture_leaves_everything_as_it_was():
    expected = train(with_host_reads(), inputs())
    model = with_host_reads()
    with lowtide.attach(model, recomputing(5), cuda_graphs=True) as plan:
        assert_equal(train(model, inputs()), expected)
        assert "module '3', test_graphs.py, line" in refusal_of(plan)
        assert any("without CUDA graphs" in note for note in plan.notes)


class FreesWhileCaptured(nn.Module):
    """Frees what others left, while a graph is captured."""

    left: ClassVar[list[Any]] = []

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            self.left.clear()
        return x.relu()


@pytest.mark.parametrize("is_garbage", [False, True], ids=["at once", "by the collector"])
def test_pinned_memory_that_is_freed_during_a_capture(is_garbage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), FreesWhileCaptured(), nn.Linear(WIDTH, WIDTH)).cuda()
    tiers = [PinnedTier(torch.device("cuda", 0)) for _ in range(2)]
    like = torch.ones(2**20, device="cuda")
    kept: list[Any] = [tiers[0].mirror(like)]
    if is_garbage:
        kept.append(kept)
    FreesWhileCaptured.left.append(kept)
    del kept, tiers[0]
    usual = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with lowtide.attach(model, recomputing(3), cuda_graphs=True) as plan:
            train(model, inputs())
            assert num_replayed(plan) == NUM_STEPS - 2
    finally:
        gc.set_threshold(*usual)
    assert not FreesWhileCaptured.left
    assert torch.equal(tiers[0].mirror(like).tensor.zero_(), like * 0)


def test_hooks_and_attributes_are_not_left_out():
    seen = []
    for change in ("hook", "attribute", "python random"):
        model = model_on_gpu()
        if change == "hook":
            model[0].register_forward_hook(lambda *_: seen.append(1))
        elif change == "attribute":
            model[0] = Counting()
        else:
            model[0] = DrawsOnHost()
        model.cuda()
        with lowtide.attach(model, recomputing(N), cuda_graphs=True) as plan:
            loop(model, inputs())
            assert refusal_of(plan)
        if change == "attribute":
            assert model[0].calls == NUM_STEPS


class Counting(nn.Linear):
    calls = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        if not lowtide.is_recomputing():
            self.calls += 1
        return super().forward(x)


class DrawsOnHost(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) * (1 + torch.rand(1).item())


def test_a_setting_that_changes_is_followed():
    def run(model: nn.Module) -> list[torch.Tensor]:
        found = loop(model, inputs())
        model[1][0].p = 0.1
        found += loop(model, inputs())
        with torch.no_grad():
            model[0].weight.data = model[0].weight.data * 0.5  # other memory
        return found + loop(model, inputs())

    expected = run(model_on_gpu())
    model = model_on_gpu()
    with lowtide.attach(model, recomputing(N), cuda_graphs=True) as plan:
        assert all(map(torch.equal, run(model), expected))
        assert num_replayed(plan) > NUM_STEPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    def run(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler(enabled=dtype is torch.float16)
        seed_all(3)
        found = []
        for x in inputs(8):
            with torch.autocast("cuda", dtype):
                loss = square_loss(model(x))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(loss.detach().clone())
        return found

    expected = run(model_on_gpu())
    model = model_on_gpu()
    with lowtide.attach(model, mixed(N), cuda_graphs=True) as plan:
        assert all(map(torch.equal, run(model), expected))
        assert num_replayed(plan) == 6


def images(rows: int = 8) -> list[torch.Tensor]:
    return batches((rows, 3, 64, 64), 5, device="cuda")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    width = 64
    block = lambda: nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())  # noqa: E731
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *(block() for _ in range(12)), head).cuda()


def test_fit_keeps_the_budget_with_what_graphs_reserve():
    torch.backends.cudnn.deterministic = True
    try:
        expected = loop(network(), images())
        model = network()
        options = {"optimizer": "adamw", "loss": square_loss, "bandwidth": 0}
        with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
            lowtide.fit(model, images()[0], memory_budget=1000, cuda_graphs=True, **options)
        budget = int(1.3 * refused.value.minimum_bytes)
        gc.collect()
        with lowtide.fit(model, images()[0], memory_budget=budget, cuda_graphs=True, **options) as plan:
            assert "steps are replayed as CUDA graphs" in str(plan).replace("\n             ", " ")
            assert all(map(torch.equal, loop(model, images()), expected))
            assert num_replayed(plan) == 3
            assert plan._part.graphs.held_bytes > 0
            peak = plan.stats().measured_peak_bytes
            assert peak <= budget
            plan.detach()
            plan = lowtide.fit(model, images()[0], memory_budget=budget, cuda_graphs=True, **options)
            plan.detach()
    finally:
        torch.backends.cudnn.deterministic = False


def test_a_language_model_with_its_own_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=500, n_positions=64)

    def run(*, planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).cuda().train()
        batch = {"input_ids": torch.randint(0, 500, (8, 64), device="cuda")}
        batch["labels"] = batch["input_ids"]
        plan = None
        if planned:
            options = {"optimizer": "adamw", "bandwidth": 0, "cuda_graphs": True}
            with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
                lowtide.fit(model, batch, memory_budget=1000, **options)
            budget = int(1.05 * refused.value.minimum_bytes)
            plan = lowtide.fit(model, batch, memory_budget=budget, **options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        seed_all(1)
        losses = []
        for _ in range(6):
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        if plan is not None:
            assert plan.stats().recomputed_per_step > 0
            assert num_replayed(plan) == 4, plan.notes
            plan.detach()
        return losses

    assert all(map(torch.equal, run(planned=True), run(planned=False)))


def test_compiled_blocks():
    def run(*, graphs: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))
        model.cuda()
        given = batches((512, 256), 6, device="cuda")
        options = {"bandwidth": 0, "compile_stages": {"regions": False}, "variants": False, "cuda_graphs": graphs}
        with lowtide.fit(model, given[0], memory_budget="1GiB", **options) as plan:
            found = loop(model, given)
            if graphs:
                assert num_replayed(plan) == 4, plan.notes
        return found

    assert all(map(torch.equal, run(graphs=True), run(graphs=False)))


def test_a_plan_from_a_file(tmp_path):
    expected = loop(model_on_gpu(), inputs())
    model = model_on_gpu()
    with lowtide.attach(model, recomputing(N)) as plan:
        plan.save(tmp_path / "plan.json")
    with lowtide.load_plan(tmp_path / "plan.json", model, cuda_graphs=True) as plan:
        assert all(map(torch.equal, loop(model, inputs()), expected))
        assert num_replayed(plan) == NUM_STEPS - 2


@pytest.mark.parametrize("kind", ["recomputing", "offloading"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_awkward_models(row: Awkward, kind: str):
    """Captured where they can be, and equal in any case."""
    if row.refused:
        pytest.skip("refused with any schedule")
    split = split_for(row.make_measured(), lowtide.measure(row.make_measured(), row.inputs()[0]))
    given = [x.cuda() for x in replace(row, num_steps=NUM_STEPS).inputs()]
    try:
        seed_all(5)
        expected = row.loop(row.make().cuda(), given)
    except Exception as error:
        pytest.skip(f"does not run on CUDA: {error}")
    model = row.make().cuda()
    with lowtide.attach(model, getattr(schedules, kind)(split.num_stages), split=split, cuda_graphs=True):
        seed_all(5)
        assert_equal(row.loop(model, given), expected)
