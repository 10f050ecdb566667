"""Entries of modules' tables that are others while a stage runs again: parameters, statistics, plain attributes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Entry = tuple[dict[str, Any], str, Any]
"""A module's parameters, buffers or attributes, a name among them, and a value; `ABSENT`: there is no such name."""


class ABSENT:
    """Stands for the value of a name that is not there."""


def dict_at(table: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The dict to which names lead from a table; where there is none any more, one that nobody reads."""
    for name in names:
        inner = table.get(name)
        if not isinstance(inner, dict):
            return {}
        table = inner
    return table


def put(entry: Entry) -> None:
    """Put a value in its place."""
    table, name, value = entry
    if value is ABSENT:
        # Not the table's own method: a result of transformers', which a module may keep, refuses it.
        (OrderedDict if isinstance(table, OrderedDict) else dict).pop(table, name, None)
    else:
        table[name] = value


def exchanged(entries: Sequence[Entry]) -> AbstractContextManager[None]:
    """Run the block with these values in their places, and put back what stands there now."""
    return _exchanged(entries) if entries else nullcontext()


def registered_again(entries: Iterable[Entry]) -> AbstractContextManager[None]:
    """Run the block with the parameters that a stage's first run found, which may be gone by backward.

    `functional_call` has others stand in for the time of a call. FSDP exchanges a shard for the whole and back in hooks
    of its own, which run in repeated forwards, too: these are left alone.
    """
    others = []
    for table, name, then in entries:
        now = table.get(name)
        if now is not then and not _is_shard(then) and not _is_shard(now):
            others.append((table, name, then))
    return exchanged(others)


@contextmanager
def _exchanged(entries: Sequence[Entry]) -> Iterator[None]:
    present = [(table, name, table.get(name, ABSENT)) for table, name, _ in entries]
    try:
        for entry in entries:
            put(entry)
        yield
    finally:
        for entry in present:
            put(entry)


def _is_shard(parameter: Any) -> bool:
    return type(parameter).__name__ == "DTensor"
