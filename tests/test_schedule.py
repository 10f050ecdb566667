import json
import math

import pytest

from lowtide import Await, Backward, Forward, Offload, Prefetch, Release, Schedule, ScheduleError, Update
from lowtide.schedule import Start

EVERY = [
    ["forward", 1, "all"],
    ["forward", 2, "keep"],
    ["forward", 3, "drop"],
    ["forward", 4, "all", 2],
    ["backward", 4],
    ["offload", "a", 0],
    ["release", "abar", 1],
    ["prefetch", "w", 2],
    ["await", "opt", 3],
    ["update", 4],
    ["offload", "g", 4],
    ["release", "s", 1],
]
FILE = {"format": "lowtide.schedule/1", "strategy": "by hand", "operations": EVERY}


def test_there_and_back(tmp_path):
    schedule = Schedule.from_dict(FILE)
    assert schedule.operations[3:6] == (Forward(4, "all", 2), Backward(4), Offload("a", 0))
    assert schedule.operations[6:9] == (Release("abar", 1), Prefetch("w", 2), Await("opt", 3))
    assert schedule.operations[9:] == (Update(4), Offload("g", 4), Release("s", 1))
    assert schedule.has_updates
    assert schedule.to_dict() == FILE
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule


def test_a_cycle_there_and_back():
    cycle = {
        **FILE,
        "manages": ["w", "opt"],
        "start": {"device": [["opt", 2], ["w", 1]], "host": [["w", 2]]},
        "predicted": {"seconds": 1.5, "peak_bytes": 7, "idle_seconds": 0.0},
    }
    schedule = Schedule.from_dict(cycle)
    assert schedule.start == Start(frozenset({("w", 1), ("opt", 2)}), frozenset({("w", 2)}))
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    assert schedule.to_dict() == cycle
    assert Schedule.from_dict({**cycle, "manages": ["opt", "w"]}).manages == ("w", "opt")


@pytest.mark.parametrize(
    "operation",
    [
        [],
        "forward",
        ["forward"],
        ["forward", 1],
        ["forward", 1, "most"],
        ["forward", 0, "all"],
        ["forward", 1.0, "all"],
        ["forward", True, "all"],
        ["forward", 1, "keep", 1],
        ["forward", 1, "all", -1],
        ["forward", 1, "all", 0, 0],
        ["backward", 1, 2],
        ["offload", "b", 1],
        ["offload", "abar", 0],
        ["offload", "s", 0],
        ["update"],
        ["update", 0],
        ["update", "w", 1],
        ["offload", 1, "a"],
        ["sleep", 1],
        [["forward"], 1],
        5,
    ],
)
def test_a_wrong_operation_is_refused_with_its_index(operation, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**FILE, "operations": [["forward", 1, "all"], operation]}))
    with pytest.raises(ScheduleError, match="operation 1") as caught:
        Schedule.load(path)
    assert caught.value.index == 1
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"format": "lowtide.schedule/9"}, "format"),
        ({"operations": "none"}, "operations"),
        ({"strategy": 5}, "strategy"),
        ({"manages": ["a"]}, "manages"),
        ({"manages": ["opt"]}, "manages"),
        ({"manages": "w"}, "manages"),
        ({"start": {"device": [["w", 1]]}}, "start.device"),
        ({"start": {"disk": []}}, "start"),
        ({"manages": ["w"], "start": {"host": [["a", 1]]}}, "start.host"),
        ({"predicted": {"seconds": 1}}, "predicted"),
        ({"predicted": {"seconds": "1", "peak_bytes": 1, "idle_seconds": 0}}, "predicted.seconds"),
        ({"predicted": {"seconds": 1, "peak_bytes": math.inf, "idle_seconds": 0}}, "predicted.peak_bytes"),
        ({"predicted": {"seconds": 1, "peak_bytes": 1.5, "idle_seconds": 0}}, "predicted.peak_bytes"),
        ({"predicted": {"seconds": 10**400, "peak_bytes": 1, "idle_seconds": 0}}, "predicted.seconds"),
        ({"predicted": {"seconds": 1, "peak_bytes": 1, "idle_seconds": math.nan}}, "predicted.idle_seconds"),
        ({"predicted": {"seconds": -1, "peak_bytes": 1, "idle_seconds": 0}}, "predicted.seconds"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_file_is_refused(changes, word, tmp_path):
    with pytest.raises(ScheduleError, match=word):
        Schedule.from_dict({**FILE, **changes})
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**FILE, **changes}))
    with pytest.raises(ScheduleError, match=f"wrong.json: .*{word}"):
        Schedule.load(path)


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (Forward(1, "kept"), "all"),
        (Forward(0, "all"), "forward"),
        (Forward(1.0, "all"), "forward"),
        (Forward(1, "all", -1), "variant"),
        (Forward(1, "keep", 1), 'only "all" takes a variant'),
        (Backward(0), "backward"),
        (Offload("delta", 2), "abar"),
        (Prefetch("abar", 0), "abar"),
        (["forward", 1, "all"], "expected Forward"),
        (None, "expected Forward"),
    ],
)
def test_a_wrong_operation_made_in_python_is_refused_like_one_in_a_file(operation, reason):
    with pytest.raises(ScheduleError, match=f"operation 1, .*{reason}") as caught:
        Schedule("by hand", [Forward(1, "all"), operation])
    assert caught.value.index == 1


def test_a_strategy_is_a_string():
    with pytest.raises(ScheduleError, match="strategy is 5"):
        Schedule(5, [Forward(1, "all")])
