"""What the measuring commands refuse: in one line on standard error, with status 2, before anything is measured."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import lowtide
from lowtide.files import read_json
from lowtide.units import parse_bytes


def refuse(message: str) -> NoReturn:
    """End the command."""
    print(" ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def command_name() -> str:
    """The module that Python was told to run; none where it was told to run something else."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "" if module is None or module.name is None else module.name.removesuffix(".__main__")


class Parser(argparse.ArgumentParser):
    """The options of a command; its description is shown as it is written, and a wrong option is one line.

    Args:
        description: what `--help` shows first.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            prog=f"python -m {command_name()}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Say what is wrong; argparse would show how all options are used first."""
        refuse(f"{message}; --help has the options")


def _number(kind: Callable[[str], Any], accepts: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


above_0 = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
seconds_above_0 = _number(float, lambda value: 0 < value < math.inf, "a number of seconds above 0")
count = _number(int, lambda value: value >= 1, "a whole number from 1 on")
ratio = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def written_bytes(text: str) -> str:
    """A number of bytes as written, checked that it can be parsed."""
    try:
        parse_bytes(text)
    except lowtide.LowtideError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def refuse_unless_chosen(option: str, given: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a word that is in no name; a run of nothing would write results of nothing over those there.

    Args:
        option: through which they came.
        given: the words; none chooses everything.
        names: what there is.
    """
    for word in given:
        if not any(word.lower() in name.lower() for name in names):
            refuse(f"{option} {word}: no name contains it; the names are {', '.join(dict.fromkeys(names))}")


def usable_folder(folder: Path) -> Path:
    """A folder for results, made where it does not exist; refused where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        refuse(f"{folder}: results cannot be written there: {error.strerror or error}; pass another folder (--output)")


def usable_file(path: Path) -> Path:
    """A file for results, in a folder that is made where it does not exist; refused where it cannot be written."""
    if path.is_dir():
        refuse(f"{path}: results cannot be written there: it is a folder; name a file")
    usable_folder(path.parent)
    return path


@contextmanager
def earlier_results(path: Path) -> Iterator[dict[str, Any]]:
    """The values in a file of results, to be taken apart in the block, and in nothing else: any misfit is refused."""
    try:
        values = read_json(path, lowtide.LowtideError)
        facts = {name: values["facts"][name] for name in ("machine", "torch", "lowtide", "date", "command")}
        if all(isinstance(fact, str) for fact in facts.values()):
            yield values
            return
    except lowtide.LowtideError as error:
        refuse(str(error))
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    refuse(f"{path}: is not a file of results of this command; pass the .json file of an earlier run")
