"""A progress bar on standard error, by default only on a terminal and after two seconds."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from lowtide.errors import LowtideError, shown

# What is quicker than this shows no bar.
_PATIENCE_SECONDS = 2.0


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Leave Python's generator as it is: rich draws from it, and a training loop must draw what it would have."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def check_progress(progress: Any, *, may_switch: bool = False) -> None:
    """Refuse what is to be told of progress and cannot be called, or, where that may be, does not switch a bar.

    Raises:
        LowtideError: with what was given.
    """
    if progress is None or callable(progress) or (may_switch and isinstance(progress, bool)):
        return
    switches = "True, False or " if may_switch else ""
    raise LowtideError(
        f"progress is {shown(progress)}, expected {switches}a function of the current task and the share done"
    )


class DelayedProgress:
    """A context manager to call with the current task and the share done, 0 to 1.

    Args:
        enabled: False: show nothing.
        always: show the bar where standard error is not a terminal, too: in a notebook.

    Example:
        with DelayedProgress() as progress:
            lowtide.solve(chain, memory_budget=budget, progress=progress)
    """

    def __init__(self, *, enabled: bool = True, always: bool = False) -> None:
        self._enabled = enabled and (always or sys.stderr.isatty())
        self._lock = threading.Lock()
        self._bar: Any = None  # rich.progress.Progress, once it shows
        self._task: Any = None
        self._latest = ("preparing", 0.0)
        self._timer = threading.Timer(_PATIENCE_SECONDS, self._show)
        self._timer.daemon = True

    def __enter__(self) -> DelayedProgress:
        if self._enabled:
            self._timer.start()
        return self

    def __call__(self, what: str, share: float) -> None:
        """Show the current task and the share done."""
        with self._lock:
            self._latest = (what, share)
            if self._bar is not None:
                self._bar.update(self._task, description=what, completed=share)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._enabled = False
            if self._bar is not None:
                self._bar.stop()

    def _show(self) -> None:
        with random_numbers_kept():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if not self._enabled:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            what, share = self._latest
            self._task = self._bar.add_task(what, total=1.0, completed=share)
            self._bar.start()
