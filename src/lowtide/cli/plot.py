"""`lowtide plot`: the frontier and the memory curve as a figure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from lowtide.chain import Chain
from lowtide.cli.given import simulated
from lowtide.cli.options import (
    Bandwidth,
    ChainFile,
    HalfDuplex,
    Json,
    OptionalScheduleFile,
    Slots,
    SurveyStrategies,
    bandwidth_option,
    bytes_option,
)
from lowtide.cli.output import curve_values, infeasible_as_json, output_of_others_aside, print_json
from lowtide.errors import LowtideError
from lowtide.files import check_can_write
from lowtide.progress import DelayedProgress
from lowtide.report import save_figure, survey
from lowtide.report.figures import figure_format, required_matplotlib
from lowtide.report.survey import DEFAULT_NUM_BUDGETS, Survey
from lowtide.trace import Trace


class Panel(StrEnum):
    """What a figure shows."""

    frontier = "frontier"
    memory = "memory"
    both = "both"


class Over(StrEnum):
    """What the memory is drawn over."""

    operations = "operations"
    time = "time"


OutputFile = Annotated[
    str,
    typer.Option(
        "-o",
        "--output",
        metavar="FIGURE.png|svg|pdf",
        help="Write the figure here; the ending says the format.",
        show_default=False,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="BYTES",
        help="A budget to mark, such as 8GiB; without a schedule, the memory of the fastest one within it is drawn.",
        show_default=False,
    ),
]
PanelOption = Annotated[Panel, typer.Option("--panel", help="Draw only this.")]
OverOption = Annotated[Over, typer.Option("--over", help="Draw the memory over this.")]

EXAMPLES = (
    "lowtide plot chain.json -o frontier.svg",
    "lowtide plot chain.json --memory 8GiB -o figure.png",
    "lowtide plot chain.json schedule.json --panel memory -o memory.pdf",
    "lowtide plot chain.json -o frontier.svg --json",
)


def command(
    chain_file: ChainFile,
    output: OutputFile,
    schedule_file: OptionalScheduleFile = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    strategy: SurveyStrategies = None,
    slots: Slots = None,
    half_duplex: HalfDuplex = False,
    panel: PanelOption = Panel.both,
    over: OverOption = Over.operations,
    json: Json = False,
) -> None:
    """Draw step time against memory, and memory over a schedule.

    Without a schedule and without a budget only the frontier is drawn. Needs matplotlib: pip install 'lowtide[plot]'.
    Exit status 3: no schedule stays within the budget.
    """
    rate = bandwidth_option(bandwidth) or 0
    budget = None if memory is None else bytes_option("--memory", memory)
    figure_format(output)  # what is wrong is refused before anything is solved
    required_matplotlib()
    check_can_write(output, chain_file, *([] if schedule_file is None else [schedule_file]))
    chain = Chain.load(chain_file)
    if schedule_file is None and budget is None and panel is Panel.memory:
        raise LowtideError("the memory of which schedule? give a schedule file, or a budget with --memory")
    trace: Trace | None = None
    if schedule_file is not None:
        _, trace = simulated(chain_file, chain, schedule_file, bandwidth=rate or None, duplex=not half_duplex)
    found: Survey | None = None
    if panel is not Panel.memory or trace is None:
        with output_of_others_aside(), DelayedProgress() as progress:
            found = survey(
                chain,
                memory_budgets=[budget] if budget is not None else [],
                bandwidth=rate,
                duplex=not half_duplex,
                strategies=strategy or (),
                slots=slots,
                num_budgets=2 if panel is Panel.memory else DEFAULT_NUM_BUDGETS,
                progress=progress,
            )
        if trace is None and budget is not None:
            with infeasible_as_json(json):
                trace = found.plan_within(budget).trace
    save_figure(
        output,
        survey=found if panel is not Panel.memory else None,
        trace=trace if panel is not Panel.frontier else None,
        memory_budget=budget,
        over=over.value,
    )
    if json:
        print_json(_values(output, budget, found, trace))
    else:
        print(f"written to {output}")


def _values(output: str, budget: int | None, found: Survey | None, trace: Trace | None) -> dict[str, Any]:
    """The file and what it shows, for programs; None for what is not drawn."""
    return {
        "output": output,
        "feasible": True,
        "memory_budget": budget,
        "seconds": None if trace is None else trace.seconds,
        "peak_bytes": None if trace is None else trace.peak_bytes,
        "idle_seconds": None if trace is None else trace.idle_seconds,
        "curves": None if found is None else curve_values(found),
    }
