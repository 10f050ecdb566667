"""Runs a function in two processes at once, as ranks of a group; what both import is imported once."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path

# Importing these takes longer than most of what tests do in such processes.
_PRELOADED = [
    "torch._dynamo.backends.debugging",
    "torch.distributed",
    "lowtide.runtime.fitting.fit",
    "lowtide.strategies.rotor",
]


def run_two(target: Callable[[int, str], None], folder: Path, seconds: float = 600) -> None:
    """Run `target(rank, folder)` for both ranks; where one fails, fail with what it said."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    processes = [context.Process(target=_reporting, args=(target, rank, str(folder))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
    said = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("failed *"))]
    assert [process.exitcode for process in processes] == [0, 0], "\n".join(said)


def _reporting(target: Callable[[int, str], None], rank: int, folder: str) -> None:
    gc.freeze()  # what was imported: each `fit` collects, and looks for tensors, many times
    try:
        target(rank, folder)
    except BaseException:
        Path(folder, f"failed {rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise
