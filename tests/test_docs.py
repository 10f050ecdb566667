"""What the documentation shows is true: its files are read, its schedules simulated, its docstring examples run."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

import lowtide

DOCS = Path(__file__).parent.parent / "docs"


def test_the_schedule_in_the_formats_page_costs_what_it_says() -> None:
    blocks = re.findall(r"```json\n(.*?)```", (DOCS / "formats.md").read_text(encoding="utf-8"), re.DOTALL)
    chain, schedule = (json.loads(block) for block in blocks)
    trace = lowtide.simulate(chain, schedule)
    assert trace.peak_bytes == schedule["predicted"]["peak_bytes"]
    assert trace.seconds == pytest.approx(schedule["predicted"]["seconds"])


@pytest.mark.parametrize(
    "module",
    [
        "units",
        "chain",
        "schedule",
        "simulate",
        "solve",
        "compare",
        "select",
        "strategies.selection",
        "strategies.dynamic_selection",
        "runtime.capture",
        "runtime.measure",
        "runtime.meter",
        "runtime.sample",
    ],
)
def test_docstring_examples(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"lowtide.{module}"))
    assert results.attempted > 0
    assert results.failed == 0
