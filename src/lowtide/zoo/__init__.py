"""The networks of the papers, as plain modules that do not depend on lowtide.

torch is imported when one of them is made.

    model, sample = zoo.make("resnet101", batch=16, image=500)
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from torch import nn


class ZooError(LowtideError, ValueError):
    """An unknown network, or a setting that a network does not have."""


@dataclass(frozen=True, slots=True)
class ZooNetwork:
    """One network: its module and function, and the settings that make it this one."""

    module: str
    function: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What a user may set, and what is taken otherwise: `batch`, and `image` or sizes of a transformer."""


_IMAGE = {"batch": 16, "image": 224}
_TEXT = {"batch": 8, "length": 512}


def _residual(kind: str, *blocks: int) -> ZooNetwork:
    return ZooNetwork("lowtide.zoo.resnet", "resnet", {"kind": kind, "blocks": blocks}, _IMAGE)


def _dense(growth: int, width: int, *blocks: int) -> ZooNetwork:
    return ZooNetwork("lowtide.zoo.densenet", "densenet", {"growth": growth, "width": width, "blocks": blocks}, _IMAGE)


ENTRIES: dict[str, ZooNetwork] = {
    "resnet18": _residual("basic", 2, 2, 2, 2),
    "resnet34": _residual("basic", 3, 4, 6, 3),
    "resnet50": _residual("bottleneck", 3, 4, 6, 3),
    "resnet101": _residual("bottleneck", 3, 4, 23, 3),
    "resnet152": _residual("bottleneck", 3, 8, 36, 3),
    "resnet200": _residual("preactivated", 3, 24, 36, 3),
    "resnet1001": ZooNetwork("lowtide.zoo.resnet", "resnet1001", {}, {"batch": 16, "image": 32}),
    "densenet121": _dense(32, 64, 6, 12, 24, 16),
    "densenet161": _dense(48, 96, 6, 12, 36, 24),
    "densenet169": _dense(32, 64, 6, 12, 32, 32),
    "densenet201": _dense(32, 64, 6, 12, 48, 32),
    "inception_v3": ZooNetwork("lowtide.zoo.inception", "inception_v3", {}, {"batch": 16, "image": 299}),
    "vgg19": ZooNetwork("lowtide.zoo.plain", "vgg19", {}, {"batch": 128, "image": 224}),
    "alexnet": ZooNetwork("lowtide.zoo.plain", "alexnet", {}, {"batch": 128, "image": 224}),
    "gpt2": ZooNetwork(
        "lowtide.zoo.transformer",
        "gpt2",
        {},
        {**_TEXT, "length": 1024, "layers": 12, "width": 768, "heads": 12, "vocabulary": 50257},
    ),
    "bert": ZooNetwork(
        "lowtide.zoo.transformer",
        "bert",
        {},
        {**_TEXT, "layers": 12, "width": 768, "heads": 12, "vocabulary": 30522},
    ),
}


def names() -> list[str]:
    """The names of all networks."""
    return list(ENTRIES)


def find(name: str) -> ZooNetwork:
    """Return the entry of a network; the error for a wrong name suggests the nearest one."""
    if name in ENTRIES:
        return ENTRIES[name]
    near = difflib.get_close_matches(name.lower(), ENTRIES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(ENTRIES)}"
    raise ZooError(f"unknown network {name!r}; {hint}")


def make(
    name: str, *, device: str = "cpu", dtype: str = "float32", **sizes: int | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Make a network with random weights, in training mode, and a batch for it; together they give a loss.

    Args:
        name: one of `names()`.
        device: where both are to be.
        dtype: of the parameters and of images, `"float32"`, `"bfloat16"` or `"float16"`.
        sizes: `batch`, and `image` (pixels a side) or `length`, `layers`, `width`, `heads`, `vocabulary`.

    Returns:
        The module, and its keyword arguments.

    Raises:
        ZooError: for an unknown name or size.
    """
    import torch

    entry = find(name)
    given = {key: value for key, value in sizes.items() if value is not None}
    for key in given:
        if key not in entry.defaults:
            raise ZooError(f"{name} has no size {key!r}; it has {', '.join(entry.defaults)}")
    chosen = {**entry.defaults, **given}
    if chosen.get("width", 0) % chosen.get("heads", 1):
        raise ZooError(
            f"{name} of width {chosen['width']} cannot be divided among {chosen['heads']} heads; "
            "use a width that is a multiple of the number of heads"
        )
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ZooError(f"dtype is {dtype!r}, expected float32, bfloat16 or float16")
    function: Callable[..., Any] = getattr(importlib.import_module(entry.module), entry.function)
    model, sample = function(**entry.settings, **chosen)
    model = model.to(device=device, dtype=kind)
    moved = {key: v.to(device, kind) if v.is_floating_point() else v.to(device) for key, v in sample.items()}
    return model, moved
