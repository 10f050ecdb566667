"""The page in a real browser: it draws without complaint, and what it shows is what the simulator said."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest
from tests.report.browser import ARTEFACTS, find_chromium, words
from tests.report.chains import bare_survey, periodic_survey, small_chain

from lowtide import Backward, Chain, Forward, Schedule, Stage
from lowtide.chain import Variant
from lowtide.report.page import render, write_report
from lowtide.report.timeline import spans
from lowtide.units import format_bandwidth, format_bytes, format_seconds, parse_bytes

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (apt-get install chromium)"),
]


def budget_of(tab):
    return tab.evaluate("document.getElementById('budget-value').value")


def plot(tab, selector):
    """The left and right end of a chart's plot, and its middle height, in the window."""
    box = tab.box(selector)
    return box["x"] + 4.4 * 16, box["x"] + box["width"] - 0.75 * 16, box["y"] + box["height"] / 2


@pytest.mark.parametrize(
    ("page", "look"), [("moving", "light"), ("moving", "dark phone"), ("deep", "dark"), ("deep", "phone")]
)
def test_it_draws_without_complaint(page, look, browser, moving_file, deep_file):
    path = {"moving": moving_file, "deep": deep_file}[page][0]
    width = 390 if "phone" in look else 1280
    tab = browser.open(path, width=width, scheme="dark" if "dark" in look else "light")
    assert tab.complaints() == []
    # Nothing makes the page itself scroll sideways; wide tables scroll in their own frames.
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    height = tab.evaluate("document.documentElement.scrollHeight")
    tab.resize(width, height)
    tab.screenshot(ARTEFACTS / f"report-{page}-{look.replace(' ', '-')}.png")
    # The canvases are not empty: more than one colour is on each.
    for chart in ("#memory-chart", "#lanes-chart"):
        colours = f"""(() => {{
            const canvas = document.querySelector("{chart} canvas");
            const picture = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(picture.data.buffer)).size;
        }})()"""
        assert tab.evaluate(colours) > 3
    assert tab.complaints() == []


def test_what_the_page_adds_up_is_what_the_simulator_said(browser, moving_file, deep_file):
    script = (files("lowtide.report") / "page" / "data.js").read_text()
    for path, plans in ((moving_file[0], list(moving_file[1].values())), (deep_file[0], list(deep_file[1].plans))):
        tab = browser.open(path)
        found = tab.evaluate(
            f"""(async () => {{ {script}
                const data = await unpack(document.getElementById("data").textContent);
                return data.plans.map((plan) => {{
                    const spelled = spellOut(data, plan);
                    return [Array.from(spelled.total), Array.from(spelled.finish)];
                }});
            }})()"""
        )
        assert len(found) == len(plans)
        for plan, (totals, finishes) in zip(plans, found, strict=True):
            assert totals == [step.peak_bytes for step in plan.trace.steps]
            expected = [span.finish for span in spans(plan.trace)]
            assert finishes == pytest.approx(expected, abs=1e-6 * plan.trace.seconds)


def test_the_head_says_what_fits_and_what_was_seen(browser, moving_file):
    tab = browser.open(moving_file[0])
    assert tab.text("#chain-name") == "small"
    assert tab.text("#verdict-title") == "Fits in 100.00 MiB"
    assert "A step takes 25.5 ms (by hand), 50\u00a0% slower than plain training." in tab.text("#verdict-text")
    assert "A faster one fits too: recomputing, 20.0 ms." in tab.text("#verdict-text")
    rows = tab.evaluate("[...document.querySelectorAll('#measured tbody tr')].map((row) => row.innerText.split('\\t'))")
    assert rows == [
        ["Peak memory", "91.00 MiB", "92.00 MiB", "+1.1\u00a0%"],
        ["Step time", "25.5 ms", "26.0 ms", "+2.0\u00a0%"],
    ]
    assert "on a small card over 20 steps" in tab.text("#measured-text")


def test_hovering_over_operations_shows_each(browser, moving_file):
    path, plans = moving_file
    tab = browser.open(path)
    left, right, middle = plot(tab, "#memory-chart")
    trace = plans["moving"].trace
    for index, span in enumerate(spans(trace)):
        tab.mouse("mouseMoved", left + (index + 0.5) / len(trace.steps) * (right - left), middle)
        assert tab.text("#operation-title") == words(small_chain(), span)
        detail = tab.text("#operation-text")
        assert f"operation {index + 1} of 12" in detail
        assert f"{format_bytes(span.step.peak_bytes)} on the device" in detail
        assert words(small_chain(), span) in tab.text("#memory-chart .tip")
        shown = tab.evaluate("[...document.querySelectorAll('#legend b')].map((cell) => cell.textContent)")
        assert shown == [format_bytes(num_bytes) for num_bytes in span.during]


def test_hovering_over_time_shows_what_runs_then(browser, moving_file):
    path, plans = moving_file
    tab = browser.open(path)
    tab.click("#over label:last-of-type")
    left, right, middle = plot(tab, "#memory-chart")
    trace = plans["moving"].trace
    for span in spans(trace):
        if span.finish > span.begin:
            time = (span.begin + span.finish) / 2
            tab.mouse("mouseMoved", left + time / trace.seconds * (right - left), middle)
            assert tab.text("#operation-title") == words(small_chain(), span)


