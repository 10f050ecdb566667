"""The share of its activations that a model compiled as one region keeps, for a budget of bytes.

A compiler can keep a part of what one region would save, and compute the rest again in the kernels of its backward. It
takes a ratio (`activation_memory_budget`), between what the region saves by itself and its inputs alone. What a step
takes then shows in trial steps.

Such a region is a variant of the model as one stage. There may be no room for variant 0, with which others are
compared. But what would be something else if it were recomputed is saved, and a step shows whether its backward draws
new random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from lowtide.chain import Chain, Stage, Variant
from lowtide.errors import InfeasibleBudgetError
from lowtide.runtime.compile.compiled import Compilation, CompiledModel, variant_name
from lowtide.runtime.compile.regions import not_one_graph
from lowtide.runtime.compile.saved import Saved
from lowtide.runtime.fitting.planning import Attempt, Infeasible
from lowtide.runtime.fitting.rehearsal import let_go
from lowtide.runtime.fitting.trials import Planned, Trials, corrected
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import device_of
from lowtide.solve import solve
from lowtide.units import format_bytes

# Each trial compiles the whole model.
_MOST_TRIALS = 3

# Of what the budget leaves beside weights and all else that is there throughout: a trial that is this near is not
# improved, since that takes another one. Each along a line aims at the middle of what is near.
_NEAR = 0.15

# Of the same: what the share that is tried first is expected to take, where it is told from a trace. On an H200 steps
# of ResNet-101, Swin-B and ConvNeXt-B took 0.87 to 0.91 where 0.925 was asked for.
_EXPECTED = 0.97

# Less is not tried, a judgement: almost everything would be computed again.
_LEAST = 0.1

# Few enough shares that the next fit asks for one that has been compiled.
_STEPS = 50

# Of the same: what a step that runs out of memory is taken to need, a guess.
_OUT_OF_MEMORY = 1.2

_NO_LIMIT = 2**62

_SOONER = 0.99  # what solvers take for less time


class KeptInPart:
    """Tries a model as one region that keeps a share of what it would save.

    Args:
        model: the model.
        compilation: in regions.
        split: its stages without compilation.
        chain: what they cost.
        trials_of: makes trials of a split and a chain that may recompute, and do not move anything.
        stored_bytes: what a step takes that keeps all, perhaps an estimate.
        stored_seconds: the same of its time.
        first_share: to try; None: it is guessed from what is taken that keeps all, and by the leanest schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        compilation: Compilation,
        split: Split,
        chain: Chain,
        trials_of: Callable[[Split, Chain], Trials],
        stored_bytes: int,
        stored_seconds: float,
        first_share: float | None = None,
    ) -> None:
        self._model, self._compilation, self._chain = model, compilation, chain
        self._trials_of = trials_of
        self._stored_bytes, self._stored_seconds, self._first_share = stored_bytes, stored_seconds, first_share
        self._eager, self._split = trials_of(split, chain), split.with_at_most(1)

    def keeping_most(self, most_seconds: float) -> tuple[Planned, CompiledModel]:
        """The one that stays within the budget and keeps most, in place.

        Args:
            most_seconds: of a step; what takes longer and is too large is not tried with less kept.

        Raises:
            InfeasibleBudgetError: none of those that were tried does, or may be used.
            NoRegionsError, and Dynamo's own errors: it does not compile.
        """
        budget, fixed_bytes = self._eager.asked.memory_budget, self._chain.fixed_bytes
        best: tuple[Planned, CompiledModel] | None = None
        room, least_bytes = budget - fixed_bytes, self._least_bytes() - fixed_bytes
        seen = [(1.0, self._stored_bytes - fixed_bytes)]
        share = self._first_share or next_share(seen, least_bytes, room)
        while share is not None:
            compiled = replace(self._compilation, budgets=(share,)).of(self._model, self._split)
            try:
                planned = self._tried(share)
                num_bytes, seconds = planned.solution.peak_bytes, planned.solution.seconds
                if num_bytes <= budget and not self._draws_in_backward(planned):
                    best = planned, compiled  # it keeps more than one before that fits, and computes less again
            except torch.OutOfMemoryError:
                num_bytes, seconds = fixed_bytes + int(_OUT_OF_MEMORY * room), 0.0
            except not_one_graph():
                if best is None:
                    raise
                break
            finally:
                compiled.remove()
                let_go(device_of(self._model))
            if num_bytes > budget and seconds >= most_seconds:
                break  # with less kept it takes longer still
            seen.append((share, num_bytes - fixed_bytes))
            share = next_share(seen, least_bytes, room)
        if best is None:
            message = f"no part of one region that was tried takes at most {format_bytes(budget)}"
            raise InfeasibleBudgetError(message, minimum_bytes=fixed_bytes + seen[-1][1])
        best[1].install()
        return best

    def _least_bytes(self) -> int:
        found = self._eager.outcome(Attempt(1, is_tried=False))
        return found.minimum_bytes if isinstance(found, Infeasible) else 0

    def _tried(self, share: float) -> Planned:
        trials = self._trials_of(self._split, in_one_stage(self._chain, self._split.stages[0].name, share))
        trials.say(f"compiling the model as one region that keeps {share:.0%}")
        found = trials.with_room_for_all()
        solution = found.solution.on(as_tried(found.chain, self._stored_seconds, found.more_bytes))
        off = (found.rehearsed_peak_bytes or 0) - solution.peak_bytes
        note = f"the model is one compiled region that keeps {share:.0%} of what it would save"
        return replace(found, solution=solution.on(corrected(solution.chain, off)), notes=(*found.notes, note))

    def _draws_in_backward(self, planned: Planned) -> bool:
        return bool(self._eager.numbers(planned)["random numbers", "drawn in backward"])


