"""Lets images enter a model whose blocks are compiled in the layout that their convolutions compute with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.runtime.model.call_site import Layer, Rank
from lowtide.runtime.model.containers import build, template, tensors_of


class ChannelsLast(Layer):
    """Converts a model's images once, where they enter, and its result back.

    Strides go from one operation to the next, so that all that the model computes of them has channels last, too. The
    conversions are the model's own operations: of its first stage, which is recomputed from the images as they came,
    and of its last.
    """

    __slots__ = ()

    rank = Rank.LAYOUT

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with other images, of the same numbers."""
        args, kwargs = _converted((args, kwargs), is_image, torch.channels_last)
        return _converted(self.pass_on(*args, **kwargs), has_channels_last, torch.contiguous_format)


def is_image(tensor: torch.Tensor) -> bool:
    """Whether a tensor could have channels last, and has not."""
    could = tensor.dim() == 4 and tensor.is_floating_point() and tensor.layout is torch.strided
    return could and tensor.is_contiguous() and not tensor.is_contiguous(memory_format=torch.channels_last)


def has_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor is laid out so, and not in the usual way."""
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _converted(value: Any, is_meant: Callable[[torch.Tensor], bool], layout: torch.memory_format) -> Any:
    """The same with some of its tensors laid out anew; a tensor that is there twice stays one."""
    found = {id(tensor): tensor for tensor in tensors_of(value) if is_meant(tensor)}
    if not found:
        return value
    laid_out = {key: tensor.contiguous(memory_format=layout) for key, tensor in found.items()}
    return build(template(value, lambda tensor: laid_out.get(id(tensor), tensor)), ())
