"""Finds the stages of an unmodified module.

The model is run once on the sample and watched (`capture_watch`); where to cut is reckoned from what was seen
(`capture_cuts`); here the cuts become units and stages, or an error that says why there are none.
"""

from __future__ import annotations

import bisect
import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import nn

from lowtide.errors import CaptureError, shown
from lowtide.runtime.capture.blocks import whole_blocks
from lowtide.runtime.capture.cuts import (
    Cut,
    Cuts,
    Tally,
    choose,
    nearest_cuts,
    possible_cuts,
    reason_against,
    sides_of,
)
from lowtide.runtime.capture.units import settle
from lowtide.runtime.capture.watch import NEVER, Observation, SubmoduleCall, described, watch
from lowtide.runtime.model.interception import planned_part_of, refuse_scripted
from lowtide.runtime.model.sample import Sample, without_cache
from lowtide.runtime.model.split import Split, StageSplit, Unit
from lowtide.runtime.state.preserve import preserved
from lowtide.units import format_bytes

StageNames = Sequence[str] | Callable[[str, nn.Module], bool]

_NO_CACHE = (
    "use_cache=True is ignored in training, as an argument and in the model's config: a cache of keys and values would "
    "keep what should be freed; the result has no past_key_values then, and the numbers are those of use_cache=False"
)
_BY_HAND = 'name the stages by hand: stages=["encoder.layer.*", ...], or a function of (path, module)'


def capture(
    model: nn.Module,
    sample: Any,
    *,
    stages: StageNames | None = None,
    loss: Callable[[Any], Any] | None = None,
    closed: frozenset[str] = frozenset(),
    blocks: bool = False,
    finest: bool = False,
) -> Split:
    """Find the stages of a model.

    Args:
        model: any module; it is run once, as it stands (mode, autocast), and left as it was.
        sample: a tensor, a tuple of positional or a dict of keyword arguments.
        stages: patterns of submodules' paths (`"encoder.layer.*"`), each call of which is to be a stage; or a function
            that is given a path and a module and says whether it is one. What comes before, between and after them is
            a stage too. None: the finest useful chain.
        loss: what the caller computes from the model's output, where it is known.
        closed: paths of submodules that are not to be cut inside.
        blocks: cut between the repeated blocks of the model, not inside them; see `lowtide.runtime.capture.blocks`.
        finest: cut inside smaller stages, too: more to measure and to solve, and more that can be freed.

    Returns:
        The split; see `lowtide.runtime.model.split`.

    Raises:
        CaptureError: where no useful chain is found, with what was seen and what to do; for arguments that are wrong.
        SampleError: where the model fails on the sample.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        >>> [stage.name for stage in capture(model, torch.zeros(2, 4)).stages]
        ['0..1', '2..3']
    """
    check_arguments(model, stages, loss)
    called = Sample.of(sample)
    refuse_an_empty_batch(called)
    keywords = without_cache(model, called)
    with preserved(model):
        before = _places_in_memory(model)
        observation = watch(model, called.with_keywords(keywords), loss)
        _refuse_other_data(before, _places_in_memory(model))
    _refuse_what_cannot_work(model, observation)
    if blocks:
        closed |= whole_blocks(model, observation)
    if stages is None:
        for call in observation.calls:
            call.opaque |= call.path in closed
        cuts = choose(observation, possible_cuts(observation), finest=finest)
    else:
        cuts = _by_hand(model, observation, stages)
    cuts, units, trailing = settle(observation, cuts)
    if not cuts.chosen:
        raise CaptureError(_nothing_found(observation))
    split = _split(observation, cuts, units, trailing, keywords)
    return replace(split, notes=(_NO_CACHE,)) if keywords else split


def check_has_data(model: nn.Module) -> None:
    """Refuse a model without data.

    Raises:
        CaptureError: with the first parameter that has none.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{name!r} has no shape yet; call the model once on a batch before fit")
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise CaptureError(
            f"parameter {empty!r} is on the meta device and has no data; load or initialise the model first"
        )


def check_arguments(model: Any, stages: Any, loss: Any) -> None:
    """Refuse wrong arguments before anything runs.

    Raises:
        CaptureError: with what was given and what is expected.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model is {shown(model)}, expected an nn.Module")
    refuse_scripted(model)
    planned = planned_part_of(model)
    if planned is not None:
        raise CaptureError(
            f"submodule {planned!r} already has a plan, but a plan must cover the whole model; call its "
            "plan.detach() first"
        )
    if loss is not None and not callable(loss):
        raise CaptureError(f"loss is {shown(loss)}, expected a function of the model's result")
    if stages is None or callable(stages):
        return
    named = isinstance(stages, Sequence | Set) and not isinstance(stages, str)
    if not named or not all(isinstance(pattern, str) for pattern in stages):
        hint = f'; write ["{stages}"]' if isinstance(stages, str) else ""
        raise CaptureError(
            f'stages is {shown(stages)}, expected a list of paths with wildcards, such as ["encoder.layer.*"], or a '
            f"function of (path, module){hint}"
        )


