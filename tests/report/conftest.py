"""A browser, and two pages to look at: the small chain with copies, and a chain of 339 stages."""

from __future__ import annotations

import pytest
from tests.report.browser import chromium, find_chromium
from tests.report.chains import (
    MIB,
    deep_chain,
    moving_schedule,
    periodic_survey,
    point_of,
    recomputing_schedule,
    small_chain,
    store_all_schedule,
)

from lowtide import simulate
from lowtide.report.page import Measured, render
from lowtide.report.survey import Curve, ShownPlan, Survey

BANDWIDTH = 4 * 10**9


@pytest.fixture(scope="session")
def started():
    with chromium(find_chromium()) as browser:
        yield browser


@pytest.fixture
def browser(started):
    yield started
    started.close_tabs()


def moving_page():
    """Three plans of the small chain: recomputing, moving (the user's own), and plain training."""
    chain = small_chain()
    schedules = {
        "recomputing": recomputing_schedule(),
        "moving": moving_schedule(),
        "store-all": store_all_schedule(4),
    }
    traces = {name: simulate(chain, schedule, bandwidth=BANDWIDTH) for name, schedule in schedules.items()}
    budgets = {"recomputing": 80 * MIB, "moving": 100 * MIB, "store-all": 112 * MIB}
    plans = {name: ShownPlan(budgets[name], schedules[name], traces[name]) for name in schedules}
    points = {
        "recomputing": point_of(chain, "recomputing", schedules["recomputing"]),
        "store-all": point_of(chain, "store-all", schedules["store-all"]),
    }
    curves = [Curve(name, point.peak_bytes, (point,), (), 0) for name, point in points.items()]
    found = Survey(chain, BANDWIDTH, True, traces["store-all"], tuple(curves), tuple(plans.values()))
    text = render(found, own=plans["moving"], measured=Measured(26e-3, 92 * MIB, "a small card", 20))
    return text, plans


@pytest.fixture(scope="session")
def moving_file(tmp_path_factory):
    text, plans = moving_page()
    path = tmp_path_factory.mktemp("page") / "moving.html"
    path.write_text(text)
    return path, plans


@pytest.fixture(scope="session")
def deep_file(tmp_path_factory):
    chain = deep_chain(339)
    found = periodic_survey(chain)
    path = tmp_path_factory.mktemp("page") / "deep.html"
    path.write_text(render(found, memory_budget=found.plans[5].memory_budget))
    return path, found
