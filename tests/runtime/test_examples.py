"""The examples run, on sizes that take a few seconds each, where the library that they show is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In what a plan prints: at the budgets of the small examples some stages are recomputed, or offloaded.
NOT_ALL_KEPT = r"stages kept, (?!0 recomputed, 0 offloaded)"


def run(*command: str) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_demo(tmp_path):
    report = tmp_path / "plan.html"
    text = run("examples/demo.py", "--tiny", "--figure", str(tmp_path / "plan.svg"), "--report", str(report))
    assert "equal" in text
    assert "DIFFERENT" not in text
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    assert f"the report: {report}" in text
    assert report.read_text().startswith("<!doctype html>")


def test_the_image_classifier():
    text = run("examples/image_classifier.py", "--tiny")
    assert "step 2: loss" in text
    assert re.search(NOT_ALL_KEPT, text)


def test_weights_on_the_host():
    text = run("examples/weights_on_host.py", "--tiny")
    assert "step 2: loss" in text
    assert "strategy 'joint'" in text
    assert "on host    weights" in text
    assert "saved and loaded" in text


@pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="transformers' Trainer needs accelerate")
def test_the_trainer():
    text = run("examples/trainer_finetuning.py", "--tiny")
    assert "(3 steps)" in text
    assert re.search(NOT_ALL_KEPT, text)


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is not installed")
def test_the_lightning_module():
    text = run("examples/lightning_module.py", "--tiny")
    assert "(3 steps)" in text
    assert re.search(NOT_ALL_KEPT, text)


def test_data_parallel_training():
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    text = run(*command, "examples/ddp.py", "--tiny")
    assert text.count("step 2: loss") == 2
    assert text.count("lowtide plan") == 1
    assert re.search(NOT_ALL_KEPT, text)
