"""Plans for compiled stages: the model as one region, regions that a schedule joins, or blocks; trial steps decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError
from lowtide.runtime.compile.compiled import CompiledModel, copies_images, num_alike
from lowtide.runtime.compile.cutting import NotCompiledError
from lowtide.runtime.compile.regions import not_one_graph
from lowtide.runtime.compile.saved import Saved
from lowtide.runtime.fitting.layouts import enters_with_channels_last
from lowtide.runtime.fitting.planning import WITH_ROOM_FOR_ALL, Trial
from lowtide.runtime.fitting.rehearsal import let_go
from lowtide.runtime.fitting.shares import KeptInPart, share_for
from lowtide.runtime.fitting.solving import Settings, solution_for
from lowtide.runtime.fitting.trials import (
    Planned,
    RealStep,
    Trials,
    corrected,
    impossible,
    is_timed,
    least_refusal,
    measured_for,
    planned_after,
)
from lowtide.runtime.measure.measure import capture_for
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import device_of
from lowtide.runtime.state.preserve import preserved
from lowtide.runtime.transfer.cargo import Tier
from lowtide.solve import Solution
from lowtide.strategies.base import AUTO

# The strategies that store everything where there is room.
_MAY_STORE_ALL = (AUTO, "rotor", "pofo")

# Less than this share of what stages take without compilation no compiled model was seen to take.
_LEAST_OF_EAGER = 0.5

# Regions of a network whose stages all differ. Those of DenseNet-201, compiled one by one on an H200, took 341 s, 3 s
# each, most of it for the host alone; the kernels of a larger one are compiled side by side.
_MOST_DIFFERENT = 16

# Of what stages take without compilation: a guess at what the whole model takes compiled, where that was not tried. On
# an H200 a Llama-like network took 0.74 and a GPT-like one 0.83 of it, Swin-B, ConvNeXt-B and convolutions in fp32 all.
_OF_EAGER = 0.9

# What a step of one region that keeps a part takes at the least, as a multiple of one that keeps all, a guess: with the
# compiler's ratio of 0.5 ConvNeXt-B took 1.02 times as long on an H200, a Llama-like network 1.06, ResNet-101 1.14.
_IN_PART = 1.05

# Of the share that a model is traced for: the next fit, which measures some bytes more or less, asks for the same.
_SHARE_DIGITS = 2

_NUM_HALVINGS = 12  # to find a share to a fraction of a thousandth

# How many blocks have to share a compilation, so that blocks in all their variants are compiled sooner than the model
# as one region. Compiling ConvNeXt-B on an H200 took 60 s, and its blocks, of which 8 share each compilation, 25 s, and
# 49 s in four variants: about twice as long as their part of the model.
_MANY_ALIKE = 10


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run a model in compiled stages.

    Args:
        seconds: that a step is expected to take at the least; trial steps show what it takes.
        regions: the stages are regions; else blocks.
        joint: the stages of regions and what they cost, where they run without variants and the schedule joins them.
        part: tries the model as one region that keeps a part of what it would save.
        is_known: else what single stages take at the least is measured, without variants, where another way is there.
    """

    seconds: float
    regions: bool
    joint: tuple[Split, Chain] | None = None
    part: KeptInPart | None = None
    is_known: bool = True

    @property
    def is_single(self) -> bool:
        """Whether each stage is compiled by itself, which can be tried in any case."""
        return self.joint is None and self.part is None


