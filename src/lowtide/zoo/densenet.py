"""Densely connected networks: Huang et al., Densely connected convolutional networks (2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lowtide.zoo.images import Classifier, with_batch


class DenseLayer(nn.Module):
    """A bottleneck that reads everything before it in its block."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """The layer's own `growth` channels."""
        x = self.conv1(F.relu(self.bn1(torch.cat(tuple(features), 1)), inplace=True))
        return self.conv2(F.relu(self.bn2(x), inplace=True))


class DenseBlock(nn.Module):
    """Layers that each add their channels to those before."""

    def __init__(self, inputs: int, growth: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + index * growth, growth) for index in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """All channels: those of x and those of the layers."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def _transition(inputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, inputs // 2, 1, bias=False)
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), convolution, nn.AvgPool2d(2, 2))


class DenseNet(nn.Module):
    """A stem, dense blocks with transitions between them, and a linear classifier on averages."""

    def __init__(self, growth: int, width: int, blocks: Sequence[int], classes: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        for index, num_layers in enumerate(blocks):
            parts.append(DenseBlock(width, growth, num_layers))
            width += num_layers * growth
            if index + 1 < len(blocks):
                parts.append(_transition(width))
                width //= 2
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))


def densenet(
    growth: int, width: int, blocks: Sequence[int], batch: int, image: int
) -> tuple[Classifier, dict[str, Tensor]]:
    """A network for ImageNet; `width` channels leave the stem."""
    return with_batch(DenseNet(growth, width, blocks, 1000), batch, image, 1000)
