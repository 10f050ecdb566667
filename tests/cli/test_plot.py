from __future__ import annotations

import json
import sys

import pytest

from lowtide import Backward, Forward, Schedule
from lowtide.cli import main

SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture
def schedule_file(files):
    stages = range(1, 5)
    operations = [*(Forward(k, "all") for k in stages), *(Backward(k) for k in reversed(stages))]
    Schedule("store-all", operations).save(files["schedule"])
    return files["schedule"]


@pytest.mark.parametrize("kind", SIGNATURES)
def test_the_ending_says_the_format(kind, files, schedule_file, tmp_path, capsys):
    path = tmp_path / f"figure.{kind}"
    assert main(["plot", files["chain"], schedule_file, "--strategy", "store-all", "-o", str(path)]) == 0
    assert path.read_bytes().startswith(SIGNATURES[kind])
    assert capsys.readouterr().out == f"written to {path}\n"


def test_a_schedule_and_a_budget_give_both_panels(files, schedule_file, tmp_path):
    path = tmp_path / "figure.svg"
    line = ["plot", files["chain"], schedule_file, "--memory", "20kB", "--strategy", "store-all", "-o", str(path)]
    assert main(line) == 0
    text = path.read_text()
    assert "step time / plain training" in text
    assert ">operation<" in text
    assert "saved for backward" in text
    assert ">budget<" in text


def test_a_chain_alone_gives_the_frontier(files, tmp_path):
    path = tmp_path / "figure.svg"
    assert main(["plot", files["chain"], "--strategy", "store-all", "-o", str(path)]) == 0
    assert "step time / plain training" in path.read_text()
    assert "operation" not in path.read_text()


def test_json_says_what_is_drawn(files, schedule_file, tmp_path, capsys):
    path = str(tmp_path / "figure.svg")
    assert main(["plot", files["chain"], schedule_file, "--strategy", "store-all", "-o", path, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["output"], values["memory_budget"], values["peak_bytes"]) == (path, None, 14500)
    assert values["seconds"] == pytest.approx(1.2)
    (curve,) = values["curves"]
    assert (curve["strategy"], curve["minimum_bytes"]) == ("store-all", 14500)
    assert curve["points"][0]["peak_bytes"] == 14500


@pytest.mark.parametrize("command", ["plot", "report"])
def test_json_of_what_does_not_fit_names_the_least(command, files, tmp_path, capsys):
    path = tmp_path / ("figure.svg" if command == "plot" else "plan.html")
    line = [command, files["chain"], "--strategy", "store-all", "--memory", "1kB", "-o", str(path), "--json"]
    assert main(line) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"output": None, "feasible": False, "minimum_bytes": 14500}
    assert printed.err.count("\n") == 1
    assert not path.exists()


def test_without_matplotlib_one_line_says_what_to_install(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", files["chain"], "-o", str(tmp_path / "figure.svg")]) == 2
    expected = "lowtide: figures need matplotlib, which is not installed; pip install 'lowtide[plot]'\n"
    assert capsys.readouterr().err == expected


def test_one_panel_over_time(files, schedule_file, tmp_path):
    path = tmp_path / "figure.svg"
    assert main(["plot", files["chain"], schedule_file, "--panel", "memory", "--over", "time", "-o", str(path)]) == 0
    assert "time (s)" in path.read_text()
    assert "plain training" not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-o", "figure.gif", "--strategy", "store-all"], 2, "a figure's name ends in .png, .svg, .pdf"),
        (["-o", "no/such/place.png", "--strategy", "store-all"], 2, "cannot be written"),
        (["-o", "figure.png", "--panel", "memory"], 2, "the memory of which schedule?"),
        (["-o", "figure.png", "--memory", "1kB", "--strategy", "store-all"], 3, "is below the"),
        (["-o", "figure.png", "--strategy", "offload"], 2, "give --bandwidth"),
        (["-o", "figure.png", "--memory", "1kB", "--strategy", "rotor"], 3, "raise it, or give --bandwidth"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(arguments, status, message, files, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", files["chain"], *arguments]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
