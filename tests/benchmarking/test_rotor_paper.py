"""The rotor paper's experiments: what they conclude from points, and a whole run on a CPU in small."""

import json
import math

import pytest
import torch
from papers import execution
from papers.rotor import __main__ as command
from papers.rotor.results import Point, gain, gain_over, summary

from lowtide import Forward

pytestmark = pytest.mark.usefixtures("short_resnet", "unrendered")


def point(strategy: str, seconds: float, peak_bytes: int, **more) -> Point:
    return Point("n", strategy, 8, seconds=seconds, peak_bytes=peak_bytes, **more)


def test_the_gain_is_over_the_fastest_segments_with_no_more_memory():
    points = [
        point("segments", 2.0, 1000),
        point("segments", 3.0, 400),
        point("rotor", 1.0, 2000),  # too large
        point("rotor", 1.6, 1001),  # larger by what an allocator rounds
        point("rotor", 2.4, 400),
        point("revolve", 0.1, 10),  # not rotor
    ]
    assert gain(points) == pytest.approx(2.0 / 1.6 - 1)
    assert gain_over(points[1], points) == pytest.approx(3.0 / 2.4 - 1)
    found = summary(points)
    assert found["gain_over_best_segments"] == pytest.approx(0.25)
    assert found["gain_over_every_segments"] == pytest.approx(0.25)


def test_without_segments_there_is_no_gain():
    assert gain([point("rotor", 1.0, 10)]) is None
    assert gain([point("segments", 1.0, 10), point("rotor", 1.0, 20)]) is None


def test_errors_of_prediction_are_means_over_what_was_run():
    points = [
        point("rotor", 1.0, 100, predicted_seconds=0.9, predicted_peak_bytes=100),
        point("segments", 2.0, 200, predicted_seconds=2.6, predicted_peak_bytes=190),
        point("plain", 1.0, 100, predicted_seconds=9.0, predicted_peak_bytes=900),
    ]
    found = summary(points)
    assert found["time_error"] == pytest.approx((0.1 + 0.3) / 2)
    assert found["peak_error"] == pytest.approx((0 + 0.05) / 2)


@pytest.mark.parametrize("num_stages", [3, 12, 36, 181, 337])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_numbers_of_segments_run_from_two_to_twice_the_root(num_stages, count):
    numbers = command.numbers_of_segments(num_stages, count)
    assert numbers[0] == 2
    assert len(numbers) <= count
    assert max(numbers) <= max(2, round(2 * math.sqrt(num_stages)))
    assert count == 1 or max(numbers) == min(num_stages, round(2 * math.sqrt(num_stages)))


@pytest.mark.slow
def test_what_a_step_takes_beyond_its_budget_is_a_result():
    """No chain counts the stand-ins for statistics that a recomputation must not update again."""
    network = execution.Network("resnet18", 64, 2, torch.device("cpu"))
    budget = network.solved("segments", 2**60, segments=2).peak_bytes
    solution = network.solved("segments", budget, segments=2)
    found = point("segments", 0.0, 0, budget_bytes=budget)
    network.run(found, solution)
    forwards = [op.stage for op in solution.schedule.operations if isinstance(op, Forward)]
    units = [unit for k in set(forwards) if forwards.count(k) > 1 for unit in network.split.stages[k - 1].units]
    statistics = [buffer for unit in units for buffer in network.model.get_submodule(unit.path).buffers()]
    more_bytes = sum(buffer.numel() * buffer.element_size() for buffer in statistics)
    assert not found.note
    assert found.predicted_peak_bytes == budget < found.peak_bytes <= budget + more_bytes


@pytest.mark.slow
def test_a_run_in_small_and_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "TINY", [("resnet18", 32, 2)])
    given = ["--tiny", "--device", "cpu", "--output", str(tmp_path), "--budgets", "2", "--segments", "1"]
    command.main(given)
    path = tmp_path / "rotor-tiny-cpu.json"
    written = json.loads(path.read_text())
    points = [Point(**values) for values in written["points"]]
    assert {"plain", "segments", "rotor", "revolve"} == {p.strategy for p in points}
    assert all(p.is_measured for p in points)
    assert written["summary"]["peak_error"] < 0.05
    assert "paper (V100)" in (tmp_path / "rotor-tiny-cpu.md").read_text()
    assert (tmp_path / "rotor-tiny-cpu.png").exists()
    command.main([*given, "--resume", str(path)])  # nothing is left to do
    assert len(json.loads(path.read_text())["points"]) == len(points)
