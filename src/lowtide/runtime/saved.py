"""What stands in autograd's graph for the tensors that a stage saves.

A stage whose tensors are let go, moved or made again runs under saved-tensor hooks: each tensor that autograd wants to
save becomes a `Placeholder`. The executor fills a stage's placeholders when backward reaches the stage, or when the
first of them is opened. A repeated forward saves the same tensors in the same order; the n-th is for the n-th
placeholder.

Hooks switch off autograd's own check for in-place changes, so a filled placeholder remembers the version of its tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lowtide.errors import ExecutionError
from lowtide.runtime.tape import version_of


class Opener(Protocol):
    """Who fills placeholders."""

    def reach(self, k: int) -> None:
        """Backward has reached stage k: fill its placeholders."""

    def changed(self, k: int, tensor: torch.Tensor) -> None:
        """A tensor that stage k saved was changed in place: raise."""


class Placeholder:
    """One saved tensor, there or not."""

    __slots__ = ("__weakref__", "dtype", "opener", "shape", "stage", "tensor", "version")

    def __init__(self, opener: Opener, stage: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.opener = opener
        self.stage = stage
        self.shape = shape
        self.dtype = dtype
        self.tensor: torch.Tensor | None = None
        self.version = 0

    def fill(self, tensor: torch.Tensor) -> None:
        """Give it its tensor, without history: a graph that held itself would never be freed."""
        # What autograd hands to hooks has none already.
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.version = version_of(tensor)


def opened(placeholder: Placeholder) -> torch.Tensor:
    """The unpacking hook."""
    tensor = placeholder.tensor
    if tensor is None:
        placeholder.opener.reach(placeholder.stage)
        tensor = placeholder.tensor
        if tensor is None:
            raise ExecutionError(
                f"backward asks for what stage {placeholder.stage} saved after it was let go; to go through a part of "
                "the graph twice, call backward(retain_graph=True) the first time"
            )
    if version_of(tensor) != placeholder.version:
        placeholder.opener.changed(placeholder.stage, tensor)
    return tensor


Sink = Callable[[int, Placeholder | None, torch.Tensor], None]
"""What is done with the n-th tensor that a run saves, given its placeholder where that is still wanted."""


class Placeholders:
    """The placeholders of one stage in one step, in the order in which its tensors were saved; not kept alive."""

    __slots__ = ("_made", "name", "stage")

    def __init__(self, stage: int, name: str) -> None:
        self.stage = stage
        self.name = name
        self._made: list[weakref.ref[Placeholder]] = []

    def __len__(self) -> int:
        return len(self._made)

    def alive(self, index: int) -> Placeholder | None:
        """The placeholder at a position, where autograd still wants it."""
        return self._made[index]()

    def first_run(self, opener: Opener, sink: Sink | None) -> Callable[[torch.Tensor], Placeholder]:
        """The packing hook of the stage's first forward."""
        made, stage, reference = self._made, self.stage, weakref.ref

        def pack(tensor: torch.Tensor) -> Placeholder:
            placeholder = Placeholder(opener, stage, tensor.shape, tensor.dtype)
            made.append(reference(placeholder))
            if sink is not None:
                sink(len(made) - 1, placeholder, tensor)
            return placeholder

        return pack

    def repeated_run(self, sink: Sink) -> RepeatedRun:
        """The packing hook of a repeated forward whose tensors are wanted."""
        return RepeatedRun(self, sink)


class RepeatedRun:
    """Catches what a repeated forward saves, and compares it with the first."""

    __slots__ = ("_made", "_num_saved", "_placeholders", "_sink")

    def __init__(self, placeholders: Placeholders, sink: Sink) -> None:
        self._placeholders = placeholders
        self._made = placeholders._made
        self._sink = sink
        self._num_saved = 0

    def __call__(self, tensor: torch.Tensor) -> None:
        """The packing hook."""
        index = self._num_saved
        self._num_saved = index + 1
        if index >= len(self._made):
            return  # told in `finish`, with the number
        placeholder = self._made[index]()
        if placeholder is not None and (placeholder.shape != tensor.shape or placeholder.dtype != tensor.dtype):
            raise ExecutionError(
                f"stage {self._placeholders.name!r} saved tensor {index} with shape {list(placeholder.shape)} and "
                f"{placeholder.dtype} the first time, and with {list(tensor.shape)} and {tensor.dtype} when it ran "
                f"again; {_ADVICE}"
            )
        self._sink(index, placeholder, tensor)

    def finish(self) -> None:
        """Compare the numbers of tensors saved."""
        if self._num_saved != len(self._placeholders):
            raise ExecutionError(
                f"stage {self._placeholders.name!r} saved {len(self._placeholders)} tensors the first time and "
                f"{self._num_saved} when it ran again; {_ADVICE}"
            )


_ADVICE = "what a stage does must follow from its input, its parameters and random numbers alone"


def discard(tensor: torch.Tensor) -> None:
    """The packing hook of a repeated forward of which only the output is wanted."""


def never_opened(packed: Any) -> torch.Tensor:
    """The unpacking hook of a graph that nobody goes through."""
    raise ExecutionError("the graph of a repeated forward was used; gradients flow through the first forward's")
