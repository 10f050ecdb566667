"""What the simulator saw: every operation and every copy, with its times and bytes; figures need nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.schedule import COMPUTATIONS, Operation, Update, Value
from lowtide.units import format_bytes, format_seconds

# What the stored bytes consist of, in the order of `Step.stored_by_category`. "in flight" are values between an offload
# and their release, or between a prefetch and their first use; "recomputed" is abar made by a repeated forward.
CATEGORIES = ("base", "weights", "activations", "saved", "recomputed", "in flight", "gradients")


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy between device and host, on the clock of its channel."""

    index: int
    """The operation that queued it."""
    direction: str
    """`"to host"` or `"to device"`."""
    value: Value
    num_bytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """What one operation did. For a computation, start to end is the computation itself, without waiting."""

    index: int
    operation: Operation
    start_seconds: float
    end_seconds: float
    idle_seconds: float
    """How long compute waited because of this operation, before it or (to free a value) after it."""
    waits_for: int | None
    """The operation whose copy it waited for, where it waited."""
    stored_before_bytes: int
    peak_bytes: int
    stored_after_bytes: int
    stored_by_category: tuple[int, ...]
    """The stored bytes afterwards, in the order of `CATEGORIES`."""
    peak_by_category: tuple[int, ...]
    """What is stored at the peak, in the same order; the rest of `peak_bytes` is transient."""
    repeated: bool
    """Whether this is a forward of a stage that has run before."""

    @property
    def transient_bytes(self) -> int:
        """What the operation uses while it runs, beyond its inputs and outputs."""
        return self.peak_bytes - sum(self.peak_by_category)


@dataclass(frozen=True, slots=True)
class Trace:
    """The time and memory of a schedule: totals, and every operation and copy.

    For a schedule that manages weights, `seconds` is the steady period and the steps are those of the last simulated
    round, with times from its beginning; a copy that crossed the seam may start before 0.
    """

    seconds: float
    peak_bytes: int
    idle_seconds: float
    steps: tuple[Step, ...]
    copies: tuple[Copy, ...]
    start_by_category: tuple[int, ...] = ()
    """What is stored before the first operation, in the order of `CATEGORIES`."""

    def __str__(self) -> str:
        idle = f" ({format_seconds(self.idle_seconds)} idle)" if self.idle_seconds else ""
        took = f"{format_seconds(self.seconds)} a step{idle}"
        return f"{len(self.steps)} operations, {took}, peak {format_bytes(self.peak_bytes)}"

    @property
    def compute_seconds(self) -> float:
        """The time of all computations."""
        return math.fsum(
            step.end_seconds - step.start_seconds for step in self.steps if isinstance(step.operation, COMPUTATIONS)
        )

    @property
    def update_seconds(self) -> float:
        """The time of the optimizer steps among them."""
        return math.fsum(
            step.end_seconds - step.start_seconds for step in self.steps if isinstance(step.operation, Update)
        )

    @property
    def peak_index(self) -> int:
        """The first operation that reaches the peak."""
        return max(range(len(self.steps)), key=lambda index: self.steps[index].peak_bytes, default=0)

    @property
    def num_recomputed(self) -> int:
        """How many forwards are recomputations."""
        return sum(step.repeated for step in self.steps)

    @property
    def moved_bytes(self) -> int:
        """All bytes copied, both ways."""
        return sum(copy.num_bytes for copy in self.copies)
