"""Finds a schedule for a model and a budget: measures, solves and runs trial steps, as the policy asks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TypeVar

import torch
from torch import nn

from lowtide.chain import Chain, Stage, Variant
from lowtide.errors import InfeasibleBudgetError, LowtideWarning, PlanError, ScheduleError
from lowtide.runtime.compile.compiled import Compilation, CompiledModel, num_alike
from lowtide.runtime.compile.regions import many_compilations, not_one_graph
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.fitting.moving import (
    STRATEGY,
    Moving,
    as_timed,
    clipping_seconds,
    could_be_faster,
    counted,
    host_bytes_of,
    is_faster,
    joint_solution,
    moving_chain,
    resident_bytes,
    seconds_with_updates,
    why_not,
)
from lowtide.runtime.fitting.planning import (
    Accept,
    Asked,
    Attempt,
    Attempts,
    Infeasible,
    OutOfMemory,
    Refuse,
    Trial,
    TrialOutcome,
    next_attempt,
)
from lowtide.runtime.fitting.rehearsal import Graphed, Rehearsal, TrainingStep, let_go, rehearse
from lowtide.runtime.fitting.solving import Settings, leanest_solution, solution_for
from lowtide.runtime.measure.measure import capture_for, measure_split
from lowtide.runtime.measure.stage_figures import StageFigures
from lowtide.runtime.measure.variants import in_one_line
from lowtide.runtime.measure.weights import optimizer_step_bytes
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import device_of, host_bytes
from lowtide.runtime.transfer.cargo import Tier
from lowtide.solve import Solution
from lowtide.strategies.base import AUTO
from lowtide.units import format_bytes, format_seconds

# A gradient no larger than this is that of a single number, a loss: the largest dtype has 16 bytes.
_LARGEST_NUMBER_BYTES = 16

# Left on CUDA for what differs between the trial and real steps: one of ResNet-50 was seen to take 3.4 MiB more than
# predicted on an H200. Presumably the allocator's: it gives out up to a megabyte more than was asked for where it has a
# block of about that size, and which blocks it has differs.
_ROUNDING_BYTES = 4 * 2**20

# Blocks of ResNet-101 in fp32, 500 px, compiled one by one on an H200: 59 ms on the device as it is, and 39 ms so.
_LAYOUT_ADVICE = (
    "each compiled block copies its images into another layout and back; convert once: "
    "model.to(memory_format=torch.channels_last), and the images too"
)


# The strategies that store everything where there is room.
_MAY_STORE_ALL = (AUTO, "rotor", "pofo")

_EVERYTHING = 2**62  # bytes: room for all

# Less than this share of what stages take without compilation no compiled model was seen to take.
_LEAST_OF_EAGER = 0.5

# Regions of a network whose stages all differ. Those of DenseNet-201, compiled one by one on an H200, took 341 s, 3 s
# each, most of it for the host alone; the kernels of a larger one are compiled side by side.
_MOST_DIFFERENT = 16

_NUM_HALVINGS = 12  # to find a share to a fraction of a thousandth

# Where trials decide, each kind of block is compiled in both ways, and what is compiled is at most so many times the
# model.
_NUM_WAYS = 2
_MOST_MODELS = 2

# Steps that are timed to tell two ways to compile apart.
_NUM_TIMED = 5


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule for a model and a call, and what is known of it."""

    split: Split
    solution: Solution
    tier: Tier
    """Where values go."""
    rehearsed_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    unknown_bytes: int = 0
    """What is left in the prediction, and added to trial steps, for what only real steps show."""
    more_bytes: int = 0
    """By how much a trial step has corrected the prediction."""
    refusal: str = ""
    """Why no schedule stays within the budget, where this is the leanest."""
    moving: Moving | None = None
    """What weights are where they move."""
    uses_graphs: bool = False
    """Steps are to be replayed as CUDA graphs."""

    @property
    def chain(self) -> Chain:
        """What the stages cost, corrected where a rehearsal showed more or less."""
        return self.solution.chain

    def execution(self, model: nn.Module, settings: Settings, *, is_trial: bool = False) -> Execution:
        """The schedule, ready to be put in place; for a trial without updates in backward."""
        schedule = self.solution.schedule
        needed = host_bytes(self.chain, schedule)
        needed += 0 if self.moving is None else host_bytes_of(self.moving, self.solution)
        placed = settings.placed
        self.tier.expect(max(0, needed - (0 if placed is None else placed.num_bytes)))
        optimizer = settings.optimizer if isinstance(settings.optimizer, torch.optim.Optimizer) else None
        execution = Execution(
            model,
            self.split,
            schedule,
            self.chain,
            self.tier,
            checks=settings.checks,
            optimizer=optimizer,
            is_trial=is_trial,
            homes=None if placed is None else placed.homes,
        )
        if is_trial and self.moving is not None and execution.weights is not None:
            execution.weights.stand_in(self.moving.state_bytes)
        return execution


