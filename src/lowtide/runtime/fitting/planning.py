"""From a model and a budget to a schedule that has been tried: measure, solve, rehearse, correct."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError, LowtideWarning
from lowtide.runtime.compile.compiled import CompiledStages, many_compilations
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.fitting.limits import optimizer_step_bytes
from lowtide.runtime.fitting.rehearsal import Rehearsal, Step, let_go, rehearse
from lowtide.runtime.fitting.solving import Settings, host_bytes, leanest_solution, solution_for
from lowtide.runtime.measure.measure import capture_for, measure_split
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import device_of, tier_for
from lowtide.schedule import Offload
from lowtide.solve import Solution
from lowtide.strategies.base import AUTO
from lowtide.units import format_bytes, format_seconds

# A prediction that is off by more than this is corrected, and what it leaves of the budget used; 5 % are promised.
_TOLERANCE = 0.02

# A gradient no larger than this is that of a single number, a loss: the largest dtype has 16 bytes.
_LARGEST_NUMBER_BYTES = 16

# Left on CUDA for what differs between the trial and real steps: one of ResNet-50 was seen to take 3.4 MiB more than
# predicted on an H200. Presumably the allocator's: it gives out up to a megabyte more than was asked for where it has a
# block of about that size, and which blocks it has differs.
_ROUNDING_BYTES = 4 * 2**20

# How much less is planned for where a trial step ran out of memory although the budget would hold. An allocator cannot
# use every byte: blocks of many sizes leave gaps. A tenth is also what is left by default.
_LEFT_FOR_GAPS = 0.1
_MOST_TIMES_OUT_OF_MEMORY = 3

# Each correction may choose another schedule; after these, the best that was seen to stay within the budget is taken,
# or, where there is none yet, the first that will be. On an H200 three schedules in a row were seen to take some more
# than the budget, the last of them 3.4 MiB, each after a correction.
_MOST_REHEARSALS = 3
_MOST_WITHOUT_SUCCESS = 8

# Copies are kept without timing recomputation alone only where that is predicted to take so much longer than a trial
# step with them took: predictions are off, too.
_CLOSE = 1.25

# Steps that are timed to tell two schedules apart.
_NUM_TIMED = 3


# Blocks of ResNet-101 in fp32, 500 px, compiled one by one on an H200: 59 ms on the device as it is, and 39 ms so.
_LAYOUT_ADVICE = (
    "each compiled block copies its pictures into another layout, and back; convert once: "
    "model.to(memory_format=torch.channels_last), and the pictures likewise"
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule for a model and a call, and what is known of it."""

    split: Split
    solution: Solution
    rehearsed_peak_bytes: int | None
    notes: tuple[str, ...]

    @property
    def chain(self) -> Chain:
        """What the stages cost, corrected where a rehearsal showed more or less."""
        return self.solution.chain

    def execution(self, model: nn.Module, settings: Settings, handler: Callable[..., Any]) -> Execution:
        """The schedule, ready to be put in place."""
        schedule = self.solution.schedule
        tier = tier_for(model, settings.host_memory_budget, host_bytes(self.chain, schedule))
        return Execution(model, self.split, schedule, self.chain, tier, handler, checks=settings.checks)


def plan_for(model: nn.Module, sample: Sample, settings: Settings) -> tuple[Planned, CompiledStages | None]:
    """Measure, solve, try the schedule in one step, and correct the prediction where it was off."""
    with many_compilations() if settings.compilation is not None else nullcontext():
        split, (chain, compiled) = measured_for(model, sample, settings)
        try:
            planned = _rehearsed_on_the_device(model, sample, split, chain, settings)
            let_go(device_of(model))
            return planned, compiled
        except BaseException:
            if compiled is not None:
                compiled.remove()
            raise


def measured_for(
    model: nn.Module, sample: Sample, settings: Settings
) -> tuple[Split, tuple[Chain, CompiledStages | None]]:
    """The stages of a model and what they cost, compiled where that was asked for; compiled stages stay in place."""
    compilation = settings.compilation

    def work(split: Split) -> tuple[Chain, CompiledStages | None]:
        compiled = None if compilation is None else compilation.of(model, split)
        if compiled is not None and compiled.copies_pictures(sample.tensors()):
            warnings.warn(_LAYOUT_ADVICE, LowtideWarning, stacklevel=2)
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
            )
        except BaseException:
            if compiled is not None:
                compiled.remove()
            raise
        if compiled is not None:
            compiled.settle_loss()
        return chain, compiled

    return capture_for(work, model, sample, stages=settings.stages, loss=settings.loss, blocks=compilation is not None)


