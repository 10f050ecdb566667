"""Decides by trial steps in which layout images enter a model whose blocks are compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lowtide.errors import LowtideWarning
from lowtide.runtime.fitting.rehearsal import let_go
from lowtide.runtime.fitting.solving import Settings
from lowtide.runtime.fitting.trials import (
    Planned,
    RealStep,
    impossible,
    is_timed,
    measured_for,
    numbers_of,
    planned_after,
)
from lowtide.runtime.measure.variants import Numbers, in_one_line, share_apart, why_too_far
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.plan.attach import device_of
from lowtide.runtime.transfer.cargo import Tier
from lowtide.units import format_seconds

# Where no trial can show it. Blocks of ResNet-101 in fp32, 500 px, compiled one by one on an H200: 59 ms on the device
# as it is, and 39 ms so.
_ADVICE = (
    "each compiled block copies its images into another layout and back; convert once: "
    "model.to(memory_format=torch.channels_last), and the images too"
)

_SO = "images enter with channels last, into which each compiled block would copy them"
_NOT_SO = "images stay in the usual layout"

# How much further than blocks without compilation those in another layout may be from compiled ones.
_SPREAD_FACTOR = 2

# Without compilation other random numbers are drawn. A mask that is drawn in another order is as far from the first as
# one of other numbers; what rounding makes of it is less than this share.
_SHARE_OF_OTHERS = 0.1


def enters_with_channels_last(
    model: nn.Module, sample: Sample, settings: Settings, after: RealStep | None, tier: Tier
) -> tuple[bool, str]:
    """Whether images are to enter with channels last: steps are faster so, with the same numbers; and a note about it.

    Args:
        model: a model whose compiled blocks would copy them.
        sample: what it is called with.
        settings: how blocks are compiled, without variants.
        after: a real step that took more than predicted, which is planned for.
        tier: where values go.
    """
    if not is_timed(device_of(model)):
        warnings.warn(_ADVICE, LowtideWarning, stacklevel=2)
        return False, ""

    def stepped(channels_last: bool) -> tuple[Planned, Numbers, float]:
        assert settings.compilation is not None
        compilation = replace(settings.compilation, channels_last=channels_last)
        return _stepped(model, sample, replace(settings, compilation=compilation), after, tier)

    try:
        usual, numbers, allowed = stepped(channels_last=False)
    except impossible():
        return False, ""  # whoever plans for it next will say why
    try:
        other, others, _ = stepped(channels_last=True)
    except Exception as error:  # also of the model's own code, such as a view of what is laid out otherwise
        return False, f"{_NOT_SO}: with channels last a step fails: {in_one_line(error)}"
    if reason := why_too_far(numbers, others, allowed):
        return False, f"{_NOT_SO}: with channels last {reason}"
    seconds = [format_seconds(each.solution.seconds) for each in (other, usual)]
    if (bool(other.refusal), other.solution.seconds) >= (bool(usual.refusal), usual.solution.seconds):
        return False, f"{_NOT_SO}: a step takes {seconds[1]} so, and {seconds[0]} with channels last"
    return True, f"{_SO} (a step takes {seconds[0]} instead of {seconds[1]} so)"


def _stepped(
    model: nn.Module, sample: Sample, settings: Settings, after: RealStep | None, tier: Tier
) -> tuple[Planned, Numbers, float]:
    """Compiled blocks in trial steps, what a step gives, and how far from that others may be."""
    split, (chain, compiled) = measured_for(model, sample, settings)
    assert compiled is not None
    try:
        planned = planned_after(model, sample, split, chain, settings, after, tier=tier, goes_on=True)
        step = partial(numbers_of, model, sample, planned, settings)
        numbers = step()
        return planned, numbers, 0.0 if compiled.compilation.channels_last else _allowed(step, numbers)
    finally:
        compiled.remove()
        let_go(device_of(model))


def _allowed(step: Callable[..., Numbers], numbers: Numbers) -> float:
    if numbers["random numbers", "drawn"]:
        return _SHARE_OF_OTHERS * share_apart(numbers, step(draws_before=True))
    with torch.compiler.set_stance("force_eager"):
        return _SPREAD_FACTOR * share_apart(numbers, step())
