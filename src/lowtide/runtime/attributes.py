"""Numbers that modules keep as attributes and change in their forward: counters of calls, flags, the last factor used.

A stage that runs again must find them as the first run found them, and leave them as they are by then: a counter that
counted repeated runs, too, would reach the end of a warm-up too early. Which attributes a stage changes is seen in its
first forward; from then on only those are noted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lowtide.runtime.exchange import Entry

_PLAIN = frozenset({type(None), bool, int, float, complex, str})
_MODE = "training"  # a switch between forward and backward is refused elsewhere


class StageAttributes:
    """The plain attributes that one stage's modules may change."""

    __slots__ = ("_known", "_tables")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = [vars(module) for module in modules]
        self._known: list[tuple[dict[str, Any], str]] | None = None  # those that change; None: not seen yet

    def before(self) -> list[Entry]:
        """Note the attributes before a first run."""
        known = self._known
        if known is None:
            known = [
                (table, name)
                for table in self._tables
                for name, value in table.items()
                if type(value) in _PLAIN and name != _MODE
            ]
        return [(table, name, table[name]) for table, name in known if type(table.get(name)) in _PLAIN]

    def after(self, notes: list[Entry]) -> list[Entry]:
        """Those that the first run changed: what a repeated run needs."""
        if self._known is None:
            notes = [note for note in notes if _has_changed(note)]
            self._known = [(table, name) for table, name, _ in notes]
        return notes


def _has_changed(note: Entry) -> bool:
    """Whether an attribute has become another plain value; what has become a tensor is not looked after here."""
    table, name, value = note
    now = table.get(name)
    return type(now) in _PLAIN and now != value
