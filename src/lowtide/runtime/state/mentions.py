"""Does the code of a module name an attribute of another one? Found by reading the code, not by running it.

BatchNorm's own output does not depend on its running statistics in training. A block around it may read them
(`x * self.norm.running_var`), and then they matter when the block runs again.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


def mentions(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether the forward or a hook of a module, or a function or method that they call by name, mentions a name.

    Code that may get at any buffer (`named_buffers`, `getattr`) counts as if it did. What torch itself brings along is
    not looked at: its layers keep to their own attributes.

    Example:
        >>> mentions(nn.BatchNorm1d(1), frozenset({"running_mean"}))
        False
    """
    return _code_mentions(module, names | _WAYS_AROUND)


def _code_mentions(module: nn.Module, names: frozenset[str]) -> bool:
    kind: Any = type(module)
    own = [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), vars(module).get("forward")]
    own += [method for value in vars(module).values() for method in _methods_of(value)]
    return _class_mentions(kind, names) or _any_mentions(own, kind, names)


def names(module: nn.Module, name: str) -> bool:
    """Whether that code names an attribute; asking by a name that is put together does not count.

    Example:
        >>> names(nn.BatchNorm1d(1), "memory")
        False
    """
    return _code_mentions(module, frozenset({name}))


# Whoever asks for buffers by these may get at any of them.
_WAYS_AROUND = frozenset(
    {"__dict__", "_buffers", "buffers", "get_buffer", "getattr", "named_buffers", "state_dict", "vars"}
)

_NOT_THE_USERS = frozenset({"builtins", "collections", "lowtide", "torch"})

# By class, which is not kept alive: a module with a parametrization has a class of its own.
_known: weakref.WeakKeyDictionary[type, dict[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def _class_mentions(kind: type[nn.Module], names: frozenset[str]) -> bool:
    found = _known.setdefault(kind, {})
    if names not in found:
        found[names] = _any_mentions([kind.forward], kind, names)
    return found[names]


def _methods_of(value: Any) -> list[Any]:
    """The methods of a helper that a module keeps and that is no module itself."""
    kind = type(value)
    if isinstance(value, nn.Module | type) or kind.__module__.partition(".")[0] in _NOT_THE_USERS:
        return []
    return [each for each in vars(kind).values() if isinstance(each, FunctionType | staticmethod | classmethod)]


def _any_mentions(functions: Iterable[Any], owner: type, names: frozenset[str]) -> bool:
    pending, seen = [*functions], set()
    while pending:
        function = _plain(pending.pop())
        if function is None or function in seen or function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(function)
        called = {name for code in _codes(function.__code__) for name in code.co_names}
        if called & names:
            return True
        pending += [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
        pending += [function.__globals__[name] for name in called if name in function.__globals__]
        pending += [vars(each)[name] for each in owner.__mro__ for name in called if name in vars(each)]
    return False


def _plain(value: Any) -> FunctionType | None:
    """The function behind a method, a property, a partial call, an object that is called, or a decorator."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial):
        return _plain(value.func)
    elif not isinstance(value, FunctionType | type | nn.Module) and callable(value):
        value = vars(type(value)).get("__call__")
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    return value if isinstance(value, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those that are written inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
