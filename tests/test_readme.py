"""What README.md and the pages under docs/ show is what happens.

A ```console block holds commands after `$ ` and below each what it prints, `...` standing for anything. Its `lowtide`
commands run here, in a folder with a copy of `examples/`; other programs (`make`, `pip`, `git`) do not. The ```python
blocks of README.md run one after the other, as one program. A block under a line `<!-- not run: why -->` is left out.
"""

import doctest
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.pages import blocks

from lowtide.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def sessions(body):
    """The commands of a console block, each with what it is said to print."""
    command, printed = None, []
    lines = iter(body.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            printed.append(line)
            continue
        if command is not None:
            yield command, printed
        command, printed = line[2:], []
        while command.endswith("\\"):
            command = command[:-1] + next(lines).strip()
    if command is not None:
        yield command, printed


# Blocks with these commands need torch.
_MEASURING = re.compile(r"^\$ lowtide (measure|batch|estimate)\b", re.MULTILINE)
CONSOLE = [
    pytest.param(body, id=f"{page.name}:{line}", marks=[pytest.mark.torch] if _MEASURING.search(body) else [])
    for page in PAGES
    for line, body in blocks(page, "console")
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a copy of the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("body", CONSOLE)
def test_commands_print_what_is_shown(body, capsys):
    for command, expected in sessions(body):
        program, *arguments = shlex.split(command, comments=True)
        if program != "lowtide":
            continue
        status = main(arguments)
        captured = capsys.readouterr()
        printed = captured.out + captured.err
        assert status in ((0, 2, 3) if expected else (0,)), printed
        if expected:
            check_printed(command, "\n".join(expected).strip() + "\n", printed.strip() + "\n")


def check_printed(command, expected, printed):
    """Compare line by line, runs of blanks counting as one."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(expected, printed, flags):
        pytest.fail(f"$ {command}\nis said to print\n{expected}\nand prints\n{printed}", pytrace=False)


@pytest.mark.torch
def test_the_python_of_the_readme_runs(folder):
    import torch

    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)))
    pairs = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
    the_users_own = {
        "torch": torch,
        "model": model,
        "device": "cpu",
        "loader": torch.utils.data.DataLoader(pairs, batch_size=16, shuffle=True),
        "loss_fn": torch.nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    before = model[0][0].weight.detach().clone()
    program = "\n".join(body for _, body in blocks(ROOT / "README.md", "python"))
    exec(compile(program, "README.md", "exec"), {"__name__": "readme", **the_users_own})
    assert not torch.equal(before, model[0][0].weight)  # it has trained
    assert folder.exists()


def test_sessions_are_told_apart():
    body = "$ lowtide one \\\n    --two\nthree\n\nfour\n$ make demo\n$ lowtide five\nsix\n"
    assert list(sessions(body)) == [
        ("lowtide one --two", ["three", "", "four"]),
        ("make demo", []),
        ("lowtide five", ["six"]),
    ]


def test_blocks_are_found_and_left_out(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ a\n```\n\n<!-- not run: slow -->\n```console\n$ b\n```\ntext\n```python\nc\n```\n")
    assert list(blocks(page, "console")) == [(2, "$ a\n")]
    assert [body for _, body in blocks(page, "python")] == ["c\n"]
