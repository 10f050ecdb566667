"""Checks that a variant of a stage computes the same as variant 0 before it may be used.

Both run from the same input with the same random numbers; outputs, gradients, buffers and the generators' states
afterwards must be equal, bit for bit, wherever variant 0 is equal to itself, and else lie within its own spread. That
finds a compiled function that draws dropout's mask anew in its backward, and one that rounds elsewhere.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.runtime.compile.compiled import VariantChoice
from lowtide.runtime.compile.cutting import NoRegionsError
from lowtide.runtime.measure.stages import StagedModel, leaves_behind

# Sums whose order is left open (attention's backward on CUDA) differ every time, but after rounding to 16 bits seldom
# anything is left of that: two runs of variant 0 may well agree where a third one does not. Ten take less time than
# compiling one variant.
_NUM_RUNS = 10

# For the same reason a variant may try again: one that computes something else fails each time.
_NUM_TRIES = 3

# A further run of variant 0 may lie on the other side of the middle of those seen, as far from it as the furthest.
_SPREAD_FACTOR = 2

# In units of the last place of the largest entry: what rounding some intermediate values or not may make of a gradient
# that is a sum of many terms, where variant 0 and the stage without compilation happen to agree.
_NUM_LAST_PLACES = 8

_LONGEST_REASON = 120  # letters of somebody else's message in a note of one line

_SEED = 20  # of the gradients from which backward starts; any fixed one

_NOTHING = 1e-30  # to divide by

_Key = tuple[str, str]
"""What a tensor is (outputs, gradients, state), and which one of these."""

Numbers = dict[_Key, torch.Tensor]
"""All that a stage or a step gives."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """All that one forward and backward of a stage gives.

    The state is that of buffers, and of the generators after the forward and after the backward.
    """

    tensors: Numbers
    has_drawn: bool


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
        self,
        staged: StagedModel,
        k: int,
        inputs: Sequence[torch.Tensor],
        choice: VariantChoice,
        *,
        allow_rounding: bool,
    ) -> None:
        self._staged, self._k, self._choice = staged, k, choice
        self._leaves = staged.leaves(k, inputs)
        self._names = {id(leaf): f"input {place}" for place, leaf in enumerate(self._leaves)}
        self._names |= {id(parameter): name for name, parameter in staged.model.named_parameters()}
        self._first = self._numbers(0)
        self._spread = self._differences(self._first)
        for _ in range(_NUM_RUNS - 1):
            self._spread = _larger(self._spread, self._differences(self._numbers(0)))
        self._allowed = {key: _SPREAD_FACTOR * spread for key, spread in _finite(self._spread).items()}
        if allow_rounding and not self._first.has_drawn:
            with torch.compiler.set_stance("force_eager"):
                eager = self._differences(self._numbers(0))
            last_places = {key: _NUM_LAST_PLACES * _last_place(t) for key, t in self._first.tensors.items()}
            self._allowed = _larger(_larger(self._allowed, _finite(eager)), last_places)

    def refusal(self, index: int) -> str | None:
        """Why a variant may not be used, in one line; None if it may."""
        try:
            for _ in range(_NUM_TRIES):
                reason = self._refusal(self._numbers(index))
                if reason is None:
                    break
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NoRegionsError) as error:
            # Of the compiler's, or of autograd: a buffer was saved that forward then changed.
            return f"it fails: {in_one_line(error)}"
        return reason

    def _refusal(self, other: _Numbers) -> str | None:
        if _shapes(other) != _shapes(self._first):
            return "it returns different tensors than the stage itself"
        found = self._differences(other)
        wrong = [key for key, difference in found.items() if not difference <= self._allowed[key]]
        if not wrong:
            return None
        if wrong[0][0] != "outputs" and self._first.has_drawn:
            return "its backward draws new random numbers (dropout), so gradients would be wrong"
        worst = max(wrong, key=lambda key: found[key] / self._size(key))
        what, which = worst
        own = self._spread[worst] / self._size(worst)
        spread = f"; its own runs differ by {own:.1e}" if own else ""
        relative = found[worst] / self._size(worst)
        return f"its {what} differ from those of the stage itself (relative error {relative:.1e} in {which}{spread})"

    def _size(self, key: _Key) -> float:
        return max(_largest(self._first.tensors[key]), _NOTHING)

    def _differences(self, other: _Numbers) -> dict[_Key, float]:
        """For each tensor how far the other one is from the first at the most; 0 where they are equal bit for bit."""
        return {
            key: _difference(tensor, other.tensors[key]) if key in other.tensors else math.inf
            for key, tensor in self._first.tensors.items()
        }

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
        # By name: a compiled stage reaches its parameters in another order than one that is not compiled.
        names = [self._names.get(id(leaf), f"leaf {place}") for place, leaf in enumerate(wanted)]
        named = dict(zip(names, gradients, strict=True))
        buffers = [buffer.detach().clone() for buffer in staged.buffers(k)]
        return _Numbers(
            {
                **_numbered("outputs", [tensor.detach() for tensor in (*outputs, *starts)]),
                **{("gradients", name): tensor for name, tensor in named.items() if tensor is not None},
                **_numbered("state", [*buffers, *after_forward, *staged.generator_states()]),
            },
            has_drawn,
        )


def why_too_far(first: Numbers, other: Numbers, allowed: float) -> str:
    """Why the numbers of one step may not stand for those of another, in one line; empty where they may.

    Args:
        first: those of the one.
        other: those of the other.
        allowed: how far floating-point numbers may be apart (see `share_apart`); by rounding they may in any case.
    """
    if _laid_out(other) != _laid_out(first):
        return "it returns different tensors"
    for what, names in _sorted(first).items():
        for key in names:
            if not first[key].is_floating_point() and not torch.equal(first[key], other[key]):
                return f"its {what} differ ({key[1]})"
    rounding = max(_NUM_LAST_PLACES * torch.finfo(t.dtype).eps for t in first.values() if t.is_floating_point())
    what, share = max(_shares_apart(first, other).items(), key=lambda entry: entry[1])
    return "" if share <= max(allowed, rounding) else f"its {what} differ (relative error {share:.1e})"


def share_apart(first: Numbers, other: Numbers) -> float:
    """How far the floating-point numbers of two steps are apart, as a share of their size.

    That of all results, of all gradients or of all buffers, whichever are the furthest apart: of a single number such
    as a loss, two roundings may happen to agree.
    """
    return max(_shares_apart(first, other).values())


def _shares_apart(first: Numbers, other: Numbers) -> dict[str, float]:
    found = {}
    for what, keys in _sorted(first).items():
        pairs = [(_wide(first[key]), _wide(other[key])) for key in keys if first[key].is_floating_point()]
        size = math.hypot(*(_length(one) for one, _ in pairs))
        apart = math.hypot(*(_length(one - two) for one, two in pairs))
        found[what] = apart / max(size, _NOTHING) if math.isfinite(apart) else math.inf
    return found


def _sorted(numbers: Numbers) -> dict[str, list[_Key]]:
    kinds: dict[str, list[_Key]] = {}
    for key in numbers:
        kinds.setdefault(key[0], []).append(key)
    return kinds


def _laid_out(numbers: Numbers) -> dict[_Key, tuple[Any, ...]]:
    """Shapes and types, and strides where they are not the usual ones."""
    return {
        key: (tensor.shape, tensor.dtype, None if tensor.is_contiguous() else tensor.stride())
        for key, tensor in numbers.items()
    }


def _length(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def in_one_line(error: Exception) -> str:
    """The first line of an error, cut to a length for notes."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return textwrap.shorten(text, _LONGEST_REASON, placeholder=" ...")


