"""Memory in slots: sizes round up, budgets round down. This is the only place that rounds.

Tables over memory have one column a slot. A value takes whole slots, so what a table promises fits in real bytes; what
rounding gives away is won back where a schedule is read off, because reading off counts bytes.

    >>> slots = Slots.for_budget(1000, 300)
    >>> slots.unit_bytes, slots.num_slots, slots.up(5), slots.down(11)
    (4, 250, 2, 2)
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.extending import register_jitable

# What the paper uses for all its experiments (rotor §5.2).
DEFAULT_NUM_SLOTS = 500

# A chain so short that more slots take no time is given more, up to so many; beyond them nothing is gained.
_MOST_DEFAULT_SLOTS = 4000
_EFFORTLESS_STEPS = 2**28  # steps of the dynamic program over nested schedules, about a tenth of a second


def default_num_slots(num_stages: int) -> int:
    """The default number of slots for a chain: 500, and more for a short one.

    >>> default_num_slots(1000), default_num_slots(100), default_num_slots(10)
    (500, 1610, 4000)
    """
    effortless = 6 * _EFFORTLESS_STEPS // num_stages**3
    return max(DEFAULT_NUM_SLOTS, min(effortless, _MOST_DEFAULT_SLOTS))


@register_jitable
def rounded_up(num_bytes: int, unit_bytes: int) -> int:
    """The slots that a value of `num_bytes` takes; also callable from compiled code, and on arrays."""
    return (num_bytes + unit_bytes - 1) // unit_bytes


@register_jitable
def rounded_down(num_bytes: int, unit_bytes: int) -> int:
    """The slots that a budget of `num_bytes` has; also callable from compiled code, and on arrays."""
    return num_bytes // unit_bytes


@dataclass(frozen=True, slots=True)
class Slots:
    """A budget cut into `num_slots` slots of `unit_bytes` each."""

    unit_bytes: int
    num_slots: int

    @classmethod
    def for_budget(cls, budget_bytes: int, most_slots: int) -> Slots:
        """At most `most_slots` slots; a budget of no more bytes than that is exact, one byte a slot."""
        unit_bytes = max(1, rounded_up(budget_bytes, most_slots))
        return cls(unit_bytes, rounded_down(budget_bytes, unit_bytes))

    def up(self, num_bytes: int) -> int:
        """The slots that a value takes."""
        return rounded_up(num_bytes, self.unit_bytes)

    def down(self, num_bytes: int) -> int:
        """The slots that a budget has."""
        return rounded_down(num_bytes, self.unit_bytes)
