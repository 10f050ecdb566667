"""What changes after planning, or around a call: equal numbers, or one error that names the stage."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from tests.runtime.schedules import recomputing
from tests.runtime.training import gradients
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.state.environment import Environment, History
from lowtide.runtime.state.rng import Source
from lowtide.runtime.state.writes import Writes

WIDTH = 16
X = torch.linspace(-1, 1, 32 * WIDTH).reshape(32, WIDTH)
Call = Callable[[nn.Module], torch.Tensor]


def stack(make: Callable[[], nn.Module], depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(depth)))


def steps(model: nn.Module, calls: list[Call]) -> dict[str, torch.Tensor]:
    """Gradients and buffers of steps, each of which calls the model in its own way, and what generators give then."""
    torch.manual_seed(1)
    random.seed(2)
    found: dict[str, torch.Tensor] = {}
    for number, call in enumerate(calls):
        model.zero_grad()
        call(model).square().mean().backward()
        found |= {f"{number} {name}": gradient.clone() for name, gradient in gradients(model)}
        found |= {f"{number} {name}": buffer.clone() for name, buffer in model.named_buffers()}
        found[f"{number} next"] = torch.tensor([random.random(), float(torch.rand(()))])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return found


def assert_as_plain(make: Callable[[], nn.Module], calls: list[Call], schedule: lowtide.Schedule | None = None) -> None:
    model = make()
    split = None if isinstance(model, nn.Sequential) else capture(model, X)
    schedule = schedule or recomputing(4 if split is None else split.num_stages)
    with lowtide.attach(model, schedule, split=split, spot_checks=False) as plan:
        got = steps(model, calls)
        assert plan.stats().recomputed_per_step > 0
    expected = steps(make(), calls)
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), OwnNorm(WIDTH)

    def forward(self, x):
        return torch.tanh(self.norm(self.inner(x)))


def test_statistics_that_are_unfrozen_in_a_later_step():
    def call(is_trained: bool) -> Call:
        return lambda model: ([block.norm.train(is_trained) for block in model], model(X))[1]

    assert_as_plain(lambda: stack(Normed), [call(False), call(False), call(True), call(True), call(False)])


class Observing(nn.Module):
    """Writes its buffers in a kernel that counts no version; in the first step it writes what is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("low", torch.tensor([-1.0]))
        self.register_buffer("high", torch.tensor([1.0]))
        self.register_buffer("scale", torch.tensor([2 / 255]))
        self.register_buffer("zero", torch.tensor([128], dtype=torch.int))
        self.register_buffer("on", torch.tensor([1]))

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        return torch.fused_moving_avg_obs_fake_quant(
            y, self.on, self.on, self.low, self.high, self.scale, self.zero, 0.1, 0, 255, 0, False, False
        )


def test_observers_that_write_without_counting_versions():
    assert_as_plain(lambda: stack(Observing), [lambda model, k=k: model(X * k) for k in (1, 2, 3)])


class Projecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.projects = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x):
        if self.projects:
            with torch.no_grad():
                self.inner.weight.mul_(0.9)
        return torch.tanh(self.inner(x))


def test_a_parameter_that_a_later_forward_writes_is_refused_by_name():
    model = stack(Projecting)
    with lowtide.attach(model, recomputing(4)):
        steps(model, [lambda model: model(X)] * 2)
        model[1].projects = True
        with pytest.raises(lowtide.ExecutionError, match=r"stage '0.*' changes parameter '1\.inner\.weight' in place"):
            model(X)


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x, length):
        for block in self.blocks:
            mask = torch.ones(len(x), 1)
            if length < len(x):
                mask.numpy()[length:] = 0
            x = x + block(x * mask)
        return x


def test_a_tensor_that_is_written_through_numpy_between_submodules_is_refused():
    model = Masking()
    split = capture(model, (X, 32))
    with lowtide.attach(model, recomputing(split.num_stages), split=split):
        model(X, 32).sum().backward()
        with pytest.raises(lowtide.ExecutionError, match=r"stage 'blocks.0.*\[32, 1\] in place \(through numpy\)"):
            model(X, 10)