@dataclass(frozen=True, slots=True)
class RealStep:
    """A step under a schedule that took more than the budget."""

    planned: Planned
    peak_bytes: int

    def unknown_bytes(self, chain: Chain) -> int:
        """What no trial step has: what the step took beyond what it is expected to take, measured anew."""
        before = self.planned
        if chain.num_stages != before.chain.num_stages:
            return before.unknown_bytes
        now = replace(chain, base_bytes=chain.base_bytes + before.unknown_bytes)
        try:
            expected = before.solution.on(corrected(now, before.more_bytes)).peak_bytes
        except ScheduleError:  # it runs variants that are not there this time
            expected = before.solution.peak_bytes
        return before.unknown_bytes + max(0, self.peak_bytes - expected)


def plan_for(
    model: nn.Module,
    sample: Sample,
    settings: Settings,
    *,
    tier: Tier,
    after: RealStep | None = None,
    goes_on: bool = False,
) -> tuple[Planned, CompiledModel | None]:
    """Measure, solve, try the schedule in one step, and correct the prediction where it was off.

    Where no schedule stays within the budget although activations may move, it is tried without moving them: what
    stages take is counted from above where they may, so that allowing it could cost memory. Where that does not help,
    or a trial shows that it is faster, weights, gradients and optimizer state move to the host, if they may.

    Args:
        model: the model.
        sample: what it is called with.
        settings: what was asked for.
        tier: where values go.
        after: a real step that took more than predicted, which is planned for.
        goes_on: where no schedule stays within the budget, take the leanest.

    Raises:
        InfeasibleBudgetError: with the least of the budgets that work in one of these ways.
    """
    is_asked = settings.may_move and settings.strategy == AUTO
    reason = why_not(model, settings) if is_asked else ""
    may_move = is_asked and not reason
    resident = resident_bytes(model, settings.optimizer) if may_move else 0
    if resident > settings.memory_budget:  # nothing else is worth a trial
        moving = replace(settings, strategy=STRATEGY)
        try:
            planned, compiled = plan_for(model, sample, moving, tier=tier, after=after, goes_on=goes_on)
            return _explained(planned, resident), compiled
        except InfeasibleBudgetError as error:
            if error.minimum_bytes > settings.memory_budget:  # else host memory is short: what works without it?
                raise
    if settings.compilation is not None:
        with many_compilations():
            accepts = goes_on and not may_move
            return _CompiledPlanning(model, sample, settings, after, tier=tier, goes_on=accepts).plan()
    of_kind: dict[str, StageFigures] = {}  # what stages take by themselves is the same in all ways
    ways = [settings]
    if settings.bandwidth and settings.strategy == AUTO:
        ways.append(replace(settings, bandwidth=0))
    if may_move:
        ways.append(replace(settings, strategy=STRATEGY))
    measured: dict[bool, tuple[Split, Chain]] = {}  # by whether values may move
    refused: list[tuple[int, str]] = []
    for way in ways:
        if (way.bandwidth > 0) not in measured:
            split, (chain, _) = measured_for(model, sample, way, of_kind)
            measured[way.bandwidth > 0] = split, chain
        split, chain = measured[way.bandwidth > 0]
        accepts = goes_on and way is ways[-1]
        try:
            found = _planned_with(model, sample, split, chain, way, after, tier=tier, goes_on=accepts)
        except InfeasibleBudgetError as error:
            least = error.minimum_bytes
            is_alone = way.bandwidth != settings.bandwidth
            refused.append((least, _below_alone(settings, least, refused[0][0]) if is_alone else str(error)))
            continue
        if way.strategy == STRATEGY != settings.strategy:
            found = _explained(found, min(least for least, _ in refused))
        elif may_move and after is None and way is settings:
            found = _with_weights_moved(found, model, sample, chain, way, tier)
        return found, None
    raise _refusal(refused, settings.memory_budget, reason if settings.bandwidth else "")


