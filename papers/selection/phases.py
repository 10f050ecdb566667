"""Memory over the phases of a step, predicted and measured: the paper's figure 5.

Phase k = 1..n is the forward of layer k, phase n + 1.. the backward of layers n..1, as in the paper.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.harness import training_step
from torch import nn

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.runtime.model.split import Split


@dataclass
class Phase:
    """One phase of a step."""

    index: int
    stored_bytes: int
    """At its end, which is when the paper looks."""
    peak_bytes: int
    """The most since the phase before."""


def predicted_phases(chain: lowtide.Chain, schedule: lowtide.Schedule) -> list[Phase]:
    """What the simulator says; the recomputation before a backward belongs to that backward."""
    phases: list[Phase] = []
    peak = 0
    for step in lowtide.simulate(chain, schedule).steps:
        peak = max(peak, step.peak_bytes)
        first_forward = isinstance(step.operation, lowtide.Forward) and not step.repeated
        if first_forward or isinstance(step.operation, lowtide.Backward):
            phases.append(Phase(len(phases) + 1, step.stored_after_bytes, peak))
            peak = 0
    return phases


def measured_phases(
    model: nn.Module, batch: dict[str, Any], layers: nn.Sequential, solution: Any, split: Split, device: torch.device
) -> list[Phase]:
    """What a real step under a schedule takes: looked at where a layer's forward or backward has ended.

    A forward has ended, and its input may be gone, when the next layer begins; a backward when the gradient of the
    layer before is there.
    """
    phases: list[Phase] = []

    def look(*_: Any) -> None:
        phases.append(Phase(len(phases), meter.live_bytes, meter.peak_bytes))
        meter.reset_peak()

    def before_forward(*_: Any) -> None:
        if not lowtide.is_recomputing():
            look()

    def after_forward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if not lowtide.is_recomputing():
            output.register_hook(look)

    with lowtide.attach(model, solution, split=split):
        training_step(model, model, batch)()  # what is made once, is made here
        handles = [layer.register_forward_pre_hook(before_forward) for layer in layers]
        handles += [layer.register_forward_hook(after_forward) for layer in layers[:-1]]
        gc.collect()
        try:
            with Meter(device) as meter:
                loss = model(**batch)
                look()
                loss.backward()
                look()
        finally:
            for handle in handles:
                handle.remove()
    model.zero_grad(set_to_none=True)
    return phases[1:]  # the first is what was there before


def mean_error(predicted: list[Phase], measured: list[Phase], field: str) -> float:
    """The mean of |predicted - measured| / measured over the phases."""
    pairs = list(zip(predicted, measured, strict=True))
    return sum(abs(getattr(p, field) / getattr(m, field) - 1) for p, m in pairs) / len(pairs)
