"""The command line is a contract: names, options, fields and exit codes change only with this file."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import lowtide
from lowtide.cli import SUBCOMMANDS, _app, main

FROZEN = {
    "measure": {
        "TARGET",
        "-o",
        "--output",
        "--batch",
        "--image",
        "--length",
        "--layers",
        "--width",
        "--heads",
        "--vocabulary",
        "--dtype",
        "--device",
        "--stages",
        "--optimizer",
        "--json",
    },
    "solve": {
        "CHAIN.json",
        "--memory",
        "--strategy",
        "--bandwidth",
        "--slots",
        "--segments",
        "--half-duplex",
        "--step-in-backward",
        "-o",
        "--output",
        "--json",
    },
    "simulate": {"CHAIN.json", "SCHEDULE.json", "--bandwidth", "--half-duplex", "--json"},
    "compare": {"CHAIN.json", "--memory", "--strategy", "--bandwidth", "--slots", "--half-duplex", "--json"},
    "report": {
        "CHAIN.json",
        "[SCHEDULE.json]",
        "-o",
        "--output",
        "--memory",
        "--bandwidth",
        "--strategy",
        "--slots",
        "--half-duplex",
        "--budgets",
        "--patience",
        "--json",
    },
    "plot": {
        "CHAIN.json",
        "[SCHEDULE.json]",
        "-o",
        "--output",
        "--memory",
        "--bandwidth",
        "--strategy",
        "--slots",
        "--half-duplex",
        "--panel",
        "--over",
        "--json",
    },
    "select": {"SIZES.json", "--model", "--algorithm", "--json"},
    "bound": {
        "CHAIN.json",
        "--memory",
        "--bandwidth",
        "--time-limit",
        "--gap",
        "--half-duplex",
        "--model",
        "--json",
    },
    "strategies": {"--json"},
    "batch": {
        "MODULE:FUNCTION",
        "--memory",
        "--dim",
        "--most",
        "--optimizer",
        "--strategy",
        "--bandwidth",
        "--json",
    },
    "estimate": {
        "MODULE:FUNCTION",
        "--memory",
        "--device",
        "--optimizer",
        "--accumulate",
        "--bandwidth",
        "--json",
    },
}


def parameters(name):
    """The names of a subcommand's options and the metavars of its arguments."""
    command = typer.main.get_command(_app([name])).commands[name]
    found = set()
    for parameter in command.params:
        found |= {parameter.metavar} if parameter.param_type_name == "argument" else set(parameter.opts)
    return found


def test_every_subcommand_is_frozen():
    assert set(FROZEN) == set(SUBCOMMANDS)


@pytest.mark.parametrize("name", FROZEN)
def test_names_and_options_are_frozen(name):
    assert parameters(name) >= FROZEN[name]


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_help_with_examples(name, capsys):
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "Examples:" in printed.out
    assert f"  lowtide {name}" in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_list_says_what_the_command_is(name):
    module, summary = SUBCOMMANDS[name]
    command = __import__(module, fromlist=["command"]).command
    assert inspect.getdoc(command)
    assert summary.endswith(".")
    assert len(summary) <= 60


