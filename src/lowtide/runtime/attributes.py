"""What modules keep as attributes: counters of calls, flags, factors, and tensors that are not registered as buffers.

A stage that runs again must find them as the first run found them, whether its own code has changed them since or
somebody else has (an adapter's scale between two forwards), and leave them as they are by then: a counter that counted
repeated runs, too, would reach the end of a warm-up too early, and an average would take in a batch twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from operator import is_
from typing import Any

import torch
from torch import nn

from lowtide.runtime.exchange import ABSENT, Entry

_PLAIN = frozenset({type(None), bool, int, float, complex, str})

# What every module has: modes, whose switch is refused elsewhere, hooks, parameters, buffers and modules.
_NOT_OURS = frozenset(vars(nn.Module()))

# In how many forwards a stage looks for attributes: the first one may make some.
_NUM_LOOKS = 2

# Dicts with more entries are not looked into: vocabularies, not settings.
_MOST_ENTRIES = 100


class _Other:
    """Stands for a value that is not kept: some object, or a tensor with its graph, which would keep a step alive."""


Place = tuple[dict[str, Any], str]


class StageAttributes:
    """The attributes of one stage's modules, and what stands in dicts among them."""

    __slots__ = ("_known", "_modules", "_num_looks", "_places")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._num_looks = 0
        self._places: list[Place] = []
        self._known: set[tuple[int, str]] = set()

    def before(self) -> list[Any]:
        """The values before a first run; those that are found in the first two are looked at from then on."""
        if self._num_looks < _NUM_LOOKS:
            self._num_looks += 1
            self._look()
        return self._now()

    def _look(self) -> None:
        for table, name in (place for module in self._modules for place in _places_in(module)):
            if (id(table), name) not in self._known:
                self._known.add((id(table), name))
                self._places.append((table, name))

    def _now(self) -> list[Any]:
        values = [table.get(name, ABSENT) for table, name in self._places]
        return [value if type(value) in _PLAIN or _is_kept(value) else _Other for value in values]

    def changed_since(self, values: list[Any]) -> list[Entry]:
        """What is to stand in the places of those that are others than they were.

        A tensor with its graph that stands where nothing was kept stays, and is there again afterwards: it is what the
        stage itself has made.
        """
        if self._num_looks < _NUM_LOOKS:
            self._look()
        now = self._now()
        then = [*values, *(ABSENT for _ in range(len(now) - len(values)))]
        if all(map(is_, now, then)) and not any(value is _Other for value in now):
            return []
        entries: list[Entry] = []
        for (table, name), before, value in zip(self._places, then, now, strict=True):
            if value is _Other and (before is _Other or before is ABSENT):
                entries.append((table, name, table[name]))
            elif before is not _Other and value is not before:
                entries.append((table, name, before))
        return entries


def _places_in(module: nn.Module) -> Iterator[Place]:
    """Where something stands in a module's attributes, and in dicts among these, that may have to be put back."""
    is_torchs = type(module).__module__.startswith("torch.")  # its layers do not change their tuples
    table = vars(module)
    dicts = [value for name, value in table.items() if isinstance(value, dict) and name not in _NOT_OURS]
    for each in (table, *(d for d in dicts if len(d) <= _MOST_ENTRIES)):
        for name, value in each.items():
            if name in _NOT_OURS and each is table:
                continue
            is_ours = type(value) in _PLAIN or isinstance(value, torch.Tensor)
            if is_ours or (not is_torchs and _is_kept(value)):
                yield each, name


def _is_kept(value: Any) -> bool:
    """Whether a value can be put back later: one that does not change by itself, and a tensor without its graph."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None
    if isinstance(value, tuple):
        return all(type(each) in _PLAIN or _is_kept(each) for each in value)
    return type(value) in _PLAIN or value is ABSENT or isinstance(value, Enum)
