import json

import pytest

from lowtide.cli import main
from lowtide.cli.compare import _parts


@pytest.fixture
def compared(files, capsys):
    def run(*arguments):
        assert main(["compare", files["chain"], "--strategy", "store-all", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_json_holds_every_strategy_at_every_budget(compared):
    values = json.loads(compared("--memory", "20kB", "--memory", "9kB", "--json"))
    assert [budget["memory_budget"] for budget in values["budgets"]] == [9000, 20000]
    small, large = values["budgets"]
    assert small["best"] is None
    assert small["strategies"][0]["minimum_bytes"] == 14500
    assert small["strategies"][0]["feasible"] is False
    assert large["best"] == "store-all"
    assert large["strategies"][0]["relative"] == pytest.approx(1.0)


def test_people_see_the_best_marked_and_the_least_where_it_does_not_fit(compared):
    printed = compared("--memory", "20kB", "--memory", "9kB")
    assert "*1.000" in printed
    assert ["store-all", "14.16", "KiB", "-", "*1.000"] in [line.split() for line in printed.splitlines()]


def test_groups_of_columns_fit_a_terminal():
    columns = [(f"{n}.00\nGiB", ["*1.000"]) for n in range(11)]
    groups = _parts([("strategy", ["weights-greedy-nodiscount"]), ("memory", ["1023.99 MiB"])], columns)
    assert [column for group in groups for column in group] == columns
    assert [len(group) for group in groups] == [5, 5, 1]
