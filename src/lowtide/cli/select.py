"""`lowtide select`: checkpoints for a plain list of sizes."""

from __future__ import annotations

import textwrap
from enum import StrEnum
from typing import Annotated

import typer

from lowtide.cli.options import Json
from lowtide.cli.output import print_json, print_pairs
from lowtide.select import load_sizes, select


class ModelName(StrEnum):
    """What the memory of a set of checkpoints is taken to be."""

    static = "static"
    dynamic = "dynamic"


class AlgorithmName(StrEnum):
    """How the dynamic problem is solved."""

    linear = "linear"
    quadratic = "quadratic"


SizesFile = Annotated[
    str,
    typer.Argument(metavar="SIZES.json", help="A JSON list of whole numbers, d_0 to d_n.", show_default=False),
]
ModelOption = Annotated[
    ModelName,
    typer.Option(
        "--model",
        help="static: all checkpoints and the largest segment; dynamic: the peak as PyTorch frees memory.",
        show_default=False,
    ),
]
AlgorithmOption = Annotated[
    AlgorithmName, typer.Option("--algorithm", help="For the dynamic model; both find the same cost.")
]

EXAMPLES = (
    "lowtide select sizes.json --model dynamic",
    "lowtide select sizes.json --model dynamic --algorithm quadratic",
    "lowtide select sizes.json --model static --json",
)


def command(
    sizes_file: SizesFile,
    model: ModelOption,
    algorithm: AlgorithmOption = AlgorithmName.linear,
    json: Json = False,
) -> None:
    """Choose the checkpoints with which training takes the least memory.

    d_0 is the input of a network and d_1 to d_n are the outputs of its layers, in any unit; d_0 and d_n are always
    checkpoints.
    """
    sizes = load_sizes(sizes_file)
    selection = select(sizes, model=model.value, algorithm=algorithm.value)
    if json:
        print_json({"cost": selection.cost, "checkpoints": list(selection.checkpoints), "num_sizes": len(sizes)})
        return
    listed = textwrap.fill(" ".join(map(str, selection.checkpoints)), width=66, subsequent_indent=" " * 13)
    print_pairs(
        [
            ("sizes", f"{len(sizes)}, in all {sum(sizes)}"),
            ("cost", f"{selection.cost} ({model.value})"),
            ("checkpoints", listed),
        ]
    )
