"""Tables 2 and 3 and figure 5 beside what the paper prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import bytes_cell, heading, seconds_cell, table

from papers.selection.networks import PAPER_METHODS, PAPER_PEAKS, PAPER_SECONDS
from papers.selection.phases import Phase

# Printed in section 5.2.
PAPER_ERROR = 0.028
MIB = 2**20


@dataclass
class Row:
    """One method on one network and batch size."""

    network: str
    batch: int
    method: str
    checkpoints: tuple[int, ...] | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    note: str = ""

    def as_method(self, method: str) -> Row:
        """The same figures for another method that chose the same set."""
        return replace(self, method=method, note=f"as {self.method}")


@dataclass
class Figure:
    """Memory over the phases of a step."""

    title: str
    checkpoints: tuple[int, ...]
    predicted: list[Phase]
    measured: list[Phase]
    stored_error: float
    peak_error: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Figure:
        """The inverse of `dataclasses.asdict`."""
        phases = {name: [Phase(**phase) for phase in values[name]] for name in ("predicted", "measured")}
        return cls(**{**values, **phases})


def printed(row: Row) -> tuple[int | None, float | None]:
    """The paper's peak in MiB and its seconds, where it has them."""
    key = (row.network, row.batch)
    if key not in PAPER_PEAKS or row.method not in PAPER_METHODS:
        return None, None
    place = PAPER_METHODS.index(row.method)
    return PAPER_PEAKS[key][place], PAPER_SECONDS[key][place]


def report_lines(
    facts: dict[str, Any], rows: Sequence[Row], figure: Figure | None, skipped: Sequence[str]
) -> list[str]:
    """Both tables in one, network by network, and the error of figure 5."""
    lines = ["# GPU memory usage optimization for backward propagation, executed", "", heading(facts), ""]
    lines += ["The paper's figures are of an RTX 3090 with 24 GiB; its peaks in MiB, its times in seconds.", ""]
    for key in dict.fromkeys((row.network, row.batch) for row in rows):
        own = [row for row in rows if (row.network, row.batch) == key]
        lines += [f"## {key[0]}, batch {key[1]}", "", *_row_lines(own), ""]
    if figure is not None:
        lines += [
            f"## Figure 5: {figure.title}, checkpoints {_set(figure.checkpoints)}",
            "",
            f"Mean error of predicted memory over {len(figure.measured)} phases: {figure.stored_error:.1%} at the end "
            f"of a phase, {figure.peak_error:.1%} for its peak (the paper: {PAPER_ERROR:.1%}).",
            "",
        ]
    return [*lines, *(f"- not run: {text}" for text in skipped)]


def _row_lines(rows: Sequence[Row]) -> list[str]:
    plain = next((row for row in rows if row.method == "plain"), None)

    def share(value: float | None, whole: float | None) -> str:
        return "–" if value is None or whole is None else f"{value / whole:.0%}"

    def cells(row: Row) -> list[str]:
        peak, seconds = printed(row)
        return [
            row.method,
            bytes_cell(row.peak_bytes),
            share(row.peak_bytes, plain.peak_bytes if plain else None),
            bytes_cell(row.predicted_peak_bytes),
            "–" if peak is None else f"{peak}",
            seconds_cell(row.seconds),
            share(row.seconds, plain.seconds if plain else None),
            "–" if seconds is None else f"{seconds:.3f}",
            "" if row.checkpoints is None else _set(row.checkpoints),
            row.note,
        ]

    columns = ["method", "peak", "of plain", "predicted", "paper", "step", "of plain", "paper", "checkpoints", "note"]
    return table(columns, [cells(row) for row in rows])


def _set(checkpoints: Sequence[int]) -> str:
    return " ".join(str(k) for k in checkpoints if k)


def draw(plt: Any, facts: dict[str, Any], figure: Figure | None) -> Any:
    """Predicted and measured memory over the phases, as in the paper's figure 5."""
    if figure is None:
        return None
    picture, panels = plt.subplots(1, 2, figsize=(12, 4.4), sharey=True)
    for panel, field, text in zip(
        panels, ("stored_bytes", "peak_bytes"), ("at the end of each phase", "peak within each phase"), strict=True
    ):
        for phases, style, label in ((figure.measured, "C0--", "measured"), (figure.predicted, "C3-", "predicted")):
            values = [getattr(phase, field) / MIB for phase in phases]
            panel.plot(range(1, len(values) + 1), values, style, label=label)
        num_layers = len(figure.measured) // 2
        panel.axvline(num_layers + 0.5, color="0.7", linewidth=0.8)
        panel.set(title=text, xlabel="phase: forward, then backward", ylabel="MiB")
        panel.grid(alpha=0.3)
        panel.legend()
    picture.suptitle(f"{figure.title}, checkpoints {_set(figure.checkpoints)}; {facts['machine']}", fontsize=10)
    return picture
