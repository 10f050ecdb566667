import json

import pytest

from lowtide.cli import main


@pytest.fixture
def sizes(tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text("[1, 8, 8, 1, 8, 8, 1]")
    return str(path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "static"], {"cost": 19, "checkpoints": [0, 3, 6]}),
        (["--model", "dynamic"], {"cost": 26, "checkpoints": [0, 3, 5, 6]}),
        (["--model", "dynamic", "--algorithm", "linear"], {"cost": 26, "checkpoints": [0, 3, 5, 6]}),
        (["--model", "dynamic", "--algorithm", "quadratic"], {"cost": 26}),
    ],
)
def test_json_has_cost_and_checkpoints(options, expected, sizes, capsys):
    assert main(["select", sizes, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() >= expected.items()


def test_people_see_them_too(sizes, capsys):
    assert main(["select", sizes, "--model", "static"]) == 0
    assert "checkpoints  0 3 6\n" in capsys.readouterr().out


def test_many_checkpoints_fit_a_terminal(tmp_path, capsys):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps([1] * 2000))
    assert main(["select", str(path), "--model", "dynamic"]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{sizes}"], "--model"),
        (["{sizes}", "--model", "statc"], "static"),
        (["{sizes}", "--model", "static", "--algorithm", "cubic"], "linear"),
        (["{sizes}.missing", "--model", "static"], "cannot be read"),
    ],
)
def test_wrong_use_is_one_line(arguments, expected, sizes, capsys):
    assert main(["select", *(argument.format(sizes=sizes) for argument in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert expected in printed.err
