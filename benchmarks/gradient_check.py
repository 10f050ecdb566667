"""Does running a model in stages give the same gradients? A forward that gives the same numbers is not proof of it.

The model runs once and frees everything that autograd saves; backward then recomputes each stage from its input,
as under a schedule that keeps nothing, and the gradients are compared with those of a plain step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.runtime.measure.stages import StagedModel
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.state.preserve import preserved

# How many further plain steps show how far plain steps lie apart: kernels that add in any order (atomics on CUDA) give
# other sums in some steps only, so that two steps may agree by chance.
NUM_PLAIN_RUNS = 6


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """What a comparison of gradients found.

    Args:
        num_compared: gradients of parameters, results and inputs compared.
        differences: of those that are not equal, by name: the largest, relative to the largest entry of the plain one.
    """

    num_compared: int
    differences: Mapping[str, float]

    @property
    def equal(self) -> bool:
        """Whether all are equal, bit for bit."""
        return not self.differences

    @property
    def different(self) -> tuple[str, ...]:
        """The names of those that are not equal."""
        return tuple(sorted(self.differences))

    @property
    def largest_difference(self) -> float:
        """The largest of the differences."""
        return max(self.differences.values(), default=0.0)

    def beyond(self, spread: Mapping[str, float], factor: float) -> tuple[str, ...]:
        """The names of those that differ by more than `factor` times their own spread in plain steps.

        One that is the same in all plain steps may not differ at all, and one that is not finite is always named.
        """
        allowed = {name: factor * spread.get(name, 0.0) for name in self.differences}
        far = [name for name, size in self.differences.items() if math.isinf(size) or not size <= allowed[name]]
        return tuple(sorted(far))


def check_gradients(
    model: nn.Module, split: Split, sample: Any, *, loss: Callable[[Any], Any] | None = None
) -> GradientCheck:
    """Compare a plain step's gradients with those of a step that recomputes every stage.

    Args:
        model: the model; it is not changed.
        split: its stages.
        sample: what to call it with.
        loss: what the caller computes from its result.
    """
    called = Sample.of(sample)
    staged = StagedModel(model, split, called, loss)
    with preserved(model):
        again = _gradients(model, called, staged.record())
    return _compared(_plain_gradients(staged, called), again)


def plain_spread(
    model: nn.Module,
    split: Split,
    sample: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    num_runs: int = NUM_PLAIN_RUNS,
) -> dict[str, float]:
    """How far the gradients of several plain steps lie apart, by name, relative to their largest entry.

    Args:
        model: the model; it is not changed.
        split: its stages.
        sample: what to call it with.
        loss: what the caller computes from its result.
        num_runs: plain steps beside the first; the spread is that of the two that lie farthest apart.
    """
    called = Sample.of(sample)
    staged = StagedModel(model, split, called, loss)
    lowest = _plain_gradients(staged, called)
    highest = dict(lowest)
    for _ in range(num_runs):
        for name, gradient in _plain_gradients(staged, called).items():
            lowest[name] = torch.minimum(lowest.get(name, gradient), gradient)
            highest[name] = torch.maximum(highest.get(name, gradient), gradient)
    return dict(_compared(highest, lowest).differences)


def plain_noise(model: nn.Module, split: Split, sample: Any, *, loss: Callable[[Any], Any] | None = None) -> float:
    """The largest spread of any gradient; see `plain_spread`."""
    return max(plain_spread(model, split, sample, loss=loss).values(), default=0.0)


def _plain_gradients(staged: StagedModel, sample: Sample) -> dict[str, torch.Tensor]:
    with preserved(staged.model), torch.enable_grad():
        target = staged.target(sample.with_keywords(staged.split.call_keywords).call(staged.model))
        return _gradients(staged.model, sample, target)


def _compared(plain: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> GradientCheck:
    names = sorted(plain.keys() | again.keys())
    different = [name for name in names if not _equal(plain.get(name), again.get(name))]
    return GradientCheck(len(plain), {name: _difference(plain.get(name), again.get(name)) for name in different})


def _gradients(model: nn.Module, sample: Sample, target: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values where backward starts, and the gradients of parameters and inputs, by name."""
    leaves: dict[str, torch.Tensor] = {f"parameter {name}": p for name, p in model.named_parameters()}
    leaves |= {f"input {position}": tensor for position, tensor in enumerate(sample.tensors())}
    asked = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    seeds = [torch.ones_like(tensor) for tensor in target]
    grads = torch.autograd.grad(target, list(asked.values()), seeds, allow_unused=True)
    found = {f"result {position}": tensor.detach() for position, tensor in enumerate(target)}
    return found | {name: grad for name, grad in zip(asked, grads, strict=True) if grad is not None}


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


def _difference(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    if first is None or second is None or first.shape != second.shape:
        return float("inf")
    scale = torch.maximum(first.abs().max(), second.abs().max()).clamp_min(torch.finfo(first.dtype).tiny)
    relative = float(((first - second).abs().max() / scale).item())
    return float("inf") if math.isnan(relative) else relative