def share_for(chain: Chain, saved: Saved, memory_budget: int) -> float | None:
    """The share to try first, by what the stages take without compilation; None: the least is too much.

    What a stage saves is taken to be kept in that share, besides what is always saved, and the rest to be there again
    while its backward runs. So the first stages of a network for images, which are the largest, count as they do.

    Args:
        chain: what the stages cost.
        saved: what the compiler would save of all of them as one region.
        memory_budget: for a step.
    """
    stored = solve(chain, memory_budget=_NO_LIMIT, strategy="store-all", manage_weights=False)
    ratio = saved.all_bytes / sum(stage.saved_bytes for stage in chain.stages)

    def expected_bytes(share: float) -> int:
        kept = min(1.0, share + saved.marked_bytes / saved.all_bytes) * ratio
        stages = [_kept_in_part(stage, kept, ratio) for stage in chain.stages]
        return stored.on(replace(chain, stages=tuple(stages))).peak_bytes

    aim = chain.fixed_bytes + _EXPECTED * (memory_budget - chain.fixed_bytes)
    shares = (step / _STEPS for step in range(_STEPS - 1, int(_LEAST * _STEPS) - 1, -1))
    return next((share for share in shares if expected_bytes(share) <= aim), None)


def _kept_in_part(stage: Stage, kept: float, of_all: float) -> Stage:
    saved_bytes = max(stage.output_bytes, int(kept * stage.saved_bytes))
    again_bytes = max(0, int(of_all * stage.saved_bytes) - saved_bytes)
    freed_bytes = min(saved_bytes, int(kept * stage.freed_bytes))
    extra_bytes = stage.backward_extra_bytes + again_bytes
    return replace(stage, saved_bytes=saved_bytes, freed_bytes=freed_bytes, backward_extra_bytes=extra_bytes)


def next_share(seen: Sequence[tuple[float, int]], least_bytes: int, room_bytes: int) -> float | None:
    """The share to try next; None: there is none. All bytes are those beside what is there throughout.

    What a step takes falls with the share, on a line or on a curve that ends flat. So a guess is where lines through
    what was seen meet the room, the lower one of two, and not below half of the last; where two guesses were too
    large, it is half of the last.

    Args:
        seen: shares and what a step took; first that of all, which may be an estimate.
        least_bytes: what a step with nothing kept takes, as an estimate.
        room_bytes: what a step may take.

    Example:
        >>> next_share([(1.0, 1000)], 100, 500), next_share([(1.0, 1000), (0.4, 510)], 100, 500)
        (0.4, 0.34)
        >>> next_share([(1.0, 1000), (0.42, 490)], 100, 500) is None
        True
    """
    share, num_bytes = seen[-1]
    tried = [each for each, _ in seen[1:]]
    is_near = (1 - _NEAR) * room_bytes <= num_bytes <= room_bytes
    any_fits = any(taken <= room_bytes for _, taken in seen[1:])
    if len(tried) == _MOST_TRIALS or (tried and is_near) or (any_fits and len(tried) > 1):
        return None
    more_bytes = num_bytes - (1 - _NEAR / 2) * room_bytes
    slopes = [(num_bytes - other) / (share - at) for at, other in ((0.0, least_bytes), *seen[:-1])]
    found = min((share - more_bytes / slope for slope in slopes if slope > 0), default=0.0)
    if tried:  # the curve may be flat there
        found = share / 2 if len(tried) > 1 else max(share / 2, found)
    found = math.floor(found * _STEPS) / _STEPS
    return found if _LEAST <= found < 1 and found not in tried else None


def in_one_stage(chain: Chain, name: str, share: float) -> Chain:
    """What the whole model costs as one stage, with a variant that keeps a share.

    Until a trial step has shown it, the variant saves as much as the stages without compilation, in hardly less time,
    so that solvers take it.

    Args:
        chain: what the stages cost.
        name: of the one stage.
        share: that the variant keeps.
    """
    stages = chain.stages
    saved_bytes = sum(stage.saved_bytes for stage in stages)
    extra_bytes = max(stage.backward_extra_bytes for stage in stages)
    forward, backward = sum(s.forward_seconds for s in stages), sum(s.backward_seconds for s in stages)
    stage = Stage(
        name,
        forward,
        backward,
        stages[-1].output_bytes,
        saved_bytes,
        grad_bytes=stages[-1].grad_bytes,
        backward_extra_bytes=extra_bytes,
        weight_bytes=sum(stage.weight_bytes for stage in stages),
        weight_grad_bytes=sum(stage.weight_grad_bytes for stage in stages),
        optimizer_bytes=sum(stage.optimizer_bytes for stage in stages),
        variants=(
            Variant(
                variant_name(share),
                _SOONER * forward,
                _SOONER * backward,
                saved_bytes,
                backward_extra_bytes=extra_bytes,
            ),
        ),
        update_seconds=sum(stage.update_seconds for stage in stages),
    )
    return replace(chain, stages=(stage,), side_values=())


def as_tried(chain: Chain, seconds: float, more_bytes: int) -> Chain:
    """The chain of one stage whose variant saves so much more, or less, and whose stage itself takes so long."""
    stage = chain.stages[0]
    ratio = seconds / chain.compute_seconds
    variants = tuple(
        replace(variant, saved_bytes=max(stage.output_bytes, variant.saved_bytes + more_bytes))
        for variant in stage.variants
    )
    times = {name: ratio * getattr(stage, name) for name in ("forward_seconds", "backward_seconds", "rerun_seconds")}
    return replace(chain, stages=(replace(stage, **times, variants=variants),))
