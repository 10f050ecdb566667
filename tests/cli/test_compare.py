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
    assert "(14.16 KiB)" in printed


def test_groups_of_columns_fit_a_terminal():
    columns = [(f"{n}.00 GiB", ["(1023.99 MiB)"]) for n in range(9)]
    groups = _parts(25, columns)
    assert [column for group in groups for column in group] == columns
    assert all(25 + 15 * len(group) <= 80 for group in groups)
    assert len(groups) == 3
