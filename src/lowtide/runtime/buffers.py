"""Buffers that a forward changes (statistics, counters, power iterations): changed once a step, as in plain training.

A stage that runs again must find its buffers as the first run found them, and leave them as they are by then. Which
buffers a stage changes is seen in its first forward; from then on only those are copied beforehand. The statistics of
BatchNorm are not even copied: in training its output does not depend on them, so the repeated run is given others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lowtide.errors import ExecutionError

_BATCH_NORMS = {nn.BatchNorm1d.forward, nn.BatchNorm2d.forward, nn.BatchNorm3d.forward, nn.SyncBatchNorm.forward}


class _Place(NamedTuple):
    """Where a buffer is registered."""

    module: nn.Module
    name: str
    path: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.name)

    @property
    def is_statistic(self) -> bool:
        """Whether the module's output in training does not depend on this buffer."""
        return self.module.training and type(self.module).forward in _BATCH_NORMS


class Snapshot:
    """The buffers of a stage before its first run."""

    __slots__ = ("changed", "copies", "versions")

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.copies: dict[int, torch.Tensor] = {}
        self.changed: list[int] = []


class StageBuffers:
    """The buffers that one stage may change.

    Args:
        modules: the stage's units, by path, and whatever lies outside all units.
        swap: whether BatchNorm's statistics may be exchanged for the time of a repeated run (not in compiled modules,
            which may have looked at them when they were compiled).
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], *, swap: bool) -> None:
        self._swap = swap
        self._places: list[_Place] = []
        self._known: set[int] | None = None  # the ones that change; None: not seen yet
        self._spare: dict[int, torch.Tensor] = {}
        seen: set[tuple[int, str]] = set()
        for path, module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and (id(module), name) not in seen:
                    seen.add((id(module), name))
                    self._places.append(_Place(module, name, f"{path}.{name}" if path else name))

    def before(self) -> Snapshot:
        """Note the buffers before a first run."""
        snapshot = Snapshot()
        for index, place in enumerate(self._places):
            tensor = place.tensor
            snapshot.versions.append(0 if tensor is None else tensor._version)
            if tensor is None or place.is_statistic:
                continue
            if self._known is None or index in self._known:
                snapshot.copies[index] = tensor.detach().clone()
        return snapshot

    def after(self, snapshot: Snapshot) -> Snapshot | None:
        """Look what the first run changed; returns what a repeated run needs, None where there are no buffers."""
        for index, version in enumerate(snapshot.versions):
            if self._has_changed(index, version, snapshot.copies.get(index)):
                snapshot.changed.append(index)
        snapshot.copies = {index: copy for index, copy in snapshot.copies.items() if index in snapshot.changed}
        self._known = {*(self._known or ()), *snapshot.changed}
        return snapshot if snapshot.versions else None

    def _has_changed(self, index: int, version: int, copy: torch.Tensor | None) -> bool:
        place = self._places[index]
        tensor = place.tensor
        if tensor is None:
            return False
        if place.is_statistic or tensor._version != version or (self._known is not None and index in self._known):
            return True
        # Batch normalisation writes its statistics without counting a version: the first time, values are compared.
        return self._known is None and copy is not None and not torch.equal(copy, tensor)

    @contextmanager
    def protected(self, snapshot: Snapshot | None) -> Iterator[None]:
        """Run the block with the changed buffers as they were, and leave them as they are.

        Raises:
            ExecutionError: for a buffer that changed in this step and in none before: its old value is not known; and
                for one that somebody else changed since.
        """
        if snapshot is None:
            yield
            return
        self._check_unchanged(snapshot)
        with ExitStack() as stack:
            for index in snapshot.changed:
                place = self._places[index]
                if place.is_statistic and self._swap:
                    stack.enter_context(self._exchanged(index, place))
                elif place.is_statistic or index in snapshot.copies:
                    stack.enter_context(_restored(place, snapshot.copies.get(index)))
                else:
                    raise ExecutionError(
                        f"buffer {place.path!r} was changed by this step's forward and by none before, so the stage "
                        "cannot be run again; run the step once more"
                    )
            yield

    def _check_unchanged(self, snapshot: Snapshot) -> None:
        for index, (place, version) in enumerate(zip(self._places, snapshot.versions, strict=True)):
            tensor = place.tensor
            if tensor is not None and tensor._version != version and index not in snapshot.changed:
                raise ExecutionError(
                    f"buffer {place.path!r} was changed in place between the forward of a stage that reads it and its "
                    "backward; change it after the backward pass"
                )

    def rewritten(self, snapshot: Snapshot | None) -> set[int]:
        """The addresses of the storages that hold other values after a repeated run than during it."""
        if snapshot is None:
            return set()
        tensors = (self._places[index].tensor for index in snapshot.copies)
        return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}

    @contextmanager
    def _exchanged(self, index: int, place: _Place) -> Iterator[None]:
        tensor = place.tensor
        assert tensor is not None
        spare = self._spare.get(index)
        if spare is None or spare.device != tensor.device or spare.shape != tensor.shape or spare.dtype != tensor.dtype:
            spare = self._spare[index] = tensor.detach().clone()
        place.module._buffers[place.name] = spare
        try:
            yield
        finally:
            place.module._buffers[place.name] = tensor


@contextmanager
def _restored(place: _Place, earlier: torch.Tensor | None) -> Iterator[None]:
    tensor = place.tensor
    assert tensor is not None
    now = tensor.detach().clone()
    with _unsafe_preserve_version_counter(tensor):  # whoever saved the tensor finds it as it was
        if earlier is not None:
            _write(tensor, earlier)
        try:
            yield
        finally:
            _write(tensor, now)


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values)
