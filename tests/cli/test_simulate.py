import json
from dataclasses import replace

import pytest

from lowtide import Backward, Forward, Offload, Prefetch, Release, Schedule
from lowtide.cli import main


@pytest.fixture
def write(files):
    def save(*operations):
        Schedule("by hand", operations).save(files["schedule"])

    return save


STAGES = range(1, 5)
STORE_ALL = (*(Forward(k, "all") for k in STAGES), *(Backward(k) for k in reversed(STAGES)))


def test_json_has_the_fields_of_the_contract(write, files, capsys):
    write(*STORE_ALL)
    assert main(["simulate", files["chain"], files["schedule"], "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["seconds"] == pytest.approx(1.2)
    assert values["peak_bytes"] == 14500
    assert values["idle_seconds"] == 0
    assert values["num_operations"] == 8
    assert values["peak_operation"] == ["backward", 4]


def test_people_see_where_the_peak_is(write, files, capsys):
    write(*STORE_ALL)
    assert main(["simulate", files["chain"], files["schedule"]]) == 0
    assert "14500 bytes), at operation 4, backward 4" in capsys.readouterr().out


# abar[1] leaves within 3 s; then abar[2] leaves while abar[1] returns, at the same time or one after the other.
@pytest.mark.parametrize(("duplex", "seconds"), [([], 0.3 + 3 + 0.1 + 3 + 0.4), (["--half-duplex"], 3.4 + 6 + 0.4)])
def test_copies_take_the_bandwidth(duplex, seconds, write, files, capsys):
    leave = (Offload("abar", 1), Release("abar", 1))
    write(*STORE_ALL[:3], *leave, STORE_ALL[3], Offload("abar", 2), Prefetch("abar", 1), *STORE_ALL[4:])
    assert main(["simulate", files["chain"], files["schedule"], "--bandwidth", "1kB/s", "--json", *duplex]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["moved_bytes"] == 9000
    assert values["seconds"] == pytest.approx(seconds)
    assert values["idle_seconds"] == pytest.approx(seconds - 1.2)


def test_an_illegal_schedule_is_refused_with_its_operation(write, files, capsys):
    write(Forward(1, "all"), Backward(4))
    assert main(["simulate", files["chain"], files["schedule"]]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "operation 1, ['backward', 4]" in printed.err


@pytest.mark.parametrize("num_stages", [3, 5])
@pytest.mark.parametrize("command", [["simulate"], ["report", "-o", "page.html"], ["plot", "-o", "figure.svg"]])
def test_a_schedule_of_a_chain_with_other_stages_is_refused_with_both_numbers(
    command, num_stages, files, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    stages = range(1, num_stages + 1)
    operations = (*(Forward(k, "all") for k in stages), *(Backward(k) for k in reversed(stages)))
    Schedule("rotor", operations).save(files["schedule"])
    assert main([command[0], files["chain"], files["schedule"], *command[1:]]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{files['schedule']}: the schedule ('rotor') is for {num_stages} stages" in printed.err
    assert "chain 'four' has 4" in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.filterwarnings("default::lowtide.errors.LowtideWarning")
def test_a_schedule_that_was_made_for_other_figures_is_simulated_with_a_word_about_it(files, chain, tmp_path, capsys):
    assert main(["solve", files["chain"], "--strategy", "store-all", "--memory", "20kB", "-o", files["schedule"]]) == 0
    assert main(["simulate", files["chain"], files["schedule"]]) == 0
    assert capsys.readouterr().err == ""
    other = str(tmp_path / "other.json")
    replace(chain, input_bytes=700).save(other)
    assert main(["simulate", other, files["schedule"], "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["peak_bytes"] == 14700
    assert printed.err.startswith(f"lowtide: warning: {files['schedule']} was made for other figures")
    assert "14500 bytes" in printed.err
    assert "14700" in printed.err
    assert printed.err.count("\n") == 1
