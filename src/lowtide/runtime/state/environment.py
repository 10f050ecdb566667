"""The environment of a stage: everything that it reads or writes besides its inputs.

A recomputed stage must see its environment as in the first run, whatever has changed it since, and must not change
it. What stands in a cell is told by identity. What a tensor holds is told by its version, and where no
version is counted (batch normalisation, observers of quantisation, `.data`) by what was seen when the stage first ran
with these switches and functions: then operations are watched, and values compared. From then on only the tensors that
change are copied first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lowtide.errors import ExecutionError
from lowtide.runtime.state.cells import Cells, Kept

Modules = Sequence[tuple[str, nn.Module]]
Reads = Callable[[], set[int]]
Earlier = tuple[torch.Tensor, torch.Tensor, bool]


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
        return None if known is None else next((change for change in known[1] if change[0] >= k), None)

    def tensors(self) -> list[torch.Tensor]:
        """Those that were changed."""
        return [tensor for tensor, _ in self._changes.values()]

    def clear(self) -> None:
        """Forget all."""
        self._changes.clear()


class Content(NamedTuple):
    """A tensor whose content may change."""

    tensor: torch.Tensor
    version: int
    name: str
    is_buffer: bool = True
    is_beside: bool = True
    """It is not the stage's own: what lies between units may read or change it, and is on the tape then."""


class Mark:
    """An environment before a stage's first run.

    Until the run has ended there are `copies` of tensors that may change; then `stamps` say how often each was changed.
    """

    __slots__ = ("contents", "copies", "kept", "observes", "stamps", "switches")

    def __init__(self, kept: Kept, contents: list[Content], switches: tuple[int, ...], *, observes: bool) -> None:
        self.kept = kept
        self.contents = contents
        self.switches = switches
        self.observes = observes
        self.copies: dict[int, torch.Tensor] = {}
        self.stamps: list[tuple[int, int]] = []