def _numbered(what: str, tensors: Sequence[torch.Tensor]) -> dict[_Key, torch.Tensor]:
    return {(what, str(place)): tensor for place, tensor in enumerate(tensors)}


def _shapes(numbers: _Numbers) -> dict[_Key, torch.Size]:
    return {key: tensor.shape for key, tensor in numbers.tensors.items()}


def _larger(one: dict[_Key, float], other: dict[_Key, float]) -> dict[_Key, float]:
    return {key: max(value, other[key]) for key, value in one.items()}


def _finite(differences: dict[_Key, float]) -> dict[_Key, float]:
    """Without those that allow for nothing: other shapes, or not a number here and one there."""
    return {key: difference if math.isfinite(difference) else 0.0 for key, difference in differences.items()}


def _seeds(starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients to start from: the same numbers each time, and not all ones, which normalisations turn into zeros."""
    seeds = []
    for tensor in starts:
        generator = torch.Generator(tensor.device).manual_seed(_SEED)
        seeds.append(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device))
    return seeds


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    one, other = _wide(one), _wide(other)
    same = (one == other) | (one.isnan() & other.isnan())
    found = float((one - other).abs().masked_fill_(same, 0.0).max())
    return found if math.isfinite(found) else math.inf


def _largest(tensor: torch.Tensor) -> float:
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0


def _last_place(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps * _largest(tensor) if tensor.is_floating_point() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """With room for differences, and no more than that: blocks can be large."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.float()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
