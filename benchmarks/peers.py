"""lowtide beside what people use instead: step time and measured peak of each, in one run on one machine.

    python -m benchmarks.peers --device cuda --seconds 200 --output DIR        # the most telling rows first
    python -m benchmarks.peers --device cuda --only gpt --memory-budgets 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9
    python -m benchmarks.peers --device cuda --resume DIR/peers-h200.json --output DIR   # go on where a run ended
    python -m benchmarks.peers --device cuda --passes compiled --shares --side-by-side 10 --seconds 560
    python -m benchmarks.peers --device cuda --passes compiled --shares --graphs --resume DIR/peers-h200.json
    python -m benchmarks.peers --device cuda --largest-batch --only gpt resnet --seconds 300
    python -m benchmarks.peers --tiny                                          # a minute on any CPU
    python -m benchmarks.peers --draw DIR/peers-h200.json                      # table and figure again, no measuring

Peers: plain training, eager and compiled as a whole; `checkpoint_sequential` at several numbers of segments; every
layer checkpointed (transformers' gradient checkpointing, where the model is one of its own); `activation_memory_budget`
with the whole model compiled; `save_on_cpu`. lowtide is given each peer's measured peak as its budget, so that the
claim is checked where the peers are, and further budgets for the curve; it measures a network once, so that setting up
takes longest for the first of them. A step is forward and backward, without an optimizer. `--side-by-side` compiles
in several processes at once, with nothing compiled before, and then measures each network alone. With `--graphs`
lowtide's steps are replayed as CUDA graphs, and those of compiled peers (`mode="reduce-overhead"`): a row of its own
each, whose memory is what the graphs reserve.

Writes peers-MACHINE.json and .md after every row, so that a run that is cut leaves whatever it had, and the figure
at the end.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.peer_batches import largest_batches
from benchmarks.peer_claim import NOISE_OF_PEAKS, Row, report_lines
from benchmarks.peer_compiling import (
    SHARE_OF_TIME,
    Cold,
    add_lowtide_arguments,
    cold_lines,
    compile_side_by_side,
    refuse_graphs_without_cuda,
    ways_of,
)
from benchmarks.peer_networks import NETWORKS, TINY, Network, layers_of
from benchmarks.peer_run import Batches, Run, batch_lines, write
from benchmarks.peer_ways import Call, as_it_is, compiled_whole, each_layer, in_segments, saved_on_cpu
from benchmarks.refusing import (
    Parser,
    count,
    earlier_results,
    ratio,
    refuse_unless_chosen,
    usable_folder,
    written_bytes,
)
from torch import nn

import lowtide
from lowtide.runtime.compile.compiled import Compilation
from lowtide.runtime.fitting import compiling, ways
from lowtide.runtime.fitting.solving import Settings
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split

# Peaks that lie nearer to each other than this are one budget.
SAME_BUDGET = 0.01


# Peers


def eager_peers(run: Run, network: Network, model: nn.Module) -> dict[str, AbstractContextManager[Call]]:
    """The eager peers of a network by name."""
    layer = "transformers' gradient checkpointing" if network.trunk is None else "every layer checkpointed"
    ways: dict[str, AbstractContextManager[Call]] = {
        "plain, eager": as_it_is(model),
        layer: each_layer(model, network.trunk),
    }
    if network.trunk is not None:
        length = len(layers_of(model, network.trunk))
        counts = run.num_segments or [2, round(length**0.5)]
        for count in dict.fromkeys(min(count, length) for count in counts):
            ways[f"checkpoint_sequential, {count} segments"] = in_segments(model, network.trunk, count)
    return ways


def measure_peer(
    run: Run, model: nn.Module, batch: dict[str, Any], way: AbstractContextManager[Call], row: Row
) -> None:
    """Time and peak of a peer."""
    with way as call:
        step = harness.training_step(call, model, batch)
        begin = time.perf_counter()
        step()
        row.set_up_seconds = time.perf_counter() - begin
        fill(row, harness.time_steps(step, run.device))
        if harness.draws_in_backward(call, model, batch):
            row.note = "its backward draws random numbers anew: its gradients are others"


def fill(row: Row, timed: harness.Timed) -> None:
    """Put measured figures into a row."""
    row.seconds, row.spread_seconds, row.peak_bytes = timed.seconds, timed.spread_seconds, timed.peak_bytes


# lowtide


@contextmanager
def measured_once() -> Iterator[None]:
    """Let `fit` reuse its measurements of the first budget for all others: measuring takes most of its time."""
    measured = dict[tuple[Any, ...], tuple[Split, lowtide.Chain, Compilation | None]]()
    plain = ways.measured_for

    def remembering(model: nn.Module, sample: Sample, settings: Settings, *others: Any) -> Any:
        asked = settings.compilation
        compiles = asked and (asked.regions, asked.budgets, repr(asked.options))
        cuts = settings.in_blocks, settings.finest, settings.most_stages
        key = id(model), settings.bandwidth > 0, settings.cuda_graphs, compiles, cuts
        if key not in measured:
            split, (chain, compiled) = plain(model, sample, settings, *others)
            measured[key] = split, chain, None if compiled is None else compiled.compilation
            return split, (chain, compiled)
        split, chain, compilation = measured[key]
        return split, (chain, None if compilation is None else compilation.of(model, split))

    compiling.measured_for = ways.measured_for = remembering
    try:
        yield
    finally:
        compiling.measured_for = ways.measured_for = plain


def measure_lowtide(
    run: Run, model: nn.Module, batch: dict[str, Any], budget: int | None, options: dict[str, Any], row: Row
) -> None:
    """Time and peak of a plan for a budget; None: the least that works."""
    begin = time.perf_counter()
    options = {**options, "optimizer": harness.without_state(model), "keeps_result": False}
    if budget is None:
        try:
            lowtide.fit(model, batch, memory_budget=1, **options).detach()
        except lowtide.InfeasibleBudgetError as error:
            budget = error.minimum_bytes
    row.budget_bytes = budget
    with lowtide.fit(model, batch, memory_budget=budget, **options) as plan:
        row.set_up_seconds = time.perf_counter() - begin
        fill(row, harness.time_steps(harness.training_step(model, model, batch), run.device))
        stats = plan.stats()
        row.predicted_seconds, row.predicted_peak_bytes = stats.predicted_seconds, stats.predicted_peak_bytes
        telling = ("one compiled region", "without CUDA graphs")
        row.note = "; ".join(
            [plan.schedule.strategy, *(note for note in plan.notes if any(words in note for words in telling))]
        )
        if options.get("cuda_graphs"):
            row.peak_bytes = stats.measured_peak_bytes  # with what the graphs reserve


def budgets_from(rows: list[Row], *, compiled: bool, shares: Sequence[float]) -> list[int]:
    """Every peak that the peers reach, with its noise, and shares of plain training's; of those that are nearly equal
    the least.
    """
    peers = [row for row in rows if row.is_measured and row.family == "peer" and row.compiled == compiled]
    peaks = [row.peak_bytes or 0 for row in peers]
    plain = max((row.peak_bytes or 0 for row in peers if row.way.startswith("plain")), default=0)
    wanted: list[int] = []
    for budget in sorted(
        [*(int(peak * (1 + NOISE_OF_PEAKS)) for peak in peaks), *(int(plain * share) for share in shares if plain)]
    ):
        if not wanted or budget - wanted[-1] > SAME_BUDGET * wanted[-1]:
            wanted.append(budget)
    return wanted[::-1]


def lowtide_rows(
    run: Run, network: Network, made: tuple[nn.Module, dict[str, Any]], family: str, budgets: list[int | None]
) -> None:
    """Rows of lowtide at some budgets."""
    options: dict[str, Any] = {"strategy": "rotor", "bandwidth": 0, "cuda_graphs": run.graphs}
    if family == "lowtide compiled":
        options = run.compiled
    if family == "lowtide offloading":
        options = {"strategy": "auto", "cuda_graphs": run.graphs}
    for budget in budgets:
        amount = "the least" if budget is None else harness.bytes_cell(budget)
        graphs = ", graphs," if options.get("cuda_graphs") else ""
        row = Row(network.title, f"{family}{graphs} within {amount}", family, compiled="compile_stages" in options)

        def measure(row: Row, budget: int | None = budget) -> None:
            measure_lowtide(run, *made, budget, options, row)

        run.row(row, family, measure)


# Passes


def eager_pass(run: Run, network: Network, made: tuple[nn.Module, dict[str, Any]]) -> None:
    """The eager peers, then lowtide at their peaks."""
    for name, way in eager_peers(run, network, made[0]).items():

        def measure(row: Row, way: AbstractContextManager[Call] = way) -> None:
            measure_peer(run, *made, way, row)

        run.row(Row(network.title, name, "peer"), "peer", measure)
    budgets = budgets_from(run.of(network), compiled=False, shares=run.shares)
    lowtide_rows(run, network, made, "lowtide", [*budgets, *([None] if run.shares else [])])


def compiled_pass(run: Run, network: Network, made: tuple[nn.Module, dict[str, Any]]) -> None:
    """The model compiled as a whole, lowtide with compiled stages; then budgets of the compiler's own."""
    for memory_budget in [1.0, *run.memory_budgets]:
        name = "plain, compiled" if memory_budget == 1 else f"activation_memory_budget {memory_budget:g}, compiled"
        name += ", graphs" if run.graphs else ""

        def measure(row: Row, memory_budget: float = memory_budget) -> None:
            measure_peer(run, *made, compiled_whole(made[0], run.backend, memory_budget, graphs=run.graphs), row)
            if run.graphs:
                row.peak_bytes = harness.reserved_bytes(run.device)

        run.row(Row(network.title, name, "peer", compiled=True), "compile", measure)
        shares = run.shares if memory_budget == 1 else ()
        budgets: list[int | None] = [*budgets_from(run.of(network), compiled=True, shares=shares)]
        lowtide_rows(run, network, made, "lowtide compiled", [*budgets, *([None] if shares else [])])


