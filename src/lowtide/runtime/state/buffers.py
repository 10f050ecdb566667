"""Buffers that a forward changes (statistics, counters, power iterations): changed once a step, as in plain training.

A stage that runs again must find the buffers that it reads as the first run found them, and leave them as they are by
then, whoever has changed them since: the stage itself, or a later one (a queue of keys that is read in one stage and
filled at the end of the model's own forward). Which buffers a stage changes is seen in its first forward; from then on
only those are copied beforehand. Until a buffer changes it holds what earlier stages found, so the copy of the stage
that changes it serves them, too: a *stamp*, which is another after each change, tells which copy is whose.

The statistics of BatchNorm are not even copied: in training its output does not depend on them, so the repeated run is
given others, unless the code of a module around it names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lowtide.errors import ExecutionError
from lowtide.runtime.state.attributes import Noted, StageAttributes
from lowtide.runtime.state.exchange import ABSENT, Entry, exchanged
from lowtide.runtime.state.lists import Found, StageLists
from lowtide.runtime.state.mentions import mentions

_BATCH_NORMS = {nn.BatchNorm1d.forward, nn.BatchNorm2d.forward, nn.BatchNorm3d.forward, nn.SyncBatchNorm.forward}
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})

Key = tuple[int, str]  # a module's address and a name among its buffers
Stamp = tuple[int, int]  # how often a buffer was changed: as torch counts, and beside that
Copies = dict[tuple[Key, Stamp], torch.Tensor | None]
"""What buffers held before a stage of one forward changed them; None: nobody knew that it would."""


class Place(NamedTuple):
    """Where a buffer is registered."""

    module: nn.Module
    name: str
    path: str
    only_in_glue: bool = False
    """No unit of the stage reads it; what lies between units may, and is on the tape then."""

    @property
    def key(self) -> Key:
        """The same for all stages."""
        return id(self.module), self.name

    @property
    def tensor(self) -> torch.Tensor | None:
        """What stands there now."""
        return self.module._buffers.get(self.name)

    def entry(self, tensor: torch.Tensor | None) -> Entry:
        """What is to stand there."""
        return self.module._buffers, self.name, tensor

    @property
    def may_be_statistic(self) -> bool:
        """Whether the module's output in training does not depend on this buffer."""
        return self.name in _STATISTICS and type(self.module).forward in _BATCH_NORMS


