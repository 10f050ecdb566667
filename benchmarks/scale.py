"""How planning and running grow: measuring, solving and the first step, by stages, budgets and sizes, in one run.

    python -m benchmarks.scale --device cpu                     # a few minutes
    python -m benchmarks.scale --device cuda --seconds 120 --output DIR
    python -m benchmarks.scale --only equal                     # one series: equal or different stages, sizes, budgets
    python -m benchmarks.scale --tiny                           # seconds

The networks are chains of small blocks (a linear layer and tanh), once all equal (lowtide measures equal stages once)
and once all different. Loops that numba compiles are compiled before anything is timed; a solving time is the better of
two.

Writes scale-MACHINE.json and .md after every row, and the figures at the end.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.refusing import Parser, refuse_unless_chosen
from torch import nn

import lowtide
from lowtide.runtime.measure.measure import capture_and_measure

RESULTS = Path(__file__).parent / "results"

STAGES = (10, 30, 100, 300, 1000)
BUDGET_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
WIDTHS = (32, 128, 512, 1024)
NUM_STAGES_FOR_BUDGETS, NUM_STAGES_FOR_SIZES = 100, 30
WIDTH, BATCH = 64, 256

# How much of what plain training has above the least is allowed, where the budget is not what is varied.
SHARE = 0.5
# A link of 12 GB/s, the papers' PCIe, for strategies that move activations.
BANDWIDTH = 12 * 10**9
# A first step is timed so often, each time attached anew, and the best taken.
NUM_ATTACHED = 3
SERIES = ("equal stages", "different stages", "sizes", "budgets")
STRATEGIES = ("segments", "dynamic-selection", "revolve", "rotor", "pofo")
# No strategy is asked for a chain on which it would take longer, growing with the cube of the stages.
PATIENCE_SECONDS = 120.0


@dataclass
class Row:
    """One network, or one budget of it."""

    series: str
    """One of `SERIES`."""
    num_stages: int
    width: int
    share: float = SHARE
    num_parameters: int = 0
    measuring_seconds: float | None = None
    solving_seconds: dict[str, float] = field(default_factory=dict)
    plain_seconds: float | None = None
    first_step_seconds: float | None = None
    """Attaching and the first step, the best of some."""
    later_step_seconds: float | None = None
    predicted_seconds: float | None = None


class Block(nn.Module):
    """A linear layer and tanh."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inputs) to (batch, outputs)."""
        return torch.tanh(self.linear(x))


class Chained(nn.Module):
    """Blocks one after the other, and a loss."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in itertools.pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of the last result."""
        result: torch.Tensor = self.blocks(x).square().mean()
        return result


