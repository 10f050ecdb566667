"""Cells of state: what modules keep, and what the containers and objects that they keep hold.

A cell is a place with a value in it: a name among a module's attributes, parameters, buffers, hooks or submodules, a
key of a dict, an attribute of an object, the entries of a list. Where cells are is found by walking from the modules'
own tables, and holds as long as names and types stay the same, which is checked at each look without walking.
"""

from __future__ import annotations

import sys
import weakref
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import chain, compress, count
from operator import is_, is_not, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

Table = dict[Any, Any]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_REGISTRIES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_SEQUENCES = (list, deque, set)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_SWITCHES = frozenset({type(None), bool})

# Objects of these make themselves known otherwise, or are not the model's.
_NOT_THE_USERS = frozenset({*sys.stdlib_module_names, "lowtide", "numpy", "torch"}) - {"__main__"}

# The call site of a module is looked after by whoever intercepts its calls.
_CALL_SITE = "_compiled_call_impl"

# Containers with more entries are vocabularies and records of a whole run. Of lists among them the length is looked
# after, so that they grow once a step; copying the others at each stage would be felt.
_MOST_ENTRIES = 1000


class Absent:
    """Stands for the value of a name that is not there."""


class _Detached:
    """A tensor that was kept with its graph, which would keep a step alive: its data, and which one it was."""

    __slots__ = ("_data", "_former")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._former = weakref.ref(tensor)
        self._data = tensor.detach().requires_grad_(tensor.requires_grad)

    def value(self) -> torch.Tensor:
        """The tensor itself while it lives, else its data."""
        former = self._former()
        return self._data if former is None else former


class _Hidden:
    """Stands for a container, or an object that is not looked into: what is there now is as good."""


class Label(NamedTuple):
    """What a tensor is, for messages and for whoever knows it by its name."""

    name: str
    is_buffer: bool = True
    is_beside: bool = True
    """It is not the stage's own: what lies between units may read or change it, and is on the tape then."""


