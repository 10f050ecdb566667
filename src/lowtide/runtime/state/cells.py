"""Cells of state: what modules keep, and what the containers and objects that they keep hold.

A cell is a place with a value in it: a name among a module's attributes, parameters, buffers, hooks or submodules, a
key of a dict, an attribute of an object, the entries of a list or of a numpy array. Where cells are is found by walking
from the modules' own tables, and holds as long as names and types stay the same, which is checked at each look without
walking.
"""

from __future__ import annotations

import sys
import weakref
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cached_property
from itertools import compress
from operator import is_, is_not, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

Table = dict[Any, Any]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_REGISTRIES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_SETTABLE = frozenset({"", "_buffers", "other"})
_SEQUENCES = (list, deque, set)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_SWITCHES = frozenset({type(None), bool})

# Larger arrays are data. To copy one of this size and to compare it takes 11 microseconds, at each look; one of a
# mebibyte 1.5 milliseconds.
_LARGEST_ARRAY_BYTES = 2**16

# Objects of these make themselves known otherwise, or are not the model's.
_NOT_THE_USERS = frozenset({*sys.stdlib_module_names, "lowtide", "numpy", "torch"}) - {"__main__"}

# The call site of a module is looked after by whoever intercepts its calls.
_CALL_SITE = "_compiled_call_impl"


