"""The largest batch that trains within a limit of memory, for each peer and for lowtide: `peers --largest-batch`."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from benchmarks import harness
from benchmarks.peer_networks import Network, layers_of
from benchmarks.peer_ways import Call, as_it_is, each_layer, in_segments, saved_on_cpu
from torch import nn

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.units import parse_bytes

if TYPE_CHECKING:
    from benchmarks.peers import Run

# The allocator cannot use every byte of a limit: blocks of different sizes leave gaps. A budget counts what is
# allocated, so that this much of the limit is left for the gaps; it is what `fit` leaves by default on a free device.
LEFT_FOR_GAPS = 0.1

# Batches are searched to within one in so many.
RESOLUTION = 16

NUM_STEPS = 2

SLOWEST_WAY = "save_on_cpu"  # it allocates pinned memory, some seconds each time


@dataclass
class Batches:
    """The largest batch of one way within one limit."""

    network: str
    way: str
    limit: str
    batch: int | None
    """The largest that was seen to train; 0: not even one; None: not known."""
    note: str = ""


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest whole number for which `fits` holds, to within one in `RESOLUTION`; 0 where it does for none.

    Args:
        fits: holds up to some number and not beyond it.
        start: the first to try.
    """
    low, high, tried = 0, None, max(1, start)
    while high is None or high - low > max(1, low // RESOLUTION):
        if fits(tried):
            low = tried
        else:
            high = tried
        tried = 2 * low if high is None else max(1, (low + high) // 2)
        if high is not None and tried == low:
            break
    return low


@contextmanager
def limited(device: torch.device, limit_bytes: int) -> Iterator[Callable[[Callable[[], None]], bool]]:
    """Yields what says whether steps stay within a limit: the allocator's on CUDA, counted bytes on the CPU."""
    if device.type != "cuda":

        def counted(work: Callable[[], None]) -> bool:
            with Meter(device) as meter:
                work()
            return meter.peak_bytes <= limit_bytes

        yield counted
        return

    def allowed(work: Callable[[], None]) -> bool:
        try:
            work()
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            return False
        return True

    total = torch.cuda.get_device_properties(device).total_memory
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), index)
    try:
        yield allowed
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


Way = Callable[[nn.Module, dict[str, Any], int], AbstractContextManager[Call]]


def ways_of(run: Run, network: Network) -> dict[str, Way]:
    """Each way as a context that gives what is called instead of the model, given model, batch and limit."""

    @contextmanager
    def planned(model: nn.Module, batch: Any, limit_bytes: int) -> Iterator[Any]:
        budget = int(limit_bytes * (1 - LEFT_FOR_GAPS)) if run.device.type == "cuda" else limit_bytes
        options: dict[str, Any] = {"optimizer": harness.without_state(model), "keeps_result": False}
        with lowtide.fit(model, batch, memory_budget=budget, strategy="rotor", bandwidth=0, **options):
            yield model

    def segments(model: nn.Module, _: Any, __: int) -> AbstractContextManager[Call]:
        assert network.trunk is not None
        return in_segments(model, network.trunk, round(len(layers_of(model, network.trunk)) ** 0.5))

    ways: dict[str, Way] = {
        "plain, eager": lambda model, _, __: as_it_is(model),
        "every layer checkpointed": lambda model, _, __: each_layer(model, network.trunk),
    }
    if network.trunk is not None:
        ways["checkpoint_sequential"] = segments
    return {**ways, "lowtide": planned, SLOWEST_WAY: lambda model, _, __: saved_on_cpu(model, run.device)}


def trains(run: Run, network: Network, way: Way, limit_bytes: int, batch_size: int) -> bool:
    """Whether some steps of a batch stay within a limit."""
    harness.release(run.device)
    if run.device.type != "cuda":  # bytes are counted, those of others too
        with Meter(run.device) as meter:
            limit_bytes += meter.start_bytes
    with limited(run.device, limit_bytes) as stays_within:

        def work() -> None:
            model, batch = network.make(str(run.device), batch_size)
            with way(model, batch, limit_bytes) as call:
                step = harness.training_step(call, model, batch)
                for _ in range(NUM_STEPS):
                    step()

        try:
            return stays_within(work)
        except lowtide.InfeasibleBudgetError:
            return False


def largest_batches(run: Run, networks: Sequence[Network], limits: Sequence[str], only: Sequence[str] = ()) -> None:
    """All networks, limits and ways (or some), in that order, but the slowest way last; written after each."""
    for is_slow, network in itertools.product((False, True), networks):
        for limit in limits:
            start = 4
            for name, way in ways_of(run, network).items():
                if (name == SLOWEST_WAY) != is_slow or not harness.is_chosen(name, only):
                    continue
                known = next(
                    (b for b in run.batches if (b.network, b.way, b.limit) == (network.title, name, limit)), None
                )
                if known is not None:
                    start = max(start, known.batch or 0)
                    continue
                if not run.clock.allows(0):
                    run.skipped.append(f"{network.title}: largest batch, {name}, {limit}")
                    continue
                entry = Batches(network.title, name, limit, None)
                fits = functools.partial(trains, run, network, way, parse_bytes(limit))
                try:
                    entry.batch = largest(fits, start)
                    start = max(start, entry.batch)  # lowtide, which takes longest to try, begins with the best
                except Exception as error:  # one way must not take the others with it
                    entry.note = harness.reason(error)
                run.batches.append(entry)
                run.save()
                print(f"{network.title}: {name} within {limit}: {entry.batch} {entry.note}", flush=True)


def batch_lines(entries: Sequence[Batches]) -> list[str]:
    """The second table: a row a way, a column a limit, for each network."""
    lines: list[str] = []
    for network in dict.fromkeys(entry.network for entry in entries):
        own = {(entry.way, entry.limit): entry for entry in entries if entry.network == network}
        limits = list(dict.fromkeys(limit for _, limit in own))
        ways = list(dict.fromkeys(way for way, _ in own))

        def cell(way: str, limit: str, own: dict[tuple[str, str], Batches] = own) -> str:
            entry = own.get((way, limit))
            if entry is None or entry.batch is None:
                return "–" if entry is None else entry.note
            return str(entry.batch) if entry.batch else "none"

        rows = [[way, *(cell(way, limit) for limit in limits)] for way in ways]
        lines += [f"## Largest batch: {_without_batch(network)}", "", *harness.table(["way", *limits], rows), ""]
    return lines


def _without_batch(title: str) -> str:
    """A network's title without the batch that its other table is of."""
    return re.sub(r", batch \d+(?! x)", "", re.sub(r"batch \d+ x ", "", title))
