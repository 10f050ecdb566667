"""The pofo paper's schedules, executed: what is concluded from points, and runs on a CPU in small."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import harness
from papers import execution
from papers.pofo import executed as command
from papers.pofo.experiment import ALGORITHMS, memory_range
from papers.pofo.measured import Point, report_lines, summary

import lowtide

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "chains" / "h200" / "inception_v3-b16-500.json"
pytestmark = pytest.mark.usefixtures("short_resnet", "unrendered")
FACTS = {"machine": "m", "torch": "2", "lowtide": "0", "date": "today", "command": "c"}


def point(strategy: str, alpha: float = 0.5, network: str = "n", **more) -> Point:
    """Of a network whose plain step takes 1 s (predicted: 2) and a peak of 1100, 100 of it fixed."""
    given = {"seconds": 1.0, "peak_bytes": 600, "predicted_seconds": 2.0, "predicted_peak_bytes": 600, **more}
    plain = {"plain_seconds": 1.0, "plain_peak_bytes": 1100, "predicted_plain_seconds": 2.0}
    return Point(network, strategy, 8, 600, alpha=alpha, fixed_bytes=100, **plain, **given)


def plain(network: str = "n") -> Point:
    return Point(network, "plain", 8, seconds=1.0, peak_bytes=1100, predicted_seconds=9.0, predicted_peak_bytes=9)


def test_errors_of_prediction_are_means_of_all_and_by_algorithm():
    points = [
        plain(),  # no schedule
        point("rotor", seconds=1.0, predicted_seconds=0.9),
        point("pofo", seconds=2.0, predicted_seconds=2.6, predicted_peak_bytes=540),
        point("pofo", alpha=0.2, seconds=None, peak_bytes=None),  # not run
    ]
    found = summary(points)
    assert found["time_error"] == pytest.approx((0.1 + 0.3) / 2)
    assert found["peak_error"] == pytest.approx(0.1 / 2)
    assert found["by_algorithm"]["rotor"]["time_error"] == pytest.approx(0.1)
    assert found["by_algorithm"]["pofo"]["time_error"] == pytest.approx(0.3)
    assert found["by_algorithm"]["pofo"]["peak_error"] == pytest.approx(0.1)
    assert found["by_algorithm"]["pofo"]["num_schedules"] == 1
    assert list(found["by_algorithm"]) == ["rotor", "pofo"]


def test_a_schedule_of_two_points_is_one_that_was_run():
    found = summary([plain(), point("rotor"), point("pofo", same_as="rotor, α 0.5"), point("offload", seconds=None)])
    assert (found["num_different"], found["num_schedules"]) == (1, 2)


def test_peaks_above_their_budgets_are_counted_and_the_worst_named():
    points = [
        point("rotor", peak_bytes=600),
        point("pofo", peak_bytes=606),
        point("pofo", alpha=0.2, peak_bytes=630),
        point("offload", seconds=None, peak_bytes=None),
        plain(),
    ]
    kept = summary(points)["within_budget"]
    assert (kept["num_within"], kept["num_schedules"]) == (1, 3)
    assert kept["largest_excess"] == pytest.approx(0.05)
    assert kept["largest_excess_bytes"] == 30
    assert kept["largest_excess_at"] == "n: pofo, α 0.2"
    by_algorithm = summary(points)["by_algorithm"]
    assert by_algorithm["rotor"]["within_budget"]["largest_excess"] is None
    assert by_algorithm["pofo"]["within_budget"]["num_within"] == 0
    assert "5.00% (30 B)" in "\n".join(report_lines(FACTS, points, []))


def test_what_pofo_removes_of_the_overhead_of_recomputation_is_by_memory_ratio():
    points = [
        point("rotor", seconds=1.4, predicted_seconds=2.4),  # 40 %, predicted 20 %
        point("pofo", seconds=1.3, predicted_seconds=2.1),  # 30 %, predicted 5 %
        point("rotor", network="m", seconds=1.2, predicted_seconds=2.2),
        point("pofo", network="m", seconds=1.0, predicted_seconds=2.2),
        point("rotor", network="half", seconds=9.0),  # pofo was not run there
        point("pofo", network="half", seconds=None),
        point("rotor", alpha=0.75, seconds=1.0, predicted_seconds=2.0),  # nothing to remove
        point("pofo", alpha=0.75, seconds=1.0, predicted_seconds=2.0),
    ]
    found = summary(points)["removed"]
    assert list(found) == ["0.5", "0.75"]
    assert found["0.5"]["networks"]["n"] == {"measured": pytest.approx(0.25), "predicted": pytest.approx(0.75)}
    assert found["0.5"]["networks"]["m"] == {"measured": pytest.approx(1.0), "predicted": pytest.approx(0.0)}
    assert "half" not in found["0.5"]["networks"]
    assert found["0.5"]["measured"] == pytest.approx(1 - 0.3 / 0.6)
    assert found["0.5"]["predicted"] == pytest.approx(1 - 0.15 / 0.3)
    assert found["0.75"]["measured"] is None
    assert found["0.75"]["predicted"] is None
    assert "| all | 50.0% | 50.0% | – | – |" in report_lines(FACTS, points, [])


def test_the_reduction_of_activations_is_the_largest_of_pofo_below_a_fifth_of_overhead():
    points = [
        point("pofo", alpha=0.5, seconds=1.1, peak_bytes=600),
        point("pofo", alpha=0.3, seconds=1.19, peak_bytes=350),
        point("pofo", alpha=0.2, seconds=1.21, peak_bytes=200),  # not below
        point("rotor", alpha=0.1, seconds=1.0, peak_bytes=150),  # not pofo
        point("pofo", network="slow", seconds=1.5),
    ]
    found = summary(points)["reductions"]
    assert found["n"] == {"factor": pytest.approx(1000 / 250), "alpha": 0.3, "overhead": pytest.approx(0.19)}
    assert found["slow"] is None


def test_results_without_a_single_point_can_be_written(tmp_path):
    command.PAPER.write(tmp_path, "none", FACTS, [], [])
    assert json.loads((tmp_path / "none.json").read_text())["summary"]["num_schedules"] == 0
    assert not (tmp_path / "none.png").exists()


def test_a_memory_ratio_without_all_algorithms_is_run_anew():
    all_of_them = [point(name, alpha=0.5) for name in ALGORITHMS]
    some = [point(name, alpha=0.2) for name in ALGORITHMS[:3]]
    other = [plain("m"), point("rotor", network="m", alpha=0.5)]
    points = [plain(), *all_of_them, *some, *other]
    assert command.without_parts(points, "n", [0.5, 0.2]) == [plain(), *all_of_them, *other]
    assert command.without_parts(points, "m", [0.5]) == [plain(), *all_of_them, *some]
    assert command.without_parts(points, "n", [0.75]) == points  # a part that will not be run anew is kept
    assert command.without_parts(points, "m", [0.2]) == points


def test_going_on_with_one_memory_ratio_keeps_a_part_of_another(tmp_path, monkeypatch, small):
    answers = iter([True] * 3)
    given = ["--tiny", "--device", "cpu", "--output", str(tmp_path)]
    with monkeypatch.context() as cut:
        cut.setattr(execution.Run, "allows", lambda run, seconds=0.0: next(answers, False))
        command.main([*given, "--alphas", "0.5"])
    command.main([*given, "--alphas", "0.2", "--resume", str(tmp_path / "pofo-executed-tiny-cpu.json")])
    found = [(p["strategy"], p["alpha"]) for p in written(tmp_path)["points"] if p["alpha"]]
    assert found == [("rotor", 0.5), *((name, 0.2) for name in command.ORDER)]


@pytest.fixture(scope="module")
def split_and_chain(short_resnet):
    """Of the least network, measured once for all tests."""
    network = execution.Network("resnet18", 64, 2, torch.device("cpu"))
    return network.split, network.chain


@pytest.fixture
def small(monkeypatch, split_and_chain):
    """The least network, whose steps are not run: each takes a second in a peak of a gigabyte."""
    monkeypatch.setattr(command, "TINY", [("resnet18", 64, 2)])
    monkeypatch.setattr(execution, "capture_and_measure", lambda *_, **__: split_and_chain)
    calls: list[int] = []

    def time_steps(step, device):
        calls.append(len(calls))
        return harness.Timed(1.0, 0.0, 2**30, 1)

    monkeypatch.setattr(harness, "time_steps", time_steps)
    return calls


def written(folder) -> dict:
    return json.loads((folder / "pofo-executed-tiny-cpu.json").read_text())


def test_a_cut_run_leaves_every_point_until_then_and_can_be_gone_on_with(tmp_path, monkeypatch, small):
    seen: list[int] = []

    def time_steps(step, device):
        small.append(1)
        if len(small) > 1:
            seen.append(len(written(tmp_path)["points"]))
        if len(small) == 4:
            raise harness.OutOfTimeError
        return harness.Timed(1.0, 0.0, 2**30, 1)

    monkeypatch.setattr(harness, "time_steps", time_steps)
    given = ["--tiny", "--device", "cpu", "--output", str(tmp_path), "--alphas", "0.5", "0.2"]
    command.main(given)
    assert seen == [1, 2, 3]  # each point was written before the next was begun
    values = written(tmp_path)
    assert [p["strategy"] for p in values["points"]] == ["plain", "rotor", "pofo"]
    assert any("cut" in note for note in values["notes"])
    assert values["summary"]["num_schedules"] == 2

    monkeypatch.setattr(harness, "time_steps", lambda step, device: harness.Timed(2.0, 0.0, 2**30, 1))
    path = tmp_path / "pofo-executed-tiny-cpu.json"
    command.main([*given, "--resume", str(path)])
    points = written(tmp_path)["points"]
    assert [(p["strategy"], p["alpha"]) for p in points] == [
        ("plain", None),
        *((name, alpha) for alpha in (0.5, 0.2) for name in command.ORDER),
    ]
    assert {p["seconds"] for p in points} == {2.0}  # half a memory ratio was not kept
    assert len(written(tmp_path)["facts"]["earlier"]) == 1
    command.main([*given, "--resume", str(path)])  # nothing is left to do
    assert written(tmp_path)["points"] == points


def test_what_there_was_no_time_for_is_named(tmp_path, monkeypatch, small):
    answers = iter([True] * 3)  # for the network, for rotor, and for its run
    monkeypatch.setattr(execution.Run, "allows", lambda run, seconds=0.0: next(answers, False))
    command.main(["--tiny", "--device", "cpu", "--output", str(tmp_path), "--alphas", "0.5"])
    values = written(tmp_path)
    assert [p["strategy"] for p in values["points"]] == ["plain", "rotor"]
    (note,) = values["notes"]
    assert note.endswith("resnet18, 64 px, batch 2, α 0.5: pofo, autocapper, opportunist, offload")


def test_a_budget_without_a_schedule_says_from_where_there_is_one(tmp_path, small):
    command.main(["--tiny", "--device", "cpu", "--output", str(tmp_path), "--alphas", "-1"])
    points = written(tmp_path)["points"]
    assert [p["strategy"] for p in points] == ["plain", *command.ORDER]
    assert len(small) == 1  # plain training alone
    assert all("no schedule below" in p["note"] for p in points[1:])


def test_equal_schedules_are_run_once(small):
    network = execution.Network("resnet18", 64, 2, torch.device("cpu"))
    solution = network.solved("rotor", 2**40)
    first, second = point("rotor"), point("pofo", seconds=None, peak_bytes=None)
    network.run(first, solution)
    assert network.known(solution) is first
    network.run(second, solution)
    assert len(small) == 1
    assert (second.seconds, second.peak_bytes) == (first.seconds, first.peak_bytes) == (1.0, 2**30)
    assert second.predicted_seconds == solution.seconds
    network.run(second, lowtide.solve(network.chain, memory_budget=memory_range(network.chain)[0], strategy="rotor"))
    assert len(small) == 2


@pytest.mark.slow
def test_a_run_in_small_and_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "TINY", [("resnet18", 48, 4)])
    command.main(["--tiny", "--device", "cpu", "--output", str(tmp_path), "--alphas", "0.5"])
    values = written(tmp_path)
    points = [Point(**point) for point in values["points"]]
    assert [p.strategy for p in points] == ["plain", *command.ORDER]
    assert all(p.is_measured for p in points)
    low, high = points[1].budget_bytes, points[0].predicted_peak_bytes
    assert all(p.budget_bytes == low < high for p in points[1:])
    assert values["summary"]["peak_error"] < 0.05
    assert any(p.moved_bytes for p in points)
    assert "| `pofo` | 1 |" in (tmp_path / "pofo-executed-tiny-cpu.md").read_text()
    picture = tmp_path / "pofo-executed-tiny-cpu.png"
    picture.unlink()
    command.main(["--draw", str(tmp_path / "pofo-executed-tiny-cpu.json")])
    assert picture.exists()
    assert written(tmp_path) == values