class _Absent:
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
        self._dicts = [n for n, table in enumerate(tables) if isinstance(table, dict) and (table or n >= len(base))]
        self.others = [n for n, table in enumerate(tables) if not isinstance(table, dict)]
        self._keys = {n: [key for key in tables[n] if registries[n] or key not in _REGISTRIES] for n in self._dicts}
        self._sizes = [len(tables[n]) for n in self._dicts]
        self._read = [(n, _getter(self._keys[n])) for n in self._dicts]
        self._places = [(n, key) for n in self._dicts for key in self._keys[n]]
        self._all = range(len(self._places))
        self._paths, self._registries = paths, registries
        values = self._values(tables)
        self._types = list(map(type, values))
        self._find(values)

    def _find(self, values: Sequence[Any]) -> None:
        not_plain = [index for index, kind in enumerate(self._types) if kind not in _PLAIN]
        self.hidden, self.tensors, self.tuples = list[int](), list[int](), list[int]()
        self.parameters = [index for index in not_plain if isinstance(values[index], nn.Parameter)]
        for index in not_plain:
            key, value = self._places[index][1], values[index]
            if isinstance(value, tuple):
                if not _is_all_plain(value):
                    self.tuples.append(index)  # it may hold tensors
            elif key == _CALL_SITE or (key not in _OF_EVERY_MODULE and _is_hidden(value)):
                self.hidden.append(index)
            elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.tensors.append(index)
        self.labels = list(map(self.label, self.tensors))
        """What the tensors are that are no parameters."""
        switches = [index for index, kind in enumerate(self._types) if kind in _SWITCHES or callable(values[index])]
        self._switches = _getter(switches)

    def look(self, known: Sequence[Any] | None = None) -> Look | None:
        """What the cells hold now; None: they are elsewhere by now.

        Args:
            known: what they have held: then only values that are others by now are looked at, and listed.
        """
        if any(self._empty):
            return None
        tables = [*self._base] if self._steps else self._base
        try:
            for parent, key, kind, is_object in self._steps:
                value = tables[parent][key]
                if type(value) is not kind:
                    return None
                tables.append(vars(value) if is_object else value)
            if list(map(len, map(tables.__getitem__, self._dicts))) != self._sizes:
                return None
            values = self._values(tables)
        except (IndexError, KeyError, TypeError):
            return None
        others: list[int] = []
        if known is None:
            if list(map(type, values)) != self._types:
                return None
        else:
            others = list(compress(self._all, map(is_not, values, known)))
            if any(type(values[index]) is not self._types[index] for index in others):
                return None
        return Look(self, tables, values, [_copied(tables[n]) for n in self.others], others)

    def _values(self, tables: Sequence[Any]) -> list[Any]:
        values: list[Any] = []
        extend = values.extend
        for n, get in self._read:  # a fifth faster than chaining them
            extend(get(tables[n]))
        return values

    def switches_of(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Which values say what a module does, as switches and functions do, and numbers that count do not."""
        return tuple(map(id, self._switches(values)))

    def set_others(self, wanted: Sequence[Any], now: Look) -> None:
        """Put the wanted values where others stand now."""
        tables, there = now.tables, now.values
        for index in now.others:
            value = wanted[index]
            # Most are buffers that were exchanged: these need no further look.
            is_tensor = type(value) is torch.Tensor is type(there[index])
            if is_tensor or (value is not _Hidden and not _is_shard(value) and not _is_shard(there[index])):
                self.set(tables, index, value if is_tensor else _value(value))

    def set(self, tables: Sequence[Any], index: int, value: Any) -> None:
        """Put a value in its place."""
        n, key = self._places[index]
        table = tables[n]
        if type(table) is dict:
            table[key] = value
        elif table is not None:
            _base_of(table).__setitem__(table, key, value)

    def label(self, index: int) -> Label:
        """What the tensor in a place is."""
        n, key = self._places[index]
        return Label(f"{self._paths[n]}.{key}".strip("."), self._registries[n] == "_buffers", is_beside=False)

    @cached_property
    def settable(self) -> dict[str, int]:
        """By name, where values are that code outside of a module may set: no parameters, submodules or hooks."""
        found = [(i, n, key) for i, (n, key) in enumerate(self._places) if self._registries[n] in _SETTABLE]
        return {f"{self._paths[n]}.{key}": i for i, n, key in found if n >= len(self._base) or key not in _REGISTRIES}

    def kinds(self) -> dict[str, type]:
        """The type of each value, by name."""
        return {self.label(index).name: kind for index, kind in enumerate(self._types)}

    def path(self, number: int) -> str:
        """Where a container is."""
        return self._paths[number]

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
        """Pairs of a container and what it is to hold, a dict or a list of entries."""
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
    """What cells hold at one moment.

    Args:
        layout: where they are.
        tables: the containers themselves; none: those that are there when it is restored.
        values: what dicts hold, by place.
        sequences: what lists, deques, sets and arrays hold.
        others: where the values are not those that were known.
    """

    __slots__ = ("layout", "others", "sequences", "tables", "values")

    def __init__(
        self,
        layout: Layout,
        tables: list[Any],
        values: list[Any],
        sequences: list[Any],
        others: Sequence[int] = (),
    ) -> None:
        self.layout = layout
        self.tables = tables
        self.values = values
        self.sequences = sequences
        self.others = others

    def kept(self) -> Look:
        """The same to be kept for long: no graph and no container is kept alive, since that may hold one later."""
        layout, values = self.layout, [*self.values]
        for index in layout.hidden:
            values[index] = _Hidden
        for index in layout.tuples:
            values[index] = _kept(values[index])
        for index in layout.tensors:
            if values[index].grad_fn is not None:
                values[index] = _Detached(values[index])
        sequences = [each if _has_no_graphs(each) else list(map(_kept, each)) for each in self.sequences]
        return Look(layout, [], values, sequences)

    def contents(self) -> tuple[list[torch.Tensor], Sequence[Label]]:
        """The tensors of a look to be kept that are no parameters and have no graph, and what each is."""
        values, layout = self.values, self.layout
        tensors, labels = [values[index] for index in layout.tensors], layout.labels
        if _Detached in map(type, tensors):
            found = [index for index in layout.tensors if type(values[index]) is not _Detached]
            tensors, labels = [values[index] for index in found], list(map(layout.label, found))
        for index in (index for index in layout.tuples if isinstance(values[index], tuple)):
            inside = [each for each in values[index] if isinstance(each, torch.Tensor)]
            tensors += inside
            labels = [*labels, *[layout.label(index)] * len(inside)]
        return tensors, labels

    def parameters(self) -> list[nn.Parameter]:
        """The parameters."""
        return [self.values[index] for index in self.layout.parameters]

    def addresses(self) -> set[int]:
        """Those of the tensors that have their own places."""
        return {id(self.values[index]) for index in self.layout.tensors}

    def restore(self, now: Look | None = None) -> None:
        """Let the cells hold what they held; what they hold now may be known, by a look that knew this one."""
        layout, tables = self.layout, self.tables
        now = now or layout.look(self.values)
        if now is not None and now.layout is layout and (not tables or layout.are_same(tables, now.tables)):
            layout.set_others(self.values, now)
            for n, content, there in zip(layout.others, self.sequences, now.sequences, strict=True):
                if not _is_same_sequence(content, there):
                    fill(now.tables[n], _made(content, there))
            return
        for table, content in layout.contents(tables or layout.resolved(), self.values, self.sequences):
            if table is not None:
                fill(table, _made(content, table))

    def difference(self, now: Look) -> str | None:
        """The name of something that is not as it was, by a look that knew this one; None: all of it is."""
        layout = self.layout
        if now.layout is not layout:
            then, there = layout.kinds(), now.layout.kinds()
            others = (name for name in {**there, **then} if then.get(name) is not there.get(name))
            return next(others, "attributes or hooks")
        hidden = set(layout.hidden) if now.others else ()
        for index in now.others:
            one, other = self.values[index], now.values[index]
            if index not in hidden and not (type(one) in _PLAIN and type(one) is type(other) and one == other):
                return layout.label(index).name
        for n, one, other in zip(layout.others, self.sequences, now.sequences, strict=True):
            if not _is_same_sequence(one, other):
                return layout.path(n)
        return None

    def exchange(self, now: Look, others: Mapping[int, torch.Tensor]) -> None:
        """Put other tensors, by the address of the former, in the places of those that stood there."""
        tables = now.tables if now.layout is self.layout else self.layout.resolved()
        for index in self.layout.tensors:
            other = others.get(id(self.values[index]))
            if other is not None:
                self.layout.set(tables, index, other)

    def restore_sequences(self) -> list[Any]:
        """Restore the contents of lists, deques, sets and arrays; returns what they held."""
        left: list[Any] = []
        for n, content in zip(self.layout.others, self.sequences, strict=True):
            if not _is_same_sequence(content, self.tables[n]):
                left.append(_copied(self.tables[n]))
                fill(self.tables[n], content)
        return left

    def detach(self) -> None:
        """Take the graphs off all tensors, as a training loop does with hidden states."""
        for index in (*self.layout.tensors, *self.layout.tuples):
            value = _without_graph(self.values[index])
            if value is not self.values[index]:
                self.layout.set(self.tables, index, value)
        for n, content in zip(self.layout.others, self.sequences, strict=True):
            if not _has_no_graphs(content):
                fill(self.tables[n], list(map(_without_graph, content)))


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

    def look(self, known: Look | None = None) -> Look:
        """What they hold now; where that is compared with what they have held, quickly."""
        look = None
        if self._layout is not None:
            look = self._layout.look(known.values if known is not None and known.layout is self._layout else None)
        if look is None:
            self._layout = Layout(self._base, self._labels)
            look = self._layout.look()
            assert look is not None
        return look


class Assigned(NamedTuple):
    """What was put in some cells."""

    layout: Layout
    values: Mapping[int, Any]
    """By place."""

    def repeat(self) -> None:
        """Put it there again."""
        tables = self.layout.resolved()
        for index, value in self.values.items():
            self.layout.set(tables, index, value)


class CellWatch:
    """Notices what the code between a stage's calls puts in cells of its units.

    That code is not on a tape, so the unit that comes next must find it there. What has a graph is not noted: capture
    looks after it. To look at every call takes longer than many calls do: whoever runs stages does so when a stage runs
    for the first time, and later where that has shown something.

    Args:
        units: with their paths.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]]) -> None:
        self.has_seen_one = False
        """Whether something was set in this run of the stage."""
        self._cells = {path: Cells(unit.named_modules(prefix=path)) for path, unit in units}
        self._left = {path: cells.look().kept() for path, cells in self._cells.items()}

    def before_call(self, path: str) -> Assigned | None:
        """A unit is about to be called: what was set in its cells since it was left; None: nothing."""
        left, now = self._left[path], self._cells[path].look()
        kept, before = now.kept().values, left.layout.settable
        found = {
            index: kept[index]
            for name, index in now.layout.settable.items()
            if not (name in before and left.values[before[name]] is kept[index])
            if kept[index] is not _Hidden and not isinstance(kept[index], _Detached)
        }
        self.has_seen_one |= bool(found)
        return Assigned(now.layout, found) if found else None

    def after_call(self, path: str) -> None:
        """It has returned."""
        self._left[path] = self._cells[path].look().kept()


