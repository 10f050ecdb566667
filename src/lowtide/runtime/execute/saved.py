"""Placeholders in autograd's graph for the tensors that a stage saves.

A stage whose tensors are let go, moved or made again runs under saved-tensor hooks: each tensor that autograd wants to
save becomes a `Placeholder`. The executor fills a stage's placeholders when backward reaches the stage, or when the
first of them is opened. A repeated forward saves the same tensors in the same order; the n-th is for the n-th
placeholder.

Hooks switch off autograd's own check for in-place changes, so a filled placeholder remembers the version of its tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import FrameType, MappingProxyType
from typing import Any, Protocol, final

import torch
from torch import nn

from lowtide.errors import ExecutionError
from lowtide.runtime.replay.endings import EndOfRunError
from lowtide.runtime.state.environment import version_of
from lowtide.runtime.transfer.cargo import View


class Opener(Protocol):
    """Who fills placeholders."""

    def reach(self, k: int) -> None:
        """Backward has reached stage k: fill its placeholders."""

    def changed(self, k: int, tensor: torch.Tensor) -> None:
        """A tensor that stage k saved was changed in place: raise."""

    def lenders(self, k: int) -> Mapping[int, nn.Parameter]:
        """The weights of stage k whose memory comes and goes, by the address of the storage that they have now."""

    @property
    def is_away(self) -> Callable[[int], bool] | None:
        """Tells whether a stage's weights, of which saved tensors may be views, are not on the device; None: no stage's
        ever leave.
        """


@final
class Lent(View):
    """A saved tensor that is a parameter, or a view of one, whose memory comes and goes: put together when opened.

    Args:
        parameter: the parameter.
        tensor: the saved tensor, in the memory that the parameter has now.
    """

    __slots__ = ("parameter",)

    def __init__(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        super().__init__(None, tensor)
        self.parameter = parameter

    def tensor(self) -> torch.Tensor:
        """The tensor in the memory that the parameter has now."""
        return self.on(self.parameter.untyped_storage())


Kept = torch.Tensor | Lent


def kept(tensor: torch.Tensor, version: int, lenders: Mapping[int, nn.Parameter]) -> tuple[Kept, int]:
    """What to hold of a saved tensor, and the version that it must have when it is opened."""
    if lenders and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
        parameter = lenders.get(tensor.untyped_storage()._cdata)
        if parameter is not None:
            return Lent(parameter, tensor), version_of(parameter)
    return (tensor.detach() if tensor.requires_grad else tensor), version


class Placeholder:
    """One saved tensor, there or not; made by packing hooks by the thousand, so it is as small as can be."""

    __slots__ = ("tensor", "version")

    tensor: Kept | None
    """Without history: a graph that held itself would never be freed."""
    version: int
    """How often the tensor's memory had been written to when it was saved."""


Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Sink = Callable[[torch.Tensor], None]
"""What is done with each tensor that a run saves, in order."""
MayEnd = Callable[[FrameType], bool]


_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


