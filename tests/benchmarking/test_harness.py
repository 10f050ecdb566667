"""What all measuring commands share."""

import importlib
import runpy

import pytest
import torch
from benchmarks import harness, measuring
from papers.selection import __main__ as selection

COMMANDS = {
    "benchmarks.peers": [],
    "benchmarks.scale": [],
    "benchmarks.variants": [],
    "papers.pofo.executed": [],
    "papers.rotor.__main__": [],
    "papers.selection.__main__": [],
    "benchmarks.measuring": ["--output", "results"],
    "benchmarks.coverage": ["--output", "results.json"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_that_is_not_there_is_one_line(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # coverage sets it where nobody else has: only here, then
    given = ["--device", "cuda", *COMMANDS[command]]
    monkeypatch.setattr("sys.argv", [command, *given])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(command).main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--device cuda: " in printed.err
    assert "--device cpu" in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_command_names_the_files_that_it_has_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "selection-tiny-cpu.png").write_bytes(b"of an earlier run")
    monkeypatch.setattr(selection, "TINY", [])  # as where the time is over before figure 5
    selection.main(["--device", "cpu", "--tiny", "--output", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {tmp_path / 'selection-tiny-cpu'}.json and .md"


def test_a_picture_is_named_where_there_is_one(tmp_path):
    def draw(plt):
        return plt.figure()

    stem = "any"
    harness.write_results(tmp_path, stem, {}, [], None)
    assert harness.written_files(tmp_path, stem) == f"{tmp_path / stem}.json and .md"
    harness.write_results(tmp_path, stem, {}, [], draw)
    assert (tmp_path / "any.png").exists()
    assert harness.written_files(tmp_path, stem) == f"{tmp_path / stem}.json, .md and .png"
    harness.write_results(tmp_path, stem, {}, [], lambda plt: None)
    assert harness.written_files(tmp_path, stem) == f"{tmp_path / stem}.json and .md"


NEWEST = {"machine": "H200", "torch": "2.11", "lowtide": "0.1", "date": "today", "command": "newest --resume"}
EARLIER = [{"date": "yesterday", "command": "second"}, {"date": "before", "command": "first"}]


def test_a_heading_is_of_the_newest_run_alone():
    assert harness.heading(NEWEST) == "H200, torch 2.11, lowtide 0.1, today (`newest --resume`)."
    one, two = (harness.heading({**NEWEST, "earlier": EARLIER[:number]}) for number in (1, 2))
    assert one.endswith("today (`newest --resume`), and 1 earlier run, listed at the end of the report.")
    assert two.endswith("today (`newest --resume`), and 2 earlier runs, listed at the end of the report.")


@pytest.mark.parametrize("lines", [["a table"], ["a table", ""]])
def test_a_report_of_several_runs_ends_with_all_of_them(lines, tmp_path):
    harness.write_results(tmp_path, "any", {"facts": {**NEWEST, "earlier": EARLIER}}, lines)
    runs = ["- today: `newest --resume`", "- yesterday: `second`", "- before: `first`"]
    assert (tmp_path / "any.md").read_text().splitlines() == ["a table", "", "## Runs", "", *runs]


@pytest.mark.parametrize("facts", [NEWEST, {**NEWEST, "earlier": []}])
def test_a_report_of_one_run_has_no_list(facts, tmp_path):
    harness.write_results(tmp_path, "any", {"facts": facts}, ["a table"])
    assert (tmp_path / "any.md").read_text() == "a table\n"


@pytest.mark.parametrize("command", ["benchmarks.solvers", "papers.weights"])
def test_help_shows_how_a_command_is_called(command, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [command, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out.startswith(f"usage: python -m {command} ")


def test_small_networks_do_not_bear_the_names_of_the_large_ones(tmp_path, monkeypatch):
    def compared(title, setting, device, folder):
        assert (title, setting["batch"]) == ("vgg19-b128-224-tiny", 2)
        return {"network": title}

    monkeypatch.setattr(measuring, "compared", compared)
    monkeypatch.setattr(measuring, "shown", str)
    monkeypatch.setattr(
        "sys.argv", ["measuring", "--tiny", "--device", "cpu", "--only", "vgg19", "--output", str(tmp_path)]
    )
    measuring.main()
    assert (tmp_path / "measuring-results.json").exists()


@pytest.mark.parametrize(
    ("medians", "least", "num_rounds"),
    [([4, 5, 4, 6, 1], 4, 4), ([4, 5, 3, 6, 3, 3, 1], 3, 6), ([9 - n / 10 for n in range(20)], 7.9, 12)],
)
def test_rounds_go_on_until_none_is_quieter(medians, least, num_rounds):
    measured = []

    def measure():
        measured.append([0.0, medians[len(measured)], 100.0])
        return measured[-1]

    assert harness.quietest(measure) == [0.0, least, 100.0]
    assert len(measured) == num_rounds
