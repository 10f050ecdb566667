"""Arguments and results of calls as templates: tensors stand as slots, containers are rebuilt whenever they are used.

A recorded call must not keep its tensors alive, and a module that writes into a list which it was given must find a
fresh one when it runs again. Lists, tuples, dicts, slices and dataclasses (with their subclasses, such as the outputs
of transformers' models) are taken apart; any other object is passed on as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any

import numpy
import torch

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(...)}
)

GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
"""The kinds of random generators that a call may be handed."""

Encode = Callable[[torch.Tensor], Any]


class Slot:
    """A place in the table of values of one run."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Held:
    """A tensor that a stage reads and that is neither its input nor made by it: it is kept as it is.

    `origin` is the earlier stage that made it (0: the caller) and its number there; None for parameters and the like.
    """

    __slots__ = ("origin", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, origin: tuple[int, int] | None = None) -> None:
        self.tensor = tensor
        self.origin = origin
        self.version = 0 if tensor.is_inference() else tensor._version


class _Sequence:
    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind = kind
        self.items = items

    def build(self, values: Sequence[Any]) -> Any:
        items = [build(item, values) for item in self.items]
        if self.kind is list:
            return items
        if self.kind is tuple:
            return tuple(items)
        if self.kind is slice or hasattr(self.kind, "_fields"):
            return self.kind(*items)
        return self.kind(items)


class _Mapping:
    __slots__ = ("empty", "items")

    def __init__(self, empty: Any, items: dict[Any, Any]) -> None:
        self.empty = empty
        self.items = items

    def build(self, values: Sequence[Any]) -> Any:
        made = {} if self.empty is None else copy.copy(self.empty)
        for key, item in self.items.items():
            made[key] = build(item, values)
        return made


class _Record:
    __slots__ = ("empty", "items")

    def __init__(self, empty: Any, items: dict[str, Any]) -> None:
        self.empty = empty
        self.items = items

    def build(self, values: Sequence[Any]) -> Any:
        made = copy.copy(self.empty)
        for name, item in self.items.items():
            object.__setattr__(made, name, build(item, values))
        return made


def template(value: Any, encode: Encode) -> Any:
    """Take a value apart: each tensor in it becomes what `encode` makes of it."""
    kind = type(value)
    if kind is torch.Tensor:  # nearly always, and asked first: this runs for every argument of every recorded call
        return encode(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return encode(value)
    if kind is slice:
        return _Sequence(slice, [template(item, encode) for item in (value.start, value.stop, value.step)])
    if isinstance(value, tuple | list):
        return _Sequence(kind, [template(item, encode) for item in value])
    if isinstance(value, dict):
        items = {key: template(item, encode) for key, item in value.items()}
        return _Mapping(None if kind is dict else _emptied_mapping(value), items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [entry.name for entry in dataclasses.fields(value) if hasattr(value, entry.name)]
        return _Record(_emptied_record(value, fields), {n: template(getattr(value, n), encode) for n in fields})
    return value


def build(form: Any, values: Sequence[Any]) -> Any:
    """Put a value together again from its template and the table of values."""
    kind = type(form)
    if kind is Slot:
        return values[form.index]
    if kind is Held:
        return form.tensor
    if kind is _Sequence or kind is _Mapping or kind is _Record:
        return form.build(values)
    return form


def parts(form: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """All slots, all held tensors, or all objects of other kinds in a template."""
    if isinstance(form, kind):
        yield form
    elif isinstance(form, _Sequence):
        for item in form.items:
            yield from parts(item, kind)
    elif isinstance(form, _Mapping | _Record):
        for item in form.items.values():
            yield from parts(item, kind)


def exchange(form: Any, kind: type | tuple[type, ...], make: Callable[[Any], Any]) -> Any:
    """Put what `make` makes of them in the places of all objects of a kind in a template."""
    if isinstance(form, kind):
        return make(form)
    if isinstance(form, _Sequence):
        form.items = [exchange(item, kind, make) for item in form.items]
    elif isinstance(form, _Mapping | _Record):
        form.items = {key: exchange(item, kind, make) for key, item in form.items.items()}
    return form


def tensors_of(value: Any, found: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """All tensors in a result, in an order that depends on its structure alone."""
    if found is None:
        if type(value) is torch.Tensor:
            return [value]
        found = []
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in _PLAIN:
        pass
    elif isinstance(value, tuple | list):
        for item in value:
            tensors_of(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            tensors_of(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            tensors_of(getattr(value, entry.name, None), found)
    return found


def _emptied_mapping(value: Any) -> Any:
    emptied = copy.copy(value)
    for key in list(value):
        emptied[key] = None
    return emptied


def _emptied_record(value: Any, fields: list[str]) -> Any:
    emptied = copy.copy(value)
    for name in fields:
        object.__setattr__(emptied, name, None)
    return emptied


def reached_by(function: Any) -> list[Any]:
    """What a function, or a method, can reach besides its arguments: by its closure, its globals, or as its `self`."""
    if isinstance(function, partial):
        return [*function.args, *function.keywords.values(), *reached_by(function.func)]
    values = [getattr(function, "__self__", None)]
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        values += map(_content_of_cell, function.__closure__ or ())
        values += map(function.__globals__.get, function.__code__.co_names)
    return values


def _content_of_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