def _with_weights_moved(
    found: Planned, model: nn.Module, sample: Sample, chain: Chain, settings: Settings, tier: Tier
) -> Planned:
    """A plan that moves activations alone, or one that moves weights, too, where trial steps show that it is faster."""
    if not _is_timed(device_of(model)) or not could_be_faster(found.solution, chain, settings):
        return found
    asked = replace(settings, strategy=STRATEGY)
    moving = moving_chain(model, found.split, chain, asked)
    trials = _Trials(model, sample, found.split, moving.chain, asked, tier, found.unknown_bytes, moving)
    try:
        if not is_faster(found.solution.on(chain), trials.predicted(), moving):
            return found
        other = _accepted(trials)
    except (InfeasibleBudgetError, torch.OutOfMemoryError):
        return found
    finally:
        let_go(device_of(model))
    if not is_faster(found.solution, other.solution, moving):
        tier.give_up_unused()  # more than activations alone will need
        return found
    alone, moved = format_seconds(seconds_with_updates(found.solution, moving)), format_seconds(other.solution.seconds)
    note = f"a step takes {moved} if weights and optimizer state move, and {alone} if not; so they move"
    return replace(other, notes=(note, *other.notes))


def _is_timed(device: torch.device) -> bool:
    """Whether trial steps are timed there: those on a CPU are not."""
    return device.type == "cuda"


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run a model in compiled stages.

    Args:
        seconds: that a step is expected to take at the least; trial steps show what it takes.
        regions: the stages are regions; else blocks.
        joint: the stages of regions and what they cost, where they run without variants and the schedule joins them.
    """

    seconds: float
    regions: bool
    joint: tuple[Split, Chain] | None = None


class _CompiledPlanning:
    """Plans for compiled stages, in regions or block by block.

    Where trials decide, they compile at most about as much as twice the model, besides what schedules join: the whole
    model as one region, beside blocks that share their compilations, without variants where that tells which is faster,
    and with as many as there are equal blocks to share them; where the whole cannot fit, the stages in both ways
    without variants, and one way with them.
    """

    def __init__(
        self, model: nn.Module, sample: Sample, settings: Settings, after: RealStep | None, *, tier: Tier, goes_on: bool
    ) -> None:
        assert settings.compilation is not None
        self._model, self._sample, self._settings = model, sample, settings
        self._compilation = settings.compilation
        self._after, self._tier, self._goes_on = after, tier, goes_on
        self._budgets = settings.compilation.budgets
        self._repeats = True

    def plan(self) -> tuple[Planned, CompiledModel]:
        """The plan.

        Raises:
            InfeasibleBudgetError: with the least of the budgets that work in one of the ways.
        """
        settings = self._settings
        decides = settings.regions == AUTO and _is_timed(device_of(self._model))
        if not (decides or settings.regions is True):
            return self._advised(self._planned_with(regions=False))
        trials = None if self._after is not None else _storing_all(self._model, self._sample, settings, self._tier)
        if decides:
            self._bound(num_compiled=0 if trials is None else 1)
        whole = None if trials is None else _as_one_region(self._model, self._compilation, trials)
        if whole is not None and (whole[0].rehearsed_peak_bytes or 0) <= settings.memory_budget:
            beside = decides and self._repeats
            return self._advised(_faster(whole, partial(self._blocks_beside, whole[0]))) if beside else whole
        if whole is not None:
            whole[1].remove()
            let_go(device_of(self._model))
        if not decides:
            return self._planned_with(regions=True)
        return self._advised(self._the_faster_that_fits(None if whole is None else whole[0]))

    def _bound(self, num_compiled: int) -> None:
        """Choose how many variants there may be where the whole model is compiled so often besides."""
        split, _ = capture_for(lambda split: None, self._model, self._sample, loss=self._settings.loss, blocks=True)
        alike = num_alike(self._model, split)
        self._repeats = alike >= _NUM_WAYS
        most = (_MOST_MODELS - num_compiled) * alike - _NUM_WAYS
        self._budgets = _few_of(self._budgets, most if self._repeats else 0)

    def _planned_with(
        self, *, regions: bool, budgets: tuple[float, ...] | None = None, accepts: bool | None = None
    ) -> tuple[Planned, CompiledModel]:
        budgets = self._budgets if budgets is None else budgets
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
            return _planned_with(model, sample, split, chain, settings, after, tier=tier, goes_on=accepts), compiled
        except BaseException:
            compiled.remove()
            raise

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
        for way in (ways := self._ways(whole)):
            find = partial(self._found, way, accepts=self._goes_on and way is ways[-1])
            if best is not None:
                best = _faster(best, find) if way.seconds < best[0].solution.seconds else best
                continue
            try:
                best = find()
            except InfeasibleBudgetError as error:
                if way.joint is None:
                    refused.append((error.minimum_bytes, str(error)))
            except _impossible():
                if way.joint is None:
                    raise
        if best is None:
            raise _refusal(refused, self._settings.memory_budget)
        return best

    def _found(self, way: _Way, *, accepts: bool) -> tuple[Planned, CompiledModel]:
        if way.joint is None:
            return self._planned_with(regions=way.regions, accepts=accepts)
        return self._joined(*way.joint)

    def _ways(self, whole: Planned | None) -> list[_Way]:
        """The ways in which a model can be compiled, by what a step is expected to take at the least.

        Single stages run in variants, and take at least what they take without. Or a schedule without variants joins
        regions. Where the whole model was tried as one, joined regions take as long as that, and what is computed
        again, and blocks what they take in such a step. Where it was not, all that is known is the sum of the stages,
        and of single stages those that take less as regions or as blocks are one way. The others are for where nothing
        else fits; and where all stages differ, single ones are.
        """
        joint = [] if whole is None else self._joint(whole.split, _without_unknown(whole))
        if not self._repeats:
            return [*joint, _Way(math.inf, regions=True), _Way(math.inf, regions=False)]
        first, seconds = False, 0.0
        if whole is None:
            split, chain, compiled = self._without_variants(regions=True)
            compiled.remove()
            if not compiled.compilation.regions:
                return [_Way(0.0, regions=False)]  # it is not one graph
            joint, seconds = self._joint(split, chain), chain.compute_seconds
        split, chain, compiled = self._without_variants(regions=False)
        try:
            first = whole is None and seconds < chain.compute_seconds
            if not first:
                seconds = chain.compute_seconds if whole is None else self._seconds_with_all_stored(split, chain)
        finally:
            compiled.remove()
        ways = [*joint, _Way(seconds, regions=first), _Way(math.inf, regions=not first)]
        return sorted(ways, key=lambda way: way.seconds)

    def _without_variants(self, *, regions: bool) -> tuple[Split, Chain, CompiledModel]:
        """Stages without variants, measured, and compiled as they are beside variants; they stay in place."""
        options = replace(self._compilation, budgets=self._budgets).options_for(self._model)
        compilation = replace(self._compilation, options=options, budgets=(), regions=regions)
        split, (chain, compiled) = measured_for(
            self._model, self._sample, replace(self._settings, compilation=compilation)
        )
        assert compiled is not None
        return split, chain, compiled

    def _seconds_with_all_stored(self, split: Split, chain: Chain) -> float:
        """What a trial step takes that stores everything, as the whole model's did; without one, the sum of stages."""
        settings = replace(self._settings, strategy="store-all", bandwidth=0)
        trials = _Trials(self._model, self._sample, split, chain, settings, self._tier, 0)
        try:
            tried = trials.outcome(Attempt(_EVERYTHING, num_timed=_NUM_TIMED))
        except torch.OutOfMemoryError:
            return chain.compute_seconds
        finally:
            let_go(device_of(self._model))
        return tried.seconds if isinstance(tried, Trial) and tried.seconds else chain.compute_seconds

    def _joint(self, split: Split, chain: Chain) -> list[_Way]:
        """The way that joins regions, where a schedule is predicted to fit; strategies that move values have none."""
        if self._settings.strategy not in _MAY_STORE_ALL or self._settings.step_in_backward:
            return []
        try:
            seconds = solution_for(chain, replace(self._settings, bandwidth=0)).seconds
        except InfeasibleBudgetError:
            return []
        return [_Way(seconds, regions=True, joint=(split, chain))]

    def _advised(self, found: tuple[Planned, CompiledModel]) -> tuple[Planned, CompiledModel]:
        """A plan whose user is told where another layout of images would be faster."""
        if found[1].copies_images(self._sample.tensors()):
            warnings.warn(_LAYOUT_ADVICE, LowtideWarning, stacklevel=2)
        return found


