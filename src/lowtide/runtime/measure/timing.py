"""Times computations: on the CPU with the wall clock, on CUDA with events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lowtide.runtime.measure.counting import Counter, current_counter

# How often a computation is timed: at least, and, as long as it has not taken `_ENOUGH_SECONDS` together, at most. On
# CUDA, where runs in a row count, no more than the fewest come before them: a stage is timed three times over (forward,
# forward until the last saved tensor, backward with a forward before each), and a network has up to hundreds of them.
_FEWEST_RUNS = 3
_MOST_RUNS = 9
_ENOUGH_SECONDS = 0.2

# `torch.cuda._sleep` counts cycles of the device; 2 GHz is above the clock of every current one, so that the sleep is
# never shorter than asked.
_CYCLES_PER_SECOND = 2_000_000_000

# How far the launches must be ahead of the device for its own time to be seen.
_LEAD = 1.5

# Launching matters to a step's time where it takes more than this share of the time on the device; launches vary from
# run to run with whatever else the host does, so the least of several counts.
_MATTERS = 0.25
_NUM_LAUNCHES = 8

# Under lasting load a device at its limit of power lowers its clock: on an H200 the blocks of a GPT in bf16 took 7 %
# longer within steps (1700 MHz, 690 W) than after a rest. So runs follow each other without a pause until they have
# taken this long (after 0.1 s they were within 2 % of a step's there), and only the second half of them counts.
_BUSY_SECONDS = 0.1
_FEWEST_BUSY_RUNS = 4
_MOST_BUSY_RUNS = 40

_ROUNDS = 3  # of a step in `paced`: from the second on the lead of the launching thread has settled


@dataclass(frozen=True, slots=True)
class Timing:
    """One computation's time: the median of several runs, and how far they lie apart.

    Args:
        seconds: on the device.
        spread_seconds: the slowest run less the fastest.
        launch_seconds: how long the calling thread takes to hand the work to the device; 0 on the CPU.
        num_runs: how often it was timed.
    """

    seconds: float
    spread_seconds: float = 0.0
    launch_seconds: float = 0.0
    num_runs: int = 0

    def without_overhead(self, overhead: Timing) -> Timing:
        """The same, without the launch time that is due to running it separately; never below 0."""
        return replace(self, launch_seconds=max(0.0, self.launch_seconds - overhead.launch_seconds))


NOTHING = Timing(0.0)


def timed(computation: Callable[[], object], prepare: Callable[[], object] | None, device: torch.device) -> Timing:
    """Time a computation that has run before.

    Args:
        computation: what is timed.
        prepare: what must be done before each run, outside of the time; None: nothing.
        device: where it runs.
    """
    if device.type == "cuda":
        return _timed_on_cuda(computation, prepare)
    counter = current_counter() if device.type == "meta" else None
    if counter is not None:
        return _counted(computation, prepare, counter)
    seconds: list[float] = []
    while _asks_for_more(seconds):
        if prepare is not None:
            prepare()
        seconds.append(_run_on_cpu(computation))
    return Timing(statistics.median(seconds), max(seconds) - min(seconds), 0.0, len(seconds))


def _counted(computation: Callable[[], object], prepare: Callable[[], object] | None, counter: Counter) -> Timing:
    """What a computation would take on another card."""
    if prepare is not None:
        prepare()
    before = counter.seconds
    computation()
    return Timing(counter.seconds - before, num_runs=1)


def _timed_on_cuda(computation: Callable[[], object], prepare: Callable[[], object] | None) -> Timing:
    """Some runs after a rest, to know about how long it takes; then those that count, in a row where that can be."""
    seconds: list[float] = []
    launches: list[float] = []

    def run_after_a_rest() -> None:
        if prepare is not None:
            prepare()
        on_device, launch = _run_on_cuda(computation, min(launches, default=0.0))
        launches.append(launch)
        if len(launches) > 1:  # the first had no lead
            seconds.append(on_device)

    for _ in range(_FEWEST_RUNS):
        run_after_a_rest()
    rested, launch = statistics.median(seconds), min(launches)
    if launch > _MATTERS * rested:
        launch = min(launch, _launch_within_a_step(computation, prepare))
    in_a_row = _busy_runs(computation, prepare, rested, launch) if launch < rested else []
    while not in_a_row and _asks_for_more(seconds):
        run_after_a_rest()
    counted = in_a_row or seconds
    return Timing(statistics.median(counted), max(counted) - min(counted), min(launch, *launches), len(counted))


def _asks_for_more(seconds: Sequence[float]) -> bool:
    """Whether runs that took so long are too few to be counted."""
    return len(seconds) < _FEWEST_RUNS or (sum(seconds) < _ENOUGH_SECONDS and len(seconds) < _MOST_RUNS)


def _run_on_cpu(computation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    kept = computation()
    seconds = time.perf_counter() - begin
    del kept  # letting it go is not part of the computation
    return seconds


def _run_on_cuda(computation: Callable[[], object], launch_seconds: float) -> tuple[float, float]:
    """The time on the device with the launches ahead of it, as they are within a step; and that of the launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if launch_seconds:
        torch.cuda._sleep(int(_LEAD * launch_seconds * _CYCLES_PER_SECOND))
    start.record()
    begin = time.perf_counter()
    kept = computation()
    launch = time.perf_counter() - begin
    end.record()
    torch.cuda.synchronize()
    del kept
    return start.elapsed_time(end) / 1e3, launch


