"""The benchmark of weights on the host: bits beside plain training, and the bound beside each row."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
from benchmarks import parked

from lowtide.runtime.measure import timing, weights


def test_every_row_has_its_bits_and_its_bound(monkeypatch, tmp_path, capsys):
    # Measured times decide which schedule there is; one that steps exceed by a little is planned again with a warning.
    clock = itertools.count()
    monkeypatch.setattr(timing, "_run_on_cpu", lambda computation: (computation(), 1e-3)[1])
    monkeypatch.setattr(weights, "_now", lambda device: next(clock) * 1e-6)
    given = ["--width", "96", "--depth", "2", "--rows", "32", "--steps", "3", "--budgets", "60%"]
    monkeypatch.setattr(sys, "argv", ["parked", *given, "--json", str(tmp_path / "rows.json")])
    parked.main()
    plain, *rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["60%", "60%, in backward"]
    assert {row["bits"] for row in rows} == {"equal"}
    # Steps in backward use gradients up, so that these have no need to come back.
    assert rows[0]["away_bytes"] > rows[1]["away_bytes"]
    assert rows[0]["bound_seconds"] > plain["seconds"]
    assert rows[1]["bound_seconds"] >= plain["seconds"]
    assert capsys.readouterr().out.count(", reached to ") == len(rows)


@pytest.mark.parametrize(("in_backward", "seconds"), [(False, 5.0), (True, 3.0)])
def test_a_bound_is_the_computation_and_the_link_one_after_another_or_side_by_side(in_backward, seconds):
    assert parked.bound(3.0, 2.0, in_backward=in_backward) == seconds
