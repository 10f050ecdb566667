"""With compilation, stages are whole blocks."""

from __future__ import annotations

import torch
from tests.runtime.awkward import shared
from tests.runtime.awkward import structure as awkward
from torch import nn

from lowtide.runtime.capture.capture import capture
from lowtide.zoo import make


def names(model: nn.Module, sample: object) -> list[str]:
    return [stage.name for stage in capture(model, sample, blocks=True).stages]


def test_a_transformer_is_cut_between_its_blocks_and_not_inside() -> None:
    model, sample = make("gpt2", batch=2, length=8, layers=4, width=16, heads=2, vocabulary=32)
    blocks = [f"blocks.{k}" for k in range(4)]
    assert [name for name in names(model, sample) if name.startswith("blocks")] == blocks
    assert len(capture(model, sample).stages) > len(names(model, sample))  # without compilation it is cut more finely
    kinds = {stage.kind for stage in capture(model, sample, blocks=True).stages if stage.name in blocks}
    assert len(kinds) == 1


class Group(nn.Module):
    """Blocks in a list, and a list of these: as a Swin has them."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(awkward.Residual() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return x


def test_blocks_within_blocks_are_found() -> None:
    model = nn.Sequential(Group(2), Group(4))
    x = torch.randn(4, awkward.WIDTH)
    assert names(model, x) == [f"{i}.inner.{j}" for i, n in enumerate((2, 4)) for j in range(n)]


def test_small_blocks_of_blocks_stay_whole() -> None:
    model = nn.Sequential(*(Group(2) for _ in range(10)))
    assert names(model, torch.randn(4, awkward.WIDTH)) == [str(k) for k in range(10)]


def test_a_list_of_single_layers_has_no_blocks() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    x = torch.randn(4, 8)
    assert names(nn.Sequential(*layers), x) == [stage.name for stage in capture(nn.Sequential(*layers), x).stages]


class Masked(nn.Module):
    """Multiplies by a mask that it finds in an object."""

    def __init__(self, board: shared.Board) -> None:
        super().__init__()
        self.inner, self.board = awkward.Residual(), board

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.board.mask


class Masking(nn.Module):
    """Leaves a mask in an object that all blocks have."""

    def __init__(self) -> None:
        super().__init__()
        self.board, self.start = shared.Board(), nn.Linear(8, awkward.WIDTH)
        self.blocks = nn.ModuleList(Masked(self.board) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.board.mask = (x[:, :1] > 0).float()
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_find_a_mask_in_an_object_stay_whole() -> None:
    assert [f"blocks.{k}" for k in range(3)] == names(Masking(), torch.randn(4, 8))[1:]
