"""Small models with everything in them that recomputation could get wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.schedules import mixed, offloading, recomputing
from torch import nn

WIDTH = 8


class PowerIteration(nn.Module):
    """Reads and writes a buffer in each forward, like spectral normalisation: the output depends on the old value."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("u", torch.ones(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.u.copy_(F.normalize(self.linear.weight @ self.u, dim=0))
                self.calls += 1
        return self.linear(x) / (self.u @ self.linear.weight @ self.u).abs().clamp(min=0.1)


class Views(nn.Module):
    """Saves views of one storage: strided, with offsets, expanded."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, dim=-1)
        scale = x.mean(dim=-1, keepdim=True).expand_as(x)
        return torch.tanh(q * k.flip(-1)) * v + scale * v[..., ::2].repeat_interleave(2, dim=-1)


class InPlace(nn.Module):
    """Works in place on what it made itself, and ends in an in-place operation."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        y = F.relu(y, inplace=True) + 0.1
        return y.mul_(x).sigmoid_()


def stages_of_every_kind(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width),
        nn.Sequential(nn.Dropout(0.4), nn.BatchNorm1d(width), nn.ReLU(inplace=True)),
        Views(width),
        PowerIteration(width),
        nn.Sequential(nn.RReLU(), nn.Linear(width, width), nn.AlphaDropout(0.2)),
        InPlace(width),
        nn.Identity(),
        nn.LayerNorm(width),
    )


N = len(stages_of_every_kind())
SHAPE = (6, WIDTH)

every_schedule = pytest.mark.parametrize(
    "schedule", [recomputing(N), offloading(N), mixed(N)], ids=lambda schedule: schedule.strategy
)


class Tangle(nn.Module):
    """Glue around the units: sums, views, dropout, keyword arguments, tuples, a mask held for all stages, tied
    weights, and a loss in the model's own forward.
    """

    def __init__(self, width: int = WIDTH, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.register_buffer("positions", torch.arange(64).float() / 64)
        self.blocks = nn.ModuleList([TangleBlock(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None, *, scale: float = 1.0):
        mask = (ids > 1).unsqueeze(-1)
        x = self.embed(ids) * scale + self.positions[: ids.shape[1], None]
        bias = None
        for block in self.blocks:
            x, bias = block(F.dropout(x, 0.1, self.training), mask=mask, bias=bias)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class TangleBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x, *, mask, bias=None):
        if bias is None:
            bias = torch.tanh(self.bias) + 0.1
        y = self.second(F.gelu(self.first(self.norm(x))))
        y = F.dropout(y, 0.2, self.training)
        return x + y * mask + bias, bias


def tangle(width: int = WIDTH, depth: int = 3) -> Tangle:
    torch.manual_seed(0)
    return Tangle(width, depth)


class Widening(nn.Module):
    """A transformer's MLP: what it saves is several times its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Residual(nn.Module):
    """Layers beside a sum, so that a cut between them has a side value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def residuals(width: int = WIDTH) -> nn.Sequential:
    """Blocks that are each less than a tenth of the whole: not cut inside, as long as there is room."""
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(width) for _ in range(11)))
