"""The examples run, on sizes that take a few seconds each, where the library that they show is installed."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.processes import run_two

from lowtide.runtime import meter

ROOT = Path(__file__).parents[2]

# In what a plan prints: at the budgets of the small examples some stages are recomputed, or offloaded.
NOT_ALL_KEPT = r"stages kept, (?!0 recomputed, 0 offloaded)"


def run(name: str, *arguments: object) -> str:
    """What a program prints, as by `python NAME ARGUMENTS` but in this process: importing takes longer than it does."""
    with (
        mock.patch.object(sys, "argv", [name, *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()) as text,
    ):
        runpy.run_path(str(ROOT / name), run_name="__main__")
    return text.getvalue()


@pytest.fixture
def _alone() -> None:
    """What other tests keep is not seen by meters: budgets hold for all tensors of a process."""
    gc.collect()
    gc.freeze()
    meter._settled_tensors.clear()


@pytest.mark.usefixtures("_alone", "short_reports")
def test_demo(tmp_path):
    report = tmp_path / "plan.html"
    text = run("examples/demo.py", "--tiny", "--figure", tmp_path / "plan.svg", "--report", report)
    assert "equal" in text
    assert "DIFFERENT" not in text
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    assert f"the report: {report}" in text
    assert report.read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("_alone")
def test_image_classifier():
    text = run("examples/image_classifier.py", "--tiny")
    assert "step 2: loss" in text
    assert re.search(NOT_ALL_KEPT, text)


@pytest.mark.usefixtures("_alone")
def test_weights_on_host():
    text = run("examples/weights_on_host.py", "--tiny")
    assert "step 2: loss" in text
    assert "strategy 'joint'" in text
    assert "on host    weights" in text
    assert "saved and loaded" in text


@pytest.mark.usefixtures("_alone")
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_finetuning_with_weights_on_the_host(tmp_path):
    text = run("examples/finetune_llm.py", "--tiny", "--output", tmp_path / "checkpoint.pt")
    assert "strategy 'joint'" in text
    assert "step 2: loss" in text
    assert "(3 steps)" in text
    assert set(torch.load(tmp_path / "checkpoint.pt")) == {"model", "optimizer"}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("name", "libraries"),
    [("trainer_finetuning", ["transformers", "accelerate"]), ("lightning_module", ["lightning"])],
)
def test_frameworks(name, libraries):
    if not all(map(importlib.util.find_spec, libraries)):
        pytest.skip(f"needs {' and '.join(libraries)}")
    text = run(f"examples/{name}.py", "--tiny")
    assert "(3 steps)" in text
    assert re.search(NOT_ALL_KEPT, text)


def peak_of(text: str, line: str) -> float:
    """The KiB that a line of a printed plan ends in, but for what is in brackets."""
    (found,) = re.findall(rf"^  {line} .*?([\d.]+) KiB", text, re.MULTILINE)
    return float(found)


def in_a_group(rank: int, folder: str) -> None:
    """The example in one of two processes, as `torchrun` starts them."""
    init = functools.partial(
        torch.distributed.init_process_group, init_method=f"file://{folder}/group", rank=rank, world_size=2
    )
    with mock.patch.object(torch.distributed, "init_process_group", init):
        Path(folder, f"printed {rank}").write_text(run("examples/ddp.py", "--tiny"), encoding="utf-8")


def test_data_parallel_training(tmp_path):
    run_two(in_a_group, tmp_path)
    first, second = (Path(tmp_path, f"printed {rank}").read_text(encoding="utf-8") for rank in range(2))
    assert "rank 0, step 2: loss" in first
    assert "rank 1, step 2: loss" in second
    assert "lowtide plan" not in second
    assert peak_of(first, "measured") <= peak_of(first, "budget")
    assert re.search(NOT_ALL_KEPT, first)
