"""A trace on the compute clock: when each operation waits, runs, and waits again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.schedule import COMPUTATIONS, Backward, Forward, Update
from lowtide.trace import Step, Trace

# What compute does: in `Span.phase`, and the names of their colours in the palette. Optimizer steps go with backward.
PHASES = ("forward", "recompute", "backward")


# The bytes of each layer of `lowtide.report.palette.LAYERS`: the categories of the trace, then what is transient.
Layers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the compute clock, in seconds: waiting from `begin`, running from `start`, waiting
    until it can free a value from `end`, done at `finish`. A transfer does not run: it only waits.
    """

    step: Step
    begin: float
    start: float
    end: float
    finish: float
    before: Layers
    """What is stored before it."""

    @property
    def phase(self) -> str | None:
        """One of `PHASES`; None for what does not compute."""
        operation = self.step.operation
        if isinstance(operation, Backward | Update):
            return "backward"
        if isinstance(operation, Forward):
            return "recompute" if self.step.repeated else "forward"
        return None

    @property
    def during(self) -> Layers:
        """What is on the device at the operation's peak."""
        return (*self.step.peak_by_category, self.step.transient_bytes)

    @property
    def pieces(self) -> Iterator[tuple[float, float, Layers]]:
        """The bytes on the device over time: (from, to, layers)."""
        if self.phase is None:
            # What is waited for is still in flight: it changes only when the wait is over.
            yield self.begin, self.finish, self.before if self.finish > self.begin else self.during
            return
        if self.start > self.begin:
            yield self.begin, self.start, self.before
        yield self.start, self.end, self.during
        if self.finish > self.end:
            yield self.end, self.finish, (*self.step.peak_by_category, 0)


def spans(trace: Trace) -> list[Span]:
    """Every operation of a trace on the compute clock, in order."""
    found: list[Span] = []
    clock, before = 0.0, (*trace.start_by_category, 0)
    rounding = 1e-12 * trace.seconds  # a wait that is lost in rounding is none
    for step in trace.steps:
        if isinstance(step.operation, COMPUTATIONS):
            start, end = step.start_seconds, step.end_seconds
            if start - clock <= rounding:
                start = clock
            after = step.idle_seconds - (start - clock)
        else:
            start = end = clock
            after = step.idle_seconds
        finish = end + after if after > rounding else end
        found.append(Span(step, clock, start, end, finish, before))
        clock, before = finish, (*step.stored_by_category, 0)
    return found