def widths_of(series: str, num_stages: int, width: int) -> list[int]:
    """The widths between stages: all the same, or no two stages alike."""
    if series != "different stages":
        return [width] * (num_stages + 1)
    numbers, widths, used = random.Random(0), [width], set[tuple[int, int]]()
    while len(widths) <= num_stages:
        pair = (widths[-1], numbers.randint(width * 3 // 4, width * 5 // 4))
        if pair not in used:
            used.add(pair)
            widths.append(pair[1])
    return widths


def budget_of(chain: lowtide.Chain, share: float) -> int:
    """A budget so far between the least of `rotor` and plain training's peak."""
    whole = lowtide.solve(chain, memory_budget=2**60, strategy="store-all").peak_bytes
    try:
        lowtide.solve(chain, memory_budget=1, strategy="rotor")
    except lowtide.InfeasibleBudgetError as error:
        return error.minimum_bytes + int(share * (whole - error.minimum_bytes))
    return whole


def solving_seconds(chain: lowtide.Chain, budget: int, strategy: str) -> float | None:
    """The better of two; None where the strategy cannot do with that budget."""
    best: float | None = None
    for _ in range(2):
        begin = time.perf_counter()
        try:
            lowtide.solve(chain, memory_budget=budget, strategy=strategy, bandwidth=BANDWIDTH)
        except lowtide.InfeasibleBudgetError:
            return None
        seconds = time.perf_counter() - begin
        best = seconds if best is None else min(best, seconds)
        if seconds > PATIENCE_SECONDS / 10:
            break  # long enough for noise not to count
    return best


class Run(harness.Run):
    """One run: its rows, its time, its files."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        super().__init__("scale", arguments, device, RESULTS)
        self.rows: list[Row] = []
        self.only: list[str] = arguments.only
        self._last: dict[str, tuple[int, float]] = {}
        """The stages and seconds of each strategy's longest chain so far."""

    def allows(self, series: str) -> bool:
        """Whether a series was asked for, and there is time for one more row of it."""
        return harness.is_chosen(series, self.only) and self.clock.allows(0)

    def save(self, *, picture: bool = False) -> None:
        """Write the results."""
        values = {"facts": self.facts, "rows": [asdict(row) for row in self.rows]}
        draw_all = (lambda plt: draw(plt, self.facts, self.rows)) if picture else None
        harness.write_results(self.folder, self.stem, values, report_lines(self.facts, self.rows), draw_all)

    def add(self, row: Row) -> None:
        """A new row."""
        self.rows.append(row)
        self.save()
        print(f"{self.clock.elapsed_seconds:6.0f} s  {'  '.join(cells(row))}", flush=True)

    def solve(self, row: Row, chain: lowtide.Chain, budget: int, strategies: Sequence[str]) -> None:
        """Solving times of those strategies that are not too slow by now."""
        n = chain.num_stages
        for strategy in strategies:
            known, last = self._last.get(strategy, (n, 0.0))
            if last * (n / known) ** 3 > PATIENCE_SECONDS:
                continue
            seconds = solving_seconds(chain, budget, strategy)
            if seconds is not None:
                row.solving_seconds[strategy] = seconds
                self._last[strategy] = max(self._last.get(strategy, (0, 0.0)), (n, seconds))

    def say_where(self) -> None:
        """Print the folder."""
        print(f"written to {self.files}")


def measured_row(run: Run, row: Row, strategies: Sequence[str]) -> lowtide.Chain:
    """Everything about one network."""
    torch.manual_seed(0)
    widths = widths_of(row.series, row.num_stages, row.width)
    model = Chained(widths).to(run.device)
    batch = {"x": torch.randn(BATCH, widths[0], device=run.device)}
    row.num_parameters = sum(p.numel() for p in model.parameters())
    begin = now(run.device)
    split, chain = capture_and_measure(model, batch)
    row.measuring_seconds = now(run.device) - begin
    budget = budget_of(chain, row.share)
    run.solve(row, chain, budget, strategies)
    step = harness.training_step(model, model, batch)
    row.plain_seconds = harness.time_steps(step, run.device).seconds
    solution = lowtide.solve(chain, memory_budget=budget, strategy="rotor")
    row.predicted_seconds = solution.seconds
    firsts = []
    for _ in range(NUM_ATTACHED):
        begin = now(run.device)
        with lowtide.attach(model, solution, split=split):
            step()
            firsts.append(now(run.device) - begin)
            if len(firsts) == NUM_ATTACHED:
                row.later_step_seconds = harness.time_steps(step, run.device).seconds
    row.first_step_seconds = min(firsts)
    run.add(row)
    return chain


def now(device: torch.device) -> float:
    """The time when everything on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def warm_up(run: Run) -> None:
    """Let loops be compiled, for short chains and for long ones, and everything be imported."""
    capture_and_measure(Chained([WIDTH] * 4).to(run.device), {"x": torch.randn(BATCH, WIDTH, device=run.device)})
    for num_stages in (10,) if run.is_tiny else (10, 150):
        stage = lowtide.Stage("s", 1e-3, 2e-3, output_bytes=10**6, saved_bytes=4 * 10**6)
        chain = lowtide.Chain("warm", [stage] * num_stages)
        for strategy in STRATEGIES[:-1] if num_stages > 100 or run.is_tiny else STRATEGIES:
            solving_seconds(chain, budget_of(chain, SHARE), strategy)


def measure_all(run: Run) -> None:
    """All series; the longest chains last, since they take longest."""
    warm_up(run)
    strategies = STRATEGIES[:-1] if run.is_tiny else STRATEGIES
    *shorter, longest = (5, 10) if run.is_tiny else STAGES
    for num_stages in shorter:
        by_stages(run, num_stages, strategies)
    for width in (16, 32) if run.is_tiny else WIDTHS:
        if run.allows("sizes"):
            measured_row(run, Row("sizes", 5 if run.is_tiny else NUM_STAGES_FOR_SIZES, width), ("rotor",))
    by_budgets(run, 10 if run.is_tiny else NUM_STAGES_FOR_BUDGETS, strategies)
    by_stages(run, longest, strategies)


def by_stages(run: Run, num_stages: int, strategies: Sequence[str]) -> None:
    """One length of chain, with equal and with different stages."""
    for series, own in (("equal stages", strategies), ("different stages", ("rotor",))):
        if run.allows(series):
            measured_row(run, Row(series, num_stages, WIDTH), own)


def by_budgets(run: Run, num_stages: int, strategies: Sequence[str]) -> None:
    """Solving times of one chain for several budgets."""
    if not run.allows("budgets"):
        return
    model = Chained(widths_of("budgets", num_stages, WIDTH)).to(run.device)
    _, chain = capture_and_measure(model, {"x": torch.randn(BATCH, WIDTH, device=run.device)})
    for share in (0.3, 0.6) if run.is_tiny else BUDGET_SHARES:
        if run.allows("budgets"):
            row = Row("budgets", num_stages, WIDTH, share)
            run.solve(row, chain, budget_of(chain, share), strategies)
            run.add(row)


def cells(row: Row) -> list[str]:
    """A row of the table."""
    solving = ", ".join(f"{name} {harness.seconds_cell(s)}" for name, s in row.solving_seconds.items())
    steps = (row.plain_seconds, row.first_step_seconds, row.later_step_seconds)
    return [
        row.series,
        str(row.num_stages),
        str(row.width),
        f"{row.share:.0%}",
        harness.seconds_cell(row.measuring_seconds),
        *map(harness.seconds_cell, steps),
        harness.seconds_cell(row.predicted_seconds),
        solving,
    ]


def report_lines(facts: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """The table."""
    columns = ["series", "stages", "width", "budget", "measuring", "plain step", "first step", "later", "predicted"]
    text = (
        "Budgets are shares of the way from the least that `rotor` needs to plain training's peak. The first step has "
        "attaching in it; it and the later ones run under `rotor`'s schedule, whose recomputation is in `predicted`."
    )
    lines = ["# How planning and running grow", "", harness.heading(facts), "", text, ""]
    return [*lines, *harness.table([*columns, "solving"], [cells(row) for row in rows])]


STEPS: dict[str, Callable[[Row], float | None]] = {
    "first step": lambda row: row.first_step_seconds,
    "a later step": lambda row: row.later_step_seconds,
    "plain step": lambda row: row.plain_seconds,
}


def draw(plt: Any, facts: dict[str, Any], rows: Sequence[Row]) -> Any:
    """A plot each: measuring, solving and the first step by stages; solving by budget; measuring and steps by size."""
    figure, panels = plt.subplots(2, 3, figsize=(14, 8))
    own = {name: [r for r in rows if r.series == name] for name in dict.fromkeys(r.series for r in rows)}
    equal, budgets, sizes = (own.get(name, []) for name in ("equal stages", "budgets", "sizes"))
    for series in ("equal stages", "different stages"):
        plot(panels[0, 0], own.get(series, []), lambda r: r.num_stages, lambda r: r.measuring_seconds, series)
    for strategy in STRATEGIES:
        plot(panels[0, 1], equal, lambda r: r.num_stages, lambda r, s=strategy: r.solving_seconds.get(s), strategy)
        plot(panels[1, 0], budgets, lambda r: r.share, lambda r, s=strategy: r.solving_seconds.get(s), strategy)
    for name, seconds in STEPS.items():
        plot(panels[0, 2], equal, lambda r: r.num_stages, seconds, name)
        plot(panels[1, 2], sizes, lambda r: r.num_parameters, seconds, name)
    plot(panels[1, 1], sizes, lambda r: r.num_parameters, lambda r: r.measuring_seconds, "measuring")
    titles = ["measuring", "solving", "the first step", "solving", "measuring", "the first step"]
    labels = ["stages", "stages", "stages", "budget (share of the way)", "parameters", "parameters"]
    for panel, title, label in zip(panels.flat, titles, labels, strict=True):
        panel.set(title=title, xlabel=label, ylabel="seconds", yscale="log")
        if label != "budget (share of the way)":
            panel.set_xscale("log")
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    figure.suptitle(f"{facts['machine']}, torch {facts['torch']}", fontsize=10)
    return figure


def plot(
    panel: Any, rows: Sequence[Row], across: Callable[[Row], float], up: Callable[[Row], float | None], label: str
) -> None:
    """One line."""
    points = [(across(row), value) for row in rows if (value := up(row))]
    if points:
        panel.plot(*zip(*points, strict=True), "o-", label=label, markersize=4)


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = Parser(__doc__)
    harness.add_common_arguments(parser)
    arguments = parser.parse_args(given)
    refuse_unless_chosen("--only", arguments.only, SERIES)
    run = Run(arguments, torch.device(arguments.device))
    try:
        with run.clock.enforced():
            measure_all(run)
    except harness.OutOfTimeError:
        print("the run stopped at its time limit", flush=True)
    run.save(picture=True)
    run.say_where()


if __name__ == "__main__":
    main()
