"""Inception v3: Szegedy et al., Rethinking the Inception architecture (2016), with its auxiliary classifier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lowtide.zoo.images import Classifier, with_batch

Size = int | tuple[int, int]

# The paper weighs the auxiliary classifier's loss so.
_AUXILIARY_WEIGHT = 0.3


class Convolution(nn.Module):
    """A convolution, normalised, and a ReLU."""

    def __init__(self, inputs: int, outputs: int, size: Size, stride: int = 1, padding: Size = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, ...) to (batch, outputs, ...)."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Branches(nn.Module):
    """Branches side by side whose results are put together along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """All branches' channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def _chain(inputs: int, *steps: Sequence[int | Size]) -> nn.Sequential:
    """Convolutions one after the other, each (outputs, size, stride, padding)."""
    layers = []
    for outputs, size, *rest in steps:
        assert isinstance(outputs, int)
        stride, padding = (*rest, 1, 0)[:2] if len(rest) == 2 else (1, rest[0] if rest else 0)
        assert isinstance(stride, int)
        layers.append(Convolution(inputs, outputs, size, stride, padding))
        inputs = outputs
    return nn.Sequential(*layers)


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), Convolution(inputs, outputs, 1))


def _block_a(inputs: int, pooled: int) -> Branches:
    return Branches(
        _chain(inputs, (64, 1)),
        _chain(inputs, (48, 1), (64, 5, 2)),
        _chain(inputs, (64, 1), (96, 3, 1), (96, 3, 1)),
        _pooled(inputs, pooled),
    )


def _block_b(inputs: int) -> Branches:
    return Branches(
        _chain(inputs, (384, 3, 2, 0)), _chain(inputs, (64, 1), (96, 3, 1), (96, 3, 2, 0)), nn.MaxPool2d(3, 2)
    )


def _block_c(inputs: int, width: int) -> Branches:
    across: Size = (1, 7)
    along: Size = (7, 1)
    return Branches(
        _chain(inputs, (192, 1)),
        _chain(inputs, (width, 1), (width, across, (0, 3)), (192, along, (3, 0))),
        _chain(
            inputs,
            (width, 1),
            (width, along, (3, 0)),
            (width, across, (0, 3)),
            (width, along, (3, 0)),
            (192, across, (0, 3)),
        ),
        _pooled(inputs, 192),
    )


def _block_d(inputs: int) -> Branches:
    return Branches(
        _chain(inputs, (192, 1), (320, 3, 2, 0)),
        _chain(inputs, (192, 1), (192, (1, 7), (0, 3)), (192, (7, 1), (3, 0)), (192, 3, 2, 0)),
        nn.MaxPool2d(3, 2),
    )


def _block_e(inputs: int) -> Branches:
    def forked() -> Branches:
        return Branches(_chain(384, (384, (1, 3), (0, 1))), _chain(384, (384, (3, 1), (1, 0))))

    return Branches(
        _chain(inputs, (320, 1)),
        nn.Sequential(*_chain(inputs, (384, 1)), forked()),
        nn.Sequential(*_chain(inputs, (448, 1), (384, 3, 1)), forked()),
        _pooled(inputs, 192),
    )


class Inception(nn.Module):
    """The network; in training its result is (logits, auxiliary logits)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_chain(3, (32, 3, 2, 0), (32, 3), (64, 3, 1)),
            nn.MaxPool2d(3, 2),
            *_chain(64, (80, 1), (192, 3)),
            nn.MaxPool2d(3, 2),
        )
        middle = (_block_c(768, 128), _block_c(768, 160), _block_c(768, 160), _block_c(768, 192))
        self.first = nn.Sequential(_block_a(192, 32), _block_a(256, 64), _block_a(288, 64), _block_b(288), *middle)
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3),
            *_chain(768, (128, 1), (768, 5)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(768, classes),
        )
        self.second = nn.Sequential(_block_d(768), _block_e(1280), _block_e(2048))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(2048, classes))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits (batch, classes) of images (batch, 3, height, width); training needs 299 pixels a side."""
        x = self.first(self.stem(x))
        auxiliary = self.auxiliary(x) if self.training else None
        logits = self.head(self.second(x))
        return logits if auxiliary is None else (logits, auxiliary)


class InceptionClassifier(Classifier):
    """With both classifiers' losses."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Classify images (batch, channels, height, width)."""
        result = self.network(images)
        logits, auxiliary = result if isinstance(result, tuple) else (result, None)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits, labels)
        return loss if auxiliary is None else loss + _AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)


def inception_v3(batch: int, image: int) -> tuple[Classifier, dict[str, Tensor]]:
    """The network for ImageNet."""
    made, sample = with_batch(Inception(1000), batch, image, 1000)
    return InceptionClassifier(made.network), sample
