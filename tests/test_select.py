import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import lowtide
from lowtide.select import load_sizes

MEBIBYTE = 2**20


@pytest.mark.parametrize(
    ("sizes", "model", "cost", "checkpoints"),
    [
        ([5], "static", 5, (0,)),
        ([5], "dynamic", 5, (0,)),
        ([5, 3], "static", 8, (0, 1)),
        ([5, 3], "dynamic", 13, (0, 1)),
        ([1, 8, 8, 1, 8, 8, 1], "static", 19, (0, 3, 6)),
        ([1, 8, 8, 1, 8, 8, 1], "dynamic", 26, (0, 3, 5, 6)),
    ],
)
def test_by_hand(sizes, model, cost, checkpoints):
    assert lowtide.select(sizes, model=model) == lowtide.Selection(cost, checkpoints)


@pytest.mark.parametrize("model", ["static", "dynamic"])
def test_scaling_the_sizes_scales_the_cost(model):
    sizes = [random.Random(3).randint(0, 100) for _ in range(50)]
    cost = lowtide.select(sizes, model=model).cost
    assert lowtide.select([3 * size for size in sizes], model=model).cost == 3 * cost


def test_arrays_tuples_and_ranges_are_lists_too():
    expected = lowtide.select(list(range(1, 30)))
    for sizes in (range(1, 30), tuple(range(1, 30)), np.arange(1, 30), np.arange(1, 30, dtype=np.int32)):
        selection = lowtide.select(sizes)
        assert selection == expected
        assert all(type(k) is int for k in selection.checkpoints)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], "empty"),
        ([1, -2], "d_1 is -2"),
        ([1, 2.0], "d_1 is 2.0"),
        ([True, 2], "d_0 is True"),
        (["1"], "d_0 is '1'"),
        ("12", "list of whole numbers"),
        ({"a": 1}, "list of whole numbers"),
        (7, "list of whole numbers"),
        (None, "list of whole numbers"),
        (np.ones(3), "d_0 is 1.0"),
    ],
)
def test_what_is_not_a_list_of_whole_numbers_is_refused(sizes, expected):
    with pytest.raises(lowtide.SizesError, match=expected):
        lowtide.select(sizes)


def test_a_wrong_model_or_algorithm_suggests_the_nearest():
    with pytest.raises(lowtide.StrategyError, match="did you mean 'dynamic'"):
        lowtide.select([1, 2], model="dynamc")
    with pytest.raises(lowtide.StrategyError, match="known are linear, quadratic"):
        lowtide.select([1, 2], algorithm="?")


@pytest.mark.parametrize("text", ["", "[1, 2", "[1, NaN]", '{"sizes": [1]}', "[1, 2.5]", "[]"])
def test_a_wrong_file_is_refused_with_its_name(text, tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text(text)
    with pytest.raises(lowtide.SizesError) as refusal:
        load_sizes(path)
    assert str(refusal.value).startswith(str(path))
    assert "\n" not in str(refusal.value)


def test_a_file_with_a_number_that_json_does_not_know_is_refused_with_its_place(tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text("[1, NaN]")
    with pytest.raises(lowtide.SizesError, match="d_1 is nan, expected a whole number"):
        load_sizes(path)


# Hong, table 2, batch 128: the published checkpoints (d_0 is theirs too), and the measured peak in MiB.
PUBLISHED = {
    ("vgg19", "static"): ((0, 3, 6, 24), 6835),
    ("vgg19", "dynamic"): ((0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 23, 24), 6444),
    ("alexnet", "static"): ((0, 2, 4, 12, 15), 1003),
    ("alexnet", "dynamic"): ((0, 2, 4, 6, 8, 12, 14, 15), 1002),
}


def published_cost(sizes, model, checkpoints):
    pairs = list(pairwise(checkpoints))
    if model == "static":
        return sum(sizes[k] for k in checkpoints) + max(sum(sizes[h + 1 : i]) for h, i in pairs)
    return max(sum(sizes[k] for k in checkpoints if k <= i) + sum(sizes[h + 1 : i]) + max(sizes[h:i]) for h, i in pairs)


def example(name):
    return json.loads((Path(__file__).parents[1] / "examples" / "sizes" / f"{name}-b128.json").read_text())


@pytest.mark.parametrize(("network", "model"), PUBLISHED)
def test_the_published_checkpoints_are_optimal(network, model):
    """All four sets of the paper cost exactly our optimum; two of ours are other sets of the same cost."""
    sizes, (checkpoints, _) = example(network), PUBLISHED[network, model]
    selection = lowtide.select(sizes, model=model)
    assert selection.cost == published_cost(sizes, model, checkpoints)
    assert published_cost(sizes, model, selection.checkpoints) == selection.cost
    differs = {("vgg19", "dynamic"), ("alexnet", "static"), ("alexnet", "dynamic")}
    assert (selection.checkpoints != checkpoints) == ((network, model) in differs)


def test_equation_12_is_a_constant_below_the_measured_peaks_of_vgg19():
    """Weights, their gradients and workspaces; {5, 10, 15, 20, 24} is the square-root rule's set."""
    measured = [PUBLISHED["vgg19", "static"], PUBLISHED["vgg19", "dynamic"], ((0, 5, 10, 15, 20, 24), 8404)]
    for checkpoints, peak in measured:
        above = peak - published_cost(example("vgg19"), "dynamic", checkpoints) / MEBIBYTE
        assert above == pytest.approx(1666, abs=1)
