"""Finds a plan for a model and a budget: compiled or not, activations and weights moved or not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError
from lowtide.runtime.compile.compiled import CompiledModel
from lowtide.runtime.compile.regions import many_compilations
from lowtide.runtime.fitting.compiling import CompiledPlanning
from lowtide.runtime.fitting.moving import (
    STRATEGY,
    could_be_faster,
    is_faster,
    moving_chain,
    resident_bytes,
    seconds_with_updates,
    why_not,
)
from lowtide.runtime.fitting.rehearsal import let_go
from lowtide.runtime.fitting.solving import Settings, cuts_the_peak, leanest_of, solution_for
from lowtide.runtime.fitting.trials import (
    Planned,
    RealStep,
    Trials,
    accepted,
    is_timed,
    least_refusal,
    measured_for,
    planned_after,
)
from lowtide.runtime.measure.measure import capture_for
from lowtide.runtime.measure.stage_figures import StageFigures
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import device_of
from lowtide.runtime.transfer.cargo import Tier
from lowtide.strategies.base import AUTO
from lowtide.units import format_bytes, format_seconds


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
    stages take is counted from above where they may, so that allowing it could cost memory. Where that does not help
    either, the model is cut more finely, if that cuts the stage in which the leanest schedule takes the most. After
    that, or where a trial shows that it is faster, weights, gradients and optimizer state move to the host, if they
    may; the model is cut more finely for that, too, where it must be.

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
    reason = why_not(model, settings) if settings.strategy == AUTO else ""
    may_move = settings.may_move and settings.strategy == AUTO and not reason
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
            return CompiledPlanning(model, sample, settings, after, tier=tier, goes_on=accepts).plan()
    of_kind: dict[str, StageFigures] = {}  # what stages take by themselves is the same in all ways
    ways = _ways(settings, may_move=may_move)
    measured: dict[tuple[bool, bool], tuple[Split, Chain]] = {}  # by whether values may move, and whether cut finely
    refused: list[tuple[int, str]] = []
    with_offloading = 0  # the least of the ways in which values may move

    @cache
    def finest() -> Split:
        visits = settings.placed is not None
        return capture_for(lambda _: None, model, sample, without_running=visits, loss=settings.loss, finest=True)[0]

    for way in ways:
        moves, accepts = way.bandwidth > 0, goes_on and way is ways[-1]
        if way.finest and not goes_on and not _frees_more(finest(), way, *measured[moves, False]):
            continue
        if (moves, way.finest) not in measured:
            split, (chain, _) = measured_for(model, sample, way, of_kind)
            measured[moves, way.finest] = split, chain
        split, chain = measured[moves, way.finest]
        try:
            found = planned_after(model, sample, split, chain, way, after, tier=tier, goes_on=accepts)
        except InfeasibleBudgetError as error:
            least = error.minimum_bytes
            is_alone = way.bandwidth != settings.bandwidth
            if not is_alone:
                with_offloading = min(least, with_offloading or least)
            refused.append((least, _below_alone(settings, least, with_offloading) if is_alone else str(error)))
            continue
        if way.strategy == STRATEGY != settings.strategy:
            found = _explained(found, min(least for least, _ in refused))
        elif may_move and after is None and moves:
            found = _with_weights_moved(found, model, sample, chain, way, tier)
        return found, None
    raise least_refusal(refused, settings.memory_budget, reason if settings.bandwidth else "")


def _ways(settings: Settings, *, may_move: bool) -> list[Settings]:
    """What is tried in turn, as long as nothing stays within the budget."""
    ways = [settings]
    if settings.bandwidth and settings.strategy == AUTO:
        ways.append(replace(settings, bandwidth=0))
    moved = [replace(settings, strategy=STRATEGY)] if may_move else []
    if settings.stages is None:
        ways, moved = ([*some, *(replace(way, finest=True) for way in some)] for some in (ways, moved))
    return ways + moved


def _frees_more(finest: Split, settings: Settings, split: Split, chain: Chain) -> bool:
    """Whether the finest split may need less than this one: mostly so where weights move, and the leanest such schedule
    is not worth solving for twice.
    """
    if settings.strategy == STRATEGY:
        return len(finest.stages) > len(split.stages)
    leanest = leanest_of(lambda memory_budget: solution_for(chain, replace(settings, memory_budget=memory_budget)))
    return cuts_the_peak(finest, split, leanest)


def _with_weights_moved(
    found: Planned, model: nn.Module, sample: Sample, chain: Chain, settings: Settings, tier: Tier
) -> Planned:
    """A plan that moves activations alone, or one that moves weights, too, where trial steps show that it is faster."""
    if not is_timed(device_of(model)) or not could_be_faster(found.solution, chain, settings):
        return found
    asked = replace(settings, strategy=STRATEGY)
    moving = moving_chain(model, found.split, chain, asked)
    trials = Trials(model, sample, found.split, moving.chain, asked, tier, found.unknown_bytes, moving)
    try:
        if not is_faster(found.solution.on(chain), trials.predicted(), moving):
            return found
        other = accepted(trials)
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
