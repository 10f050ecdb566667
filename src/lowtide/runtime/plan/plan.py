"""A plan: what `lowtide.fit`, `lowtide.attach` and `lowtide.load_plan` return."""

from __future__ import annotations

import html
import logging
import os
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad

from lowtide.chain import Chain
from lowtide.errors import CaptureError, ExecutionError, InfeasibleBudgetError, LowtideWarning, PlanError
from lowtide.files import write_json
from lowtide.report.page import Measured, write_report
from lowtide.report.survey import DEFAULT_PATIENCE_SECONDS
from lowtide.report.text import chart_text
from lowtide.runtime.compile.compiled import CompiledModel
from lowtide.runtime.compile.cutting import FoundLateError
from lowtide.runtime.compile.regions import not_one_graph
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.execute.machine import Counters
from lowtide.runtime.graphs.steps import GraphedSteps
from lowtide.runtime.measure.variants import in_one_line
from lowtide.runtime.measure.weights import Optimizer
from lowtide.runtime.meter import Meter
from lowtide.runtime.model.bypass import WRAPPER_EXISTS, has_compiled_wrapper
from lowtide.runtime.model.containers import tensors_of
from lowtide.runtime.model.interception import handler_of
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.signature import FIT_AGAIN, Signature, Structure, fingerprint, trained_of, trains_no_more
from lowtide.runtime.plan.steps import RealSteps, drop_aborted_backward
from lowtide.runtime.plan.text import parked_text, plan_text, stats_text
from lowtide.schedule import Schedule
from lowtide.simulate import simulate
from lowtide.units import format_bytes, format_seconds

FORMAT = "lowtide.plan/1"

# Plans for other shapes are kept, the least recently used goes first: enough for a few buckets of sequence lengths.
_NUM_KEPT = 8

# How often what real steps took is planned for: each time with what the last plan has shown. More was never needed.
_MOST_CORRECTIONS = 3

# What steps take is said again where it is so much more than was said: predictions are promised to be as close.
_MORE_THAN_SAID = 1.05

LOGGER = logging.getLogger("lowtide")


@dataclass(frozen=True, slots=True)
class Stats:
    """Predicted and measured figures; None if not known (yet)."""

    num_steps: int
    predicted_seconds: float | None
    measured_seconds: float | None
    """From the start of forward to the end of backward, the median of the last steps; where weights move, to the end of
    the optimizer's step.
    """
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    """Of all the steps that `num_steps` counts, whatever was planned in between: on CUDA the allocator's peak, unless
    it was reset; on the CPU the peak of all live tensors, over the first steps and some later ones. Before the first
    step, that of the trial.
    """
    recomputed_per_step: float
    """How many stages are recomputed in a step."""
    moved_bytes_per_step: float
    """Bytes copied between device and host in a step, both ways."""

    def __str__(self) -> str:
        return stats_text(self)


@dataclass(slots=True)
class Part:
    """What a plan does for one signature of calls.

    Args:
        execution: the schedule in place.
        signature: the calls that it is for; None: any.
        memory_budget: the budget that it was solved for.
        bandwidth: that it was solved for.
        rehearsed_peak_bytes: what a trial step took, where there was one.
        notes: what people should know of it.
        compiled: its stages, where they are compiled.
        checked: the calls for which its variants were checked; None: those of the signature.
        grads_resident: gradients may be there when a forward begins.
        peak_bytes: the most that a step under it was seen to take.
        refusal: why steps take more than the budget, where nothing more can be done.
        said_bytes: what was said that they take.
        graphs: runs its steps as CUDA graphs; None: they run as ever.
    """

    execution: Execution
    signature: Signature | None = None
    memory_budget: int | None = None
    bandwidth: int = 0
    rehearsed_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    compiled: CompiledModel | None = None
    checked: Signature | None = None
    grads_resident: bool = False
    peak_bytes: int = 0
    refusal: str = ""
    said_bytes: int = 0
    graphs: GraphedSteps | None = None

    @property
    def num_steps(self) -> int:
        """Steps that ran under it."""
        return self.execution.machine.counters.num_steps

    @property
    def predicted_bytes(self) -> int:
        """The peak that its schedule was predicted to have; 0: not known."""
        predicted = self.execution.schedule.predicted
        return 0 if predicted is None else predicted.peak_bytes

    def serves(self, signature: Signature) -> bool:
        """Whether it can be used for a call: one that needs no more than the planned one, and the same one where there
        are variants. A compiler chooses anew for each shape what a variant computes again, and for another shape that
        may be a random number.
        """
        if self.signature is None or self.signature == signature:
            return True
        return signature.fits_within(self.signature) and not self.execution.has_variants


