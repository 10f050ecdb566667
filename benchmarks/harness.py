"""What the measuring commands share: a time limit, timed steps, facts of the machine, and files that are always whole.

A run that is cut short leaves valid results: everything is written again after each new figure.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.refusing import command_name, earlier_results, refuse, seconds_above_0, usable_folder
from torch import nn

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.units import format_bytes, format_seconds

# On a GPU: some steps before anything counts, then rounds of as many as take about a second, within limits. The
# quietest counts: on one machine a compiled network took 42 ms a step, and 32 in another process some minutes later.
# There are so many in a row that are no quieter; on a noisy host, where there would be no end, so many in all.
NUM_WARM = 2
NUM_NO_QUIETER = 3
MOST_ROUNDS = 12
TIMED_SECONDS = 1.0
FEWEST_TIMED, MOST_TIMED = 5, 12
# On a CPU a figure shows that a command works; it is seldom worth more.
NUM_TIMED_CPU = 5


class OutOfTimeError(BaseException):
    """The limit of a run has come; not an `Exception`, so that nothing on the way takes it for a failure of its own."""


class Clock:
    """The time that a run may take, from now on.

    Args:
        seconds: the limit; None: there is none.
    """

    def __init__(self, seconds: float | None) -> None:
        self._begin = time.perf_counter()
        self._limit = seconds

    @property
    def elapsed_seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self._begin

    def allows(self, seconds: float) -> bool:
        """Whether something that takes about so long can still be begun."""
        return self._limit is None or self.elapsed_seconds + seconds <= self._limit

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Raise `OutOfTimeError` in the block when the limit comes (in the main thread, where signals arrive)."""
        if self._limit is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: object) -> None:
            raise OutOfTimeError

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self._limit - self.elapsed_seconds))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, slots=True)
class Timed:
    """What some equal steps took."""

    seconds: float
    """The median of a step; on CUDA that of the round whose median is least."""
    spread_seconds: float
    """The slowest less the fastest of them."""
    peak_bytes: int
    """The most that was allocated at once, what was there before included."""
    num_steps: int


def time_steps(step: Callable[[], None], device: torch.device) -> Timed:
    """Run a training step several times: its median time and its peak.

    On CUDA the steps of a round follow each other without waiting, as in a training loop, with events between them. On
    the CPU counting bytes takes time, so that the counted step is one of its own.
    """
    if device.type != "cuda":
        step()
        gc.collect()
        with Meter(device) as meter:
            step()
        seconds = []
        for _ in range(NUM_TIMED_CPU):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        return Timed(statistics.median(seconds), max(seconds) - min(seconds), meter.peak_bytes, len(seconds))
    for _ in range(NUM_WARM):
        step()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    wanted = TIMED_SECONDS / max(1e-6, time.perf_counter() - begin)
    num_steps = int(min(MOST_TIMED, max(FEWEST_TIMED, wanted)))
    gc.collect()
    with Meter(device) as meter:
        seconds = quietest(lambda: _seconds_of(step, num_steps, device))
    return Timed(statistics.median(seconds), max(seconds) - min(seconds), meter.peak_bytes, num_steps)


def quietest(measure: Callable[[], list[float]]) -> list[float]:
    """The seconds of the steps of one round, that with the least median."""
    found, num_no_quieter = measure(), 0
    for _ in range(MOST_ROUNDS - 1):
        other = measure()
        is_quieter = statistics.median(other) < statistics.median(found)
        found, num_no_quieter = (other, 0) if is_quieter else (found, num_no_quieter + 1)
        if num_no_quieter == NUM_NO_QUIETER:
            break
    return found


def _seconds_of(step: Callable[[], None], num_steps: int, device: torch.device) -> list[float]:
    """The seconds of each of some steps on CUDA."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize(device)
    return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]


def loss_of(result: Any) -> torch.Tensor:
    """The loss in what a model returned: the result itself, or its field of that name."""
    return result if isinstance(result, torch.Tensor) else result["loss"]


def training_step(call: Callable[..., Any], model: nn.Module, batch: dict[str, Any]) -> Callable[[], None]:
    """Forward and backward through a call of the model; the gradients are freed afterwards."""

    def step() -> None:
        loss_of(call(**batch)).backward()
        model.zero_grad(set_to_none=True)

    return step


def draws_in_backward(call: Callable[..., Any], model: nn.Module, batch: dict[str, Any]) -> bool:
    """Whether backward draws random numbers: masks of dropout that it needs are not those of forward then."""
    loss = loss_of(call(**batch))
    before = _random_states()
    loss.backward()
    model.zero_grad(set_to_none=True)
    return not all(map(torch.equal, before, _random_states()))


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def without_state(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has no state and whose step allocates nothing: measured steps are without one."""
    return torch.optim.SGD(model.parameters(), fused=True)


