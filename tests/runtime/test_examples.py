"""The examples run, on sizes that take a few seconds each, where the library that they show is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

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


# Runs programs one after the other, as `python PROGRAM ...` does; what they import takes longer than they do.
IN_TURN = """
import contextlib, gc, io, json, runpy, sys
said = {}
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(name, run_name="__main__")
    said[name] = text.getvalue()
    gc.collect()  # budgets hold for all tensors of a process
print(json.dumps(said))
"""


def installed(*names: str) -> bool:
    return all(map(importlib.util.find_spec, names))


def test_examples(tmp_path):
    report = tmp_path / "plan.html"
    programs = [
        ["examples/image_classifier.py", "--tiny"],
        ["examples/weights_on_host.py", "--tiny"],
        ["examples/demo.py", "--tiny", "--figure", str(tmp_path / "plan.svg"), "--report", str(report)],
    ]
    if installed("lightning"):
        programs.insert(0, ["examples/lightning_module.py", "--tiny"])
    if installed("transformers", "accelerate"):
        programs.append(["examples/trainer_finetuning.py", "--tiny"])
        programs.append(["examples/finetune_llm.py", "--tiny", "--output", str(tmp_path / "checkpoint.pt")])
    said = json.loads(run("-c", IN_TURN, json.dumps(programs)).splitlines()[-1])

    text = said["examples/demo.py"]
    assert "equal" in text
    assert "DIFFERENT" not in text
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    assert f"the report: {report}" in text
    assert report.read_text().startswith("<!doctype html>")

    text = said["examples/image_classifier.py"]
    assert "step 2: loss" in text
    assert re.search(NOT_ALL_KEPT, text)

    text = said["examples/weights_on_host.py"]
    assert "step 2: loss" in text
    assert "strategy 'joint'" in text
    assert "on host    weights" in text
    assert "saved and loaded" in text

    text = said.get("examples/finetune_llm.py")
    assert text is None or ("strategy 'joint'" in text and "step 2: loss" in text and "(3 steps)" in text), text
    assert text is None or set(torch.load(tmp_path / "checkpoint.pt")) == {"model", "optimizer"}

    for name in ("examples/trainer_finetuning.py", "examples/lightning_module.py"):
        text = said.get(name)
        assert text is None or ("(3 steps)" in text and re.search(NOT_ALL_KEPT, text)), text


def test_data_parallel_training():
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    text = run(*command, "examples/ddp.py", "--tiny")
    assert text.count("step 2: loss") == 2
    assert text.count("lowtide plan") == 1
    assert re.search(NOT_ALL_KEPT, text)
