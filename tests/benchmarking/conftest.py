"""For all tests of commands that measure: what they write is of interest, not how well it was timed."""

from __future__ import annotations

import pytest
from benchmarks import harness


@pytest.fixture(autouse=True)
def _few_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "NUM_TIMED_CPU", 1)