_dtype = attrgetter("dtype")
_grad = attrgetter("grad")
_is_leaf = attrgetter("is_leaf")


@dataclass(frozen=True, slots=True)
class Observed:
    """What real steps have shown so far.

    Args:
        optimizer: the one, or those, that step the model's parameters; None: they do not have all of them.
        grads_resident: gradients were there when a forward began.
        exceeded: the part under which a step took more than its budget; None: none did.
        peak_bytes: what that step took.
        has_regions: the model is one graph; it may turn out later that it is not.
    """

    optimizer: Optimizer = None
    grads_resident: bool = False
    exceeded: Part | None = None
    peak_bytes: int = 0
    has_regions: bool = True


class Planner(Protocol):
    """Makes further parts during training; `lowtide.fit` leaves one with its plan. It never calls the plan."""

    @property
    def missing(self) -> str:
        """The arguments of `fit` that tell more of the loop and were not given, for a message."""

    def part_for(self, sample: Sample, observed: Observed) -> Part:
        """A part for a call of the model, which has no plan in place meanwhile. Training is under way: where no
        schedule stays within the budget it is the leanest, with the reason.
        """

    def remove(self) -> None:
        """Take out of the model what parts need there besides their executions: compiled stages."""


class Plan:
    """A schedule attached to a model.

    The model object is the user's own, with its type, its parameter names and its state; it is used as before. A call
    runs under the schedule where the model is in training mode and gradients are enabled, and plainly otherwise.

    Args:
        model: the model; it has no other plan.
        part: what to do for the first calls.
        planner: makes parts for calls of another signature; None: they are refused, where the first part has one.
        replan: whether the planner is asked for other signatures, too; else only where a step exceeds the budget.
        on_detach: called at the end of `detach`.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        planner: Planner | None = None,
        *,
        replan: bool = True,
        on_detach: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self._on_detach = on_detach
        self._part = part
        self._planner = planner
        self._replans = replan and planner is not None
        self._others: OrderedDict[Signature, Part] = OrderedDict()
        self._structure = Structure(model)
        self._note_parameters(self._structure.parameters())
        self._dtypes = list(map(_dtype, self._parameters))
        self._parameter_bytes, self._has_larger_parameters = _num_bytes(self._parameters), False
        self._grads_resident = False
        self._ignores_settings = False
        self._num_by_settings = 0
        self._num_exceeded = 0
        self._num_ended = 0  # steps of the current part, when its last call began
        self._said_planning = self._said_optimizer = False
        self._earlier = Counters()
        self._most_bytes = 0  # that any real step took, under whichever part
        part.execution.install(self._call)
        # Weights that the schedule keeps on the host have left by now: they belong to no step.
        self._steps = RealSteps(model, part.execution.machine.device, part.memory_budget)
        self._attached = True
        if has_compiled_wrapper(model):
            _warn(WRAPPER_EXISTS)

    # What it is

    @property
    def is_attached(self) -> bool:
        """Whether the model runs under it."""
        return self._attached

    @property
    def split(self) -> Split:
        """Which submodules make which stage."""
        return self._part.execution.split

    @property
    def schedule(self) -> Schedule:
        """The list of operations."""
        return self._part.execution.schedule

    @property
    def chain(self) -> Chain | None:
        """What the stages cost, where it is known."""
        return self._part.execution.chain

    @property
    def memory_budget(self) -> int | None:
        """The bytes of the budget, where there was one."""
        return self._part.memory_budget

    @property
    def signature(self) -> Signature | None:
        """The calls that the current schedule is for; None: any."""
        return self._part.signature

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        graphs = self._part.graphs
        return (*self.split.notes, *self._part.notes, *(() if graphs is None else graphs.notes))

    @property
    def num_shapes(self) -> int:
        """For how many signatures of calls it holds a schedule."""
        return 1 + len(self._others)

    def stats(self) -> Stats:
        """Return what was predicted and what has been measured since."""
        execution = self._part.execution
        counters, predicted = execution.machine.counters, execution.schedule.predicted
        steps = max(1, counters.num_steps)
        num_steps = self._earlier.num_steps + sum(p.num_steps for p in (self._part, *self._others.values()))
        if self._attached:
            self._note_peak()
        return Stats(
            num_steps,
            None if predicted is None else predicted.seconds,
            execution.measured_seconds(),
            None if predicted is None else predicted.peak_bytes,
            self._most_bytes if self._most_bytes and num_steps else self._part.rehearsed_peak_bytes,
            counters.num_recomputed / steps,
            (counters.moved_bytes + (0 if execution.weights is None else execution.weights.moved_bytes)) / steps,
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        trace = None
        if self.chain is not None:
            trace = simulate(self.chain, self.schedule, bandwidth=self._part.bandwidth or None)
        text = plan_text(
            type(self.model).__name__ + ("" if self._attached else ", detached (the model runs without it)"),
            self.schedule,
            self.split,
            self.chain,
            self.memory_budget,
            self.stats(),
            self.notes,
            trace,
        )
        if trace is None:
            return text
        return f"{text}\n\n{chart_text(trace, memory_budget=self.memory_budget)}"

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        patience_seconds: float | None = DEFAULT_PATIENCE_SECONDS,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Write the report: one HTML page that shows the plan, what other budgets would cost, and what was measured.

        Args:
            path: the HTML file to write.
            patience_seconds: how long all strategies together may solve for other budgets; None: without end.
            progress: called with the name of what is being tried and the share done, 0 to 1.

        Raises:
            PlanError: where the plan knows no chain.

        Example:
            >>> plan = lowtide.fit(model, (x,), memory_budget="8GiB")   # doctest: +SKIP
            >>> plan.report("plan.html")                                # doctest: +SKIP
        """
        if self.chain is None:
            raise PlanError("this plan was attached without a chain, so its costs are unknown; attach a solution")
        stats, device = self.stats(), self._part.execution.machine.device
        on_host = [f"on the host: {parked_text(self.schedule, self.chain)}"] if self.schedule.manages else []
        measured = Measured(stats.measured_seconds, stats.measured_peak_bytes, _named(device), stats.num_steps or None)
        write_report(
            path,
            self.chain,
            self.schedule,
            memory_budget=self.memory_budget,
            bandwidth=self._part.bandwidth or None,
            measured=measured if measured.seconds or measured.peak_bytes else None,
            notes=(*on_host, *self.notes),
            is_attached=True,
            patience_seconds=patience_seconds,
            progress=progress,
        )

    def __repr__(self) -> str:
        state = "attached" if self._attached else "detached"
        return f"<Plan {self.schedule.strategy!r} of {self.split.num_stages} stages, {state}>"

    # Attaching

    def detach(self) -> None:
        """Give the model back as it was; graphs that are still alive keep working.

        Raises:
            ExecutionError: where weights were on the host and the device has no room for all of them. What did not fit
                stays usable in host memory, and the plan is detached.
        """
        if self._attached:
            self._note_peak()  # what comes back to the device belongs to no step
            self._attached = False
            try:
                self._part.execution.remove()
            finally:
                for part in (self._part, *self._others.values()):
                    if part.graphs is not None:
                        part.graphs.release()
                self._steps.close()
                if self._part.compiled is not None:
                    self._part.compiled.remove()
                if self._planner is not None:
                    self._planner.remove()
                self._on_detach()

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def use(self, part: Part) -> None:
        """Go over to another part, for the calls that it is for; weights on the host stay there."""
        previous = self._part
        previous.execution.remove(part.execution)
        if previous.signature is not None and previous.signature != part.signature:
            self._others[previous.signature] = previous
            while len(self._others) >= _NUM_KEPT:
                self._earlier.num_steps += self._others.popitem(last=False)[1].num_steps
        elif previous is not part:
            self._earlier.num_steps += previous.num_steps
        self._part = part
        part.execution.install(self._call)

    def _call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        applies = self._attached and self.model.training and torch.is_grad_enabled()
        if not applies or self._part.execution.is_busy or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            raise ExecutionError(
                "the model is called inside a transform of torch.func (grad, vmap, ...), where saved tensors cannot be "
                "freed; call plan.detach() before such calls"
            )
        if forward_ad._current_level >= 0:
            raise ExecutionError(
                "the model is called inside forward-mode differentiation (torch.autograd.forward_ad.dual_level), whose "
                "tangents a recomputation does not have; call plan.detach() before such calls"
            )
        self._check_parameters()
        self._check_optimizer()
        self._end_step()
        before, signature = self._part, self._signature_of(args, kwargs)
        self._choose_part(signature, args, kwargs)
        if self._part is not before:
            signature = self._signature_of(args, kwargs)
        try:
            return self._step(signature, plain, args, kwargs)
        except Exception as error:  # compilers have errors of their own, and importing them takes seconds
            if not self._has_lost_regions(error):
                raise
            reason = f"the model does not run in regions any more: {in_one_line(error)}"
            if self._planner is None:
                raise PlanError(f"{reason}; {FIT_AGAIN}") from error
        self._plan_again(Sample(args, kwargs), reason, self._observed(has_regions=False))
        _warn(f"{reason}; its blocks are compiled one by one from now on")
        return self._step(self._signature_of(args, kwargs), plain, args, kwargs)

    def _step(
        self, signature: Signature, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        part = self._part
        self._num_ended = part.num_steps
        checked = part.checked is None or part.checked.has_same_shapes(signature)
        self._steps.begin()
        steps = part.graphs or part.execution
        result = steps.call(plain, args, kwargs, with_variants=checked)
        self._steps.returned(_num_bytes(tensors_of(result)))
        return result

    def _has_lost_regions(self, error: Exception) -> bool:
        """Whether a step failed, before anything of it ran, because the model is not one graph."""
        if not self._part.execution.compiles_regions or isinstance(error, FoundLateError):
            return False
        return isinstance(error, not_one_graph())

    def _plan_again(self, sample: Sample, reason: str, observed: Observed) -> None:
        """Go over to a part that the planner makes for a call."""
        begin = time.perf_counter()
        find = self._part_for if self._part.execution.weights is None else self._metered_part_for
        part = find(sample, observed)
        LOGGER.info("planned again in %s: %s", format_seconds(time.perf_counter() - begin), reason)
        if part.refusal:
            is_leaner = observed.exceeded is None or part.predicted_bytes < observed.peak_bytes
            which = "leanest schedule" if is_leaner else "same schedule, since the leanest would take no less"
            _warn(f"{reason}, and {part.refusal}; training continues with the {which}")
            part.said_bytes = max(observed.peak_bytes, part.predicted_bytes, part.rehearsed_peak_bytes or 0)
            if not is_leaner:
                self._part.refusal, self._part.said_bytes = part.refusal, part.said_bytes
                self._steps.forget()
                return
        self.use(part)
        self._parameter_bytes, self._has_larger_parameters = _num_bytes(self._parameters), False
        self._steps.forget()

    def _part_for(self, sample: Sample, observed: Observed) -> Part:
        """A part that the planner makes for a call."""
        assert self._planner is not None
        self._part.execution.remove()  # measuring, and whoever looks for compiled stages, see the model as it is
        try:
            return self._planner.part_for(sample, observed)
        finally:
            self._part.execution.install(self._call)

    def _metered_part_for(self, sample: Sample, observed: Observed) -> Part:
        """The same where weights move, which return to the device meanwhile; what that takes is said once."""
        budget = self.memory_budget
        with Meter(self._part.execution.machine.device) as meter:
            part = self._part_for(sample, observed)
        if budget is not None and meter.peak_bytes > budget and not self._said_planning:
            self._said_planning = True
            is_other = observed.exceeded is None
            advice = "call the model in one way (shapes, masks, autocast), or raise" if is_other else "raise"
            _warn(
                f"planning {'for other calls' if is_other else 'again'} took {format_bytes(meter.peak_bytes)}, since "
                "all weights and optimizer state return to the device meanwhile, but the budget is "
                f"{format_bytes(budget)}; training continues; {advice} the budget to avoid it"
            )
        return part

    def _end_step(self) -> None:
        """Note what the last step took, and free what it has left where its backward did not end."""
        part, peak_bytes = self._part, self._note_peak()
        if part.num_steps == self._num_ended:
            drop_aborted_backward()
        part.peak_bytes = max(part.peak_bytes, peak_bytes)
        if part.memory_budget is not None and part.peak_bytes > part.memory_budget:
            self._steps.forget()  # it is not the peak of the part that the next call may be for

    def _note_peak(self) -> int:
        """Note, and return, what steps took until now: another part, or another plan, is about steps of its own."""
        self._steps.note()
        peak_bytes = self._peak_bytes() or 0
        self._most_bytes = max(self._most_bytes, peak_bytes)
        return peak_bytes

    def _peak_bytes(self) -> int | None:
        """The most that real steps took; the pool of graphs is in use all the time."""
        peak_bytes, graphs = self._steps.peak_bytes, self._part.graphs
        return peak_bytes if peak_bytes is None or graphs is None else peak_bytes + graphs.held_bytes

    def _exceeded(self) -> str:
        """How steps under this part took more than its budget; empty: they did not, or nothing more can be done."""
        part, peak_bytes = self._part, self._part.peak_bytes
        if part.memory_budget is None or peak_bytes <= part.memory_budget or part.refusal:
            return ""
        expected = f" ({format_bytes(part.predicted_bytes)} predicted)" if part.predicted_bytes else ""
        return f"a step took {format_bytes(peak_bytes)}{expected}, but the budget is {format_bytes(part.memory_budget)}"

    def _say_more(self) -> None:
        """Nothing more can be done for this part, but steps take more than was said: the user is to know how much."""
        part, budget = self._part, self._part.memory_budget
        if budget is None or not part.refusal or part.peak_bytes <= _MORE_THAN_SAID * max(part.said_bytes, budget):
            return
        said, part.said_bytes = part.said_bytes, part.peak_bytes
        more = f", more than the {format_bytes(said)} of the last warning" if said else ""
        _warn(
            f"a step took {format_bytes(part.peak_bytes)}{more}, but the budget is {format_bytes(budget)}; training "
            "continues with the same schedule"
        )

    def _correct(self, sample: Sample, reason: str) -> None:
        """Plan again for what a real step took, and say so; where nobody can, or that was of no use, only say it."""
        if self._planner is None or self._num_exceeded >= _MOST_CORRECTIONS:
            self._part.refusal, self._part.said_bytes = reason, self._part.peak_bytes
            why = "" if self._planner else ". A plan that was loaded, attached or shared by processes stays as it is"
            missing = "loss= and optimizer=" if self._planner is None else self._planner.missing
            better = f"{missing}, or with a larger budget" if missing else "a larger budget"
            _warn(f"{reason}{why}; training continues. Call fit again with {better}")
            return
        self._num_exceeded += 1
        self._plan_again(sample, reason, self._observed(exceeded=self._part, peak_bytes=self._part.peak_bytes))
        if not self._part.refusal:  # else it was said
            missing = self._planner.missing
            advice = f"pass {missing} to fit" if missing else "loss= should be what the loop computes"
            _warn(f"{reason}; planning again ({advice}; what the loop keeps counts too)")

    def _observed(self, **more: Any) -> Observed:
        return Observed(self._steps.optimizer, self._grads_resident, **more)

    def _has_unplanned_gradients(self) -> bool:
        """Whether gradients are there, when a forward begins, for which the part leaves no room."""
        part = self._part
        if part.grads_resident or self._planner is None or part.memory_budget is None:
            return False
        if part.execution.weights is not None:  # they leave the device when a forward begins
            return False
        if list(map(_grad, self._leaves)) == self._no_gradients:  # None is None: nothing is compared
            return False
        chain, largest = self.chain, max((p.numel() * p.element_size() for p in self._parameters), default=0)
        if chain is not None and not chain.grads_resident:
            resident = replace(chain, grads_resident=True)
            peak_bytes = simulate(resident, self.schedule, bandwidth=part.bandwidth or None).peak_bytes
            part.grads_resident = peak_bytes + largest <= part.memory_budget
        return not part.grads_resident

    def _note_parameters(self, registered: list[nn.Parameter | None]) -> None:
        """Look at the model's parameters, which are others than at the last call."""
        self._registered, self._parameters = registered, list(self.model.parameters())
        # torch warns of whoever asks for the gradient of a result of other tensors (functional_call)
        self._leaves = list(filter(_is_leaf, self._parameters))
        self._no_gradients = [None] * len(self._leaves)

    def _check_parameters(self) -> None:
        """Refuse a model that was moved, or has other parts: nothing measured holds for it."""
        device = self._part.execution.machine.device
        if self._parameters and self._parameters[0].device != device:
            raise PlanError(
                f"the model is on {self._parameters[0].device}, but its plan was made on {device}; {FIT_AGAIN}"
            )
        self._structure.check(self.model)
        registered = self._structure.parameters()
        if len(registered) != len(self._registered) or not all(map(is_, registered, self._registered)):
            self._check_moved(registered)
            self._note_parameters(registered)
            self._has_larger_parameters = _num_bytes(self._parameters) > self._parameter_bytes
        now = list(map(_dtype, self._parameters))
        if now == self._dtypes:
            return
        names = [name for name, _ in self.model.named_parameters()]
        changed = next((entry for entry in zip(names, self._dtypes, now, strict=False) if entry[1] != entry[2]), None)
        if changed is None:
            raise PlanError(
                f"the model has {len(now)} parameters, but had {len(self._dtypes)} when the plan was made; {FIT_AGAIN}"
            )
        name, then, dtype = changed
        raise PlanError(f"parameter {name!r} is {dtype}, but was {then} when the plan was made; {FIT_AGAIN}")

    def _check_moved(self, registered: Sequence[torch.Tensor | None]) -> None:
        """Refuse other parameters in the place of those that move, and that the optimizer has."""
        weights = self._part.execution.weights
        present = [each for each in registered if each is not None]
        if weights is None or not all(isinstance(each, nn.Parameter) for each in present):  # as in functional_call
            return
        replaced = weights.name_of_other_than(present)
        if replaced is not None:
            raise PlanError(
                f"parameter {replaced!r} was replaced (load_state_dict(assign=True), fully_shard) while its plan keeps "
                "weights on the host; call plan.detach(), make an optimizer of the new parameters, and call fit again "
                "with it"
            )

    def _check_optimizer(self) -> None:
        """Say once that weights on the host are stepped by an optimizer that the plan does not know."""
        weights = self._part.execution.weights
        if weights is None or self._said_optimizer or not self._steps.is_stepped_by_another(weights.optimizer):
            return
        self._said_optimizer = True
        _warn(
            "weights on the host are stepped by another optimizer than the one that fit was given; numbers are right, "
            "but its state stays on the device, and its step is slow. Call fit again with optimizer= and the one that "
            "steps"
        )

    def _signature_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """The signature of a call; one that trains no more than was planned for counts as that, without variants."""
        trained, planned = trained_of(self._parameters), self._part.signature
        if planned is not None and trains_no_more(trained, planned.trained) and not self._part.execution.has_variants:
            trained = planned.trained
        signature = Signature.of(args, kwargs, self._part.execution.machine.device.type, trained)
        return replace(signature, settings=None) if self._ignores_settings else signature

    def _choose_part(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the part for a call the current one."""
        planned = self._part.signature
        if planned is not None:
            self._choose_by_signature(signature, planned, args, kwargs)
        try:
            self._plan_for_what_steps_showed(args, kwargs)
        except (
            CaptureError,
            PlanError,
            InfeasibleBudgetError,
            ExecutionError,
        ) as error:  # the plan that there is goes on
            self._part.refusal, self._has_larger_parameters = str(error), False
            self._part.said_bytes = self._part.peak_bytes
            self._steps.forget()  # what planning took
            _warn(f"steps take more than was planned for, but planning again failed: {error}; training continues")

    def _plan_for_what_steps_showed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._has_unplanned_gradients():
            self._grads_resident = True
            self._earlier.num_steps += sum(part.num_steps for part in self._others.values())
            self._others.clear()
            reason = "gradients are there when a forward begins (grads_resident=True has them counted from the start)"
            self._plan_again(Sample(args, kwargs), reason, self._observed())
            return
        self._say_more()
        reason = self._exceeded()
        if reason:
            self._correct(Sample(args, kwargs), reason)
        elif self._planner is not None and self._has_larger_parameters:
            self._plan_again(Sample(args, kwargs), "parameters were replaced by larger ones", self._observed())

    def _choose_by_signature(
        self, signature: Signature, planned: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._replans:
            signature, planned = signature.in_shapes_alone(), planned.in_shapes_alone()
        reason = signature.difference(planned)
        if not reason:
            return
        if not self._replans:
            if self._planner is None and not self._part.execution.has_variants and signature.fits_within(planned):
                return  # a smaller batch, as the last one of an epoch
            if self._planner is None:
                raise PlanError(f"{reason}, and a loaded plan does not plan for other calls; call fit for these shapes")
            raise PlanError(
                f"{reason}, and replan=False refuses other calls; leave it out, or call fit for these shapes"
            )
        if signature in self._others:
            self.use(self._others.pop(signature))
        elif not self._part.serves(signature) and not self._has_room_for_input_gradients(signature, planned):
            fitting = next((s for s, part in self._others.items() if part.serves(signature)), None)
            if fitting is not None:
                self.use(self._others.pop(fitting))
            else:
                self._plan_for(signature, planned, Sample(args, kwargs), reason)

    def _has_room_for_input_gradients(self, signature: Signature, planned: Signature) -> bool:
        """Whether all that is new is that inputs require gradients, and the schedule has room for them.

        Where parameters are frozen more than that is new: stages run backward that did not.
        """
        part, chain = self._part, self.chain
        if chain is None or part.memory_budget is None or part.execution.has_variants or b"\0" in planned.trained:
            return False
        if signature.without_gradients() != planned.without_gradients():
            return False
        asking = replace(chain, input_grad_bytes=max(chain.input_grad_bytes, chain.input_bytes))
        if simulate(asking, self.schedule, bandwidth=part.bandwidth or None).peak_bytes > part.memory_budget:
            return False
        part.signature = signature
        return True

    def _plan_for(self, signature: Signature, planned: Signature, sample: Sample, reason: str) -> None:
        before = self.chain
        self._plan_again(sample, reason, self._observed())
        if replace(signature, settings=None) == replace(planned, settings=None):
            # numbers and words alone were others: where they do not set sizes (a step's number, a caption) they are of
            # no matter from now on, and steps that take more all the same are seen to do so
            self._num_by_settings += 1
            self._ignores_settings = (
                _saved_bytes(before) == _saved_bytes(self.chain) or self._num_by_settings >= _NUM_KEPT
            )

    # Files

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: a copy would run the same model, or another that it does not know."""
        raise PlanError(
            "a plan belongs to one model and cannot be copied or pickled; save it with plan.save(path) and attach it "
            "to the other model with lowtide.load_plan(path, model); models that have a plan can be copied"
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, in the file format `lowtide.plan/1`."""
        part = self._part
        compilation = None if part.compiled is None else part.compiled.compilation
        return {
            "format": FORMAT,
            "model": fingerprint(self.model),
            "signature": None if part.signature is None else part.signature.to_dict(),
            "memory_budget": part.memory_budget,
            "bandwidth": part.bandwidth,
            "rehearsed_peak_bytes": part.rehearsed_peak_bytes,
            "split": self.split.to_dict(),
            "chain": None if self.chain is None else self.chain.to_dict(),
            "schedule": self.schedule.to_dict(),
            **({} if compilation is None else {"compilation": compilation.to_dict()}),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file, atomically; `lowtide.load_plan` reads it."""
        write_json(path, self.to_dict())


def _warn(message: str) -> None:
    """Warn with the line of the user's code that called the model."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("lowtide", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, LowtideWarning, stacklevel=level)


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _saved_bytes(chain: Chain | None) -> list[tuple[int, int]] | None:
    """What stages leave and save."""
    return None if chain is None else [(stage.output_bytes, stage.saved_bytes) for stage in chain.stages]


def _named(device: torch.device) -> str:
    """A readable name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def attached_plan(model: nn.Module) -> Plan | None:
    """The plan of a model, if it has one."""
    execution = getattr(handler_of(model), "__self__", None)
    owner = getattr(execution.handler, "__self__", None) if isinstance(execution, Execution) else None
    return owner if isinstance(owner, Plan) else None
