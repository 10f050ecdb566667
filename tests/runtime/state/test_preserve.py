"""Planning leaves no trace: no hook of a parameter runs, no generator moves, no model stays alive."""

from __future__ import annotations

import gc
import random
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from tests.runtime.training import assert_equal, batches, train
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import lowtide
from lowtide.runtime.meter import Meter

SHAPE = (256, 64)
OPTIONS = {"memory_budget": "1GiB", "bandwidth": 0, "optimizer": "sgd-momentum"}


def deep(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(SHAPE[1], SHAPE[1]), nn.Tanh()) for _ in range(depth)))


@contextmanager
def step_in_backward(model: nn.Module) -> Iterator[None]:
    """The optimizer's step is taken as soon as a gradient is there."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01, momentum=0.9) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in optimizers]
    yield
    for hook in hooks:  # else the model stays: hooks of parameters are nothing that a collector sees
        hook.remove()


@pytest.mark.parametrize("before", [False, True])
def test_an_optimizer_that_steps_in_backward_does_not_step_while_planning(before):
    def losses(fitted: bool) -> list[float]:
        model, found = deep(), []
        with ExitStack() as steps:
            if before:
                steps.enter_context(step_in_backward(model))
            if fitted:
                lowtide.fit(model, torch.zeros(SHAPE), **OPTIONS)
            if not before:
                steps.enter_context(step_in_backward(model))
            for num_samples in (256, 512, 256):  # the second is planned for in the midst of training
                torch.manual_seed(num_samples)
                loss = model(torch.randn(num_samples, SHAPE[1])).square().mean()
                loss.backward()
                found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_hooks_on_parameters_do_not_run_while_planning_and_are_there_afterwards():
    model, called = deep(), []
    parameter = next(model.parameters())
    parameter.register_hook(lambda gradient: called.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    with lowtide.fit(model, torch.zeros(SHAPE), **OPTIONS):
        assert called == []
        model(torch.zeros(SHAPE)).sum().backward()
        assert called == ["gradient", "accumulated"]


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SHAPE[1], SHAPE[1])

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) * (1 + random.random() * numpy.random.rand())


def test_planning_leaves_all_generators_as_they_are():
    model = nn.Sequential(*(Draws() for _ in range(4)))
    before = random.getstate(), numpy.random.get_state()[2]
    with lowtide.fit(model, torch.zeros(SHAPE), **OPTIONS):
        assert (random.getstate(), numpy.random.get_state()[2]) == before


class Noise:
    """An object of the user's own, with a generator that is handed over inside of it."""

    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = SimpleNamespace(
            torch=torch.Generator().manual_seed(3), python=random.Random(3), numpy=numpy.random.default_rng(3)
        )

    def states(self):
        own = self.own
        return own.torch.get_state().tolist(), own.python.getstate(), own.numpy.bit_generator.state


class Noised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep(4)

    def forward(self, x, noise):
        for layer in self.layers:
            drawn = torch.rand(x.shape, generator=noise.own.torch)
            x = x + layer(x) * drawn * noise.own.python.random() * noise.own.numpy.random()
        return x


def test_generators_inside_objects_among_the_arguments_give_what_they_give_without_a_plan():
    x, ends = torch.ones(SHAPE), []
    for is_planned in (False, True):
        model, noise = Noised(), Noise()
        if is_planned:
            before = noise.states()
            lowtide.fit(model, (x, noise), **OPTIONS)
            assert noise.states() == before
        losses = [model(inputs, noise).square().mean() for inputs in (x, torch.cat([x, x]))]  # the second plans again
        ends.append(([loss.item() for loss in losses], noise.states()))
    assert ends[0] == ends[1]