def _few_of(budgets: tuple[float, ...], most: int) -> tuple[float, ...]:
    """The variants that are compiled where there may be so many: those that save the least and the most come first."""
    by_use = sorted(range(len(budgets)), key=lambda place: (place not in (0, len(budgets) - 1), place))
    return tuple(budgets[place] for place in sorted(by_use[: max(0, most)]))


def _storing_all(model: nn.Module, sample: Sample, settings: Settings, tier: Tier) -> _Trials | None:
    """Trials of everything stored; None: whatever a compiler saves, that does not stay within the budget."""
    if settings.strategy not in _MAY_STORE_ALL or settings.stages is not None:
        return None
    settings = replace(settings, compilation=None, strategy="store-all", bandwidth=0)
    split, (chain, _) = measured_for(model, sample, settings)
    trials = _Trials(model, sample, split, chain, settings, tier, 0)
    predicted = trials.outcome(Attempt(_EVERYTHING, is_tried=False))
    assert isinstance(predicted, Trial)
    least = max(_LEAST_OF_EAGER * predicted.predicted_bytes, trials.asked.update_bytes)
    return trials if trials.asked.memory_budget >= least else None


def _as_one_region(model: nn.Module, compilation: Compilation, trials: _Trials) -> tuple[Planned, CompiledModel] | None:
    """Everything stored and compiled as one, whether or not it stays within the budget; None: that cannot be.

    What the stages take by themselves does not show what a compiler saves across them, in time and in memory.
    """
    trials.say("compiling the model as one region")
    compiled = replace(compilation, budgets=(), regions=True).of(model, trials.split)
    try:
        tried = trials.outcome(Attempt(_EVERYTHING, num_timed=_NUM_TIMED))
        assert isinstance(tried, Trial)
        found = trials.planned(Accept(1, 0, tried.peak_bytes))
        off = tried.peak_bytes - tried.predicted_bytes
        return replace(found, solution=_priced(found.solution, tried.peak_bytes), more_bytes=off), compiled
    except BaseException as error:
        compiled.remove()
        if not isinstance(error, _impossible()):
            raise
    let_go(device_of(model))
    return None


