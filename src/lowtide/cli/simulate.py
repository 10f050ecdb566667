"""`lowtide simulate`: what a schedule uses on a chain."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lowtide.chain import Chain
from lowtide.cli.given import simulated
from lowtide.cli.options import ChainFile, HalfDuplex, Json, bandwidth_option
from lowtide.cli.output import moved, print_json, print_pairs, step_time
from lowtide.schedule import Schedule
from lowtide.trace import Trace
from lowtide.units import format_bytes

ScheduleFile = Annotated[
    str, typer.Argument(metavar="SCHEDULE.json", help="What to do: a schedule file.", show_default=False)
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="BYTES/s",
        help="Speed of the link between device and host, each way, such as 12GB/s. A schedule that copies needs it.",
        show_default=False,
    ),
]

EXAMPLES = (
    "lowtide simulate chain.json schedule.json",
    "lowtide simulate chain.json schedule.json --bandwidth 12GB/s --json",
)


def command(
    chain_file: ChainFile,
    schedule_file: ScheduleFile,
    bandwidth: Bandwidth = None,
    half_duplex: HalfDuplex = False,
    json: Json = False,
) -> None:
    """Show what a schedule uses on a chain: time, peak memory, idle time.

    A schedule that is illegal for the chain is refused with the operation, its index and the reason.
    """
    rate = bandwidth_option(bandwidth)
    chain = Chain.load(chain_file)
    schedule, trace = simulated(chain_file, chain, schedule_file, bandwidth=rate, duplex=not half_duplex)
    if json:
        print_json(_values(schedule, trace))
    else:
        _print(chain, schedule, trace)


def _values(schedule: Schedule, trace: Trace) -> dict[str, Any]:
    peak = trace.peak_index
    return {
        "seconds": trace.seconds,
        "peak_bytes": trace.peak_bytes,
        "idle_seconds": trace.idle_seconds,
        "compute_seconds": trace.compute_seconds,
        "strategy": schedule.strategy,
        "num_operations": len(trace.steps),
        "num_recomputed": trace.num_recomputed,
        "num_copies": len(trace.copies),
        "moved_bytes": trace.moved_bytes,
        "peak_index": peak,
        "peak_operation": trace.steps[peak].operation.to_list(),
    }


def _print(chain: Chain, schedule: Schedule, trace: Trace) -> None:
    peak = trace.peak_index
    at = " ".join(str(part) for part in trace.steps[peak].operation.to_list())
    pairs = [
        ("chain", f"{chain.name}, {chain.num_stages} stages"),
        ("schedule", f"{schedule.strategy}, {len(trace.steps)} operations"),
        ("time", step_time(trace.seconds, chain, trace.update_seconds)),
        ("peak", f"{format_bytes(trace.peak_bytes)} ({trace.peak_bytes} bytes), at operation {peak}, {at}"),
        ("recomputed", f"{trace.num_recomputed} forwards"),
    ]
    if trace.copies:
        pairs.append(("moved", moved(trace)))
    print_pairs(pairs)