def fill(container: Any, content: Any) -> None:
    """Fill a container with its contents, those of a module's own table but for its registries."""
    if isinstance(container, dict):
        kind = _base_of(container)
        rest = {key: value for key, value in dict.items(container) if key in _REGISTRIES and key not in content}
        if [*rest, *content] != [*rest, *(key for key in dict.keys(container) if key not in rest)]:
            kind.clear(container)
            kind.update(container, rest)
        for key, value in content.items():
            if dict.get(container, key, _Absent) is not value:
                kind.__setitem__(container, key, value)
    elif isinstance(container, numpy.ndarray):
        if container.shape == content.shape and container.flags.writeable:  # else it is another array by now
            container[...] = content
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
            there = dict.get(now, key, _Absent)
            made[key] = there if value is _Hidden or _is_shard(value) or _is_shard(there) else _value(value)
        return {key: value for key, value in made.items() if value is not _Absent}
    if _has_no_graphs(content):
        return content
    there = [*now]
    values = [there[n] if v is _Hidden and n < len(there) else _value(v) for n, v in enumerate(content)]
    return [value for value in values if value is not _Hidden]


def _value(kept: Any) -> Any:
    return kept.value() if isinstance(kept, _Detached) else kept


def _without_graph(value: Any) -> Any:
    """A tensor without its graph, and a tuple of such; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach() if _has_graph(value) else value
    if not isinstance(value, tuple) or not _is_hidden(value):
        return value
    entries = map(_without_graph, value)
    return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)


def _kept(value: Any) -> Any:
    if _has_graph(value):
        return _Detached(value)
    return _Hidden if _is_hidden(value) else value


def _entries(table: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(table, set | numpy.ndarray) or not table:
        return ()
    values = table.values() if isinstance(table, dict) else table
    if _is_all_plain(values):
        return ()
    return table.items() if isinstance(table, dict) else enumerate(table)


def _content(value: Any) -> Any:
    """The container that a value is, or the table of an object that is there to hold others; None: neither."""
    if isinstance(value, (*_SEQUENCES, dict, tuple)):
        return value if _is_hidden(value) else None
    if isinstance(value, numpy.ndarray):
        is_filled = value.flags.writeable and not value.dtype.hasobject and value.nbytes <= _LARGEST_ARRAY_BYTES
        return value if is_filled else None
    return vars(value) if is_settings(value) else None


def is_settings(value: Any) -> bool:
    """Whether an object may change in a forward: a namespace, a dataclass, or one of a class of the user's."""
    if isinstance(value, torch.Tensor | nn.Module | type) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    if isinstance(value, SimpleNamespace | Namespace) or is_dataclass(value):
        return True
    return is_of_user(type(value))