class Noisy(nn.Module):
    """Draws from a generator in a dict, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, settings):
        x = torch.tanh(self.inner(x))
        source = settings["source"]
        if not settings["is_noisy"]:
            return x
        if isinstance(source, torch.Generator):
            return x * torch.rand(x.shape, generator=source)
        return x * float(source.random())


class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack(Noisy)

    def forward(self, x, settings):
        for block in self.blocks:
            x = block(x, settings)
        return x


def seeded_torch() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def seeded_numpy() -> numpy.random.Generator:
    return numpy.random.default_rng(3)


def seeded_python() -> random.Random:
    return random.Random(3)


@pytest.mark.parametrize("make_source", [seeded_torch, seeded_numpy, seeded_python])
def test_generators_that_are_handed_on_in_a_dict(make_source):
    def numbers(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, source = HandsOn(), make_source()
        if planned:
            split = capture(model, (X, {"source": source, "is_noisy": False}))
            lowtide.attach(model, recomputing(split.num_stages), split=split, spot_checks=False)
        found = []
        for is_noisy in (False, True, True):
            model.zero_grad()
            model(X, {"source": source, "is_noisy": is_noisy}).square().mean().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return found

    assert all(map(torch.equal, numbers(True), numbers(False)))


def test_another_thread_that_draws_is_told():
    model, stop = stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(1000)

    with lowtide.attach(model, recomputing(4), spot_checks=False):
        model(X).sum().backward()
        thread = threading.Thread(target=draw)
        thread.start()
        try:
            with pytest.raises(lowtide.ExecutionError, match="drew different random numbers when it was recomputed"):
                steps(model, [lambda model: model(X)] * 200)
        finally:
            stop.set()
            thread.join()
        model(X).sum().backward()


class Seeding(nn.Module):
    """Sets a seed between its submodules, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.seed = stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))), None

    def forward(self, x):
        for block in self.blocks:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            x = block(x)
        return x


def test_seeds_that_are_set_between_submodules_in_a_later_step():
    def call(seed: int | None) -> Call:
        return lambda model: (setattr(model, "seed", seed), model(X))[1]

    assert_as_plain(Seeding, [call(None), call(None), call(5), call(6)])


def blocks() -> nn.Sequential:
    return stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()))


def removed_before_backward(model: nn.Module) -> torch.Tensor:
    handles = [block[0].register_forward_pre_hook(lambda _, args: (args[0] * 1.5,)) for block in model]
    result = model(X)
    for handle in handles:
        handle.remove()
    return result


def added_before_backward(model: nn.Module) -> torch.Tensor:
    result = model(X)
    handles = [block[0].register_forward_hook(lambda *_: None) for block in model]
    handles[0].remove()
    for block in model:
        block[0].register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
    return result


def reading_statistics(model: nn.Module) -> torch.Tensor:
    handles = [block[1].register_forward_hook(lambda m, _, y: y + 0.1 * m.running_mean) for block in model]
    result = model(X)
    for handle in handles:
        handle.remove()
    return result


def patched(model: nn.Module) -> torch.Tensor:
    for block in model:
        block[2].forward = torch.sin
    result = model(X)
    for block in model:
        del block[2].forward
    return result


def switched(model: nn.Module) -> torch.Tensor:
    result = model(X)
    model.eval()
    result.register_hook(lambda _: None)
    return result


@pytest.mark.parametrize("call", [removed_before_backward, added_before_backward, reading_statistics, patched])
def test_hooks_and_methods_that_come_and_go_after_planning(call):
    assert_as_plain(blocks, [lambda model: model(X), call, lambda model: model(X), call])


def test_a_model_that_is_switched_to_eval_before_backward():
    assert_as_plain(blocks, [lambda model: model.train()(X), switched, lambda model: model.train()(X)])


class Sine(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sin if func in (torch.tanh, torch.Tensor.tanh) else func)(*args, **(kwargs or {}))


class Cosine(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.ops.aten.cos.default if func is torch.ops.aten.tanh.default else func
        return func(*args, **(kwargs or {}))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.inner(x)) * torch.linspace(0.5, 1, WIDTH).exp()
        return torch.tanh(y.to(x.dtype) * x)


def under(make_mode: Callable[[], Any]) -> Call:
    def call(model: nn.Module) -> torch.Tensor:
        with make_mode():
            return model(X)

    return call


@pytest.mark.parametrize("make_mode", [Sine, Cosine])
def test_modes_that_stand_around_the_forward_stand_around_recomputation(make_mode):
    assert_as_plain(lambda: stack(Plain), [lambda model: model(X), under(make_mode), under(make_mode)])


