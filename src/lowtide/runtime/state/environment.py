"""The environment of a stage: everything that it reads or writes besides its inputs.

A recomputed stage must see its environment as in the first run, whatever has changed it since, and must not change
it. What stands in a cell is told by identity. What a tensor holds is told by its version, and where no
version is counted (batch normalisation, observers of quantisation, `.data`) by what was seen when the stage first ran
with these switches and functions: then operations are watched, and values compared. From then on only the tensors that
change are copied first, and a buffer that the code between units uses for the first time. What is large and outside of
all units is copied in the watched run, too, only when an operation writes to it. One that begins to change
later, by a switch that no cell holds, is known by a copy from before if it is small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import add, attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.hooks import RemovableHandle

from lowtide.errors import ExecutionError
from lowtide.runtime.state.cells import Cells, Label, Look
from lowtide.runtime.state.writes import Writes

Modules = Sequence[tuple[str, nn.Module]]
Reads = Callable[[], set[int]]

# Up to this size what no run has changed is copied all the same, once, in case that a later one does: statistics and
# counters are smaller, and a few hundred of them take less than a step's rounding. Some limit there must be. A copy of
# every buffer would double quantised weights, queues and tables, and each stage would keep its own of what lies outside
# of all units: twelve layers with a mask of 1 MiB each in five segments, 60 MiB instead of 2 kiB, and up to 6 % of a
# step. Nothing else has what they held: a fingerprint shows a change and does not undo it. Copies in host memory would
# count there. What is larger and begins to change late is an error that says so.
_SMALL_BYTES = 2**16


class History:
    """What tensors held before stages of one forward changed them."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: dict[int, tuple[torch.Tensor, list[tuple[int, torch.Tensor | None]]]] = {}

    def add(self, tensor: torch.Tensor, k: int, copy: torch.Tensor | None) -> None:
        """Stage k has changed a tensor; None: that was not expected."""
        self._changes.setdefault(id(tensor), (tensor, []))[1].append((k, copy))

    def next_change(self, tensor: torch.Tensor, k: int) -> tuple[int, torch.Tensor | None] | None:
        """The first stage from k on that changed it, and what it held until then; None: none did."""
        known = self._changes.get(id(tensor))
        if known is not None:
            for change in known[1]:
                if change[0] >= k:
                    return change
        return None

    def tensors(self) -> list[torch.Tensor]:
        """Those that were changed."""
        return [tensor for tensor, _ in self._changes.values()]

    def clear(self) -> None:
        """Forget all."""
        self._changes.clear()


class Together:
    """What the environments of one model's stages know together."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """By name, how often tensors were changed without a version that tells so."""
        self._users: dict[int, set[int]] = {}
        self._on_tapes: set[str] = set()
        self.num_uses = 0
        """How much is known of who uses what."""

    def note_use(self, tensor: torch.Tensor, environment: Environment) -> None:
        """A stage has a tensor among its own."""
        if tensor.layout is torch.strided:
            users = self._users.setdefault(tensor.untyped_storage()._cdata, set())
            self.num_uses += id(environment) not in users
            users.add(id(environment))

    def note_on_tape(self, name: str) -> None:
        """The code between units reads a tensor: the tape holds it itself, whatever stands in its cell."""
        self.num_uses += name not in self._on_tapes
        self._on_tapes.add(name)

    def is_alone(self, tensor: torch.Tensor, name: str) -> bool:
        """Whether only the modules of one stage use a tensor."""
        return name not in self._on_tapes and len(self._users.get(_storage_of(tensor) or 0, ())) == 1


class Known:
    """What earlier runs of a stage have shown of the tensors of one name."""

    __slots__ = ("changes", "is_used", "seen", "small", "spare")

    def __init__(self) -> None:
        self.changes = False
        """Whether a run has changed one."""
        self.seen: int | None = None
        """Which one runs have found; 0: there were several."""
        self.small: tuple[int, int, torch.Tensor] | None = None
        """Of a small one that no run has changed: which, its version, and its content."""
        self.is_used = False
        """Whether the code between units was seen to use it."""
        self.spare: tuple[torch.Tensor, torch.Tensor] | None = None
        """One whose content nothing depends on, and a stand-in for it."""

    def may_change(self, tensor: torch.Tensor) -> bool:
        """Whether the next run may change a tensor: one has, or none was seen to run with this one."""
        return self.changes or self.seen not in (0, id(tensor))


class Expected(NamedTuple):
    """What a stage does to the tensors in its cells, by their positions there, as far as earlier runs have shown."""

    key: tuple[Any, ...]
    """What it holds for: where cells are, switches, the tensors themselves, and who else uses them."""
    tracked: Sequence[int]
    """Those whose content is looked after."""
    labels: Sequence[Label]
    """What these are."""
    unread: Mapping[int, str]
    """The names of the others: the stage changes them, and nothing depends on what they hold."""


class Mark:
    """An environment before a stage's first run.

    There are the tensors whose content may change, with labels and versions. Until the run has ended there are `copies`
    of those that are expected to, and of those in `uncopied` that an operation is about to write to; then `stamps` say
    how often each was changed.
    """

    __slots__ = (
        "copies",
        "expected",
        "kept",
        "labels",
        "observes",
        "stamps",
        "tensors",
        "uncopied",
        "unread",
        "versions",
    )

    def __init__(self, kept: Look, own: Sequence[torch.Tensor], expected: Expected, *, observes: bool) -> None:
        self.kept = kept
        self.expected = expected
        self.tensors = [own[index] for index in expected.tracked]
        self.labels = expected.labels
        self.versions = versions_of(self.tensors)
        self.observes = observes
        self.copies: dict[int, torch.Tensor] = {}
        self.uncopied: set[int] = set()
        """Those that are copied when an operation writes to them, since all operations of the run are watched."""
        self.unread = [(own[index], name) for index, name in expected.unread.items()]
        """Those that the stage changes and that nothing depends on, with their names: they are not copied."""
        self.stamps: list[int] = []

    def add(self, tensor: torch.Tensor, name: str, version: int) -> None:
        """Also track a tensor that is not the stage's own."""
        self.tensors.append(tensor)
        self.labels = [*self.labels, Label(name)]
        self.versions.append(version)


