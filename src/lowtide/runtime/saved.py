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
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import ExecutionError
from lowtide.runtime.tape import version_of


class Opener(Protocol):
    """Who fills placeholders."""

    def reach(self, k: int) -> None:
        """Backward has reached stage k: fill its placeholders."""

    def changed(self, k: int, tensor: torch.Tensor) -> None:
        """A tensor that stage k saved was changed in place: raise."""


class Placeholder:
    """One saved tensor, there or not; made by packing hooks by the thousand, so it is as small as can be."""

    __slots__ = ("__weakref__", "tensor", "version")

    tensor: torch.Tensor | None
    version: int

    def fill(self, tensor: torch.Tensor, version: int) -> None:
        """Give it its tensor, without history: a graph that held itself would never be freed.

        Args:
            tensor: the tensor.
            version: how often its memory had been written to when it was saved.
        """
        # What autograd hands to hooks has none already.
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.version = version


Pack = Callable[[torch.Tensor], Any]
Sink = Callable[[torch.Tensor], None]
"""What is done with each tensor that a run saves, in order."""


class Placeholders:
    """The placeholders of one stage in one step, in the order in which its tensors were saved; not kept alive."""

    __slots__ = ("_calls", "_dtypes", "_made", "_shapes", "name", "stage")

    def __init__(self, stage: int, name: str) -> None:
        self.stage = stage
        self.name = name
        self._made: list[weakref.ref[Placeholder]] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._calls: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._made)

    def alive(self, index: int) -> Placeholder | None:
        """The placeholder at a position, where autograd still wants it."""
        return self._made[index]()

    def begin_call(self, name: str) -> None:
        """What the first forward saves from here on is saved by this submodule, or function between submodules."""
        self._calls.append((len(self._made), name))

    def first_run(self, opener: Opener, sink: Sink | None) -> saved_tensors_hooks:
        """The hooks of the stage's first forward."""
        # Bound once: these run for every tensor that is saved, between one kernel and the next.
        note, note_shape, note_dtype = self._made.append, self._shapes.append, self._dtypes.append
        make, reference = Placeholder, weakref.ref

        def pack(tensor: torch.Tensor) -> Placeholder:
            placeholder = make()
            placeholder.tensor = None
            note(reference(placeholder))
            note_shape(tensor.shape)
            note_dtype(tensor.dtype)
            if sink is not None:
                sink(tensor)
            return placeholder

        return saved_tensors_hooks(pack, self._unpacking(opener))

    def _unpacking(self, opener: Opener) -> Callable[[Placeholder], torch.Tensor]:
        stage = self.stage

        def unpack(placeholder: Placeholder) -> torch.Tensor:
            if placeholder.tensor is None:
                opener.reach(stage)
            tensor = placeholder.tensor
            if tensor is None:
                raise ExecutionError(
                    f"backward asks for what stage {self.name!r} saved after it was let go; to go through a part of "
                    "the graph twice, call backward(retain_graph=True) the first time"
                )
            if version_of(tensor) != placeholder.version:
                opener.changed(stage, tensor)
            return tensor

        return unpack

    def repeated_run(self, sink: Sink | None) -> RepeatedRun:
        """The packing hook of a repeated forward whose tensors are wanted; without a sink they fill placeholders."""
        return RepeatedRun(self, sink)

    def check(self, tensors: list[torch.Tensor]) -> None:
        """Compare what a repeated forward saved with what the first did.

        Raises:
            ExecutionError: where shapes, dtypes or the number of tensors differ.
        """
        pairs = zip(tensors, self._shapes, self._dtypes, strict=False)
        for index, (tensor, shape, dtype) in enumerate(pairs):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ExecutionError(
                    f"{self._place(index)} saved tensor {index} with shape {list(shape)} and {dtype} the first time, "
                    f"and with {list(tensor.shape)} and {tensor.dtype} when it ran again; {_ADVICE}"
                )
        if len(tensors) != len(self._made):
            raise ExecutionError(
                f"stage {self.name!r} saved {len(self._made)} tensors the first time and {len(tensors)} when it ran "
                f"again; {_ADVICE}"
            )

    def _place(self, index: int) -> str:
        """Who saved the tensor at a position, in words."""
        name = next((name for start, name in reversed(self._calls) if start <= index), "")
        return f"stage {self.name!r}" if name in ("", self.name) else f"stage {self.name!r}, in {name!r},"

    def fill(self, tensors: list[torch.Tensor], versions: list[int]) -> None:
        """Give each placeholder that is still wanted its tensor."""
        for reference, tensor, version in zip(self._made, tensors, versions, strict=True):
            placeholder = reference()
            if placeholder is not None:
                placeholder.fill(tensor, version)


class RepeatedRun:
    """Catches what a repeated forward saves: `pack` is its hook; whoever makes it clears `tensors` in the end."""

    __slots__ = ("_placeholders", "_sink", "_versions", "pack", "tensors")

    def __init__(self, placeholders: Placeholders, sink: Sink | None) -> None:
        self._placeholders = placeholders
        self._sink = sink
        self.tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.pack: Pack = self._packing()

    def _packing(self) -> Pack:
        note, note_version, sink = self.tensors.append, self._versions.append, self._sink

        def pack(tensor: torch.Tensor) -> None:
            note(tensor)
            note_version(version_of(tensor))
            if sink is not None:
                sink(tensor)

        return pack

    def finish(self) -> None:
        """The run has ended: compare it with the first, and fill the placeholders where nobody else took the tensors.

        Raises:
            ExecutionError: where it differs.
        """
        self._placeholders.check(self.tensors)
        if self._sink is None:
            self._placeholders.fill(self.tensors, self._versions)


_ADVICE = "what a stage does must follow from its input, its parameters and random numbers alone"


def discard(tensor: torch.Tensor) -> None:
    """The packing hook of a repeated forward of which only the output is wanted."""


def never_opened(packed: Any) -> torch.Tensor:
    """The unpacking hook of a graph that nobody goes through."""
    raise ExecutionError("the graph of a repeated forward was used; gradients flow through the first forward's")
