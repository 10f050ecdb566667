"""On a GPU: weights, gradients and optimizer state in pinned memory, the same numbers whatever the streams do."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.runtime.execute.test_second_names import LOOPS, SCHEDULES, ran
from tests.runtime.schedules import (
    mixed,
    offloading,
    parking,
    recomputing,
    repeating,
    stepping_in_backward,
    storing,
)
from tests.runtime.training import Numbers, assert_equal, seed_all
from torch import nn

import lowtide
from lowtide import Schedule
from lowtide.errors import ExecutionError
from lowtide.runtime.transfer.bandwidth import measured_bandwidth
from lowtide.runtime.transfer.pinned_tier import PinnedTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

WIDTH, NUM_BLOCKS = 512, 4
LONG_SLEEP = 20_000_000  # clock cycles, some 12 ms

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "for-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False, fused=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "fused momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True, fused=True),
}
make_adamw = OPTIMIZERS["fused"]


def network(dtype: torch.dtype = torch.float32, width: int = WIDTH, num_blocks: int = NUM_BLOCKS) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))
        for _ in range(num_blocks)
    )
    return nn.Sequential(*blocks).to("cuda", dtype)


class Tied(nn.Sequential):
    """The first and the last stage have one weight, and the second is frozen."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(*(nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(NUM_BLOCKS)))
        self[3].weight = self[0].weight
        self[1].requires_grad_(False)


