"""For all tests of the runtime: none finds the garbage of another, none times stages with more care than it needs."""

from __future__ import annotations

import gc

import pytest

from lowtide.runtime.measure import timing


@pytest.fixture(autouse=True)
def _without_garbage_of_others() -> None:
    """Collect before a test what would else go during it, under the eyes of a meter."""
    gc.collect()


@pytest.fixture(autouse=True)
def _few_timed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of three runs: no test depends on what a stage takes, and nine of each take as long as the rest."""
    monkeypatch.setattr(timing, "_MOST_RUNS", timing._FEWEST_RUNS)