class Counted(nn.Module):
    """Counts the calls of its layers in an array, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.counts = deep(4), numpy.zeros(4)

    def forward(self, x):
        for n, layer in enumerate(self.layers):
            self.counts[n] += 1
            x = layer(x) / float(self.counts[n])
        return x


def test_planning_leaves_arrays_as_they_were():
    plain, planned, x = Counted(), Counted(), torch.ones(SHAPE)
    lowtide.fit(planned, x, **OPTIONS)
    assert not planned.counts.any()
    assert [planned(x).sum().item() for _ in range(3)] == [plain(x).sum().item() for _ in range(3)]
    assert planned.counts.tolist() == [3, 3, 3, 3]


def test_a_model_with_parametrizations_is_let_go():
    model = nn.Sequential(*(nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh()) for _ in range(3)))
    lowtide.fit(model, torch.zeros(4, 8), **OPTIONS).detach()
    alive = weakref.ref(model[0][0])
    del model
    gc.collect()
    assert alive() is None


def test_parameters_that_are_trained_later_are_planned_for():
    with Meter("cpu") as others:  # a budget counts what other tests have left, too
        pass
    model, x = deep(12), batches((4096, SHAPE[1]), 1)[0]
    model[:8].requires_grad_(False)
    budget = 8 * 2**20 + others.start_bytes

    def peak_bytes() -> int:
        with Meter("cpu") as meter:
            model(x).sum().backward()
        model.zero_grad()
        return meter.peak_bytes

    options = {"bandwidth": 0, "optimizer": "sgd", "loss": torch.sum}
    with lowtide.fit(model, x, memory_budget=budget, **options) as plan:
        assert peak_bytes() <= budget
        few = plan.schedule
        model.requires_grad_(True)
        assert peak_bytes() <= budget
        all_of_them = plan.schedule
        assert all_of_them != few
        model[:8].requires_grad_(False)  # needs no more than was planned for
        assert peak_bytes() <= budget
        assert plan.schedule == all_of_them
    with lowtide.fit(model, x, memory_budget=budget, replan=False, **options):
        model.requires_grad_(True)
        with pytest.raises(lowtide.PlanError, match="more parameters require gradients than when"):
            model(x)


class Scaled(nn.Module):
    """Reads a buffer, which has memory of its own, by which one number is many, or shares its layer's weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(SHAPE[1], SHAPE[1])
        weight = self.layer.weight
        buffers = {"expanded": torch.ones(1).expand(SHAPE[1]), "weight": weight.detach(), "row": weight.detach()[3]}
        self.register_buffer("scale", buffers[kind])

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.scale.mean()


@pytest.mark.filterwarnings("ignore:a step took")  # train has an input of its own, of which fit is not told
@pytest.mark.parametrize("kind", ["expanded", "weight", "row"])
def test_buffers_may_be_expanded_and_share_the_memory_of_parameters(kind):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(Scaled(kind) for _ in range(6)))

    model, inputs = make(), batches(SHAPE, 3)
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, inputs[0], **OPTIONS | {"memory_budget": 1000})
    with lowtide.fit(model, inputs[0], **OPTIONS | {"memory_budget": caught.value.minimum_bytes}) as plan:
        assert_equal(train(model, inputs), train(make(), inputs))
        assert plan.stats().recomputed_per_step > 0


@dataclass
class Progress:
    num_calls: int = 0
    parts: list[int] = field(default_factory=list)


class Counting(nn.Module):
    """Counts its calls in an object that holds nothing but settings."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.progress = kind(num_calls=0, parts=[])

    def forward(self, x):
        self.progress.num_calls += 1
        self.progress.parts.append(len(x))
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("kind", [Progress, SimpleNamespace, Namespace])
def test_planning_leaves_settings_in_objects_as_they_are(kind):
    model = nn.Sequential(*(Counting(kind) for _ in range(3)))
    progress = [block.progress for block in model]
    lowtide.measure(model, torch.zeros(8, 16))
    for block, former in zip(model, progress, strict=True):
        assert block.progress is former
        assert vars(former) == {"num_calls": 0, "parts": []}


class Collector:
    """Of results that hooks see: all of them, by name, and their number."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []
        self.named: dict[str, list[torch.Tensor]] = {"block": []}
        self.count = 0

    def see(self, module: nn.Module, args: object, result: torch.Tensor) -> None:
        self.results.append(result)
        self.named["block"].append(result)
        self.named.setdefault("new", [])
        self.count += 1


def test_planning_leaves_nothing_in_what_hooks_fill():
    model, collector, results, kept = deep(), Collector(), deque(), torch.ones(2)
    results.append(kept)
    model[1].register_forward_hook(collector.see)
    model[2].register_forward_hook(lambda module, args, result: results.append(result))
    model[3].register_forward_hook(partial(lambda found, module, args, result: found.update(x=result), found := {}))
    lowtide.fit(model, torch.zeros(SHAPE), **OPTIONS)
    assert len(results) == 1
    assert results[0] is kept
    assert (collector.results, collector.named, collector.count, found) == ([], {"block": []}, 0, {})
    model(torch.zeros(SHAPE)).sum().backward()
    assert (len(results), collector.count, len(collector.results), *found) == (2, 1, 1, "x")
