"""`lowtide estimate`: will it fit a card that is not here?"""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli.measure import from_function
from lowtide.cli.options import Json, bandwidth_option, budget_option
from lowtide.cli.output import output_of_others_aside, print_json
from lowtide.progress import DelayedProgress
from lowtide.strategies.base import infeasible

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION", help="A function that returns (model, sample); it is called without arguments."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="BYTES", help="The budget, such as 24GiB; else the card's, less a tenth."),
]
Card = Annotated[str, typer.Option("--device", metavar="NAME", help="The card: t4, 4090, a100, h100, ...")]
OptimizerKind = Annotated[
    str, typer.Option("--optimizer", metavar="KIND", help="Count this optimizer's state: adamw, sgd, sgd-momentum, ...")
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth", metavar="BYTES/s", help="To host memory, each way; else the card's link.", show_default=False
    ),
]
Accumulates = Annotated[bool, typer.Option("--accumulate", help="Gradients are accumulated over several calls.")]

EXAMPLES = (
    "lowtide estimate my_package.training:make --memory 24GiB --device 4090",
    "lowtide estimate my_package.training:make --device a100 --json",
)


def command(
    target: Target,
    memory: Memory = None,
    device: Card = "a100",
    optimizer: OptimizerKind = "adamw",
    accumulate: Accumulates = False,
    bandwidth: Bandwidth = None,
    json: Json = False,
) -> None:
    """Estimate whether a network would train on a card that is not here, and what that would take.

    The function is called under torch.device("meta"), so that nothing is allocated: bytes are those of a real step,
    times are what the card's peak rates allow and marked as estimates. Weights, gradients and optimizer state count as
    staying on the card; lowtide.fit, which can move them to the host, may do with less. Exit status 3: it does not fit.
    """
    budget = None if memory is None else budget_option("--memory", memory)
    rate = bandwidth_option(bandwidth)
    import torch

    from lowtide.runtime.fitting.estimate import estimate
    from lowtide.runtime.measure.cards import find_card

    find_card(device)  # a wrong name is refused before the model is made
    with output_of_others_aside(), DelayedProgress() as progress:
        with torch.device("meta"):
            model, sample = from_function(target)
        found = estimate(
            model,
            sample,
            device=device,
            memory_budget=budget,
            optimizer=optimizer,
            grads_resident=accumulate,
            bandwidth=rate,
            progress=progress,
        )
    if json:
        print_json(found.to_dict())
    else:
        print(found)
    if not found.fits:
        raise infeasible(found.memory_budget, found.minimum_bytes, f"{target} needs", "choose a larger card")