def _impossible() -> tuple[type[Exception], ...]:
    """The errors that say that a model cannot be compiled in some way, or does not fit so."""
    return InfeasibleBudgetError, torch.OutOfMemoryError, *not_one_graph()


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
    except _impossible():
        pass
    else:
        if other[0].solution.seconds < one[0].solution.seconds:
            return other
        other[1].remove()
    one[1].install()
    return one


def _refusal(refused: list[tuple[int, str]], budget: int, reason: str = "") -> InfeasibleBudgetError:
    """The least budget of several ways and its message; of a way that lacks host memory alone, the message, too, and
    why weights cannot move.
    """
    too_small = [entry for entry in refused if entry[0] > budget] or refused
    least, message = min(too_small, key=itemgetter(0))  # the first of several
    lacking = [other for needed, other in refused if needed <= budget < least]
    if lacking:
        message += f" (with weights on the host: {lacking[0]})"
    if reason:
        message += f" (weights cannot live on the host: {reason})"
    return InfeasibleBudgetError(message, minimum_bytes=least)


def _below_alone(settings: Settings, least: int, with_offloading: int) -> str:
    """The message where recomputation alone needs the least: its own would advise to allow offloading."""
    return (
        f"budget {format_bytes(settings.memory_budget)} ({settings.memory_budget} bytes) is below the "
        f"{format_bytes(least)} ({least} bytes) that this model needs with recomputation alone (with offloading: "
        f"{format_bytes(with_offloading)}); raise it"
    )


def _explained(planned: Planned, least: int) -> Planned:
    """A plan that says why weights move."""
    needed = f"{format_bytes(least)} at the least"
    note = f"with all weights and optimizer state on the device this model needs {needed}; so they move"
    return replace(planned, notes=(note, *planned.notes))


def _planned_with(
    model: nn.Module,
    sample: Sample,
    split: Split,
    chain: Chain,
    settings: Settings,
    after: RealStep | None,
    *,
    tier: Tier,
    goes_on: bool,
) -> Planned:
    unknown_bytes = 0 if after is None else after.unknown_bytes(chain)
    planned = tried_schedule(
        model, sample, split, chain, settings, tier=tier, unknown_bytes=unknown_bytes, goes_on=goes_on
    )
    let_go(device_of(model))
    return planned