class Snapshot:
    """The buffers of a stage, and the plain attributes and the lists of its modules, before its first run.

    `statistics` are the places of BatchNorm modules in training; about the other places there are `stamps`, by place,
    the `tensors` that stood there, and, until the run has ended, `copies`. At the places in `empty` was None.
    """

    __slots__ = ("attributes", "changed", "copies", "empty", "lists", "stamps", "statistics", "tensors")

    def __init__(self) -> None:
        self.statistics: list[int] = []
        self.stamps: dict[int, Stamp] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.copies: dict[int, torch.Tensor] = {}
        self.empty: list[int] = []
        self.changed: list[int] = []
        self.attributes: Noted | None = None
        self.lists: Sequence[Found | None] = ()

    def is_replaced(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether another tensor stands in a place by now."""
        return self.tensors.get(index, tensor) is not tensor

    def replaced(self, index: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor that stood in a place where another one stands by now; None: it has changed, or is the same."""
        former = self.tensors.get(index)
        is_former = former is not None and former is not tensor and former._version == self.stamps[index][0]
        return former if is_former else None


class StageBuffers:
    """The buffers that one stage may read or change.

    Args:
        modules: those of the stage's units, by path; none where the stage never runs again.
        outside: those that lie outside all units.
        shared: buffers of other modules that this stage's glue may read or change, or others may read.
        counts: of all stages together, how often buffers were changed without a version that tells so.
        swap: whether BatchNorm's statistics may be exchanged for the time of a repeated run (not in compiled modules,
            which may have looked at them when they were compiled).
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        outside: Sequence[tuple[str, nn.Module]],
        shared: Iterable[Place],
        counts: dict[Key, int],
        *,
        swap: bool,
    ) -> None:
        self._swap = swap
        self._counts = counts
        self._known: set[int] | None = None  # the ones that change, besides statistics; None: not seen yet
        self._spare: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the buffer, and what stands in for it
        found = {place.key: place for place in (*places_in(modules), *places_in(outside), *shared)}
        own = {id(module) for _, module in modules}
        self._tables = [(module._buffers, frozenset(module._buffers)) for _, module in (*modules, *outside)]
        self._places = [
            place._replace(only_in_glue=key[0] not in own and not _is_named(place.name, modules))
            for key, place in found.items()
        ]
        self._keys = list(found)
        for key in self._keys:
            counts.setdefault(key, 0)
        self._attributes = StageAttributes(
            (module for _, module in modules), (module for _, module in outside if modules)
        )
        self._lists = StageLists(module for _, module in (*modules, *outside) if modules)
        # Most buffers are statistics: a module is asked once whether it is in training, not once for each of them.
        self._norms: dict[nn.Module, list[int]] = {}
        self._others: list[int] = []
        around = (*modules, *outside)
        are_read = any(mentions(module, _STATISTICS) for _, module in around)  # by whoever is around the BatchNorm
        for index, place in enumerate(self._places):
            is_statistic = place.may_be_statistic and not are_read
            indices = self._norms.setdefault(place.module, []) if is_statistic else self._others
            indices.append(index)

    def before(self) -> Snapshot | None:
        """Note the buffers before a first run; None where there are none."""
        attributes, lists = self._attributes.before(), self._lists.before()
        if not self._places and not attributes.values and not lists:
            return None
        snapshot = Snapshot()
        snapshot.attributes, snapshot.lists = attributes, lists
        noted = self._others
        for module, indices in self._norms.items():
            if module.training:
                snapshot.statistics += indices
            else:
                noted = [*noted, *indices]
        for index in noted:
            tensor = self._places[index].tensor
            if tensor is None:
                snapshot.empty.append(index)
            else:
                snapshot.stamps[index] = (tensor._version, self._counts[self._keys[index]])
                if tensor.grad_fn is None:  # a graph would keep the step alive
                    snapshot.tensors[index] = tensor
                if self._known is None or index in self._known:
                    snapshot.copies[index] = tensor.detach().clone()
        return snapshot

    def after(self, snapshot: Snapshot | None, copies: Copies) -> None:
        """Look what the first run changed: the snapshot and the copies are then what a repeated run needs."""
        if snapshot is None:
            return
        for index, stamp in snapshot.stamps.items():
            copy, tensor = snapshot.copies.get(index), self._places[index].tensor
            if tensor is not None and (
                snapshot.is_replaced(index, tensor) or self._has_changed(index, tensor, stamp, copy)
            ):
                former = snapshot.replaced(index, tensor)
                copy = copy if former is None else former  # which is there in any case: one of the two is enough
                snapshot.changed.append(index)
                # Always counted: the version of a tensor that was put in its place may be the one before.
                self._counts[self._keys[index]] += 1
                copies[self._keys[index], stamp] = copy
        snapshot.copies.clear()
        if snapshot.attributes is not None:
            self._attributes.after(snapshot.attributes, copies)
        self._known = {*(self._known or ()), *snapshot.changed}

    def _has_changed(self, index: int, tensor: torch.Tensor, stamp: Stamp, copy: torch.Tensor | None) -> bool:
        if tensor._version != stamp[0] or (self._known is not None and index in self._known):
            return True
        # Batch normalisation writes its statistics without counting a version: the first time, values are compared.
        return self._known is None and copy is not None and not _equal(copy, tensor)

    def written(self, snapshot: Snapshot | None) -> set[int]:
        """The addresses of the storages that a first run changed; BatchNorm's statistics in training included."""
        return set() if snapshot is None else self._addresses((*snapshot.statistics, *snapshot.changed))

    def _addresses(self, indices: Iterable[int]) -> set[int]:
        tensors = (self._places[index].tensor for index in indices)
        return {t.untyped_storage()._cdata for t in tensors if t is not None and t.layout is torch.strided}

    def earlier(
        self, snapshot: Snapshot | None, copies: Copies, read: Callable[[], set[int]]
    ) -> Mapping[int, torch.Tensor]:
        """What buffers, by place, held when the stage first ran, where that is something else by now.

        Args:
            snapshot: of the stage's first run.
            copies: of that forward.
            read: gives the addresses of the storages that the stage's tape reads.

        Raises:
            ExecutionError: for a buffer whose old value is not known: it changed in this step and in none before, or
                somebody else changed it since.
        """
        found: dict[int, torch.Tensor] = {}
        if snapshot is None:
            return found
        for index, stamp in snapshot.stamps.items():
            place, key = self._places[index], self._keys[index]
            tensor = place.tensor
            if tensor is None:
                continue
            if (tensor._version, self._counts[key]) == stamp and not snapshot.is_replaced(index, tensor):
                continue
            is_own = index in snapshot.changed
            is_strided = tensor.layout is torch.strided
            if place.only_in_glue and not is_own and is_strided and tensor.untyped_storage()._cdata not in read():
                continue  # another stage's business
            copy = copies.get((key, stamp))
            if copy is None:
                copy = snapshot.replaced(index, tensor)
            if copy is None or not is_strided:
                raise _lost(place, by_forward=(key, stamp) in copies)
            found[index] = copy
        return found

    def rewritten(self, earlier: Mapping[int, torch.Tensor]) -> set[int]:
        """The addresses of the storages that hold other values after a repeated run than during it."""
        return self._addresses(earlier)

    def protected(
        self,
        snapshot: Snapshot | None,
        earlier: Mapping[int, torch.Tensor],
        copies: Copies,
        read: Callable[[], set[int]],
    ) -> AbstractContextManager[None]:
        """Run the block with the buffers, the attributes and the lists as they were, and leave them as they are.

        Args:
            snapshot: of the stage's first run.
            earlier: see `earlier`.
            copies: of that forward.
            read: gives the addresses of the storages that the stage's tape reads.

        Raises:
            ExecutionError: where a BatchNorm was switched between train() and eval() since, or a tensor that is an
                attribute was changed and its old value is not known.
        """
        if snapshot is None or snapshot.attributes is None:
            return nullcontext()
        entries = [*self._attributes.changed_since(snapshot.attributes, copies, read), *self._registered_since()]
        if not self._places and not entries and not snapshot.lists:
            return nullcontext()
        entries += [self._places[index].entry(None) for index in snapshot.empty]
        return self._protected(snapshot, entries, earlier)

    @contextmanager
    def _protected(
        self, snapshot: Snapshot, entries: list[Entry], earlier: Mapping[int, torch.Tensor]
    ) -> Iterator[None]:
        self._check_modes(snapshot.statistics)
        statistics, written = snapshot.statistics, [*earlier]
        if not self._swap:
            statistics, written = [], [*written, *statistics]
        with (
            exchanged(self._spares(statistics)),
            exchanged(entries),
            self._lists.protected(snapshot.lists) if snapshot.lists else nullcontext(),
            self._put_back(written, earlier) if written else nullcontext(),
        ):
            yield

    @contextmanager
    def _put_back(self, written: Sequence[int], earlier: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Run the block with buffers as they were, where that matters, and put back what they hold now."""
        tensors = {index: tensor for index in written if (tensor := self._places[index].tensor) is not None}
        # One that has grown is exchanged as a whole: a copy of the copy, in case the stage runs a third time.
        others = {index: earlier[index].clone() for index, t in tensors.items() if not _is_like(earlier.get(index), t)}
        kept = {index: tensor for index, tensor in tensors.items() if index not in others}
        now = {
            index: tensor.detach().clone() if index in earlier else self._spare_for(index, tensor)  # small: statistics
            for index, tensor in kept.items()
        }
        _write((now[index], tensor) for index, tensor in kept.items() if index not in earlier)
        # The block may put another tensor in a buffer's place: what stands there now is put back in any case.
        with (
            exchanged([self._places[index].entry(others.get(index, tensor)) for index, tensor in tensors.items()]),
            _unsafe_preserve_version_counter(tuple(kept.values())),  # whoever saved one finds it as it was
        ):
            _write((tensor, earlier[index]) for index, tensor in kept.items() if index in earlier)
            try:
                yield
            finally:
                _write((tensor, now[index]) for index, tensor in kept.items())

    def _registered_since(self) -> list[Entry]:
        """What takes away the buffers that were registered since this was made: the first run may have done so."""
        new = [(table, names) for table, names in self._tables if len(table) != len(names)]
        return [(table, name, ABSENT) for table, names in new for name in table if name not in names]

    def _check_modes(self, statistics: Iterable[int]) -> None:
        for index in statistics:
            if not self._places[index].module.training:
                raise ExecutionError(
                    f"the module of buffer {self._places[index].path!r} was switched between train() and eval() "
                    "between forward and backward; switch after the backward pass"
                )

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


def places_in(modules: Iterable[tuple[str, nn.Module]]) -> list[Place]:
    """The buffers of modules given with their paths; one that is None may be filled later, but for statistics."""
    places = [
        Place(module, name, f"{path}.{name}" if path else name) for path, module in modules for name in module._buffers
    ]
    return [place for place in places if place.tensor is not None or not place.may_be_statistic]


def is_buffer_of(model: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a tensor is (a view of) a buffer of a model; slow, seldom asked."""
    if tensor.layout is not torch.strided:
        return False
    address = tensor.untyped_storage()._cdata
    strided = (buffer for buffer in model.buffers() if buffer.layout is torch.strided)
    return any(buffer.untyped_storage()._cdata == address for buffer in strided)


def _is_named(name: str, modules: Iterable[tuple[str, nn.Module]]) -> bool:
    return any(mentions(module, frozenset({name})) for _, module in modules)


def _lost(place: Place, *, by_forward: bool) -> ExecutionError:
    if by_forward:
        return ExecutionError(
            f"buffer {place.path!r} was changed by this step's forward and by none before, so a stage that reads it "
            "cannot be run again; run the step once more"
        )
    return ExecutionError(
        f"buffer {place.path!r} was changed in place between the forward of a stage that reads it and its backward; "
        "change it after the backward pass"
    )


def _is_like(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether what one tensor held can be written into another; None: nothing is to be written."""
    return one is None or (one.shape == other.shape and one.dtype == other.dtype and one.device == other.device)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two buffers hold the same; sparse ones cannot be compared, and count as unchanged."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return True
    return torch.equal(one, other)


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
