"""`lowtide bound`: how fast a schedule that moves weights could be at best."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from lowtide.bound import Model, bound
from lowtide.chain import Chain
from lowtide.cli.options import ChainFile, HalfDuplex, Json, bandwidth_option, bytes_option
from lowtide.cli.output import output_of_others_aside, print_json, print_pairs, step_time
from lowtide.errors import InfeasibleBudgetError
from lowtide.progress import DelayedProgress
from lowtide.units import format_seconds

Memory = Annotated[
    str,
    typer.Option(
        "--memory", metavar="BYTES", help="The budget: all bytes on the device, such as 8GiB.", show_default=False
    ),
]
RequiredBandwidth = Annotated[
    str,
    typer.Option(
        "--bandwidth",
        metavar="BYTES/s",
        help="Speed of the link between device and host, each way, such as 12GB/s.",
        show_default=False,
    ),
]
TimeLimit = Annotated[float, typer.Option("--time-limit", metavar="SECONDS", help="Report what is proven by then.")]
Gap = Annotated[float, typer.Option("--gap", metavar="SHARE", help="Stop once the optimum is known to this share.")]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="<paper|lists>",
        help="paper: the paper's program; lists: values take their room as soon as their copy is queued.",
    ),
]

EXAMPLES = (
    "lowtide bound chain.json --memory 8GiB --bandwidth 12GB/s",
    "lowtide bound chain.json --memory 8GiB --bandwidth 2GB/s --json",
)


def command(
    chain_file: ChainFile,
    memory: Memory,
    bandwidth: RequiredBandwidth,
    time_limit: TimeLimit = 60.0,
    gap: Gap = 1e-4,
    half_duplex: HalfDuplex = False,
    model: ModelName = "paper",
    json: Json = False,
) -> None:
    """Prove a lower bound on the time of a step for schedules that move weights.

    It holds where every stage runs forward once and only weights and optimizer state move. Where more is known of
    lowtide's own schedules, lists in which a value takes its room as soon as its copy is queued, that is printed too;
    --model lists proves the most. Exit status 3: no such schedule stays within the budget.
    """
    budget, rate = bytes_option("--memory", memory), bandwidth_option(bandwidth)
    assert rate is not None
    chain = Chain.load(chain_file)
    given = {"memory_budget": budget, "bandwidth": rate, "model": model}
    try:
        with output_of_others_aside(), DelayedProgress() as progress:
            progress("proving a lower bound", 0.0)
            name: Model = model  # type: ignore[assignment]  # checked there
            proven = bound(
                chain,
                memory_budget=budget,
                bandwidth=rate,
                time_limit=time_limit,
                gap=gap,
                duplex=not half_duplex,
                model=name,
            )
    except InfeasibleBudgetError as error:
        if json:
            print_json({"seconds": None, **given, "minimum_bytes": error.minimum_bytes})
        raise
    if json:
        print_json({**dataclasses.asdict(proven), **given})
        return
    status = (
        "the program's optimum"
        if proven.proven_optimal
        else f"time limit; the optimum is at most {proven.gap:.2%} above"
    )
    pairs = [
        ("chain", f"{chain.name}, {chain.num_stages} stages"),
        ("at least", step_time(proven.seconds, chain)),
    ]
    if proven.lists_seconds > proven.seconds * (1 + 1e-9):
        pairs.append(("in lists", f"{step_time(proven.lists_seconds, chain)}: the 'at best' of lowtide solve"))
    pairs += [("proven", status), ("solved in", format_seconds(proven.solve_seconds))]
    print_pairs(pairs)
