"""On a GPU: the same numbers under any schedule, whatever the streams do, and peaks within the budget."""

from __future__ import annotations

import gc
import itertools
import math
import warnings

import pytest
import torch
from tests.runtime import models
from tests.runtime.budgets import measured_once
from tests.runtime.schedules import mixed, offloading, random_schedule, recomputing
from tests.runtime.training import assert_equal, batches, gradients, train
from torch import nn

import lowtide
from lowtide import Backward, Forward, Offload, Prefetch, Release, Schedule
from lowtide.runtime.transfer import pinned_tier
from lowtide.runtime.transfer.pinned_tier import PinnedTier
from lowtide.zoo import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

N = len(models.stages_of_every_kind())
WIDTH = 64
SHAPE = (256, WIDTH)
LONG_SLEEP = 50_000_000  # clock cycles, some 30 ms


def model_on_gpu() -> nn.Sequential:
    return models.stages_of_every_kind(WIDTH).cuda()


def inputs(num_steps: int = 3) -> list[torch.Tensor]:
    return batches(SHAPE, num_steps, device="cuda")


@pytest.fixture(scope="module")
def plain_numbers():
    return train(model_on_gpu(), inputs())


def tier_of(plan: lowtide.Plan) -> PinnedTier:
    tier = plan._part.execution.machine.tier
    assert isinstance(tier, PinnedTier)
    return tier


@pytest.mark.parametrize("seed", range(24))
def test_any_legal_schedule(seed, plain_numbers):
    schedule = random_schedule(N, seed, moves=[0.0, 0.3, 0.6][seed % 3], drops=0.5)
    model = model_on_gpu()
    with lowtide.attach(model, schedule):
        assert_equal(train(model, inputs()), plain_numbers)


@pytest.mark.parametrize("schedule", [recomputing(N), offloading(N), mixed(N)], ids=lambda s: s.strategy)
def test_accumulation(schedule):
    expected = train(model_on_gpu(), inputs(4), micro_batches=4)
    model = model_on_gpu()
    with lowtide.attach(model, schedule):
        assert_equal(train(model, inputs(4), micro_batches=4), expected)


# Streams


@pytest.fixture
def sleeping_copies(monkeypatch):
    """Copies start long after they were asked for."""

    def slowly(method, stream_name):
        def wrapped(self, *args):
            with torch.cuda.stream(getattr(self, stream_name)):
                torch.cuda._sleep(LONG_SLEEP)
            return method(self, *args)

        return wrapped

    monkeypatch.setattr(PinnedTier, "store", slowly(PinnedTier.store, "to_host"))
    monkeypatch.setattr(PinnedTier, "load", slowly(PinnedTier.load, "to_device"))


def test_slow_copies(sleeping_copies, plain_numbers):
    model = model_on_gpu()
    with lowtide.attach(model, offloading(N)):
        assert_equal(train(model, inputs()), plain_numbers)


