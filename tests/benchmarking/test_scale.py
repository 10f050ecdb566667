"""The benchmark of scale: its budgets, and a whole run on a CPU in small."""

import itertools
import json

import pytest
from benchmarks import scale

import lowtide


def test_budgets_lie_between_the_least_and_everything():
    chain = lowtide.Chain("c", [lowtide.Stage("s", 1.0, 2.0, output_bytes=10, saved_bytes=40)] * 10)
    whole = lowtide.solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes
    least = scale.budget_of(chain, 0.0)
    assert lowtide.solve(chain, memory_budget=least, strategy="rotor").peak_bytes <= least
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.solve(chain, memory_budget=least - 1, strategy="rotor")
    assert scale.budget_of(chain, 1.0) == whole
    assert least < scale.budget_of(chain, 0.5) < whole


def test_different_stages_are_all_different():
    widths = scale.widths_of("different stages", 500, 64)
    assert len({*itertools.pairwise(widths)}) == 500
    assert len(set(scale.widths_of("equal stages", 10, 8))) == 1


@pytest.mark.slow
def test_a_run_in_small_and_what_it_writes(tmp_path):
    scale.main(["--tiny", "--device", "cpu", "--output", str(tmp_path)])
    rows = [scale.Row(**row) for row in json.loads((tmp_path / "scale-tiny-cpu.json").read_text())["rows"]]
    assert {row.series for row in rows} == {"equal stages", "different stages", "budgets", "sizes"}
    assert all("rotor" in row.solving_seconds for row in rows)
    assert all(row.first_step_seconds and row.measuring_seconds for row in rows if row.series != "budgets")
    assert (tmp_path / "scale-tiny-cpu.png").exists()
