"""The report: one HTML file that holds its data, its style and its script, and asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from lowtide.chain import Chain, as_chain
from lowtide.files import write_text
from lowtide.report.encode import compressed, encode
from lowtide.report.palette import DARK, LAYERS, LIGHT, Theme
from lowtide.report.survey import DEFAULT_NUM_BUDGETS, DEFAULT_PATIENCE_SECONDS, ShownPlan, Survey, survey
from lowtide.report.text import plan_text
from lowtide.schedule import Schedule
from lowtide.simulate import simulate
from lowtide.solve import Progress, Solution
from lowtide.units import parse_bandwidth, parse_bytes

# In this order they make one script: each uses only what stands before it, and `main.js` starts everything.
SCRIPTS = (
    "format.js",
    "data.js",
    "scale.js",
    "frontier.js",
    "view.js",
    "memory.js",
    "lanes.js",
    "stages.js",
    "main.js",
)

# Without a budget of the user's the page opens on the least memory that slows a step by at most this share.
_BEARABLE_OVERHEAD = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """What a real run saw.

    Attributes:
        seconds: the time of one step.
        peak_bytes: the most bytes on the device.
        device: where it ran.
        num_steps: over how many steps; None: in trial steps, before training.
    """

    seconds: float | None = None
    peak_bytes: int | None = None
    device: str = ""
    num_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a page shows.

    Attributes:
        survey: the curves, and the schedules of other budgets.
        plan: the schedule that it opens on.
    """

    survey: Survey
    plan: ShownPlan


def write_report(
    path: str | os.PathLike[str],
    chain: Chain | Mapping[str, Any],
    solution: Solution | Schedule | None = None,
    *,
    memory_budget: int | str | None = None,
    bandwidth: int | str | None = None,
    duplex: bool = True,
    measured: Measured | None = None,
    notes: Sequence[str] = (),
    is_attached: bool = False,
    strategies: Sequence[str] = (),
    slots: int | None = None,
    num_budgets: int = DEFAULT_NUM_BUDGETS,
    patience_seconds: float | None = DEFAULT_PATIENCE_SECONDS,
    progress: Progress | None = None,
) -> Report:
    """Write the report page of a chain: does it fit, what does it cost, what happens when, what would more memory buy.

    Args:
        path: the HTML file to write; written whole or not at all.
        chain: the network, a `Chain` or its plain data.
        solution: what to show first, a solution or a schedule; None: the fastest schedule that was found.
        memory_budget: bytes on the device; None: the solution's, or a schedule's own peak.
        bandwidth: bytes per second each way between device and host; None: the solution's, or nothing can be moved.
        duplex: both directions at once.
        measured: what a run saw, to be shown beside what was predicted.
        notes: what its maker says of the solution, a sentence each.
        is_attached: whether a model trains under the solution. Trial steps have decided for it then, and the page does
            not recommend what is faster by simulation alone.
        strategies: whose curves to draw; none: those of all that apply and leave weights on the device.
        slots: how finely strategies that discretise memory do it; None: each one's default.
        num_budgets: for how many budgets schedules are computed ahead.
        patience_seconds: how long all strategies together may solve; None: without end.
        progress: called with the name of what is being tried and the share done, 0 to 1.

    Returns:
        What the page shows.

    Raises:
        ScheduleError: where the schedule is illegal for the chain.
        LowtideError: where the file cannot be written.

    Example:
        >>> solution = lowtide.solve(chain, memory_budget="8GiB")       # doctest: +SKIP
        >>> shown = write_report("plan.html", chain, solution)          # doctest: +SKIP
    """
    chain = as_chain(chain)
    rate = _rate(bandwidth, solution)
    own = _own_plan(chain, solution, memory_budget, rate, duplex)
    budget = own.memory_budget if own is not None else None if memory_budget is None else parse_bytes(memory_budget)
    found = survey(
        chain,
        memory_budgets=[] if budget is None else [budget],
        bandwidth=rate,
        duplex=duplex,
        strategies=strategies,
        slots=slots,
        num_budgets=num_budgets,
        patience_seconds=patience_seconds,
        progress=progress,
    )
    plans, selected = _plans(found, own, budget)
    text = render(found, own=own, memory_budget=budget, measured=measured, notes=notes, is_attached=is_attached)
    write_text(path, text)
    return Report(found, plans[selected])