class Earlier(NamedTuple):
    """What a stage found in tensors that hold something else by now."""

    others: Mapping[int, torch.Tensor]
    """By the address of each tensor that nothing outside of its cell uses, one to exchange it for."""
    contents: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Other tensors, and what they held."""


class Environment:
    """The environment of one stage.

    Args:
        modules: those of its units, with their paths.
        beside: modules outside of all units, whose buffers the code between units may read or change.
        together: what the environments of all stages know.
        exchanges: whether other tensors may stand in for those that hold something else by now; compiled code may know
            the tensors themselves.
    """

    def __init__(
        self,
        modules: Modules,
        beside: Modules = (),
        together: Together | None = None,
        *,
        exchanges: bool = True,
    ) -> None:
        self._exchanges = exchanges
        self._cells = Cells(modules)
        self._beside = [(path, module._buffers) for path, module in beside]
        self._together = Together() if together is None else together
        self._counts = self._together.counts
        self._known: defaultdict[str, Known] = defaultdict(Known)
        # The switches with which it was seen what changes, and what of it nothing depended on.
        self._observed: dict[tuple[int, ...], frozenset[str]] = {}
        self._expected: Expected | None = None  # None: something was learned since

    def look(self) -> Look:
        """What the cells hold now."""
        return self._cells.look()

    # Before and after a first run

    def mark(
        self,
        *,
        observes: bool = False,
        others: Iterable[tuple[str, torch.Tensor]] = (),
        can_be_watched: bool = False,
    ) -> Mark:
        """Note the environment before a first run; with `observes`, look in any case what the run changes.

        Args:
            observes: whether to do so.
            others: tensors of other stages that stages of this forward have read, with their names.
            can_be_watched: whether `write_ahead` is told of each operation's writes if the mark observes.
        """
        look = self._cells.look()
        kept = look.kept()
        own, labels = kept.contents()
        switches = look.layout.switches_of(look.values)
        key = (look.layout, switches, list(map(id, own)), self._together.num_uses)
        expected = None if observes else self._expected
        if expected is None or expected.key != key:
            observes = observes or switches not in self._observed
            unread = {} if observes else self._unread_among(own, labels, self._observed[switches])
            tracked = [index for index in range(len(own)) if index not in unread]
            expected = Expected(key, tracked, [labels[index] for index in tracked], unread)
            self._expected = None if observes else expected
        mark = Mark(kept, own, expected, observes=observes)
        for path, table in self._beside:
            for name, tensor in table.items():
                if tensor is not None and tensor.grad_fn is None:
                    mark.add(tensor, f"{path}.{name}".strip("."), version_of(tensor))
        for name, tensor in others:
            mark.add(tensor, name, version_of(tensor))
        for index, (tensor, label, version) in enumerate(zip(mark.tensors, mark.labels, mark.versions, strict=True)):
            known = self._known[label.name]
            is_written = known.small is not None and known.small[1] != version  # by somebody else
            if observes or is_written or known.may_change(tensor):
                is_watched = observes and can_be_watched and label.is_beside
                if is_watched and not known.changes and not _is_small(tensor):
                    mark.uncopied.add(index)  # every stage has all of them, and hardly any changes one
                else:
                    mark.copies[index] = _copy_of(tensor)
        return mark

    def write_ahead(self, mark: Mark, tensors: Iterable[torch.Tensor]) -> None:
        """An operation is about to write to some tensors: copy those of the mark that have their memory."""
        addresses = set(map(_storage_of, tensors))
        for index in [index for index in mark.uncopied if _storage_of(mark.tensors[index]) in addresses]:
            mark.uncopied.remove(index)
            mark.copies[index] = _copy_of(mark.tensors[index])

    def _unread_among(
        self, own: Sequence[torch.Tensor], labels: Sequence[Label], seen: Collection[str]
    ) -> dict[int, str]:
        """What the stage was seen to change without reading it, less what others use."""
        return {
            index: label.name
            for index, (tensor, label) in enumerate(zip(own, labels, strict=True))
            if label.name in seen and self._together.is_alone(tensor, label.name)
        }

    def use(self, mark: Mark, name: str, tensor: torch.Tensor) -> bool:
        """The stage's code between units is about to use a buffer; returns whether the mark did not have it yet.

        What it holds is copied where the stage may change it, or was not seen to use it: layers that the model left out
        so far may update their statistics.
        """
        self._together.note_on_tape(name)
        if any(tensor is other for other, _ in mark.unread):
            return False
        index = next((index for index, other in enumerate(mark.tensors) if other is tensor), None)
        is_new = index is None
        if index is None:
            index = len(mark.tensors)
            mark.add(tensor, name, version_of(tensor))
        known = self._known[name]
        is_looked_after = index in mark.copies or index in mark.uncopied
        if not is_looked_after and (not known.is_used or known.may_change(tensor)):
            mark.copies[index] = _copy_of(tensor)
        known.is_used = True
        return is_new

    def changed(self, mark: Mark, written: Collection[int] = ()) -> list[int]:
        """Which tensors hold something else than at a mark; `written` are storages that were seen to be written to."""
        now = versions_of(mark.tensors)
        return [
            index
            for index, label in enumerate(mark.labels)
            if self._known[label.name].changes
            or now[index] != mark.versions[index]
            or (index in mark.copies and _is_changed(mark.copies[index], mark.tensors[index], written))
        ]

    def end(
        self,
        mark: Mark,
        k: int,
        history: History,
        writes: Writes | None = None,
        ran: Collection[str] | None = None,
    ) -> list[torch.Tensor]:
        """Stage k has run for the first time: note what it changed.

        Args:
            mark: before it ran.
            k: the stage.
            history: of this forward.
            writes: what was seen of the run's operations; None: nothing.
            ran: the paths of the units that were called; None: all.

        Returns:
            The tensors that it changed.
        """
        if self._together.num_uses != mark.expected.key[-1]:
            for each in mark.unread:
                if not self._together.is_alone(*each):
                    mark.add(*each, _UNKNOWN)  # it is read after all, and was not copied
            mark.unread = [each for each in mark.unread if self._together.is_alone(*each)]
        changed = self.changed(mark, () if writes is None else writes.addresses)
        for index in changed:
            name = mark.labels[index].name
            known = self._known[name]
            history.add(mark.tensors[index], k, _copy_in(mark, index, known))
            known.changes, known.small = True, None
            self._counts[name] = self._counts.get(name, 0) + 1
        mark.stamps = self._stamps_of(mark)
        if mark.observes:
            self._learn(mark, changed, () if writes is None else writes.unread)
        for index in (*mark.copies, *mark.uncopied):
            label, now, copy = mark.labels[index], id(mark.tensors[index]), mark.copies.get(index)
            known = self._known[label.name]
            if copy is not None and _is_small(copy) and not known.changes:
                known.small = now, mark.versions[index], copy
            # Nothing is known of what a unit changes that the model left out.
            if ran is None or label.is_beside or any(label.name.startswith(f"{p}.".lstrip(".")) for p in ran):
                known.seen = now if known.seen in (None, now) else 0
        mark.copies.clear()
        return [*(mark.tensors[index] for index in changed), *(tensor for tensor, _ in mark.unread)]

    def _stamps_of(self, mark: Mark) -> list[int]:
        """How often each tensor was changed so far, whether or not its version tells so."""
        counts = (self._counts.get(label.name, 0) for label in mark.labels)
        return list(map(add, versions_of(mark.tensors), counts))

    def _learn(self, mark: Mark, changed: Collection[int], unread: Collection[int]) -> None:
        """Note what an observed run has shown: which tensors it uses, and on which of those nothing depends."""
        for tensor in mark.tensors:
            self._together.note_use(tensor, self)
        cells = mark.kept.addresses() if self._exchanges else ()
        found = frozenset(
            mark.labels[index].name
            for index in changed
            if _storage_of(mark.tensors[index]) in unread and id(mark.tensors[index]) in cells
        )
        switches = mark.expected.key[1]
        self._observed[switches] = self._observed.get(switches, found) & found
        self._expected = None

    # Running it again

    def earlier(self, mark: Mark, k: int, history: History, read: Reads) -> Earlier:
        """What stage k found in the tensors that hold something else by now.

        Args:
            mark: before its first run.
            k: the stage.
            history: of that forward.
            read: gives the addresses of the storages that the stage's tape reads.

        Raises:
            ExecutionError: for a tensor whose former content is not known: it changed in this step and in none before,
                or somebody else changed it since.
        """
        others = {id(tensor): self._spare_for(name, tensor) for tensor, name in mark.unread}
        found: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        stamps = self._stamps_of(mark)
        for tensor, label, then, now in zip(mark.tensors, mark.labels, mark.stamps, stamps, strict=True):
            change = history.next_change(tensor, k)
            if change is None and now == then:
                continue
            is_strided = tensor.layout is torch.strided
            is_own = not label.is_beside or (change is not None and change[0] == k)
            if not is_own and is_strided and tensor.untyped_storage()._cdata not in read():
                continue  # another stage's business
            if change is None or change[1] is None or not is_strided:
                raise _lost(label, by_forward=change is not None)
            found.append((tensor, change[1], not label.is_beside))
        return self._divided(mark, found, others, read) if found else Earlier(others, ())

    def unchanging(self, mark: Mark) -> list[tuple[str, torch.Tensor]]:
        """The small tensors of the stage's own that no run has changed, with their names."""
        own = ((label.name, t) for label, t in zip(mark.labels, mark.tensors, strict=True) if not label.is_beside)
        return [(name, tensor) for name, tensor in own if self._known[name].small is not None]

    def _spare_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor for the stage to bring up to date instead of one whose content nothing depends on."""
        known = self._known[name]
        if known.spare is None or known.spare[0] is not tensor:
            known.spare = tensor, tensor.detach().clone()
        return known.spare[1]

    def _divided(
        self,
        mark: Mark,
        found: Sequence[tuple[torch.Tensor, torch.Tensor, bool]],
        others: dict[int, torch.Tensor],
        read: Reads,
    ) -> Earlier:
        """Divide what was found: tensors are exchanged where nothing else uses their memory."""
        cells = mark.kept.addresses() if self._exchanges else ()
        elsewhere, shown = read(), [_storage_of(tensor) for tensor in mark.tensors]
        contents = []
        for tensor, then, is_own in found:
            address = _storage_of(tensor)
            if is_own and id(tensor) in cells and address not in elsewhere and shown.count(address) == 1:
                others[id(tensor)] = then.clone()
            else:
                contents.append((tensor, then))
        return Earlier(others, contents)

    @contextmanager
    def rewound(self, mark: Mark, earlier: Earlier | None = None) -> Iterator[None]:
        """Run the block with the environment of a mark, then restore the current one."""
        now = self._cells.look(mark.kept)
        first_hook = RemovableHandle.next_id
        try:
            mark.kept.restore(now)
            if earlier is not None and earlier.others:
                mark.kept.exchange(now, earlier.others)
            if earlier is not None and earlier.contents:
                with _holding(earlier.contents):
                    yield
            else:
                yield
        finally:
            now.restore()
            if RemovableHandle.next_id != first_hook:
                remove_hooks(mark.kept.parameters(), first_hook)

    def restore(self, mark: Mark) -> None:
        """Let the cells hold what they held at a mark."""
        mark.kept.restore(self._cells.look(mark.kept))


@contextmanager
def _holding(earlier: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Run the block with these contents in tensors, and put back what they hold now."""
    tensors = [tensor for tensor, _ in earlier]
    now = [Backup(tensor) for tensor in tensors]
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with _unsafe_preserve_version_counter(counted):  # whoever saved one finds it as it was
        write(earlier)
        try:
            yield
        finally:
            for each in now:
                each.restore()


