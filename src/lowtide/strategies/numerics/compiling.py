"""Tell the user when compiling loops takes long; it happens once, and the result is kept on disk."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from typing import Any

LOGGER = logging.getLogger("lowtide")
MESSAGE = "compiling the solvers; this happens once, later runs read them from disk"

# Compiling that takes less, for all loops together, needs no message.
_PATIENCE_SECONDS = 1.0


def announce_compilation() -> None:
    """Log `MESSAGE` once numba has compiled for over a second; do nothing if numba is not in use."""
    if "numba" in sys.modules:
        _announcer()


class Announcer:
    """Counts the seconds spent compiling, and logs a message once when there are too many."""

    def __init__(self, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._remaining_seconds = patience_seconds
        self._depth = 0  # compiling one loop may compile another that it calls
        self._start = 0.0
        self._timer: threading.Timer | None = None
        self._has_spoken = False

    def begin(self) -> None:
        """A compilation starts."""
        self._depth += 1
        if self._depth == 1 and not self._has_spoken:
            self._start = time.perf_counter()
            self._timer = threading.Timer(max(0.0, self._remaining_seconds), self._speak)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """A compilation ends."""
        self._depth -= 1
        if self._depth == 0 and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._remaining_seconds -= time.perf_counter() - self._start

    def _speak(self) -> None:
        self._has_spoken = True
        LOGGER.warning(MESSAGE)


@functools.cache
def _announcer() -> Announcer:
    from numba.core import event

    announcer = Announcer()

    class Listener(event.Listener):
        def on_start(self, _event: Any) -> None:
            announcer.begin()

        def on_end(self, _event: Any) -> None:
            announcer.end()

    event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]  # numba's
    return announcer
