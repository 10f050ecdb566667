"""Models that keep what they have seen in attributes that are no buffers, or read statistics in roundabout ways."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import torch
from tests.runtime.training import Numbers, gradients
from torch import Tensor, nn

WIDTH = 64  # of models with large blocks: activations decide how much memory they need, not parameters
NARROW = 16


class Annealed(nn.Module):
    """A factor that changes for the first time long after planning."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.period, self.num_calls, self.factor = period, 0, 1.0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls % self.period == 0:
            self.factor *= 0.5
        return x + self.down(torch.tanh(self.up(x) / self.factor))


class WarmingUp(nn.Module):
    """Counts its calls; after the first few its path is another, in its own code and in its blocks."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(NARROW, NARROW), nn.Tanh()) for _ in range(5))
        self.extra, self.last, self.num_calls = nn.Linear(NARROW, NARROW), last, 0

    def forward(self, x):
        self.num_calls += 1
        for block in self.blocks:
            x = block(x)
            if self.num_calls > self.last:
                x = x + 0.1 * torch.sin(x)
        return self.extra(x) if self.num_calls > self.last else x


class Told(nn.Module):
    """A block that reads a number which others set."""

    def __init__(self, settings: SimpleNamespace) -> None:
        super().__init__()
        self.up, self.down, self.settings = nn.Linear(NARROW, NARROW), nn.Linear(NARROW, NARROW), settings

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) * self.settings.depth))


class Telling(nn.Module):
    """Tells each block a number before it calls it, in an object that all share or in one for each."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        common = SimpleNamespace(depth=1)
        self.blocks = nn.ModuleList(Told(common if shares else SimpleNamespace(depth=1)) for _ in range(5))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        for depth, block in enumerate(self.blocks, start=self.num_calls):
            block.settings.depth = depth
            x = block(x)
        return x


class Centre:
    def shifted(self, x, norm):
        return x + norm.running_mean


class ReadsStatistics(nn.Module):
    """Reads BatchNorm's statistics in ways that do not name them in its own code."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 128), nn.BatchNorm1d(128), nn.Linear(128, WIDTH)
        self.way, self.helper = way, Centre()

    def forward(self, x):
        y = self.norm(self.up(x))
        if self.way == "helper":
            y = self.helper.shifted(y, self.norm)
        elif self.way == "named_buffers":
            y = y + dict(self.norm.named_buffers())["running_mean"]
        else:
            y = y + getattr(self.norm, "running_" + "mean")
        return x + self.down(torch.tanh(y))


class Unregistered(nn.Module):
    """Keeps what it has seen in attributes that are no buffers, and reads it in the next call."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(NARROW, NARROW), way
        self.average, self.carried, self.pair, self.table = torch.zeros(NARROW), None, (0, 1.0), {"factor": 1.0}
        self.counts = numpy.ones(3)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y * getattr(self, self.way)(y)

    def averaged(self, y):
        found, self.average = self.average, 0.9 * self.average + 0.1 * y.detach().mean(0)
        return 1 + found

    def only_counted(self, y):
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return 1

    def handed_to_the_next(self, y):
        found, self.carried = self.carried, y.detach().mean(0)
        return 1 if found is None else 1 + found

    def with_its_graph(self, y):
        found, self.carried = self.carried, y.mean(0)
        return 1 if found is None else 1 + found.detach()

    def in_a_tuple(self, y):
        self.pair = self.pair[0] + 1, self.pair[1] * 0.5
        return self.pair[1]

    def in_a_dict(self, y):
        self.table["factor"] *= 0.5
        return self.table["factor"]

    def in_an_array(self, y):
        self.counts[1:] *= 0.5
        return float(self.counts[1])

    def in_another_array(self, y):
        self.counts = numpy.append(self.counts, 0.5 * self.counts[-1])
        self.counts[0] += 1
        return float(self.counts[0] * self.counts[-1])

    def made_in_the_first_call(self, y):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return 1 / self.num_calls


class ChangedInPlace(Unregistered):
    """Changes what it keeps in place, or makes it late."""

    def averaged(self, y):
        self.average.mul_(0.9).add_(y.detach().mean(0))
        return 1 + self.average

    def made_first(self, y):
        if self.carried is None:
            self.carried = y.detach().mean(0)
        else:
            self.carried.lerp_(y.detach().mean(0), 0.1)
        return 1 + self.carried

    def made_late(self, y):
        self.pair = (self.pair[0] + 1, 1.0)
        if self.pair[0] < 4:
            return 1
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return 1 / self.num_calls

    def as_numpy_counts(self, y):
        self.carried = numpy.float64(1) if self.carried is None else self.carried * 0.5
        return float(self.carried)


class Scaled(nn.Module):
    """Has a factor that the training loop changes, not in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(NARROW, NARROW), kind
        self.register_buffer("buffer", torch.ones(()))
        self.tensor, self.tuple, self.dict = torch.ones(()), (1.0,), {"factor": 1.0}

    def forward(self, x):
        return x + torch.tanh(self.linear(x) * self.factor())

    def factor(self):
        value = getattr(self, self.kind)
        return value[0] if self.kind == "tuple" else value["factor"] if self.kind == "dict" else value

    def decay(self):
        self.buffer, self.tensor, self.tuple = self.buffer * 0.9, self.tensor * 0.9, (self.tuple[0] * 0.9,)
        self.dict["factor"] *= 0.9


def decaying(model: nn.Sequential, inputs: list[Tensor]) -> Numbers:
    """Steps whose loop changes the factors of `Scaled` between forward and backward."""
    numbers: Numbers = {}
    for step, x in enumerate(inputs):
        output = model(x)
        for block in model:
            block.decay()
        output.square().mean().backward()
        numbers.update({f"{step} {name}": gradient for name, gradient in gradients(model)})
    return numbers


def with_other_factors(model: nn.Sequential, inputs: list[Tensor]) -> Numbers:
    """Two forwards before one backward, and the attribute that they read is set before each."""
    results = []
    for x, factor in zip(inputs, (2.0, 0.5), strict=True):
        for block in model:
            block.factor = factor
        results.append(model(x))
    (results[0] * results[1]).mean().backward()
    return dict(gradients(model))