class Backup:
    """A tensor's content at one moment, with the memory in which it was.

    Args:
        tensor: the tensor.
        copied: makes the copy.
    """

    __slots__ = ("_dtype", "_storage", "_tensor", "_value", "_view")

    def __init__(
        self, tensor: torch.Tensor, copied: Callable[[torch.Tensor], torch.Tensor] | None = torch.clone
    ) -> None:
        self._tensor = tensor
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        # no second tensor: whether somebody else uses the memory can still be asked
        self._storage = tensor.untyped_storage() if is_plain else None
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride()) if is_plain else None
        self._dtype = tensor.dtype
        self._value = None if copied is None else copied(_each_once(tensor.detach()))

    def restore(self) -> None:
        """Let the tensor hold it again."""
        tensor, storage = self._tensor, self._storage
        if storage is not None and self._view is not None:
            is_same = tensor.untyped_storage()._cdata == storage._cdata
            if not is_same or self._view != (tensor.storage_offset(), tensor.shape, tensor.stride()):
                # somebody gave it other memory, or another shape
                tensor.data = torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._view)
        if self._value is not None:
            _each_once(tensor.data).copy_(self._value)


def hook_tables(parameters: Iterable[nn.Parameter]) -> list[dict[int, Any]]:
    """The tables of parameters' own hooks that hold some; autograd looks at the tables themselves."""
    return [table for table in chain.from_iterable(map(_hook_tables, parameters)) if table]


