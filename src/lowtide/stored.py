"""What is on the device while a schedule is simulated: the bytes of each value and of each category."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.schedule import Value
from lowtide.trace import CATEGORIES

BASE, WEIGHTS, ACTIVATIONS, SAVED, RECOMPUTED, IN_FLIGHT, GRADIENTS = range(len(CATEGORIES))


class Stored(dict[Value, int]):
    """The values on the device and their bytes; for the base and for weight gradients that cannot move, only the bytes.

    A dict, because the simulator looks values up in every operation; it is changed through `put`, `take` and `restart`.

    Example:
        >>> stored = Stored()
        >>> stored.put(("a", 1), 4)
        >>> ("a", 1) in stored, stored.total_bytes
        (True, 4)
    """

    __slots__ = ("_by_category", "_categories", "total_bytes")

    def __init__(self) -> None:
        super().__init__()
        self._categories: dict[Value, int] = {}
        self._by_category = [0] * len(CATEGORIES)
        self.total_bytes = 0

    @property
    def by_category(self) -> tuple[int, ...]:
        """The bytes of each category, in the order of `trace.CATEGORIES`."""
        return tuple(self._by_category)

    def by_category_without(self, value: Value, num_bytes: int) -> tuple[int, ...]:
        """The same when so much of a stored value is gone."""
        found = list(self._by_category)
        found[self._categories[value]] -= num_bytes
        return tuple(found)

    def is_in_flight(self, value: Value) -> bool:
        """Whether a stored value counts as in flight."""
        return self._categories[value] == IN_FLIGHT

    def restart(self, kept_kinds: Iterable[str], base_bytes: int, gradient_bytes: int) -> None:
        """Start over, keeping the values of some kinds, the base and the weight gradients."""
        kinds = set(kept_kinds)
        for value in [value for value in self if value[0] not in kinds]:
            del self[value], self._categories[value]
        self._by_category = [0] * len(CATEGORIES)
        self._by_category[BASE], self._by_category[GRADIENTS] = base_bytes, gradient_bytes
        for value, num_bytes in self.items():
            self._by_category[self._categories[value]] += num_bytes
        self.total_bytes = sum(self._by_category)

    def put(self, value: Value, num_bytes: int, category: int | None = None) -> None:
        """Add a value; None: in the category of its kind."""
        if category is None:
            category = _OF_KIND[value[0]]
        self[value] = num_bytes
        self._categories[value] = category
        self._by_category[category] += num_bytes
        self.total_bytes += num_bytes

    def add_gradients(self, num_bytes: int) -> None:
        """Add weight gradients."""
        self._by_category[GRADIENTS] += num_bytes
        self.total_bytes += num_bytes

    def take(self, value: Value) -> None:
        """Remove a value."""
        num_bytes = self.pop(value)
        self._by_category[self._categories.pop(value)] -= num_bytes
        self.total_bytes -= num_bytes

    def depart(self, value: Value) -> None:
        """Count a value as in flight to the host."""
        self._move(value, IN_FLIGHT)

    def settle(self, value: Value) -> None:
        """Count a value in the category of its kind."""
        self._move(value, _OF_KIND[value[0]])

    def _move(self, value: Value, category: int) -> None:
        num_bytes = self[value]
        self._by_category[self._categories[value]] -= num_bytes
        self._by_category[category] += num_bytes
        self._categories[value] = category


# "ds" is the gradient of a side value.
_OF_KIND = {
    "w": WEIGHTS,
    "opt": WEIGHTS,
    "a": ACTIVATIONS,
    "s": ACTIVATIONS,
    "abar": SAVED,
    "delta": GRADIENTS,
    "g": GRADIENTS,
    "ds": GRADIENTS,
}