def _rehearsed_on_the_device(
    model: nn.Module, sample: Sample, split: Split, chain: Chain, settings: Settings
) -> Planned:
    """A schedule that a trial step has shown to stay within the budget, and the device to have the memory for.

    Where a trial step runs out of memory, less is planned for; at the least, what the leanest schedule takes.

    Raises:
        torch.OutOfMemoryError: where trial steps ran out of memory time and again.
    """
    notes: list[str] = []
    refused: Callable[[], InfeasibleBudgetError] | None = None  # an error kept here would keep the batch
    while True:
        try:
            planned = _rehearsed(model, sample, split, chain, settings)
            return dataclasses.replace(planned, notes=(*planned.notes, *notes))
        except torch.OutOfMemoryError:
            if refused is not None:
                raise refused() from None
            if len(notes) == _MOST_TIMES_OUT_OF_MEMORY:
                raise
            failed = settings.memory_budget
            budget = int(failed * (1 - _LEFT_FOR_GAPS))
        except InfeasibleBudgetError as error:
            if not notes:
                raise
            if refused is not None:
                raise refused() from None
            message = f"{'; '.join(notes)}, and {error}"
            refused = partial(InfeasibleBudgetError, message, minimum_bytes=error.minimum_bytes)
            if error.minimum_bytes >= failed:
                raise refused() from None
            notes.pop()
            budget = error.minimum_bytes  # a tenth less was too much less
        settings = dataclasses.replace(settings, memory_budget=budget)
        notes.append(
            f"within {format_bytes(failed)} a trial step ran out of device memory: others use it, or the allocator "
            "lost some between its blocks (less with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True); planned for "
            f"{format_bytes(budget)}"
        )


def _rehearsed(model: nn.Module, sample: Sample, split: Split, chain: Chain, settings: Settings) -> Planned:
    """The fastest schedule that a trial step has shown to stay within the budget.

    A schedule that copies may be predicted to be the leanest and take more than recomputation alone when it is tried.
    """
    _check_optimizer_step(model, sample, split, chain, settings)
    try:
        return _rehearsed_as_asked(model, sample, split, chain, settings)
    except InfeasibleBudgetError as error:
        if settings.strategy != AUTO or not settings.bandwidth:
            raise
        try:
            return _rehearsed_as_asked(model, sample, split, chain, dataclasses.replace(settings, bandwidth=0))
        except InfeasibleBudgetError as alone:
            if error.minimum_bytes <= alone.minimum_bytes:
                raise error from None
            raise InfeasibleBudgetError(  # its own message would advise to allow offloading
                f"budget {format_bytes(settings.memory_budget)} ({settings.memory_budget} bytes) is below the "
                f"{format_bytes(alone.minimum_bytes)} ({alone.minimum_bytes} bytes) that this model needs at the "
                f"least, by recomputation alone (with offloading {format_bytes(error.minimum_bytes)}); raise it",
                minimum_bytes=alone.minimum_bytes,
            ) from None