def in_double(model: nn.Module) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return model(X)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_dtype_of_the_forward_is_that_of_recomputation():
    assert_as_plain(lambda: stack(Plain), [in_double, lambda model: model(X), in_double])


def test_saved_tensor_hooks_around_a_call_are_refused():
    model = stack(Plain)
    with lowtide.attach(model, recomputing(4)):
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()),
            pytest.raises(lowtide.ExecutionError, match=r"the model is called inside saved-tensor hooks"),
        ):
            model(X)
        model(X).sum().backward()


def test_a_cache_of_parametrised_weights_around_the_forward_is_refused():
    model = nn.Sequential(*(weight_norm(nn.Linear(8, 8)) for _ in range(4)))
    x = torch.randn(4, 8)
    with lowtide.attach(model, recomputing(4)):
        with (
            parametrize.cached(),
            pytest.raises(
                lowtide.ExecutionError, match=r"inside parametrize\.cached\(\), so a recomputation of '0' would"
            ),
        ):
            model(x)
        model(x).sum().backward()
    model = stack(Plain)
    with lowtide.attach(model, recomputing(4)), parametrize.cached():  # which caches nothing here
        model(X).sum().backward()


def test_a_parameter_that_was_replaced_is_looked_after_as_the_former_was():
    model = stack(Plain)
    with lowtide.attach(model, recomputing(4)):
        model(X).sum().backward()
        for block in model[1:]:
            block.inner.weight = nn.Parameter(block.inner.weight.detach().clone())
        loss = model(X).sum()
        with torch.no_grad():
            model[2].inner.weight.mul_(3)
        with pytest.raises(lowtide.ExecutionError, match=r"parameter '2\.inner\.weight', which stage '0.*' uses"):
            loss.backward()


class Schedule:
    """Counts its calls in a plain object."""

    def __init__(self) -> None:
        self.num_calls = 0

    def factor(self) -> float:
        self.num_calls += 1
        return 1 / self.num_calls


class Scheduled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.schedule = nn.Linear(WIDTH, WIDTH), Schedule()

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.schedule.factor()


def test_objects_of_the_users_change_once_a_step_and_not_while_planning():
    assert_as_plain(lambda: stack(Scheduled), [lambda model: model(X)] * 3)
    model = stack(Scheduled)
    lowtide.measure(model, X)
    assert [block.schedule.num_calls for block in model] == [0] * 4


class Resizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("low", torch.ones(1))

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        now = x.detach().amin(0)
        if self.low.numel() == 1:
            self.low.resize_(WIDTH).copy_(now)
        else:
            self.low.lerp_(now, 0.1)
        return x - self.low


def test_a_buffer_that_the_first_forward_resizes():
    model = stack(Resizing)
    lowtide.measure(model, X)
    assert [(block.low.shape, float(block.low)) for block in model] == [((1,), 1.0)] * 4
    assert_as_plain(lambda: stack(Resizing), [lambda model: model(X)] * 3)


@pytest.mark.parametrize("plan", [lowtide.measure, functools.partial(lowtide.fit, memory_budget="1GiB")])
def test_a_refused_model_keeps_its_parameters(plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, WIDTH, max_norm=0.1), *stack(Plain))
    before = model[0].weight.detach().clone()
    with pytest.raises(lowtide.CaptureError, match=r"changes its parameter '0\.weight' in place"):
        plan(model, torch.arange(20))
    assert torch.equal(model[0].weight, before)


class HooksItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.is_hooked = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x):
        if not self.is_hooked:
            self.inner.weight.register_hook(lambda gradient: 0.5 * gradient)
            self.is_hooked = True
        return torch.tanh(self.inner(x))


def test_hooks_on_parameters_that_a_forward_registers_are_not_left_by_planning():
    model = stack(HooksItself)
    lowtide.measure(model, X)
    assert not any(block.inner.weight._backward_hooks for block in model)
    assert_as_plain(lambda: stack(HooksItself), [lambda model: model(X)] * 2)


