"""Models whose calls are not plain: layers left out, transforms of torch.func, kernels chosen between submodules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH = 8


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Skipping(nn.Module):
    """Leaves each block out with a probability; `way` "ends": from the first one on all of them, and the head."""

    def __init__(self, way: str, share: float = 0.4, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.way, self.share = way, share
        self.blocks, self.head = nn.ModuleList(Block(norm) for _ in range(6)), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            if torch.rand([]) >= self.share:
                x = block(x)
            elif self.way == "ends":
                return x[:, :2] * x.mean()
        return self.head(x)


def whole() -> Skipping:
    """Leaves nothing out."""
    return Skipping("skips", 0.0)


class Mapped(nn.Module):
    """Calls a submodule for each sample by itself, or along a direction."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x):
        if self.way == "jvp":
            return torch.func.jvp(lambda each: torch.tanh(self.linear(each)), (x,), (x,))[1]
        return torch.func.vmap(lambda each: torch.tanh(self.linear(each)) * each.sum())(x)


class Masked(nn.Module):
    """Makes a mask by vmap between its submodules: no gradient flows through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        mask = torch.vmap(lambda k: (torch.arange(WIDTH) >= k).float())(torch.arange(WIDTH))
        for layer in self.layers:
            x = torch.tanh(layer(x) @ mask)
        return x


class Between(nn.Module):
    """Differentiates through vmap between its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.func.vmap(lambda each: torch.tanh(each) * each.sum())(layer(x))
        return x


def with_a_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Between(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


BACKENDS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)


class Attends(nn.Module):
    """Chooses the kernel of attention for some of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 96)) for _ in range(4))

    def forward(self, x):
        for backend, block in zip(2 * BACKENDS, self.blocks, strict=True):
            q, k, v = block(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
            with sdpa_kernel(backend):
                y = functional.scaled_dot_product_attention(q, k, v)
            x = x + y.transpose(1, 2).reshape(x.shape)
        return x
