"""What modules keep as attributes: counters of calls, flags, factors, and tensors that are not registered as buffers.

A stage that runs again must find them as the first run found them, whether its own code has changed them since or
somebody else has (an adapter's scale between two forwards), and leave them as they are by then: a counter that counted
repeated runs, too, would reach the end of a warm-up too early, and an average would take in a batch twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from operator import is_
from typing import Any

import numpy
import torch
from torch import nn

from lowtide.errors import ExecutionError
from lowtide.runtime.state.exchange import ABSENT, Entry, dict_at

_PLAIN = frozenset({type(None), bool, int, float, complex, str})

# What every module has: modes, whose switch is refused elsewhere, hooks, parameters, buffers and modules.
_NOT_OURS = frozenset(vars(nn.Module()))

# In how many forwards a stage looks for attributes in any case: the first one may make some.
_NUM_LOOKS = 2

# Tensors with more bytes are copied only once they are known to change in place.
_MOST_COPIED_BYTES = 2**24

# Dicts with more entries are not looked into: vocabularies, not settings.
_MOST_ENTRIES = 100


class _Other:
    """Stands for a value that is not kept: some object, or a tuple of tensors with their graphs."""


class _Detached:
    """What a tensor held that stood somewhere with its graph, which would keep a step alive; and which one it was."""

    __slots__ = ("_former", "data")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._former = weakref.ref(tensor)
        self.data = tensor.detach()

    def is_of(self, value: Any) -> bool:
        """Whether that tensor is the value."""
        return value is not None and value is self._former()


Table = tuple[dict[str, Any], str | None]
"""A module's attributes, or the dict of that name among them.

The dict itself is not kept: one that a forward makes anew, with tensors and their graphs, would never be let go.
"""

Place = tuple[int, str]
"""The number of a table, and a name in it."""

Copies = dict[tuple[tuple[int, str], tuple[int, int]], torch.Tensor | None]
"""What tensors held before a stage of one forward changed them in place; None: nobody knew that it would."""

Reads = Callable[[], set[int]]


class Noted:
    """The attributes of a stage before its first run: `values`, and `versions` of the tensors among them, by place.

    Until the run has ended there are also `copies` of tensors that may change in place.
    """

    __slots__ = ("copies", "values", "versions")

    def __init__(self, values: list[Any]) -> None:
        self.values = [_Detached(value) if _has_graph(value) else value for value in values]
        self.versions = {
            index: _version(value)
            for index, value in enumerate(self.values)
            if type(value) not in _PLAIN and not isinstance(value, _Detached)
        }
        self.copies: dict[int, torch.Tensor] = {}

    def key(self, index: int) -> tuple[tuple[int, str], tuple[int, int]]:
        """Under which a copy of what stood in a place is known to other stages of the same forward."""
        return (id(self.values[index]), "attribute"), (self.versions[index], 0)

    def has_changed(self, index: int) -> bool:
        """Whether what stood in a place was changed in place since."""
        return index in self.versions and _version(self.values[index]) != self.versions[index]


class StageAttributes:
    """The attributes of one stage's modules, and what stands in dicts among them.

    Args:
        modules: those of the stage's units.
        outside: those that lie outside all units; their code does not run again, what it did is on the tape.
    """

    __slots__ = (
        "_changing",
        "_known",
        "_modules",
        "_num_inside",
        "_num_looks",
        "_num_seen",
        "_numbers",
        "_places",
        "_size",
        "_tables",
    )

    def __init__(self, modules: Iterable[nn.Module], outside: Iterable[nn.Module] = ()) -> None:
        inside = list(modules)
        self._modules = [*inside, *outside]
        self._num_inside = len(inside)
        self._num_looks = 0
        self._size = 0
        self._tables: list[Table] = []
        self._numbers: dict[tuple[int, str | None], int] = {}  # of the tables
        self._places: list[Place] = []
        self._known: dict[Place, bool] = {}  # whether it is a unit's, in the order of the places
        self._num_seen: list[int] = []  # in how many forwards
        self._changing: set[int] = set()  # the places of tensors that were changed in place

    def before(self) -> Noted:
        """The values before a first run."""
        self._look()
        self._num_looks += 1
        noted = Noted(self._now(self._dicts()))
        for index in noted.versions:
            value = noted.values[index]
            if isinstance(value, torch.Tensor) and self._may_change(index, value):
                self._num_seen[index] += 1
                noted.copies[index] = value.detach().clone()
        return noted

    def _may_change(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be changed in place: the first forward may make one that the second changes."""
        if index in self._changing:
            return True
        is_new = self._num_seen[index] < _NUM_LOOKS
        return is_new and not isinstance(tensor, nn.Parameter) and tensor.nbytes <= _MOST_COPIED_BYTES

    def after(self, noted: Noted, copies: Copies) -> None:
        """Look what the first run changed in place."""
        for index in noted.versions:
            if noted.has_changed(index):
                self._changing.add(index)
                copies[noted.key(index)] = noted.copies.get(index)
        noted.copies.clear()

    def _look(self) -> None:
        """Look for attributes: in the first two forwards, since the first may make some, and where there are more."""
        size = sum(len(vars(module)) for module in self._modules)
        if self._num_looks >= _NUM_LOOKS and size == self._size:
            return
        self._size = size
        seen: set[int] = set()  # modules may have a dict in common: settings of the whole network
        for number, module in enumerate(self._modules):
            for within, names in _names_in(module, seen):
                table = self._numbers.setdefault((id(vars(module)), within), len(self._tables))
                if table == len(self._tables):
                    self._tables.append((vars(module), within))
                for place in ((table, name) for name in names):
                    if place not in self._known:
                        self._known[place] = number < self._num_inside
                        self._places.append(place)
                        self._num_seen.append(0)

    def _dicts(self) -> list[dict[str, Any]]:
        """What stands for each table now."""
        return [table if within is None else dict_at(table, (within,)) for table, within in self._tables]

    def _now(self, dicts: list[dict[str, Any]]) -> list[Any]:
        values = [dicts[table].get(name, ABSENT) for table, name in self._places]
        return [value if type(value) in _PLAIN or _is_kept(value) or _has_graph(value) else _Other for value in values]

    def changed_since(self, noted: Noted, copies: Copies | None = None, read: Reads = set) -> list[Entry]:
        """What is to stand in the places of those that are others than they were.

        A tensor with its graph that stands where nothing was kept stays, and is there again afterwards: it is what the
        stage itself has made.

        Args:
            noted: before the stage's first run.
            copies: of that forward; None: changes in place are not looked for.
            read: gives the addresses of the storages that the stage's tape reads.

        Raises:
            ExecutionError: for a tensor whose old value is not known.
        """
        self._look()
        dicts = self._dicts()
        now = self._now(dicts)
        then = [*noted.values, *(ABSENT for _ in range(len(now) - len(noted.values)))]
        changed = {} if copies is None else self._former(noted, copies, read)
        if not changed and all(map(is_, now, then)):
            others = [place for place, value in zip(self._places, now, strict=True) if value is _Other]
            return [(dicts[number], name, dicts[number][name]) for number, name in others]
        entries: list[Entry] = []
        for index, ((number, name), before, value) in enumerate(zip(self._places, then, now, strict=True)):
            table = dicts[number]
            if index in changed:
                entries.append((table, name, changed[index]))
            elif isinstance(before, _Detached):
                entries.append((table, name, value if before.is_of(value) else before.data))
            elif (value is _Other or _has_graph(value)) and (before is _Other or before is ABSENT):
                entries.append((table, name, table[name]))
            elif before is not _Other and value is not before:
                entries.append((table, name, before))
        return entries

    def _former(self, noted: Noted, copies: Copies, read: Reads) -> dict[int, torch.Tensor]:
        """By place, tensors with what those held that were changed in place since; the stage may change them again."""
        found: dict[int, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}  # one tensor may stand in several places
        is_inside = list(self._known.values())
        for index in filter(noted.has_changed, noted.versions):
            tensor, key = noted.values[index], noted.key(index)
            copy = copies.get(key)
            if not is_inside[index]:
                if not isinstance(tensor, torch.Tensor) or not _is_read(tensor, read):
                    continue
                copy = None  # the tape holds the tensor itself
            if copy is None:
                raise _lost(self._places[index][1], by_forward=key in copies)
            found[index] = made.setdefault(id(tensor), copy.clone())
        return found


