"""Compiles what `benchmarks.peers` measures, side by side, before it measures each network alone.

    python -m benchmarks.peer_compiling --device cuda gpt 0.5        # one of its processes: the whole model at a ratio
    python -m benchmarks.peer_compiling --device cuda gpt lowtide    # or lowtide, where everything fits

Compiling takes minutes, most of them in one thread, and leaves its results in the compiler's cache on disk. So each
ratio of a network, and lowtide, is compiled in a process of its own, beside others; afterwards rows are measured alone,
and what was compiled is read. Every process begins with nothing compiled: what lowtide takes is not what the whole
model left, so the seconds of both can be compared. After them the process of a ratio compiles what lowtide needs within
the memory that the model took at it, as the rows will be.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.peer_claim import NOISE_OF_PEAKS
from benchmarks.peer_networks import NETWORKS, TINY, Network
from benchmarks.peer_ways import compiled_whole
from benchmarks.refusing import Parser, ratio, refuse
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

import lowtide

# Of the time that a run may take: what is left is for measuring, which has to compile what did not end.
SHARE_OF_TIME = 0.6

LOWTIDE = "lowtide"

_MUCH = 2**40  # bytes: room for everything, on a CPU


@dataclass(frozen=True, slots=True)
class Cold:
    """What one process took with nothing compiled before."""

    network: str
    way: str
    """`LOWTIDE`, or the compiler's ratio: "1" is the whole model as it is compiled by default."""
    seconds: float


def ways_of(networks: Sequence[Network], ratios: Sequence[float]) -> list[tuple[Network, str]]:
    """What there is to compile; what takes longest, and what is compared, comes first.

    Args:
        networks: some.
        ratios: of `activation_memory_budget`, besides the whole model as it is.
    """
    first = [(network, way) for network in networks for way in (LOWTIDE, "1")]
    return list(dict.fromkeys([*first, *((network, f"{ratio:g}") for network in networks for ratio in ratios)]))


def compile_side_by_side(
    ways: Sequence[tuple[Network, str]], num_processes: int, options: Sequence[str], until: float
) -> list[Cold]:
    """Compile ways of networks, each in a process of its own, some at a time.

    Args:
        ways: see `ways_of`.
        num_processes: how many at a time.
        options: of this command, without the network and the way.
        until: the time (of `time.monotonic`) at which those that have not ended are.
    """
    waiting = list(ways)
    running: dict[tuple[Network, str], tuple[subprocess.Popen[str], Path]] = {}
    found: list[Cold] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            while (waiting or running) and time.monotonic() < until:
                while waiting and len(running) < num_processes:
                    network, way = waiting.pop(0)
                    cache = Path(folder) / f"{network.name} {way}"
                    running[network, way] = _started(network.name, way, options, cache), cache
                for (network, way), (process, cache) in list(running.items()):
                    if process.poll() is not None:
                        del running[network, way]
                        found += _ended(network, way, process, cache)
                time.sleep(0.1)
        finally:
            for (network, way), (process, cache) in running.items():
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
                found += _ended(network, way, process, cache, "ended, the time was over")
    return found


def _started(name: str, way: str, options: Sequence[str], cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.peer_compiling", *options, name, way]
    settings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    with _said(cache).open("w") as said:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=settings, start_new_session=True
        )


def _said(cache: Path) -> Path:
    """Where the process with a cache writes what goes wrong."""
    return cache.with_name(f"{cache.name}.txt")


def _keep(cache: Path) -> None:
    """Have what was compiled read here, however its process ended."""
    if cache.exists():
        shutil.copytree(cache, cache_dir(), dirs_exist_ok=True)
        shutil.rmtree(cache, ignore_errors=True)


def _ended(
    network: Network, way: str, process: subprocess.Popen[str], cache: Path, reason: str | None = None
) -> list[Cold]:
    printed = process.communicate()[0].splitlines()
    _keep(cache)
    if process.returncode and reason is None:
        said = _said(cache).read_text(errors="replace").split("\n")
        reason = next((line for line in reversed(said) if line), f"the process ended with {process.returncode}")
    seconds = next((json.loads(line)["seconds"] for line in printed if line.startswith('{"seconds"')), None)
    took = "not compiled" if seconds is None else f"compiled beside others in {seconds:.0f} s"
    print(f"{network.name}, {way}: {took}{'' if reason is None else f'; {reason}'}", flush=True)
    return [] if seconds is None else [Cold(network.title, way, seconds)]


