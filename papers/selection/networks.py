"""VGG-19 and AlexNet cut into the paper's layers, and the sets of checkpoints of each method.

The paper's layer is a convolution or a linear layer with its ReLU, or a pooling. VGG-19 has 24 of them (what stands
between the last pooling and the first linear layer, and dropout, belong to linear layers); AlexNet has 15, with
AdaptiveAvgPool2d, Flatten and Dropout as layers of their own (section 5.1.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide import zoo

# Table 2 and table 3: peaks in MiB and seconds of one batch, in the order of PAPER_METHODS; None: out of memory.
PAPER_METHODS = ("algorithm 6", "algorithm 3", "arbitrary graph", "sqrt(n)", "plain")
PAPER_PEAKS: dict[tuple[str, int], tuple[int | None, ...]] = {
    ("vgg19", 128): (6444, 6835, 6836, 8404, 11262),
    ("vgg19", 256): (11220, 12004, 12004, 15139, 20850),
    ("vgg19", 320): (13609, 14592, 14592, 18511, None),
    ("vgg19", 384): (15997, 17177, 17177, None, None),
    ("vgg19", 400): (16594, 17824, 17824, None, None),
    ("alexnet", 128): (1002, 1003, 1003, 1106, 1174),
    ("alexnet", 4096): (9866, 9866, 9866, 13182, 15275),
}
PAPER_SECONDS: dict[tuple[str, int], tuple[float | None, ...]] = {
    ("vgg19", 128): (0.779, 0.779, 0.779, 0.780, 0.585),
    ("vgg19", 256): (1.541, 1.540, 1.540, 1.541, 1.158),
    ("vgg19", 320): (1.921, 1.920, 1.920, 1.922, None),
    ("vgg19", 384): (2.292, 2.289, 2.289, None, None),
    ("vgg19", 400): (2.849, 2.335, 2.335, None, None),
    ("alexnet", 128): (0.046, 0.046, 0.046, 0.046, 0.038),
    ("alexnet", 4096): (1.206, 1.206, 1.206, 1.216, 1.058),
}
# The sets printed in table 2, d_0 added. They do not depend on the batch size.
PAPER_SETS = {
    ("vgg19", "algorithm 6"): (0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 23, 24),
    ("vgg19", "algorithm 3"): (0, 3, 6, 24),
    ("alexnet", "algorithm 6"): (0, 2, 4, 6, 8, 12, 14, 15),
    ("alexnet", "algorithm 3"): (0, 2, 4, 12, 15),
}
# Figure 5.
FIGURE_5_SET = (0, 3, 11, 24)

# The width of linear layers that only try the command.
NARROW = 16

_JOINED = {"vgg19": (nn.ReLU, nn.Dropout, nn.Flatten, nn.AdaptiveAvgPool2d), "alexnet": (nn.ReLU,)}


def in_layers(name: str, network: nn.Sequential) -> nn.Sequential:
    """The same modules, one child a layer of the paper."""
    layers: list[list[nn.Module]] = []
    waiting: list[nn.Module] = []  # what belongs to the linear layer that follows
    for module in network:
        if isinstance(module, nn.AdaptiveAvgPool2d | nn.Flatten) and name == "vgg19":
            waiting.append(module)
        elif isinstance(module, _JOINED[name]):
            layers[-1].append(module)
        else:
            layers.append([*waiting, module])
            waiting = []
    return nn.Sequential(*(layer[0] if len(layer) == 1 else nn.Sequential(*layer) for layer in layers))


def make(name: str, device: str, batch: int, *, narrow: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A network in the paper's layers, with its loss, and a batch of images of 224 x 224.

    Args:
        name: `"vgg19"` or `"alexnet"`.
        device: where both are to be.
        batch: images.
        narrow: smaller images and narrow linear layers, where only the command is to be tried.
    """
    model: Any
    with torch.device(device):
        model, sample = zoo.make(name, device=device, batch=batch, image=96 if narrow else 224)
    if narrow:
        for place, module in enumerate(model.network):
            if isinstance(module, nn.Linear):
                width = NARROW if module.in_features == 4096 else module.in_features
                model.network[place] = nn.Linear(width, min(NARROW, module.out_features))
        sample["labels"] %= NARROW
    model.network = in_layers(name, model.network)
    return model.to(device), {key: value.to(device) for key, value in sample.items()}


def sizes_of(chain: lowtide.Chain, batch: dict[str, Any], num_classes: int) -> list[int]:
    """The paper's d_0..d_n: the input, and the outputs of the layers; the last one without the loss."""
    images = batch["images"]
    inner = [stage.output_bytes for stage in chain.stages[:-1]]
    element = images.element_size()
    return [images.numel() * element, *inner, len(images) * num_classes * element]


# Methods


def evenly(num_layers: int) -> tuple[int, ...]:
    """Chen's rule for equal layers, as the paper used it: segments of sqrt(n) layers each."""
    size = round(math.sqrt(num_layers))
    return (*range(0, num_layers, size), num_layers)


def arbitrary_graph(sizes: Sequence[int]) -> tuple[int, ...]:
    """The checkpoints that Feng and Huang's search finds on a chain: least sum of checkpoints and largest segment.

    Their way, apart from algorithm 3's: for each size that a segment can have, a shortest path through the layers whose
    edges are the segments that are no larger; then the best of all.

    Feng, Huang: Optimal gradient checkpoint search for arbitrary computation graphs, 2021.
    """
    last = len(sizes) - 1
    inside = {(h, i): sum(sizes[h + 1 : i]) for h in range(last) for i in range(h + 1, last + 1)}
    best: tuple[int, tuple[int, ...]] | None = None
    for limit in sorted(set(inside.values())):
        path: list[tuple[int, tuple[int, ...]] | None] = [(sizes[0], (0,)), *([None] * last)]
        for i in range(1, last + 1):
            ways = [
                (before[0] + sizes[i], (*before[1], i))
                for h in range(i)
                if (before := path[h]) is not None and inside[h, i] <= limit
            ]
            path[i] = min(ways, default=None)
        end = path[last]
        if end is not None:
            cost = end[0] + max(inside[pair] for pair in pairwise(end[1]))
            if best is None or cost < best[0]:
                best = (cost, end[1])
    assert best is not None
    return best[1]


def checkpoint_sets(sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The set of each method of table 2, for plain sizes."""
    return {
        "algorithm 6": lowtide.select(list(sizes), model="dynamic").checkpoints,
        "algorithm 3": lowtide.select(list(sizes), model="static").checkpoints,
        "arbitrary graph": arbitrary_graph(sizes),
        "sqrt(n)": evenly(len(sizes) - 1),
    }
