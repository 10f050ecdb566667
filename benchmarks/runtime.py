"""What training under a plan costs: time and peak beside plain training, in one run.

    python -m benchmarks.runtime --output runtime.json            # the two networks of the table, on a GPU, 6 minutes
    python -m benchmarks.runtime --tiny                           # a minute anywhere, to see that it works

For each network: plain training, the same through lowtide with everything stored (what the executor itself costs), then
several budgets, by recomputation alone (`rotor`) and with offloading (`pofo`); predicted against measured.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.peer_networks import PADDED_VOCABULARY
from benchmarks.refusing import Parser, refuse_unless_chosen, usable_file
from torch import nn

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile.compiled import CompiledStages
from lowtide.runtime.measure.measure import capture_and_measure, measure_split
from lowtide.runtime.transfer.bandwidth import measured_bandwidth
from lowtide.units import format_bytes, format_seconds
from lowtide.zoo import make

NUM_LAUNCHES = 5


@dataclass
class Network:
    """A network of the zoo and how it is run."""

    name: str
    zoo: str
    sizes: dict[str, int]
    dtype: str
    compiled: bool
    budgets: list[float]  # shares of the plain peak


@dataclass
class Row:
    """One line of the table."""

    network: str
    way: str
    budget_bytes: int | None = None
    seconds: float | None = None
    forward_launch_seconds: float | None = None
    backward_launch_seconds: float | None = None
    peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    strategy: str = ""
    num_stages: int | None = None
    recomputed: float | None = None
    moved_bytes: float | None = None
    note: str = ""


LARGE = [
    Network(
        "ResNet-101, batch 16, 500 px, fp32",
        "resnet101",
        {"batch": 16, "image": 500},
        "float32",
        False,
        [0.74, 0.47, 0.29],
    ),
    Network(
        "GPT 24 x 1024, vocabulary 50304, batch 16 x 1024, bf16",
        "gpt2",
        {"batch": 16, "length": 1024, "layers": 24, "width": 1024, "heads": 16, "vocabulary": PADDED_VOCABULARY},
        "bfloat16",
        True,
        [0.76, 0.61, 0.42],
    ),
]
TINY = [
    Network("ResNet-18, batch 2, 64 px", "resnet18", {"batch": 2, "image": 64}, "float32", False, [0.9]),
    Network(
        "GPT 4 x 64, batch 8 x 64",
        "gpt2",
        {"batch": 8, "length": 64, "layers": 4, "width": 64, "heads": 4, "vocabulary": 128},
        "float32",
        False,
        [0.6],
    ),
]


def measure_steps(row: Row, model: nn.Module, batch: dict[str, Any], device: torch.device) -> None:
    """Median seconds and peak of consecutive steps, and how long Python takes to launch one alone."""
    step = harness.training_step(model, model, batch)
    timed = harness.time_steps(step, device)
    row.seconds, row.peak_bytes = timed.seconds, timed.peak_bytes
    launches = [_launch_seconds(model, batch, device) for _ in range(NUM_LAUNCHES)]
    row.forward_launch_seconds, row.backward_launch_seconds = map(statistics.median, zip(*launches, strict=True))


def _launch_seconds(model: nn.Module, batch: dict[str, Any], device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    loss = model(**batch)
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    model.zero_grad(set_to_none=True)
    return middle - begin, end - middle


def attempt(rows: list[Row], row: Row, work: Callable[[Row], None]) -> None:
    """Add a row, with the reason where it could not be had, and print it."""
    try:
        work(row)
    except (lowtide.LowtideError, RuntimeError) as error:
        row.note = f"{type(error).__name__}: {error}"[:300]
    rows.append(row)
    seconds = "-" if row.seconds is None else format_seconds(row.seconds)
    predicted = "-" if row.predicted_seconds is None else format_seconds(row.predicted_seconds)
    peak = "-" if row.peak_bytes is None else format_bytes(row.peak_bytes)
    expected = "-" if row.predicted_peak_bytes is None else format_bytes(row.predicted_peak_bytes)
    launch = [1e3 * (seconds or 0) for seconds in (row.forward_launch_seconds, row.backward_launch_seconds)]
    print(
        f"{row.way:<26} {seconds:>10} (predicted {predicted:>10})  {peak:>11} (predicted {expected:>11})  "
        f"launch {launch[0]:5.1f} + {launch[1]:5.1f} ms  {row.strategy} {row.note}",
        flush=True,
    )


def bench(network: Network, device: torch.device) -> list[Row]:
    """All rows of one network."""
    print(f"\n{network.name}", flush=True)
    torch.manual_seed(0)
    model, batch = make(network.zoo, device=str(device), dtype=network.dtype, **network.sizes)
    rows: list[Row] = []

    def plain(row: Row) -> None:
        measure_steps(row, model, batch, device)

    attempt(rows, Row(network.name, "plain, eager"), plain)
    compiled = None
    if network.compiled:
        split = capture(model, batch, blocks=True)
        compiled = CompiledStages(model, split, {"dynamic": False})
        attempt(rows, Row(network.name, "plain, compiled blocks"), plain)
        chain = measure_split(model, split, batch)
    else:
        split, chain = capture_and_measure(model, batch)
    plain_peak = rows[-1].peak_bytes
    bandwidth = measured_bandwidth(device)
    ways = [("store-all", None, "store-all", 0)]
    ways += [(f"recompute at {share:.0%}", share, "rotor", 0) for share in network.budgets]
    ways += [(f"with offloading at {share:.0%}", share, "pofo", bandwidth) for share in network.budgets]
    for way, share, strategy, rate in ways:
        budget = 2**50 if share is None or plain_peak is None else int(plain_peak * share)

        def planned(row: Row, strategy: str = strategy, rate: int = rate, budget: int = budget) -> None:
            solution = lowtide.solve(
                chain, memory_budget=budget, strategy=strategy, bandwidth=rate or None, manage_weights=False
            )
            row.predicted_seconds, row.predicted_peak_bytes = solution.seconds, solution.peak_bytes
            row.strategy, row.num_stages = solution.strategy, chain.num_stages
            with lowtide.attach(model, solution, split=split) as plan:
                measure_steps(row, model, batch, device)
                stats = plan.stats()
                row.recomputed, row.moved_bytes = stats.recomputed_per_step, stats.moved_bytes_per_step

        attempt(rows, Row(network.name, way, None if share is None else budget), planned)
    if compiled is not None:
        compiled.remove()
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small networks on the CPU")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    parser.add_argument("--only", help="only networks whose name contains this")
    arguments = parser.parse_args()
    tiny = arguments.tiny or not torch.cuda.is_available()
    device = torch.device("cpu" if tiny else "cuda")
    networks = TINY if tiny else LARGE
    if arguments.only is not None:
        refuse_unless_chosen("--only", [arguments.only], [network.name for network in networks])
        networks = [network for network in networks if arguments.only.lower() in network.name.lower()]
    if arguments.output is not None:
        usable_file(arguments.output)
    begin, rows = time.perf_counter(), []
    for network in networks:
        rows += bench(network, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report = {
        "machine": platform.processor() or platform.machine() if tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bandwidth_bytes_per_second": measured_bandwidth(device),
        "total_seconds": time.perf_counter() - begin,
        "rows": [asdict(row) for row in rows],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"\n{report['machine']}, torch {report['torch']}, {report['total_seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