def test_an_environment_is_marked_rewound_and_left_as_it_is():
    module = nn.Module()
    module.register_buffer("total", torch.zeros(2))
    module.factor, module.table = 1.0, {"parts": [1], "deep": {"flag": False}}
    environment, history = Environment([("m", module)]), History()
    mark = environment.mark()
    module.total += 1
    module.factor = 2.0
    module.table["parts"].append(2)
    module.table["deep"]["flag"] = True
    module.extra = None
    assert [mark.labels[index].name for index in environment.changed(mark)] == ["m.total"]
    environment.end(mark, 1, history)
    with environment.rewound(mark, environment.earlier(mark, 1, history, set)):
        assert module.total.tolist() == [0, 0]
        assert (module.factor, module.table) == (1.0, {"parts": [1], "deep": {"flag": False}})
        assert not hasattr(module, "extra")
        module.total += 5
        module.table = None
    assert module.total.tolist() == [1, 1]
    assert (module.factor, module.table) == (2.0, {"parts": [1, 2], "deep": {"flag": True}})
    assert module.extra is None


@pytest.mark.parametrize("make_source", [seeded_torch, seeded_numpy, seeded_python])
def test_a_source_gives_the_very_same_state_until_somebody_draws(make_source):
    generator = make_source()
    source = Source.of(generator)
    state = source.state()
    assert source.state() is state

    def draw() -> float:
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return float(generator.random())

    number = draw()
    assert source.state() is not state
    source.set(state)
    assert draw() == number


class Followed(nn.Module):
    """A block whose statistics are used in one more way, or in none."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None if use == "averaged" else 0.1)
        self.use = use
        self.other = nn.BatchNorm1d(WIDTH) if use == "tied" else None
        if self.other is not None:
            self.other.running_mean, self.other.running_var = self.norm.running_mean, self.norm.running_var
            self.other.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.norm(self.linear(x)).tanh()
        if self.use == "read":
            x = x * self.norm.running_var.cos()
        elif self.use == "counted":
            x = x / self.norm.num_batches_tracked
        elif self.other is not None:
            x = self.other(x)
        return x


@pytest.mark.parametrize("use", ["none", "averaged", "read", "counted", "tied"])
def test_statistics_that_something_reads_are_found_as_they_were(use):
    assert_as_plain(lambda: stack(lambda: Followed(use)), [lambda model: model(X)] * 4)


class TwoNames(nn.Module):
    """Changes a buffer by one name and reads it by another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH))
        self.same = self.total.view(1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        self.total.add_(y.detach().mean(0))
        return y * (1 + self.same)


def test_memory_that_a_module_keeps_by_two_names_stays_one():
    assert_as_plain(lambda: stack(TwoNames), [lambda model: model(X)] * 3)


class Handing(nn.Module):
    """Hands its statistics on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.norm(x), self.norm.running_mean


class Handed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Handing() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y, mean = block(x)
            x = x + y * mean.cos() + self.blocks[-1].norm.running_var
        return x


def test_statistics_that_a_stage_hands_on_are_found_as_they_were():
    assert_as_plain(Handed, [lambda model: model(X)] * 4)


class CountsAndHandsOn(nn.Module):
    """Counts its calls in a tensor that it hands on with its result; no other code reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_calls = nn.Linear(WIDTH, WIDTH), torch.zeros((), dtype=torch.long)

    def forward(self, given: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *counts = given if isinstance(given, tuple) else (given,)
        y = torch.tanh(self.inner(x))
        self.num_calls.add_(1)
        return y * counts[0].cos() if counts else y, self.num_calls


def test_a_counter_that_only_the_next_stage_reads_is_found_as_it_was():
    forward, backward = lowtide.Forward, lowtide.Backward
    twice = [forward(1, "keep"), forward(2, "drop"), forward(3, "all"), backward(3), forward(1, "keep")]
    twice += [forward(2, "all"), backward(2), forward(1, "all"), backward(1)]
    make = partial(stack, CountsAndHandsOn, 3)
    assert_as_plain(make, [lambda model: model(X)[0]] * 4, lowtide.Schedule("the first twice", twice))


def test_statistics_that_nothing_reads_are_not_copied():
    module = Followed("none")
    environment = Environment([("m", module)] + [(f"m.{n}", m) for n, m in module.named_children()])
    mark = environment.mark()
    seen = Writes(partial(environment.write_ahead, mark))
    with seen:
        module(X)
    environment.end(mark, 1, History(), seen)
    mark, history, mean = environment.mark(), History(), module.norm.running_mean
    assert not mark.copies
    module(X)
    assert len(environment.end(mark, 1, history)) == 3
    after = mean.clone()
    with environment.rewound(mark, environment.earlier(mark, 1, history, set)):
        module(X)
    assert module.norm.running_mean is mean
    assert torch.equal(mean, after)
    module.eval()
    assert len(environment.mark().copies) == 3  # now they are read