def _rehearsed_as_asked(model: nn.Module, sample: Sample, split: Split, chain: Chain, settings: Settings) -> Planned:
    best: Planned | None = None
    notes: list[str] = list(chain.provenance.get("notes", ()))
    loss_bytes, after_bytes = _unknown_loss_bytes(chain, settings), _optimizer_step_bytes(model, chain, settings)
    if loss_bytes:
        notes.append(
            f"the loss is not known (loss=): {format_bytes(loss_bytes)}, a copy of the result, are left for it"
        )
    unknown_bytes = loss_bytes + (_ROUNDING_BYTES if device_of(model).type == "cuda" else 0)
    chain = dataclasses.replace(chain, base_bytes=chain.base_bytes + unknown_bytes)
    for tried in range(_MOST_WITHOUT_SUCCESS):
        if best is not None and tried >= _MOST_REHEARSALS:
            break
        try:
            solution = solution_for(chain, settings)
        except InfeasibleBudgetError as error:
            if best is not None:
                break  # a corrected prediction fits no more; what was seen to fit does
            best = _leanest(error, model, sample, split, chain, settings, unknown_bytes, after_bytes, tuple(notes))
            notes, chain = list(best.notes), best.chain  # with less predicted, there may be a quicker one
            continue
        planned = Planned(split, solution, None, tuple(notes))
        try:
            measured = _tried(model, sample, planned, settings).peak_bytes + unknown_bytes
        except torch.OutOfMemoryError:
            if best is None:
                raise
            break  # a corrected prediction was too bold; what was seen to fit does
        planned = dataclasses.replace(planned, rehearsed_peak_bytes=measured)
        off = measured - solution.peak_bytes
        fits = measured <= settings.memory_budget
        if fits and (best is None or solution.seconds < best.solution.seconds):
            best = planned
        if abs(off) <= _TOLERANCE * measured and fits:
            break
        notes.append(_correction(measured, solution.peak_bytes))
        if not fits and tried:
            off *= 2  # schedules differ in how far they are off: leave room for that
        chain = corrected(chain, off)
        if best is planned:
            best = dataclasses.replace(planned, solution=solution.on(chain), notes=tuple(notes))
    if best is None:
        raise InfeasibleBudgetError(
            f"budget {format_bytes(settings.memory_budget)} ({settings.memory_budget} bytes) was exceeded by every "
            f"schedule that was tried; {format_bytes(measured)} ({measured} bytes) would do for the last one",
            minimum_bytes=measured,
        )
    return _no_slower_than_recomputing(best, model, sample, settings, unknown_bytes)


def _tried(model: nn.Module, sample: Sample, planned: Planned, settings: Settings, *, num_timed: int = 0) -> Rehearsal:
    step = Step(sample, settings.loss, settings.optimizer, settings.grads_resident, settings.keeps_result)
    return rehearse(model, step, lambda handler: planned.execution(model, settings, handler), num_timed=num_timed)


def _no_slower_than_recomputing(
    best: Planned, model: nn.Module, sample: Sample, settings: Settings, unknown_bytes: int
) -> Planned:
    """Where recomputation alone is predicted to come close to what a schedule that copies takes, both are timed.

    What copies cost besides the link, above all the time to launch them, is in no chain: steps with copies were seen to
    take 1.4 to 29 % longer than predicted on an H200, and 50 % longer where the host sets the pace.
    """
    moves = any(isinstance(operation, Offload) for operation in best.solution.schedule.operations)
    if settings.strategy != AUTO or not moves:
        return best
    try:
        solution = solution_for(best.chain, dataclasses.replace(settings, bandwidth=0))
    except InfeasibleBudgetError:
        return best
    copying = _tried(model, sample, best, settings, num_timed=_NUM_TIMED)
    if solution.seconds > _CLOSE * copying.seconds:
        return best
    alone = Planned(best.split, solution, None, best.notes)
    try:
        tried = _tried(model, sample, alone, settings, num_timed=_NUM_TIMED)
    except torch.OutOfMemoryError:
        return best  # which was seen to fit
    peak = tried.peak_bytes + unknown_bytes
    if peak > settings.memory_budget or copying.seconds <= tried.seconds:
        return best
    note = (
        f"with offloading a trial step took {format_seconds(copying.seconds)}, by recomputation alone "
        f"{format_seconds(tried.seconds)}: nothing is offloaded"
    )
    return dataclasses.replace(alone, rehearsed_peak_bytes=peak, notes=(*best.notes, note))


