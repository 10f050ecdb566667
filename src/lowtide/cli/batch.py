"""`lowtide batch`: the largest batch that trains within a budget."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli.measure import from_function
from lowtide.cli.options import Json, bandwidth_option, budget_option, strategy_names
from lowtide.cli.output import output_of_others_aside, print_json
from lowtide.progress import DelayedProgress
from lowtide.strategies.base import AUTO, infeasible

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION", help="A function that returns (model, sample), on the device that trains."
    ),
]
Memory = Annotated[str, typer.Option("--memory", metavar="BYTES", help="The budget, such as 24GiB.")]
Dimension = Annotated[
    int, typer.Option("--dim", metavar="N", min=0, help="Which dimension grows: 0 the batch, 1 often the length.")
]
Most = Annotated[
    int | None, typer.Option("--most", metavar="N", min=1, help="The largest size to try.", show_default=False)
]
OptimizerKind = Annotated[
    str, typer.Option("--optimizer", metavar="KIND", help="Count this optimizer's state: adamw, sgd, sgd-momentum, ...")
]
StrategyName = Annotated[
    str,
    typer.Option("--strategy", metavar="NAME", help="See 'lowtide strategies'.", autocompletion=strategy_names),
]
Bandwidth = Annotated[
    str | None,
    typer.Option("--bandwidth", metavar="BYTES/s", help="To host memory, each way; else measured.", show_default=False),
]

EXAMPLES = (
    "lowtide batch my_package.training:make --memory 24GiB",
    "lowtide batch training:make --memory 24GiB --dim 1 --most 32768 --json",
)


def command(
    target: Target,
    memory: Memory,
    dim: Dimension = 0,
    most: Most = None,
    optimizer: OptimizerKind = "adamw",
    strategy: StrategyName = AUTO,
    bandwidth: Bandwidth = None,
    json: Json = False,
) -> None:
    """Search the largest batch that trains within a memory budget, and predict its time.

    The network runs on this machine; each size is measured, solved and tried as lowtide.fit would. Weights stay on the
    device; with them on the host, lowtide.largest_batch(..., optimizer=optimizer) may find a larger batch. Exit
    status 3: not even a batch of one fits.
    """
    budget, rate = budget_option("--memory", memory), bandwidth_option(bandwidth)
    with output_of_others_aside(), DelayedProgress() as progress:
        model, sample = from_function(target)
        from lowtide.runtime.fitting.largest import largest_batch

        found = largest_batch(
            model,
            sample,
            memory_budget=budget,
            dim=dim,
            most=most,
            optimizer=optimizer,
            strategy=strategy,
            bandwidth=rate,
            progress=progress,
        )
    if json:
        print_json(found.to_dict())
    else:
        print(found)
    if found.batch == 0:
        raise infeasible(budget, found.minimum_bytes or budget, f"{target} needs for a batch of 1")
