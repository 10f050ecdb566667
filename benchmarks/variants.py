"""Variants: what the solver's mix of blocks that save less costs, beside one variant for all and beside the compiler.

    python -m benchmarks.variants --only gpt --seconds 100      # the table of the GPT-like network, on a GPU
    python -m benchmarks.variants                               # all networks, some minutes each
    python -m benchmarks.variants --tiny --device cpu           # small, to see that it works
    python -m benchmarks.variants --draw DIR/variants-h200.json # table and figure again, no measuring

The rows that matter most come first; a run that is cut short leaves valid results.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.peer_claim import Row, by_network
from benchmarks.peer_networks import NETWORKS, TINY, Network
from benchmarks.peer_ways import compiled_whole
from benchmarks.refusing import Parser, earlier_results, refuse_unless_chosen, usable_folder
from benchmarks.variant_figure import WHOLE, draw
from torch import nn

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile.compiled import DEFAULT_BUDGETS, CompiledStages
from lowtide.runtime.measure.measure import measure_split
from lowtide.runtime.model.split import Split
from lowtide.schedule import Forward

RESULTS = Path(__file__).parent / "results"

# What the GPT-like network is to reach on an H200, in bytes; other networks get shares of the compiled blocks' peak.
BUDGETS = {"gpt": [int(gib * 2**30) for gib in (11.5, 9.7, 6.7)]}
SHARES = (0.75, 0.6, 0.42)


class Run(harness.Run):
    """One run: its rows, its time, its files."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        super().__init__("variants", arguments, device, RESULTS)
        self.backend = "aot_eager_decomp_partition" if arguments.tiny else "inductor"
        self.rows: list[Row] = []
        self.stages: dict[str, Any] = {}
        if arguments.resume:
            with self.resumed(arguments.resume) as values:
                self.rows, self.stages = [Row(**row) for row in values["rows"]], dict(values["stages"])

    def row(self, network: Network, way: str, measure: Callable[[Row], None], **more: Any) -> Row:
        """Measure one row, print it and write everything."""
        row = Row(network.title, way, "variants", compiled=True, **more)
        try:
            measure(row)
        except Exception as error:  # one way must not take the others with it
            row.note = harness.reason(error)
        harness.release(self.device)
        self.rows.append(row)
        self.save()
        print(f"{self.clock.elapsed_seconds:5.0f} s  {'  '.join(_cells(row))}", flush=True)
        return row

    def time(self, call: Callable[..., Any], model: nn.Module, batch: dict[str, Any], row: Row) -> None:
        """Time and peak of training steps."""
        step = harness.training_step(call, model, batch)
        begin = time.perf_counter()
        step()
        row.set_up_seconds = time.perf_counter() - begin
        timed = harness.time_steps(step, self.device)
        row.seconds, row.spread_seconds, row.peak_bytes = timed.seconds, timed.spread_seconds, timed.peak_bytes

    def save(self, *, picture: bool = False) -> None:
        """Write the results; drawing takes a second, and is left for the end."""
        write(self.folder, self.stem, self.facts, self.rows, self.stages, picture=picture)


def write(
    folder: Path, stem: str, facts: dict[str, Any], rows: list[Row], stages: dict[str, Any], *, picture: bool = True
) -> None:
    """JSON, table and figure of some rows."""
    titles = [network.title for network in [*NETWORKS, *TINY]]
    rows = sorted(rows, key=lambda row: titles.index(row.network))
    values = {"facts": facts, "rows": [asdict(row) for row in rows], "stages": stages}
    picture_of = (lambda plt: draw(plt, facts, rows)) if picture else None
    harness.write_results(folder, stem, values, _lines(facts, rows, stages), picture_of)


def _lines(facts: dict[str, Any], rows: Sequence[Row], stages: dict[str, Any]) -> list[str]:
    lines = [harness.heading(facts)]
    for title, own in by_network(rows).items():
        columns = ["way", "a step", "predicted", "peak", "predicted", "what the solver chose"]
        lines += ["", f"## {title}", "", *harness.table(columns, [_cells(row) for row in own]), ""]
        for entry in stages.get(title, {}).get("kinds", ()):
            lines.append(f"- {entry['name']} (x {entry['number']}): {entry['text']}")
        lines += [f"- {note}" for note in stages.get(title, {}).get("notes", ())]
    return lines