class Environment:
    """The environment of one stage.

    Args:
        modules: those of its units, with their paths.
        beside: modules outside of all units, whose buffers the code between units may read or change.
        counts: of all stages together, how often tensors were changed without a version that tells so.
        exchanges: whether other tensors may stand in for those that hold something else by now; compiled code may know
            the tensors themselves.
    """

    def __init__(
        self,
        modules: Modules,
        beside: Modules = (),
        counts: dict[str, int] | None = None,
        *,
        exchanges: bool = True,
    ) -> None:
        self._exchanges = exchanges
        self._cells = Cells(modules)
        self._beside = [(path, module._buffers) for path, module in beside]
        self._counts: dict[str, int] = {} if counts is None else counts
        self._changing: set[str] = set()
        self._observed: set[tuple[int, ...]] = set()  # the switches with which it was seen what changes
        self._last: dict[str, int] = {}  # by name, the tensor that was last seen there; 0: there were two

    # Before and after a first run

    def mark(self, *, observes: bool = False, others: Iterable[tuple[str, torch.Tensor]] = ()) -> Mark:
        """Note the environment before a first run; with `observes`, look in any case what the run changes.

        Args:
            observes: whether to do so.
            others: tensors of other stages that stages of this forward have read, with their names.
        """
        look = self._cells.look()
        kept, layout = Kept(look), look.layout
        contents = [
            Content(tensor, version_of(tensor), *layout.named(index), is_beside=False)
            for index, tensor in kept.contents()
        ]
        contents += self._contents_beside(others)
        switches = layout.switches_of(look.values)
        observes = observes or switches not in self._observed
        mark = Mark(kept, contents, switches, observes=observes)
        for index, content in enumerate(contents):
            if observes or content.name in self._changing or self._is_new(content):
                tensor = content.tensor
                mark.copies[index] = (tensor.detach() if tensor.requires_grad else tensor).clone()
        return mark

    def _contents_beside(self, others: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Content]:
        for path, table in self._beside:
            for name, tensor in table.items():
                if tensor is not None and tensor.grad_fn is None:
                    yield Content(tensor, version_of(tensor), f"{path}.{name}".strip("."))
        for name, tensor in others:
            yield Content(tensor, version_of(tensor), name)

    def _is_new(self, content: Content) -> bool:
        """Whether a tensor is new in its place: it may change although the former did not. Asked for two at most."""
        return self._last.get(content.name) not in (0, id(content.tensor))

    def include(self, mark: Mark, read: Iterable[tuple[str, torch.Tensor, int]]) -> list[tuple[str, torch.Tensor]]:
        """Take tensors that the stage has read, with names and their versions then, into a mark.

        Returns:
            Those that were not there.
        """
        known = {id(content.tensor) for content in mark.contents}
        new = [Content(tensor, version, name) for name, tensor, version in read if id(tensor) not in known]
        mark.contents += new
        return [(content.name, content.tensor) for content in new]

    def add_beside(self, path: str, module: nn.Module) -> None:
        """Also track the buffers of another module: this stage's code between units was seen to change one."""
        if all(table is not module._buffers for _, table in self._beside):
            self._beside.append((path, module._buffers))

    def changed(self, mark: Mark, written: Collection[int] = ()) -> list[int]:
        """Which tensors hold something else than at a mark; `written` are storages that were seen to be written to."""
        return [
            index
            for index, content in enumerate(mark.contents)
            if version_of(content.tensor) != content.version or self._changes_uncounted(mark, index, written)
        ]

    def _changes_uncounted(self, mark: Mark, index: int, written: Collection[int]) -> bool:
        tensor, copy = mark.contents[index].tensor, mark.copies.get(index)
        if mark.contents[index].name in self._changing:
            return True
        if copy is None or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage()._cdata in written or not _is_like(copy, tensor) or not torch.equal(copy, tensor)

    def end(
        self,
        mark: Mark,
        k: int,
        history: History,
        written: Collection[int] = (),
        ran: Collection[str] | None = None,
    ) -> set[int]:
        """Stage k has run for the first time: note what it changed.

        Args:
            mark: before it ran.
            k: the stage.
            history: of this forward.
            written: storages that were seen to be written to.
            ran: the paths of the units that were called; None: all.

        Returns:
            The addresses of the storages that it changed.
        """
        addresses = set()
        for index in self.changed(mark, written):
            content = mark.contents[index]
            history.add(content.tensor, k, mark.copies.get(index))
            self._changing.add(content.name)
            self._counts[content.name] = self._counts.get(content.name, 0) + 1
            if content.tensor.layout is torch.strided:
                addresses.add(content.tensor.untyped_storage()._cdata)
        mark.stamps = list(map(self._stamp, mark.contents))
        self._observed.add(mark.switches)
        for content in (mark.contents[index] for index in mark.copies):
            # Nothing is known of what a unit changes that the model left out.
            if ran is None or content.is_beside or any(content.name.startswith(f"{p}.".lstrip(".")) for p in ran):
                now = id(content.tensor)
                self._last[content.name] = now if self._last.get(content.name) in (None, now) else 0
        mark.copies.clear()
        return addresses

    def _stamp(self, content: Content) -> tuple[int, int]:
        return version_of(content.tensor), self._counts.get(content.name, 0)

    # Running it again

    def earlier(self, mark: Mark, k: int, history: History, read: Reads) -> list[Earlier]:
        """The tensors that stage k found with another content than they have now, that content, and whether another
        tensor can stand in for it.

        Args:
            mark: before its first run.
            k: the stage.
            history: of that forward.
            read: gives the addresses of the storages that the stage's tape reads.

        Raises:
            ExecutionError: for a tensor whose former content is not known: it changed in this step and in none before,
                or somebody else changed it since.
        """
        found = []
        for index, content in enumerate(mark.contents):
            tensor = content.tensor
            change = history.next_change(tensor, k)
            if change is None and self._stamp(content) == mark.stamps[index]:
                continue
            is_strided = tensor.layout is torch.strided
            is_own = not content.is_beside or (change is not None and change[0] == k)
            if not is_own and is_strided and tensor.untyped_storage()._cdata not in read():
                continue  # another stage's business
            if change is None or change[1] is None or not is_strided:
                raise _lost(content, by_forward=change is not None)
            found.append((tensor, change[1], not content.is_beside))
        return self._alone(mark, found, read) if found else found

    def _alone(self, mark: Mark, found: list[Earlier], read: Reads) -> list[Earlier]:
        """Which of the stage's own tensors can be exchanged: nothing else uses their memory."""
        shown = [t.untyped_storage()._cdata for t, *_ in mark.contents if t.layout is torch.strided]
        others = {*read(), *(each for each, count in Counter(shown).items() if count > 1)}
        cells = mark.kept.addresses() if self._exchanges else ()
        return [
            (t, then, own and id(t) in cells and t.untyped_storage()._cdata not in others) for t, then, own in found
        ]

    @contextmanager
    def rewound(self, mark: Mark, earlier: Sequence[Earlier] = ()) -> Iterator[None]:
        """Run the block with the environment of a mark, then restore the current one."""
        now = self._cells.look()
        hooks = ParameterHooks(now.parameters())
        try:
            mark.kept.apply(now)
            alone = {id(tensor): content for tensor, content, stands_alone in earlier if stands_alone}
            if alone:
                mark.kept.exchange(now, {key: content.clone() for key, content in alone.items()})
            if len(alone) < len(earlier):
                with _holding([(tensor, content) for tensor, content, stands_alone in earlier if not stands_alone]):
                    yield
            else:
                yield
        finally:
            now.restore()
            hooks.restore()

    def restore(self, mark: Mark) -> None:
        """Let the cells hold what they held at a mark."""
        mark.kept.apply(self._cells.look())


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

    __slots__ = ("_memory", "_tensor", "_value")

    def __init__(
        self, tensor: torch.Tensor, copied: Callable[[torch.Tensor], torch.Tensor] | None = torch.clone
    ) -> None:
        self._tensor = tensor
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        self._memory = tensor.data if is_plain else None
        self._value = None if copied is None else copied(_each_once(tensor.detach()))

    def restore(self) -> None:
        """Let the tensor hold it again."""
        tensor, memory = self._tensor, self._memory
        if memory is not None and (memory.data_ptr() != tensor.data_ptr() or memory.shape != tensor.shape):
            tensor.data = memory  # somebody gave it other memory, or another shape
        if self._value is not None:
            _each_once(tensor.data).copy_(self._value)