class Layout:
    """Where the cells of some tables are.

    Args:
        base: tables that are always the same: those of modules.
        labels: for messages, the module's path and by what name it keeps the table; no name: its attributes.
    """

    def __init__(self, base: Sequence[Table], labels: Sequence[tuple[str, str]]) -> None:
        self._base: list[Any] = [*base]
        self._steps: list[tuple[int, Any, type, bool]] = []
        """Of each other container: the number of the one around it, the key there, its type, and if it is an object."""
        tables: list[Any] = [*base]
        paths = [path for path, _ in labels]
        seen = set(map(id, tables))
        number = 0
        while number < len(tables):
            for key, value in _entries(tables[number]):
                content = None if number < len(base) and key in _OF_EVERY_MODULE else _content(value)
                if content is not None and id(content) not in seen:
                    seen.add(id(content))
                    tables.append(content)
                    self._steps.append((number, key, type(value), content is not value))
                    paths.append(f"{paths[number]}.{key}".strip("."))
            number += 1
        registries = [registry for _, registry in labels] + ["other"] * len(self._steps)
        self._empty = [table for table in base if not table]  # most are: the hooks of each kind, of each module
        self._filled = [table for table in base if table]
        self._sizes = list(map(len, self._filled))
        self._dicts = [n for n, table in enumerate(tables) if isinstance(table, dict) and (table or n >= len(base))]
        self.others = [n for n, table in enumerate(tables) if not isinstance(table, dict)]
        self._keys = {n: [key for key in tables[n] if registries[n] or key not in _REGISTRIES] for n in self._dicts}
        self._inner = [(n, len(self._keys[n])) for n in self._dicts if n >= len(base)]
        self._read = [(n, _getter(self._keys[n])) for n in self._dicts]
        self._places = [(n, key) for n in self._dicts for key in self._keys[n]]
        self._labels = [
            Label(f"{paths[n]}.{key}".strip("."), registries[n] == "_buffers", is_beside=False)
            for n, key in self._places
        ]
        values = self._values(tables)
        self._types = list(map(type, values))
        self._find(values)

    def _find(self, values: Sequence[Any]) -> None:
        self.hidden = [
            index
            for index, ((_, key), value) in enumerate(zip(self._places, values, strict=True))
            if key == _CALL_SITE or (key not in _OF_EVERY_MODULE and not isinstance(value, tuple) and _is_hidden(value))
        ]
        self.tensors = [
            index
            for index, value in enumerate(values)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        ]
        """Where tensors stand that are no parameters."""
        self.labels = [self._labels[index] for index in self.tensors]
        """What those are."""
        self.parameters = [index for index, value in enumerate(values) if isinstance(value, nn.Parameter)]
        self.tuples = [n for n, v in enumerate(values) if isinstance(v, tuple) and not _PLAIN.issuperset(map(type, v))]
        """Where tuples stand that may hold tensors."""
        switches = [index for index, kind in enumerate(self._types) if kind in _SWITCHES or callable(values[index])]
        self._switches = _getter(switches)

    def look(self, known: Sequence[Any] | None = None) -> Look | None:
        """What the cells hold now; None: they are elsewhere by now.

        Args:
            known: what they have held: then only values that are others by now are looked at, and listed.
        """
        if any(self._empty) or list(map(len, self._filled)) != self._sizes:
            return None
        tables = [*self._base] if self._steps else self._base
        try:
            for parent, key, kind, is_object in self._steps:
                value = tables[parent][key]
                if type(value) is not kind:
                    return None
                tables.append(vars(value) if is_object else value)
            values = self._values(tables)
        except (IndexError, KeyError, TypeError):
            return None
        others: list[int] = []
        if known is None:
            if list(map(type, values)) != self._types:
                return None
        else:
            others = list(compress(count(), map(is_not, values, known)))
            if any(type(values[index]) is not self._types[index] for index in others):
                return None
        if self._inner and any(len(tables[n]) != size for n, size in self._inner):
            return None
        return Look(self, tables, values, self._sequences(tables) if self.others else [], others)

    def _values(self, tables: Sequence[Any]) -> list[Any]:
        return list(chain.from_iterable([get(tables[n]) for n, get in self._read]))

    def _sequences(self, tables: Sequence[Any]) -> list[list[Any] | int]:
        return [len(tables[n]) if _is_long(tables[n]) else list(tables[n]) for n in self.others]

    def switches_of(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Which values say what a module does, as switches and functions do, and numbers that count do not."""
        return tuple(map(id, self._switches(values)))

    def set_others(self, wanted: Sequence[Any], now: Look) -> None:
        """Put the wanted values where others stand now."""
        for index in now.others:
            value = wanted[index]
            if value is not _Hidden and not _is_shard(value) and not _is_shard(now.values[index]):
                self.set(now.tables, index, _value(value))

    def set(self, tables: Sequence[Any], index: int, value: Any) -> None:
        """Put a value in its place."""
        n, key = self._places[index]
        table = tables[n]
        if type(table) is dict:
            table[key] = value
        else:
            _base_of(table).__setitem__(table, key, value)

    def label(self, index: int) -> Label:
        """What the tensor in a place is."""
        return self._labels[index]

    def are_same(self, tables: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether two looks found the same containers; those of modules are."""
        return not self._steps or all(map(is_, tables, others))

    def resolved(self) -> list[Any]:
        """The containers as they are now; one that is missing is made, so that it can be filled."""
        tables: list[Any] = [*self._base]
        for parent, key, kind, is_object in self._steps:
            try:
                value = tables[parent][key]
            except (IndexError, KeyError, TypeError):
                value = None
            if type(value) is not kind:
                value = kind() if kind in (dict, list, set, deque, OrderedDict) else None
                if isinstance(tables[parent], dict) and value is not None:
                    _base_of(tables[parent]).__setitem__(tables[parent], key, value)
            tables.append(vars(value) if is_object and value is not None else value)
        return tables

    def contents(self, tables: Sequence[Any], values: Sequence[Any], sequences: Sequence[Any]) -> Iterator[Any]:
        """Pairs of a container and what it is to hold: a dict, a list of entries, or the length of a long list."""
        start, held = 0, set(self._dicts)
        for n, table in enumerate(self._base):
            if n not in held:
                yield table, {}
        for n in self._dicts:
            keys = self._keys[n]
            yield tables[n], dict(zip(keys, values[start : start + len(keys)], strict=True))
            start += len(keys)
        yield from ((tables[n], each) for n, each in zip(self.others, sequences, strict=True))


class Look:
    """What cells hold at one moment, every object itself: not to be kept for long."""

    __slots__ = ("layout", "others", "sequences", "tables", "values")

    def __init__(
        self,
        layout: Layout,
        tables: list[Any],
        values: list[Any],
        sequences: list[list[Any] | int],
        others: list[int],
    ) -> None:
        self.layout = layout
        self.tables = tables
        self.values = values
        self.sequences = sequences
        self.others = others
        """Where the values are not those that were known."""

    def is_same(self, other: Look | None) -> bool:
        """Whether the very same objects stand everywhere."""
        return (
            other is not None
            and other.layout is self.layout
            and all(map(is_, other.tables, self.tables))
            and all(map(is_, other.values, self.values))
            and all(map(_is_same_sequence, other.sequences, self.sequences))
        )

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are no parameters and have no graph."""
        return Kept(self).contents()[0]

    def restore_sequences(self) -> list[Any]:
        """Restore the contents of lists, deques and sets; returns what they held."""
        left: list[Any] = []
        for table, content in self.layout.contents(self.tables, self.values, self.sequences):
            if not isinstance(table, dict) and not _is_same_sequence(content, table):
                left += table
                fill(table, content)
        return left

    def detach(self) -> None:
        """Take the graphs off all tensors, as a training loop does with hidden states."""
        for index in (*self.layout.tensors, *self.layout.tuples):
            value = _without_graph(self.values[index])
            if value is not self.values[index]:
                self.layout.set(self.tables, index, value)
        for n, content in zip(self.layout.others, self.sequences, strict=True):
            if not isinstance(content, int):
                fill(self.tables[n], list(map(_without_graph, content)))

    def restore(self) -> None:
        """Restore the contents of every container."""
        now = self.layout.look(self.values)
        if now is not None and self.layout.are_same(now.tables, self.tables):
            self.layout.set_others(self.values, now)
            if all(map(_is_same_sequence, now.sequences, self.sequences)):
                return
        for table, content in self.layout.contents(self.tables, self.values, self.sequences):
            fill(table, content)


class Kept:
    """What cells held at one moment, such that keeping it keeps no graph, and no container, alive."""

    __slots__ = ("_has_graphs", "_sequences", "layout", "values")

    def __init__(self, look: Look) -> None:
        layout, values = look.layout, [*look.values]
        for index in layout.hidden:
            values[index] = _Hidden
        for index in layout.tuples:
            values[index] = _kept(values[index])
        self._has_graphs = False
        for index in layout.tensors:
            if values[index].grad_fn is not None:
                values[index] = _Detached(values[index])
                self._has_graphs = True
        self.layout = layout
        self.values = values
        self._sequences = [each if isinstance(each, int) else list(map(_kept, each)) for each in look.sequences]

    def contents(self) -> tuple[list[torch.Tensor], Sequence[Label]]:
        """The tensors without a graph, and what each is; those in tuples come last."""
        values, layout = self.values, self.layout
        if not self._has_graphs and not layout.tuples:
            return [values[index] for index in layout.tensors], layout.labels
        found = [index for index in layout.tensors if not isinstance(values[index], _Detached)]
        tensors, labels = [values[index] for index in found], [layout.label(index) for index in found]
        for index in layout.tuples:
            inside = [each for each in _entries_of(values[index]) if isinstance(each, torch.Tensor)]
            tensors += inside
            labels += [layout.label(index)] * len(inside)
        return tensors, labels

    def parameters(self) -> list[nn.Parameter]:
        """The parameters."""
        return [self.values[index] for index in self.layout.parameters]

    def addresses(self) -> set[int]:
        """Those of the tensors that have their own places."""
        return {id(self.values[index]) for index in self.layout.tensors}

    def exchange(self, look: Look, others: Mapping[int, torch.Tensor]) -> None:
        """Put other tensors, by the address of the former, in the places of those that stood there."""
        tables = look.tables if look.layout is self.layout else self.layout.resolved()
        for index in self.layout.tensors:
            other = others.get(id(self.values[index]))
            if other is not None:
                self.layout.set(tables, index, other)

    def apply(self, look: Look) -> None:
        """Let the cells, which hold what a look that knew this says, hold what they held."""
        layout = self.layout
        if look.layout is layout:
            layout.set_others(self.values, look)
            if all(map(_is_same_sequence, self._sequences, look.sequences)):
                return
        tables = look.tables if look.layout is layout else layout.resolved()
        for table, content in layout.contents(tables, self.values, self._sequences):
            if table is not None:
                fill(table, content if isinstance(content, int) else _made(content, table))


class Cells:
    """The cells of some modules.

    Args:
        modules: with their paths.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._base: list[Table] = []
        self._labels: list[tuple[str, str]] = []
        for path, module in modules:
            own = vars(module)
            registries = [name for name in own if name in _REGISTRIES]
            self._base += [own, *(own[name] for name in registries)]
            self._labels += [(path, ""), *((path, name) for name in registries)]
        self._layout: Layout | None = None

    def look(self, kept: Kept | None = None) -> Look:
        """What they hold now; where that is compared with what they have held, quickly."""
        look = None
        if self._layout is not None:
            look = self._layout.look(kept.values if kept is not None and kept.layout is self._layout else None)
        if look is None:
            self._layout = Layout(self._base, self._labels)
            look = self._layout.look()
            assert look is not None
        return look


def fill(container: Any, content: Any) -> None:
    """Fill a container with its contents; a number means the first so many entries of a list."""
    if isinstance(content, int):
        while isinstance(container, list) and len(container) > content:
            container.pop()
    elif isinstance(container, dict):
        kind = _base_of(container)
        rest = {key: value for key, value in dict.items(container) if key in _REGISTRIES and key not in content}
        if [*rest, *content] != [*rest, *(key for key in dict.keys(container) if key not in rest)]:
            kind.clear(container)
            kind.update(container, rest)
        for key, value in content.items():
            there = dict.get(container, key, Absent)
            if there is Absent or (there is not value and not _is_shard(value) and not _is_shard(there)):
                kind.__setitem__(container, key, value)
    elif isinstance(container, _SEQUENCES) and not _is_same_sequence(content, container):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)


