from __future__ import annotations

import json

import pytest

from lowtide.cli import main


def test_a_chain_becomes_a_page(files, tmp_path, capsys):
    path = tmp_path / "plan.html"
    line = ["report", files["chain"], "--memory", "8kB", "--strategy", "rotor", "--budgets", "4", "-o", str(path)]
    assert main(line) == 0
    assert capsys.readouterr().out == f"written to {path}; open it in a browser\n"
    assert path.read_text().startswith("<!doctype html>")


def test_json_says_what_the_page_opens_on(files, tmp_path, capsys):
    path = str(tmp_path / "plan.html")
    line = ["report", files["chain"], "--memory", "8kB", "--strategy", "rotor", "--budgets", "4", "-o", path, "--json"]
    assert main(line) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["output"], values["memory_budget"], values["strategy"]) == (path, 8000, "rotor")
    assert values["peak_bytes"] <= 8000
    assert [curve["strategy"] for curve in values["curves"]] == ["store-all", "rotor"]
    assert values["seconds"] in [point["seconds"] for point in values["curves"][1]["points"]]


def test_a_schedule_file_is_shown(files, tmp_path):
    path = tmp_path / "plan.html"
    assert main(["solve", files["chain"], "--memory", "8kB", "--strategy", "rotor", "-o", files["schedule"]]) == 0
    assert main(["report", files["chain"], files["schedule"], "--strategy", "rotor", "-o", str(path)]) == 0
    assert "four, 4 stages, rotor" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--memory", "1B", "--strategy", "rotor", "-o", "plan.html"], 3, "is below the"),
        (["--strategy", "rotor", "-o", "no/such/plan.html"], 2, "cannot be written"),
        (["missing.json", "--strategy", "rotor", "-o", "plan.html"], 2, "missing.json: cannot be read"),
        (["--budgets", "1", "-o", "plan.html"], 2, "--budgets"),
    ],
)
def test_what_cannot_be_written_is_one_line(arguments, status, message, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "missing.json").unlink(missing_ok=True)
    assert main(["report", files["chain"], *arguments]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "plan.html").exists()