def _leanest(
    error: InfeasibleBudgetError,
    model: nn.Module,
    sample: Sample,
    split: Split,
    chain: Chain,
    settings: Settings,
    unknown_bytes: int,
    after_bytes: int,
    notes: tuple[str, ...],
) -> Planned:
    """The leanest schedule, where a trial step shows that it takes less than predicted and stays within the budget.

    Raises:
        InfeasibleBudgetError: otherwise, with the least budget that the trial step has shown to be enough.
    """
    least = dataclasses.replace(settings, memory_budget=error.minimum_bytes)
    try:
        solution = leanest_solution(chain, least)
        measured = _tried(model, sample, Planned(split, solution, None, ()), least).peak_bytes + unknown_bytes
    except (InfeasibleBudgetError, torch.OutOfMemoryError):
        try:
            raise error from None
        finally:
            del error  # its traceback has this frame, and with it the batch
    if measured <= settings.memory_budget:
        note = _correction(measured, solution.peak_bytes)
        lower = corrected(chain, measured - solution.peak_bytes)
        return Planned(split, solution.on(lower), measured, (*notes, note))
    room = _ROUNDING_BYTES if device_of(model).type == "cuda" else 0  # trial steps differ, too
    least_bytes = max(measured, min(measured + room, error.minimum_bytes), after_bytes)
    advice = "raise it" if settings.bandwidth else "raise it, or allow offloading"
    raise InfeasibleBudgetError(
        f"budget {format_bytes(settings.memory_budget)} ({settings.memory_budget} bytes) is below the "
        f"{format_bytes(least_bytes)} ({least_bytes} bytes) that this model needs at the least, by a trial step of its "
        f"leanest schedule; {advice}",
        minimum_bytes=least_bytes,
    ) from None


def corrected(chain: Chain, more_bytes: int) -> Chain:
    """The chain with so much more on the device all the time, or less.

    Where the base has less than is to be taken off (in a stage with large weights, activations go while gradients come;
    a chain counts the whole of both), the rest is taken off the optimizer's state: what is executed moves neither.
    """
    base_bytes = max(0, chain.base_bytes + more_bytes)
    rest, stages = base_bytes - chain.base_bytes - more_bytes, []
    for stage in chain.stages:
        taken = min(rest, stage.optimizer_bytes)
        rest -= taken
        stages.append(dataclasses.replace(stage, optimizer_bytes=stage.optimizer_bytes - taken) if taken else stage)
    return dataclasses.replace(chain, base_bytes=base_bytes, stages=tuple(stages))


def _correction(measured_bytes: int, predicted_bytes: int) -> str:
    """The note of a trial step that was not as predicted."""
    return (
        f"a trial step took {format_bytes(measured_bytes)} where {format_bytes(predicted_bytes)} was predicted; the "
        "prediction was corrected"
    )


def _check_optimizer_step(model: nn.Module, sample: Sample, split: Split, chain: Chain, settings: Settings) -> None:
    """After backward all gradients are there, and the optimizer's step takes some more: no schedule helps there.

    Raises:
        InfeasibleBudgetError: where that alone is more than the budget; `minimum_bytes` is enough for a schedule, too.
    """
    least = enough = _optimizer_step_bytes(model, chain, settings)
    if least <= settings.memory_budget:
        return
    try:
        solution_for(chain, settings)
    except InfeasibleBudgetError as error:
        if error.minimum_bytes >= least:
            return  # refused by whoever solves next, with that figure
    try:
        _rehearsed(model, sample, split, chain, dataclasses.replace(settings, memory_budget=least))
    except InfeasibleBudgetError as error:
        enough = error.minimum_bytes  # a trial step takes more than predicted
    except torch.OutOfMemoryError:
        pass
    raise InfeasibleBudgetError(
        f"budget {format_bytes(settings.memory_budget)} ({settings.memory_budget} bytes) is below the "
        f"{format_bytes(least)} ({least} bytes) that parameters, gradients and the optimizer's state and step take by "
        f"themselves; raise it{f' to {enough} bytes' if enough > least else ''}, or use a leaner optimizer",
        minimum_bytes=enough,
    )


def _optimizer_step_bytes(model: nn.Module, chain: Chain, settings: Settings) -> int:
    """All that is there while the optimizer makes its step."""
    gradients = 0 if chain.grads_resident else sum(stage.weight_grad_bytes for stage in chain.stages)
    step_bytes = optimizer_step_bytes(settings.optimizer, model.parameters(), device_of(model))
    return chain.fixed_bytes + gradients + step_bytes


def _unknown_loss_bytes(chain: Chain, settings: Settings) -> int:
    """Room for a loss that the caller computes and did not hand over: most make one more tensor like the result.

    A result that is a loss already is a number, whose gradient is a few bytes.
    """
    num_bytes = chain.gradient_bytes(chain.num_stages)
    return num_bytes if settings.loss is None and num_bytes > _LARGEST_NUMBER_BYTES else 0