def measured_for(
    model: nn.Module, sample: Sample, settings: Settings, of_kind: dict[str, StageFigures] | None = None
) -> tuple[Split, tuple[Chain, CompiledModel | None]]:
    """The stages of a model and what they cost, compiled where that was asked for; compiled stages stay in place.

    Stages of kinds that are in `of_kind` are not measured again; see `measure_split`.
    """
    compilation = settings.compilation

    def work(split: Split) -> tuple[Split, tuple[Chain, CompiledModel | None]]:
        if compilation is None or not compilation.regions:
            return split, measured(split, compilation)
        joined = split.with_at_most(settings.most_stages) if settings.most_stages else split
        try:
            return joined, measured(joined, compilation)
        except not_one_graph() as error:
            chain, compiled = measured(split, replace(compilation, regions=False))
            note = f"blocks are compiled one by one, because the model is not one graph: {in_one_line(error)}"
            notes = [note, *chain.provenance.get("notes", ())]
            return split, (replace(chain, provenance={**chain.provenance, "notes": notes}), compiled)

    def measured(split: Split, compilation: Compilation | None) -> tuple[Chain, CompiledModel | None]:
        compiled = None if compilation is None else compilation.of(model, split)
        try:
            chain = measure_split(
                model,
                split,
                sample,
                loss=settings.loss,
                optimizer=settings.optimizer,
                grads_resident=settings.grads_resident,
                keeps_result=settings.keeps_result,
                moves_activations=settings.bandwidth > 0,
                progress=settings.progress,
                compiled=compiled,
                allow_rounding=settings.allow_rounding,
                of_kind=of_kind,
                is_replayed=settings.cuda_graphs is True,
                visits=None if settings.placed is None else settings.placed.visits(split),
                moves_side_values=compiled is None and settings.cuda_graphs is False,
            )
        except BaseException:
            if compiled is not None:
                compiled.remove()
            raise
        if compiled is not None:
            compiled.settle_loss()
        return chain, compiled

    _, found = capture_for(
        work,
        model,
        sample,
        stages=settings.stages,
        loss=settings.loss,
        blocks=compilation is not None,
        without_running=settings.placed is not None,
    )
    return found


def tried_schedule(
    model: nn.Module,
    sample: Sample,
    split: Split,
    chain: Chain,
    settings: Settings,
    *,
    tier: Tier,
    unknown_bytes: int = 0,
    goes_on: bool = False,
) -> Planned:
    """A schedule that a trial step has shown to stay within the budget, and the device to have the memory for.

    Weights move where that was asked for by name. At least `unknown_bytes` are left for what only real steps show. With
    `goes_on` the leanest, where there is none.

    Raises:
        InfeasibleBudgetError: where there is none, with the least budget that works.
        PlanError: where a strategy that moves weights was asked for by name, and they cannot be.
        torch.OutOfMemoryError: where trial steps ran out of memory time and again.
    """
    if settings.strategy != STRATEGY and not settings.step_in_backward:
        return _accepted(_Trials(model, sample, split, chain, settings, tier, unknown_bytes), goes_on=goes_on)
    reason = why_not(model, settings)
    if reason:
        raise PlanError(reason)
    moving = moving_chain(model, split, chain, settings)
    trials = _Trials(model, sample, split, moving.chain, settings, tier, unknown_bytes, moving)
    return _accepted(trials, goes_on=goes_on)


def _accepted(trials: _Trials, *, goes_on: bool = False) -> Planned:
    """What the policy accepts; see `tried_schedule`."""
    history = Attempts(replace(trials.asked, goes_on=goes_on))
    while isinstance(answer := next_attempt(history), Attempt):
        try:
            outcome = trials.outcome(answer)
        except torch.OutOfMemoryError:
            history = history.then(answer, OutOfMemory())
            refuse = next_attempt(history)
            if isinstance(refuse, Refuse) and refuse.is_out_of_memory:
                raise  # as the device said it
        else:
            history = history.then(answer, outcome)
    if isinstance(answer, Refuse):
        raise InfeasibleBudgetError(answer.message, minimum_bytes=answer.minimum_bytes)
    return trials.planned(answer)


