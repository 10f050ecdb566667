from __future__ import annotations

import json
from pathlib import Path

import pytest
from papers.weights.__main__ import main
from papers.weights.instances import TABLE_1


@pytest.mark.slow
def test_one_row_of_each(tmp_path: Path) -> None:
    main(["--tiny", "--output", str(tmp_path)])
    values = json.loads((tmp_path / "weights.json").read_text())
    assert {"machine", "torch", "lowtide", "date", "command"} <= set(values["facts"])
    (row,), (point,) = values["table_1"], values["figure_4"]
    printed = TABLE_1[-1]
    assert row["name"] == printed.name
    assert row["compute"] == pytest.approx(printed.compute)
    assert abs(row["l2l"] - printed.l2l) <= 1  # what the paper prints, in whole milliseconds
    assert row["bound"] <= row["greedy"] <= row["l2l"]
    assert point["bound"] <= point["improved"] * (1 + 1e-9)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