# What a forward with `yield`, or an async one, returns.
_SUSPENDED = ("generator", "async_generator", "coroutine")


def refuse_an_empty_batch(sample: Sample) -> None:
    """Refuse a sample that has tensors, and nothing in them.

    Raises:
        CaptureError: with the sample.
    """
    batched = [tensor for tensor in sample.tensors() if tensor.dim()]
    if batched and not any(tensor.numel() for tensor in batched):
        raise CaptureError(
            f"the sample is empty ({sample}), so there is nothing to measure; pass a batch of at least one"
        )


def _refuse_what_cannot_work(model: nn.Module, observation: Observation) -> None:
    if not any(call.depth == 0 and not call.path for call in observation.calls):
        raise CaptureError(
            f"{type(model).__name__} has its own __call__ that does not call nn.Module's, so its calls cannot be "
            "seen; name it forward, or end it with super().__call__(...)"
        )
    whole = next((call.whole for call in observation.calls if call.depth == 0 and call.whole), None)
    if whole is not None:
        raise CaptureError(
            f"the forward of {type(model).__name__} {whole}, which cannot be repeated in stages; move the code that "
            "does so into submodules of its own: each can be a stage as a whole"
        )
    if observation.checkpoints:
        raise CaptureError(
            "the model already uses torch.utils.checkpoint, which hides from lowtide what is saved; turn that off "
            "everywhere (transformers: model.gradient_checkpointing_disable()) and let lowtide choose"
        )
    if observation.caches:
        raise CaptureError(
            f"{observation.caches[0]} gets a key-value cache, which cannot be used twice; call the model without one, "
            "and with use_cache=False"
        )
    if observation.opaque in _SUSPENDED:
        raise CaptureError(
            f"the forward of {type(model).__name__} returns a {observation.opaque}, so nothing has run when it "
            "returns; let it return its results, in a list where there are several"
        )
    if observation.opaque:
        raise CaptureError(
            f"found no tensor in the model's result, or in the result of loss= ({observation.opaque}); return tensors "
            "with gradients, or tuples, lists, dicts or dataclasses of them"
        )
    if not observation.trains:
        raise CaptureError(
            "no gradient flows from the model's result, or from the result of loss=; check that some parameters have "
            "requires_grad=True, and that this is not called under inference_mode"
        )


def _places_in_memory(model: nn.Module) -> dict[str, int]:
    """The addresses of the parameters, by name; without other kinds (shards), which come and go."""
    return {name: p.data_ptr() for name, p in model.named_parameters() if type(p) is nn.Parameter}


def _refuse_other_data(before: dict[str, int], after: dict[str, int]) -> None:
    """Refuse `parameter.data = ...`, which cannot be watched as an operation."""
    for name, address in before.items():
        if after.get(name, address) != address:
            raise CaptureError(
                f"the forward replaces the data of its parameter {name!r} (.data = ...), so recomputing it would give "
                "different numbers; do that outside the forward, for instance after the optimizer step"
            )


def _nothing_found(observation: Observation) -> str:
    tally = Tally(observation)
    seen = f"{sum(1 for call in observation.calls if call.depth)} calls of submodules were seen"
    reasons: dict[str, int] = {}
    for cut in nearest_cuts(
        observation, [(call.left + 1, call.index, False) for call in observation.calls if call.depth]
    ):
        reason = reason_against(observation, cut)
        if reason is None:
            count = tally.differentiable(cut.crossing)
            crossing = "1 activation crosses" if count == 1 else f"{count} activations cross"
            reason = f"{crossing} the end of {observation.path(cut.call)}"
        reasons[reason] = reasons.get(reason, 0) + 1
    if not any(call.depth for call in observation.calls):
        return (
            "found no stages: the model calls no submodules, so there is no place to cut it; move parts of its forward "
            f"into submodules that are called one after the other, and if these are not found either, {_BY_HAND}"
        )
    if observation.cached:
        return (
            f"found no stages: {observation.cached!r} is computed once inside parametrize.cached(), and later calls "
            "read it from the cache, where a recomputation would not find it; remove parametrize.cached() from the "
            "model's forward, or enter it inside each block"
        )
    common = max(reasons, key=lambda reason: reasons[reason], default="no submodule is called")
    return (
        f"found no stages: {seen}, saving {format_bytes(tally.total_bytes)}, but a stage can end at none of them "
        f"(for instance: {common}); {_BY_HAND}"
    )