def cold_lines(entries: Sequence[Cold]) -> list[str]:
    """What setting up takes with nothing compiled: the whole model, and lowtide where everything fits."""
    rows = []
    for network in dict.fromkeys(entry.network for entry in entries):
        seconds = {entry.way: entry.seconds for entry in entries if entry.network == network}
        whole, own = seconds.get("1"), seconds.get(LOWTIDE)
        times = "" if whole is None or own is None else f"{own / whole:.2f}"
        rows.append([network, harness.seconds_cell(whole), harness.seconds_cell(own), times])
    if not rows:
        return []
    columns = ["network", "the whole model", "lowtide", "ratio"]
    return ["## Set up with nothing compiled before, several side by side", "", *harness.table(columns, rows), ""]


def backend_of(*, is_tiny: bool) -> str:
    """What compiles; for tiny networks, what needs no compiler of machine code."""
    return "aot_eager_decomp_partition" if is_tiny else "inductor"


def lowtide_options(arguments: Any, backend: str) -> dict[str, Any]:
    """What `fit` is given for compiled rows: the variants, regions and graphs of a command line."""
    regions = {"on": True, "off": False}.get(arguments.regions, arguments.regions)
    return {
        "strategy": "rotor",
        "bandwidth": 0,
        "compile_stages": {"backend": backend, **({} if regions is None else {"regions": regions})},
        "variants": {"on": True, "off": False}.get(arguments.variants, arguments.variants),
        "cuda_graphs": arguments.graphs,
    }


def add_lowtide_arguments(parser: Parser) -> None:
    """`--variants`, `--regions` and `--graphs`."""
    parser.add_argument("--variants", choices=("on", "off", "rounding"), default="on", help="of compiled stages")
    parser.add_argument("--regions", choices=("on", "off", "auto"), help="compile in regions; default: as fit does")
    parser.add_argument("--graphs", action="store_true", help="replay steps as CUDA graphs, also compiled peers'")


def refuse_graphs_without_cuda(arguments: Any) -> None:
    """End the command where graphs are asked for on another device."""
    if arguments.graphs and torch.device(arguments.device).type != "cuda":
        refuse(f"--graphs needs a CUDA device, and --device is {arguments.device}")


def _way(text: str) -> str:
    """A way of the command line."""
    return text if text == LOWTIDE else f"{ratio(text):g}"


def _timed(step: Callable[[], None], device: torch.device) -> None:
    """Run a step that compiles, and print its seconds at once: what follows may be ended."""
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)


def _fitted(model: nn.Module, batch: dict[str, Any], memory_budget: int, options: dict[str, Any]) -> None:
    """Train a step within a budget."""
    given = {**options, "optimizer": harness.without_state(model), "keeps_result": False}
    with lowtide.fit(model, batch, memory_budget=memory_budget, **given):
        harness.training_step(model, model, batch)()


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = Parser(__doc__)
    parser.add_argument("network", choices=[network.name for network in NETWORKS])
    parser.add_argument("way", type=_way, help=f"{LOWTIDE}, or a ratio for activation_memory_budget")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true")
    add_lowtide_arguments(parser)
    arguments = parser.parse_args(given)
    refuse_graphs_without_cuda(arguments)
    networks, device = TINY if arguments.tiny else NETWORKS, torch.device(arguments.device)
    network = next((network for network in networks if network.name == arguments.network), None)
    if network is None:
        refuse(f"{arguments.network} has no tiny form; those that have one are {', '.join(n.name for n in networks)}")
    backend = backend_of(is_tiny=arguments.tiny)
    torch.manual_seed(0)
    model, batch = network.make(str(device), None)
    options = lowtide_options(arguments, backend)
    if arguments.way == LOWTIDE:
        all_bytes = harness.machine_facts(device)["memory_bytes"] or _MUCH
        _timed(lambda: _fitted(model, batch, all_bytes, options), device)
        return
    with compiled_whole(model, backend, float(arguments.way), graphs=arguments.graphs) as call:
        step = harness.training_step(call, model, batch)
        _timed(step, device)
        peak = harness.time_steps(step, device).peak_bytes
        if arguments.graphs:
            peak = harness.reserved_bytes(device)
    with contextlib.suppress(lowtide.InfeasibleBudgetError):
        _fitted(model, batch, int(peak * (1 + NOISE_OF_PEAKS)), options)


if __name__ == "__main__":
    main()