class _Trials:
    """Solves and runs trial steps of one model; each attempt's schedule stays at hand."""

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        split: Split,
        chain: Chain,
        settings: Settings,
        tier: Tier,
        unknown_bytes: int,
        moving: Moving | None = None,
    ) -> None:
        self._moving = moving
        self._model = model
        self._sample = sample
        self.split = split
        self._settings = settings
        self._tier = tier
        self._notes: list[str] = list(chain.provenance.get("notes", ()))
        loss_bytes = _unknown_loss_bytes(chain, settings)
        if loss_bytes:
            self._notes.append(
                f"the loss is not known (loss=): {format_bytes(loss_bytes)}, two copies of the result, are left for it"
            )
        rounding_bytes = _ROUNDING_BYTES if device_of(model).type == "cuda" else 0
        self._unknown_bytes = max(loss_bytes + rounding_bytes, unknown_bytes)
        self._chain = replace(chain, base_bytes=chain.base_bytes + self._unknown_bytes)
        self._solutions: list[Solution | None] = []
        self._graphed: dict[int, Graphed] = {}
        """By the attempt's place, what became of replaying its steps as CUDA graphs."""
        self._joint: dict[tuple[int, int], Solution] = {}
        """By the budget and its correction, what was solved for where weights move."""
        self._seconds: dict[int, float] = {}
        """By the attempt's place, how long a trial step took."""
        self.asked = Asked(
            settings.memory_budget,
            moves=settings.bandwidth > 0,
            is_auto=settings.strategy == AUTO and moving is None,
            update_bytes=0 if moving is not None else _optimizer_step_bytes(model, chain, settings),
            rounding_bytes=rounding_bytes,
            is_costly=settings.each_trial_compiles,
        )

    def outcome(self, attempt: Attempt) -> TrialOutcome:
        """What comes of an attempt.

        Raises:
            torch.OutOfMemoryError: where the trial step runs out of memory.
        """
        bandwidth = self._settings.bandwidth if attempt.moves else 0
        settings = replace(self._settings, memory_budget=attempt.memory_budget, bandwidth=bandwidth)
        self._solutions.append(None)
        try:
            solution = self._solution(attempt, settings)
        except InfeasibleBudgetError as error:
            return Infeasible(error.minimum_bytes, str(error))
        self._solutions[-1] = solution
        found = Trial(solution.peak_bytes, solution.seconds, solution.trace.moved_bytes > 0)
        if not attempt.is_tried:
            return found
        planned = Planned(self.split, solution, self._tier, moving=self._moving)
        measured = _tried(self._model, self._sample, planned, settings, num_timed=attempt.num_timed)
        peak_bytes = measured.peak_bytes + self._unknown_bytes
        if self._moving is not None:
            # A trial step moves what the optimizer's step moves, and leaves that step out, which would change the
            # weights: that it takes less than predicted says nothing. A correction of the prediction is the difference
            # between both, and is not counted twice.
            peak_bytes = max(peak_bytes, counted(solution.on(self._chain), self._moving).peak_bytes)
        seconds, graphed = measured.seconds, measured.graphed
        if graphed is not None:
            if settings.cuda_graphs == AUTO and not graphed.refusal and graphed.seconds >= seconds:
                graphed = replace(graphed, refusal="a trial showed that they are not faster")
            self._graphed[len(self._solutions) - 1] = graphed
        if graphed is not None and not graphed.refusal:
            seconds, peak_bytes = graphed.seconds, max(peak_bytes, graphed.peak_bytes + self._unknown_bytes)
        self._seconds[len(self._solutions) - 1] = seconds
        return replace(found, peak_bytes=peak_bytes, seconds=seconds)

    def _solution(self, attempt: Attempt, settings: Settings) -> Solution:
        if attempt.again is not None:
            solution = self._solutions[attempt.again]
            assert solution is not None
            return solution
        chain = corrected(self._chain, attempt.more_bytes)
        if self._moving is not None:
            key = (settings.memory_budget, attempt.more_bytes)
            if key not in self._joint:
                self._joint[key] = joint_solution(self._moving.with_chain(chain), settings)
            return self._joint[key]
        solve = leanest_solution if attempt.is_leanest else solution_for
        return solve(chain, settings)

    def say(self, task: str) -> None:
        """Show what is being done."""
        if self._settings.progress is not None:
            self._settings.progress(task, 0.0)

    def predicted(self) -> Solution:
        """What the first attempt will be.

        Raises:
            InfeasibleBudgetError: where there is none.
        """
        return self._solution(Attempt(self.asked.memory_budget, moves=self.asked.moves), self._settings)

    def planned(self, accept: Accept) -> Planned:
        """What was accepted."""
        solution = self._solutions[accept.index]
        assert solution is not None
        priced = solution.on(corrected(self._chain, accept.more_bytes))
        seconds = self._seconds.get(accept.index)
        if self._moving is not None:
            self._moving.solved.clear()  # the plan keeps the rest
            is_timed = bool(seconds) and device_of(self._model).type == "cuda"
            priced = counted(as_timed(priced, seconds) if is_timed and seconds else priced, self._moving)
        else:
            priced = self._as_timed(priced, seconds)
        graphed = self._graphed.get(accept.index)
        refusal = "" if graphed is None else graphed.refusal
        notes = (*self._notes, *accept.notes, *([f"steps run without CUDA graphs: {refusal}"] if refusal else ()))
        if self._moving is not None and not self._settings.step_in_backward:
            clipping = format_seconds(clipping_seconds(priced, self._moving))
            notes = (
                *notes,
                f"the prediction is without clipping, which reads gradients on the host: about {clipping} more",
            )
        return Planned(
            self.split,
            priced,
            self._tier,
            accept.peak_bytes,
            notes,
            self._unknown_bytes,
            accept.more_bytes,
            accept.refusal,
            self._moving,
            uses_graphs=graphed is not None and not graphed.refusal,
        )

    def _as_timed(self, solution: Solution, seconds: float | None) -> Solution:
        """A schedule whose stages take as long together as in its trial step.

        On CUDA what the host does for a schedule, besides launching kernels, is in no measured stage.
        """
        if not seconds or not _is_timed(device_of(self._model)):
            return solution
        ratio = seconds / solution.seconds
        return solution.on(solution.chain.with_times(lambda one: one * ratio, lambda one: one * ratio))


