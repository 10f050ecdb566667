"""Compiles what `benchmarks.peers` measures, several networks side by side, before it measures them alone.

Compiling takes minutes, most of them in one thread, and leaves its results in the compiler's cache on disk. So each
network's rows are made once in a process of its own, beside others, and thrown away; afterwards they are made again,
alone, and what was compiled is read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer_networks import Network

# Of the time that a run may take: what is left is for measuring, which has to compile what did not end.
SHARE_OF_TIME = 0.6


def compile_side_by_side(networks: Sequence[Network], num_processes: int, options: Sequence[str], until: float) -> None:
    """Make the compiled rows of each network in a process of its own, some at a time.

    Args:
        networks: largest first, as far as that is known.
        num_processes: how many at a time.
        options: of the command, without those that choose networks, passes, time and folder.
        until: the time (of `time.monotonic`) at which those that have not ended are.
    """
    waiting = list(networks)
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (waiting or running) and time.monotonic() < until:
                while waiting and len(running) < num_processes:
                    name = waiting.pop(0).name
                    running[name] = _started(name, options, until, Path(folder) / name), time.monotonic()
                for name, (process, begin) in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        print(f"{name} compiled beside others in {time.monotonic() - begin:.0f} s", flush=True)
                time.sleep(0.1)
        finally:
            for name, (process, _) in running.items():
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
                process.wait()
                print(f"{name} was not compiled in time", flush=True)


def _started(name: str, options: Sequence[str], until: float, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    seconds = str(max(1.0, until - time.monotonic()))
    chosen = ["--only", f"({name})", "--passes", "compiled", "--seconds", seconds, "--output", str(folder)]
    command = [sys.executable, "-m", "benchmarks.peers", *options, *chosen]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