class ParameterHooks:
    """The hooks of parameters' own at one moment. autograd looks at the tables themselves.

    Args:
        parameters: the parameters.
    """

    __slots__ = ("_found",)

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._found = [
            (parameter, name, table, dict(table) if table else {})
            for parameter in parameters
            for name, table in (
                ("_backward_hooks", parameter._backward_hooks),
                ("_post_accumulate_grad_hooks", parameter._post_accumulate_grad_hooks),
            )
        ]

    def take_away(self) -> None:
        """Remove all of them."""
        for _, _, table, _ in self._found:
            if table:
                table.clear()

    def restore(self) -> None:
        """Restore exactly these hooks."""
        for parameter, name, table, hooks in self._found:
            if table is None:
                if getattr(parameter, name) is not None:
                    setattr(parameter, name, None)
            elif len(table) != len(hooks):
                table.clear()
                table.update(hooks)


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


def _lost(content: Content, *, by_forward: bool) -> ExecutionError:
    what = f"{'buffer' if content.is_buffer else 'the tensor that a module keeps as'} {content.name!r}"
    if by_forward:
        return ExecutionError(
            f"{what} was changed by this step's forward, but not by earlier ones, so a stage that reads it cannot be "
            "recomputed; repeat the step"
        )
    return ExecutionError(
        f"{what} was changed in place between the forward of a stage that reads it and its backward; change it after "
        "backward"
    )
