"""What the page is drawn from, in little space.

Some 20 schedules of the same chain consist of the same few thousand operations: each distinct one, with its time and
the bytes it brings and takes, is listed once in `effects`, and a schedule is the list of their numbers, each as the
difference from the one before. The page adds them up; it simulates nothing. All of it is one JSON text, compressed.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.chain import Chain
from lowtide.report.palette import LAYER_TITLES, LAYERS
from lowtide.report.stages import FATES, stage_uses
from lowtide.report.survey import ShownPlan, Survey
from lowtide.report.timeline import Span, spans
from lowtide.schedule import KINDS, SAVES, Backward, Forward, Operation, Update
from lowtide.strategies.base import REGISTRY

# What an operation is, by the number that stands for it: forwards by what they save, backward, update, then transfers.
VERBS = ("offload", "release", "prefetch", "await")
_TRANSFERS = tuple(f"{verb} {kind}" for verb in VERBS for kind in KINDS)
CODES = (*(f"forward {save}" for save in SAVES), "backward", "update", *_TRANSFERS)
_CODE_OF = {name: code for code, name in enumerate(CODES)}

# A line or two of a page: what is longer, such as a list with an entry a stage, is for programs.
_LONGEST_FACT = 160

# Times are kept to this share of a step: finer than any screen.
_TIME_DIGITS = 8


@dataclass(frozen=True, slots=True, order=True)
class Effect:
    """What an operation does wherever it stands: operations with the same effect are one entry."""

    code: int
    repeated: bool
    stage: int
    variant: int
    seconds: float
    during: tuple[int, ...]
    """Bytes by layer while it runs, less those before it."""
    after: tuple[int, ...]
    """Bytes by layer afterwards, less those before it."""

    def to_list(self) -> list[Any]:
        """The effect as the page reads it; bytes as pairs of a layer and a difference."""
        during, after = ([n for i, d in enumerate(change) if d for n in (i, d)] for change in (self.during, self.after))
        return [self.code, int(self.repeated), self.stage, self.variant, self.seconds, during, after]


def encode(
    survey: Survey,
    plans: Sequence[ShownPlan],
    *,
    own: int | None,
    measured: dict[str, Any] | None,
    notes: Sequence[str] = (),
    is_attached: bool = False,
) -> dict[str, Any]:
    """Everything that the page shows, as plain data.

    Args:
        survey: the curves.
        plans: the schedules, by budget.
        own: which of them is the user's own.
        measured: what a run saw.
        notes: what its maker says of the user's own plan.
        is_attached: whether that plan is the one that a model trains under.
    """
    effects = sorted({_effect(span) for plan in plans for span in spans(plan.trace)})
    numbers = {effect: number for number, effect in enumerate(effects)}
    return {
        "layers": [{"name": name, "title": LAYER_TITLES[name]} for name in LAYERS],
        "codes": CODES,
        "fates": FATES,
        "chain": _chain(survey.chain),
        "bandwidth": survey.bandwidth,
        "duplex": survey.duplex,
        "storeAll": {"seconds": survey.store_all.seconds, "peak": survey.store_all.peak_bytes},
        "minimum": survey.minimum_bytes,
        "curves": [
            {
                "strategy": curve.strategy,
                "minimum": curve.minimum_bytes,
                "skipped": curve.num_skipped,
                "managesWeights": curve.strategy in REGISTRY and REGISTRY[curve.strategy].manages_weights,
                "tried": curve.tried_bytes if curve.num_skipped else (),
                "points": [[point.peak_bytes, point.seconds] for point in curve.points],
            }
            for curve in survey.curves
        ],
        "effects": [effect.to_list() for effect in effects],
        "plans": [_plan(survey.chain, plan, numbers) for plan in plans],
        "own": own,
        "measured": measured,
        "notes": list(notes),
        "attached": is_attached,
    }


def compressed(data: dict[str, Any]) -> str:
    """The data as text for the page: JSON, zlib, base 64."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), level=9)).decode()


def _chain(chain: Chain) -> dict[str, Any]:
    columns = {
        "forward": "forward_seconds",
        "backward": "backward_seconds",
        "output": "output_bytes",
        "saved": "saved_bytes",
        "weight": "weight_bytes",
    }
    return {
        "name": chain.name,
        "plainSeconds": chain.compute_seconds,
        "provenance": _provenance(chain),
        "names": [stage.name for stage in chain.stages],
        "sides": [side.name for side in chain.side_values],
        "variants": [[variant.name for variant in stage.variants] for stage in chain.stages],
        **{name: [getattr(stage, field) for stage in chain.stages] for name, field in columns.items()},
    }


def _provenance(chain: Chain) -> dict[str, str | None]:
    """Where the figures come from, as text; None for what is too long to be read on a page."""
    texts = {key: _said(value) for key, value in chain.provenance.items()}
    return {key: text if len(text) <= _LONGEST_FACT else None for key, text in texts.items() if text}


def _said(value: object) -> str:
    """A value in words rather than as Python writes it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _plan(chain: Chain, plan: ShownPlan, numbers: dict[Effect, int]) -> dict[str, Any]:
    trace = plan.trace
    digits = _TIME_DIGITS - math.floor(math.log10(trace.seconds)) if trace.seconds else 0
    steps, latest, waits = [], 0, []
    for index, span in enumerate(spans(trace)):
        number = numbers[_effect(span)]
        steps.append(number - latest)
        latest = number
        before, after = round(span.start - span.begin, digits), round(span.finish - span.end, digits)
        if before or after:
            waits.append([index, before, after, span.step.waits_for])
    uses = stage_uses(chain, plan.schedule, trace)
    return {
        "budget": plan.memory_budget,
        "strategy": plan.schedule.strategy,
        "seconds": trace.seconds,
        "peak": trace.peak_bytes,
        "peakIndex": trace.peak_index,
        "idle": trace.idle_seconds,
        "moved": trace.moved_bytes,
        "recomputed": trace.num_recomputed,
        "start": list(trace.start_by_category),
        "steps": steps,
        "waits": waits,
        "copies": [
            [copy.index, round(copy.start_seconds, digits), round(copy.end_seconds, digits), copy.num_bytes]
            for copy in trace.copies
        ],
        "fates": "".join(use.fate for use in uses),
        "forwards": [use.num_forwards for use in uses],
        "variants": [use.variant for use in uses],
        "stageMoved": [use.moved_bytes for use in uses],
    }


def _effect(span: Span) -> Effect:
    step = span.step
    operation = step.operation
    return Effect(
        _CODE_OF[_code_name(operation)],
        step.repeated,
        operation.stage,
        operation.variant if isinstance(operation, Forward) else 0,
        _duration(span),
        tuple(during - before for during, before in zip(span.during, span.before, strict=True)),
        tuple(after - before for after, before in zip((*step.stored_by_category, 0), span.before, strict=True)),
    )


def _duration(span: Span) -> float:
    """How long it runs; rounded, so that the same operation at two times has the same duration."""
    seconds = span.end - span.start
    return float(f"{seconds:.7g}")


def _code_name(operation: Operation) -> str:
    if isinstance(operation, Forward):
        return f"forward {operation.save}"
    if isinstance(operation, Backward):
        return "backward"
    if isinstance(operation, Update):
        return "update"
    return f"{operation.verb} {operation.kind}"
