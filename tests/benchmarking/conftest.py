"""For all tests of commands that measure: what they write is of interest, not how well it was timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import harness

from lowtide import zoo


@pytest.fixture(autouse=True)
def _few_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "NUM_TIMED_CPU", 1)


@pytest.fixture(scope="module")
def short_resnet() -> Iterator[None]:
    """ResNet-18 with two of its eight blocks, for commands that run schedules of it."""
    entry = zoo.ENTRIES["resnet18"]
    with pytest.MonkeyPatch.context() as patch:
        short = dataclasses.replace(entry, settings={**entry.settings, "blocks": (2, 0, 0, 0)})
        patch.setitem(zoo.ENTRIES, "resnet18", short)
        yield


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, and their files are empty: matplotlib takes half a second for each.

    `test_refusing` has those of stored results rendered.
    """

    def savefig(figure: Any, path: Path, **_: Any) -> None:
        path.touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
