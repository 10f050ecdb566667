"""What is wrong with a measuring command's options is said in one line, before anything is measured or written."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
from benchmarks import scale

ROOT = Path(__file__).parents[2]
TINY = ["--tiny", "--device", "cpu"]

# The commands that go on with an earlier run, and a file of theirs.
STORED = {
    "benchmarks.peers": "benchmarks/results/peers-h200.json",
    "benchmarks.variants": "benchmarks/results/variants-h200.json",
    "papers.pofo.executed": "papers/pofo/results/pofo-executed-h200.json",
    "papers.rotor.__main__": "papers/rotor/results/rotor-h200.json",
    "papers.selection.__main__": "papers/selection/results/selection-h200.json",
}
DRAWING = [command for command in STORED if not command.startswith("papers.selection")]
MEASURING = [*STORED, "benchmarks.scale"]

FACTS = {"machine": "any", "torch": "any", "lowtide": "any", "date": "any", "command": "any"}
WRONG_FILES = {
    "missing": None,
    "no JSON": b"garbage{",
    "no text": b"\xff\xfe\x00",
    "a list": b"[1, 2]",
    "another object": b'{"a": 1}',
    "facts alone": json.dumps({"facts": FACTS}).encode(),
    "other facts": b'{"facts": {"machine": 1}}',
}


def refusal(command, given, capsys):
    """The one line with which a command ends; without `given` it reads the command line."""
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(command).main(*([] if given is None else [given]))
    printed = capsys.readouterr()
    assert ended.value.code == 2, printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def in_machine_of(path, monkeypatch):
    """As if on the machine where a file was measured, so that it may be gone on with."""
    facts = json.loads(path.read_text())["facts"]
    monkeypatch.setattr("benchmarks.harness.machine_facts", lambda device: dict(facts))


@pytest.mark.parametrize("content", WRONG_FILES)
@pytest.mark.parametrize(("command", "option"), [*((c, "--resume") for c in STORED), *((c, "--draw") for c in DRAWING)])
def test_a_wrong_file_of_earlier_results(command, option, content, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.harness.machine_facts", lambda device: dict(FACTS))
    path = tmp_path / "earlier.json"
    if WRONG_FILES[content] is not None:
        path.write_bytes(WRONG_FILES[content])
    line = refusal(command, [*TINY, "--output", str(tmp_path / "new"), option, str(path)], capsys)
    assert line.startswith(f"{path}: ")
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p != path] == []


@pytest.mark.parametrize("command", STORED)
def test_results_of_another_command(command, tmp_path, monkeypatch, capsys):
    other = ROOT / ("papers/pofo/results/v100.json" if "pofo" not in command else STORED["papers.rotor.__main__"])
    in_machine_of(other, monkeypatch)
    line = refusal(command, [*TINY, "--output", str(tmp_path), "--resume", str(other)], capsys)
    assert "is not a file of results of this command" in line


@pytest.mark.parametrize("command", STORED)
def test_results_of_another_machine(command, tmp_path, capsys):
    line = refusal(command, [*TINY, "--output", str(tmp_path), "--resume", str(ROOT / STORED[command])], capsys)
    assert "those results are of NVIDIA H200" in line


@pytest.mark.parametrize("command", DRAWING)
def test_a_stored_table_is_what_its_figures_give(command, tmp_path):
    stored = ROOT / STORED[command]
    copy = tmp_path / stored.name
    shutil.copy(stored, copy)
    importlib.import_module(command).main(["--draw", str(copy)])
    assert json.loads(copy.read_text()) == json.loads(stored.read_text())
    assert copy.with_suffix(".md").read_text() == stored.with_suffix(".md").read_text()
    assert copy.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", MEASURING)
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_time_that_is_none(command, seconds, tmp_path, capsys):
    line = refusal(command, [*TINY, "--output", str(tmp_path), f"--seconds={seconds}"], capsys)
    assert f"--seconds: '{seconds}' is not a number of seconds above 0" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", MEASURING)
def test_a_network_that_there_is_not(command, tmp_path, capsys):
    known = "equal" if command == "benchmarks.scale" else "e"  # which some name of every command contains
    for given in (["nosuch"], [known, "nosuch"]):
        line = refusal(command, [*TINY, "--output", str(tmp_path), "--only", *given], capsys)
        assert line.startswith("--only nosuch: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [*MEASURING, "papers.weights.__main__"])
def test_a_folder_that_cannot_be_written(command, tmp_path, capsys):
    there = tmp_path / "file"
    there.touch()
    for output in (there, there / "below"):
        line = refusal(command, [*(TINY if "weights" not in command else ["--tiny"]), "--output", str(output)], capsys)
        assert line.startswith(f"{output}: results cannot be written there: ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["missing.json"], "missing.json: cannot be read"),
        (["--bandwidth", "fast"], "fast"),
        (["--setting", "nosuch"], "nosuch"),
        (["--time-scale", "0"], "--time-scale: '0' is not a number above 0"),
        (["--output", "file"], "file: results cannot be written there"),
        (["--keep", "--output", "kept"], "is not a file of results of this command"),
    ],
)
def test_what_the_simulated_figures_of_pofo_refuse(given, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("kept").mkdir()
    Path("kept/v100.json").write_text("[]")
    assert said in refusal("papers.pofo.__main__", ["--quick", *given], capsys)


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("papers.rotor.__main__", ["--image", "0"]),
        ("papers.rotor.__main__", ["--batch=-1"]),
        ("papers.rotor.__main__", ["--budgets", "0"]),
        ("papers.rotor.__main__", ["--segments", "many"]),
        ("papers.pofo.executed", ["--alphas", "0.5", "many"]),
        ("benchmarks.peers", ["--segments", "0"]),
        ("benchmarks.peers", ["--memory-budgets", "7"]),
        ("benchmarks.peers", ["--largest-batch", "--limits", "0.5"]),
        ("benchmarks.peers", ["--largest-batch", "--limits", "much"]),
        ("benchmarks.peers", ["--largest-batch", "--ways", "nosuch"]),
        ("benchmarks.peers", ["--largest-batch", "--ways", "plain", "nosuch"]),
    ],
)
def test_numbers_that_mean_nothing(command, given, tmp_path, capsys):
    line = refusal(command, [*TINY, "--output", str(tmp_path), *given], capsys)
    assert given[-1].split("=")[-1] in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        ("benchmarks.measuring", ["--device", "cpu", "--output", "file"], "file: results cannot be written there"),
        ("benchmarks.measuring", ["--device", "cpu", "--output", "new", "--only", "nosuch"], "--only nosuch: "),
        (
            "benchmarks.measuring",
            ["--device", "cpu", "--output", "new", "--only", "resnet101", "nosuch"],
            "--only nosuch: ",
        ),
        (
            "benchmarks.coverage",
            ["--device", "cpu", "--output", "file/x.json"],
            "file: results cannot be written there",
        ),
        ("benchmarks.coverage", ["--device", "cpu", "--output", "new.json", "--only", "nosuch"], "--only nosuch: "),
        (
            "benchmarks.coverage",
            ["--device", "cpu", "--output", "new.json", "--only", "gpt2", "nosuch"],
            "--only nosuch: ",
        ),
        ("benchmarks.runtime", ["--tiny", "--output", "."], ".: results cannot be written there"),
        ("benchmarks.runtime", ["--tiny", "--only", "nosuch"], "--only nosuch: "),
        ("benchmarks.pofo", ["--plot", "file/x.png"], "file: results cannot be written there"),
        ("benchmarks.pofo", ["--json", "list.json"], "list.json: is not a file of figures"),
        ("benchmarks.pofo", ["--json", "file"], "file: is not valid JSON"),
        ("benchmarks.pofo", ["--bandwidth", "fast"], "fast"),
        ("benchmarks.solvers", ["--nosuch"], "--nosuch"),
    ],
)
def test_what_the_other_commands_refuse(command, given, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # coverage sets it where nobody else has: only here, then
    monkeypatch.setattr("sys.argv", [command, *given])
    Path("file").touch()
    Path("list.json").write_text("[1, 2]")
    assert said in refusal(command, None, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "list.json"]


def test_a_series_of_scale_by_itself(tmp_path, unrendered):
    scale.main([*TINY, "--only", "budgets", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "scale-tiny-cpu.json").read_text())["rows"]
    assert [row["series"] for row in rows] == ["budgets", "budgets"]
