"""Residual networks: He et al., Deep residual learning (2015), and Identity mappings (2016) for 200 and 1001 layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lowtide.zoo.images import Classifier, with_batch


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Basic(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = _projection(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, width, height / stride, width / stride)."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride), 1 x 1 convolutions and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.shortcut = _projection(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, 4 width, height / stride, width / stride)."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class Preactivated(nn.Module):
    """The bottleneck with normalisation and ReLU before each convolution; the sum is left as it is."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), _convolution(inputs, width, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), _convolution(width, width, 3, stride)
        self.bn3, self.conv3 = nn.BatchNorm2d(width), _convolution(width, 4 * width, 1)
        changes = stride != 1 or inputs != 4 * width
        self.shortcut = _convolution(inputs, 4 * width, 1, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, 4 width, height / stride, width / stride)."""
        y = F.relu(self.bn1(x), inplace=True)
        skipped = x if self.shortcut is None else self.shortcut(y)
        y = F.relu(self.bn2(self.conv1(y)), inplace=True)
        y = F.relu(self.bn3(self.conv2(y)), inplace=True)
        return self.conv3(y) + skipped


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


_KINDS: dict[str, type[Basic] | type[Bottleneck] | type[Preactivated]] = {
    "basic": Basic,
    "bottleneck": Bottleneck,
    "preactivated": Preactivated,
}


def _blocks(kind: str, inputs: int, widths: Sequence[int], counts: Sequence[int]) -> tuple[nn.Sequential, int]:
    block = _KINDS[kind]
    groups = []
    for group, (width, count) in enumerate(zip(widths, counts, strict=True)):
        made = []
        for index in range(count):
            made.append(block(inputs, width, 2 if group and not index else 1))
            inputs = width * block.expansion
        groups.append(nn.Sequential(*made))
    return nn.Sequential(*groups), inputs


class ResNet(nn.Module):
    """A stem, groups of blocks, and a linear classifier on averages."""

    def __init__(self, stem: nn.Module, blocks: nn.Module, end: nn.Module, channels: int, classes: int) -> None:
        super().__init__()
        self.stem, self.blocks, self.end = stem, blocks, end
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        x = self.end(self.blocks(self.stem(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def resnet(kind: str, blocks: Sequence[int], batch: int, image: int) -> tuple[Classifier, dict[str, Tensor]]:
    """A network for ImageNet with these numbers of blocks."""
    pool = nn.MaxPool2d(3, 2, padding=1)
    stem = nn.Sequential(_convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), pool)
    body, channels = _blocks(kind, 64, (64, 128, 256, 512), blocks)
    end = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True)) if kind == "preactivated" else nn.Identity()
    return with_batch(ResNet(stem, body, end, channels, 1000), batch, image, 1000)


def resnet1001(batch: int, image: int) -> tuple[Classifier, dict[str, Tensor]]:
    """The network of 1001 layers for CIFAR: three groups of 111 pre-activated bottlenecks."""
    body, channels = _blocks("preactivated", 16, (16, 32, 64), (111, 111, 111))
    end = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
    return with_batch(ResNet(_convolution(3, 16, 3), body, end, channels, 10), batch, image, 10)
