"""Print a plan in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from lowtide.chain import Chain
from lowtide.runtime.model.split import Split
from lowtide.schedule import Backward, Forward, Offload, Schedule
from lowtide.units import format_bytes, format_seconds


class Figures(Protocol):
    """What was predicted and measured; `lowtide.runtime.plan.plan.Stats` is one."""

    @property
    def num_steps(self) -> int:
        """Steps so far."""

    @property
    def predicted_seconds(self) -> float | None:
        """Time of a step, as planned."""

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Peak of a step, as planned."""

    @property
    def recomputed_per_step(self) -> float:
        """Stages recomputed in a step."""

    @property
    def moved_bytes_per_step(self) -> float:
        """Bytes copied in a step, both ways."""

    @property
    def measured_seconds(self) -> float | None:
        """Time of a step."""

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak of a step."""


def plan_text(
    model: str,
    schedule: Schedule,
    split: Split,
    chain: Chain | None,
    memory_budget: int | None,
    stats: Figures,
    notes: Iterable[str],
) -> str:
    """What a plan will do, what it predicts, and what was measured."""
    lines = [f"lowtide plan for {model}: strategy {schedule.strategy!r}, {split.num_stages} stages"]
    if memory_budget is not None:
        lines.append(f"  budget     {format_bytes(memory_budget)}")
    predicted = schedule.predicted
    if predicted is not None:
        time = f"  predicted  {format_seconds(predicted.seconds)} a step (forward and backward)"
        if chain is not None and chain.compute_seconds:
            time += f", {predicted.seconds / chain.compute_seconds:.2f} x plain"
        lines.append(f"{time}, peak {format_bytes(predicted.peak_bytes)}")
    measured = _figures(stats.measured_seconds, stats.measured_peak_bytes)
    if measured:
        lines.append(f"  measured   {measured} ({_when(stats.num_steps)})")
    lines += _what_happens(schedule, split)
    lines += _variants(schedule, split, chain)
    lines += [f"  note       {note}" for note in notes]
    return "\n".join(lines)


def stats_text(stats: Figures) -> str:
    """Predicted against measured, in three lines."""
    predicted = _figures(stats.predicted_seconds, stats.predicted_peak_bytes)
    measured = _figures(stats.measured_seconds, stats.measured_peak_bytes)
    moved = format_bytes(round(stats.moved_bytes_per_step))
    return (
        f"predicted  {predicted or 'nothing'}\n"
        f"measured   {measured or 'nothing yet'} ({_when(stats.num_steps)})\n"
        f"a step     {stats.recomputed_per_step:g} stages recomputed, {moved} moved"
    )


def _figures(seconds: float | None, peak_bytes: int | None) -> str:
    parts = [] if seconds is None else [f"{format_seconds(seconds)} a step"]
    return ", ".join(parts if peak_bytes is None else [*parts, f"peak {format_bytes(peak_bytes)}"])


def _when(num_steps: int) -> str:
    """The steps behind what was measured; before the first one it is what `fit` saw in its trial step."""
    if num_steps == 0:
        return "before the first step"
    return "1 step" if num_steps == 1 else f"{num_steps} steps"


def _what_happens(schedule: Schedule, split: Split) -> list[str]:
    forwards = Counter(op.stage for op in schedule.operations if isinstance(op, Forward))
    moved = {op.stage for op in schedule.operations if isinstance(op, Offload)}
    repeated = {k for k, count in forwards.items() if count > 1}
    kept = [k for k in range(1, split.num_stages + 1) if k not in repeated and k not in moved]
    last = max((i for i, op in enumerate(schedule.operations) if isinstance(op, Backward)), default=0)
    lines = [f"  operations {last + 1}: {len(kept)} stages kept, {len(repeated)} recomputed, {len(moved)} offloaded"]
    for title, stages in (("recomputed", sorted(repeated)), ("offloaded", sorted(moved))):
        if stages:
            lines.append(f"  {title:<10} {_names(split, stages)}")
    return lines


def _variants(schedule: Schedule, split: Split, chain: Chain | None) -> list[str]:
    """Which stages run as which variant; those that are not named run as they are."""
    if chain is None:
        return []
    stages_of: dict[str, list[int]] = {}
    for operation in schedule.operations:
        if isinstance(operation, Forward) and operation.save == "all" and operation.variant:
            name = chain.stage(operation.stage).variants[operation.variant - 1].name
            if operation.stage not in stages_of.setdefault(name, []):
                stages_of[name].append(operation.stage)
    titles = ["variants", *[""] * (len(stages_of) - 1)]
    return [
        f"  {title:<10} {name}: {_names(split, sorted(stages))}"
        for title, (name, stages) in zip(titles, sorted(stages_of.items(), reverse=True), strict=False)
    ]


def _names(split: Split, stages: list[int], most: int = 8) -> str:
    names = [split.stages[k - 1].name if k else "input" for k in stages]
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
