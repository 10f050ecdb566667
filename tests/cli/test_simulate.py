import json

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
