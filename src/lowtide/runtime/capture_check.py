"""Does running a model in stages give the same gradients? A forward that gives the same numbers is not proof of it.

The model runs once with everything that autograd saves let go; backward then finds each stage run again from its input,
as under a schedule that keeps nothing, and the gradients are compared with those of a plain step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.runtime.measure_stages import StagedModel
from lowtide.runtime.preserve import preserved
from lowtide.runtime.sample import Sample
from lowtide.runtime.split import Split


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """What a comparison of gradients found.

    Args:
        num_compared: gradients of parameters, results and inputs compared.
        different: the names of those that are not equal.
        largest_difference: relative to the largest entry of the plain gradient.
    """

    num_compared: int
    different: tuple[str, ...]
    largest_difference: float

    @property
    def equal(self) -> bool:
        """Whether all are equal, bit for bit."""
        return not self.different


def check_gradients(
    model: nn.Module, split: Split, sample: Any, *, loss: Callable[[Any], Any] | None = None
) -> GradientCheck:
    """Compare a plain step's gradients with those of stages that are all run again.

    Args:
        model: the model; it is left as it was.
        split: its stages.
        sample: what to call it with.
        loss: what the caller computes from its result.
    """
    called = Sample.of(sample)
    staged = StagedModel(model, split, called, loss)
    with preserved(model):
        again = _gradients(model, called, staged.record())
    return _compared(_plain_gradients(staged, called), again)


def plain_noise(model: nn.Module, split: Split, sample: Any, *, loss: Callable[[Any], Any] | None = None) -> float:
    """How far the gradients of two plain steps lie apart, relative to their largest entry."""
    called = Sample.of(sample)
    staged = StagedModel(model, split, called, loss)
    return _compared(_plain_gradients(staged, called), _plain_gradients(staged, called)).largest_difference


def _plain_gradients(staged: StagedModel, sample: Sample) -> dict[str, torch.Tensor]:
    with preserved(staged.model), torch.enable_grad():
        target = staged.target(sample.with_keywords(staged.split.call_keywords).call(staged.model))
        return _gradients(staged.model, sample, target)


def _compared(plain: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> GradientCheck:
    different = [name for name in plain.keys() | again.keys() if not _equal(plain.get(name), again.get(name))]
    largest = max((_difference(plain.get(name), again.get(name)) for name in different), default=0.0)
    return GradientCheck(len(plain), tuple(sorted(different)), largest)


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
    scale = first.abs().max().clamp_min(torch.finfo(first.dtype).tiny)
    return float(((first - second).abs().max() / scale).item())