class Placeholders:
    """The placeholders of one stage in one step, in the order in which its tensors were saved.

    They are held here until they are filled; from then on by autograd's graph alone, which lets each go as soon as
    backward has used it.
    """

    __slots__ = ("_calls", "_dtypes", "_made", "_shapes", "name", "stage")

    def __init__(self, stage: int, name: str) -> None:
        self.stage = stage
        self.name = name
        self._made: list[Placeholder] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._calls: list[tuple[int, str]] = []

    def begin_call(self, name: str) -> None:
        """What the first forward saves from here on is saved by this submodule, or function between submodules."""
        self._calls.append((len(self._shapes), name))

    def first_run(self, opener: Opener, sink: Sink | None) -> tuple[Pack, Unpack]:
        """The hooks of the stage's first forward."""
        # Bound once: these run for every tensor that is saved, between one kernel and the next. Two lists and no pairs,
        # since the garbage collector counts pairs, and comes the sooner.
        note, note_shape, note_dtype = self._made.append, self._shapes.append, self._dtypes.append
        make = Placeholder

        def pack(tensor: torch.Tensor) -> Placeholder:
            placeholder = make()
            placeholder.tensor = None
            note(placeholder)
            note_shape(tensor.shape)
            note_dtype(tensor.dtype)
            if sink is not None:
                sink(tensor)
            return placeholder

        return pack, self._unpacking(opener)

    def kept_run(self, opener: Opener) -> tuple[Pack, Unpack]:
        """The hooks of a first forward whose tensors stay; opening one has the stage's weights fetched."""
        lenders = opener.lenders(self.stage)

        def pack(tensor: torch.Tensor) -> Placeholder:
            placeholder = Placeholder()
            placeholder.tensor, placeholder.version = kept(tensor, version_of(tensor), lenders)
            return placeholder

        return pack, self._unpacking(opener)

    def _unpacking(self, opener: Opener) -> Unpack:
        stage, is_away = self.stage, opener.is_away

        def unpack(placeholder: Placeholder) -> torch.Tensor:
            held = placeholder.tensor
            if held is None or (is_away is not None and is_away(stage)):
                opener.reach(stage)
                held = placeholder.tensor
            if held is None:
                raise ExecutionError(
                    f"tensors saved by stage {self.name!r} were already freed; use retain_graph=True in the first "
                    "backward to go through the graph twice"
                )
            if type(held) is Lent:  # not isinstance: this runs for every saved tensor
                if version_of(held.parameter) != placeholder.version:
                    opener.changed(stage, held.parameter)
                return held.tensor()
            if version_of(held) != placeholder.version:
                opener.changed(stage, held)
            return held

        return unpack

    def repeated_run(
        self,
        sink: Sink | None,
        may_end_in: MayEnd | None = None,
        lenders: Mapping[int, nn.Parameter] = MappingProxyType({}),
    ) -> RepeatedRun:
        """The packing hook of a repeated forward whose tensors are wanted; without a sink they fill placeholders.

        With `may_end_in` it raises `EndOfRunError` when as many tensors are there as the first run saved, in a frame in
        which that may be.
        """
        return RepeatedRun(self, sink, len(self._shapes), may_end_in, lenders)

    def check(self, tensors: list[torch.Tensor]) -> None:
        """Compare what a recomputation saved with the first forward.

        Raises:
            ExecutionError: where shapes, dtypes or the number of tensors differ.
        """
        if list(map(_shape, tensors)) == self._shapes and list(map(_dtype, tensors)) == self._dtypes:
            return
        pairs = zip(tensors, self._shapes, self._dtypes, strict=False)
        for index, (tensor, shape, dtype) in enumerate(pairs):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ExecutionError(
                    f"{self._place(index)} saved tensor {index} as {list(shape)} {dtype} the first time, but as "
                    f"{list(tensor.shape)} {tensor.dtype} when recomputed; {_ADVICE}"
                )
        raise ExecutionError(
            f"stage {self.name!r} saved {len(self._shapes)} tensors the first time, but {len(tensors)} when "
            f"recomputed; {_ADVICE}"
        )

    def _place(self, index: int) -> str:
        """Who saved the tensor at a position, in words."""
        name = next((name for start, name in reversed(self._calls) if start <= index), "")
        return f"stage {self.name!r}" if name in ("", self.name) else f"stage {self.name!r}, in {name!r},"

    def take(self) -> list[Placeholder]:
        """All of them, for whoever fills them now; none where they are filled already.

        Some may be wanted by nobody any more: what they are filled with goes with the list.
        """
        taken = self._made.copy()
        self._made.clear()  # not a new list: the packing hook, which the graph holds, has this one
        return taken

    def fill(
        self,
        tensors: list[torch.Tensor],
        versions: list[int],
        lenders: Mapping[int, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """Give each placeholder its tensor; those that an earlier repeated run filled keep what they have."""
        filled = zip(self.take(), tensors, versions, strict=False)
        if lenders:
            for placeholder, tensor, version in filled:
                placeholder.tensor, placeholder.version = kept(tensor, version, lenders)
            return
        for placeholder, tensor, version in filled:  # the same, without a call for every saved tensor
            placeholder.tensor = tensor.detach() if tensor.requires_grad else tensor
            placeholder.version = version


class RepeatedRun:
    """Catches what a recomputation saves: `pack` is its hook; its maker clears `tensors` at the end.

    Args:
        placeholders: for which it runs.
        sink: is handed each tensor.
        num_wanted: how many there are to be.
        may_end_in: whether the run can be ended, when so many are there, in a frame; None: it ends by itself.
        lenders: the weights of the stage whose memory comes and goes, by the address of their storage.
    """

    __slots__ = ("_lenders", "_placeholders", "_sink", "_versions", "pack", "tensors")

    def __init__(
        self,
        placeholders: Placeholders,
        sink: Sink | None,
        num_wanted: int,
        may_end_in: MayEnd | None,
        lenders: Mapping[int, nn.Parameter],
    ) -> None:
        self._placeholders = placeholders
        self._lenders = lenders
        self._sink = sink
        self.tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.pack: Pack = self._packing() if may_end_in is None else self._packing_until(num_wanted, may_end_in)

    def _packing(self) -> Pack:
        note, note_version, sink = self.tensors.append, self._versions.append, self._sink

        def pack(tensor: torch.Tensor) -> None:
            note(tensor)
            note_version(version_of(tensor))
            if sink is not None:
                sink(tensor)

        return pack

    def _packing_until(self, num_wanted: int, may_end_in: MayEnd) -> Pack:
        pack, tensors = self._packing(), self.tensors

        def pack_until(tensor: torch.Tensor) -> None:
            pack(tensor)
            if len(tensors) == num_wanted and may_end_in(sys._getframe(1)):
                raise EndOfRunError

        return pack_until

    def check(self) -> None:
        """The run has ended: compare shapes, dtypes and the number of tensors with those of the first.

        Raises:
            ExecutionError: where they differ.
        """
        self._placeholders.check(self.tensors)

    def fill(self) -> None:
        """Fill the placeholders unless something else took the tensors."""
        if self._sink is None:
            self._placeholders.fill(self.tensors, self._versions, self._lenders)


_ADVICE = "a stage must depend only on its input, its parameters and random numbers"


def discard(tensor: torch.Tensor) -> None:
    """The packing hook of a recomputation that only needs the output."""


def never_opened(packed: Any) -> torch.Tensor:
    """The unpacking hook of a graph that is never used."""
    raise ExecutionError("the graph of a recomputation was used; gradients flow only through the first forward")
