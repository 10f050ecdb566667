"""The benchmark of variants: a whole run on a CPU in small, and one that is cut."""

import json

import pytest
from benchmarks import harness, variant_figure, variants
from benchmarks.peer_claim import Row

import lowtide
from lowtide.runtime import meter
from lowtide.runtime.measure.measure import measure_split

pytestmark = pytest.mark.usefixtures("unrendered")


def as_if_equally_quick(*args, **kwargs) -> lowtide.Chain:
    """What was measured, with one time for all: a variant that saves less is then better than running a block again."""
    return measure_split(*args, **kwargs).with_times(lambda _: 1.0, lambda _: 1.0)


@pytest.mark.slow
def test_a_run_in_small_and_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "measure_split", as_if_equally_quick)  # what is chosen must not depend on the clock
    monkeypatch.setattr(variants, "SHARES", (0.75,))
    monkeypatch.setattr(variants, "DEFAULT_BUDGETS", (0.4,))
    for tensor in list(meter._existing_tensors()):
        meter.exclude(tensor)  # budgets are shares of what is measured, which is to be of this run alone
    variants.main(["--tiny", "--device", "cpu", "--only", "gpt", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "variants-tiny-cpu.json").read_text())
    rows = [Row(**values) for values in written["rows"]]
    assert [row.way for row in rows if not row.is_measured] == []
    mix = next(row for row in rows if row.way.startswith("mix within"))
    assert "budget 0.4" in mix.note
    assert mix.peak_bytes <= mix.budget_bytes
    assert "blocks.0 (x 2): as it is" in (tmp_path / "variants-tiny-cpu.md").read_text()


def test_a_run_that_is_cut_leaves_valid_results(tmp_path, monkeypatch):
    answers = iter([harness.Timed(1.0, 0.0, 2**30, 1)])

    def time_steps(step, device):
        for timed in answers:
            return timed
        raise harness.OutOfTimeError

    monkeypatch.setattr(harness, "time_steps", time_steps)
    variants.main(["--tiny", "--device", "cpu", "--only", "gpt", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "variants-tiny-cpu.json").read_text())
    assert written["facts"]["machine"]
    assert [row["way"] for row in written["rows"]] == ["plain, eager"]


def test_every_way_is_in_the_picture():
    ways = [row["way"] for row in json.loads((variants.RESULTS / "variants-h200.json").read_text())["rows"]]
    curves = [(prefix, suffix) for prefix, suffix, *_ in variant_figure._CURVES]
    missing = {way for way in ways if not any(way.startswith(p) and way.endswith(s) for p, s in curves)}
    assert missing == {"everything stored, through lowtide"}  # upon the point of compiled blocks
