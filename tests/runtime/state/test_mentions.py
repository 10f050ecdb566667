"""Which code names an attribute, found without running it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from lowtide.runtime.state.mentions import mentions

NAMES = frozenset({"running_mean", "running_var"})


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x)

    def fused(self):
        """Names them, but is not part of the forward."""
        return self.norm.running_var


class Direct(Plain):
    def forward(self, x):
        return self.norm(x) * self.norm.running_var


class InAMethod(Plain):
    def forward(self, x):
        return self._scaled(self.norm(x))

    def _scaled(self, x):
        return x * self.scale

    @property
    def scale(self):
        return (lambda norm: norm.running_var)(self.norm)


class InTheParent(Direct):
    def forward(self, x):
        return super().forward(x) + 1


def _scaled(x, norm):
    return x * norm.running_mean


class InAFunction(Plain):
    @torch.no_grad()
    def forward(self, x):
        return _scaled(self.norm(x), self.norm)


class Reader:
    def __call__(self, module, args, output):
        return output * module.running_mean


@pytest.mark.parametrize("kind", [Direct, InAMethod, InTheParent, InAFunction])
def test_code_that_reads_statistics_is_found(kind) -> None:
    assert mentions(kind(), NAMES)


def test_code_that_does_not_is_not() -> None:
    assert not mentions(Plain(), NAMES)
    assert not mentions(nn.BatchNorm2d(4), NAMES)  # its own forward does, and does not count


@pytest.mark.parametrize("hook", [Reader(), functools.partial(_scaled), lambda m, a, y: y + m.running_var.sum()])
def test_hooks_are_looked_at(hook) -> None:
    norm = nn.BatchNorm1d(4)
    norm.register_forward_hook(hook)
    assert mentions(norm, NAMES)


def test_a_forward_of_the_modules_own_is_looked_at() -> None:
    module = Plain()
    module.forward = lambda x: module.norm(x) * module.norm.running_var
    assert mentions(module, NAMES)
