"""Print a plan in a few lines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from lowtide.chain import Chain
from lowtide.runtime.model.split import Split
from lowtide.schedule import Backward, Forward, Offload, Release, Schedule
from lowtide.simulate import simulate
from lowtide.trace import CATEGORIES, Trace
from lowtide.units import format_bytes, format_seconds

_WIDTH = 100
_INDENT = " " * 13
# What may live on the host besides activations.
_PARKED = (
    ("w", "weights", "weight_bytes"),
    ("g", "gradients", "weight_grad_bytes"),
    ("opt", "optimizer state", "optimizer_bytes"),
)


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
    trace: Trace | None = None,
) -> str:
    """What a plan will do, what it predicts, and what was measured."""
    lines = [f"lowtide plan for {model}: strategy {schedule.strategy!r}, {split.num_stages} stages"]
    if memory_budget is not None:
        lines.append(f"  budget     {format_bytes(memory_budget)}")
    predicted = schedule.predicted
    if predicted is not None:
        figures = _figures(predicted.seconds, predicted.peak_bytes)
        lines.append(f"  predicted  {figures}{_beside(predicted.seconds, chain)}")
    if chain is not None:
        plain = simulate(chain, _plain(chain))
        lines.append(f"  plain      {_figures(plain.seconds, plain.peak_bytes)}, everything stored")
    if trace is not None and chain is not None:
        lines.append(f"  at peak    {_breakdown(trace, chain, moves_weights=bool(schedule.manages))}")
    if schedule.manages and chain is not None:
        lines.append(f"  on host    {parked_text(schedule, chain)}")
    measured = _figures(stats.measured_seconds, stats.measured_peak_bytes)
    if measured:
        lines.append(f"  measured   {measured} ({_when(stats.num_steps)})")
    lines += _what_happens(schedule, split)
    lines += _variants(schedule, split, chain)
    lines += [f"  note       {note}" for note in notes]
    return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent=_INDENT, break_on_hyphens=False) for line in lines)


def _beside(seconds: float, chain: Chain | None) -> str:
    plain = 0.0 if chain is None else chain.compute_seconds
    return f", {seconds / plain:.2f} x plain" if plain else ""


def _plain(chain: Chain) -> Schedule:
    stages = range(1, chain.num_stages + 1)
    return Schedule("store-all", (*(Forward(k, "all") for k in stages), *(Backward(k) for k in reversed(stages))))


def parked_text(schedule: Schedule, chain: Chain) -> str:
    """How much of what leaves the device between its uses, of a schedule that moves weights."""
    released = {operation.value for operation in schedule.operations if isinstance(operation, Release)}
    parts = []
    for kind, name, field in _PARKED:
        sizes = {k: getattr(stage, field) for k, stage in enumerate(chain.stages, start=1)}
        away = sum(num_bytes for k, num_bytes in sizes.items() if (kind, k) in released)
        if away:
            parts.append(f"{name} {format_bytes(away)} of {format_bytes(sum(sizes.values()))}")
    return f"{', '.join(parts)}; fetched when they are needed" if parts else "nothing"


def _breakdown(trace: Trace, chain: Chain, *, moves_weights: bool) -> str:
    """What fills the memory when it is fullest."""
    fullest = max(trace.steps, key=lambda step: step.peak_bytes)
    by_name = dict(zip(CATEGORIES, fullest.peak_by_category, strict=True))
    if moves_weights:
        parts = {
            "weights and optimizer": by_name.pop("weights"),
            "gradients": by_name.pop("gradients"),
            "other": by_name.pop("base"),
            "activations": sum(by_name.values()),
            "workspace": fullest.transient_bytes,
        }
        return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
    weights = sum(stage.weight_bytes for stage in chain.stages)
    state = sum(stage.optimizer_bytes for stage in chain.stages)
    other = by_name.pop("base") + by_name.pop("weights") - weights - state  # a schedule of activations moves neither
    gradients = by_name.pop("gradients")
    activations = sum(by_name.values())
    workspace = fullest.peak_bytes - weights - state - gradients - other - activations
    parts = {
        "weights": weights,
        "optimizer": state,
        "gradients": gradients,
        "activations": activations,
        "workspace": workspace,
        "other": other,
    }
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)


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
    moved = {op.stage for op in schedule.operations if isinstance(op, Offload) and op.kind in ("a", "abar")}
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
