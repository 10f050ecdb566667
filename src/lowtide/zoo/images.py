"""What image classifiers share: a batch, and a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Classifier(nn.Module):
    """A network that returns the loss if labels are given, otherwise its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Classify images (batch, channels, height, width)."""
        logits: Tensor = self.network(images)
        return logits if labels is None else F.cross_entropy(logits, labels)


def with_batch(network: nn.Module, batch: int, image: int, classes: int) -> tuple[Classifier, dict[str, Tensor]]:
    """Return the network with its loss, and random images with labels."""
    images = torch.randn(batch, 3, image, image)
    return Classifier(network), {"images": images, "labels": torch.randint(0, classes, (batch,))}
