"""Models whose blocks read, in their own forward, what others have left in a place that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH = 32

Store = tuple[object, Callable[[int, Tensor], None], Callable[[int], Tensor]]


class Board:
    """A plain object."""


@dataclass
class Notes:
    """A dataclass with a dict of dicts."""

    pages: dict[str, dict[int, Tensor]] = field(default_factory=lambda: {"left": {}})


def _board() -> Store:
    board = Board()
    return board, lambda n, value: setattr(board, f"left{n}", value), lambda n: getattr(board, f"left{n}")


def _notes() -> Store:
    notes = Notes()
    return notes, notes.pages["left"].__setitem__, notes.pages["left"].__getitem__


def _closure() -> Store:
    last = before = torch.zeros(())

    def put(_: int, value: Tensor) -> None:
        nonlocal last, before
        last, before = value, last

    return None, put, lambda _: before


STORES: dict[str, Callable[[], Store]] = {"object": _board, "dataclass": _notes, "closure": _closure}


class Sharing(nn.Module):
    """Reads what the block before the last one has left, and leaves something of its own."""

    def __init__(self, store: Store, number: int) -> None:
        super().__init__()
        shared, self.put, self.get = store
        object.__setattr__(self, "shared", shared)
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)
        if self.number > 1:
            y = y + self.gate(self.get(self.number - 2))
        self.put(self.number, torch.tanh(y))
        return y


def sharing(kind: str) -> nn.Sequential:
    """A row of blocks that share a place of some kind."""
    store = STORES[kind]()
    return nn.Sequential(nn.Linear(8, WIDTH), *(Sharing(store, number) for number in range(5)))


class Tap(nn.Module):
    """Has no submodules, and leaves a view of what it returns, or another tensor, in an object."""

    def __init__(self, board: Board, *, is_view: bool) -> None:
        super().__init__()
        self.scale, self.board, self.is_view = nn.Parameter(torch.ones(WIDTH)), board, is_view

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.scale)
        self.board.left = y.unflatten(1, (2, -1)).flatten(1) if self.is_view else y * 2  # type: ignore[attr-defined]
        return y


class Use(nn.Module):
    """Has no submodules, and reads what is there."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.scale, self.board = nn.Parameter(torch.ones(WIDTH)), board

    def forward(self, x: Tensor) -> Tensor:
        left = self.board.left  # type: ignore[attr-defined]
        return x * self.scale + F.dropout(torch.sigmoid(left), 0.2, self.training)


def tapped(*, is_view: bool) -> nn.Sequential:
    """Layers without submodules that share an object, with others between them."""
    board = Board()
    layers = [nn.Linear(8, WIDTH), Tap(board, is_view=is_view)]
    for _ in range(2):
        layers += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), Use(board)]
    return nn.Sequential(*layers, Tap(board, is_view=is_view), nn.Linear(WIDTH, WIDTH), Use(board))


class Conditioned(nn.Module):
    """Scales by what the model has put in its attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.condition = nn.BatchNorm1d(WIDTH, affine=False), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * (1 + self.condition)


class Conditions(nn.Module):
    """Computes a condition and sets it in layers deep inside, which read it when they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.start = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh()), nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), Conditioned(), nn.ReLU()) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        condition = self.embed(x)
        for block in self.blocks:
            block[1].condition = condition
        return self.blocks(self.start(x))
