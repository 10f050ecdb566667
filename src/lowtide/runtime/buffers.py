"""Buffers that a forward changes (statistics, counters, power iterations): changed once a step, as in plain training.

A stage that runs again must find its buffers as the first run found them, and leave them as they are by then. Which
buffers a stage changes is seen in its first forward; from then on only those are copied beforehand. The statistics of
BatchNorm are not even copied: in training its output does not depend on them, so the repeated run is given others,
unless the code of a module around it names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lowtide.errors import ExecutionError
from lowtide.runtime.attributes import StageAttributes
from lowtide.runtime.containers import Held
from lowtide.runtime.exchange import Entry, exchanged
from lowtide.runtime.mentions import mentions

_BATCH_NORMS = {nn.BatchNorm1d.forward, nn.BatchNorm2d.forward, nn.BatchNorm3d.forward, nn.SyncBatchNorm.forward}
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


class _Place(NamedTuple):
    """Where a buffer is registered."""

    module: nn.Module
    name: str
    path: str
    only_in_glue: bool = False
    """No unit of the stage reads it; what lies between units may, and is on the tape then."""

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.name)

    @property
    def may_be_statistic(self) -> bool:
        """Whether the module's output in training does not depend on this buffer."""
        return self.name in _STATISTICS and type(self.module).forward in _BATCH_NORMS


class Snapshot:
    """The buffers of a stage, and the plain attributes of its modules, before its first run.

    `statistics` are the places of BatchNorm modules in training; about the other places there are `versions`, by
    place, and `copies`.
    """

    __slots__ = ("attributes", "changed", "copies", "statistics", "versions")

    def __init__(self) -> None:
        self.statistics: list[int] = []
        self.versions: dict[int, int] = {}
        self.copies: dict[int, torch.Tensor] = {}
        self.changed: list[int] = []
        self.attributes: list[Any] = []