class Adapted(nn.Module):
    """A frozen weight with small trained ones, as for LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device="cuda").requires_grad_(False)
        self.down, self.up = (nn.Linear(*s, bias=False, device="cuda") for s in ((WIDTH, 16), (16, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(torch.tanh(self.down(x)))


def adapted() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, device="cuda").requires_grad_(False), *(Adapted() for _ in range(3)))


def numbers_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
    numbers = {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    for index, state in enumerate(optimizer.state.values()):
        numbers |= {f"state {index} {name}": value.clone() for name, value in state.items()}
    return numbers


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int = 6,
    *,
    width: int = WIDTH,
    micro_batches: int = 1,
    clips: bool = True,
    autocast: torch.dtype | None = None,
    notes: bool = True,
) -> Numbers:
    """Steps with clipping, a scheduler, and gradients set to None and to zero in turn; `notes`: copy all that there is,
    besides losses and norms.
    """
    seed_all(1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    dtype = next(model.parameters()).dtype
    generator, numbers = torch.Generator().manual_seed(2), dict[str, torch.Tensor]()
    for index in range(num_steps):
        for _ in range(micro_batches):
            x = torch.randn(64, width, generator=generator).to("cuda", dtype)
            with nullcontext() if autocast is None else torch.autocast("cuda", autocast):
                loss = (model(x).float() ** 2).mean()
            loss.backward()
            numbers[f"{index} loss"] = loss.detach()
        if clips:
            numbers[f"{index} norm"] = nn.utils.clip_grad_norm_(model.parameters(), 0.05).clone()
        if clips and notes:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            numbers |= {f"{index} gradient of {name}": gradient.clone() for name, gradient in gradients.items()}
            del gradients
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    return numbers | numbers_of(model, optimizer) if notes else numbers


def compare(make: Make, schedule: Schedule, model_of: Callable[[], nn.Module] = network, **settings: Any) -> None:
    """Train plainly and with everything parked."""
    plain = model_of()
    plain_optimizer = make([p for p in plain.parameters() if p.requires_grad])
    expected = train(plain, plain_optimizer, **settings)
    model = model_of()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    with lowtide.attach(model, schedule, optimizer=optimizer) as plan:
        assert_equal(train(model, optimizer, **settings), expected)
        assert plan.stats().moved_bytes_per_step > 0
    assert_equal(numbers_of(model, optimizer), numbers_of(plain, plain_optimizer))  # on the device again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_a_place_on_the_host_is_a_tensor_of_the_device(dtype):
    tier, like = PinnedTier(torch.device("cuda", 0)), torch.randn(65, 129, device="cuda").to(dtype)
    before = torch.cuda.memory_allocated()
    mirror = tier.mirror(like)
    place = mirror.tensor
    assert torch.cuda.memory_allocated() == before
    assert place.device == like.device
    assert (place.dtype, place.shape, place.stride()) == (like.dtype, like.shape, like.stride())
    place.copy_(like)
    assert torch.equal(place, like)
    assert torch.equal(place.clone(), like)
    assert torch.equal(place.cpu(), like.cpu())
    assert place[3, 4].item() == like[3, 4].item()
    place.copy_(like.cpu())  # as `load_state_dict` does
    file = io.BytesIO()
    torch.save(place, file)
    file.seek(0)
    assert torch.equal(torch.load(file), like)
    assert torch.equal(torch._foreach_norm([place])[0], torch._foreach_norm([like])[0])
    torch._foreach_mul_([place], 0.5)
    assert torch.equal(place, like * 0.5)
    torch.cuda.synchronize()
    assert torch.equal(mirror.host, (like * 0.5).cpu().reshape(-1).view(torch.uint8))
    assert torch.equal(copy.deepcopy(place), place)
    place.zero_()
    assert not place.any()


def test_pinned_memory_serves_one_schedule_after_the_other():
    said: list[tuple[str, float]] = []
    tier = PinnedTier(torch.device("cuda", 0), progress=lambda *entry: said.append(entry))
    tier.expect(2**27)
    like = torch.ones(2**20, device="cuda")
    mirror = tier.mirror(like)
    address = mirror.host.data_ptr()
    assert said[-1] == ("pinning host memory", 1.0)
    said.clear()
    del mirror
    tier.expect(2**26)
    assert tier.mirror(like).host.data_ptr() == address
    assert not said
    assert tier.capacity_bytes == 2**27


def test_copies_down_do_not_wait_for_copies_up():
    tier, tensors = PinnedTier(torch.device("cuda", 0)), [torch.ones(2**16, device="cuda") for _ in range(2)]
    mirrors = [tier.mirror(tensor) for tensor in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(tier.to_device):
        torch.cuda._sleep(10 * LONG_SLEEP)
    tier.copy_up([(tensors[0], mirrors[0])])
    tier.copy_down([(tensors[1], mirrors[1])])
    tier.store([tensors[1].untyped_storage()])
    tier.to_host.synchronize()
    assert not tier.to_device.query()


@pytest.mark.parametrize("is_mirror", [False, True])
def test_room_that_is_given_back_is_not_written_while_it_is_read(is_mirror):
    tier = PinnedTier(torch.device("cuda", 0), 2**18, 2**18)
    old, new, found = (torch.full((2**16,), value, device="cuda") for value in (1.0, 2.0, 0.0))
    if is_mirror:
        mirror = tier.mirror(old)
        tier.copy_down([(old, mirror)]).wait()
        torch.cuda.synchronize()
        with torch.cuda.stream(tier.to_device):
            torch.cuda._sleep(LONG_SLEEP)
        ticket = tier.copy_up([(found, mirror)])
        del mirror
    else:
        region, _ = tier.store([old.untyped_storage()])
        torch.cuda.synchronize()
        with torch.cuda.stream(tier.to_device):
            torch.cuda._sleep(LONG_SLEEP)
        ticket = tier.load(region, [found.untyped_storage()])
        del region
    tier.store([new.untyped_storage()])  # into the same room: there is no other
    ticket.wait()
    assert torch.equal(found, old)


@pytest.mark.parametrize("base", [storing(NUM_BLOCKS), recomputing(NUM_BLOCKS)], ids=lambda s: s.strategy)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_numbers(name, base):
    compare(OPTIMIZERS[name], parking(base))


@pytest.mark.parametrize("base", [offloading, mixed, repeating], ids=lambda of: of.__name__)
def test_with_activations_that_move_and_are_recomputed(base):
    compare(make_adamw, parking(base(NUM_BLOCKS)))


@pytest.mark.parametrize("base", [storing(NUM_BLOCKS), recomputing(NUM_BLOCKS)], ids=lambda s: s.strategy)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_backward(name, base):
    compare(OPTIMIZERS[name], stepping_in_backward(base), clips=False)


def test_gradients_that_were_used_up_are_refused():
    model = network()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, stepping_in_backward(storing(NUM_BLOCKS)), optimizer=optimizer):
        model(torch.ones(4, WIDTH, device="cuda")).sum().backward()
        with pytest.raises(ExecutionError, match="this gradient was used up"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_bfloat16():
    compare(make_adamw, parking(recomputing(NUM_BLOCKS)), lambda: network(torch.bfloat16))


def test_accumulation():
    compare(make_adamw, parking(recomputing(NUM_BLOCKS)), micro_batches=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    compare(make_adamw, parking(recomputing(NUM_BLOCKS)), autocast=dtype)


@pytest.mark.parametrize("model_of", [Tied, adapted])
@pytest.mark.parametrize("schedule", [parking, stepping_in_backward], ids=lambda of: of.__name__)
def test_tied_and_frozen_weights(model_of, schedule):
    compare(make_adamw, schedule(recomputing(NUM_BLOCKS)), model_of, clips=schedule is parking)


@pytest.mark.parametrize("name", ["fused", "foreach"])
def test_a_scaler_that_skips_a_step(name):
    """The fused step divides by the scale itself where gradients are not clipped."""

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        seed_all(1)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=2)
        for index in range(6):
            x = torch.randn(64, WIDTH, device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = (model(x).float() ** 2).mean() * (float("inf") if index == 2 else 1.0)
            scaler.scale(loss).backward()
            if index % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return numbers_of(model, optimizer) | {"scale": torch.tensor(scaler.get_scale())}

    plain, model = network(), network()
    optimizer = OPTIMIZERS[name](model.parameters())
    expected = scaled(plain, OPTIMIZERS[name](plain.parameters()))
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        assert_equal(scaled(model, optimizer), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in ("arrays", "memory_of_numpy", "shared_memory")])
def test_every_name_sees_the_same_numbers(name, schedule, monkeypatch):
    monkeypatch.setattr(PinnedTier, "smallest_bytes", 1)  # so that weights this small move
    with torch.device("cuda"):
        assert ran(name, SCHEDULES[schedule]) == ran(name, None)


def test_what_is_parked_takes_no_device_memory():
    x = torch.randn(64, WIDTH, device="cuda")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    other = network()
    step(other, torch.optim.AdamW(other.parameters(), fused=True))  # libraries take their workspaces
    del other
    model = network()
    one = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = torch.cuda.memory_allocated() - one
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        step(model, optimizer)
        assert torch.cuda.memory_allocated() - before < one / 4
        step(model, optimizer)  # the first two compare weights with their mirrors
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer)
        # a block's weights, gradient and two moments, and less than as much for activations and temporaries
        assert torch.cuda.max_memory_allocated() - before < 8 * one / NUM_BLOCKS
        assert all(p.is_cuda and p.untyped_storage().nbytes() for p in model.parameters())
        assert all(torch.equal(p, p.cpu().cuda()) for p in model.parameters())
    assert torch.cuda.memory_allocated() - before >= 3 * one


@pytest.mark.parametrize("method", ["copy_down", "copy_up"])
def test_late_copies(method, monkeypatch):
    plain = getattr(PinnedTier, method)
    stream = "to_host" if method == "copy_down" else "to_device"

    def slowly(self, pairs):
        with torch.cuda.stream(getattr(self, stream)):
            torch.cuda._sleep(LONG_SLEEP)
        return plain(self, pairs)

    monkeypatch.setattr(PinnedTier, method, slowly)
    for schedule in (parking(recomputing(NUM_BLOCKS)), parking(storing(NUM_BLOCKS))):
        compare(make_adamw, schedule, num_steps=3)
    compare(make_adamw, stepping_in_backward(recomputing(NUM_BLOCKS)), num_steps=3, clips=False)


def test_late_computing():
    """A block of memory that is freed is not written by a copy while the stage that had it still computes."""
    expected = train(plain := network(), torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9), 2)
    model = network()
    for block in model:
        block.register_forward_hook(lambda *_: torch.cuda._sleep(LONG_SLEEP // 4))
        block.register_full_backward_hook(lambda *_: torch.cuda._sleep(LONG_SLEEP // 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        assert_equal(train(model, optimizer, 2), expected)


def test_the_users_own_stream():
    expected = train(plain := network(), make_adamw(plain.parameters()), 3)
    model = network()
    optimizer = make_adamw(model.parameters())
    torch.cuda.synchronize()
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        with torch.cuda.stream(torch.cuda.Stream()):
            numbers = train(model, optimizer, 3)
        torch.cuda.synchronize()
        assert_equal(numbers, expected)


def test_a_checkpoint_is_saved_and_loaded_without_the_device(tmp_path):
    plain = network()
    plain_optimizer = make_adamw(plain.parameters())
    train(plain, plain_optimizer, 2)
    expected_midst = numbers_of(plain, plain_optimizer)
    torch.save({"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()}, tmp_path / "checkpoint")
    expected = train(plain, plain_optimizer, 2)
    model = network()
    optimizer = make_adamw(model.parameters())
    with lowtide.attach(model, parking(recomputing(NUM_BLOCKS)), optimizer=optimizer):
        train(model, optimizer, 2)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "midst")
        found = torch.load(tmp_path / "checkpoint", map_location="cpu")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        assert torch.cuda.max_memory_allocated() - before <= 2**17  # state of small weights, and numbers of steps
        assert_equal(train(model, optimizer, 2), expected)
    fresh = network()
    fresh_optimizer = make_adamw(fresh.parameters())
    found = torch.load(tmp_path / "midst")
    fresh.load_state_dict(found["model"])
    fresh_optimizer.load_state_dict(found["optimizer"])
    assert_equal(numbers_of(fresh, fresh_optimizer), expected_midst)
    assert_equal(train(fresh, fresh_optimizer, 2), expected)


def square(result: torch.Tensor) -> torch.Tensor:
    return (result.float() ** 2).mean()


# 8 blocks of 8 MiB: what an allocator rounds up is little beside the budgets.
LARGER = {"width": 1024, "num_blocks": 8}


@pytest.mark.parametrize("share", [0.6, 0.35])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_fit_within_less_than_weights_gradients_and_state(share, in_backward, autocast):
    """The whole way: measured, planned with joint, and executed within the budget, 10 steps with equal numbers."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        return train(model, optimizer, 10, width=1024, clips=not in_backward, autocast=autocast, notes=False)

    plain = network(**LARGER)
    plain_optimizer = make_adamw(plain.parameters())
    expected = steps(plain, plain_optimizer)
    weights = {name: number.cpu() for name, number in numbers_of(plain, plain_optimizer).items()}
    del plain, plain_optimizer
    gc.collect()
    others = torch.cuda.memory_allocated()
    model = network(**LARGER)
    resident = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = make_adamw(model.parameters())
    with nullcontext() if autocast is None else torch.autocast("cuda", autocast):
        plan = lowtide.fit(
            model,
            torch.randn(64, 1024, device="cuda"),
            memory_budget=others + int(share * resident),
            strategy="joint",
            optimizer=optimizer,
            loss=square,
            step_in_backward=in_backward,
        )
    with plan:
        torch.cuda.reset_peak_memory_stats()
        got = steps(model, optimizer)
        assert torch.cuda.max_memory_allocated() <= plan.memory_budget
        assert plan.stats().measured_peak_bytes <= plan.memory_budget
        assert_equal(got, expected)
        assert_equal({name: number.cpu() for name, number in numbers_of(model, optimizer).items()}, weights)


