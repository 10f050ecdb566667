"""Arguments and options that several subcommands share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from lowtide.errors import LowtideWarning, UnitError
from lowtide.units import is_unlikely_bandwidth, parse_bandwidth, parse_budget, parse_bytes


def strategy_names(incomplete: str) -> list[str]:
    """The strategies whose names begin so, for the shell's completion."""
    from lowtide.strategies.base import AUTO, REGISTRY

    return [name for name in (AUTO, *REGISTRY) if name.startswith(incomplete)]


ChainFile = Annotated[str, typer.Argument(metavar="CHAIN.json", help="The network: a chain file.", show_default=False)]

OptionalScheduleFile = Annotated[
    str | None, typer.Argument(metavar="[SCHEDULE.json]", help="What to do: a schedule file.", show_default=False)
]

Bandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="BYTES/s",
        help="Speed of the link between device and host, each way, such as 12GB/s. Without it nothing is moved.",
        show_default=False,
    ),
]

HalfDuplex = Annotated[bool, typer.Option("--half-duplex", help="Both directions of the link share one channel.")]

Slots = Annotated[
    int | None,
    typer.Option(
        "--slots",
        metavar="N",
        help="How finely memory is divided by strategies that discretise it; each has its own default.",
        show_default=False,
    ),
]

SurveyStrategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="Draw only these; give it several times. Default: all that apply and leave weights on the device.",
        show_default=False,
        autocompletion=strategy_names,
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def bytes_option(name: str, text: str) -> int:
    """The bytes that an option holds; a refusal names the option."""
    return _parsed(parse_bytes, name, text)


def budget_option(name: str, text: str) -> int:
    """The budget of a real network that an option holds; a number that lacks its unit is asked about at once."""
    bytes_option(name, text)
    return parse_budget(text, name)


def bandwidth_option(text: str | None) -> int | None:
    """The bytes per second that `--bandwidth` holds, None where it is not given.

    Warns:
        LowtideWarning: where its unit was probably forgotten.
    """
    if text is None:
        return None
    rate = _parsed(parse_bandwidth, "--bandwidth", text)
    if text.strip().isdecimal() and is_unlikely_bandwidth(rate):
        message = f"--bandwidth: {text!r} has no unit and is taken as bytes per second; {rate}GB/s?"
        warnings.warn(message, LowtideWarning, stacklevel=2)
    return rate


def _parsed(parse: Callable[[str], int], name: str, text: str) -> int:
    try:
        return parse(text)
    except UnitError as error:
        raise UnitError(f"{name}: {error}") from None