def _by_hand(model: nn.Module, observation: Observation, stages: StageNames) -> Cuts:
    """Cut around each call that the caller names."""
    named = [call for call in observation.calls if call.depth and _is_named(model, call, stages)]
    named = [call for call in named if not any(_inside(observation, call, other) for other in named)]
    if not named:
        paths = sorted({call.path for call in observation.calls if call.depth})
        raise CaptureError(f"no call of a submodule matches {stages!r}; the calls are {', '.join(paths[:8])}, ...")
    boundaries = [(call.entered, call.index, True) for call in named]
    boundaries += [(call.left + 1, call.index, False) for call in named]
    cuts = nearest_cuts(observation, sorted(boundaries))
    chosen: list[Cut] = []
    for cut in cuts:
        if chosen and cut.last_unit_entered < chosen[-1].position:
            continue  # only glue between them: it belongs to what follows
        reason = reason_against(observation, cut)
        if reason is not None:
            raise CaptureError(f"the forward cannot be cut at {observation.path(cut.call)}: {reason}")
        chosen.append(cut)
    last_entered = max(call.entered for call in observation.calls if call.depth)
    while chosen and last_entered < chosen[-1].position:
        chosen.pop()  # only glue after it: it belongs to what precedes
    return Cuts(chosen, sides_of(observation, chosen))


def _is_named(model: nn.Module, call: SubmoduleCall, stages: StageNames) -> bool:
    if callable(stages):
        try:
            return bool(stages(call.path, model.get_submodule(call.path)))
        except Exception as error:
            raise CaptureError(
                f"stages= failed with {described(error)}; it is called with a path and a module, and says whether that "
                "is a stage"
            ) from error
    return any(fnmatch.fnmatchcase(call.path, pattern) for pattern in stages)


def _inside(observation: Observation, call: SubmoduleCall, other: SubmoduleCall) -> bool:
    return other.entered < call.entered and call.left < other.left


def _split(
    observation: Observation, cuts: Cuts, units: list[SubmoduleCall], trailing: list[bool], keywords: dict[str, Any]
) -> Split:
    """The stages between cuts."""
    tally = Tally(observation)
    positions = [cut.position for cut in cuts.chosen]
    bounds = list(zip([NEVER, *positions], [*positions, observation.end], strict=True))
    owners = _parameter_owners(observation, positions)
    digests = _Digests(observation, cuts.sides)
    stages: list[StageSplit] = []
    names: dict[str, int] = {}
    for k, (start, end) in enumerate(bounds):
        calls = [call for call in units if start <= call.entered and call.left < end]
        name = _stage_name(calls)
        names[name] = names.get(name, 0) + 1
        stages.append(
            StageSplit(
                name if names[name] == 1 else f"{name} ({names[name]})",
                tuple(Unit(call.path, call.occurrence) for call in calls),
                trailing_glue=k < len(trailing) and trailing[k],
                kind=digests.of(start, end),
                parameters=tuple(owners.get(k, ())),
            )
        )
    return Split(
        tuple(stages),
        call_keywords=keywords,
        side_bytes=tally.num_bytes(cuts.sides),
        activation_bytes=tally.total_bytes,
        largest_stage_bytes=max(tally.saved_bytes(*pair) for pair in bounds),
    )


def _parameter_owners(observation: Observation, positions: list[int]) -> dict[int, list[str]]:
    """The parameters of each stage (from 0): a parameter belongs to the first stage that reads it."""
    owners: dict[int, list[str]] = {}
    for memory in observation.memories:
        if memory.role == "parameter" and memory.first_read != NEVER:
            owners.setdefault(bisect.bisect_right(positions, memory.first_read), []).extend(memory.names)
    return owners


def _stage_name(calls: list[SubmoduleCall]) -> str:
    """The path of a stage's unit; for several, that of the first and what of the last differs."""
    first, last = calls[0].path, calls[-1].path
    if first == last:
        return first
    parts, others = first.split("."), last.split(".")
    common = 0
    while common < min(len(parts), len(others)) - 1 and parts[common] == others[common]:
        common += 1
    return f"{first}..{'.'.join(others[common:])}"


class _Digests:
    """Equal texts for equal sequences of operations."""

    def __init__(self, observation: Observation, sides: Iterable[int]) -> None:
        self._operations = observation.operations
        self._ticks = [tick for tick, _ in observation.operations]
        made = [observation.memories[serial].made for serial in sides]
        self._sides = sorted(bisect.bisect_left(self._ticks, tick) for tick in made)

    def of(self, start: int, end: int) -> str:
        """What is done from tick `start` on and before tick `end`, and what of it makes side values."""
        digest = hashlib.blake2b(digest_size=8)
        first, last = bisect.bisect_left(self._ticks, start), bisect.bisect_left(self._ticks, end)
        for _, text in self._operations[first:last]:
            digest.update(text.encode())
        for place in self._sides[bisect.bisect_left(self._sides, first) : bisect.bisect_left(self._sides, last)]:
            digest.update(b"%d " % (place - first))
        return digest.hexdigest()
