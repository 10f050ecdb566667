"""What surrounds a call between submodules is there when it runs again."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.schedules import recomputing
from tests.runtime.training import assert_equal, train
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.runtime.capture.capture import capture


class Attends(nn.Module):
    """Chooses the kernel of attention for some of its calls."""

    def __init__(self, backends: list[SDPBackend]) -> None:
        super().__init__()
        self.backends = backends
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 96)) for _ in backends)

    def forward(self, x):
        for backend, block in zip(self.backends, self.blocks, strict=True):
            q, k, v = block(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
            with sdpa_kernel(backend):
                y = functional.scaled_dot_product_attention(q, k, v)
            x = x + y.transpose(1, 2).reshape(x.shape)
        return x


def make() -> Attends:
    torch.manual_seed(0)
    return Attends([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])


@pytest.mark.parametrize("strict", [False, True])
def test_kernels_that_are_chosen_between_submodules(strict):
    x = torch.randn(4, 24, 32)
    model = make()
    split = capture(model, x)
    assert lowtide.measure(model, x).num_stages == split.num_stages
    with lowtide.attach(model, recomputing(split.num_stages), split=split, strict=strict) as plan:
        assert_equal(train(model, [x, x]), train(make(), [x, x]))
        assert plan.stats().recomputed_per_step > 0