def release(device: torch.device) -> None:
    """Free unused memory, so that the next measurement begins in the same state."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # What was pinned stays pinned otherwise: gigabytes after `save_on_cpu`. Older torch has the second.
        release_host = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
            torch._C, "_host_emptyCache", None
        )
        if release_host is not None:
            release_host()


def reserved_bytes(device: torch.device) -> int:
    """What is reserved of a CUDA device where nothing unused is: what CUDA graphs hold counts, used or not."""
    release(device)
    return torch.cuda.memory_reserved(device)


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Where and with what figures were measured."""
    on_cuda = device.type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(device) if on_cuda else f"CPU, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_cuda else None,
        "transformers": version_of("transformers"),
        "lowtide": lowtide.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python -m", *_shown_command()]),
    }


_OPTIONS_WITH_PATHS = ("--output", "--resume", "--draw")


def _shown_command() -> list[str]:
    """The command as typed, without folders of this machine."""
    kept: list[str] = []
    for argument in sys.argv[1:]:
        if kept and kept[-1] in _OPTIONS_WITH_PATHS:
            kept.pop()
        else:
            kept.append(argument)
    return [command_name(), *kept]


def version_of(package: str) -> str | None:
    """The version of an installed package, None where there is none."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def short_name(device: torch.device) -> str:
    """A machine's name for files: `h200`, `cpu`."""
    return torch.cuda.get_device_name(device).split()[-1].lower() if device.type == "cuda" else "cpu"


_ENDINGS: dict[Path, list[str]] = {}
"""Of the files that this process has written last, by their path without an ending."""


def write_results(
    folder: Path,
    stem: str,
    values: dict[str, Any],
    lines: Sequence[str],
    draw: Callable[[Any], None] | None = None,
) -> None:
    """Write STEM.json, STEM.md and, where matplotlib is there, STEM.png; each replaced as a whole.

    Results of several runs end with the list of them. `written_files` then says which files there are.

    Args:
        folder: made where it does not exist.
        stem: the files' name without its ending.
        values: for the JSON file.
        lines: of the table, with the `heading` of its facts.
        draw: is handed matplotlib's pyplot and returns a figure, or None where there is nothing to show; None: no
            figure.
    """
    endings = _ENDINGS[folder / stem] = [".json", ".md"]
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / f"{stem}.json", (json.dumps(values, indent=1) + "\n").encode())
    text = "\n".join([*lines, *_run_lines(values.get("facts", {}), follows_blank=not lines or not lines[-1])])
    _replace(folder / f"{stem}.md", (text + "\n").encode())
    if draw is not None and version_of("matplotlib") is not None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure: Any = draw(plt)
        if figure is not None:
            figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)  # with room for a title above all panels
            figure.savefig(folder / f"{stem}.png", dpi=120)
            plt.close(figure)
            endings.append(".png")


def written_files(folder: Path, stem: str) -> str:
    """What the last `write_results` has written there, for people; files of earlier runs do not count."""
    *others, last = _ENDINGS[folder / stem]
    return f"{folder / stem}{', '.join(others)} and {last}"


