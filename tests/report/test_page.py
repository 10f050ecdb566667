from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from tests.report.chains import (
    MIB,
    data_of,
    deep_chain,
    moving_schedule,
    periodic_survey,
    recomputing_schedule,
    small_chain,
    store_all_schedule,
)

from lowtide import Chain, LowtideError, ScheduleError, simulate, solve
from lowtide.report import Measured, write_report
from lowtide.report.page import render


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.html"


def test_a_solution_is_what_the_page_opens_on(path):
    solution = solve(small_chain(), memory_budget=90 * MIB, strategy="rotor")
    write_report(path, small_chain(), solution, strategies=["rotor"], num_budgets=5)
    data = data_of(path.read_text())
    shown = data["plans"][data["selected"]]
    assert data["own"] == data["selected"]
    assert shown["budget"] == 90 * MIB
    assert shown["peak"] == solution.peak_bytes
    assert shown["seconds"] == solution.seconds
    assert data["storeAll"]["peak"] == solve(small_chain(), memory_budget="1GiB", strategy="store-all").peak_bytes


def test_a_schedule_is_shown_even_where_a_faster_one_fits(path):
    write_report(path, small_chain(), moving_schedule(), bandwidth="1GB/s", strategies=["rotor"], num_budgets=4)
    data = data_of(path.read_text())
    shown = data["plans"][data["own"]]
    trace = simulate(small_chain(), moving_schedule(), bandwidth="1GB/s")
    assert (shown["strategy"], shown["budget"], shown["seconds"]) == ("by hand", trace.peak_bytes, trace.seconds)


def test_without_a_budget_the_page_opens_on_a_bearable_one(path):
    write_report(path, deep_chain(24), strategies=["rotor"])
    data = data_of(path.read_text())
    assert data["own"] is None
    plans, plain = data["plans"], data["storeAll"]["seconds"]
    assert plans[data["selected"]]["seconds"] <= 1.1 * plain
    assert all(plan["seconds"] > 1.1 * plain for plan in plans[: data["selected"]])


def test_what_was_measured_is_in_it(path):
    write_report(
        path, small_chain(), store_all_schedule(4), measured=Measured(0.5, 7, "a card", 20), strategies=["rotor"]
    )
    assert data_of(path.read_text())["measured"] == {
        "seconds": 0.5,
        "peak_bytes": 7,
        "device": "a card",
        "num_steps": 20,
    }


def test_plain_data_will_do(path):
    write_report(path, small_chain().to_dict(), strategies=["store-all"])
    assert data_of(path.read_text())["chain"]["names"] == ["stem", "block.1", "block.2", "head"]


def test_an_illegal_schedule_writes_nothing(path):
    with pytest.raises(ScheduleError):
        write_report(path, Chain("one", small_chain().stages[:1]), recomputing_schedule())
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(LowtideError, match="cannot be written"):
        write_report(tmp_path / "no" / "such" / "place.html", small_chain(), strategies=["store-all"])


class Addresses(HTMLParser):
    """Everything in a page that could be asked for."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "data", "action", "srcset")]


def test_the_page_asks_for_nothing():
    text = render(periodic_survey(deep_chain(12)))
    parser = Addresses()
    parser.feed(text)
    assert all(address.startswith(("#", "data:")) for address in parser.found)
    assert "http://www.w3.org/2000/svg" in text
    without_names = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket", without_names)
    policy = re.search('Content-Security-Policy" content="(.*?)"', text).group(1)
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_names_are_never_markup():
    evil = '</script><script>alert("{{data}}")</script><img src=x onerror=alert(1)>'
    chain = Chain(evil, [*small_chain().stages] * 3)
    text = render(periodic_survey(chain))
    parser = Addresses()
    parser.feed(text)
    assert parser.tags.count("script") == 2
    assert "img" not in parser.tags
    assert data_of(text)["chain"]["name"] == evil


def test_a_deep_chain_makes_a_small_page():
    text = render(periodic_survey(deep_chain(339)))
    assert len(text.encode()) < 2**20
    assert len(data_of(text)["chain"]["names"]) == 339


def test_two_runs_write_the_same_page():
    assert render(periodic_survey(deep_chain(12))) == render(periodic_survey(deep_chain(12)))


def test_every_file_of_the_page_is_used():
    from importlib.resources import files

    from lowtide.report.page import SCRIPTS

    present = {entry.name for entry in (files("lowtide.report") / "page").iterdir()}
    assert present == {*SCRIPTS, "index.html", "style.css"}


def test_torch_and_matplotlib_stay_out():
    line = (
        "import sys, lowtide.report; print(*(name for name in ('torch', 'matplotlib', 'rich') if name in sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == ""