def test_hovering_in_a_deep_chain_shows_the_right_stage(browser, deep_file):
    path, found = deep_file
    tab = browser.open(path)
    left, right, middle = plot(tab, "#memory-chart")
    trace = found.plans[5].trace
    for share in (0.013, 0.2, 0.37, 0.5, 0.81, 0.99):
        x = round(left + share * (right - left))
        tab.mouse("mouseMoved", x, middle)
        index = int((x - left) / (right - left) * len(trace.steps))
        assert tab.text("#operation-title") == words(found.chain, spans(trace)[index])


def test_the_lanes_tell_copies_and_waits(browser, moving_file):
    path, plans = moving_file
    tab = browser.open(path)
    left, right, _ = plot(tab, "#lanes-chart")
    top = tab.box("#lanes-chart")["y"]
    trace = plans["moving"].trace

    def tip(seconds, lane):
        tab.mouse("mouseMoved", left + seconds / trace.seconds * (right - left), top + (0.4 + 2.4 * lane + 1) * 16)
        return tab.text("#lanes-chart .tip")

    assert "Forward of block.1" in tip(2e-3, 0)
    assert "Waiting 3.2 ms for what stem saved to reach the host" in tip(7e-3, 0)
    assert "Waiting 5.2 ms for what stem saved to come back" in tip(17e-3, 0)
    assert "Copying what stem saved to the host20.00 MiB in 5.2 ms" in tip(5e-3, 1)
    assert "Copying what stem saved back" in tip(16e-3, 2)
    assert "Nothing to copy" in tip(5e-3, 2)
    assert "Compute waits 8.5 ms of 25.5 ms, in 2 places" in tab.text("#lanes-text")


def test_moving_the_budget_changes_the_peak(browser, moving_file):
    path, plans = moving_file
    tab = browser.open(path)
    tab.evaluate("document.getElementById('budget').focus()")
    assert tab.evaluate("document.getElementById('budget-own').hidden")
    shown = []
    for key in ("Home", "ArrowRight", "ArrowRight"):
        tab.press(key, number={"Home": 36, "ArrowRight": 39}[key])
        shown.append(
            (
                budget_of(tab),
                tab.text("#figures div:first-child b"),
                tab.text("#peak-text"),
            )
        )
    for plan, (budget, peak, sentence) in zip(plans.values(), shown, strict=True):
        assert budget == format_bytes(plan.memory_budget)
        assert peak == format_bytes(plan.trace.peak_bytes)
        assert f"operation {plan.trace.peak_index + 1} of {len(plan.trace.steps)}" in sentence
    assert not tab.evaluate("document.getElementById('budget-own').hidden")
    tab.click("#budget-own")
    assert budget_of(tab) == "100.00 MiB"
    assert tab.complaints() == []


def test_a_point_of_the_frontier_names_its_strategy(browser, moving_file):
    path, plans = moving_file
    tab = browser.open(path)
    tab.box("#frontier")
    mark = tab.evaluate("document.querySelector('#frontier .mark').getBoundingClientRect().toJSON()")
    tab.mouse("mouseMoved", mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
    peak = format_bytes(plans["recomputing"].trace.peak_bytes)
    assert tab.text("#frontier .tip") == f"recomputing: 20.0 ms from {peak} on"
    tab.mouse("mouseMoved", mark["x"] + 60, mark["y"] - 60)
    assert tab.evaluate("document.querySelector('#frontier .tip').hidden")


def test_the_budget_can_be_dragged_along_the_frontier(browser, deep_file):
    path, found = deep_file
    tab = browser.open(path)
    left, right, middle = plot(tab, "#frontier")
    tab.mouse("mousePressed", (left + right) / 2, middle, button="left")
    peaks = []
    for share in (0.4, 0.7, 0.999):
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + share * (right - left), y=middle, buttons=1)
        peaks.append(tab.text("#figures div:first-child b"))
    tab.mouse("mouseReleased", right, middle, button="left")
    assert len(set(peaks)) == 3
    assert peaks[-1] == format_bytes(found.store_all.peak_bytes)
    assert tab.text("#verdict-text").endswith("as fast as plain training.")


def test_the_table_of_stages_sorts_and_finds(browser, deep_file):
    path, found = deep_file
    tab = browser.open(path)
    cells = "[...document.querySelectorAll('#stages tbody tr')].map((row) => row.cells[1].textContent)"
    names = [stage.name for stage in found.chain.stages]
    assert tab.evaluate(cells) == names
    saved = {stage.name: stage.saved_bytes for stage in found.chain.stages}
    tab.click("#stages thead th:nth-child(6) button")
    assert tab.evaluate("document.querySelector('#stages [aria-sort]').getAttribute('aria-sort')") == "descending"
    order = [saved[name] for name in tab.evaluate(cells)]
    assert all(one >= other for one, other in itertools.pairwise(order))
    tab.click("#stages thead th:nth-child(6) button")
    order = [saved[name] for name in tab.evaluate(cells)]
    assert all(one <= other for one, other in itertools.pairwise(order))
    tab.evaluate("document.getElementById('filter').focus()")
    tab.call("Input.insertText", text="layer4.33")
    assert sorted(tab.evaluate(cells)) == sorted(name for name in names if "layer4.33" in name)
    runs = tab.evaluate("[...document.querySelectorAll('#stages tbody tr')].map((row) => row.cells[7].textContent)")
    assert set(runs) <= {"1×", "2×"}