def _cells(row: Row) -> list[str]:
    return [
        f"{row.way:<44}",
        f"{harness.seconds_cell(row.seconds):>9}",
        f"{harness.seconds_cell(row.predicted_seconds):>9}",
        f"{harness.bytes_cell(row.peak_bytes):>10}",
        f"{harness.bytes_cell(row.predicted_peak_bytes):>10}",
        row.note,
    ]


def measure_network(run: Run, network: Network) -> None:
    """The rows of one network's blocks; those of an earlier run go, but for the whole model compiled."""
    torch.manual_seed(0)
    run.rows = [row for row in run.rows if row.network != network.title or (row.way.startswith(WHOLE) and row.seconds)]
    run.stages.pop(network.title, None)
    model, batch = network.make(str(run.device), None)
    run.row(network, "plain, eager", lambda row: run.time(model, model, batch, row))
    split = capture(model, batch, blocks=True)
    options = {"backend": run.backend, "dynamic": False}
    compiled = CompiledStages(model, split, options, DEFAULT_BUDGETS)
    try:
        plain = run.row(network, "compiled blocks", lambda row: run.time(model, model, batch, row))
        for allow_rounding in (False, True):
            chain = _measured(run, network, model, split, batch, compiled, allow_rounding=allow_rounding)
            suffix = " (up to rounding)" if allow_rounding else ""
            _rows_of_mixes(run, network, (model, batch), split, chain, plain.peak_bytes or 0, suffix)
            if not chain.provenance["notes"]:
                break
        _rows_of_single_variants(run, network, (model, batch), compiled)
    finally:
        compiled.remove()


def measure_whole(run: Run, network: Network) -> None:
    """The rows of a network that is compiled as a whole: each takes the compiler a minute."""
    torch.manual_seed(0)
    model, batch = network.make(str(run.device), None)
    for memory_budget in (1.0, 0.5):

        def whole(row: Row, memory_budget: float = memory_budget) -> None:
            with compiled_whole(model, run.backend, memory_budget) as call:
                run.time(call, model, batch, row)

        way = f"{WHOLE}, budget {memory_budget:g}"
        if not any((row.network, row.way) == (network.title, way) for row in run.rows):
            run.row(network, way, whole)


def _measured(
    run: Run,
    network: Network,
    model: nn.Module,
    split: Split,
    batch: dict[str, Any],
    compiled: CompiledStages,
    *,
    allow_rounding: bool,
) -> lowtide.Chain:
    """The chain with its variants; what they cost, and why some are not used, is written down."""
    begin = time.perf_counter()
    chain = measure_split(
        model,
        split,
        batch,
        keeps_result=False,
        moves_activations=False,
        compiled=compiled,
        allow_rounding=allow_rounding,
    )
    seconds = time.perf_counter() - begin
    kinds: dict[str, list[lowtide.Stage]] = {}
    for entry, stage in zip(split.stages, chain.stages, strict=True):
        kinds.setdefault(entry.kind, []).append(stage)
    of_kinds = [
        {"name": stages[0].name, "number": len(stages), "stage": stages[0].to_dict(), "text": _ways(stages[0])}
        for stages in kinds.values()
    ]
    notes = list(chain.provenance["notes"])
    known = run.stages.setdefault(
        network.title, {"notes": []}
    )  # what was refused stays, where rounding is allowed next
    known.update(kinds=of_kinds, measuring_seconds=seconds, notes=[*known["notes"], *notes])
    run.save()
    print(f"{run.clock.elapsed_seconds:5.0f} s  measured with variants in {seconds:.1f} s", flush=True)
    for line in [*(f"{entry['name']}: {entry['text']}" for entry in of_kinds), *notes]:
        print(f"         {line}", flush=True)
    return chain


def _ways(stage: lowtide.Stage) -> str:
    ways = [stage.variant(index) for index in range(stage.num_variants)]
    return ", ".join(
        f"{way.name if index else 'as it is'} {harness.bytes_cell(way.saved_bytes)} "
        f"{harness.seconds_cell(way.forward_seconds + way.backward_seconds)}"
        for index, way in enumerate(ways)
    )


