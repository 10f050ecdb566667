"""Networks without branches: VGG-19 (Simonyan and Zisserman, 2014) and AlexNet (Krizhevsky, 2014, one tower)."""

from __future__ import annotations

from torch import Tensor, nn

from lowtide.zoo.images import Classifier, with_batch

_VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)  # 0: pooling


def vgg19(batch: int, image: int) -> tuple[Classifier, dict[str, Tensor]]:
    """Sixteen convolutions of 3 x 3 and three linear layers."""
    layers: list[nn.Module] = []
    channels = 3
    for width in _VGG19:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2, 2))
    head = [
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 1000),
    ]
    return with_batch(nn.Sequential(*layers, *head), batch, image, 1000)


def alexnet(batch: int, image: int) -> tuple[Classifier, dict[str, Tensor]]:
    """Five convolutions and three linear layers."""
    network = nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 1000),
    )
    return with_batch(network, batch, image, 1000)
