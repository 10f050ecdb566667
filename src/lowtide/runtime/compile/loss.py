"""Compiles the loss of a model whose blocks are compiled, if it is large.

The scores of a network that predicts words, one for each of its vocabulary, are its largest tensors, and the loss that
it computes of them between its submodules is part of no block. In eager mode `F.cross_entropy` makes one more tensor of
their size, which it saves, and its backward two; compiled, it saves the scores, and its backward makes one.

Models of transformers convert scores to 32 bits before. That is compiled with the loss: scores are saved, and their
gradient is made, in 16 bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# Scores from this size on are worth the seconds that compiling takes: 16 384 words of text and 2 048 words to choose
# from, in 16 bits. An image classifier has less than a hundredth of that.
_WORTH_BYTES = 64 * 2**20

_SHORT = (torch.bfloat16, torch.float16)

CONVERSIONS = (torch.Tensor.float, torch.Tensor.to)
"""The functions of torch whose results a loss is told of."""

Functions = Mapping[Callable[..., Any], "CompiledLoss"]
"""What is called between submodules instead of torch functions."""

_FUNCTIONS: weakref.WeakKeyDictionary[nn.Module, Functions] = weakref.WeakKeyDictionary()


class CompiledLoss:
    """Replaces `F.cross_entropy`.

    Args:
        compiled: the same function compiled, or to be compiled when it is first called; after the scores it is handed
            the type to which they are converted first.
        always: whether it is also used for small logits.
    """

    __name__ = "cross_entropy"

    def __init__(self, compiled: Callable[..., Any], *, always: bool = False) -> None:
        self._compiled = compiled
        self.always = always
        """Whether it is also called with small logits: those of a smaller batch, under a schedule that counts on what
        it takes compiled, would take more than those of the batch that was planned for.
        """
        self.is_used = False
        """Whether it was called, with scores that are worth it."""
        self._converted = WeakIdKeyDictionary()  # what tensors were before, and the versions of both then

    def __call__(self, scores: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """The loss; arguments as `F.cross_entropy` hands its own to a mode: the scores first, by position."""
        if not self._is_worth(scores):
            return F.cross_entropy(scores, *args, **kwargs)
        return self.of_converted(scores, scores.shape, scores.dtype, *args, **kwargs)

    def of_converted(
        self, scores: torch.Tensor, shape: torch.Size, dtype: torch.dtype, /, *args: Any, **kwargs: Any
    ) -> Any:
        """The loss of scores of another shape and type, which are converted first."""
        self.is_used = True
        try:
            return self._compiled(scores.view(shape), dtype, *args, **kwargs)
        except Exception:
            with torch.no_grad():  # of wrong arguments a compiler gives another kind of error
                F.cross_entropy(scores.view(shape).to(dtype), *args, **kwargs)
            raise

    def instead(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to call for a call of `F.cross_entropy`: where its scores were converted, with those from before."""
        scores, *rest = args
        before = self._before(scores) if self._is_worth(scores) else None
        if before is None:
            return self, args
        return self.of_converted, (before, scores.shape, scores.dtype, *rest)

    def note_conversion(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """`Tensor.float` or `Tensor.to` was called."""
        if result is not tensor and result.dtype is torch.float32 and tensor.dtype in _SHORT:
            self._converted[result] = weakref.ref(tensor), tensor._version, result._version

    def _is_worth(self, scores: torch.Tensor) -> bool:
        return self.always or scores.nbytes >= _WORTH_BYTES

    def _before(self, scores: torch.Tensor) -> torch.Tensor | None:
        """The scores before they were converted, where they are all of them, and unchanged."""
        whole = scores if scores._base is None else scores._base
        found, *versions = self._converted.get(whole, (None,))
        tensor = None if found is None else found()
        if tensor is None or versions != [tensor._version, whole._version] or tensor.device != scores.device:
            return None
        are_all = scores.shape.numel() == whole.shape.numel() and scores.storage_offset() == whole.storage_offset()
        return tensor if are_all and all(each.is_contiguous() for each in (tensor, whole, scores)) else None

    def install(self, model: nn.Module) -> None:
        """Use it in the forward of a model that runs in stages."""
        _FUNCTIONS[model] = {F.cross_entropy: self}

    def remove(self, model: nn.Module) -> None:
        """Use `F.cross_entropy` itself again."""
        if self in functions_of(model).values():
            del _FUNCTIONS[model]


def functions_of(model: nn.Module) -> Functions:
    """What is called between the submodules of a model instead of torch functions."""
    return _FUNCTIONS.get(model, {})
