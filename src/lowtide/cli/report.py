"""`lowtide report`: the report page of a chain."""

from __future__ import annotations

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
from lowtide.files import check_can_write
from lowtide.progress import DelayedProgress
from lowtide.report import write_report
from lowtide.report.page import Report
from lowtide.report.survey import DEFAULT_NUM_BUDGETS, DEFAULT_PATIENCE_SECONDS
from lowtide.schedule import Schedule

OutputFile = Annotated[
    str, typer.Option("-o", "--output", metavar="PLAN.html", help="Write the page here.", show_default=False)
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="BYTES",
        help="Your budget, such as 8GiB: the page opens on it. Default: a schedule's own peak.",
        show_default=False,
    ),
]
NumBudgets = Annotated[
    int, typer.Option("--budgets", metavar="N", min=2, help="For how many budgets schedules are computed ahead.")
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience", metavar="SECONDS", min=0, help="How long all strategies may solve; slow ones get fewer budgets."
    ),
]

EXAMPLES = (
    "lowtide report chain.json -o plan.html",
    "lowtide report chain.json --memory 8GiB --bandwidth 12GB/s -o plan.html",
    "lowtide report chain.json schedule.json --memory 8GiB -o plan.html",
    "lowtide report chain.json --memory 8GiB -o plan.html --json",
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
    num_budgets: NumBudgets = DEFAULT_NUM_BUDGETS,
    patience: Patience = DEFAULT_PATIENCE_SECONDS,
    json: Json = False,
) -> None:
    """Write a page that shows what fits, what it costs and what happens when.

    The page is one file that opens from disk in any browser and needs no network. It opens on the schedule, or on the
    fastest one within the budget; moving the budget on the page shows the others. Exit status 3: no schedule stays
    within the budget.
    """
    rate = bandwidth_option(bandwidth)
    budget = None if memory is None else bytes_option("--memory", memory)
    check_can_write(output, chain_file, *([] if schedule_file is None else [schedule_file]))
    chain = Chain.load(chain_file)
    schedule: Schedule | None = None
    if schedule_file is not None:
        schedule, _ = simulated(chain_file, chain, schedule_file, bandwidth=rate or None, duplex=not half_duplex)
    with infeasible_as_json(json), output_of_others_aside(), DelayedProgress() as progress:
        report = write_report(
            output,
            chain,
            schedule,
            memory_budget=budget,
            bandwidth=rate,
            duplex=not half_duplex,
            strategies=strategy or (),
            slots=slots,
            num_budgets=num_budgets,
            patience_seconds=patience,
            progress=progress,
        )
    if json:
        print_json(_values(output, report))
    else:
        print(f"written to {output}; open it in a browser")


def _values(output: str, report: Report) -> dict[str, Any]:
    """The file, the schedule that it opens on, and the curves, for programs."""
    shown = report.plan
    return {
        "output": output,
        "feasible": True,
        "memory_budget": shown.memory_budget,
        "strategy": shown.schedule.strategy,
        "seconds": shown.trace.seconds,
        "peak_bytes": shown.trace.peak_bytes,
        "idle_seconds": shown.trace.idle_seconds,
        "curves": curve_values(report.survey),
    }