class CompiledPlanning:
    """Plans for compiled stages, in regions or block by block.

    Where trials decide, what takes the least to compile comes first: blocks in all variants if many share each of
    them, and else the model as one region, whole or in part. Blocks that few share are compiled beside it, and in
    variants only where without them they are faster; those that all differ are not.
    """

    def __init__(
        self, model: nn.Module, sample: Sample, settings: Settings, after: RealStep | None, *, tier: Tier, goes_on: bool
    ) -> None:
        assert settings.compilation is not None
        self._model, self._sample, self._settings = model, sample, settings
        self._compilation = settings.compilation
        self._after, self._tier, self._goes_on = after, tier, goes_on
        self._budgets = settings.compilation.budgets
        self._num_alike = _MANY_ALIKE
        """How many blocks share a compilation."""
        self._eager: tuple[Split, Chain] | None = None
        """The stages without compilation, and what they cost, where everything may be stored."""
        self._eager_bytes = 0
        """What a step takes that stores everything they save."""
        self._saved: Saved | None = None
        """What the model would save as one region, where that was asked."""
        self._has_regions = True
        """As far as is known: a model that is not one graph has none."""
        self._update_bytes = 0
        """What is there while the optimizer makes its step."""
        self._unknown_bytes = 0
        """Left for what a real step has shown."""
        self._layout_note = ""

    def plan(self) -> tuple[Planned, CompiledModel]:
        """The plan.

        Raises:
            InfeasibleBudgetError: with the least of the budgets that work in one of the ways.
        """
        found = self._planned()
        note = self._layout_note
        if not note or found[1].compilation.regions:
            return found
        return replace(found[0], notes=(note, *found[0].notes)), found[1]

    def _planned(self) -> tuple[Planned, CompiledModel]:
        settings = self._settings
        decides = settings.regions == AUTO and is_timed(device_of(self._model))
        if not (decides or settings.regions is True):
            return self._only_blocks()
        trials = self._storing_all()
        if decides:
            self._num_alike = num_alike(self._model, self._blocks)
            self._budgets = self._budgets if self._repeats else ()
        whole = None if trials is None else self._as_one_region(trials)
        if whole is not None and (whole[0].rehearsed_peak_bytes or 0) <= settings.memory_budget:
            beside = decides and self._repeats
            self._leave_layout()
            return _faster(whole, partial(self._blocks_beside, whole[0])) if beside else whole
        if whole is not None:
            whole[1].remove()
            let_go(device_of(self._model))
        return self._the_faster_that_fits(None if whole is None else whole[0])

    @property
    def _repeats(self) -> bool:
        return self._num_alike > 1

    @cached_property
    def _blocks(self) -> Split:
        """The stages of blocks."""
        asked = self._settings
        return capture_for(
            lambda split: None, self._model, self._sample, stages=asked.stages, loss=asked.loss, blocks=True
        )[0]

    def _leave_layout(self) -> None:
        """Where blocks would copy images, one region that converts them once is there already."""
        self._compilation = replace(self._compilation, channels_last=self._compilation.channels_last or False)

    def _settle_layout(self, budgets: tuple[float, ...]) -> None:
        """Let images enter blocks with channels last, if blocks would copy them and trial steps are faster so.

        Args:
            budgets: of the variants that will be compiled beside them.
        """
        asked, model, sample = self._compilation, self._model, self._sample
        if asked.channels_last is not None or not any(isinstance(module, nn.Conv2d) for module in model.modules()):
            return
        is_so = False
        if copies_images(model, self._blocks, asked.options, sample.tensors()):
            options = replace(asked, budgets=budgets).options_for(model)
            settings = replace(self._settings, compilation=replace(asked, options=options, budgets=(), regions=False))
            is_so, self._layout_note = enters_with_channels_last(model, sample, settings, self._after, self._tier)
        self._compilation = replace(asked, channels_last=is_so)

    def _planned_with(
        self, *, regions: bool, budgets: tuple[float, ...] | None = None, accepts: bool | None = None
    ) -> tuple[Planned, CompiledModel]:
        budgets = self._budgets if budgets is None else budgets
        if not regions:
            self._settle_layout(budgets)
        chosen = replace(self._settings, compilation=replace(self._compilation, regions=regions, budgets=budgets))
        if regions and not self._repeats:  # nothing to share: a few large regions are compiled sooner than many
            chosen = replace(chosen, most_stages=_MOST_DIFFERENT)
        split, (chain, compiled) = measured_for(self._model, self._sample, chosen)
        assert compiled is not None
        return self._tried(split, chain, compiled, chosen, self._goes_on if accepts is None else accepts)

    def _joined(self, split: Split, chain: Chain) -> tuple[Planned, CompiledModel]:
        """Regions without variants, which the schedule joins."""
        compilation = replace(self._compilation, regions=True, budgets=())
        chosen = replace(self._settings, compilation=compilation, bandwidth=0, each_trial_compiles=True)
        if self._settings.progress is not None:
            self._settings.progress("compiling what the schedule joins", 0.0)
        return self._tried(split, chain, compilation.of(self._model, split), chosen, accepts=False)

    def _tried(
        self, split: Split, chain: Chain, compiled: CompiledModel, settings: Settings, accepts: bool
    ) -> tuple[Planned, CompiledModel]:
        model, sample, after, tier = self._model, self._sample, self._after, self._tier
        try:
            return planned_after(model, sample, split, chain, settings, after, tier=tier, goes_on=accepts), compiled
        except BaseException:
            compiled.remove()
            raise

    def _only_blocks(self) -> tuple[Planned, CompiledModel]:
        """Blocks; with variants where without them not everything is stored."""
        settings = self._settings
        if self._budgets and settings.strategy in _MAY_STORE_ALL:
            split, chain, compiled = self._without_variants()
            try:
                solution_for(chain, replace(settings, strategy="store-all", bandwidth=0))
                found, _ = self._tried(split, chain, compiled, settings, accepts=False)
                if found.solution.trace.num_recomputed == 0 == found.solution.trace.moved_bytes:
                    return found, compiled
            except (InfeasibleBudgetError, torch.OutOfMemoryError):
                pass
            compiled.remove()
        return self._planned_with(regions=False)

    def _blocks_beside(self, whole: Planned) -> tuple[Planned, CompiledModel]:
        """Blocks beside the whole model; with variants where they recompute, and would be faster without that."""
        found = self._planned_with(regions=False, budgets=())
        is_slowed = found[0].solution.trace.num_recomputed > 0 and self._budgets
        if not is_slowed or found[0].chain.compute_seconds >= whole.solution.seconds:
            return found
        found[1].remove()
        return self._planned_with(regions=False)

    def _the_faster_that_fits(self, whole: Planned | None) -> tuple[Planned, CompiledModel]:
        """The way whose trial steps are the fastest; ways that cannot be faster than one that was tried are left out.

        Raises:
            InfeasibleBudgetError: where there is none.
        """
        refused: list[tuple[int, str]] = []
        best: tuple[Planned, CompiledModel] | None = None
        ways = self._ways(whole)
        last = [way for way in ways if way.is_single][-1]
        for way in ways:
            most = math.inf if best is None else best[0].solution.seconds
            find = partial(self._found, way, most, accepts=self._goes_on and way is last)
            if best is not None:
                least = way.seconds if way.is_known else self._least_in_variants(best[1])
                best = _faster(best, find) if least < most else best
                continue
            try:
                best = find()
            except InfeasibleBudgetError as error:
                if way.is_single:
                    refused.append((error.minimum_bytes, str(error)))
            except impossible():
                if way is last:
                    raise
        if best is None:
            raise least_refusal(refused, self._settings.memory_budget)
        return best

    def _least_in_variants(self, other: CompiledModel) -> float:
        """What blocks take at the least that run in variants beside another way, which stays in place."""
        self._leave_layout()
        other.remove()
        try:
            _, chain, compiled = self._without_variants()
        except impossible():
            return math.inf
        finally:
            let_go(device_of(self._model))
            other.install()
        compiled.remove()
        return _IN_PART * chain.compute_seconds

    def _found(self, way: _Way, most_seconds: float, *, accepts: bool) -> tuple[Planned, CompiledModel]:
        if way.part is not None:
            return way.part.keeping_most(most_seconds)
        if way.joint is not None:
            return self._joined(*way.joint)
        return self._planned_with(regions=way.regions, accepts=accepts)

    def _ways(self, whole: Planned | None) -> list[_Way]:
        """The ways in which a model can be compiled, by what a step is expected to take at the least.

        A schedule without variants joins regions; or the model is one region that keeps a part: both take as long as
        the whole model, and what is computed again. Or single stages run in variants, and take at least what they take
        without: blocks, if trials decide. Those that many share are measured so first. Of others it is not known before
        something else was tried, and where all blocks differ, none are compiled as long as something else fits. What
        the whole model takes is not known where it cannot fit; what is computed again then tells which of the two large
        ways is tried.
        """
        if not self._has_regions:
            return [_Way(0.0, regions=self._settings.regions is True)]
        part = self._in_part(whole)
        stages = self._eager if whole is None else (whole.split, _without_unknown(whole))
        joint = [] if stages is None else self._joint(*stages)
        if self._settings.regions is True:  # single regions fuse less than the whole model
            least = 0.0 if whole is None else whole.solution.seconds
            part = [replace(way, seconds=_IN_PART * least) for way in part]
            return sorted([*part, _Way(least, regions=True), *joint], key=lambda way: way.seconds)
        if self._num_alike < _MANY_ALIKE:
            large = sorted([*part, *joint], key=lambda way: way.seconds)
            if whole is None:
                large = [*large[:1], *(replace(way, seconds=math.inf) for way in large[1:])]
            if self._repeats:
                return [*large, _Way(0.0, regions=False, is_known=False), _Way(math.inf, regions=True)]
            return [*large, _Way(math.inf, regions=True), _Way(math.inf, regions=False)]
        split, chain, compiled = self._without_variants()
        try:
            seconds = chain.compute_seconds if whole is None else self._seconds_with_all_stored(split, chain)
        finally:
            compiled.remove()
        if whole is None:  # they take as long as blocks, and what is computed again
            ratio = seconds / stages[1].compute_seconds if stages else 1.0
            part = [replace(way, seconds=_IN_PART * seconds) for way in part]
            joint = [replace(way, seconds=ratio * way.seconds) for way in joint]
        blocks = [_Way(seconds, regions=False), _Way(math.inf, regions=True)]
        return sorted([*part, *joint, *blocks], key=lambda way: way.seconds)

    def _without_variants(self) -> tuple[Split, Chain, CompiledModel]:
        """Blocks without variants, measured, and compiled as they are beside variants; they stay in place."""
        self._settle_layout(self._budgets)
        options = replace(self._compilation, budgets=self._budgets).options_for(self._model)
        compilation = replace(self._compilation, options=options, budgets=(), regions=False)
        split, (chain, compiled) = measured_for(
            self._model, self._sample, replace(self._settings, compilation=compilation)
        )
        assert compiled is not None
        return split, chain, compiled

    def _seconds_with_all_stored(self, split: Split, chain: Chain) -> float:
        """What a trial step takes that stores everything, as the whole model's did; without one, the sum of stages."""
        settings = replace(self._settings, strategy="store-all", bandwidth=0)
        trials = Trials(self._model, self._sample, split, chain, settings, self._tier, 0)
        try:
            tried = trials.outcome(WITH_ROOM_FOR_ALL)
        except torch.OutOfMemoryError:
            return chain.compute_seconds
        finally:
            let_go(device_of(self._model))
        return tried.seconds if isinstance(tried, Trial) and tried.seconds else chain.compute_seconds

    def _storing_all(self) -> Trials | None:
        """Trials of everything stored, with room for what a real step has shown; None: whatever a compiler saves, that
        does not stay within the budget.
        """
        settings, after = self._settings, self._after
        if settings.strategy not in _MAY_STORE_ALL or settings.stages is not None:
            return None
        # Regions that a schedule joins end where blocks do. One that cuts inside them recomputes a part of each: a
        # narrow Swin of 24 blocks within 53 % of its memory has 45 regions so, and else 4, with 1.5 % more to compute.
        settings = replace(settings, compilation=None, in_blocks=True, strategy="store-all", bandwidth=0)
        split, (chain, _) = measured_for(self._model, self._sample, settings)
        # What they take on the device without compilation is not what regions take there.
        chain = replace(chain, provenance={**chain.provenance, "device_seconds": ()})
        self._eager = split, chain
        self._unknown_bytes = 0 if after is None else after.unknown_bytes(chain)
        trials = Trials(self._model, self._sample, split, chain, settings, self._tier, self._unknown_bytes)
        predicted = trials.outcome(replace(WITH_ROOM_FOR_ALL, is_tried=False))
        assert isinstance(predicted, Trial)
        self._eager_bytes, self._update_bytes = predicted.predicted_bytes, trials.asked.update_bytes
        budget, least = trials.asked.memory_budget, _LEAST_OF_EAGER * self._eager_bytes
        if self._update_bytes <= budget < self._eager_bytes:
            trials.say("tracing the model as one region")
            share = round((budget - chain.fixed_bytes) / (self._eager_bytes - chain.fixed_bytes), _SHARE_DIGITS)
            self._saved = self._saved_as_one(split, share)
        if self._saved is not None:
            least = chain.fixed_bytes + self._saved.all_bytes + trials.unknown_bytes
        return trials if self._has_regions and budget >= max(least, self._update_bytes) else None

    def _saved_as_one(self, split: Split, share: float) -> Saved | None:
        try:
            with preserved(self._model):
                return self._compilation.saved_as_one(self._model, split, self._sample, share)
        except not_one_graph() as error:
            self._has_regions = isinstance(error, NotCompiledError)
        except torch.OutOfMemoryError:
            pass
        finally:
            let_go(device_of(self._model))
        return None

    def _as_one_region(self, trials: Trials) -> tuple[Planned, CompiledModel] | None:
        """Everything stored and compiled as one, whether or not it stays within the budget; None: that cannot be.

        What the stages take by themselves does not show what a compiler saves across them, in time and in memory.
        """
        trials.say("compiling the model as one region")
        compiled = replace(self._compilation, budgets=(), regions=True).of(self._model, trials.split)
        try:
            found = trials.with_room_for_all()
            return replace(found, solution=_priced(found.solution, found.rehearsed_peak_bytes or 0)), compiled
        except BaseException as error:
            compiled.remove()
            if not isinstance(error, impossible()):
                raise
            self._has_regions = isinstance(error, NotCompiledError) or not isinstance(error, not_one_graph())
        let_go(device_of(self._model))
        return None

    def _in_part(self, whole: Planned | None) -> list[_Way]:
        """The way that keeps a part of what the model as one region would save, where variants were asked for and steps
        are timed.
        """
        asked = self._settings
        if not self._compilation.budgets or self._eager is None or not is_timed(device_of(self._model)):
            return []
        if asked.step_in_backward or self._update_bytes > asked.memory_budget:
            return []
        split, chain = self._eager
        stored_bytes, seconds, saved = int(_OF_EAGER * self._eager_bytes), 0.0, self._saved
        if saved is not None:  # besides what is saved, about as much as without compilation
            stored_bytes = self._eager_bytes - sum(stage.saved_bytes for stage in chain.stages) + saved.all_bytes
        if whole is not None:
            stored_bytes, seconds = whole.rehearsed_peak_bytes or 0, whole.solution.seconds
        known_bytes = asked.memory_budget - self._unknown_bytes
        first_share = None if saved is None else share_for(chain, saved, known_bytes)
        settings = replace(asked, compilation=None, strategy="rotor", bandwidth=0)

        def trials_of(split: Split, chain: Chain) -> Trials:
            return Trials(self._model, self._sample, split, chain, settings, self._tier, self._unknown_bytes)

        compilation = replace(self._compilation, regions=True)
        seconds_stored = seconds or chain.compute_seconds
        part = KeptInPart(self._model, compilation, split, chain, trials_of, stored_bytes, seconds_stored, first_share)
        return [_Way(_IN_PART * seconds_stored, regions=True, part=part)]

    def _joint(self, split: Split, chain: Chain) -> list[_Way]:
        """The way that joins regions, where a schedule is predicted to fit; strategies that move values have none."""
        if self._settings.strategy not in _MAY_STORE_ALL or self._settings.step_in_backward:
            return []
        try:
            seconds = solution_for(chain, replace(self._settings, bandwidth=0)).seconds
        except InfeasibleBudgetError:
            return []
        return [_Way(seconds, regions=True, joint=(split, chain))]


