"""Measures, solves and runs trial steps, as the policy asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeVar

import torch
from torch import nn

from lowtide.chain import Chain, Stage, Variant
from lowtide.errors import InfeasibleBudgetError, ScheduleError
from lowtide.runtime.compile.compiled import Compilation, CompiledModel
from lowtide.runtime.compile.regions import not_one_graph
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.fitting.moving import (
    Moving,
    as_timed,
    clipping_seconds,
    counted,
    host_bytes_of,
    joint_solution,
    moves_in_any_case,
    moving_chain,
)
from lowtide.runtime.fitting.planning import (
    WITH_ROOM_FOR_ALL,
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
from lowtide.runtime.fitting.rehearsal import Graphed, Rehearsal, TrainingStep, let_go, numbers_of_step, rehearse
from lowtide.runtime.fitting.solving import Settings, leanest_solution, solution_for
from lowtide.runtime.measure.measure import capture_for, measure_split
from lowtide.runtime.measure.stage_figures import StageFigures
from lowtide.runtime.measure.variants import Numbers, in_one_line
from lowtide.runtime.measure.weights import optimizer_step_bytes
from lowtide.runtime.model.processes import is_distributed
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

# The host is said to be in the way where a trial step takes so many times what its stages take on the device. Eager
# steps of a GPT and of ViT-L on an H200 took 2 to 5 % longer than predicted, some of ResNet-101 and DenseNet-201, with
# small kernels, 1.5 to 1.7 times as long.
_HELD_UP = 1.25


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
            execution.weights.stand_in(self.moving.state_bytes, self.moving.step_bytes_by_stage)
        return execution


@dataclass(frozen=True, slots=True)
class RealStep:
    """A step under a schedule that took more than the budget."""

    planned: Planned
    peak_bytes: int

    def unknown_bytes(self, chain: Chain) -> int:
        """What no trial step has: what the step took beyond what it is expected to take, measured anew."""
        before = self.planned
        now = replace(chain, base_bytes=chain.base_bytes + before.unknown_bytes)
        try:
            expected = before.solution.on(corrected(now, before.more_bytes)).peak_bytes
        except ScheduleError:  # it has other stages, or runs variants that are not there this time
            expected = before.solution.peak_bytes
        return before.unknown_bytes + max(0, self.peak_bytes - expected)


def is_timed(device: torch.device) -> bool:
    """Whether trial steps are timed there: those on a CPU are not."""
    return device.type == "cuda"


def impossible() -> tuple[type[Exception], ...]:
    """The errors that say that a model cannot be compiled in some way, or does not fit so."""
    return InfeasibleBudgetError, torch.OutOfMemoryError, *not_one_graph()


def least_refusal(refused: list[tuple[int, str]], budget: int, reason: str = "") -> InfeasibleBudgetError:
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


def planned_after(
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
    """A tried schedule with room for what a real step has shown; nothing of its trials is left on the device.

    Raises:
        InfeasibleBudgetError: see `tried_schedule`.
    """
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
            note = f"blocks are compiled one by one, because the model has no regions: {in_one_line(error)}"
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
        blocks=compilation is not None or settings.in_blocks,
        finest=settings.finest,
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
    if not moves_in_any_case(model, settings):
        return accepted(Trials(model, sample, split, chain, settings, tier, unknown_bytes), goes_on=goes_on)
    moving = moving_chain(model, split, chain, settings)
    trials = Trials(model, sample, split, moving.chain, settings, tier, unknown_bytes, moving)
    return accepted(trials, goes_on=goes_on)


def accepted(trials: Trials, *, goes_on: bool = False) -> Planned:
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


class Trials:
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
        self.unknown_bytes = max(loss_bytes + rounding_bytes, unknown_bytes)
        """Left for what no trial step has."""
        self._chain = replace(chain, base_bytes=chain.base_bytes + self.unknown_bytes)
        self._solutions: list[Solution | None] = []
        self._graphed: dict[int, Graphed] = {}
        """By the attempt's place, what became of replaying its steps as CUDA graphs."""
        self._joint: dict[tuple[int, int, bool], Solution] = {}
        """By the budget, its correction and whether it is the leanest, what was solved for where weights move."""
        self._seconds: dict[int, float] = {}
        """By the attempt's place, how long a trial step took."""
        self.asked = Asked(
            settings.memory_budget,
            moves=settings.bandwidth > 0,
            moves_weights=moving is not None,
            is_auto=settings.strategy == AUTO and moving is None,
            update_bytes=0 if moving is not None else _optimizer_step_bytes(model, chain, settings),
            other_bytes=chain.base_bytes,
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
        peak_bytes = measured.peak_bytes + self.unknown_bytes
        if self._moving is not None:
            # A trial step moves what the optimizer's step moves, takes the room of that step, and leaves it out, which
            # would change the weights: that it takes less than predicted says little. A correction of the prediction is
            # the difference between both, and is not counted twice.
            peak_bytes = max(peak_bytes, counted(solution.on(self._chain), self._moving).peak_bytes)
        seconds, graphed = measured.seconds, measured.graphed
        if graphed is not None:
            if settings.cuda_graphs == AUTO and not graphed.refusal and graphed.seconds >= seconds:
                graphed = replace(graphed, refusal="a trial showed that they are not faster")
            self._graphed[len(self._solutions) - 1] = graphed
        if graphed is not None and not graphed.refusal:
            seconds, peak_bytes = graphed.seconds, max(peak_bytes, graphed.peak_bytes + self.unknown_bytes)
        self._seconds[len(self._solutions) - 1] = seconds
        return replace(found, peak_bytes=peak_bytes, seconds=seconds)

    def _solution(self, attempt: Attempt, settings: Settings) -> Solution:
        if attempt.again is not None:
            solution = self._solutions[attempt.again]
            assert solution is not None
            return solution
        chain = corrected(self._chain, attempt.more_bytes)
        if self._moving is not None:
            key = (settings.memory_budget, attempt.more_bytes, attempt.is_leanest)
            if key not in self._joint:
                moving = self._moving.with_chain(chain)
                self._joint[key] = joint_solution(moving, settings, is_leanest=attempt.is_leanest)
            return self._joint[key]
        solve = leanest_solution if attempt.is_leanest else solution_for
        return solve(chain, settings)

    def with_room_for_all(self) -> Planned:
        """A tried schedule that has room for everything, whether or not it stays within the budget.

        Raises:
            torch.OutOfMemoryError: where its trial step runs out of memory.
        """
        tried = self.outcome(WITH_ROOM_FOR_ALL)
        assert isinstance(tried, Trial)
        found = self.planned(Accept(len(self._solutions) - 1, 0, tried.peak_bytes))
        return replace(found, more_bytes=tried.peak_bytes - tried.predicted_bytes)

    def numbers(self, planned: Planned) -> Numbers:
        """What a step under one of these plans gives; see `numbers_of_step`."""
        return numbers_of(self._model, self._sample, planned, self._settings)

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
        notes = (*notes, *self._notes_on_launching(solution, seconds))
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
            self.unknown_bytes,
            accept.more_bytes,
            accept.refusal,
            self._moving,
            uses_graphs=graphed is not None and not graphed.refusal,
        )

    def _notes_on_launching(self, solution: Solution, seconds: float | None) -> tuple[str, ...]:
        """What to do where launching on the host, and not the device, decides how long a schedule takes, as far as what
        its stages take on the device is known.
        """
        on_device = sum(map(sum, self._chain.provenance.get("device_seconds", ())))
        if not seconds or not on_device or not is_timed(device_of(self._model)):
            return ()
        if self._settings.cuda_graphs is not False or is_distributed() or solution.trace.moved_bytes:
            return ()  # they are used, cannot be, or copies may be what takes so long
        expected = solution.seconds * on_device / self._chain.compute_seconds
        if seconds <= _HELD_UP * expected:
            return ()
        return (
            f"a trial step took {format_seconds(seconds)}, and the device alone would take about "
            f'{format_seconds(expected)}: the host is slower to launch kernels; try cuda_graphs="auto"',
        )

    def _as_timed(self, solution: Solution, seconds: float | None) -> Solution:
        """A schedule whose stages take as long together as in its trial step.

        On CUDA what the host does for a schedule, besides launching kernels, is in no measured stage.
        """
        if not seconds or not is_timed(device_of(self._model)):
            return solution
        ratio = seconds / solution.seconds
        return solution.on(solution.chain.with_times(lambda one: one * ratio, lambda one: one * ratio))


def _tried(model: nn.Module, sample: Sample, planned: Planned, settings: Settings, *, num_timed: int = 0) -> Rehearsal:
    return rehearse(
        model,
        _step_of(sample, planned, settings),
        lambda: planned.execution(model, settings, is_trial=True),
        num_timed=num_timed,
        with_graphs=settings.cuda_graphs is not False and planned.moving is None,
    )


def numbers_of(
    model: nn.Module, sample: Sample, planned: Planned, settings: Settings, *, draws_before: bool = False
) -> Numbers:
    """What a step under a plan gives; see `numbers_of_step`."""
    execution = planned.execution(model, settings, is_trial=True)
    return numbers_of_step(model, _step_of(sample, planned, settings), execution, draws_before=draws_before)


def _step_of(sample: Sample, planned: Planned, settings: Settings) -> TrainingStep:
    return TrainingStep(
        sample,
        settings.loss,
        settings.optimizer,
        settings.grads_resident,
        settings.keeps_result,
        planned.chain.stages[-1].output_bytes if settings.keeps_result else 0,
        frozenset() if planned.moving is None else planned.moving.movable,
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
