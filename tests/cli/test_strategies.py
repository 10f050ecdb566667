import json

from lowtide.cli import main
from lowtide.strategies.base import REGISTRY


def test_every_strategy_is_listed(capsys):
    assert main(["strategies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["strategies"]
    assert [entry["name"] for entry in listed] == [*REGISTRY, "auto"]
    simulated = [entry["name"] for entry in listed if not entry["executable"]]
    assert simulated == ["weights-greedy", "weights-greedy-nodiscount", "weights-l2l"]


def test_the_table_fits_a_terminal(capsys):
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in (*REGISTRY, "auto"):
        assert any(line.startswith(name) for line in lines)
