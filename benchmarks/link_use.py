"""What a device and its link do in a step: how long kernels and copies run, at what rate, and where nothing computes.

    with Profile() as profile:
        step()
    print(profile.report())

Copies are told apart by direction, and by whether the other direction is busy at the same time.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

# Shorter times without a kernel are those between two launches.
_SHORTEST_WAIT_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel or a copy: when it ran, in seconds, and the bytes that it copied."""

    name: str
    begin: float
    end: float
    num_bytes: int = 0


def merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times in which at least one of some spans runs."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda each: each.begin):
        if found and span.begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.begin, span.end))
    return found


def seconds_of(times: Iterable[tuple[float, float]]) -> float:
    """How long some times are together."""
    return sum(end - begin for begin, end in times)


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """The seconds that two lists of sorted times have in common."""
    total, at = 0.0, 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        for left, right in other[at:]:
            if left >= end:
                break
            total += max(0.0, min(end, right) - max(begin, left))
    return total


class Profile:
    """Records what a CUDA device does inside of a `with` block."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._spans: list[Span] = []
        self._copies: dict[str, list[Span]] = {"HtoD": [], "DtoH": []}

    def __enter__(self) -> Profile:
        torch.cuda.synchronize()
        self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.cuda.synchronize()
        self._profiler.__exit__(kind, error, traceback)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            self.read(json.loads(path.read_text())["traceEvents"])

    def read(self, events: Iterable[dict[str, Any]]) -> None:
        """Take the events of a trace in Chrome's format."""
        for event in events:
            kind, name = event.get("cat", ""), str(event.get("name", ""))
            if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            begin = float(event["ts"]) * 1e-6
            span = Span(name, begin, begin + float(event["dur"]) * 1e-6, int(event.get("args", {}).get("bytes", 0)))
            way = next((way for way in self._copies if kind == "gpu_memcpy" and way in name), None)
            if way is None:
                self._spans.append(span)
            else:
                self._copies[way].append(span)

    def report(self) -> str:
        """The figures, a line each."""
        kernels = merged(self._spans)
        everything = [*self._spans, *(span for spans in self._copies.values() for span in spans)]
        if not everything:
            return "  nothing ran on the device"
        first, last = min(span.begin for span in everything), max(span.end for span in everything)
        lines = [f"  device {last - first:.3f} s, kernels {seconds_of(kernels):.3f} s"]
        ways = {way: merged(spans) for way, spans in self._copies.items()}
        both = overlap(ways["HtoD"], ways["DtoH"])
        for way, spans in self._copies.items():
            busy, moved = seconds_of(ways[way]), sum(span.num_bytes for span in spans)
            rate = moved / busy / 1e9 if busy else 0.0
            beside = overlap(ways[way], kernels)
            lines.append(
                f"  {way} {moved / 1e9:.2f} GB in {busy:.3f} s, {rate:.1f} GB/s, {len(spans)} copies; "
                f"{beside:.3f} s of it beside kernels, {both:.3f} s beside the other direction"
            )
        return "\n".join([*lines, *self._waits(kernels, ways, first), *self._longest()])

    def _waits(
        self, kernels: list[tuple[float, float]], ways: dict[str, list[tuple[float, float]]], first: float
    ) -> list[str]:
        gaps = [(one[1], other[0]) for one, other in itertools.pairwise(kernels)]
        long = [gap for gap in gaps if gap[1] - gap[0] >= _SHORTEST_WAIT_SECONDS]
        short = seconds_of(gaps) - seconds_of(long)
        lines = [f"  no kernel for {seconds_of(long):.3f} s in {len(long)} long waits, {short:.3f} s in short ones"]
        for gap in sorted(sorted(long, key=lambda each: each[0] - each[1])[:12]):
            shares = ", ".join(f"{way} {overlap([gap], times) * 1e3:.0f}" for way, times in ways.items())
            lines.append(f"    at {gap[0] - first:.3f} s for {(gap[1] - gap[0]) * 1e3:.0f} ms ({shares} ms busy)")
        return lines

    def _longest(self) -> list[str]:
        totals: dict[str, tuple[float, int]] = {}
        for span in self._spans:
            seconds, number = totals.get(span.name[:70], (0.0, 0))
            totals[span.name[:70]] = (seconds + span.end - span.begin, number + 1)
        ordered = sorted(totals.items(), key=lambda entry: -entry[1][0])[:10]
        return [f"    {seconds:.3f} s in {number} of {name}" for name, (seconds, number) in ordered]
