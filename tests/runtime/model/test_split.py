from __future__ import annotations

import json

import pytest

from lowtide.runtime.model.split import Split, StageSplit, Unit


def two_stages() -> Split:
    return Split(
        (
            StageSplit("embed", (Unit("wte"),), kind="e"),
            StageSplit("block", (Unit("block"), Unit("block", 1)), trailing_glue=True),
        ),
        call_keywords={"use_cache": False},
        side_bytes=12,
        activation_bytes=99,
        notes=("a note",),
    )


def test_a_split_survives_json() -> None:
    split = two_stages()
    assert Split.from_dict(json.loads(json.dumps(split.to_dict()))) == split


def test_units_paths_and_stages() -> None:
    split = two_stages()
    assert split.num_stages == 2
    assert split.paths == ("wte", "block")
    assert split.stage_of() == {Unit("wte"): 1, Unit("block"): 2, Unit("block", 1): 2}
    assert str(Unit("block", 1)) == "block#1"


@pytest.mark.parametrize(
    "stages",
    [
        (),
        (StageSplit("a", (Unit("x"),)), StageSplit("a", (Unit("y"),))),
        (StageSplit("a", (Unit("x"),)), StageSplit("b", (Unit("x"),))),
    ],
)
def test_a_malformed_split_is_refused(stages: tuple[StageSplit, ...]) -> None:
    with pytest.raises(ValueError, match=r"stage|unit"):
        Split(stages)


def test_a_stage_without_units_is_refused() -> None:
    with pytest.raises(ValueError, match="no units"):
        StageSplit("a", ())
