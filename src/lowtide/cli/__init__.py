"""The command `lowtide`: one file a subcommand.

`SUBCOMMANDS` lists them. A module of that list has a function `command` with typer's annotations, whose docstring is
its help and which returns None or raises a `LowtideError`, and a tuple `EXAMPLES` of command lines for the help. It is
imported only when that subcommand is called, so that `lowtide --help` stays quick; for the same reason rich is imported
only to print a table.

Exit status: 0 done; 2 wrong use or wrong file; 3 the budget cannot be met; 130 interrupted; 141 nobody reads the output
any more (`lowtide solve ... | head`); 1 a bug in lowtide.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TextIO

import typer
import typer.main

from lowtide.errors import InfeasibleBudgetError, LowtideError, LowtideWarning

# Name, module, and the line that `lowtide --help` shows for it. To add a subcommand, add a line and its file.
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "measure": ("lowtide.cli.measure", "Measure what each stage of a network costs."),
    "batch": ("lowtide.cli.batch", "Search the largest batch that trains within a budget."),
    "estimate": ("lowtide.cli.estimate", "Say whether a network would fit a card that is not here."),
    "solve": ("lowtide.cli.solve", "Compute a schedule that stays within a memory budget."),
    "simulate": ("lowtide.cli.simulate", "Show what a schedule uses: time, peak memory, idle time."),
    "compare": ("lowtide.cli.compare", "Show all strategies side by side, for several budgets."),
    "report": ("lowtide.cli.report", "Write a page: what fits, what it costs, what happens when."),
    "plot": ("lowtide.cli.plot", "Draw the frontier and the memory curve as a figure."),
    "select": ("lowtide.cli.select", "Choose checkpoints for a plain list of sizes."),
    "bound": ("lowtide.cli.bound", "Prove how fast moving weights could be at best."),
    "strategies": ("lowtide.cli.strategies", "List the strategies."),
}

STATUS_DEFECT = 1
STATUS_WRONG_USE = 2
STATUS_INFEASIBLE = 3
STATUS_INTERRUPTED = 130
STATUS_CLOSED_PIPE = 141  # 128 and the number of SIGPIPE, as shells say it

TRACEBACK_VARIABLE = "LOWTIDE_TRACEBACK"  # set to anything, a defect shows where it happened

# Set by the scripts that `--install-completion` gives to a shell; the name is typer's.
COMPLETION_VARIABLE = "_LOWTIDE_COMPLETE"

# What wrong options and arguments raise; typer exports only this one of its subclasses.
_UsageError: Any = typer.BadParameter.__base__

_HELP = """Train PyTorch networks that do not fit: plan within a memory budget.

A chain file holds what each stage of a network costs. From it and a budget in bytes lowtide computes the fastest
schedule of recomputation and offloading.
"""
_EXAMPLES = (
    "lowtide solve chain.json --memory 8GiB -o schedule.json",
    "lowtide compare chain.json --bandwidth 12GB/s",
    "lowtide solve --help",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: what follows the program's name; None: those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    _never_fail_to_encode()
    with warnings.catch_warnings(), _log_shown():
        warnings.showwarning = _show_warning
        return _run(given)


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(_app(arguments))
    try:
        status = command.main(arguments, prog_name="lowtide", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        message = error.format_message().rstrip(".")
        if message.endswith("?"):  # a wrong name, and the right one
            return _fail(message, STATUS_WRONG_USE)
        called = _called(arguments)
        return _fail(f"{message}; see 'lowtide {f'{called} ' if called else ''}--help'", STATUS_WRONG_USE)
    except InfeasibleBudgetError as error:
        return _fail(str(error), STATUS_INFEASIBLE)
    except LowtideError as error:
        return _fail(str(error), STATUS_WRONG_USE)
    except SystemExit as ended:  # typer's, where it has completed what a shell asked for, or cannot print
        if isinstance(ended.__context__, BrokenPipeError):
            _abandon_output()
            return STATUS_CLOSED_PIPE
        return ended.code if isinstance(ended.code, int) else STATUS_DEFECT
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", STATUS_INTERRUPTED)
    except BrokenPipeError:
        _abandon_output()
        return STATUS_CLOSED_PIPE
    except MemoryError:
        return _fail("out of memory on this machine; try fewer --slots", STATUS_DEFECT)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        return _fail(f"this is a bug in lowtide: {what}; {TRACEBACK_VARIABLE}=1 shows where", STATUS_DEFECT)
    if status == STATUS_INTERRUPTED:  # typer's own answer to a KeyboardInterrupt
        return _fail("interrupted", STATUS_INTERRUPTED)
    return status if isinstance(status, int) else 0


def _called(arguments: list[str]) -> str | None:
    """The subcommand that is called, None where there is none of that name.

    Where a shell asks for completions, it is among the words typed so far.
    """
    if COMPLETION_VARIABLE in os.environ:
        arguments = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    return name if name in SUBCOMMANDS else None


def _app(arguments: list[str]) -> typer.Typer:
    """The typer application, with the subcommand that is called and a placeholder for each of the others."""
    wanted = _called(arguments)
    app = typer.Typer(
        name="lowtide",
        help=_HELP,
        epilog=_listed(_EXAMPLES),
        no_args_is_help=False,
        rich_markup_mode=None,  # rich help takes half a second to import
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, (module, summary) in SUBCOMMANDS.items():
        if name == wanted:
            subcommand = importlib.import_module(module)
            app.command(name, short_help=summary, epilog=_listed(subcommand.EXAMPLES))(subcommand.command)
        else:
            app.command(name, short_help=summary)(_placeholder)
    return app


def _listed(examples: Sequence[str]) -> str:
    """The examples at the end of a help text, a line each."""
    return "\n".join(("\b", "Examples:", *(f"  {example}" for example in examples)))  # \b: lines stay as they are


def _placeholder() -> None:
    """Stand in the list of subcommands for one that is not called."""
    raise AssertionError("a subcommand that was not called has run")


def _print_version(asked: bool) -> None:
    if asked:
        from lowtide import __version__

        print(f"lowtide {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _fail(message: str, status: int) -> int:
    """Print an error as one line on standard error."""
    print(f"lowtide: {' '.join(message.split())}", file=sys.stderr)
    return status


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    label = "" if issubclass(category, LowtideWarning) else f"{category.__name__}: "
    print(f"lowtide: warning: {label}{' '.join(str(message).split())}", file=sys.stderr)


@contextlib.contextmanager
def _log_shown() -> Iterator[None]:
    """Show what the package logs on a terminal, and nowhere else: programs read standard error, too."""
    handler: logging.Handler = logging.NullHandler()
    if sys.stderr.isatty():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("lowtide: %(message)s"))
    logger = logging.getLogger("lowtide")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _never_fail_to_encode() -> None:
    """Print a question mark for a character that the terminal does not have, instead of a UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _abandon_output() -> None:
    """Close a standard output that nobody reads any more, so that the interpreter's own flush cannot complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
