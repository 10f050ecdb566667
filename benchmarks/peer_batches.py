"""The largest batch that trains within a limit of memory, for each peer and for lowtide: `peers --largest-batch`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from benchmarks import harness
from benchmarks.peer_networks import Network, layers_of
from benchmarks.peer_run import CUT, Batches, Run
from benchmarks.peer_ways import Call, as_it_is, each_layer, in_segments, saved_on_cpu
from benchmarks.refusing import refuse_unless_chosen
from torch import nn

import lowtide
from lowtide.runtime.fitting.largest import Search
from lowtide.runtime.measure import timing as measure_time
from lowtide.runtime.meter import Meter
from lowtide.units import parse_bytes

# The allocator cannot use every byte of a limit: blocks of different sizes leave gaps. A budget counts what is
# allocated, so that this much of the limit is left for the gaps; it is what `fit` leaves by default on a free device.
LEFT_FOR_GAPS = 0.1

NUM_STEPS = 2

# A search asks for the leanest schedules, which bytes alone decide: stages (DenseNet-201 has 229) are timed only as
# often as it takes to have a figure.
BRIEF_TIMING = {"_FEWEST_RUNS": 2, "_MOST_RUNS": 2, "_BUSY_SECONDS": 0.0, "_FEWEST_BUSY_RUNS": 2, "_NUM_LAUNCHES": 2}

SLOWEST_WAY = "save_on_cpu"  # it allocates pinned memory, some seconds each time


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


@contextmanager
def timed_briefly() -> Iterator[None]:
    """Let `fit` and `measure` time each stage as briefly as they can."""
    usual = {name: getattr(measure_time, name) for name in BRIEF_TIMING}
    vars(measure_time).update(BRIEF_TIMING)
    try:
        yield
    finally:
        vars(measure_time).update(usual)


Way = Callable[[nn.Module, dict[str, Any], int], AbstractContextManager[Call]]


def ways_of(run: Run, network: Network) -> dict[str, Way]:
    """Each way as a context that gives what is called instead of the model, given model, batch and limit."""

    @contextmanager
    def planned(model: nn.Module, batch: Any, limit_bytes: int) -> Iterator[Any]:
        options: dict[str, Any] = {"optimizer": harness.without_state(model), "keeps_result": False}
        budget = budget_within(run, limit_bytes)
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


def likely_batch(run: Run, network: Network, limit_bytes: int, known: int) -> int:
    """The batch whose leanest schedule just stays within lowtide's budget: bytes are taken to grow evenly with it.

    A trial of `fit` takes long where it fails, since it runs the leanest schedule to say what it needs.

    Args:
        run: says where.
        network: the network.
        limit_bytes: the limit.
        known: a batch that trains within the limit.
    """
    sizes = [max(1, known // 4), max(2, known // 2)]  # small ones: stages are timed, too, which takes many steps
    least: list[int] = []
    for size in sizes:
        harness.release(run.device)
        model, batch = network.make(str(run.device), size)
        optimizer = harness.without_state(model)
        chain = lowtide.measure(model, batch, optimizer=optimizer, keeps_result=False, moves_activations=False)
        try:
            lowtide.solve(chain, memory_budget=1, strategy="rotor", manage_weights=False)
        except lowtide.InfeasibleBudgetError as error:
            least.append(error.minimum_bytes)
        del model, batch, optimizer
    slope = (least[1] - least[0]) / (sizes[1] - sizes[0])
    return max(known, int(sizes[0] + (budget_within(run, limit_bytes) - least[0]) / max(1.0, slope)))


def budget_within(run: Run, limit_bytes: int) -> int:
    """The budget that lowtide is given within a limit."""
    return int(limit_bytes * (1 - LEFT_FOR_GAPS)) if run.device.type == "cuda" else limit_bytes


def largest_batches(run: Run, networks: Sequence[Network], limits: Sequence[str], only: Sequence[str] = ()) -> None:
    """All networks, limits and ways (or some), in that order, but the slowest way last; written after each."""
    refuse_unless_chosen("--ways", only, [name for network in networks for name in ways_of(run, network)])
    for is_slow, network in itertools.product((False, True), networks):
        for limit in limits:
            start = 4
            for name, way in ways_of(run, network).items():
                known = next(
                    (b for b in run.batches if (b.network, b.way, b.limit) == (network.title, name, limit)), None
                )
                start = max(start, (known and known.batch) or 0)
                if (name == SLOWEST_WAY) != is_slow or not harness.is_chosen(name, only):
                    continue
                if known is not None and known.is_known:
                    continue
                if not run.clock.allows(0):
                    run.skipped.append(f"{network.title}: largest batch, {name}, {limit}")
                    continue
                entry = known or Batches(network.title, name, limit, None, CUT)
                start = max(start, look_for(run, network, way, entry, start))


def scaled_batch(entries: Sequence[Batches], entry: Batches) -> int:
    """What the largest batch within another limit lets expect: in proportion to the limit; 0: none is known."""
    others = [other for other in entries if (other.network, other.way) == (entry.network, entry.way)]
    limit_bytes = parse_bytes(entry.limit)
    return max(((other.batch or 0) * limit_bytes // parse_bytes(other.limit) for other in others), default=0)


def look_for(run: Run, network: Network, way: Way, entry: Batches, start: int) -> int:
    """Search one largest batch and put it among the results, as far as it came; returns it, 0 where it is not known."""
    limit_bytes = parse_bytes(entry.limit)
    label = f"{entry.network}: {entry.way} within {entry.limit}"

    def fits(batch_size: int) -> bool:
        found = trains(run, network, way, limit_bytes, batch_size)
        print(
            f"{run.clock.elapsed_seconds:6.0f} s  {label}: {batch_size} {'trains' if found else 'does not'}", flush=True
        )
        return found

    search = Search(fits, entry.batch or 0, entry.too_large)
    try:
        with timed_briefly():
            if entry.way == "lowtide" and entry.too_large is None:
                start = likely_batch(run, network, limit_bytes, start)
            else:
                start = max(start, scaled_batch(run.batches, entry))
            entry.batch = search.run(start)
        entry.note = ""
    except Exception as error:  # one way must not take the others with it
        entry.note = harness.reason(error)
    finally:  # a run that is cut leaves what it has seen
        entry.batch, entry.too_large = search.low or entry.batch, search.high
        if entry not in run.batches:  # else it was cut before, and is gone on with
            run.batches.append(entry)
        run.save()
        print(f"{run.clock.elapsed_seconds:6.0f} s  {label}: the largest is {entry.batch} {entry.note}", flush=True)
    return entry.batch or 0
