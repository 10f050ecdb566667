import json
import math

import pytest
from tests.chains import NESTED_FEATURES, random_chains

from lowtide import Chain, ChainError, SideValue, Stage, Variant

STAGE = {"name": "conv", "forward_seconds": 0.1, "backward_seconds": 0.2, "output_bytes": 10, "saved_bytes": 30}
VARIANT = {"name": "slim", "forward_seconds": 0.1, "backward_seconds": 0.3, "saved_bytes": 12}
FILE = {"format": "lowtide.chain/1", "name": "net", "stages": [STAGE]}
SIDE = {"name": "skip", "bytes": 7, "from": 1, "to": [2]}


def with_stage(**changes):
    return {**FILE, "stages": [STAGE, {**STAGE, **changes}]}


def with_side(**changes):
    return {**FILE, "stages": [STAGE, STAGE], "side_values": [SIDE, {**SIDE, **changes}]}


def test_defaults():
    chain = Chain.from_dict({**FILE, "stages": [{**STAGE, "weight_bytes": 7}]})
    stage = chain.stage(1)
    assert (stage.grad_bytes, stage.weight_grad_bytes, stage.optimizer_bytes, stage.forward_extra_bytes) == (
        10,
        7,
        0,
        0,
    )
    assert (chain.input_bytes, chain.input_grad_bytes, chain.base_bytes, chain.grads_resident) == (0, 0, 0, False)


@pytest.mark.parametrize(
    "chain",
    random_chains(20, 4, features=(*NESTED_FEATURES, "side values", "updates", "outliving")),
    ids=lambda chain: chain.name,
)
def test_there_and_back(chain, tmp_path):
    assert Chain.from_dict(json.loads(json.dumps(chain.to_dict()))) == chain
    chain.save(tmp_path / "chain.json")
    assert Chain.load(tmp_path / "chain.json") == chain


def test_provenance_is_kept_and_does_not_count():
    chain = Chain.from_dict({**FILE, "provenance": {"machine": "a laptop"}})
    assert chain == Chain.from_dict(FILE)
    assert Chain.from_dict(chain.to_dict()).provenance == {"machine": "a laptop"}


def test_the_time_of_a_run_that_may_end_early_is_written_where_it_is_another():
    chain = Chain.from_dict(FILE)
    assert all(stage.rerun_seconds == stage.forward_seconds for stage in chain.stages)
    assert all("rerun_seconds" not in stage for stage in chain.to_dict()["stages"])
    chain = Chain.from_dict(with_stage(rerun_seconds=0))
    assert chain.stage(2).rerun_seconds == 0
    assert Chain.from_dict(chain.to_dict()) == chain


def test_what_a_forward_that_saves_needs_is_written_where_it_is_less():
    chain = Chain.from_dict(FILE)
    assert all(stage.saving_extra_bytes == stage.forward_extra_bytes for stage in chain.stages)
    assert all("saving_extra_bytes" not in stage for stage in chain.to_dict()["stages"])
    chain = Chain.from_dict(with_stage(forward_extra_bytes=7, saving_extra_bytes=0))
    assert chain.stage(2).saving_extra_bytes == 0
    assert Chain.from_dict(chain.to_dict()) == chain


def test_what_is_freed_early_is_written_where_there_is_any():
    assert all("freed_bytes" not in stage for stage in Chain.from_dict(FILE).to_dict()["stages"])
    variant = {"name": "slim", "forward_seconds": 1, "backward_seconds": 1, "saved_bytes": 9**9, "freed_bytes": 3}
    chain = Chain.from_dict(with_stage(freed_bytes=1, variants=[variant]))
    assert (chain.stage(2).freed_bytes, chain.stage(2).variant(1).freed_bytes) == (1, 3)
    assert Chain.from_dict(chain.to_dict()) == chain