def _tried(model: nn.Module, sample: Sample, planned: Planned, settings: Settings, *, num_timed: int = 0) -> Rehearsal:
    step = TrainingStep(
        sample,
        settings.loss,
        settings.optimizer,
        settings.grads_resident,
        settings.keeps_result,
        planned.chain.stages[-1].output_bytes if settings.keeps_result else 0,
        frozenset() if planned.moving is None else planned.moving.movable,
    )
    return rehearse(
        model,
        step,
        lambda: planned.execution(model, settings, is_trial=True),
        num_timed=num_timed,
        with_graphs=settings.cuda_graphs is not False and planned.moving is None,
    )


def corrected(chain: Chain, more_bytes: int) -> Chain:
    """The chain with so much more on the device all the time, or less.

    Where the base has less than is to be taken off (in a stage with large weights, activations go while gradients come;
    a chain counts the whole of both), the rest is taken off the optimizer's state: what is executed moves neither. What
    is left then is taken off what each computation takes besides its values, which is what a trial step can have shown
    to be counted too high: workspaces, and gradients that come while activations go.
    """
    base_bytes = max(0, chain.base_bytes + more_bytes)
    rest, stages = base_bytes - chain.base_bytes - more_bytes, []
    for stage in chain.stages:
        taken = min(rest, stage.optimizer_bytes)
        rest -= taken
        stages.append(replace(stage, optimizer_bytes=stage.optimizer_bytes - taken) if taken else stage)
    if rest:
        stages = [_with_less_extra(stage, rest) for stage in stages]
    return replace(chain, base_bytes=base_bytes, stages=tuple(stages))


def _with_less_extra(stage: Stage, less_bytes: int) -> Stage:
    """The stage where each computation takes so much less at its peak, as far as it takes more than its values."""
    lean = _with_less_in_backward(stage, less_bytes)
    variants = (_with_less_in_backward(variant, less_bytes) for variant in stage.variants)
    return replace(
        lean,
        forward_extra_bytes=max(0, stage.forward_extra_bytes - less_bytes),
        saving_extra_bytes=max(0, stage.saving_extra_bytes - less_bytes),
        variants=tuple(
            replace(variant, forward_extra_bytes=max(0, variant.forward_extra_bytes - less_bytes))
            for variant in variants
        ),
    )


_Variant = TypeVar("_Variant", Stage, Variant)


def _with_less_in_backward(way: _Variant, less_bytes: int) -> _Variant:
    """First less extra, then more of what is saved gone when the backward takes the most."""
    extra_bytes = max(0, way.backward_extra_bytes - less_bytes)
    freed_bytes = way.freed_bytes + less_bytes - (way.backward_extra_bytes - extra_bytes)
    return replace(way, backward_extra_bytes=extra_bytes, freed_bytes=min(way.saved_bytes, freed_bytes))


def _optimizer_step_bytes(model: nn.Module, chain: Chain, settings: Settings) -> int:
    """All that is there while the optimizer makes its step."""
    gradients = 0 if chain.grads_resident else sum(stage.weight_grad_bytes for stage in chain.stages)
    step_bytes = optimizer_step_bytes(settings.optimizer, model.parameters())
    return chain.fixed_bytes + gradients + step_bytes


def _unknown_loss_bytes(chain: Chain, settings: Settings) -> int:
    """Room for a loss that the caller computes and did not pass: what cross entropy takes, logarithms and their
    gradient, each as large as the result.

    A result that is a loss already is a number, whose gradient is a few bytes.
    """
    num_bytes = chain.gradient_bytes(chain.num_stages)
    return 2 * num_bytes if settings.loss is None and num_bytes > _LARGEST_NUMBER_BYTES else 0