def test_weights_move_by_default_where_nothing_else_fits():
    model = network(**LARGER)
    resident = 4 * sum(p.nbytes for p in model.parameters())
    optimizer = make_adamw(model.parameters())
    budget = torch.cuda.memory_allocated() - resident // 4 + int(0.5 * resident)
    x = torch.randn(64, 1024, device="cuda")
    with lowtide.fit(model, x, memory_budget=budget, optimizer=optimizer, loss=square) as plan:
        assert plan.schedule.strategy == "joint"
        assert "with all weights and optimizer state on the device" in str(plan)
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, 3, width=1024, notes=False)
        assert torch.cuda.max_memory_allocated() <= budget


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_model_that_is_on_the_cpu_is_never_on_the_device_as_a_whole(in_backward, autocast):
    """The budget is below its weights alone (but for autocast, which keeps a cast of each); the optimizer was made
    before, with the parameters on the CPU.
    """
    share = 0.95 if autocast is None else 1.8
    for both_ways in (False, True):
        measured_bandwidth(torch.device("cuda", 0), both_ways=both_ways)  # once, with much memory

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        return train(model, optimizer, 5, width=1024, clips=not in_backward, autocast=autocast, notes=False)

    plain = network(**LARGER)
    plain_optimizer = make_adamw(plain.parameters())
    expected = steps(plain, plain_optimizer)
    weights = {name: number.cpu() for name, number in numbers_of(plain, plain_optimizer).items()}
    more = {name: number.cpu() for name, number in steps(plain, plain_optimizer).items()}
    del plain, plain_optimizer
    gc.collect()
    model = network(**LARGER).to("cpu")
    own = sum(p.nbytes for p in model.parameters())
    optimizer = make_adamw(model.parameters())
    parameters = list(model.parameters())
    gc.collect()
    others = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with nullcontext() if autocast is None else torch.autocast("cuda", autocast):
        plan = lowtide.fit(
            model,
            torch.randn(64, 1024),
            memory_budget=others + int(share * own),
            optimizer=optimizer,
            loss=square,
            step_in_backward=in_backward,
            device="cuda",
        )
    assert torch.cuda.max_memory_allocated() - others < max(1.0, share) * own
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(parameter.is_cuda for parameter in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    got = steps(model, optimizer)
    assert torch.cuda.max_memory_allocated() <= plan.memory_budget
    assert_equal(got, expected)
    assert_equal({name: number.cpu() for name, number in numbers_of(model, optimizer).items()}, weights)
    plan.detach()
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert_equal({name: number.cpu() for name, number in numbers_of(model, optimizer).items()}, weights)
    model.to("cuda")
    for state in optimizer.state.values():
        state |= {name: value.to("cuda") for name, value in state.items()}
    assert_equal({name: number.cpu() for name, number in steps(model, optimizer).items()}, more)


def test_a_link_that_is_busy_both_ways_is_measured():
    device = torch.device("cuda")
    # How fast is for benchmarks.parked to say: tests share the link.
    both_ways = measured_bandwidth(device, both_ways=True)
    assert both_ways > 0
    assert measured_bandwidth(device, both_ways=True) == both_ways


def test_a_model_that_is_on_the_device_already_stays_there():
    model = network(**LARGER)
    optimizer = make_adamw(model.parameters())
    x = torch.randn(64, 1024)
    square(model(x.to("cuda"))).backward()  # cuBLAS takes its workspaces, which stay
    optimizer.zero_grad()
    own_bytes = sum(p.nbytes for p in model.parameters())
    # Less than what is there before the first step: that is not taken for the step's.
    budget = torch.cuda.memory_allocated() - own_bytes // 4
    with lowtide.fit(model, x, memory_budget=budget, optimizer=optimizer, loss=square, device="cuda") as plan:
        assert plan.schedule.strategy == "joint"
        train(model, optimizer, 2, width=1024, notes=False)
        assert plan.stats().measured_peak_bytes <= budget
    assert all(parameter.is_cuda for parameter in model.parameters())