def is_of_user(definition: Any) -> bool:
    """Whether a class or function is not torch's, numpy's, lowtide's or Python's own."""
    return str(getattr(definition, "__module__", "torch")).partition(".")[0] not in _NOT_THE_USERS


def _is_hidden(value: Any) -> bool:
    """Whether a value is not kept: it may hold a graph later, and is known by its place."""
    if type(value) in _PLAIN:
        return False
    if isinstance(value, (*_SEQUENCES, dict)):
        return True
    if isinstance(value, tuple):
        return any(_is_hidden(each) or _has_graph(each) for each in value)
    return is_settings(value) and not callable(value)


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _copied(container: Any) -> Any:
    """What a list, a deque, a set or an array holds."""
    return container.copy() if isinstance(container, numpy.ndarray) else list(container)


def _has_no_graphs(content: Any) -> bool:
    """Whether what a container held can be kept as it is."""
    return isinstance(content, numpy.ndarray) or _is_all_plain(content)


def _is_all_plain(values: Iterable[Any]) -> bool:
    """Whether there are only numbers, texts and the like: told quickly, however many there are."""
    return _PLAIN.issuperset(map(type, values))


def _is_same_sequence(one: Any, other: Any) -> bool:
    if isinstance(other, numpy.ndarray):
        return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())
    if len(one) != len(other):
        return False
    if isinstance(other, set):
        return set(map(id, one)) == set(map(id, other))
    return all(map(is_, one, other))


def _is_shard(value: Any) -> bool:
    """Whether FSDP manages it, with its own hooks that also run in recomputations."""
    return type(value).__name__ == "DTensor"
