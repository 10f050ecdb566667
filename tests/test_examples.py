"""The files under `examples/` are what their script writes, and the command line takes them."""

import json
from pathlib import Path

import pytest
from examples import make_chains as script

from lowtide import Chain, solve

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_sizes_are_those_of_the_script():
    written = {path.name: json.loads(path.read_text()) for path in (EXAMPLES / "sizes").glob("*.json")}
    assert written == script.all_sizes()


def test_the_chains_are_those_of_the_script():
    for name, chain in script.all_chains().items():
        written = Chain.load(EXAMPLES / "chains" / name)
        assert written == chain
        assert "nothing was measured" in written.provenance["source"]


def test_sizes_by_hand():
    vgg19 = script.all_sizes()["vgg19-b128.json"]
    assert len(vgg19) == 25
    assert vgg19[0] == 4 * 128 * 3 * 224 * 224
    assert vgg19[2] == 4 * 128 * 64 * 224 * 224
    assert vgg19[21] == 4 * 128 * 512 * 7 * 7
    assert vgg19[24] == 4 * 128 * 1000
    alexnet = script.all_sizes()["alexnet-b128.json"]
    assert len(alexnet) == 16
    assert alexnet[1] == 4 * 128 * 64 * 55 * 55


@pytest.mark.parametrize(
    ("name", "millions"), [("vgg19", 143.67), ("alexnet", 61.10), ("resnet50", 25.56), ("gpt", 406.29)]
)
def test_the_networks_have_as_many_parameters_as_they_should(name, millions):
    """torchvision's counts; the transformer is GPT-2 medium with a head of its own (355 million and one more table)."""
    parameters = sum(layer.parameters for layer in getattr(script, name)())
    assert parameters / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize("path", sorted((EXAMPLES / "chains").glob("*.json")), ids=lambda path: path.stem)
def test_every_chain_can_be_planned(path):
    chain = Chain.load(path)
    whole = solve(chain, memory_budget="1TiB", strategy="store-all")
    less = solve(chain, memory_budget="1TiB", strategy="dynamic-selection")
    assert less.peak_bytes < whole.peak_bytes
    assert less.seconds > whole.seconds
