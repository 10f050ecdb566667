"""Steps that read, train or differentiate only a part of what others do."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.runtime.schedules import mixed, offloading, recomputing, repeating
from torch import nn

import lowtide
from lowtide import Backward, Forward, Offload, Release, Schedule
from lowtide.runtime.model.split import Split, StageSplit, Unit

WIDTH = 8


def split(*paths: str) -> Split:
    return Split(tuple(StageSplit(path, (Unit(path),)) for path in paths))


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    pairs = list(zip(model.named_parameters(), plain.parameters(), strict=True))
    assert any(parameter.grad is not None for (_, parameter), _ in pairs)
    for (name, one), other in pairs:
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


def layers(n: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(n)))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = layers(3), layers(3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(y)


TOWERS = split("a.0", "a.1", "a.2", "b.0", "b.1", "b.2")


@pytest.mark.parametrize("schedule", [offloading(6), repeating(6), recomputing(6), mixed(6)], ids=lambda s: s.strategy)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_towers_with_a_backward_each(schedule: Schedule, order: tuple[int, int]) -> None:
    model, plain = Towers(), Towers()
    with lowtide.attach(model, schedule, split=TOWERS):
        for seed in range(3):
            for each in (model, plain):
                torch.manual_seed(seed)
                results = each(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
                for index in order:
                    results[index].square().sum().backward()
            assert_same_gradients(model, plain)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.value(x)), torch.sigmoid(self.gate(x))


class Gated(nn.Module):
    """Whose blocks return a gate that only some steps read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Gate() for _ in range(4))

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        for block in self.blocks:
            value, gate = block(x)
            x = value * gate if gated else value
        return x


@pytest.mark.parametrize("schedule", [offloading(4), repeating(4), recomputing(4), mixed(4)], ids=lambda s: s.strategy)
def test_an_output_that_only_some_steps_read(schedule: Schedule) -> None:
    model, plain = Gated(), Gated()
    with lowtide.attach(model, schedule, split=split(*(f"blocks.{k}" for k in range(4)))):
        for seed, gated in enumerate((False, False, True, True, False, True, False)):
            for each in (model, plain):
                torch.manual_seed(seed)
                each.zero_grad()
                each(torch.randn(4, WIDTH), gated).square().sum().backward()
            assert_same_gradients(model, plain)


def test_a_layer_that_is_frozen_or_trained_between_forward_and_backward() -> None:
    torch.manual_seed(0)
    model, x = layers(4), torch.randn(4, WIDTH)
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    plain = copy.deepcopy(model)
    with lowtide.attach(model, repeating(4)):
        for each in (model, plain):
            torch.manual_seed(1)
            result = each(x)
            for parameter in (*each[1].parameters(), *each[2].parameters()):
                parameter.requires_grad_(not parameter.requires_grad)
            result.square().sum().backward()
        assert_same_gradients(model, plain)
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]


def test_a_schedule_that_makes_a_value_again_when_nobody_needs_it() -> None:
    torch.manual_seed(0)
    model, x = layers(3), torch.randn(4, WIDTH)
    plain = copy.deepcopy(model)
    operations = list(repeating(3).operations)
    last = operations.index(Backward(3))
    operations[last + 2 : last + 2] = [Forward(3, "all"), Offload("abar", 3), Release("abar", 3)]
    with lowtide.attach(model, Schedule("leftovers", operations)):
        for each in (model, plain):
            torch.manual_seed(1)
            each(x).square().sum().backward()
        assert_same_gradients(model, plain)
