import json

import pytest

from lowtide import Chain
from lowtide.cli import main

pytestmark = pytest.mark.torch

SMALL = [
    "gpt2",
    "--batch",
    "1",
    "--length",
    "8",
    "--layers",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--vocabulary",
    "32",
]

MADE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), torch.zeros(2, 4)

def wrong():
    return 1

def fails():
    raise KeyError("mine")

def misfit():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.zeros(2, 5)

class Talkative(nn.Linear):
    def forward(self, x):
        print("shape", x.shape)
        return super().forward(x)

def talks():
    print("making it")
    return nn.Sequential(Talkative(4, 4), nn.Tanh(), Talkative(4, 4), nn.Tanh()), torch.zeros(2, 4)

number = 3
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("lowtide.runtime.measure.timing._FEWEST_RUNS", 1)
    monkeypatch.setattr("lowtide.runtime.measure.timing._MOST_RUNS", 1)


def test_a_network_of_the_zoo(tmp_path, capsys):
    path = str(tmp_path / "chain.json")
    assert main(["measure", *SMALL, "--device", "cpu", "--optimizer", "adam", "-o", path]) == 0
    chain = Chain.load(path)
    assert chain.num_stages >= 4
    assert sum(stage.optimizer_bytes for stage in chain.stages) == 2 * sum(s.weight_bytes for s in chain.stages)
    shown = capsys.readouterr().out
    assert "blocks.1" in shown
    assert "written to" in shown


def test_names_stay_whole_where_the_terminal_is_narrow(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["measure", *SMALL, "--device", "cpu", "--json"]) == 0
    chain = Chain.from_dict(json.loads(capsys.readouterr().out))
    assert main(["measure", *SMALL, "--device", "cpu"]) == 0
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert first[2 : 2 + chain.num_stages] == [stage.name for stage in chain.stages]
    assert max(len(stage.name) for stage in chain.stages) > 20


def test_stages_by_hand_and_json(capsys):
    assert main(["measure", *SMALL, "--device", "cpu", "--stages", "blocks.*", "--json"]) == 0
    chain = Chain.from_dict(json.loads(capsys.readouterr().out))
    assert [stage.name for stage in chain.stages][1:3] == ["blocks.0", "blocks.1"]


def test_a_function_of_the_user(tmp_path, monkeypatch, capsys):
    (tmp_path / "made_by_user.py").write_text(MADE)
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "made_by_user:make", "-o", "chain.json"]) == 0
    assert Chain.load("chain.json").num_stages == 2
    for target, reason in (
        ("made_by_user:wrong", "(model, sample)"),
        ("made_by_user:absent", "absent"),
        ("made_by_user:fails", "KeyError: 'mine'"),
        ("made_by_user:misfit", "does not run on its sample: RuntimeError"),
        ("made_by_user:number", "expected a function"),
        ("not_there_at_all:make", "not_there_at_all"),
    ):
        capsys.readouterr()
        assert main(["measure", target]) == 2
        printed = capsys.readouterr().err
        assert reason in printed
        assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def make(:", "SyntaxError: invalid syntax"),
        ("from torch import not_there_at_all", "ImportError: cannot import name 'not_there_at_all'"),
        ("import torch\ntorch.not_there_at_all", "failed with AttributeError"),
        ("import sys\nsys.exit('usage: train.py DATA')", "SystemExit: usage: train.py DATA"),
        ("import sys\ndef make():\n    sys.exit(0)", "make() failed with SystemExit: 0"),
        (
            "def __getattr__(name):\n    import not_there_at_all",
            "ModuleNotFoundError: No module named 'not_there_at_all'",
        ),
    ],
)
def test_what_is_wrong_in_the_module_of_the_user_is_no_defect_of_lowtide(source, reason, tmp_path, monkeypatch, capsys):
    module = f"ill_{abs(hash(source))}"  # one that no other case has imported
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert main(["measure", f"{module}:make"]) == 2
    printed = capsys.readouterr().err
    assert reason in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["resnet17"], "resnet18"),
        (["GPT2"], "did you mean 'gpt2'?"),
        ([":make"], "':make' lacks the name of a module; write module:function"),
        (["package/training.py:"], "named without .py and with dots; write package.training:function"),
        (["package.training:"], "'package.training:' lacks the name of a function; write module:function"),
        (["resnet18", "--length", "4", "--device", "cpu"], "length"),
        (["resnet18", "--dtype", "int8", "--device", "cpu"], "dtype"),
        (["resnet18", "--device", "nowhere"], "nowhere"),
        (["resnet18", "--device", "nowhere"], "; try --device cpu"),
        (["package/training.py:make"], "write package.training:make"),
        (["a.b:c", "--batch", "2"], "zoo"),
        (["a.b:c", "--dtype", "float16"], "--dtype is for networks of the zoo"),
        (["resnet18", "-o", "not/there/chain.json"], "make it first"),
        (["resnet18", "-o", "."], "name a file"),
    ],
)
def test_wrong_use_is_one_line(arguments, reason, capsys):
    assert main(["measure", *arguments]) == 2
    printed = capsys.readouterr().err
    assert reason in printed
    assert printed.count("\n") == 1


def test_a_device_on_which_the_function_has_not_put_its_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "made_on_cpu.py").write_text(MADE)
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "made_on_cpu:make", "--device", "cpu"]) == 0
    for device in ("cuda", "cuda:0", "gpu"):
        capsys.readouterr()
        assert main(["measure", "made_on_cpu:make", "--device", device]) == 2
        assert f"--device {device}: the model of made_on_cpu:make is on cpu" in capsys.readouterr().err


def test_what_a_model_prints_is_not_among_the_results(tmp_path, capsys, monkeypatch):
    (tmp_path / "talking.py").write_text(MADE + 'print("imported")')
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "talking:talks", "--json"]) == 0
    printed = capsys.readouterr()
    assert Chain.from_dict(json.loads(printed.out)).num_stages >= 2
    assert "imported" in printed.err
    assert "making it" in printed.err
    assert "shape" in printed.err