def test_the_table_of_stages_names_variants(browser, tmp_path):
    lean = Variant("lean", 1e-3, 2e-3, saved_bytes=4)
    stages = [Stage(name, 1e-3, 1e-3, output_bytes=2, saved_bytes=8, variants=[lean]) for name in "ab"]
    schedule = Schedule("by hand", [Forward(1, "all", 1), Forward(2, "all"), Backward(2), Backward(1)])
    write_report(tmp_path / "variants.html", Chain("two", stages), schedule, memory_budget=64, num_budgets=2)
    tab = browser.open(tmp_path / "variants.html")
    heads = tab.evaluate("[...document.querySelectorAll('#stages thead th')].map((cell) => cell.textContent)")
    place = heads.index("Runs as")
    rows = "[...document.querySelectorAll('#stages tbody tr')]"
    assert tab.evaluate(f"{rows}.map((row) => row.cells[{place}].textContent)") == ["lean", "as it is"]
    assert tab.complaints() == []


def test_bytes_are_read_as_in_python(browser, moving_file):
    script = (files("lowtide.report") / "page" / "format.js").read_text()
    tab = browser.open(moving_file[0])
    written = ["1234", "8GiB", "8 gib", "8G", "8Gi", "8GB", "8 gb", "1.5 MiB", "512m", "3kB", "7B", " 2 KiB "]
    wrong = ["", "8 gi b", "1.5", "8i", "GiB", "-1", "8GiB/s", "lots"]
    found = tab.evaluate(f"(() => {{ {script} return {written + wrong}.map(parseBytes); }})()")
    assert found == [parse_bytes(text) for text in written] + [None] * len(wrong)


def test_numbers_read_as_in_the_terminal(browser, moving_file):
    script = (files("lowtide.report") / "page" / "format.js").read_text()
    tab = browser.open(moving_file[0])
    sizes = [0, 1, 1023, 1024, 1500, 1048570, 2**20, 5 * 2**30 // 3, 2**30, 2**40, 3 * 2**41]
    times = [0.0, 1e-7, 4.2e-4, 0.00099999, 0.001, 0.0621, 0.99999, 1.0, 12.345]
    rates = [800, 1500, 2_500_000, 12_000_000_000, 31_400_000_000]
    found = tab.evaluate(
        f"""(() => {{ {script}
            return [{sizes}.map(formatBytes), {times}.map(formatSeconds), {rates}.map(formatBandwidth)];
        }})()"""
    )
    assert found == [
        list(map(format_bytes, sizes)),
        list(map(format_seconds, times)),
        list(map(format_bandwidth, rates)),
    ]


def test_a_name_is_text_and_nothing_else(browser, tmp_path):
    evil = '<img src="x" onerror="document.title=1">'
    stages = [type(stage)(evil, *([0.001, 0.002, 8, 20])) for stage in small_chain().stages]
    path = tmp_path / "evil.html"
    path.write_text(render(periodic_survey(Chain(evil, stages * 3))))
    tab = browser.open(path)
    assert tab.text("#chain-name") == evil
    assert tab.evaluate("document.images.length") == 0
    assert evil in tab.text("#operation-title")
    assert tab.complaints() == []


def test_what_cannot_be_unpacked_is_said(browser, moving_file, tmp_path):
    text = re.sub('(id="data">).{40}', r"\1" + "A" * 40, moving_file[0].read_text())
    path = tmp_path / "broken.html"
    path.write_text(text)
    tab = browser.new_tab()
    tab.call("Page.navigate", url=path.as_uri())
    tab.wait("document.getElementById('failure')?.hidden === false")
    assert "This page cannot be drawn" in tab.text("#failure")


@pytest.mark.parametrize("seconds", [0.0, 1e-7])
def test_a_chain_of_one_stage_and_no_time_is_drawn(seconds, browser, tmp_path):
    path = tmp_path / "one.html"
    path.write_text(render(bare_survey(Chain("one", [Stage("a", seconds, seconds, output_bytes=1, saved_bytes=2)]))))
    tab = browser.open(path)
    tab.click("#over label:last-of-type")
    tab.click("#zoom-in")
    assert tab.complaints() == []
    shown = tab.evaluate("document.getElementById('page').innerText")
    assert "Fits in" in shown
    assert not re.search("NaN|Infinity|undefined", shown)
    assert not re.search("NaN|Infinity|undefined", tab.evaluate("document.getElementById('page').innerHTML"))