def test_the_optimizer_step_and_side_values_are_written_where_there_are_any():
    chain = Chain.from_dict(FILE)
    assert "side_values" not in chain.to_dict()
    assert "update_seconds" not in chain.to_dict()["stages"][0]
    chain = Chain.from_dict({**with_side(to=[2, 2], grad_bytes=3), "stages": [STAGE, {**STAGE, "update_seconds": 0.5}]})
    assert chain.stage(2).update_seconds == 0.5
    assert chain.side_value(1) == SideValue("skip", 7, 1, (2,), grad_bytes=7)
    assert chain.to_dict()["side_values"][1] == {**SIDE, "grad_bytes": 3}
    assert Chain.from_dict(chain.to_dict()) == chain
    with pytest.raises(IndexError):
        chain.side_value(3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (with_stage(output_bytes=3.0), ["stage 2 (conv)", "output_bytes", "3.0", "whole bytes"]),
        (with_stage(output_bytes=True), ["stage 2", "output_bytes", "True"]),
        (with_stage(saved_bytes=-1), ["stage 2", "saved_bytes", "-1"]),
        (with_stage(saved_bytes=9), ["stage 2", "saved_bytes", "less than", "10"]),
        (with_stage(forward_seconds="fast"), ["stage 2", "forward_seconds", "'fast'", "seconds"]),
        (with_stage(forward_seconds=math.nan), ["stage 2", "forward_seconds", "nan"]),
        (with_stage(backward_seconds=math.inf), ["stage 2", "backward_seconds", "inf"]),
        (with_stage(weight_bytes=2**60), ["stage 2", "weight_bytes"]),
        (with_stage(forward_seconds=1e16), ["stage 2", "forward_seconds", "1e+16", "1e+15"]),
        (with_stage(backward_seconds=10**400), ["stage 2", "backward_seconds", "1e+15"]),
        (with_stage(grad_bytes=None), ["stage 2", "grad_bytes", "null"]),
        (with_stage(rerun_seconds=None), ["stage 2", "rerun_seconds", "null", "seconds"]),
        (with_stage(rerun_seconds=9.5), ["stage 2", "rerun_seconds", "9.5", "more than"]),
        (with_stage(saving_extra_bytes=None), ["stage 2", "saving_extra_bytes", "null", "whole bytes"]),
        (with_stage(freed_bytes=10**12), ["stage 2", "freed_bytes", "1000000000000", "more than"]),
        (with_stage(forward_extra_bytes=7, saving_extra_bytes=8), ["stage 2", "saving_extra_bytes", "8", "more than"]),
        (with_stage(update_seconds=-1), ["stage 2", "update_seconds", "-1", "seconds"]),
        (with_side(bytes=-1), ["side value 2 (skip): bytes is -1, expected whole bytes"]),
        (with_side(grad_bytes=1.5), ["side value 2 (skip): grad_bytes is 1.5, expected whole bytes"]),
        (with_side(grad_bytes=None), ["side value 2 (skip): grad_bytes is null"]),
        (with_side(name=5), ["side value 2", "name is 5, expected a string"]),
        (with_side(**{"from": 0}), ["side value 2 (skip): from is 0, expected the number of a stage"]),
        (with_side(**{"from": "conv"}), ["side value 2 (skip): from is 'conv', expected the number of a stage"]),
        (with_side(to=[]), ["side value 2 (skip): to is [], expected a list"]),
        (with_side(to=2), ["side value 2 (skip): to is 2, expected a list"]),
        (with_side(to=[2, True]), ["side value 2 (skip): to is [2, True], expected a list"]),
        (with_side(to=[1, 2]), ["side value 2 (skip): to holds 1, expected only stages after stage 1"]),
        (with_side(to=[2, 3]), ["side value 2 (skip): to holds 3, but the chain has 2 stages"]),
        (with_side(size=3), ["side value 2 (skip): 'size' is not a field here; the fields are name, bytes"]),
        ({**FILE, "stages": [{**STAGE, "outliving": 3}]}, ["stage 1", "outliving is 3, expected a list of pairs"]),
        ({**FILE, "stages": [{**STAGE, "outliving": [[0, 5]]}]}, ["stage 1", "outliving is [[0, 5]], expected a list"]),
        (
            {**FILE, "stages": [STAGE, {**STAGE, "outliving": [[1, 5]]}]},
            ["stage 2", "outliving names stage 1, expected only stages before stage 1"],
        ),
        ({**FILE, "side_values": {}}, ["side_values is {}, expected a list"]),
        ({**FILE, "side_values": [3]}, ["side value 1: is 3, expected an object"]),
        ({**FILE, "side_values": [{"name": "skip"}]}, ["side value 1 (skip): bytes is missing"]),
        (with_stage(output_byte=1), ["stage 2", "'output_byte'", "output_bytes"]),
        (with_stage(name=5), ["stage 2", "name", "a string"]),
        (with_stage(variants={}), ["stage 2", "variants", "a list"]),
        (with_stage(variants=[{"name": "v"}]), ["stage 2", "variant 1", "forward_seconds", "missing"]),
        (with_stage(variants=[{**VARIANT, "saved_bytes": 9}]), ["stage 2", "variant 'slim'", "saved_bytes is 9"]),
        (with_stage(variants=[{**VARIANT, "saved_bytes": -1}]), ["stage 2 (conv), variant 1: saved_bytes is -1"]),
        (with_stage(name="encoder: first", saved_bytes=9), ["stage 2 (encoder: first): saved_bytes is 9"]),
        (with_stage(name="two\nlines", saved_bytes=9), ["stage 2 (two\\nlines): saved_bytes is 9"]),
        ({**FILE, "provenance": {"spread": math.nan}}, ["NaN", "JSON"]),
        ({**FILE, "stages": []}, ["stages", "at least one"]),
        ({**FILE, "stages": [5]}, ["stage 1", "5", "an object"]),
        ({**FILE, "stages": [{k: STAGE[k] for k in STAGE if k != "saved_bytes"}]}, ["stage 1", "saved_bytes"]),
        ({**FILE, "format": "lowtide.chain/2"}, ["format", "lowtide.chain/2", "lowtide.chain/1"]),
        ({**FILE, "grads_resident": 1}, ["grads_resident", "true or false"]),
        ({**FILE, "colour": "red"}, ["'colour'"]),
        ([], ["a JSON object"]),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_line(values, words, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ChainError) as caught:
        Chain.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert all(word in message for word in words), message


def test_variants():
    slim = Variant("slim", 0.1, 0.3, saved_bytes=12)
    stage = Stage("conv", 0.1, 0.2, 10, 30, variants=(slim,))
    assert (stage.num_variants, stage.variant(0).saved_bytes, stage.variant(1)) == (2, 30, slim)
    with pytest.raises(ChainError, match=r"variant 'thin'.*saved_bytes"):
        Stage("conv", 0.1, 0.2, 10, 30, variants=(Variant("thin", 0.1, 0.3, saved_bytes=9),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chain("net", [STAGE]),
        lambda: Chain("net", [None]),
        lambda: Stage("conv", 0.1, 0.2, 10, 30, variants=[VARIANT]),
        lambda: Chain.from_dict({**FILE, "input_bytes": 10**5000}),
        lambda: Chain("net", [Stage("conv", 0.1, 0.2, 10, 30)], side_values=[SIDE]),
        lambda: SideValue("skip", 7, 1, None),
    ],
)
def test_wrong_records_made_in_python_are_refused(make):
    with pytest.raises(ChainError, match="expected"):
        make()


def test_sums():
    chain = Chain("two", [Stage("a", 1.0, 2.0, 4, 6, weight_bytes=3, optimizer_bytes=5), Stage("b", 0.5, 0.5, 1, 1)])
    assert chain.fixed_bytes == 8
    assert chain.compute_seconds == 4.0
    assert [chain.activation_bytes(k) for k in range(3)] == [0, 4, 1]
    with pytest.raises(IndexError):
        chain.stage(0)


def test_other_times():
    stage = {**STAGE, "rerun_seconds": 0.05, "variants": [VARIANT]}
    chain = Chain.from_dict({**FILE, "stages": [stage, STAGE]})
    other = chain.with_times(lambda seconds: 2 * seconds, lambda seconds: seconds + 1)
    first, second = other.stages
    assert (first.forward_seconds, first.rerun_seconds, first.backward_seconds) == (0.2, 0.1, 1.2)
    assert (first.variants[0].forward_seconds, first.variants[0].backward_seconds) == (0.2, 1.3)
    assert second.rerun_seconds == second.forward_seconds
    assert other.with_times(lambda _: 0.0, lambda _: 0.0) == chain.with_times(lambda _: 0.0, lambda _: 0.0)
