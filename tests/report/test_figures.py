from __future__ import annotations

import itertools

import pytest
from tests.report.chains import (
    MIB,
    deep_chain,
    moving_schedule,
    periodic_schedule,
    periodic_survey,
    recomputing_schedule,
    small_chain,
)

from lowtide import LowtideError, simulate
from lowtide.report.figures import draw_frontier, draw_memory, over_operations, over_time, save_figure
from lowtide.report.palette import LAYERS


@pytest.fixture
def axes():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    return figure.subplots()


def test_the_bars_over_operations_are_the_peaks():
    trace = simulate(small_chain(), recomputing_schedule())
    edges, stacks = over_operations(trace)
    assert edges == list(range(11))
    assert [sum(stack) for stack in stacks] == [step.peak_bytes for step in trace.steps]


def test_a_long_list_is_cut_and_keeps_its_peak():
    chain = deep_chain(600)
    trace = simulate(chain, periodic_schedule(600, 24))
    assert len(trace.steps) < 2000
    longer = simulate(chain, periodic_schedule(600, 2))
    edges, stacks = over_operations(longer)
    assert len(stacks) == min(2000, len(longer.steps))
    assert edges[-1] == len(longer.steps)
    assert max(map(sum, stacks)) == longer.peak_bytes


def test_the_bars_over_time_have_the_right_area():
    trace = simulate(small_chain(), moving_schedule(), bandwidth="4GB/s")
    edges, stacks = over_time(trace)
    assert edges[-1] == pytest.approx(trace.seconds)
    widths = [end - begin for begin, end in itertools.pairwise(edges)]
    area = sum(stack[LAYERS.index("in flight")] * width for stack, width in zip(stacks, widths, strict=True))
    # abar[1] is in flight while it leaves, 20 MiB at 4 GB/s, and as long while it comes back.
    assert area == pytest.approx(20 * MIB * 2 * (20 * MIB / 4e9))


def test_the_memory_shows_only_what_there_is(axes):
    draw_memory(axes, simulate(small_chain(), recomputing_schedule()), memory_budget=80 * MIB)
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "recomputed" in shown
    assert "in flight" not in shown
    assert axes.get_ylabel() == "memory (MiB)"
    assert any("peak 78.00 MiB" in text.get_text() for text in axes.texts)


def test_the_frontier_has_a_line_for_each_strategy(axes):
    found = periodic_survey(deep_chain(48))
    draw_frontier(axes, found, memory_budget=found.plans[3].memory_budget)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert {"segments", "budget"} <= set(lines)
    memory, times = lines["segments"].get_data()
    points = found.curves[1].points
    assert memory[0] * 2**30 == pytest.approx(points[0].peak_bytes)
    assert times[0] == pytest.approx(points[0].seconds / found.store_all.seconds)
    assert len(memory) == len(points) + 1


def test_two_runs_write_the_same_file(tmp_path):
    trace = simulate(small_chain(), recomputing_schedule())
    for name in ("one.svg", "two.svg"):
        save_figure(tmp_path / name, trace=trace)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(LowtideError, match="nothing to draw"):
        save_figure(tmp_path / "figure.svg")


def test_the_global_settings_stay(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    save_figure(tmp_path / "figure.svg", trace=simulate(small_chain(), recomputing_schedule()))
    assert dict(matplotlib.rcParams) == before