def _lost(name: str, *, by_forward: bool) -> ExecutionError:
    if by_forward:
        return ExecutionError(
            f"the tensor that a module keeps as {name!r} was changed in place by this step's forward, so a stage that "
            "reads it cannot be run again; run the step once more, or register the tensor as a buffer"
        )
    return ExecutionError(
        f"the tensor that a module keeps as {name!r} was changed in place between the forward of a stage that reads it "
        "and its backward; change it after the backward pass, or put another in its place"
    )


def _is_read(tensor: torch.Tensor, read: Reads) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in read()


def _version(value: Any) -> int:
    """How often a tensor, or those in a tuple, were changed in place; parameters are looked after elsewhere."""
    if isinstance(value, torch.Tensor):
        return 0 if isinstance(value, nn.Parameter) or value.is_inference() else value._version
    return sum(map(_version, value)) if isinstance(value, tuple) else 0


def _names_in(module: nn.Module, seen: set[int]) -> Iterator[tuple[str | None, list[str]]]:
    """What may have to be put back: names among a module's attributes, and in the dicts among these not seen yet."""
    is_torchs = type(module).__module__.startswith("torch.")  # its layers do not change their tuples
    own = {name: value for name, value in vars(module).items() if name not in _NOT_OURS}
    dicts = {name: value for name, value in own.items() if isinstance(value, dict)}
    yield None, [name for name, value in own.items() if name in dicts or _is_looked_after(value, is_torchs)]
    for within, each in dicts.items():
        if len(each) <= _MOST_ENTRIES and id(each) not in seen:
            if not is_torchs:
                seen.add(id(each))
            yield within, [name for name, value in each.items() if _is_looked_after(value, is_torchs)]


def _is_looked_after(value: Any, is_torchs: bool) -> bool:
    return type(value) in _PLAIN or isinstance(value, torch.Tensor) or (not is_torchs and _is_kept(value))


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _is_kept(value: Any) -> bool:
    """Whether a value can be put back later: one that does not change by itself, and a tensor without its graph."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None
    if isinstance(value, tuple):
        return all(type(each) in _PLAIN or _is_kept(each) for each in value)
    return type(value) in _PLAIN or value is ABSENT or isinstance(value, Enum | numpy.generic)
