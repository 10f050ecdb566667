from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from tests.report.chains import MIB, deep_chain, moving_schedule, periodic_schedule, recomputing_schedule, small_chain

from lowtide import Backward, Chain, Forward, Schedule, Stage, simulate, solve
from lowtide.report.text import chart_text, plan_text, solution_text

ESCAPE = re.compile("\x1b\\[[0-9;]*m")


class Stream(io.StringIO):
    """A standard output that claims to be a terminal, or to have an old encoding."""

    def __init__(self, *, terminal=False, encoding="utf-8"):
        super().__init__()
        self.terminal, self.given = terminal, encoding

    def isatty(self):
        return self.terminal

    @property
    def encoding(self):
        return self.given


def moving_text(**settings):
    trace = simulate(small_chain(), moving_schedule(), bandwidth="4GB/s")
    return plan_text(small_chain(), trace, strategy="by hand", memory_budget=100 * MIB, bandwidth=4 * 10**9, **settings)


def test_the_heading_says_whether_it_fits_and_what_it_costs():
    text = moving_text().splitlines()
    assert text[0] == "small, 4 stages, by hand"
    assert text[1] == "fits: peak 91.00 MiB of 100.00 MiB (91 %)"
    assert text[2] == "step 25.5 ms, 49.9 % above plain training (17.0 ms)"
    assert text[3] == "0 of 4 forwards recomputed, 40.00 MiB moved at 4 GB/s, 8.5 ms waiting for it"


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_short_enough_to_be_read(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream(terminal=terminal))
    monkeypatch.setenv("COLUMNS", "200")
    chain = Chain("a network with a long name and many words in it, " * 4, small_chain().stages)
    trace = simulate(chain, moving_schedule(), bandwidth="4GB/s")
    lines = plan_text(chain, trace, strategy="by hand", memory_budget=100 * MIB, colour=False).splitlines()
    assert max(map(len, lines)) <= (100 if terminal else 80)
    assert " ".join(" ".join(lines[:4]).split()).startswith(" ".join(chain.name.split()))


def test_a_peak_above_the_budget_does_not_fit():
    trace = simulate(small_chain(), recomputing_schedule())
    assert "does not fit: peak 78.00 MiB of 77.00 MiB" in plan_text(small_chain(), trace, memory_budget=77 * MIB)


def test_the_lanes_follow_the_clock():
    lines = {line[:10].strip(): line[11:] for line in moving_text(width=112).splitlines() if line[:10].strip()}
    compute = lines["compute"]
    # 25.5 ms on 100 columns: forwards 1 to 3 take 5 ms, the release waits until 8.2 ms, …
    assert re.fullmatch("f+·+f+b+·+b+", compute)
    assert compute.count("f") == pytest.approx(6 / 25.486 * 100, abs=1.5)
    assert compute.count("·") == pytest.approx(8.486 / 25.486 * 100, abs=1.5)
    first = lines["to host"].index("━")
    assert first == pytest.approx(3 / 25.486 * 100, abs=1)
    assert lines["to host"].count("━") == pytest.approx(5.243 / 25.486 * 100, abs=1.5)
    assert compute[first + lines["to host"].count("━") - 2] == "·"


def test_the_curve_is_as_high_as_the_memory():
    trace = simulate(deep_chain(), periodic_schedule(339, 18))
    rows = [line[11:] for line in chart_text(trace, width=112).splitlines()[:8]]
    heights = [sum(" ▁▂▃▄▅▆▇█".index(row.ljust(100)[column]) for row in rows) for column in range(100)]
    assert max(heights) == 64
    first = trace.steps[0].peak_bytes / trace.peak_bytes * 64
    assert heights[0] >= round(first)
    assert heights[0] == pytest.approx(64 * trace.steps[4].peak_bytes / trace.peak_bytes, abs=2)


def test_piped_it_is_plain_text_of_80_columns(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream())
    text = moving_text()
    assert not ESCAPE.search(text)
    assert max(map(len, text.splitlines())) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())


def test_on_a_terminal_it_is_coloured_and_the_same_text(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", Stream(terminal=True))
    text = moving_text(width=80)
    assert ESCAPE.search(text)
    stripped = [line.rstrip() for line in ESCAPE.sub("", text).splitlines()]
    assert stripped == moving_text(width=80, colour=False).splitlines()


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Stream(terminal=True))
    assert not ESCAPE.search(moving_text(width=80))


def test_an_old_encoding_gets_ascii(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream(encoding="ascii"))
    chart = chart_text(simulate(small_chain(), moving_schedule(), bandwidth="4GB/s"), memory_budget=100 * MIB)
    assert chart.isascii()


def test_a_budget_far_above_is_named_and_not_drawn():
    trace = simulate(small_chain(), recomputing_schedule())
    assert "budget" in chart_text(trace, memory_budget=80 * MIB)
    assert "budget" not in chart_text(trace, memory_budget=800 * MIB)


def test_labels_of_four_digits_leave_the_axis_in_its_column():
    wide = Chain("wide", [Stage("a", 1.0, 1.0, output_bytes=1, saved_bytes=1)], base_bytes=int(1008.78 * 1024) - 3)
    lines = chart_text(simulate(wide, Schedule("by hand", [Forward(1, "all"), Backward(1)])), width=80).splitlines()
    assert lines[0].startswith("1008.8 KiB┤")
    assert {line[10] for line in lines[:8]} == {"┤", "│"}


def test_a_name_cannot_drive_the_terminal():
    chain = Chain("evil\x1b]0;title\x07", small_chain().stages)
    assert "\x1b" not in plan_text(chain, simulate(chain, recomputing_schedule()))


def test_a_chain_without_times_is_described():
    chain = Chain("timeless", [Stage("a", 0.0, 0.0, output_bytes=1, saved_bytes=1)] * 4)
    assert "no times are known" in plan_text(chain, simulate(chain, recomputing_schedule()))


def test_a_solution_describes_itself():
    solution = solve(small_chain(), memory_budget=80 * MIB, strategy="rotor")
    text = solution_text(solution, width=80, colour=False)
    assert text.splitlines()[0] == "small, 4 stages, rotor"
    assert f"peak {solution.peak_bytes / MIB:.2f} MiB of 80.00 MiB" in text


def test_the_documentation_shows_what_is_printed():
    page = Path(__file__).parents[2] / "docs" / "report.md"
    assert f"```\n{moving_text(width=80, colour=False)}\n```" in page.read_text(encoding="utf-8")