def test_the_list_is_shown_with_the_summaries(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, (_, summary) in SUBCOMMANDS.items():
        assert name in printed
        assert summary in printed


def test_without_a_command_it_shows_the_help(capsys):
    assert main([]) == 0
    bare = capsys.readouterr()
    assert main(["--help"]) == 0
    assert bare == capsys.readouterr()
    assert bare.err == ""


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["solv"], "Did you mean 'solve'?\n"),
        (["solve"], "CHAIN"),
        (["solve", "{chain}"], "--memory"),
        (["solve", "{chain}", "--memory", "1.5"], "--memory: '1.5' is not a number of bytes"),
        (["solve", "{chain}", "--memory", "20kB", "--bandwidth", "12GB"], "--bandwidth: '12GB' is not a bandwidth"),
        (["solve", "{chain}", "--memory", "20kB", "--memori", "3"], "--memory"),
        (["solve", "{chain}", "--memory", "20kB", "--slots", "many"], "--slots"),
        (["solve", "{chain}", "--memory", "20kB", "--slots", "0", "--strategy", "store-all"], "slots is 0"),
        (["solve", "{chain}", "--memory", "20kB", "--strategy", "store-al"], "did you mean 'store-all'"),
        (["solve", "{chain}", "--memory", "20kB", "--strategy", "store-all", "--segments", "2"], "segments"),
        (["solve", "{missing}", "--memory", "20kB"], "cannot be read"),
        (["solve", "{garbled}", "--memory", "20kB"], "not valid JSON"),
        (["solve", "{chain}", "extra", "--memory", "20kB"], "extra"),
        (["solve", "{chain}", "--memory"], "requires an argument; see 'lowtide solve --help'"),
        (["solve", "{chain}", "--memory", "20kB", "-o", "{chain}"], "it is the file to be read; name another one"),
        (["report", "{chain}", "-o", "{chain}"], "it is the file to be read"),
        (
            ["simulate", "{chain}", "{chain}"],
            "format is 'lowtide.chain/1', expected 'lowtide.schedule/1'; write one with lowtide solve -o",
        ),
        (["simulate", "{chain}", "{missing}"], "cannot be read"),
        (["compare", "{chain}", "--memory", "lots"], "lots"),
        (["batch", "module:make", "--memory", "24"], "--memory=24 is 24 bytes, too few for any network; did you mean"),
        (["estimate", "module:make", "--memory", "24"], "did you mean '24GiB'?"),
        (["batch", "module:make", "--memory", "1.5"], "--memory: '1.5' is not a number of bytes"),
        (["compare", "{chain}", "--strategy", "auto"], "leave it out"),
        (["strategies", "--jsn"], "--json"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(arguments, expected, files, capsys):
    assert main([argument.format(**files) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("lowtide: ")
    assert expected in printed.err


def test_what_a_solver_prints_is_not_among_the_results(files, capfd, monkeypatch):
    def printing(*arguments, **settings):
        os.write(1, b"a line of HiGHS\n")  # as compiled code does it
        print("a line of Python")
        return lowtide.solve(*arguments, **settings)

    monkeypatch.setattr("lowtide.cli.solve.solve", printing)
    assert main(["solve", files["chain"], "--memory", "20kB", "--strategy", "rotor", "--json"]) == 0
    print("afterwards")
    printed = capfd.readouterr()
    result, afterwards = printed.out.splitlines()
    assert json.loads(result)["feasible"] is True
    assert afterwards == "afterwards"
    assert "a line of HiGHS" in printed.err
    assert "a line of Python" in printed.err


def test_interruption_is_status_130_without_traceback(files, capsys, monkeypatch):
    def interrupted(*_arguments, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("lowtide.cli.solve.solve", interrupted)
    assert main(["solve", files["chain"], "--memory", "20kB"]) == 130
    assert capsys.readouterr().err == "lowtide: interrupted\n"


def test_a_defect_is_one_line_and_status_1(files, capsys, monkeypatch):
    def broken(*_arguments, **_settings):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("lowtide.cli.solve.solve", broken)
    assert main(["solve", files["chain"], "--memory", "20kB"]) == 1
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert "two lines" in printed


def run(*arguments, stdout=subprocess.PIPE):
    """Python in a process of its own, with the lowtide that is under test."""
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parents[1])}
    given = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "check": False, "env": environment}
    return subprocess.run([sys.executable, *arguments], **given)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_closed_pipe_is_status_141_and_nothing_is_said(options):
    reading, writing = os.pipe()
    os.close(reading)
    done = run("-m", "lowtide", "strategies", *options, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_as_a_process(files):
    done = run("-m", "lowtide", "solve", files["chain"], "--memory", "20kB", "--strategy", "store-all", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["feasible"] is True
    done = run("-m", "lowtide", "solve", files["chain"], "--memory", "1kB", "--strategy", "store-all", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["minimum_bytes"] > 1000
    assert len(done.stderr.splitlines()) == 1
    done = run("-m", "lowtide", "solve", files["missing"], "--memory", "1kB")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("lowtide so", {"solve"}),
        ("lowtide solve --strat", {"--strategy"}),
        ("lowtide solve --strategy weights-greedy", {"weights-greedy", "weights-greedy-nodiscount"}),
        ("lowtide report --strategy rot", {"rotor"}),
        ("lowtide compare --strategy rot", {"rotor"}),
    ],
)
def test_a_shell_completes(typed, completed, monkeypatch, capsys):
    monkeypatch.setenv("_LOWTIDE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert main([]) == 0
    assert set(capsys.readouterr().out.split()) == completed


@pytest.mark.parametrize("arguments", [["-c", "import lowtide"], ["-m", "lowtide", "--help"]])
def test_nothing_heavy_is_imported_before_it_is_used(arguments):
    done = run("-X", "importtime", *arguments)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "lowtide" in imported
    assert not imported & {"torch", "numba", "numpy", "scipy", "matplotlib", "rich"}
