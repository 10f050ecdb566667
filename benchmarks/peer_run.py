"""One run of `benchmarks.peers`: what it has found, and the files that it writes."""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.peer_claim import Row, draw, report_lines, verdicts
from benchmarks.peer_compiling import Cold, backend_of, cold_lines, lowtide_options
from benchmarks.peer_networks import NETWORKS, TINY, Network

import lowtide

RESULTS = Path(__file__).parent / "results"

# What one row takes on a GPU, as a first guess; afterwards what the last one of its kind took. lowtide measures (and
# compiles) a network for its first row alone.
FIRST_GUESS_SECONDS = {
    "peer": 4.0,
    "save_on_cpu": 20.0,
    "lowtide": 8.0,
    "lowtide again": 4.0,
    "compile": 45.0,
    "lowtide compiled": 40.0,
    "lowtide compiled again": 6.0,
    "lowtide offloading": 25.0,
    "lowtide offloading again": 25.0,
}

CUT = "the search was cut"


@dataclass
class Batches:
    """The largest batch of one way within one limit."""

    network: str
    way: str
    limit: str
    batch: int | None
    """The largest that was seen to train; 0: not even one; None: not known."""
    note: str = ""
    too_large: int | None = None
    """The least that was seen not to train; None: none was, or it is not stored."""

    @property
    def is_known(self) -> bool:
        """Whether the search for it was completed."""
        return self.note != CUT


class Run(harness.Run):
    """One run: its rows, its time, its files.

    Args:
        arguments: of the command line.
        device: where it runs.
    """

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        super().__init__("peers", arguments, device, RESULTS)
        self.backend = backend_of(is_tiny=arguments.tiny)
        self.memory_budgets: list[float] = arguments.memory_budgets
        self.shares: list[float] = arguments.shares
        self.num_segments: list[int] | None = arguments.segments
        self.compiled = lowtide_options(arguments, self.backend)
        self.graphs: bool = arguments.graphs
        self.rows: list[Row] = []
        self.batches: list[Batches] = []
        self.cold: list[Cold] = []
        self.skipped: list[str] = []
        self._begun: set[tuple[str, str]] = set()  # the networks with a row of a kind measured in this run
        self._done: set[tuple[str, str]] = set()  # the rows that are measured, or were tried in this run
        guesses = FIRST_GUESS_SECONDS if device.type == "cuda" else dict.fromkeys(FIRST_GUESS_SECONDS, 0.0)
        self.guess_seconds = dict(guesses)
        if arguments.resume:
            with self.resumed(arguments.resume) as values:
                self.rows = [Row(**row) for row in values["rows"]]
                self._done = {(row.network, row.way) for row in self.rows if row.is_measured}
                self.batches = [Batches(**entry) for entry in values.get("largest_batches", [])]
                self.cold = [Cold(**entry) for entry in values.get("cold", [])]

    def of(self, network: Network) -> list[Row]:
        """The rows of a network so far."""
        return [row for row in self.rows if row.network == network.title]

    def row(self, row: Row, kind: str, measure: Callable[[Row], None]) -> Row | None:
        """Measure a row, unless it is there already or there is no time; None in these cases. What an earlier run could
        not measure is tried again.
        """
        label, key = f"{row.network}: {row.way}", (row.network, row.way)
        if key in self._done:
            return None
        begun = (row.network, kind)
        if begun in self._begun and f"{kind} again" in self.guess_seconds:
            kind = f"{kind} again"
        if not self.clock.allows(self.guess_seconds[kind]):
            self.skipped += [] if label in self.skipped else [label]
            return None
        begin = time.perf_counter()
        self._begun.add(begun)
        self._done.add(key)
        try:
            with warnings.catch_warnings(record=True) as raised:
                warnings.simplefilter("always", lowtide.LowtideWarning)
                measure(row)
            row.note = "; ".join([row.note, *(str(w.message) for w in raised if w.category is lowtide.LowtideWarning)])
            row.note = row.note.strip("; ")
        except Exception as error:  # one way must not take the others with it
            row.seconds = row.peak_bytes = None
            row.note = harness.reason(error)
        harness.release(self.device)
        self.guess_seconds[kind] = 1.1 * (time.perf_counter() - begin)
        self.rows = [*(other for other in self.rows if (other.network, other.way) != key), row]
        self.save()
        print(
            f"{self.clock.elapsed_seconds:6.0f} s  {label:<88} {harness.seconds_cell(row.seconds):>10}"
            f" {harness.bytes_cell(row.peak_bytes):>11}  {row.note}",
            flush=True,
        )
        return row

    def save(self, *, picture: bool = False) -> None:
        """Write the results; drawing takes a second, and is left for the end."""
        write(self.folder, self.stem, self.facts, self.rows, self.batches, self.skipped, self.cold, picture=picture)

    def say_where(self) -> None:
        """Print the folder."""
        print(f"written to {self.files}")


def write(
    folder: Path,
    stem: str,
    facts: dict[str, Any],
    rows: list[Row],
    batches: list[Batches],
    skipped: list[str],
    cold: list[Cold],
    *,
    picture: bool = True,
) -> None:
    """JSON, table and figure of some rows."""
    order = {network.title: place for place, network in enumerate([*NETWORKS, *TINY])}
    rows = sorted(rows, key=lambda row: order.get(row.network, len(order)))
    claims = [
        {"network": v.row.network, "peer": v.row.way, "slower_at_its_peak": v.slower, "larger_at_its_time": v.larger}
        for title in dict.fromkeys(row.network for row in rows)
        for v in verdicts(row for row in rows if row.network == title)
    ]
    values = {
        "facts": facts,
        "rows": [asdict(row) for row in rows],
        "claim": claims,
        "largest_batches": [asdict(entry) for entry in batches],
        "cold": [asdict(entry) for entry in cold],
        "skipped": skipped,
    }
    lines = [*report_lines(facts, rows, skipped), *cold_lines(cold), *batch_lines(batches)]
    harness.write_results(folder, stem, values, lines, (lambda plt: draw(plt, facts, rows)) if picture else None)


def batch_lines(entries: Sequence[Batches]) -> list[str]:
    """The second table: a row a way, a column a limit, for each network."""
    lines: list[str] = []
    for network in dict.fromkeys(entry.network for entry in entries):
        own = {(entry.way, entry.limit): entry for entry in entries if entry.network == network}
        limits = list(dict.fromkeys(limit for _, limit in own))
        ways = list(dict.fromkeys(way for way, _ in own))

        def cell(way: str, limit: str, own: dict[tuple[str, str], Batches] = own) -> str:
            entry = own.get((way, limit))
            if entry is None or entry.batch is None:
                return "–" if entry is None or not entry.is_known else entry.note
            if not entry.is_known:
                return f"at least {entry.batch}" + (f", not {entry.too_large}" if entry.too_large else "")
            return str(entry.batch) if entry.batch else "none"

        rows = [[way, *(cell(way, limit) for limit in limits)] for way in ways]
        lines += [f"## Largest batch: {_without_batch(network)}", "", *harness.table(["way", *limits], rows), ""]
    return lines


def _without_batch(title: str) -> str:
    """A network's title without the batch that its other table is of."""
    return re.sub(r", batch \d+(?! x)", "", re.sub(r"batch \d+ x ", "", title))
