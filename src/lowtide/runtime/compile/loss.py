"""Compiles the loss of a model whose blocks are compiled, if it is large.

The scores of a network that predicts words, one for each of its vocabulary, are its largest tensors, and the loss that
it computes of them between its submodules is part of no block. In eager mode `F.cross_entropy` makes one more tensor of
their size, which it saves, and its backward two; compiled, it saves the scores, and its backward makes one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

# Scores from this size on are worth the seconds that compiling takes: 16 384 words of text and 2 048 words to choose
# from, in 16 bits. An image classifier has less than a hundredth of that.
_WORTH_BYTES = 64 * 2**20

Functions = Mapping[Callable[..., Any], Callable[..., Any]]
"""What is called between submodules instead of torch functions."""

_FUNCTIONS: weakref.WeakKeyDictionary[nn.Module, Functions] = weakref.WeakKeyDictionary()


class CompiledLoss:
    """Replaces `F.cross_entropy`.

    Args:
        compiled: the same function compiled, or to be compiled when it is first called.
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

    def __call__(self, scores: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """The loss; arguments as `F.cross_entropy` hands its own to a mode: the scores first, by position."""
        if not self.always and scores.nbytes < _WORTH_BYTES:
            return F.cross_entropy(scores, *args, **kwargs)
        self.is_used = True
        try:
            return self._compiled(scores, *args, **kwargs)
        except Exception:
            with torch.no_grad():
                F.cross_entropy(scores, *args, **kwargs)  # of wrong arguments a compiler gives another kind of error
            raise

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