def offloading_pass(run: Run, network: Network, made: tuple[nn.Module, dict[str, Any]]) -> None:
    """Everything saved on the host, and lowtide with the link to it, as fast as that was measured."""

    def measure(row: Row) -> None:
        measure_peer(run, *made, saved_on_cpu(made[0], run.device), row)

    row = run.row(Row(network.title, "save_on_cpu", "peer"), "save_on_cpu", measure)
    peaks = [row.peak_bytes for row in run.of(network) if row.way == "plain, eager" and row.peak_bytes]
    budgets: list[int | None] = [int(peak * share) for peak in peaks for share in run.shares]
    if row is not None and row.peak_bytes:
        budgets.insert(0, row.peak_bytes)
        lowtide_rows(run, network, made, "lowtide", [row.peak_bytes])
    lowtide_rows(run, network, made, "lowtide offloading", budgets)


PASSES = {"eager": eager_pass, "compiled": compiled_pass, "offloading": offloading_pass}


def measure_all(run: Run, networks: list[Network], passes: list[str]) -> None:
    """Group by group of networks, each pass over all of a group before the next one."""
    for group in sorted({network.group for network in networks}):
        for name in passes:
            for network in (n for n in networks if n.group == group):
                torch.manual_seed(0)
                if not run.clock.allows(min(run.guess_seconds.values())):
                    run.skipped.append(f"{network.title}: {name}")
                    continue
                made = network.make(str(run.device), None)
                with measured_once():
                    PASSES[name](run, network, made)
                del made
                harness.release(run.device)


