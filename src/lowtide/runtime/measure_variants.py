"""Does a variant of a stage compute the same? Each is compared with variant 0 before it may be used.

Both run from the same input with the same random numbers; outputs, gradients, buffers and the generators' states
afterwards must be equal, bit for bit, wherever variant 0 is equal to itself, and else lie within its own spread. That
finds a compiled function that draws dropout's mask anew in its backward, and one that rounds elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowtide.runtime.compiled import Choice
from lowtide.runtime.measure_stages import StagedModel, leaves_behind

# Three runs of variant 0 show a spread where there is one: sums whose order is left open differ nearly every time.
_NUM_RUNS = 3

# A further run of variant 0 may lie on the other side of the middle of those seen, as far from it as the furthest.
_SPREAD_FACTOR = 2

# In units of the last place of the largest entry: what rounding some intermediate values or not may make of a gradient
# that is a sum of many terms, where variant 0 and the stage without compilation happen to agree.
_NUM_LAST_PLACES = 8

_SEED = 20  # of the gradients from which backward starts; any fixed one


@dataclass(frozen=True, slots=True)
class _Numbers:
    """All that one forward and backward of a stage gives."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: list[torch.Tensor]
    """Buffers, and the generators after the forward and after the backward."""
    has_drawn: bool

    @property
    def all(self) -> list[torch.Tensor]:
        return [*self.outputs, *self.gradients, *self.state]


class VariantCheck:
    """Compares the variants of one stage with variant 0.

    Args:
        staged: the recorded model.
        k: the stage, from 1.
        inputs: its inputs.
        choice: of the variant.
        allow_rounding: also accept variants that differ from variant 0 by no more than the stage without compilation
            does.
    """

    def __init__(
        self, staged: StagedModel, k: int, inputs: Sequence[torch.Tensor], choice: Choice, *, allow_rounding: bool
    ) -> None:
        self._staged, self._k, self._choice = staged, k, choice
        self._leaves = staged.leaves(k, inputs)
        self._first = self._numbers(0)
        spread = _largest_differences(self._first, [self._numbers(0)])
        if any(spread):
            spread = _largest_differences(self._first, [self._numbers(0) for _ in range(_NUM_RUNS - 1)])
        self._allowed = [_SPREAD_FACTOR * each for each in spread]
        if allow_rounding and not self._first.has_drawn:
            with torch.compiler.set_stance("force_eager"):
                eager = _largest_differences(self._first, [self._numbers(0)])
            last_places = [_NUM_LAST_PLACES * _last_place(tensor) for tensor in self._first.all]
            self._allowed = [max(each) for each in zip(self._allowed, eager, last_places, strict=True)]

    def refusal(self, index: int) -> str | None:
        """Why a variant may not be used, in one line; None where it may."""
        other = self._numbers(index)
        if [t.shape for t in other.all] != [t.shape for t in self._first.all]:
            return "it gives other tensors than the stage itself"
        found = _largest_differences(self._first, [other])
        wrong = [place for place, (got, most) in enumerate(zip(found, self._allowed, strict=True)) if not got <= most]
        if not wrong:
            return None
        num_outputs = len(self._first.outputs)
        if wrong[0] >= num_outputs and self._first.has_drawn:
            return "its backward draws random numbers (dropout) anew, so that gradients are wrong"
        relative = max(found[place] / max(_largest(self._first.all[place]), 1e-30) for place in wrong)
        what = "outputs" if wrong[0] < num_outputs else "gradients"
        return f"its {what} are not those of the stage itself (relative difference {relative:.1e})"

    def _numbers(self, index: int) -> _Numbers:
        staged, k = self._staged, self._k
        with self._choice.running(index):
            outputs = staged.run(k, self._leaves)
            after_forward = staged.generator_states()
            has_drawn = staged.has_drawn(k)
            starts = outputs if k < staged.num_stages else staged.finish(outputs)[1]
            starts = [tensor for tensor in starts if tensor.requires_grad]
            wanted = leaves_behind(starts)
            seeds = _seeds(starts)
            gradients = torch.autograd.grad(starts, wanted, seeds, allow_unused=True) if wanted else ()
        buffers = [buffer.detach().clone() for buffer in staged.buffers(k)]
        return _Numbers(
            [tensor.detach() for tensor in (*outputs, *starts)],
            [tensor for tensor in gradients if tensor is not None],
            [*buffers, *after_forward, *staged.generator_states()],
            has_drawn,
        )


def _seeds(starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients to start from: the same numbers each time, and not all ones, which normalisations turn into zeros."""
    seeds = []
    for tensor in starts:
        generator = torch.Generator(tensor.device).manual_seed(_SEED)
        seeds.append(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device))
    return seeds


def _largest_differences(first: _Numbers, others: Sequence[_Numbers]) -> list[float]:
    """For each tensor how far the others are from the first at the most; 0 where they are equal bit for bit."""
    return [max(_difference(tensor, other.all[place]) for other in others) for place, tensor in enumerate(first.all)]


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    found = float((_wide(one) - _wide(other)).abs().max())
    return found if found > 0 else float("inf")  # not equal, and no difference: not numbers


def _largest(tensor: torch.Tensor) -> float:
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0


def _last_place(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps * _largest(tensor) if tensor.is_floating_point() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
