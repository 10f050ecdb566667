"""The experiments of Hong et al.: layers, sets and phases, and a whole run on a CPU in small."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from papers.selection import __main__ as command
from papers.selection import networks
from papers.selection.phases import Phase, mean_error, predicted_phases
from tests.looping import looped

import lowtide
from lowtide import Backward, Chain, Forward, Schedule, Stage, zoo

SIZES = Path(__file__).parents[2] / "examples" / "sizes"


def static_cost(sizes, checkpoints):
    largest = max(sum(sizes[h + 1 : i]) for h, i in pairwise(checkpoints))
    return sum(sizes[k] for k in checkpoints) + largest


@pytest.mark.parametrize(("name", "num_layers"), [("vgg19", 24), ("alexnet", 15)])
def test_a_network_is_cut_into_the_papers_layers_and_stays_the_same(name, num_layers):
    with torch.device("meta"):  # without weights
        model, _ = zoo.make(name, device="meta", batch=1)
    before = [id(module) for module in model.network]
    cut = networks.in_layers(name, model.network)
    assert len(cut) == num_layers
    after = [id(m) for m in cut.modules() if not list(m.children())]
    assert after == before


@looped("seed", range(20))
def test_the_arbitrary_graph_search_finds_what_algorithm_3_finds(seed):
    numbers = random.Random(seed)
    sizes = [numbers.choice((0, 1, 2, 5, 20, 100)) for _ in range(numbers.randint(2, 12))]
    found = networks.arbitrary_graph(sizes)
    assert found[0] == 0
    assert found[-1] == len(sizes) - 1
    assert static_cost(sizes, found) == lowtide.select(sizes, model="static").cost


@pytest.mark.parametrize("name", ["vgg19", "alexnet"])
def test_the_papers_sets_come_out_of_the_papers_sizes(name):
    sizes = json.loads((SIZES / f"{name}-b128.json").read_text())
    sets = networks.checkpoint_sets(sizes)
    assert sets["arbitrary graph"] == networks.PAPER_SETS[name, "algorithm 3"]
    assert sets["sqrt(n)"] == {"vgg19": (0, 5, 10, 15, 20, 24), "alexnet": (0, 4, 8, 12, 15)}[name]


def test_phases_end_with_first_forwards_and_with_backwards():
    chain = Chain("two", [Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2)], base_bytes=5)
    operations = [Forward(1, "keep"), Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)]
    phases = predicted_phases(chain, Schedule("by hand", operations))
    # stored at first: base and the gradient of the result
    assert [phase.stored_bytes for phase in phases] == [5 + 10 + 10, 25 + 40, 5 + 10, 5]
    assert phases[3].peak_bytes == 5 + 10 + 40  # the repeated forward is part of the last phase
    assert mean_error(phases, phases, "peak_bytes") == 0
    assert mean_error([Phase(1, 90, 1)], [Phase(1, 100, 1)], "stored_bytes") == pytest.approx(0.1)


@pytest.mark.slow
def test_a_run_in_small_and_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "TINY", [("alexnet", 1)])
    command.main(["--tiny", "--device", "cpu", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "selection-tiny-cpu.json").read_text())
    rows = {row["method"]: row for row in written["rows"]}
    assert set(networks.PAPER_METHODS) <= set(rows)
    assert all(row["peak_bytes"] and row["seconds"] for row in rows.values())
    assert all(abs(row["predicted_peak_bytes"] / row["peak_bytes"] - 1) < 0.02 for row in rows.values())
    least = rows.pop("lowtide's dynamic-selection")["predicted_peak_bytes"]
    assert all(least <= row["predicted_peak_bytes"] for row in rows.values())
    assert written["skipped"] == []
    assert len(written["figure_5"]["measured"]) == 30
    assert written["figure_5"]["stored_error"] < 0.02
    assert written["figure_5"]["peak_error"] < 0.02
    assert "Figure 5" in (tmp_path / "selection-tiny-cpu.md").read_text()
    assert (tmp_path / "selection-tiny-cpu.png").exists()
    again = tmp_path / "again"
    command.main(
        ["--tiny", "--device", "cpu", "--output", str(again), "--resume", str(tmp_path / "selection-tiny-cpu.json")]
    )
    resumed = json.loads((again / "selection-tiny-cpu.json").read_text())
    assert [resumed[key] for key in ("rows", "figure_5")] == [written[key] for key in ("rows", "figure_5")]
    assert len(resumed["facts"]["earlier"]) == 1
