"""The page for everybody, in a real browser: keyboard, contrast, large text, light and dark."""

from __future__ import annotations

import pytest
from tests.report.browser import ARTEFACTS, find_chromium, words
from tests.report.chains import small_chain

from lowtide.report.timeline import spans
from lowtide.units import format_bytes

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (apt-get install chromium)"),
]


def test_the_keyboard_reaches_every_operation(browser, moving_file):
    path, plans = moving_file
    tab = browser.open(path)
    tab.evaluate("document.getElementById('memory-chart').focus()")
    tab.press("Home", number=36)
    all_spans = spans(plans["moving"].trace)
    for index, span in enumerate(all_spans):
        value = tab.evaluate("document.getElementById('memory-chart').getAttribute('aria-valuetext')")
        expected = f"Operation {index + 1} of 12: {words(small_chain(), span)}, {format_bytes(span.step.peak_bytes)}"
        assert value == expected
        tab.press("ArrowRight", number=39)
    tab.press("p", number=80, text="p")
    assert f"operation {plans['moving'].trace.peak_index + 1} of" in tab.text("#operation-text")


def test_everything_that_acts_can_be_reached_with_the_tab_key(browser, moving_file):
    tab = browser.open(moving_file[0])
    reached = set()
    for _ in range(60):
        tab.press("Tab", number=9)
        if tab.evaluate("document.activeElement === document.body"):
            break  # once around
        assert tab.evaluate("document.activeElement.matches(':focus-visible')")
        reached.add(tab.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    wanted = {"theme", "budget", "memory-chart", "lanes-chart", "zoom-in", "filter", "recomputing", "stem", "Saved"}
    assert wanted <= reached
    acting = "document.querySelectorAll('button:not(:disabled), input, [tabindex], a').length"
    assert tab.evaluate(acting) - 2 <= len(reached) + 1  # two are hidden; of the two radio buttons one is in the order


def test_zooming_keeps_the_cursor_in_sight(browser, deep_file):
    path, found = deep_file
    tab = browser.open(path)
    tab.evaluate("document.getElementById('memory-chart').focus()")
    for _ in range(4):
        tab.press("+", number=187, text="+")
    ticks = tab.evaluate("[...document.querySelectorAll('#memory-chart .axis text')].map((label) => label.textContent)")
    numbers = [int(tick) for tick in ticks if tick.isdigit()]
    peak, count = found.plans[5].trace.peak_index, len(found.plans[5].trace.steps)
    assert max(numbers) - min(numbers) <= count / 16
    assert min(numbers) - count / 16 <= peak <= max(numbers) + count / 16
    tab.press("Home", number=36)
    assert "operation 1 of" in tab.text("#operation-text")
    ticks = tab.evaluate("[...document.querySelectorAll('#memory-chart .axis text')].map((label) => label.textContent)")
    assert "0" in ticks
    tab.click("#zoom-all")
    assert tab.evaluate("document.getElementById('zoom-out').disabled")
    assert tab.complaints() == []


def test_the_reader_can_choose_light_or_dark(browser, moving_file):
    tab = browser.open(moving_file[0], scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ground)
    tab.click("#theme")
    assert tab.text("#theme") == "Light"
    assert tab.evaluate(ground) != light
    assert tab.evaluate(ground) == browser.open(moving_file[0], scheme="dark").evaluate(ground)


CONTRASTS = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(colour).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (channels(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    const says = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!says || !node.checkVisibility() || node.closest("script, :disabled, .tip, .skip, .hidden")) continue;
    const style = getComputedStyle(node);
    const both = [luminance(node.closest("svg") ? style.fill : style.color), luminance(ground(node))];
    const [one, other] = both.sort((x, y) => x - y);
    const name = `${node.tagName}.${node.getAttribute("class")}#${node.id}`;
    found[name] = Math.min(found[name] ?? Infinity, (other + 0.05) / (one + 0.05));
  }
  return found;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(scheme, browser, moving_file):
    tab = browser.open(moving_file[0], scheme=scheme)
    contrasts = tab.evaluate(CONTRASTS)
    assert len(contrasts) > 20
    # WCAG 2, level AA, for text of any size.
    assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}


def test_text_twice_as_large_still_fits(browser, deep_file):
    tab = browser.open(deep_file[0], width=1280)
    tab.call("Page.setFontSizes", fontSizes={"standard": 32})  # as the browser's own setting does
    tab.wait("document.querySelector('#memory-chart svg').getAttribute('height') === '640'")
    assert tab.evaluate("document.documentElement.scrollWidth") == 1280
    tab.resize(1280, tab.evaluate("document.documentElement.scrollHeight"))
    tab.screenshot(ARTEFACTS / "report-deep-large-text.png")
    assert tab.complaints() == []