def _busy_runs(
    computation: Callable[[], object], prepare: Callable[[], object] | None, seconds: float, launch_seconds: float
) -> list[float]:
    """The times on the device of runs that follow each other; none where the launches did not stay ahead of it."""
    num_runs = min(max(_FEWEST_BUSY_RUNS, int(_BUSY_SECONDS / max(seconds, 1e-6))), _MOST_BUSY_RUNS)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_runs)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2 * _LEAD * launch_seconds * _CYCLES_PER_SECOND))
    for start, end in events:
        if prepare is not None:
            prepare()
        start.record()
        kept = computation()
        end.record()
        del kept
    stayed_ahead = not events[-2][1].query()  # the device has not done the last but one when the last is launched
    torch.cuda.synchronize()
    counted = events[num_runs // 2 :]
    return [start.elapsed_time(end) / 1e3 for start, end in counted] if stayed_ahead else []


def _launch_within_a_step(computation: Callable[[], object], prepare: Callable[[], object] | None) -> float:
    """How long the launches take among others.

    Stages timed one by one, each after a wait for the device, were seen to launch in 1.5 to 1.8 times what a plain step
    takes for all of them, presumably because the thread has slept and its caches are cold. Timed so, the stages of
    ResNet-101 at 224 px, bound by launching, come to 6 and 10 % less than a step, and not to 60 % more.
    """
    launches: list[float] = []
    torch.cuda.synchronize()
    for _ in range(_NUM_LAUNCHES):
        if prepare is not None:
            prepare()
        begin = time.perf_counter()
        kept = computation()
        launches.append(time.perf_counter() - begin)
        del kept
    torch.cuda.synchronize()
    return min(launches)


def paced(timings: Sequence[Timing]) -> list[float]:
    """The seconds that each computation adds to a step that runs them in this order, again and again.

    The device can begin a computation only when it has been launched. Where launching takes longer than computing
    (small kernels), the step goes at the pace of the launching thread; its lead from longer computations is used up
    first.
    """
    launched, computed = 0.0, 0.0
    added: list[float] = []
    for _ in range(_ROUNDS):
        added = []
        for timing in timings:
            begin = launched
            launched += timing.launch_seconds
            end = max(max(computed, begin) + timing.seconds, launched)
            added.append(end - computed)
            computed = end
    return added
