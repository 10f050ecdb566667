"""A trace on the compute clock: when each operation waits, runs, and waits again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.schedule import Backward, Forward
from lowtide.trace import Step, Trace

# What compute does: in `Span.phase`, and the names of their colours in the palette.
PHASES = ("forward", "recompute", "backward")


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the compute clock, in seconds: waiting from `begin`, running from `start`, waiting to let a
    value go from `end`, done at `finish`. A transfer does not run: it only waits.
    """

    step: Step
    begin: float
    start: float
    end: float
    finish: float

    @property
    def phase(self) -> str | None:
        """One of `PHASES`; None for what does not compute."""
        operation = self.step.operation
        if isinstance(operation, Backward):
            return "backward"
        if isinstance(operation, Forward):
            return "recompute" if self.step.repeated else "forward"
        return None

    @property
    def levels(self) -> Iterator[tuple[float, float, int]]:
        """The bytes on the device over time: pieces of (from, to, bytes)."""
        held = sum(self.step.peak_by_category)
        if self.phase is None:
            yield self.begin, self.finish, self.step.peak_bytes
            return
        if self.start > self.begin:
            yield self.begin, self.start, self.step.stored_before_bytes
        yield self.start, self.end, self.step.peak_bytes
        if self.finish > self.end:
            yield self.end, self.finish, held


def spans(trace: Trace) -> list[Span]:
    """Every operation of a trace on the compute clock, in order."""
    found: list[Span] = []
    clock = 0.0
    for step in trace.steps:
        if isinstance(step.operation, Forward | Backward):
            start, end = step.start_seconds, step.end_seconds
            after = max(0.0, step.idle_seconds - (start - clock))
        else:
            start = end = clock
            after = step.idle_seconds
        # A wait that is lost in rounding is none.
        if after < 1e-12 * trace.seconds:
            after = 0.0
        found.append(Span(step, min(clock, start), start, end, end + after))
        clock = end + after
    return found
