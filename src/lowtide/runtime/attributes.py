"""Numbers that modules keep as attributes: counters of calls, flags, factors.

A stage that runs again must find them as the first run found them, whether its own code has changed them since or
somebody else has (an adapter's scale between two forwards), and leave them as they are by then: a counter that counted
repeated runs, too, would reach the end of a warm-up too early.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lowtide.runtime.exchange import Entry

_PLAIN = frozenset({type(None), bool, int, float, complex, str})
_MODE = "training"  # a switch between forward and backward is refused elsewhere


class _Other:
    """Stands for a value that is not plain: a tensor is not looked after here."""


class StageAttributes:
    """The plain attributes of one stage's modules."""

    __slots__ = ("_places", "_tables")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = [vars(module) for module in modules]
        self._places: list[tuple[dict[str, Any], str]] | None = None

    def before(self) -> list[Any]:
        """The values before a first run; those that are plain when it is first asked are looked at from then on."""
        if self._places is None:
            self._places = [
                (table, name)
                for table in self._tables
                for name, value in table.items()
                if type(value) in _PLAIN and name != _MODE
            ]
        return self._now()

    def _now(self) -> list[Any]:
        values = [table.get(name) for table, name in self._places or ()]
        return [value if type(value) in _PLAIN else _Other for value in values]

    def changed_since(self, values: list[Any]) -> list[Entry]:
        """What is to stand in the places of those that are others than they were."""
        now = self._now()
        if now == values:
            return []
        return [
            (table, name, then)
            for (table, name), then, value in zip(self._places or (), values, now, strict=True)
            if value is not _Other and then is not _Other and value != then
        ]