def test_slow_computing(plain_numbers):
    model = model_on_gpu()
    for stage in model:
        stage.register_forward_hook(lambda *_: torch.cuda._sleep(LONG_SLEEP // 4))
        stage.register_full_backward_hook(lambda *_: torch.cuda._sleep(LONG_SLEEP // 4))
    with lowtide.attach(model, offloading(N)):
        assert_equal(train(model, inputs()), plain_numbers)


def test_a_prefetch_before_its_offload_has_ended(sleeping_copies, plain_numbers):
    operations: list = []
    for k in range(1, N + 1):
        operations += [Forward(k, "all"), Offload("abar", k), Release("abar", k), Prefetch("abar", k)]
    operations += [Backward(k) for k in range(N, 0, -1)]
    model = model_on_gpu()
    with lowtide.attach(model, Schedule("", operations)):
        assert_equal(train(model, inputs()), plain_numbers)


@pytest.mark.parametrize("schedule", [recomputing(N), offloading(N), mixed(N)], ids=lambda s: s.strategy)
def test_the_users_own_stream(schedule, plain_numbers):
    model = model_on_gpu()
    given = inputs()
    with lowtide.attach(model, schedule):
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            model.load_state_dict(model_on_gpu().state_dict())
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                numbers = train(model, given)
            torch.cuda.synchronize()
            assert_equal(numbers, plain_numbers)


def test_host_memory_is_poisoned_when_it_is_free():
    expected = train(model_on_gpu(), inputs(20))
    model = model_on_gpu()
    with lowtide.attach(model, offloading(N)) as plan:
        tier = tier_of(plan)

        def poison(*_):
            torch.cuda.synchronize()
            for slab in tier._slabs.made:
                for offset, size in slab.arena.free_rooms():
                    slab.memory[offset : offset + size].fill_(255)  # NaN in every floating dtype

        handle = model.register_forward_pre_hook(poison)
        assert_equal(train(model, inputs(20)), expected)
        handle.remove()


class Returned(torch.autograd.Function):
    """Its backward returns a view of what it saved."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved * 1)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].view_as(gradient), None


class ReturnsSaved(nn.Module):
    def forward(self, x):
        return Returned.apply(x, x.detach() * 3)


def test_a_gradient_that_is_a_view_of_a_fetched_tensor():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), ReturnsSaved(), nn.Linear(WIDTH, WIDTH), ReturnsSaved()).cuda()

    expected = train(build(), inputs())
    model = build()
    with lowtide.attach(model, offloading(4)):
        assert_equal(train(model, inputs()), expected)


# Autocast


@pytest.mark.parametrize("schedule", [recomputing(N), offloading(N), mixed(N)], ids=lambda s: s.strategy)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_scaling(schedule, dtype):
    def run(model):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
        numbers = {}
        for index, x in enumerate(inputs()):
            with torch.autocast("cuda", dtype):
                with torch.no_grad():
                    model(x)
                loss = model(x).float().square().mean() * (math.inf if index == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            numbers.update({f"{index} {n}": p.detach().clone() for n, p in model.named_parameters()})
            numbers[f"{index} scale"] = torch.tensor(scaler.get_scale())
        return numbers

    model = model_on_gpu()
    with lowtide.attach(model, schedule):
        assert_equal(run(model), run(model_on_gpu()))


# Compiled stages


def test_compiled_stages():
    def build():
        torch.manual_seed(0)
        model, batch = make("gpt2", device="cuda", batch=4, length=64, layers=4, width=64, heads=4, vocabulary=128)
        return model, batch

    def run(model, batch):
        torch.manual_seed(3)
        for _ in range(2):
            model(**batch).backward()
        return dict(gradients(model))

    plain, batch = build()
    for block in plain.blocks:
        block.compile(dynamic=False)
    model, _ = build()
    stages = [f"blocks.{k}" for k in range(4)]
    options = {"strategy": "segments", "bandwidth": 0, "compile_stages": {"regions": False}, "variants": False}
    with lowtide.fit(model, batch, memory_budget="8GiB", stages=stages, **options):
        assert_equal(run(model, batch), run(plain, batch))


# Budgets


def steps_peak(model: nn.Module, batch: dict, num_steps: int) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(num_steps):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@measured_once()
def test_rising_budgets():
    """Each of eight budgets holds over 20 steps, first optimizer step included, and more memory is never slower.

    Stages are timed once for all fits: beside other tests their times differ by more than the schedules do.
    """
    torch.manual_seed(0)
    model, batch = make("resnet50", device="cuda", batch=16, image=160)
    plain = steps_peak(model, batch, 3)
    settings = {"bandwidth": 0, "optimizer": "sgd-momentum", "strategy": "rotor"}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, batch, memory_budget="1MiB", **settings)
    least, most = 1.02 * caught.value.minimum_bytes, 1.05 * plain
    chains, seconds = dict[int, lowtide.Chain](), []
    for eighth in range(8):
        budget = int(least + (most - least) * eighth / 7)
        with lowtide.fit(model, batch, memory_budget=budget, **settings) as plan:
            peak = steps_peak(model, batch, 20)
            assert peak <= budget
            predicted = plan.stats().predicted_peak_bytes
            print(f"budget {budget}, predicted {predicted}, measured {peak}")
            assert predicted == pytest.approx(peak, rel=0.05)
            chain = chains.setdefault(plan.chain.num_stages, plan.chain)  # the leanest may have finer cuts
            seconds.append(lowtide.simulate(chain, plan.schedule).seconds)
    assert all(later <= earlier * 1.02 for earlier, later in itertools.pairwise(seconds))


def test_memory_is_flat_over_100_steps():
    model = model_on_gpu()
    with lowtide.attach(model, offloading(N)) as plan:
        optimizer = torch.optim.Adam(model.parameters())
        figures = []
        gc.disable()
        try:
            for index in range(100):
                model(inputs(1)[0]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.cuda.synchronize()
                if index % 10 == 3:
                    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                    figures.append((allocated, reserved, tier_of(plan).capacity_bytes))
        finally:
            gc.enable()
        assert len(set(figures)) == 1


def test_the_host_budget_holds():
    model = model_on_gpu()
    needed = 64 * 2**20
    with lowtide.attach(model, offloading(N), host_memory_budget=needed) as plan:
        train(model, inputs(2))
        assert 0 < tier_of(plan).capacity_bytes <= needed
    with (
        lowtide.attach(model, offloading(N), host_memory_budget="1KiB"),
        pytest.raises(lowtide.ExecutionError, match="host_memory_budget"),
    ):
        model(inputs(1)[0])


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch, plain_numbers):
    pinned_already = torch.empty(2**26, dtype=torch.uint8).pin_memory()
    monkeypatch.setattr(pinned_tier, "_filled", lambda *_: pinned_already)
    model = model_on_gpu()
    with (
        lowtide.attach(model, offloading(N)),
        pytest.warns(lowtide.LowtideWarning, match=r"could not be pinned.*ulimit"),
    ):
        model(inputs()[0]).sum().backward()
    model = model_on_gpu()
    with lowtide.attach(model, offloading(N)), warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        assert_equal(train(model, inputs()), plain_numbers)


def test_out_of_memory_in_a_step_leaves_the_next_as_plain():
    expected = train(model_on_gpu(), inputs())
    model = model_on_gpu()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    greedy = model[5].register_forward_hook(
        lambda *_: torch.empty(2**46, device="cuda") if lowtide.is_recomputing() else None
    )
    with lowtide.attach(model, recomputing(N)):
        with pytest.raises(torch.OutOfMemoryError):
            model(inputs(1)[0]).sum().backward()
        greedy.remove()
        model.zero_grad()
        model.load_state_dict(state)
        assert_equal(train(model, inputs()), expected)