def _getter(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Gives the values of some keys in one go."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda table: tuple(table[key] for key in keys)


def _base_of(table: Table) -> type[dict[Any, Any]]:
    """Whose methods to use: not the table's own, since results of transformers' models refuse them."""
    return OrderedDict if isinstance(table, OrderedDict) else dict


def _made(content: Any, now: Any) -> Any:
    """What a container held, from what was kept of it; where a container stood, what stands there now is as good."""
    if isinstance(content, dict):
        made = {}
        for key, value in content.items():
            there = dict.get(now, key, Absent)
            made[key] = there if value is _Hidden or _is_shard(value) or _is_shard(there) else _value(value)
        return {key: value for key, value in made.items() if value is not Absent}
    there = [*now]
    values = [there[n] if v is _Hidden and n < len(there) else _value(v) for n, v in enumerate(content)]
    return [value for value in values if value is not _Hidden]


def _value(kept: Any) -> Any:
    return kept.value() if isinstance(kept, _Detached) else kept


def _without_graph(value: Any) -> Any:
    """A tensor without its graph, and a tuple of such; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value if value.grad_fn is None else value.detach()
    if not isinstance(value, tuple) or _is_plain(value):
        return value
    entries = map(_without_graph, value)
    return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.grad_fn is None else _Detached(value)
    return _Hidden if _is_hidden(value) else value


def _entries(table: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(table, dict):
        return table.items()
    return () if isinstance(table, set) or _is_long(table) else enumerate(table)


def _content(value: Any) -> Any:
    """The container that a value is, or the table of an object that is there to hold others; None: neither."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor | nn.Module | type):
        return None
    if isinstance(value, _SEQUENCES):
        return value
    if isinstance(value, dict):
        return None if len(value) > _MOST_ENTRIES else value
    if isinstance(value, tuple):
        return None if _is_plain(value) else value
    return vars(value) if is_settings(value) else None


def is_settings(value: Any) -> bool:
    """Whether an object may change in a forward: a namespace, a dataclass, or one of a class of the user's."""
    if isinstance(value, nn.Module | type) or not hasattr(value, "__dict__") or not isinstance(vars(value), dict):
        return False
    if isinstance(value, SimpleNamespace | Namespace) or is_dataclass(value):
        return True
    return type(value).__module__.partition(".")[0] not in _NOT_THE_USERS


def _is_hidden(value: Any) -> bool:
    """Whether a value is not kept: it may hold a graph later, and is known by its place."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor | nn.Module | type):
        return False
    if isinstance(value, (*_SEQUENCES, dict)):
        return True
    return not _is_plain(value) if isinstance(value, tuple) else is_settings(value) and not callable(value)


def _is_plain(value: tuple[Any, ...]) -> bool:
    """Whether a tuple holds nothing that changes: itself is kept then."""
    return all(
        _is_plain(each)
        if isinstance(each, tuple)
        else each.grad_fn is None
        if isinstance(each, torch.Tensor)
        else not _is_hidden(each)
        for each in value
    )


def _entries_of(value: Any) -> tuple[Any, ...]:
    """What a tuple holds; nothing where something else stands by now."""
    return value if isinstance(value, tuple) else ()


def _is_long(container: Any) -> bool:
    return isinstance(container, list) and len(container) > _MOST_ENTRIES


def _is_same_sequence(one: Any, other: Any) -> bool:
    if isinstance(one, int) or isinstance(other, int):
        return (one if isinstance(one, int) else len(one)) == (other if isinstance(other, int) else len(other))
    if len(one) != len(other):
        return False
    if isinstance(other, set):
        return set(map(id, one)) == set(map(id, other))
    return all(map(is_, one, other))


def _is_shard(value: Any) -> bool:
    """Whether FSDP manages it, with its own hooks that also run in recomputations."""
    return type(value).__name__ == "DTensor"
