"""The measuring commands run on a GPU, in small: what their tests on the CPU cannot show."""

import importlib
import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("command", "given", "rows"),
    [
        ("benchmarks.peers", ["--only", "gpt"], "rows"),
        ("benchmarks.peers", ["--only", "gpt", "--largest-batch", "--limits", "64MiB"], "largest_batches"),
        ("papers.pofo.executed", ["--alphas", "0.5"], "points"),
        ("papers.rotor.__main__", ["--budgets", "2", "--segments", "2"], "points"),
        ("papers.selection.__main__", [], "rows"),
        ("benchmarks.scale", [], "rows"),
    ],
)
@pytest.mark.filterwarnings("ignore:a step took")  # budgets here are those of the model alone, without libraries
def test_a_run_in_small(command, given, rows, tmp_path):
    main = importlib.import_module(command).main
    main(["--tiny", "--device", "cuda", "--seconds", "120", "--output", str(tmp_path), *given])
    (path,) = tmp_path.glob("*-tiny-*.json")
    written = json.loads(path.read_text())
    assert written[rows]
    assert written["facts"]["cuda"]
