"""What is on the device while a schedule is simulated: the bytes of each value and of each category."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lowtide.schedule import Value
from lowtide.trace import CATEGORIES

BASE, WEIGHTS, ACTIVATIONS, SAVED, RECOMPUTED, IN_FLIGHT, GRADIENTS = range(len(CATEGORIES))


class Stored:
    """The values on the device; for the base and for weight gradients that cannot move, only the bytes.

    Example:
        >>> stored = Stored()
        >>> stored.put(("a", 1), 4)
        >>> ("a", 1) in stored, stored.total_bytes
        (True, 4)
    """

    __slots__ = ("_by_category", "_bytes", "_categories", "total_bytes")

    def __init__(self) -> None:
        self._bytes: dict[Value, int] = {}
        self._categories: dict[Value, int] = {}
        self._by_category = [0] * len(CATEGORIES)
        self.total_bytes = 0

    def __contains__(self, value: object) -> bool:
        return value in self._bytes

    def __iter__(self) -> Iterator[Value]:
        return iter(self._bytes)

    @property
    def by_category(self) -> tuple[int, ...]:
        """The bytes of each category, in the order of `trace.CATEGORIES`."""
        return tuple(self._by_category)

    def by_category_without(self, value: Value, num_bytes: int) -> tuple[int, ...]:
        """The same when so much of a stored value is gone."""
        found = list(self._by_category)
        found[self._categories[value]] -= num_bytes
        return tuple(found)

    def bytes_of(self, value: Value) -> int:
        """The bytes of a stored value."""
        return self._bytes[value]

    def is_in_flight(self, value: Value) -> bool:
        """Whether a stored value counts as in flight."""
        return self._categories[value] == IN_FLIGHT

    def restart(self, kept_kinds: Iterable[str], base_bytes: int, gradient_bytes: int) -> None:
        """Start over, keeping the values of some kinds, the base and the weight gradients."""
        kinds = set(kept_kinds)
        self._bytes = {value: num_bytes for value, num_bytes in self._bytes.items() if value[0] in kinds}
        self._categories = {value: self._categories[value] for value in self._bytes}
        self._by_category = [0] * len(CATEGORIES)
        self._by_category[BASE], self._by_category[GRADIENTS] = base_bytes, gradient_bytes
        for value, num_bytes in self._bytes.items():
            self._by_category[self._categories[value]] += num_bytes
        self.total_bytes = sum(self._by_category)

    def put(self, value: Value, num_bytes: int, category: int | None = None) -> None:
        """Add a value; None: in the category of its kind."""
        if category is None:
            category = _own_category(value)
        self._bytes[value] = num_bytes
        self._categories[value] = category
        self._by_category[category] += num_bytes
        self.total_bytes += num_bytes

    def add_gradients(self, num_bytes: int) -> None:
        """Add weight gradients."""
        self._by_category[GRADIENTS] += num_bytes
        self.total_bytes += num_bytes

    def take(self, value: Value) -> None:
        """Remove a value."""
        num_bytes = self._bytes.pop(value)
        self._by_category[self._categories.pop(value)] -= num_bytes
        self.total_bytes -= num_bytes

    def depart(self, value: Value) -> None:
        """Count a value as in flight to the host."""
        self._move(value, IN_FLIGHT)

    def settle(self, value: Value) -> None:
        """Count a value in the category of its kind."""
        self._move(value, _own_category(value))

    def _move(self, value: Value, category: int) -> None:
        num_bytes = self._bytes[value]
        self._by_category[self._categories[value]] -= num_bytes
        self._by_category[category] += num_bytes
        self._categories[value] = category


# "ds" is the gradient of a side value.
_OF_KIND = {"a": ACTIVATIONS, "abar": SAVED, "s": ACTIVATIONS, "delta": GRADIENTS, "g": GRADIENTS, "ds": GRADIENTS}


def _own_category(value: Value) -> int:
    return _OF_KIND.get(value[0], WEIGHTS)