def compile_first(run: Run, networks: list[Network], arguments: argparse.Namespace) -> None:
    """Compile what the rows of some networks need, several at once, in a part of the run's time; not what the run that
    this one continues has compiled. What it takes counts without graphs alone.
    """
    options = ["--device", arguments.device, "--variants", arguments.variants]
    options += ["--tiny"] if arguments.tiny else []
    options += ["--regions", arguments.regions] if arguments.regions else []
    options += ["--graphs"] if arguments.graphs else []
    left = math.inf if arguments.seconds is None else SHARE_OF_TIME * arguments.seconds - run.clock.elapsed_seconds
    until = time.monotonic() + left
    known = {(entry.network, entry.way) for entry in run.cold if not run.graphs}
    ways = [(n, way) for n, way in ways_of(networks, run.memory_budgets) if (n.title, way) not in known]
    found = compile_side_by_side(ways, arguments.side_by_side, options, until)
    run.cold += [] if run.graphs else found


def draw_again(path: Path) -> None:
    """Table and figure of earlier results."""
    with earlier_results(path) as values:
        entries = [Batches(**entry) for entry in values["largest_batches"]]
        cold = [Cold(**entry) for entry in values.get("cold", [])]
        rows = [Row(**row) for row in values["rows"]]
        facts, skipped = values["facts"], list(values["skipped"])
    write(usable_folder(path.parent), path.stem, facts, rows, entries, skipped, cold)
    print(f"written to {harness.written_files(path.parent, path.stem)}")


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = Parser(__doc__)
    harness.add_common_arguments(parser)
    parser.add_argument("--passes", nargs="*", choices=list(PASSES), default=list(PASSES))
    parser.add_argument("--memory-budgets", nargs="*", type=ratio, default=[0.5, 0.2], help="activation_memory_budget")
    parser.add_argument(
        "--shares",
        nargs="*",
        type=ratio,
        default=[0.6, 0.4],
        help="further budgets of lowtide's, of plain training's peak; with none of them, not the least either",
    )
    parser.add_argument("--side-by-side", type=count, help="first compile in so many processes; then measure")
    parser.add_argument("--segments", nargs="*", type=count, help="numbers of segments for checkpoint_sequential")
    add_lowtide_arguments(parser)
    parser.add_argument("--resume", type=Path, help="continue an earlier run on the same machine, from its results")
    parser.add_argument("--draw", type=Path, help="write table and figure of earlier results, and measure nothing")
    parser.add_argument("--largest-batch", action="store_true", help="search the largest batch within limits instead")
    parser.add_argument(
        "--limits", nargs="*", type=written_bytes, default=["16GiB", "24GiB", "80GiB"], help="for --largest-batch"
    )
    parser.add_argument("--ways", nargs="*", default=[], help="for --largest-batch: only ways whose name contains one")
    arguments = parser.parse_args(given)
    if arguments.draw:
        draw_again(arguments.draw)
        return
    device = torch.device(arguments.device)
    refuse_graphs_without_cuda(arguments)
    networks = TINY if arguments.tiny else NETWORKS
    refuse_unless_chosen("--only", arguments.only, [f"{n.title} ({n.name})" for n in networks])
    networks = [n for n in networks if harness.is_chosen(f"{n.title} ({n.name})", arguments.only)]
    run = Run(arguments, device)
    try:
        with run.clock.enforced():
            if arguments.largest_batch:
                largest_batches(run, networks, arguments.limits, arguments.ways)
            else:
                if arguments.side_by_side and "compiled" in arguments.passes:
                    compile_first(run, networks, arguments)
                measure_all(run, networks, arguments.passes)
    except harness.OutOfTimeError:
        run.skipped.append("what followed")
    run.save(picture=True)
    lines = [*report_lines(run.facts, run.rows, run.skipped), *cold_lines(run.cold), *batch_lines(run.batches)]
    print("\n".join(["", *lines]))
    run.say_where()


if __name__ == "__main__":
    main()