def remove_hooks(parameters: Iterable[nn.Parameter], first: int) -> None:
    """Remove the hooks of parameters' own, from a number on."""
    for table in hook_tables(parameters):
        for number in [number for number in table if number >= first]:
            del table[number]


_hook_tables = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first; those of one type at once, which takes a device one launch."""
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad():
        for into, value in pairs:
            if not _is_like(value, into):
                into.data = value.clone()  # it was given another shape since
                continue
            targets, sources = groups.setdefault((into.dtype, into.device), ([], []))
            targets.append(into.data)  # no version is counted: nobody else is to notice
            sources.append(value)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written to in place, as autograd counts it."""
    try:
        return tensor._version
    except RuntimeError:  # inference tensors are not counted; asking them first would cost as much again
        return 0


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The same of many tensors."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


_version = attrgetter("_version")


_UNKNOWN = -1  # no version is: whatever was changed so counts as changed


def _copy_in(mark: Mark, index: int, known: Known) -> torch.Tensor | None:
    """What a tensor held at a mark, where that is known."""
    copy = mark.copies.get(index)
    if copy is None and known.small is not None and known.small[:2] == (id(mark.tensors[index]), mark.versions[index]):
        return known.small[2]
    return copy


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.detach() if tensor.requires_grad else tensor).clone()


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL_BYTES  # a sparse one has no bytes of its own


def _storage_of(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def is_buffer_of(model: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a tensor is (a view of) a buffer of a model; slow, seldom asked."""
    if tensor.layout is not torch.strided:
        return False
    address = tensor.untyped_storage()._cdata
    strided = (buffer for buffer in model.buffers() if buffer.layout is torch.strided)
    return any(buffer.untyped_storage()._cdata == address for buffer in strided)


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the repetitions of `expand`, which cannot be written to."""
    for dim, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _is_changed(copy: torch.Tensor, tensor: torch.Tensor, written: Collection[int]) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage()._cdata in written or not _is_like(copy, tensor) or not torch.equal(copy, tensor)


def _lost(label: Label, *, by_forward: bool) -> ExecutionError:
    what = f"{'buffer' if label.is_buffer else 'the tensor that a module keeps as'} {label.name!r}"
    if by_forward:
        return ExecutionError(
            f"{what} was changed by this step's forward, but not by earlier ones, so a stage that reads it cannot be "
            "recomputed, and the gradients of this step are lost; load the state from before it (your last checkpoint) "
            "and repeat it: from now on the change is known"
        )
    return ExecutionError(
        f"{what} was changed in place between the forward of a stage that reads it and its backward; change it after "
        "backward"
    )
