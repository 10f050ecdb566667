"""Lists that modules keep: auxiliary losses, statistics, histories, to which a forward appends.

Running a model for a measurement, or a stage of it once more, must not leave anything in them: a training loop that
sums such a list would count terms twice, and terms with a graph keep memory that nobody needs.
"""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from operator import is_
from types import SimpleNamespace
from typing import Any

from torch import nn

from lowtide.runtime.state.exchange import dict_at

_LISTS = (list, deque)
_CONTAINERS = (list, deque, dict, set)
_NAMESPACES = (SimpleNamespace, Namespace)
_NUMBERS = frozenset({type(None), bool, int, float, complex, str})

# Lists of numbers up to this length are copied before a stage's first run. Histories that drop their oldest entry are
# short; those that only grow are known by their length.
_MOST_COPIED = 100

# In how many forwards a stage looks for lists: the first one may make some that the second one finds.
_NUM_LOOKS = 2

_Place = tuple[dict[str, Any], tuple[str, ...]]
"""A module's attributes, and the names that lead from there to a list.

Dicts on the way are not kept: one that a forward makes anew, with tensors and their graphs, would never be let go.
"""

Found = tuple[int, int, tuple[Any, ...] | None]
"""A list at one moment: its address, its length, and what it held where those are a few numbers.

Tensors are not kept: one that has a graph would keep a step alive for ever, since the graph keeps the step.
"""


class Contents:
    """What the built-in containers, namespaces and dataclasses among some values hold, nested ones included.

    Args:
        values: whatever modules have as attributes.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}  # by address: the container, and a copy of it
        pending = _containers_among(values)
        while pending:
            value = pending.pop()
            if id(value) in self._held:
                continue
            copy: Any = value if isinstance(value, tuple) else _copy(value)
            self._held[id(value)] = value, copy
            inner = copy.values() if isinstance(copy, dict) else copy
            pending += _containers_among(inner)

    def restore(self) -> None:
        """Let all of them hold the very same again; the containers themselves stay."""
        for value, copy in self._held.values():
            if copy is not value and not _holds(value, copy):
                value.clear()
                _fill(value, copy)


class StageLists:
    """The lists, and deques, that some modules have as attributes, or in dicts that are attributes.

    Those are looked for in the first two forwards; one that appears later is not looked after.

    Args:
        modules: those of a stage, or of a model.
    """

    __slots__ = ("_num_looks", "_places", "_tables")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = [vars(module) for module in modules]
        self._places: list[_Place] = []
        self._num_looks = 0

    def before(self) -> Sequence[Found | None]:
        """How the lists are before a first run; empty where there are none."""
        if self._num_looks < _NUM_LOOKS:
            self._num_looks += 1
            self._places = [(table, path) for table in self._tables for path in _paths_in(table, set())]
        return [_found(value) for value in self._now()] if self._places else ()

    def put_back(self, then: Sequence[Found | None]) -> list[Any]:
        """Make the lists as they were then, as far as that is known.

        A list that has grown is cut. One of a few numbers holds what it held. One that is shorter than it was (the
        training loop has cleared it), or another list, is left alone.

        Returns:
            What was taken out of them.
        """
        removed: list[Any] = []
        for value, found in zip(self._now(), then, strict=False):
            if found is None or id(value) != found[0]:
                continue
            _, length, numbers = found
            if numbers is not None:
                if not _holds(value, numbers):
                    removed += value
                    value.clear()
                    value.extend(numbers)
            else:
                while len(value) > length:
                    removed.append(value.pop())
        return removed

    def _now(self) -> list[Any]:
        return [(dict_at(table, path[:-1]) if path[1:] else table).get(path[-1]) for table, path in self._places]

    @contextmanager
    def protected(self, then: Sequence[Found | None]) -> Iterator[None]:
        """Run the block with the lists as they were then, see `put_back`, and leave them as they are now."""
        values = self._now()
        contents = {id(value): (value, list(value)) for value in values if isinstance(value, _LISTS)}
        try:
            self.put_back(then)
            yield
        finally:
            for (table, path), value in zip(self._places, values, strict=True):
                if id(value) in contents:  # the block may have put another list in its place
                    dict_at(table, path[:-1])[path[-1]] = value
            for value, held in contents.values():
                if not _holds(value, held):
                    value.clear()
                    value.extend(held)


def _containers_among(values: Iterable[Any]) -> list[Any]:
    """The containers among some values; of objects that are there only to hold others (settings), their tables."""
    found = []
    for value in values:
        if isinstance(value, (*_CONTAINERS, tuple)):
            found.append(value)
        elif is_settings(value):
            found.append(vars(value))
    return found


def is_settings(value: Any) -> bool:
    """Whether an object is there only to hold others: a namespace, or a dataclass without slots."""
    if isinstance(value, _NAMESPACES):
        return True
    return is_dataclass(value) and not isinstance(value, type | nn.Module) and hasattr(value, "__dict__")


def _paths_in(table: dict[str, Any], seen: set[int]) -> Iterator[tuple[str, ...]]:
    """Where lists stand in a module's attributes, and in dicts among these."""
    seen.add(id(table))
    for name, value in table.items():
        if isinstance(value, _LISTS):
            yield (name,)
        elif isinstance(value, dict) and id(value) not in seen:
            yield from ((name, *path) for path in _paths_in(value, seen))


def _found(value: Any) -> Found | None:
    if not isinstance(value, _LISTS):
        return None
    is_short = len(value) <= _MOST_COPIED and _NUMBERS.issuperset(map(type, value))
    return id(value), len(value), tuple(value) if is_short else None


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _holds(container: Any, entries: Any) -> bool:
    """Whether a container holds the very same objects, in the same order where it has one."""
    if len(container) != len(entries):
        return False
    if isinstance(container, set):
        return {id(entry) for entry in container} == {id(entry) for entry in entries}
    if isinstance(container, dict):
        return all(map(is_, container, entries)) and all(map(is_, container.values(), entries.values()))
    return all(map(is_, container, entries))


def _fill(container: Any, entries: Any) -> None:
    if isinstance(container, dict | set):
        container.update(entries)
    else:
        container.extend(entries)
