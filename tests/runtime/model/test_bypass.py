"""Calls that would pass a plan by are noticed, and compiling under a plan is refused."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from tests.runtime.schedules import repeating
from torch import nn

import lowtide
from lowtide.runtime.model.split import Split, StageSplit, Unit

X = torch.ones(4, 8)


def network(n: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n)))


class Decorated(nn.Module):
    """Whose forward is called through another function, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class OwnCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class PolitelyOwnCall(OwnCall):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Module.__call__(self, x)


def split_of(model: nn.Module) -> Split:
    prefix = "" if isinstance(model, nn.Sequential) else "layers."
    return Split(tuple(StageSplit(f"{prefix}{k}", (Unit(f"{prefix}{k}"),)) for k in range(3)))


def attached(model: nn.Module) -> lowtide.Plan:
    return lowtide.attach(model, repeating(3), split=split_of(model))


@pytest.mark.parametrize("build", [network, Decorated])
def test_forward_called_directly_warns_once(build):
    model = build()
    with attached(model) as plan:
        with pytest.warns(lowtide.LowtideWarning, match=r"call the model itself, model\(x\)") as told:
            model.forward(X).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error", lowtide.LowtideWarning)
            model.forward(X).sum().backward()
        assert plan.stats().num_steps == 0
        model(X).sum().backward()
        assert plan.stats().num_steps == 1
    assert build is Decorated or told[0].filename == __file__  # where it was called


def test_a_call_of_its_own_that_does_not_come_to_modules():
    model = OwnCall()
    with (
        attached(model),
        pytest.warns(lowtide.LowtideWarning, match=r"the __call__ of OwnCall does not call nn.Module's"),
    ):
        model(X)
    with pytest.raises(lowtide.CaptureError, match=r"OwnCall has its own __call__ that does not call nn.Module's"):
        lowtide.fit(model, X, memory_budget="1GiB", bandwidth=0)


def test_what_is_no_bypass():
    model, other = network(), nn.Sequential(*network(), nn.Tanh())
    shared = nn.Sequential(*model)
    polite = PolitelyOwnCall()
    with warnings.catch_warnings(), attached(model), attached(polite) as plan:
        warnings.simplefilter("error", lowtide.LowtideWarning)
        model[0](X).sum().backward()  # a part by itself
        shared(X).sum().backward()  # another model that has the same parts
        polite(X).sum().backward()
        other(X).sum().backward()
        with torch.no_grad():
            model.forward(X)
        model.eval()
        model.forward(X).sum().backward()
        model(X).sum().backward()
        assert plan.stats().num_steps == 1
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        model.forward(X)  # the plan is gone


class Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()


def function_of(model: nn.Module):
    def step(x):
        return model(x).sum()

    return step


WAYS = {
    "torch.compile(model)": lambda model: torch.compile(model, backend="eager"),
    "model.compile()": lambda model: model.compile(backend="eager"),
    "a part": lambda model: model[1].compile(backend="eager"),
    "a model around it": lambda model: torch.compile(Holder(model), backend="eager"),
    "a method around it": lambda model: torch.compile(Holder(model).step, backend="eager"),
    "a function around it": lambda model: torch.compile(function_of(model), backend="eager"),
    "as a decorator": lambda model: torch.compile(backend="eager")(function_of(model)),
}


@pytest.mark.parametrize("way", WAYS)
def test_compiling_under_a_plan_is_refused_and_says_what_to_do(way):
    model, compile_before = network(), torch.compile
    with attached(model) as plan:
        with pytest.raises(lowtide.PlanError, match=r"under a plan, .*plan.detach\(\).*compile_stages=True"):
            WAYS[way](model)
        model(X).sum().backward()
        assert plan.stats().num_steps == 1
        torch.compile(network(), backend="eager")  # others are compiled as ever
    assert torch.compile is compile_before
    WAYS[way](model)


def test_compiling_what_has_planned_parts_is_refused_and_another_model_of_these_parts_is_not():
    model = network()
    fine = Split(tuple(StageSplit(str(k), (Unit(f"{k}.0"), Unit(f"{k}.1"))) for k in range(3)))
    with lowtide.attach(model, repeating(3), split=fine):
        with pytest.raises(lowtide.PlanError, match=r"is part of a model that runs under a plan"):
            model[1].compile(backend="eager")
        torch.compile(nn.Sequential(*model), backend="eager")


def test_a_compiled_wrapper_from_before_is_found():
    model = Decorated()
    wrapper = torch.compile(model, backend="eager")
    with pytest.warns(lowtide.LowtideWarning, match=r"runs this model without the plan; call the model itself") as told:
        plan = attached(model)
    assert told[0].filename == __file__
    wrapper(X).sum().backward()
    assert plan.stats().num_steps == 0
    plan.detach()
    del wrapper, told
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        attached(model).detach()


@pytest.mark.parametrize("first", [0, 1])
def test_compiling_is_refused_until_the_last_plan_is_detached(first):
    models, compile_before = [network(), network()], torch.compile
    plans = [attached(model) for model in models]
    plans[first].detach()
    plans[first].detach()
    torch.compile(models[first], backend="eager")
    with pytest.raises(lowtide.PlanError):
        torch.compile(models[1 - first], backend="eager")
    plans[1 - first].detach()
    assert torch.compile is compile_before


def test_a_model_compiled_before_is_refused_and_named_what_to_do():
    whole, inside = torch.compile(network(), backend="eager"), network()
    inside.compile(backend="eager")
    for model in (whole, inside):
        with pytest.raises(lowtide.CaptureError, match="compile_stages=True"):
            lowtide.fit(model, X, memory_budget="1GiB", bandwidth=0)
    with pytest.raises(lowtide.PlanError, match="compile_stages=True"):
        attached(inside)
