"""Models whose forward reads a buffer in one place and changes it in another, fills it, or replaces it."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.training import Numbers, gradients
from torch import Tensor, nn

WIDTH = 16
SHAPE = (12, WIDTH)


def bodies(depth: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth))


class AveragingBlock(nn.Module):
    """Reads an average at its beginning and changes it at its end; lowtide cuts between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bodies(3)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        x = x - self.average
        for each in self.body:
            x = each(x)
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AveragingBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Queued(nn.Module):
    """Compares with the keys of earlier steps, and takes in those of this one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = bodies(), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 3 * SHAPE[0]), dim=0))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        for index, each in enumerate(self.body):
            x = each(x)
            if index == 1:
                x = x + torch.softmax(x @ self.queue.clone().detach(), dim=1) @ self.queue.clone().T
        x = self.head(x)
        keys, at = F.normalize(x.detach(), dim=1), int(self.position)
        self.queue[:, at : at + keys.shape[0]] = keys.T
        self.position[0] = (at + keys.shape[0]) % self.queue.shape[1]
        return x


class Counting(nn.Module):
    """Scales by a counter before it counts, and again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bodies()
        self.register_buffer("num_steps", torch.zeros(()))

    def forward(self, x):
        x = self.body[0](x) * (1 + self.num_steps)
        x = self.body[1](x) + self.num_steps
        self.num_steps += 1
        x = self.body[2](x) / (1 + self.num_steps)
        return self.body[3](x)


class Quantized(nn.Module):
    """A codebook that follows what it is asked for, in the model's own code; written through `.data`, uncounted."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = bodies(), bodies()
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("sizes", torch.ones(6))
        self.register_buffer("sums", torch.randn(6, WIDTH))

    def forward(self, x):
        for each in self.encoder:
            x = each(x)
        nearest = torch.cdist(x, self.codes).argmin(dim=1)
        y = x + (self.codes[nearest] - x).detach()
        for each in self.decoder[:2]:
            y = each(y)
        y = y + self.codes.mean(0)
        with torch.no_grad():
            chosen = F.one_hot(nearest, 6).to(x.dtype)
            self.sizes.data.mul_(0.8).add_(chosen.sum(0), alpha=0.2)
            self.sums.data.mul_(0.8).add_(chosen.T @ x, alpha=0.2)
            self.codes.data.copy_(self.sums / self.sizes.unsqueeze(1))
        for each in self.decoder[2:]:
            y = each(y)
        return y + self.codes.sum()


class Replacing(nn.Module):
    """Puts another tensor in the buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bodies()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.body[1](self.body[0](x) + self.average)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.body[3](self.body[2](x) - self.average)


class OtherData(Replacing):
    """Gives the tensor in the buffer's place other data."""

    def forward(self, x):
        x = self.body[1](self.body[0](x) + self.average)
        self.average.data = 0.9 * self.average.data + 0.1 * x.detach().mean(0)
        return self.body[3](self.body[2](x) - self.average)


class ReplacingUnit(nn.Module):
    """The same within a unit, which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.linear(x) - self.average)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y


class CalledTwice(nn.Module):
    unit_kind: type[nn.Module] = ReplacingUnit

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unit = bodies(), self.unit_kind()

    def forward(self, x):
        x = self.unit(self.body[1](self.body[0](x)))
        return self.body[3](self.unit(self.body[2](x)))


class Bank(nn.Module):
    """A unit whose buffer others read before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("memory", torch.randn(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.memory.lerp_(y.detach().mean(0), 0.25)
        return y


class Banked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.bank = bodies(), Bank()

    def forward(self, x):
        x = self.body[1](self.body[0](x) + self.bank.memory)
        return self.body[3](self.bank(self.body[2](x)))


class Viewing(nn.Module):
    """A view of the buffer crosses from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bodies()
        self.register_buffer("averages", torch.randn(2, WIDTH))

    def forward(self, x):
        first = self.averages[0]
        x = self.body[1](self.body[0](x) + first)
        x = self.body[2](x + first) - first
        self.averages.lerp_(x.detach().mean(0), 0.25)
        return self.body[3](x)


class GrowingUnit(nn.Module):
    """Keeps what it has seen in a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1, WIDTH))

    def forward(self, x):
        y = torch.tanh(self.linear(x) + self.seen.mean(0))
        self.seen = torch.cat([self.seen, y.detach().mean(0, keepdim=True)])
        return y


class Growing(CalledTwice):
    unit_kind = GrowingUnit


class Filled(nn.Module):
    """A buffer that is empty at first, and one that the first forward registers."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.linear, self.late = nn.Linear(WIDTH, WIDTH), late
        if not late:
            self.register_buffer("average", None)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.late:
            if "average" not in self._buffers:
                self.register_buffer("average", torch.zeros(WIDTH))
                return y
        elif self.average is None:
            self.average = y.detach().mean(0)
        found, self.average = self.average, 0.5 * self.average + 0.5 * y.detach().mean(0)
        return y * (1 + found)


class AddsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x):
        return torch.tanh(self.linear(x) + self.shift)


class CountsSteps(nn.Module):
    """Has a buffer of its own that changes at the end of its forward; a stage before may read it."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
        self.register_buffer("num_steps", torch.zeros(()))
        self.reads = reads

    def forward(self, x):
        for index, block in enumerate(self.body):
            x = block(x)
            if self.reads and index == 3:
                x = x + self.num_steps
        self.num_steps += 1
        return x


def two_forwards(model: nn.Module, inputs: list[Tensor]) -> Numbers:
    """Two forwards before one backward."""
    first, second = (model(x) for x in inputs)
    (first * second).mean().backward()
    return {**dict(gradients(model)), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def with_other_buffers(model: nn.Module, inputs: list[Tensor]) -> Numbers:
    """One step in which other buffers stand in for the model's own."""
    others = {name: buffer + 1 for name, buffer in model.named_buffers()}
    torch.func.functional_call(model, others, (inputs[0],)).square().mean().backward()
    return {**dict(gradients(model)), **{name: buffer.clone() for name, buffer in model.named_buffers()}}