def _rows_of_mixes(
    run: Run,
    network: Network,
    made: tuple[nn.Module, dict[str, Any]],
    split: Split,
    chain: lowtide.Chain,
    plain_bytes: int,
    suffix: str,
) -> None:
    """The solver's schedules, with variants and without."""
    plain_chain = replace(chain, stages=tuple(replace(stage, variants=()) for stage in chain.stages))
    budgets = [int(plain_bytes * share) for share in SHARES]
    budgets = budgets if run.is_tiny else BUDGETS.get(network.name, budgets)
    if not suffix:
        run.row(network, "everything stored, through lowtide", _planned(run, made, split, plain_chain, None))
    for budget in budgets:
        way = f"mix within {harness.bytes_cell(budget)}{suffix}"
        run.row(network, way, _planned(run, made, split, chain, budget), budget_bytes=budget)
    for budget in budgets if not suffix else ():
        way = f"whole blocks within {harness.bytes_cell(budget)}"
        run.row(network, way, _planned(run, made, split, plain_chain, budget), budget_bytes=budget)


def _planned(
    run: Run, made: tuple[nn.Module, dict[str, Any]], split: Split, chain: lowtide.Chain, budget: int | None
) -> Callable[[Row], None]:
    model, batch = made

    def measure(row: Row) -> None:
        strategy = "store-all" if budget is None else "rotor"
        solution = lowtide.solve(chain, memory_budget=budget or 2**50, strategy=strategy, manage_weights=False)
        row.predicted_seconds, row.predicted_peak_bytes = solution.seconds, solution.peak_bytes
        row.note = _chosen(chain, solution)
        with lowtide.attach(model, solution, split=split):
            run.time(model, model, batch, row)

    return measure


def _chosen(chain: lowtide.Chain, solution: lowtide.Solution) -> str:
    """How many stages are saved as which variant, and how many are recomputed."""
    forwards = [op for op in solution.schedule.operations if isinstance(op, Forward)]
    numbers = Counter(
        chain.stage(op.stage).variants[op.variant - 1].name if op.variant else "as it is"
        for op in forwards
        if op.save == "all"
    )
    again = sum(count > 1 for count in Counter(op.stage for op in forwards).values())
    parts = [f"{number} x {name}" for name, number in sorted(numbers.items())]
    return ", ".join([*parts, *([f"{again} recomputed"] if again else [])])


def _rows_of_single_variants(
    run: Run, network: Network, made: tuple[nn.Module, dict[str, Any]], compiled: CompiledStages
) -> None:
    """One variant for all blocks, without lowtide's executor; whether or not it computes the same."""
    model, batch = made
    for index, name in list(enumerate(compiled.choice.names))[1:]:
        with compiled.choice.running(index):
            run.row(network, f"all blocks at {name}", lambda row: run.time(model, model, batch, row))


def draw_again(path: Path) -> None:
    """Table and figure of earlier results."""
    with earlier_results(path) as values:
        facts, rows, stages = values["facts"], [Row(**row) for row in values["rows"]], dict(values["stages"])
    write(usable_folder(path.parent), path.stem, facts, rows, stages)
    print(f"written to {harness.written_files(path.parent, path.stem)}")


def main(given: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    harness.add_common_arguments(parser)
    parser.add_argument("--resume", type=Path, help="results of an earlier run; its other networks are kept")
    parser.add_argument("--draw", type=Path, help="write table and figure of earlier results, and measure nothing")
    arguments = parser.parse_args(given)
    if arguments.draw:
        draw_again(arguments.draw)
        return
    device = torch.device(arguments.device)
    networks = TINY if arguments.tiny else NETWORKS
    refuse_unless_chosen("--only", arguments.only, [network.name for network in networks])
    networks = [network for network in networks if harness.is_chosen(network.name, arguments.only)]
    run = Run(arguments, device)
    try:
        with run.clock.enforced():
            for measure, network in itertools.product((measure_network, measure_whole), networks):
                print(f"\n{network.title}", flush=True)
                try:
                    measure(run, network)
                except (lowtide.LowtideError, RuntimeError) as error:
                    print(f"         {harness.reason(error)}", flush=True)
                harness.release(device)
    except harness.OutOfTimeError:
        print("out of time; what was measured is written", flush=True)
    run.save(picture=True)
    print(f"{run.clock.elapsed_seconds:.0f} s in all; written to {run.files}")


if __name__ == "__main__":
    main()
