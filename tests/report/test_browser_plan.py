"""The page of a plan that a model trains under, in a real browser: notes, marks, typed budgets, and what was run."""

from __future__ import annotations

import dataclasses

import pytest
from tests.report.browser import ARTEFACTS, find_chromium
from tests.report.chains import (
    MIB,
    moving_schedule,
    point_of,
    recomputing_schedule,
    small_chain,
    store_all_schedule,
)

from lowtide import simulate
from lowtide.report.page import Measured, render
from lowtide.report.survey import Curve, ShownPlan, Survey
from lowtide.strategies.base import REGISTRY

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (apt-get install chromium)"),
]

NOTES = ("the prediction was corrected", "with offloading a trial step took longer: nothing is offloaded")
LONG = [[0.001 * k, 0.002 * k] for k in range(400)]


def page(*, is_attached=True, measured=None):
    """Every strategy of the table has the same point; the user's own plan is slower than that by simulation."""
    chain = dataclasses.replace(small_chain(), provenance={"device": "a small card", "spread_seconds": LONG})
    schedules = {80: recomputing_schedule(), 100: moving_schedule(), 112: store_all_schedule(4)}
    plans = [
        ShownPlan(budget * MIB, schedule, simulate(chain, schedule, bandwidth="4GB/s"))
        for budget, schedule in schedules.items()
    ]
    fast = point_of(chain, "recomputing", recomputing_schedule())
    curves = [Curve(name, fast.peak_bytes, (dataclasses.replace(fast, strategy=name),), (), 0) for name in REGISTRY]
    found = Survey(chain, 4 * 10**9, True, plans[-1].trace, tuple(curves), tuple(plans))
    return render(found, own=plans[1], measured=measured, notes=NOTES, is_attached=is_attached)


@pytest.fixture
def opened(browser, tmp_path):
    def open_page(*, width=1280, scheme="light", **settings):
        path = tmp_path / "plan.html"
        path.write_text(page(**settings))
        return browser.open(path, width=width, scheme=scheme)

    return open_page


RUN = Measured(26e-3, 92 * MIB, "NVIDIA H200", 20)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")], ids=["desktop", "phone"])
def test_nothing_is_cut_off(width, scheme, opened):
    tab = opened(width=width, scheme=scheme, measured=RUN)
    assert tab.complaints() == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    cut_off = """[...document.querySelectorAll("#strategies td, #strategies th, #budget-value, #notes li")]
        .filter((cell) => !cell.matches(".bar-cell"))
        .filter((cell) => cell.scrollWidth > Math.ceil(cell.getBoundingClientRect().width)
            || cell.getBoundingClientRect().right > document.querySelector("#page").getBoundingClientRect().right + 1)
        .map((cell) => cell.id || cell.textContent)"""
    assert tab.evaluate(cut_off) == []
    assert "+18\u00a0%" in tab.text("#strategies tbody")
    tab.resize(width, tab.evaluate("document.documentElement.scrollHeight"))
    tab.screenshot(ARTEFACTS / f"report-plan-{width}-{scheme}.png")


def test_every_strategy_has_a_mark_of_its_own(opened):
    tab = opened()
    shapes = tab.evaluate("[...document.querySelectorAll('#strategies th path')].map((mark) => mark.getAttribute('d'))")
    assert len(shapes) == len(REGISTRY)
    assert len(set(shapes)) == len(REGISTRY)
    in_the_chart = tab.evaluate(
        "[...document.querySelectorAll('#frontier .mark')].map((mark) => mark.getAttribute('d'))"
    )
    assert set(in_the_chart) < set(shapes)
    assert len(set(in_the_chart)) == len(REGISTRY) - 1  # plain training has its circle


def test_the_notes_of_a_plan_are_the_truth_about_it(opened):
    tab = opened(measured=RUN)
    assert tab.evaluate("[...document.querySelectorAll('#notes li')].map((note) => note.textContent)") == list(NOTES)
    assert "faster" not in tab.text("#verdict-text")  # trial steps have decided
    tab.evaluate("document.getElementById('budget').focus()")
    tab.press("Home", number=36)
    assert tab.evaluate("document.getElementById('notes').hidden")  # they are about the plan's own budget
    alone = opened(is_attached=False)
    assert "A faster one fits too" in alone.text("#verdict-text")  # nothing was tried: the simulator's word counts


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (RUN, "Executed for 20 steps: 26.0 ms a step and a peak of 92.00 MiB. What follows is simulated."),
        (Measured(None, 92 * MIB), "Tried in a step before training: a peak of 92.00 MiB. What follows is simulated."),
        (None, "Simulated, not executed."),
    ],
    ids=["executed", "tried", "simulated"],
)
def test_what_was_executed_and_what_was_simulated_are_told_apart(measured, expected, opened):
    tab = opened(measured=measured)
    assert tab.text("#verdict-kind") == expected
    assert tab.evaluate("document.querySelectorAll('#frontier .measured').length") == int(measured is RUN)
    tab.evaluate("document.getElementById('budget').focus()")
    tab.press("Home", number=36)
    assert tab.text("#verdict-kind") == "Simulated, not executed."


def test_a_slow_run_does_not_squeeze_the_curves(opened):
    tab = opened(measured=Measured(0.9, 92 * MIB, "a busy CPU", 3))
    assert tab.text("#frontier .measured-label") == "measured: 900.0 ms ↑"
    assert "A step takes 25.5 ms" in tab.text("#verdict-text")
    ticks = tab.evaluate("[...document.querySelectorAll('#frontier .axis text')].map((label) => label.textContent)")
    assert "26 ms" in ticks
    assert opened(measured=RUN).text("#frontier .measured-label") == "measured"


def test_the_device_is_named_on_top(opened):
    assert opened(measured=RUN).text("#chain-device") == "NVIDIA H200 (a small card)"
    assert opened().text("#chain-device") == "a small card"


def test_where_the_figures_come_from_is_folded(opened):
    tab = opened()
    assert not tab.evaluate("document.getElementById('provenance').open")
    assert tab.box("footer")["height"] < 100
    assert tab.text("#provenance dl") == "devicea small cardin the chain file onlyspread_seconds"
    tab.click("#provenance summary")
    assert tab.evaluate("document.getElementById('provenance').open")


def test_a_budget_can_be_typed(opened):
    tab = opened()

    def typed(text):
        tab.evaluate("document.getElementById('budget-value').select()")
        tab.evaluate("document.getElementById('budget-value').focus()")
        tab.call("Input.insertText", text=text)
        tab.press("Enter", number=13, text="\r")
        value = tab.evaluate("document.getElementById('budget-value').value")
        hidden = tab.evaluate("document.getElementById('budget-hint').hidden")
        return value, "" if hidden else tab.text("#budget-hint")

    assert typed("80MiB") == ("80.00 MiB", "")
    assert tab.text("#verdict-title") == "Fits in 80.00 MiB"
    assert typed("112 mib") == ("112.00 MiB", "")
    assert typed("100M") == ("100.00 MiB", "")
    assert typed("111.5 MiB") == (
        "100.00 MiB",
        "Schedules are computed for 3 budgets; this is the next one below 111.50 MiB.",
    )
    assert typed("8g")[0] == "112.00 MiB"
    assert "is too little: the least that works is 80.00 MiB" in typed("3kB")[1]
    assert "“lots” is not a number of bytes; write it like 8GiB" in typed("lots")[1]
    assert tab.text("#verdict-title") == "Fits in 112.00 MiB"
    assert tab.complaints() == []
