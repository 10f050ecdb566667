"""`lowtide.fit`: train within a memory budget."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide.errors import InfeasibleBudgetError, LowtideWarning, PlanError, SampleError, shown
from lowtide.progress import DelayedProgress, check_progress
from lowtide.runtime.capture.capture import StageNames, check_arguments, check_has_data, refuse_an_empty_batch
from lowtide.runtime.capture.watch import draw_the_fullest
from lowtide.runtime.compile.compiled import DEFAULT_BUDGETS, Compilation, CompiledModel, can_have_regions
from lowtide.runtime.execute.checks import Checks
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.fitting.distributed import is_first, share
from lowtide.runtime.fitting.limits import device_budget, host_budget
from lowtide.runtime.fitting.loader import sample_from
from lowtide.runtime.fitting.moving import STRATEGY, moves_in_any_case, resident_bytes, why_not
from lowtide.runtime.fitting.solving import Settings
from lowtide.runtime.fitting.trials import Planned, RealStep
from lowtide.runtime.fitting.ways import plan_for
from lowtide.runtime.graphs.pool import Pool
from lowtide.runtime.graphs.steps import GraphedSteps
from lowtide.runtime.measure.weights import Optimizer, existing_state_bytes, has_all, optimizer_of, trains
from lowtide.runtime.meter import Meter, settled
from lowtide.runtime.model.containers import Held, build, template
from lowtide.runtime.model.processes import is_distributed
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.plan.attach import check_can_graph, check_is_model, check_switches, device_of, tier_for, tier_on
from lowtide.runtime.plan.load import plan_from_dict
from lowtide.runtime.plan.placing import Placed, comes_from_cpu, device_to_use, move
from lowtide.runtime.plan.plan import Observed, Part, Plan, attached_plan
from lowtide.runtime.plan.signature import Signature, trained_of
from lowtide.runtime.state.preserve import preserved
from lowtide.runtime.transfer.bandwidth import measured_bandwidth
from lowtide.runtime.transfer.cargo import Tier
from lowtide.solve import checked_count
from lowtide.strategies.base import AUTO, find
from lowtide.units import (
    format_bandwidth,
    format_bytes,
    is_unlikely_bandwidth,
    parse_bandwidth,
    parse_budget,
)

# Without an optimizer, the state of the one that most people train with is allowed for.
_ASSUMED_OPTIMIZER = "adam"

_REGIONS = "regions"  # the one option of compile_stages that is not torch.compile's


def fit(
    model: nn.Module,
    sample: Any,
    *,
    memory_budget: int | str | None = None,
    strategy: str = AUTO,
    bandwidth: int | str | None = None,
    host_memory_budget: int | str | None = None,
    optimizer: Optimizer = None,
    loss: Callable[[Any], Any] | None = None,
    stages: StageNames | None = None,
    grads_resident: bool = False,
    step_in_backward: bool = False,
    device: str | torch.device | None = None,
    keeps_result: bool = True,
    compile_stages: bool | Mapping[str, Any] = False,
    variants: bool | str = True,
    cuda_graphs: bool | str = False,
    replan: bool = True,
    slots: int | None = None,
    strict: bool = False,
    spot_checks: bool = True,
    progress: Callable[[str, float], None] | bool | None = None,
) -> Plan:
    """Make a model train within a memory budget: measure its stages, solve for the fastest schedule, attach it.

    Call it inside the same autocast as your loop: precision decides what a step takes. Steps under another autocast
    are planned for when they come, which takes as long as this call.

    Args:
        model: the model, on the device where it is trained, or on the CPU (see `device`); the object stays the same.
        sample: a batch as in training: a tensor, a tuple of positional or a dict of keyword arguments; or
            your DataLoader: the largest of its first batches counts, and no random generator moves.
        memory_budget: bytes of everything that a training step allocates on the device: parameters, gradients,
            optimizer state, workspaces (on the CPU: all live tensors). None: what is free, minus a reserve.
        strategy: a name from `lowtide strategies`; `"auto"`: the fastest.
        bandwidth: bytes per second to host memory each way; None: measured; 0: no offloading.
        host_memory_budget: bytes of host memory for offloaded values; None: what is free, minus a reserve. Only what
            the schedule needs is taken.
        optimizer: the optimizer, a list of those that share the model's parameters (Muon and AdamW), or its kind such
            as `"adamw"`; its state counts. None: room for Adam's state. With the optimizer itself, and one for all
            parameters, weights, gradients and optimizer state live on the host and are fetched when they are needed,
            where nothing else stays within the budget or, on CUDA, trial steps show that it is faster.
        loss: what the training loop computes from the model's result; None: the loss in the result, or nothing.
        stages: the stages by hand, see `lowtide.measure`.
        grads_resident: gradients are accumulated over several calls.
        step_in_backward: update the weights of each stage right after its backward, which hides copies behind the rest
            of backward; your loop calls `optimizer.step()` as ever. Gradients cannot be clipped, scaled or accumulated
            then. Only where weights move.
        device: where to train, for a model that is still on the CPU: it is moved there, and its optimizer's state with
            it. Where weights, gradients and optimizer state take more than the budget, weights go to host memory
            and visit the device, which never has the model as a whole. None: where the model is.
        keeps_result: the training loop holds the model's result while backward runs (`output = model(x)`); False if
            only the loss is left by then (`model(x).loss.backward()`).
        compile_stages: compile the model (`torch.compile`) and plan with what is compiled: each block, and a large loss
            in the model's forward; or, if trials on CUDA show that it is faster, all that the model does, joined where
            the schedule treats stages alike. A mapping holds options for `torch.compile`, and `"regions": True` or
            `False` for one of these two.
        variants: with `compile_stages`, also compile each block so that it saves less and recomputes more inside its
            own backward, and let the solver choose block by block among those with the same gradients;
            `"rounding"`: also among those whose gradients differ by rounding; False: compile in one way only.
        cuda_graphs: on CUDA, capture steps as graphs and replay them, which takes the host out of the way where kernels
            are short; the loss and the optimizer stay yours. `"auto"`: where a trial shows that it is faster. Where a
            step cannot be captured (it reads values on the host, say), a note of the plan says why.
        replan: plan again for calls with larger shapes; False: all other shapes are refused, smaller ones too.
        slots: into how many slots strategies divide memory, if they do.
        strict: compare everything that a recomputation saves with the first run, byte by byte; slow.
        spot_checks: in each step compare samples of what one recomputed stage saves, in turn, with its first run.
        progress: called with the current task and the share done, 0 to 1. True: show a bar; False: do not; None: show
            one on a terminal, where planning takes more than 2 seconds.

    Returns:
        The plan; print it to see what it will do.

    Raises:
        InfeasibleBudgetError: before training, with the smallest budget that works.
        CaptureError: if the model cannot be split into stages, and for wrong arguments.
        SampleError: if the model fails on the sample; its own error is the `__cause__`.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        >>> with fit(model, torch.zeros(256, 64), memory_budget="1GiB", bandwidth=0) as plan:
        ...     model(torch.zeros(256, 64)).sum().backward()
    """
    check_is_model(model)
    check_arguments(model, stages, loss)
    check_has_data(model)
    check_progress(progress, may_switch=True)
    check_switches(
        grads_resident=grads_resident,
        keeps_result=keeps_result,
        step_in_backward=step_in_backward,
        replan=replan,
        strict=strict,
        spot_checks=spot_checks,
    )
    if strategy != AUTO:
        find(strategy)  # what is wrong is refused before anything is measured
    slots, optimizer = checked_count("slots", slots), optimizer_of(model, optimizer)
    previous = attached_plan(model)
    if previous is not None:
        previous.detach()
    used = device_of(model) if device is None else device_to_use(model, device)
    settings = Settings(
        memory_budget=device_budget(used) if memory_budget is None else parse_budget(memory_budget),
        strategy=strategy,
        bandwidth=measured_bandwidth(used) if bandwidth is None else _given_bandwidth(bandwidth),
        host_memory_budget=host_budget(used)
        if host_memory_budget is None
        else parse_budget(host_memory_budget, "host_memory_budget"),
        optimizer=_ASSUMED_OPTIMIZER if optimizer is None else optimizer,
        loss=loss,
        stages=stages,
        grads_resident=grads_resident,
        keeps_result=keeps_result,
        slots=slots,
        checks=Checks.of(strict=strict, spot_checks=spot_checks),
        progress=progress if callable(progress) else None,
        compilation=_compilation(compile_stages, variants),
        regions=_regions(compile_stages),
        allow_rounding=variants == "rounding",
        measures_link=bandwidth is None,
        step_in_backward=step_in_backward,
        may_move=isinstance(optimizer, torch.optim.Optimizer),
        cuda_graphs=_graphs(cuda_graphs, used),
    )
    moves_in_any_case(model, settings)
    called = Sample.of(sample_from(model, sample))
    if device is not None:
        called = called.on(used)
    goes_to = used if device is not None and comes_from_cpu(model) else None
    if settings.progress is None and (not is_distributed() or is_first()):
        with DelayedProgress(enabled=progress is not False, always=progress is True) as shown_progress:
            return _attached(model, called, replace(settings, progress=shown_progress), goes_to, replan=replan)
    return _attached(model, called, settings, goes_to, replan=replan)


def _attached(
    model: nn.Module, called: Sample, settings: Settings, goes_to: torch.device | None, *, replan: bool
) -> Plan:
    planner = _Fitting(model, settings, goes_to)
    try:
        if not is_distributed():
            return Plan(model, planner.part(called), planner, replan=replan)
        return _shared(planner, called, model)
    except BaseException:
        planner.remove()
        raise


def _placed(model: nn.Module, settings: Settings, device: torch.device) -> Placed | None:
    """Have a model that is on the CPU on a device; where the budget has no room for what belongs to its weights, on the
    device's lower tier, which is returned.

    Raises:
        PlanError: where it has to be there, and cannot.
    """
    resident = resident_bytes(model, settings.optimizer)
    if resident + _others_bytes(model, settings, device) <= settings.memory_budget:
        move(model, settings.optimizer, device)
        return None
    reason = why_not(model, settings)
    if reason:
        raise PlanError(
            f"weights, gradients and optimizer state of this model take {format_bytes(resident)}, which is more than "
            f"the budget of {format_bytes(settings.memory_budget)}, and they cannot live on the host: {reason}"
        )
    assert isinstance(settings.optimizer, torch.optim.Optimizer)
    tier = tier_on(device, settings.host_memory_budget, progress=settings.progress)
    return Placed(model, settings.optimizer, device, tier, settings.progress)


def _given_bandwidth(bandwidth: int | str) -> int:
    rate = parse_bandwidth(bandwidth)
    if is_unlikely_bandwidth(rate):
        warnings.warn(
            f"bandwidth is {format_bandwidth(rate)}, too slow to move anything; an int is bytes per second: "
            'write "12GB/s", omit it to have it measured, or pass 0 for no offloading',
            LowtideWarning,
            stacklevel=3,
        )
    return rate


def _shared(planner: _Fitting, sample: Sample, model: nn.Module) -> Plan:
    """Rank 0's plan on every rank. Ranks may see different shapes, so all shapes run under the one schedule."""
    values: dict[str, Any] | None = None
    if is_first():
        try:
            with Plan(model, planner.part(sample), planner) as plan:
                checked = None if plan.signature is None else plan.signature.to_dict()
                values = {**plan.to_dict(), "signature": None, "checked": checked}
        except BaseException:
            share(None, device_of(model))
            raise
    limit = planner.settings.host_memory_budget
    return plan_from_dict(share(values, device_of(model)), model, host_memory_budget=limit)


