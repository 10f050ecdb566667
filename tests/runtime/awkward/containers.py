"""Models whose forward changes lists, deques, sets and dicts that they keep, or makes them anew."""

from __future__ import annotations

from collections import OrderedDict, deque

import torch
from tests.runtime.training import Numbers, gradients
from torch import Tensor, nn

WIDTH = 64
SHAPE = (512, WIDTH)  # so large that activations decide how much memory a model needs, not parameters


class Expert(nn.Module):
    """Appends its auxiliary loss to a list that all layers and the model share."""

    def __init__(self, losses: list[torch.Tensor], *, detached: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
        self.losses, self.detached = losses, detached

    def forward(self, x):
        y = self.inner(x)
        self.losses.append((y.detach() if self.detached else y).square().mean())
        return x + y


class Mixture(nn.Module):
    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(Expert(self.losses, detached=detached) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Remembers(nn.Module):
    """Its output depends on what it has appended: in a list that grows, one that is bounded by 2 or by thousands, or a
    deque.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.kind = kind
        self.most = 5000 if kind == "long" else 2
        self.history = {"values": deque(maxlen=2) if kind == "deque" else [0.0] * self.most if kind == "long" else []}

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        values = self.history["values"]
        values.append(float(y.detach().abs().mean()))
        if self.kind in ("bounded", "long") and len(values) > self.most:
            values.pop(0)
        return x + y * (1 + sum(values) + len(values) % 100)


class Reports(nn.Module):
    """Keeps its hidden tensor in a dict, by itself or in a list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.kind = kind

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        self.kept = {"hidden": [hidden] if self.kind == "list" else hidden, "factor": 2.0}
        return x + self.kept["factor"] * self.down(hidden)


class Sharing(nn.Module):
    """Counts its calls in a dict that all blocks have, and adds to a tensor there."""

    def __init__(self, settings: dict) -> None:
        super().__init__()
        self.inner, self.settings = nn.Linear(WIDTH, WIDTH), settings

    def forward(self, x):
        self.settings["num_calls"] += 1
        self.settings["total"].add_(x.detach().mean())
        return torch.tanh(self.inner(x)) * (self.settings["num_calls"] + self.settings["total"])


def sharing(num_settings: int = 50) -> nn.Sequential:
    settings = {"num_calls": 0, "total": torch.zeros(()), **{f"setting{k}": k for k in range(num_settings)}}
    return nn.Sequential(*(Sharing(settings) for _ in range(5)))


class Sealed(OrderedDict):
    """As the results of transformers are."""

    def pop(self, *args):
        raise TypeError("nothing can be taken out")


class Sealing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        self.result = Sealed(hidden=hidden.detach())
        return x + hidden


def clearing(model: Mixture, inputs: list[Tensor]) -> Numbers:
    """Steps whose loop adds the auxiliary losses and clears the list before backward."""
    numbers: Numbers = {}
    for step, x in enumerate(inputs):
        loss = model(x).square().mean()
        terms = list(model.losses)
        model.losses.clear()
        assert len(terms) == len(model.blocks)
        total = loss + sum(terms)
        total.backward()
        assert model.losses == []
        numbers.update({f"{step} term {k}": term.detach() for k, term in enumerate([total, *terms])})
        numbers.update({f"{step} {name}": gradient for name, gradient in gradients(model)})
        model.zero_grad()
    return numbers
