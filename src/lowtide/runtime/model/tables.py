"""What modules have registered: their submodules, parameters or buffers, looked at in each call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Tables(Generic[Entry]):
    """The tables of many modules. Most are empty and stay so; passing over these takes half of the time.

    Args:
        tables: of the modules, in their order; looked at as they are later.

    Example:
        >>> first, second = {"weight": 1}, {}
        >>> tables = Tables([first, second])
        >>> second["bias"] = 2
        >>> tables.entries()
        [1, 2]
    """

    __slots__ = ("_all", "_empty", "_filled")

    def __init__(self, tables: Iterable[dict[str, Entry]]) -> None:
        self._all = list(tables)
        self._sort()

    def _sort(self) -> None:
        self._empty = [table for table in self._all if not table]
        self._filled = [table for table in self._all if table]

    def entries(self) -> list[Entry]:
        """All entries as they are now; what modules share is there several times."""
        if any(self._empty):
            self._sort()
        return list(chain.from_iterable(map(dict.values, self._filled)))