def _graphs(cuda_graphs: bool | str, device: torch.device) -> bool | str:
    if cuda_graphs not in (True, False, AUTO):
        raise PlanError(f"cuda_graphs is {shown(cuda_graphs)}, expected True, False or {AUTO!r}")
    if cuda_graphs is True:
        check_can_graph(device)
    if cuda_graphs is True and is_distributed():
        warnings.warn("steps of several processes run without CUDA graphs", LowtideWarning, stacklevel=3)
    return cuda_graphs if device.type == "cuda" and not is_distributed() else False


def _compilation(compile_stages: bool | Mapping[str, Any], variants: bool | str) -> Compilation | None:
    if variants not in (True, False, "rounding"):
        raise PlanError(f"variants is {shown(variants)}, expected True, False or 'rounding'")
    if not isinstance(compile_stages, bool | Mapping):
        raise PlanError(
            f"compile_stages is {shown(compile_stages)}, expected True, False or a mapping of options for torch.compile"
        )
    given = compile_stages if isinstance(compile_stages, Mapping) else None
    if given is None and not compile_stages:
        return None  # a mapping without options is not: it stands for torch.compile's own
    options = _compile_options(given or {})
    return Compilation(options, DEFAULT_BUDGETS if variants else ())


def _regions(compile_stages: bool | Mapping[str, Any]) -> bool | str:
    """Whether the model is compiled in regions, as the options say; else as trials show."""
    given = compile_stages if isinstance(compile_stages, Mapping) else {}
    regions: bool | str = given.get(_REGIONS, AUTO)
    if regions not in (True, False, AUTO):
        raise PlanError(f"regions is {shown(regions)}, expected True, False or {AUTO!r}")
    options = _compile_options(given)
    if regions is True and not can_have_regions(options):
        raise PlanError(
            f"regions are compiled for one shape each and without CUDA graphs of the compiler's, but {shown(options)} "
            "was given; leave out dynamic and mode, or regions"
        )
    return regions if can_have_regions(options) else False


