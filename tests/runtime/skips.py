"""A U-Net whose skips are copied to the host and back, in several orders of computation."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from benchmarks.coverage_shapes import UNet
from tests.runtime.training import Numbers, train
from torch import nn

import lowtide
from lowtide import Backward, Forward, Offload, Prefetch, Release, Schedule
from lowtide.strategies.copies.gaps import Order, gaps_of


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Popping(UNet):
    """Hands each skip on, instead of holding all of them to the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = torch.nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], 1))
        result: torch.Tensor = self.head(x)
        return result


def network(kind: type[UNet] = UNet, device: str = "cpu", size: int = 32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = kind(4, 3).to(device)
    return model, torch.randn(4, 3, size, size).to(device)


def storing(n: int) -> Order:
    return [*(Forward(k, "all") for k in range(1, n + 1)), *(Backward(k) for k in range(n, 0, -1))]


def recomputing(n: int) -> Order:
    """Every stage is recomputed right before its backward."""
    again = [op for k in range(n - 1, 0, -1) for op in (Forward(k, "all"), Backward(k))]
    return [*(Forward(k, "keep") for k in range(1, n)), Forward(n, "all"), Backward(n), *again]


def in_two_segments(n: int) -> Order:
    """The first half is recomputed as a whole, the makers of all skips with it."""
    middle = n // 2
    forwards = [Forward(1, "keep"), *(Forward(k, "drop") for k in range(2, middle + 1))]
    later = range(middle + 1, n + 1)
    order = [*forwards, *(Forward(k, "all") for k in later), *(Backward(k) for k in reversed(later))]
    return [*order, *(Forward(k, "all") for k in range(1, middle + 1)), *(Backward(k) for k in range(middle, 0, -1))]


ORDERS = {"storing": storing, "recomputing": recomputing, "in two segments": in_two_segments}


def moving(chain: lowtide.Chain, order: Order) -> Schedule:
    """All side values that can move are away whenever nothing needs them."""
    before: dict[int, list[Any]] = {}
    copied: set[int] = set()
    for gap in gaps_of(chain, order):
        kind, i = gap.value
        if kind == "s":
            first = [] if i in copied else [Offload("s", i)]
            copied.add(i)
            before.setdefault(gap.begin + 1, []).extend([*first, Release("s", i)])
            before.setdefault(gap.end, []).append(Prefetch("s", i))
    assert copied
    return Schedule("by hand", [op for at, one in enumerate(order) for op in (*before.get(at, ()), one)])


@functools.cache
def measured(kind: type[UNet], device: str = "cpu") -> lowtide.Chain:
    return lowtide.measure(*network(kind, device), loss=loss)


def trained(model: nn.Module, x: torch.Tensor) -> Numbers:
    return train(model, [x, x + 1, x - 1], loss=loss, input_grads=False)


def attached(model: nn.Module, chain: lowtide.Chain, schedule: Schedule, **options: Any) -> lowtide.Plan:
    trace = lowtide.simulate(chain, schedule, bandwidth=10**9)
    solution = lowtide.solve(chain, memory_budget=2**50, strategy="store-all")
    return lowtide.attach(model, replace(solution, schedule=schedule, trace=trace), **options)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss(model(x)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