class StageBuffers:
    """The buffers that one stage may change.

    Args:
        modules: those of the stage's units, by path.
        outside: those that lie outside all units.
        swap: whether BatchNorm's statistics may be exchanged for the time of a repeated run (not in compiled modules,
            which may have looked at them when they were compiled).
    """

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module]], outside: Sequence[tuple[str, nn.Module]], *, swap: bool
    ) -> None:
        self._swap = swap
        self._places: list[_Place] = []
        self._known: set[int] | None = None  # the ones that change, besides statistics; None: not seen yet
        self._spare: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the buffer, and what stands in for it
        seen: set[tuple[int, str]] = set()
        for path, module in (*modules, *outside):
            for name, buffer in module._buffers.items():
                if buffer is not None and (id(module), name) not in seen:
                    seen.add((id(module), name))
                    is_inside = any(module is each or mentions(each, frozenset({name})) for _, each in modules)
                    self._places.append(_Place(module, name, f"{path}.{name}" if path else name, not is_inside))
        modules = [*modules, *outside]
        self._attributes = StageAttributes(module for _, module in modules)
        # Most buffers are statistics: a module is asked once whether it is in training, not once for each of them.
        self._norms: dict[nn.Module, list[int]] = {}
        self._others: list[int] = []
        are_read = any(mentions(module, _STATISTICS) for _, module in modules)  # by whoever is around the BatchNorm
        for index, place in enumerate(self._places):
            is_statistic = place.may_be_statistic and not are_read
            indices = self._norms.setdefault(place.module, []) if is_statistic else self._others
            indices.append(index)

    @property
    def statistics(self) -> frozenset[int]:
        """The addresses of the storages of BatchNorm's statistics, which autograd saves and training does not read."""
        tensors = (place.tensor for place in self._places if place.may_be_statistic and place.module.training)
        return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None)

    def before(self) -> Snapshot | None:
        """Note the buffers before a first run; None where there are none."""
        attributes = self._attributes.before()
        if not self._places and not attributes:
            return None
        snapshot = Snapshot()
        snapshot.attributes = attributes
        noted = self._others
        for module, indices in self._norms.items():
            if module.training:
                snapshot.statistics += indices
            else:
                noted = [*noted, *indices]
        for index in noted:
            tensor = self._places[index].tensor
            if tensor is not None:
                snapshot.versions[index] = tensor._version
                if self._known is None or index in self._known:
                    snapshot.copies[index] = tensor.detach().clone()
        return snapshot

    def after(self, snapshot: Snapshot | None) -> None:
        """Look what the first run changed: the snapshot is then what a repeated run needs."""
        if snapshot is None:
            return
        for index, version in snapshot.versions.items():
            if self._has_changed(index, version, snapshot.copies.get(index)):
                snapshot.changed.append(index)
        if snapshot.copies:
            snapshot.copies = {index: copy for index, copy in snapshot.copies.items() if index in snapshot.changed}
        self._known = {*(self._known or ()), *snapshot.changed}

    def _has_changed(self, index: int, version: int, copy: torch.Tensor | None) -> bool:
        tensor = self._places[index].tensor
        if tensor is None:
            return False
        if tensor._version != version or (self._known is not None and index in self._known):
            return True
        # Batch normalisation writes its statistics without counting a version: the first time, values are compared.
        return self._known is None and copy is not None and not _equal(copy, tensor)

    def protected(self, snapshot: Snapshot | None, held: Iterable[Held]) -> AbstractContextManager[None]:
        """Run the block with the changed buffers as they were, and leave them as they are.

        Args:
            snapshot: of the stage's first run.
            held: what the stage's tape reads.

        Raises:
            ExecutionError: for a buffer that changed in this step and in none before: its old value is not known; and
                for one that it reads and somebody else changed since.
        """
        if snapshot is None:
            return nullcontext()
        attributes = self._attributes.changed_since(snapshot.attributes)
        return self._protected(snapshot, attributes, held) if self._places or attributes else nullcontext()

    @contextmanager
    def _protected(self, snapshot: Snapshot, attributes: list[Entry], held: Iterable[Held]) -> Iterator[None]:
        self._check(snapshot, held)
        statistics, written = snapshot.statistics, snapshot.changed
        if not self._swap:
            statistics, written = [], [*written, *statistics]
        with (
            exchanged(self._spares(statistics)),
            exchanged(attributes),
            self._put_back(written, snapshot.copies) if written else nullcontext(),
        ):
            yield

    @contextmanager
    def _put_back(self, written: Sequence[int], earlier: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Run the block with buffers as they were, where that matters, and put back what they hold now."""
        tensors = {index: tensor for index in written if (tensor := self._places[index].tensor) is not None}
        now = {
            index: tensor.detach().clone() if index in earlier else self._spare_for(index, tensor)  # small: statistics
            for index, tensor in tensors.items()
        }
        _write((now[index], tensor) for index, tensor in tensors.items() if index not in earlier)
        with _unsafe_preserve_version_counter(tuple(tensors.values())):  # whoever saved one finds it as it was
            _write((tensor, earlier[index]) for index, tensor in tensors.items() if index in earlier)
            try:
                yield
            finally:
                _write((tensor, now[index]) for index, tensor in tensors.items())

    def _check(self, snapshot: Snapshot, held: Iterable[Held]) -> None:
        """Refuse what cannot be made as it was."""
        for index, version in snapshot.versions.items():
            place = self._places[index]
            if index in snapshot.changed:
                if index not in snapshot.copies:
                    raise ExecutionError(
                        f"buffer {place.path!r} was changed by this step's forward and by none before, so the stage "
                        "cannot be run again; run the step once more"
                    )
            elif (tensor := place.tensor) is not None and tensor._version != version:
                if place.only_in_glue and not any(each.tensor is tensor for each in held):
                    continue  # another stage's business
                raise ExecutionError(
                    f"buffer {place.path!r} was changed in place between the forward of a stage that reads it and its "
                    "backward; change it after the backward pass"
                )
        for index in snapshot.statistics:
            if not self._places[index].module.training:
                raise ExecutionError(
                    f"the module of buffer {self._places[index].path!r} was switched between train() and eval() "
                    "between forward and backward; switch after the backward pass"
                )

    def rewritten(self, snapshot: Snapshot | None) -> set[int]:
        """The addresses of the storages that hold other values after a repeated run than during it."""
        if snapshot is None:
            return set()
        tensors = (self._places[index].tensor for index in snapshot.copies)
        return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}

    def _spares(self, statistics: list[int]) -> list[Entry]:
        """What is to stand in the places of statistics."""
        spares: list[Entry] = []
        for index in statistics:
            place = self._places[index]
            buffers = place.module._buffers
            tensor = buffers.get(place.name)
            if tensor is None:
                continue
            spares.append((buffers, place.name, self._spare_for(index, tensor)))
        return spares

    def _spare_for(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like a buffer, which is kept for the next time."""
        known = self._spare.get(index)
        if known is None or known[0] is not tensor or known[1].dtype != tensor.dtype or known[1].shape != tensor.shape:
            known = self._spare[index] = (tensor, tensor.detach().clone())
        return known[1]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two buffers hold the same; sparse ones cannot be compared, and count as unchanged."""
    return one.layout is not torch.strided or other.layout is not torch.strided or torch.equal(one, other)


def _write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first; those of one type at once, which takes a device one launch."""
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for into, values in pairs:
        targets, sources = groups.setdefault((into.dtype, into.device), ([], []))
        targets.append(into)
        sources.append(values)
    with torch.no_grad():
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)
