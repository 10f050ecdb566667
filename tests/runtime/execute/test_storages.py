"""Weights that are given other memory (`param.data = ...`) between forward and backward: plain training's graph has
what the forward read, a recomputation would not have it.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tests.runtime.execute.test_weights import model_and_optimizer, parking
from tests.runtime.models import SHAPE, N
from tests.runtime.schedules import recomputing, repeating, storing
from tests.runtime.training import batches
from torch import nn

import lowtide
from lowtide import Backward, ExecutionError, Forward, PlanError, Schedule

WIDTH = 8


class Scaled(nn.Module):
    """Reads a weight that is not trained, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0), requires_grad=False)

    def forward(self, x):
        return (self.linear(x) * self.scale).tanh()


class Masked(nn.Linear):
    """Gives its weight other memory in each forward, always with the same numbers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x):
        self.weight.data = self.weight.data * self.mask
        return super().forward(x).tanh()


def make(kind: type[nn.Module] = Scaled) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4)))


def x() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    pairs = list(zip(gradients(model), gradients(plain), strict=True))
    assert pairs
    assert all(itertools.starmap(torch.equal, pairs))


@pytest.mark.parametrize("name", ["0.linear.weight", "1.linear.bias", "2.scale"])
def test_a_weight_that_is_given_other_memory_is_named(name):
    model = make()
    lowtide.attach(model, recomputing(4), spot_checks=False)
    for _ in range(3):
        loss = model(x()).sum()
        parameter = model.get_parameter(name)
        data = parameter.data
        parameter.data = data * 2
        with pytest.raises(ExecutionError, match=f"parameter '{name}', .* was given other memory"):
            loss.backward()
        assert not gradients(model)
        parameter.data = data
        model.zero_grad()


def test_memory_that_is_exchanged_twice_is_no_memory_that_was_kept():
    """The second storage is often at the address of the first."""
    model = make()
    lowtide.attach(model, recomputing(4), spot_checks=False)
    for _ in range(10):
        loss = model(x()).sum()
        weight = model[1].linear.weight
        weight.data = weight.data * 2
        weight.data = weight.data + 1
        with pytest.raises(ExecutionError, match="was given other memory"):
            loss.backward()


def test_what_is_stored_is_as_in_plain_training():
    operations = [Forward(1, "keep"), Forward(2, "all"), Forward(3, "all"), Forward(4, "all"), Backward(4)]
    operations += [Backward(3), Backward(2), Forward(1, "all"), Backward(1)]
    model, plain = make(), make()
    lowtide.attach(model, Schedule("", operations))
    for each in (model, plain):
        loss = each(x()).sum()
        for weight in (each[1].linear.weight, each[3].linear.weight):
            weight.data = weight.data * 2
        loss.backward()
    assert_same_gradients(model, plain)


def test_memory_that_is_given_and_taken_back():
    model, plain = make(), make()
    lowtide.attach(model, recomputing(4))
    for each in (model, plain):
        loss = each(x()).sum()
        data = each[1].linear.weight.data
        each[1].linear.weight.data = data * 2
        each[1].linear.weight.data = data
        each.to("cpu")
        loss.backward()
    assert_same_gradients(model, plain)


def test_optimizers_that_give_weights_other_memory():
    model, plain = make(), make()
    lowtide.attach(model, recomputing(4))
    for _, each in itertools.product(range(3), (model, plain)):
        each(x()).sum().backward()
        for parameter in each.parameters():
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.1 * parameter.grad
    assert_same_gradients(model, plain)


def test_a_forward_that_gives_its_weights_other_memory():
    """Two forwards before one backward, and a backward in two parts: the model itself does it, and always the same."""
    model, plain = make(Masked), make(Masked)
    lowtide.attach(model, recomputing(4))
    for each in (model, plain):
        for _ in range(2):
            (each(x()).sum() + each(2 * x()).sum()).backward()
            loss = each(x()).sum()
            loss.backward(inputs=list(each[2:].parameters()), retain_graph=True)
            loss.backward(inputs=list(each[:2].parameters()))
    assert_same_gradients(model, plain)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_memory_that_is_exchanged_between_two_parts_of_a_backward():
    """That of a stage whose recomputation is over, and that of one that is still ahead."""
    model, plain = make(), make()
    lowtide.attach(model, repeating(4), spot_checks=False)
    for each in (model, plain):
        loss = each(x()).sum()
        loss.backward(inputs=trained(each[2:]), retain_graph=True)
        each[3].linear.weight.data = each[3].linear.weight.data * 2
        if each is model:
            each[0].linear.weight.data = each[0].linear.weight.data * 2
            with pytest.raises(ExecutionError, match=r"parameter '0\.linear\.weight'"):
                loss.backward(inputs=trained(each[:2]))
    assert_same_gradients(model, plain)


def test_tied_weights():
    model = make()
    model[2].linear.weight = model[0].linear.weight
    plain = copy.deepcopy(model)
    lowtide.attach(model, recomputing(4))
    for each in (model, plain):
        each(x()).sum().backward()
    assert_same_gradients(model, plain)
    loss = model(x()).sum()
    model[0].linear.weight.data = model[0].linear.weight.data.clone()
    with pytest.raises(ExecutionError, match=r"parameter '0\.linear\.weight'"):
        loss.backward()


@pytest.mark.parametrize("schedule", [parking(storing(N)), parking(recomputing(N))], ids=["stored", "recomputed"])
@pytest.mark.parametrize("index", range(3))
def test_weights_that_move_and_are_given_other_memory(schedule, index):
    model, optimizer = model_and_optimizer()
    with lowtide.attach(model, schedule, optimizer=optimizer):
        result = model(batches(SHAPE, 1)[0])
        parameter = list(model.parameters())[index]
        parameter.data = parameter.data * 2
        with pytest.raises((PlanError, ExecutionError), match="other memory"):
            result.float().square().mean().backward()
        assert not gradients(model)