def _compile_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `torch.compile` among those of compile_stages."""
    unknown = next(
        (name for name in given if name not in (_REGIONS, *inspect.signature(torch.compile).parameters)), None
    )
    if unknown is not None:
        raise PlanError(f"compile_stages has {shown(unknown)}, which is not an option of torch.compile; leave it out")
    return {"dynamic": False, **{key: value for key, value in given.items() if key != _REGIONS}}


def _others_bytes(model: nn.Module, settings: Settings, device: torch.device) -> int:
    """What is on a device besides a model, which a budget counts, too."""
    gc.collect()
    with Meter(device) as meter:
        live_bytes = meter.live_bytes
    if device != device_of(model):
        return live_bytes
    own = existing_state_bytes(model, settings.optimizer) + sum(parameter.nbytes for parameter in model.parameters())
    return max(0, live_bytes - own)


class _Fitting:
    """One `fit`: makes the first part of a plan, and is its planner afterwards."""

    def __init__(self, model: nn.Module, settings: Settings, goes_to: torch.device | None = None) -> None:
        self._model = model
        self._moved = goes_to is not None and goes_to != device_of(model)  # to the device, and back in the end
        self._placed = None if goes_to is None else _placed(model, settings, goes_to)
        if self._placed is not None:
            settings = replace(settings, strategy=STRATEGY, placed=self._placed)
        self.settings = settings
        self._device = device_of(model)
        self._tier: Tier | None = None if self._placed is None else self._placed.tier
        """Where weights are: what one schedule has on the host another goes on with, and room is pinned once."""
        self._compiled: list[CompiledModel] = []
        self._pool: Pool | None = None
        self._planned: dict[Signature, Planned] = {}

    @property
    def missing(self) -> str:
        """See `Planner`; with the name of a kind, the optimizer itself tells more."""
        has_optimizer = has_all(self.settings.optimizer, self._model)
        given = {"loss=": self.settings.loss is not None, "optimizer=optimizer": has_optimizer}
        return " and ".join(name for name, is_given in given.items() if not is_given)

    def part(
        self,
        sample: Sample,
        settings: Settings | None = None,
        *,
        after: RealStep | None = None,
        goes_on: bool = False,
    ) -> Part:
        """Plan for one signature of calls; arguments as for `plan_for`."""
        if any(parameter.grad_fn is not None for parameter in self._model.parameters()):
            raise PlanError(
                "parameters are results of other operations (functional_call), whose graph trial steps would use up; "
                "call fit with the model's own parameters"
            )
        self._remove_compiled()
        settings = settings or self.settings
        if self._planned and not trains(settings.optimizer, self._model):  # its parameters were replaced since
            settings = replace(settings, optimizer=_ASSUMED_OPTIMIZER)
        try:
            with settled(self._device), preserved(self._model):
                if not self._model.training:
                    self._model.train()  # else parts that are kept in eval() stay so, as in the user's steps
                apart = _apart(sample)
                refuse_an_empty_batch(apart)
                if self._placed is None:  # else a forward reads all weights over the link
                    draw_the_fullest(self._model, apart)
                tier = self._tier or tier_for(self._model, settings.host_memory_budget, progress=settings.progress)
                planned, compiled = plan_for(self._model, apart, settings, tier=tier, after=after, goes_on=goes_on)
        except BaseException:
            for earlier in self._compiled[-1:]:  # the parts there are go on with them
                earlier.install()
            raise
        finally:
            torch.clear_autocast_cache()  # casts of weights, which would stay until the user's block ends
        if compiled is not None:
            compiled.install()  # `preserved` has taken them away
            self._compiled.append(compiled)
        signature = self._signature_of(sample.args, sample.kwargs)
        self._planned[signature] = planned
        if planned.moving is not None and not settings.cuda_graphs:  # graphs have addresses of one tier
            self._tier = planned.tier
        execution = planned.execution(self._model, settings)
        return Part(
            execution,
            signature,
            settings.memory_budget,
            settings.bandwidth,
            planned.rehearsed_peak_bytes,
            planned.notes,
            self._compiled[-1] if self._compiled else None,
            grads_resident=settings.grads_resident,
            refusal=planned.refusal,
            graphs=self._graphs_of(planned, execution, settings),
        )

    def _graphs_of(self, planned: Planned, execution: Execution, settings: Settings) -> GraphedSteps | None:
        if not planned.uses_graphs:
            return None
        self._pool = self._pool or Pool(self._device)
        return GraphedSteps(execution, self._pool, settings.memory_budget - planned.solution.peak_bytes)

    def _signature_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
        return Signature.of(args, kwargs, self._device.type, trained_of(self._model.parameters()))

    def remove(self) -> None:
        """Take compiled stages out of the model, and have it on the CPU again if it came from there."""
        self._remove_compiled()
        if self._placed is not None:
            self._placed.take_back()
        elif self._moved:
            move(self._model, self.settings.optimizer, torch.device("cpu"))
        self._placed, self._moved = None, False

    def _remove_compiled(self) -> None:
        for compiled in self._compiled:
            compiled.remove()

    def part_for(self, sample: Sample, observed: Observed) -> Part:
        """Plan for a call of a training step; if the model fails on it, its own error comes through."""
        try:
            return self._part_for(sample, observed)
        except SampleError as error:
            original = error.__cause__ or error
        try:
            raise original
        finally:
            del original  # its traceback has this frame, and with it the batch

    def _part_for(self, sample: Sample, observed: Observed) -> Part:
        if not observed.has_regions:
            self.settings = replace(self.settings, regions=False)
        settings = self.settings
        if observed.optimizer is not None and not has_all(settings.optimizer, self._model):
            settings = replace(settings, optimizer=observed.optimizer)
        if observed.grads_resident:
            settings = replace(settings, grads_resident=True)
        signature = self._signature_of(sample.args, sample.kwargs)
        is_known = any(signature.fits_within(other) for other in self._planned)
        if self._compiled and is_known and observed.exceeded is None and observed.has_regions:
            # A plan with variants serves one shape; one without them serves all that are smaller, too.
            compilation = replace(self._compiled[-1].compilation, budgets=(), loss=None)
            try:
                return self.part(sample, replace(settings, compilation=compilation, regions=compilation.regions))
            except InfeasibleBudgetError:
                pass
        exceeded = None if observed.exceeded is None else observed.exceeded.signature
        before = None if exceeded is None else self._planned.get(exceeded)
        after = None if before is None else RealStep(before, observed.peak_bytes)
        return self.part(sample, settings, after=after, goes_on=True)


def _apart(sample: Sample) -> Sample:
    """The same call with tensors of its own over the same memory: gradients of a rehearsal are nobody else's."""
    own: dict[int, Held] = {}  # what is given twice stays one tensor: compiled code is for that

    def encode(tensor: torch.Tensor) -> Held:
        if id(tensor) not in own:
            own[id(tensor)] = Held(tensor.detach().requires_grad_(tensor.requires_grad))
        return own[id(tensor)]

    args, kwargs = build(template((sample.args, dict(sample.kwargs)), encode), [])
    return Sample(args, kwargs)