def render(
    found: Survey,
    *,
    own: ShownPlan | None = None,
    memory_budget: int | None = None,
    measured: Measured | None = None,
    notes: Sequence[str] = (),
    is_attached: bool = False,
) -> str:
    """The page of a survey as HTML; `own` is the user's plan, in place of the one that was found for its budget."""
    plans, selected = _plans(found, own, memory_budget)
    marked = selected if own is not None or memory_budget is not None else None
    data = encode(
        found,
        plans,
        own=marked,
        measured=None if measured is None else asdict(measured),
        notes=notes,
        is_attached=is_attached,
    )
    data["selected"] = selected
    data["version"] = importlib.import_module("lowtide").__version__
    return _filled(found, plans[selected], data)


def _plans(found: Survey, own: ShownPlan | None, memory_budget: int | None) -> tuple[list[ShownPlan], int]:
    """The schedules of the page by budget, and the place of the one that it opens on."""
    plans = list(found.plans)
    if own is not None:
        plans = sorted(
            [own, *(plan for plan in plans if plan.memory_budget != own.memory_budget)],
            key=lambda plan: plan.memory_budget,
        )
        return plans, plans.index(own)
    if memory_budget is not None:
        return plans, plans.index(found.plan_within(memory_budget))
    return plans, _bearable(found, plans)


def _rate(bandwidth: int | str | None, solution: Solution | Schedule | None) -> int:
    if bandwidth is not None:
        return parse_bandwidth(bandwidth)
    return solution.bandwidth if isinstance(solution, Solution) else 0


def _own_plan(
    chain: Chain, solution: Solution | Schedule | None, memory_budget: int | str | None, rate: int, duplex: bool
) -> ShownPlan | None:
    if solution is None:
        return None
    schedule = solution.schedule if isinstance(solution, Solution) else solution
    trace = simulate(chain, schedule, bandwidth=rate or None, duplex=duplex)
    if memory_budget is not None:
        budget = parse_bytes(memory_budget)
    else:
        budget = solution.memory_budget if isinstance(solution, Solution) else trace.peak_bytes
    return ShownPlan(budget, schedule, trace)


def _bearable(found: Survey, plans: Sequence[ShownPlan]) -> int:
    """The least budget that costs little time, the largest where all cost more."""
    limit = (1 + _BEARABLE_OVERHEAD) * found.store_all.seconds
    return next((index for index, plan in enumerate(plans) if plan.trace.seconds <= limit), len(plans) - 1)


def _filled(found: Survey, plan: ShownPlan, data: dict[str, Any]) -> str:
    """The template with everything in it. What comes from a chain is escaped or base 64: a name is never markup."""
    folder = files("lowtide.report") / "page"
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}\n}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    summary = plan_text(
        found.chain,
        plan.trace,
        strategy=plan.schedule.strategy,
        memory_budget=plan.memory_budget,
        bandwidth=found.bandwidth,
        width=100,
        colour=False,
    )
    parts = {
        "title": html.escape(f"{found.chain.name} | lowtide"),
        "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "style": _colours() + (folder / "style.css").read_text(encoding="utf-8"),
        "summary": html.escape(summary),
        "data": compressed(data),
        "script": script,
    }
    template = (folder / "index.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], template)


def _colours() -> str:
    """The palette as CSS variables, for light ground, for dark, and for where the reader has chosen."""

    def block(selector: str, theme: Theme) -> str:
        layers = "".join(f"--layer-{index}:{theme.layers[name]};" for index, name in enumerate(LAYERS))
        phases = "".join(f"--{name}:{colour};" for name, colour in theme.phases.items())
        return f"{selector}{{{layers}{phases}}}\n"

    dark = block(":root:not([data-theme=light])", DARK)
    return (
        f"{block(':root', LIGHT)}@media (prefers-color-scheme:dark){{{dark}}}\n{block(':root[data-theme=dark]', DARK)}"
    )
