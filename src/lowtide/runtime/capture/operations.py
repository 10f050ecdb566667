"""What work one operation is, as a watched forward notes it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter


def is_weight_cast(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is a parameter's copy in another dtype: autocast makes, keeps and reuses them."""
    return (
        func is torch.ops.aten._to_copy.default
        and isinstance(args[0], torch.Tensor)
        and args[0].is_leaf
        and args[0].requires_grad
    )


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """An operation and its arguments without their values: equal for equal work."""
    parts = [str(func)]
    for value in tree_iter((args, kwargs)):
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else ()
            parts.append(f"{tuple(value.shape)}{strides}{value.dtype}{value.requires_grad}")
        elif value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.layout):
            parts.append(repr(value))
    return "|".join(parts)
