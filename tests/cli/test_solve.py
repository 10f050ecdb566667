import json

import pytest

from lowtide import Chain, Schedule, Stage, simulate
from lowtide.cli import main


@pytest.fixture
def solved(files, capsys):
    def run(*arguments, status=0):
        assert main(["solve", files["chain"], "--strategy", "store-all", *arguments]) == status
        return capsys.readouterr()

    return run


def test_json_has_the_fields_of_the_contract(solved):
    values = json.loads(solved("--memory", "20kB", "--json").out)
    assert values["strategy"] == "store-all"
    assert values["feasible"] is True
    assert values["seconds"] == pytest.approx(1.2)
    assert values["peak_bytes"] == 500 + 4 * 3000 + 1000 + 1000
    assert values["idle_seconds"] == 0
    assert values["solve_seconds"] >= 0
    assert values["memory_budget"] == 20000


def test_infeasible_prints_the_least_in_json_and_one_line(solved):
    printed = solved("--memory", "5kB", "--json", status=3)
    values = json.loads(printed.out)
    assert values["feasible"] is False
    assert values["seconds"] is None
    least = values["minimum_bytes"]
    assert json.loads(solved("--memory", str(least), "--json").out)["feasible"] is True
    assert solved("--memory", str(least - 1), status=3).out == ""
    assert str(least) in printed.err


def test_the_schedule_is_written_and_is_the_one_reported(solved, files, chain):
    printed = solved("--memory", "20kB", "-o", files["schedule"])
    assert files["schedule"] in printed.out
    schedule = Schedule.load(files["schedule"])
    assert schedule.predicted.peak_bytes == simulate(chain, schedule).peak_bytes


def test_an_infeasible_budget_leaves_the_old_schedule(solved, files, tmp_path):
    (tmp_path / "schedule.json").write_text("old")
    solved("--memory", "1kB", "-o", files["schedule"], status=3)
    assert (tmp_path / "schedule.json").read_text() == "old"


def test_a_schedule_that_cannot_be_written_is_one_line(solved, tmp_path):
    printed = solved("--memory", "20kB", "-o", str(tmp_path / "nowhere" / "schedule.json"), status=2)
    assert len(printed.err.splitlines()) == 1
    assert "cannot be written" in printed.err


def test_people_see_time_and_peak(solved):
    printed = solved("--memory", "20kB").out
    assert "1.20 s a step (1.000 x store-all)" in printed
    assert "14.16 KiB of 19.53 KiB" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_people_see_a_chart(solved):
    lines = solved("--memory", "16kB").out.splitlines()
    assert any(line.startswith(" 15.62 KiB") and "┄" in line for line in lines)
    assert any(line.startswith("   compute ffff") and line.endswith("bbbb") for line in lines)
    assert max(map(len, lines)) <= 80


def test_people_are_told_which_schedules_that_move_weights_can_be_trained_with(files, capsys):
    given = ["solve", files["chain"], "--memory", "20kB", "--bandwidth", "20kB/s", "--strategy"]
    assert main([*given, "weights-greedy"]) == 0
    assert "for the simulator only" in capsys.readouterr().out
    assert main([*given, "joint"]) == 0
    assert "to train so: lowtide.fit with strategy='joint'" in capsys.readouterr().out
    assert main([*given, "pofo"]) == 0
    assert "for the simulator only" not in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["offload", "pofo", "opportunist", "autocapper"])
def test_a_strategy_that_lacks_a_link_asks_for_its_bandwidth(strategy, files, capsys):
    line = ["solve", files["chain"], "--strategy", strategy, "--memory", "1kB"]
    assert main(line) == 3
    assert "raise it, or give --bandwidth" in capsys.readouterr().err
    assert main([*line, "--bandwidth", "1GB/s"]) == 3
    assert "raise it, or try another strategy" in capsys.readouterr().err


def test_a_budget_that_lacks_its_unit_is_asked_about(solved, files, capsys):
    assert "did you mean 8GiB?" in solved("--memory", "8", status=3).err
    assert main(["solve", files["chain"], "--memory", "8"]) == 3
    assert "did you mean 8GiB?" in capsys.readouterr().err


def test_schedules_that_cannot_be_executed_are_left_out(files, capsys, tmp_path):
    stages = [Stage(str(k), 0.1, 0.2, output_bytes=1000, saved_bytes=3000, weight_bytes=9000) for k in range(4)]
    path = str(tmp_path / "weights.json")
    Chain("weights", stages).save(path)
    given = ["solve", path, "--memory", "80kB", "--bandwidth", "1GB/s", "--json"]
    assert main(given) == 0
    values = json.loads(capsys.readouterr().out)
    assert not any(candidate["strategy"].startswith("weights") for candidate in values["candidates"])
    assert main([*given, "--strategy", "weights-greedy"]) == 0


def test_people_see_what_the_conversion_of_a_plan_costs(solved, files, capsys):
    assert main(["solve", files["chain"], "--strategy", "pofo", "--memory", "12kB", "--bandwidth", "20kB/s"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model"))
    assert len(line) <= 80
    assert line.endswith("%")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("given", "hint"), [("12", True), ("12B/s", False), ("12000000000", False), ("0", False)])
def test_a_bandwidth_that_lacks_its_unit_is_pointed_out(solved, given, hint):
    error = solved("--memory", "20kB", "--bandwidth", given, status=0).err
    assert ("--bandwidth: '12' has no unit and is taken as bytes per second; 12GB/s?" in error) == hint
    assert error.count("\n") == int(hint)