def panels(plt: Any, names: Sequence[str], *, columns: int, size: tuple[float, float]) -> tuple[Any, dict[str, Any]]:
    """A figure with a panel for each name.

    Args:
        plt: matplotlib's pyplot.
        names: of the panels; at least one.
        columns: how many panels stand beside each other at the most.
        size: of a panel, width and height in inches.
    """
    width = min(columns, len(names))
    height = -(-len(names) // width)
    figure, places = plt.subplots(height, width, figsize=(size[0] * width, size[1] * height), squeeze=False)
    for panel in places.flat[len(names) :]:
        panel.set_axis_off()
    return figure, dict(zip(names, places.flat, strict=False))


def _replace(path: Path, content: bytes) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(content)
    part.replace(path)


def heading(facts: dict[str, Any]) -> str:
    """One line that says where figures come from; `write_results` lists earlier runs at the end."""
    versions = f"torch {facts['torch']}, lowtide {facts['lowtide']}"
    number = len(facts.get("earlier", ()))
    earlier = f", and {number} earlier run{'s' * (number > 1)}, listed at the end of the report" if number else ""
    return f"{facts['machine']}, {versions}, {facts['date']} (`{facts['command']}`){earlier}."


def _run_lines(facts: dict[str, Any], *, follows_blank: bool) -> list[str]:
    """The last section of a report: a line for each run, the newest first; nothing for a single run."""
    if not facts.get("earlier"):
        return []
    runs = [f"- {run['date']}: `{run['command']}`" for run in (facts, *facts["earlier"])]
    return [*([] if follows_blank else [""]), "## Runs", "", *runs]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' --: |' * (len(columns) - 1)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def seconds_cell(seconds: float | None) -> str:
    """A time for a table."""
    return "–" if seconds is None else format_seconds(seconds)


def bytes_cell(num_bytes: float | None) -> str:
    """A size for a table."""
    return "–" if num_bytes is None else format_bytes(int(num_bytes))


def reason(error: BaseException) -> str:
    """Why something could not be had, in a few words."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:240]


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """The option `--device`; one that is not there ends the command with one line and status 2."""

    def there(name: str) -> str:
        if name == "cuda" and not torch.cuda.is_available():
            print(
                f"{parser.prog}: --device cuda: torch {torch.__version__} finds no CUDA device on this machine; leave "
                "--device out, or give --device cpu",
                file=sys.stderr,
            )
            raise SystemExit(2)
        return name

    on_cuda = torch.cuda.is_available()
    parser.add_argument("--device", type=there, choices=("cuda", "cpu"), default="cuda" if on_cuda else "cpu")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every measuring command has."""
    add_device_argument(parser)
    parser.add_argument("--seconds", type=seconds_above_0, help="stop after this time; what was measured is written")
    parser.add_argument("--output", type=Path, help="a folder for the results (default: beside the others of its kind)")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="only networks whose name contains one")
    parser.add_argument("--tiny", action="store_true", help="small networks, to see that it works; written elsewhere")


def output_folder(given: Path | None, default: Path, *, is_trial: bool) -> Path:
    """Where results go, created if missing; those of a trial never replace those worth keeping."""
    if given is None and is_trial:
        return Path(tempfile.mkdtemp(prefix="lowtide-results-"))
    return usable_folder(given or default)


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Whether a name was asked for with `--only`."""
    return not only or any(part.lower() in name.lower() for part in only)


class Run:
    """One run of a command: where it runs, its time, its files.

    Args:
        name: of the command; its files are called after it and the machine.
        arguments: of the command line; see `add_common_arguments`.
        device: where it runs.
        results: the folder for files where the command line names none.
    """

    def __init__(self, name: str, arguments: argparse.Namespace, device: torch.device, results: Path) -> None:
        self.device = device
        self.clock = Clock(arguments.seconds)
        self.facts = machine_facts(device)
        self.is_tiny: bool = arguments.tiny
        self.folder = output_folder(arguments.output, results, is_trial=arguments.tiny)
        self.stem = f"{name}-{'tiny-' if arguments.tiny else ''}{short_name(device)}"

    @contextmanager
    def resumed(self, path: Path) -> Iterator[dict[str, Any]]:
        """The values of an earlier run that this one continues, to be unpacked in the block.

        Its date and command stay in the facts. Those of another machine or version are refused, and other files.
        """
        with earlier_results(path) as values:
            for fact in ("machine", "torch"):
                there, here = values["facts"][fact], self.facts[fact]
                if there != here:
                    refuse(f"{path}: those results are of {there}, but this is {here}; run without --resume")
            last = {name: values["facts"][name] for name in ("date", "command")}
            self.facts["earlier"] = [last, *values["facts"].get("earlier", ())]
            yield values

    @property
    def files(self) -> str:
        """What it has written, for people."""
        return written_files(self.folder, self.stem)