def _without_unknown(planned: Planned) -> Chain:
    """What was measured of the stages, without the room that is left in plans."""
    chain = planned.chain
    return replace(chain, base_bytes=max(0, chain.base_bytes - planned.unknown_bytes))


def _priced(solution: Solution, peak_bytes: int) -> Solution:
    """A solution whose stages save, and hold all the time, as much less or more as makes its peak what was measured."""
    found = _within(solution, peak_bytes)
    return found.on(corrected(found.chain, peak_bytes - found.peak_bytes))


def _within(solution: Solution, peak_bytes: int) -> Solution:
    """A solution whose stages save as much less as makes its peak what was measured.

    They were measured without compilation; what a compiler saves across them cannot be told from one to the other.
    """
    least, most, found = 0.0, 1.0, solution
    for _ in range(_NUM_HALVINGS if solution.peak_bytes > peak_bytes else 0):
        share = (least + most) / 2
        stages = tuple(
            replace(
                stage,
                saved_bytes=max(stage.output_bytes, int(share * stage.saved_bytes)),
                freed_bytes=int(share * stage.freed_bytes),
            )
            for stage in solution.chain.stages
        )
        tried = solution.on(replace(solution.chain, stages=stages))
        if tried.peak_bytes > peak_bytes:
            most = share
        else:
            least, found = share, tried
    return found


def _faster(
    one: tuple[Planned, CompiledModel], find_other: Callable[[], tuple[Planned, CompiledModel]]
) -> tuple[Planned, CompiledModel]:
    """The faster one of two plans, as trial steps have shown; the first where there is no other."""
    one[1].remove()
    try:
        other = find_other()
    except impossible():
        pass
    else:
        if other[0].solution.seconds < one[0].solution.seconds:
            return other
        other[1].remove()
    one[1].install()
    return one
