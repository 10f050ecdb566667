"""Tries a schedule in a few steps of the model itself, which leave nothing behind."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.runtime.execute.checks import are_close
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.graphs.pool import Pool
from lowtide.runtime.graphs.steps import GraphedSteps
from lowtide.runtime.measure.stages import leaves_behind, storages_of
from lowtide.runtime.measure.variants import Numbers
from lowtide.runtime.measure.weights import Optimizer, optimizer_state_bytes, state_bytes_there
from lowtide.runtime.meter import Meter, exclude, is_excluded
from lowtide.runtime.model.containers import tensors_of
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.state.cells import Cells, Look, is_settings
from lowtide.runtime.state.preserve import preserved

# Steps after the first at the least: a second one finds the allocator's blocks as the first has cut them up, and may
# run out of memory where that did not. And the time of the last ones is what is predicted.
_MORE_STEPS = {"cuda": 3}

# On CUDA there are more of them where they are short: at first the host is slower than later (on an H200 the steps of
# EfficientNetV2-M took 196, 130, 120 and 117 ms, and 117 from then on), and a device that has rested is faster.
_WARM_SECONDS = 0.5
_MOST_STEPS = 8
_NUM_COUNTED = 3

# Steps whose gradients tell how far equal ones are apart, and a replayed one may be on the other side of the first.
_NUM_REPEATED = 3
_SPREAD_FACTOR = 2


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What a step of training is made of besides the model.

    Args:
        sample: what the model is called with.
        loss: makes a loss of its result; None: the result is one, or contains one, or all of it counts.
        optimizer: the optimizer, several, or its kind.
        grads_resident: whether gradients are there from the beginning.
        keeps_result: whether the model's result is in hand while backward runs.
        kept_bytes: what is in hand of the last result until the next one is there, as in `output = model(x)`.
        moved: the ids of parameters whose state the schedule moves, with something that stands in for it.
    """

    sample: Sample
    loss: Callable[[Any], Any] | None
    optimizer: Optimizer
    grads_resident: bool
    keeps_result: bool
    kept_bytes: int = 0
    moved: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a schedule took: the peak of its first step (of the first two where modules carry something over), with the
    optimizer's state that is to come, and the median time of the steps after it, from the beginning of forward to the
    end of backward; where weights move, to the end of what the optimizer's step moves, without that step itself.
    """

    peak_bytes: int
    seconds: float
    graphed: Graphed | None = None
    """The same of steps that are replayed as CUDA graphs, where that was tried."""


@dataclass(frozen=True, slots=True)
class Graphed:
    """What steps took that were replayed as CUDA graphs; or why they cannot be."""

    peak_bytes: int = 0
    seconds: float = 0.0
    refusal: str = ""


def rehearse(
    model: nn.Module,
    step: TrainingStep,
    execution_for: Callable[[], Execution],
    *,
    num_timed: int = 0,
    with_graphs: bool = False,
) -> Rehearsal:
    """Run steps under a schedule and leave nothing behind.

    Args:
        model: the model.
        step: how it is trained.
        execution_for: makes the execution.
        num_timed: how many steps to time after the first; on CUDA some are timed in any case.
        with_graphs: try also to replay steps as CUDA graphs.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    holder: list[Execution] = []
    replays: list[GraphedSteps] = []

    def call(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if holder[0].is_busy:
            return plain(*args, **kwargs)
        return (replays or holder)[0].call(plain, args, kwargs)

    let_go(device)  # also the last trial's room on the lower tier
    holder.append(execution_for())
    set_aside_bytes = _gradient_bytes(model)
    state = _state_to_come(model, step)
    found = Cells(model.named_modules()).look()
    with preserved(model), torch.enable_grad():
        _set_gradients(model, resident=False)  # the user's are no part of the trial, and do not move with it
        holder[0].install(call)
        try:
            _set_gradients(model, resident=step.grads_resident)
            searches = device.type == "cuda" and torch.backends.cudnn.benchmark
            if searches or holder[0].compiles_regions:  # a search takes workspaces, and so does a compiler's
                _run(model, step, holder[0])
                _begin_step(model, step, found)
            carried = _carried(model)
            with Meter(device) as meter:
                _run(model, step, holder[0])
                peak_bytes, now = meter.peak_bytes, _carried(model)
                replaced_bytes = sum(num_bytes for key, num_bytes in carried.items() if key not in now)
                if now.keys() != carried.keys():  # the second step finds others
                    if replaced_bytes:
                        # `preserved` keeps what the first step replaced, which training lets go on the way. So one
                        # more first step begins with what the last one made, and the former is not counted.
                        holder.pop().remove()
                        holder.append(execution_for())
                        holder[0].install(call)
                        meter.reset_peak()
                    _begin_step(model, step, found)
                    _run(model, step, holder[0])
                    is_less = sum(now.values()) < sum(carried.values())
                    peak_bytes = max(peak_bytes if is_less else 0, meter.peak_bytes - replaced_bytes)
            num_more = max(num_timed, _MORE_STEPS.get(device.type, 0))
            if device.type == "cuda":
                num_more = max(num_more, _num_until_warm(holder[0].measured_seconds()))
            begin_step = partial(_begin_step, model, step, found)
            seconds = _timed_steps(model, step, holder[0], begin_step, num_more)
            graphed = None
            if with_graphs:
                graphed = _rehearse_graphs(model, step, holder[0], replays, begin_step, num_more)
        finally:
            for steps in replays:
                steps.release()
            replays.clear()
            for execution in holder:
                execution.remove()
            holder.clear()
            state.clear()
    if graphed is not None:
        graphed = replace(graphed, peak_bytes=graphed.peak_bytes - set_aside_bytes)
    return Rehearsal(peak_bytes - set_aside_bytes, seconds, graphed)


def numbers_of_step(
    model: nn.Module, step: TrainingStep, execution: Execution, *, draws_before: bool = False
) -> Numbers:
    """What one step gives, in host memory; it leaves nothing behind.

    These are results, gradients, buffers, and what becomes of torch's generators. With `draws_before` the device gives
    other random numbers than without.
    """
    found: Numbers = {}
    generators = execution.machine.generators
    after_forward = generators.state()

    def add(what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        found.update({(what, name): exclude(t.detach().to("cpu", copy=True)) for name, t in tensors.items()})

    def call(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal after_forward
        if execution.is_busy:
            return plain(*args, **kwargs)
        result = execution.call(plain, args, kwargs)
        after_forward = generators.state()
        add("results", {str(place): tensor for place, tensor in enumerate(tensors_of(result))})
        return result

    with preserved(model), torch.enable_grad():
        if draws_before:
            torch.rand((), device=execution.machine.device)
        random = generators.state()
        _set_gradients(model, resident=False)
        execution.install(call)
        try:
            _run(model, step, execution)
        finally:
            execution.remove()
        add("gradients", {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        add("buffers", dict(model.named_buffers()))
        for name, before in (("drawn", random), ("drawn in backward", after_forward)):
            add("random numbers", {name: torch.tensor(generators.drawn_since(before))})
        states = bytearray(b"".join(generators.of_torch()))
        add("random numbers", {"generators": torch.frombuffer(states, dtype=torch.uint8)})
    return found


def _rehearse_graphs(
    model: nn.Module,
    step: TrainingStep,
    execution: Execution,
    replays: list[GraphedSteps],
    begin_step: Callable[[], None],
    num_timed: int,
) -> Graphed:
    """Replay steps as CUDA graphs, and compare gradients with those of a step that is not."""
    device, generators = execution.machine.device, execution.machine.generators
    random = generators.state()
    expected = _Repeated(model)
    for _ in range(_NUM_REPEATED):
        begin_step()
        generators.set(random)
        _run(model, step, execution)
        expected.add()
    begin_step()
    replays.append(GraphedSteps(execution, Pool(device)))
    while not replays[0].num_replayed and not replays[0].refusal:
        begin_step()
        generators.set(random)
        _run(model, step, execution)
    refusal = replays[0].refusal or expected.difference()
    if refusal:
        return Graphed(refusal=refusal)
    with Meter(device) as meter:
        seconds = _timed_steps(model, step, execution, begin_step, max(1, num_timed))
    return Graphed(meter.peak_bytes + replays[0].held_bytes, seconds)


def _timed_steps(
    model: nn.Module, step: TrainingStep, execution: Execution, begin_step: Callable[[], None], num_steps: int
) -> float:
    """The median time of the last of some steps, from the beginning of forward to the end of backward.

    Nobody waits for the device between them: in a training loop the host is ahead of it as far as it can be.
    """
    others: list[torch.Tensor] | None = None
    for _ in range(num_steps):
        begin_step()
        others = _run(model, step, execution, others)
    return (execution.measured_seconds(min(num_steps, _NUM_COUNTED)) or 0.0) if num_steps else 0.0


def _num_until_warm(seconds: float | None) -> int:
    """How many steps of about so long it takes until they take as long as later ones."""
    return min(_MOST_STEPS, math.ceil(_WARM_SECONDS / seconds)) if seconds else 0


class _Repeated:
    """The gradients of a model in a few equal steps, and how far they are from each other.

    Sums whose order is left open (attention's backward, additions into an embedding) differ each time. Single entries
    in 16 bits, where large terms cancel, were refused as wrong where each was compared by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._first: dict[str, torch.Tensor | None] | None = None
        self._spread: dict[str, float] = dict.fromkeys(self._parameters, 0.0)

    def add(self) -> None:
        """One more step has ended."""
        if self._first is None:
            self._first = {
                name: None if p.grad is None else p.grad.to("cpu", copy=True) for name, p in self._parameters.items()
            }
            return
        for name, distance in self._distances():
            self._spread[name] = max(self._spread[name], distance)

    def difference(self) -> str:
        """In which gradient a replayed step, which has ended, differs from these steps; empty if it does not."""
        for name, distance in self._distances():
            spread = self._spread[name]
            if distance > (_SPREAD_FACTOR * spread if math.isfinite(spread) else 0.0):
                return (
                    "a replayed step gave other gradients than the same step without graphs "
                    f"({name}: {distance:.1e} apart, without graphs {spread:.1e})"
                )
        return ""

    def _distances(self) -> Iterator[tuple[str, float]]:
        """How far each gradient is from that of the first step at the most; 0 where it is the same up to rounding."""
        assert self._first is not None
        for name, first in self._first.items():
            now = self._parameters[name].grad
            if first is None or now is None:
                yield name, 0.0 if first is now else math.inf
            elif first.shape != now.shape:
                yield name, math.inf
            else:
                again = now.to("cpu")
                far = 0.0 if are_close(first, again) else float((again - first).abs().max())
                yield name, far if math.isfinite(far) else math.inf


def let_go(device: torch.device) -> None:
    """Give back what nobody holds: steps begin alike, and what follows finds no large blocks that were cut up.

    An allocator keeps freed blocks. Those of measuring are as large as the largest stage; a step would put small
    tensors that live long into them, and have no room where it needs such a block itself.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _run(
    model: nn.Module, step: TrainingStep, execution: Execution, others: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Run forward and backward, and move what the optimizer's step moves; returns the tensors of the user's that nobody
    registered and that backward reaches, which are looked for where they are not known.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    kept = torch.empty(step.kept_bytes, dtype=torch.uint8, device=device)
    result = step.sample.call(model)
    del kept
    target = result if step.loss is None else step.loss(result)
    if step.loss is None and isinstance(target, Mapping) and isinstance(target.get("loss"), torch.Tensor):
        target = target["loss"]
    starts = [t for t in tensors_of(target) if t.requires_grad]
    del target
    if not step.keeps_result:
        del result
    if others is None:
        own = set(map(id, model.parameters()))
        others = [leaf for leaf in leaves_behind(starts) if id(leaf) not in own]
    gradients = [(leaf, leaf.grad) for leaf in others]
    torch.clear_autocast_cache()  # as where an autocast block ends, before backward, and never grows with trials
    torch.autograd.backward(starts, [torch.ones_like(t) for t in starts])
    for leaf, gradient in gradients:
        leaf.grad = gradient
    execution.leave_out_updates()
    return others


def _begin_step(model: nn.Module, step: TrainingStep, found: Look) -> None:
    """Do what a training loop does between two steps: clear lists and gradients, and detach hidden states."""
    found.restore_sequences()
    Cells(model.named_modules()).look().detach()
    _set_gradients(model, resident=step.grads_resident)


def _set_gradients(model: nn.Module, *, resident: bool) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if resident and parameter.requires_grad else None


def _state_to_come(model: nn.Module, step: TrainingStep) -> list[torch.Tensor]:
    """Memory for the optimizer's state that is not there yet, in pieces like those that it will make.

    It is there and not merely added: what an allocator loses between blocks depends on all of them.
    """
    trainable = [p for p in model.parameters() if p.requires_grad and id(p) not in step.moved]
    found = optimizer_state_bytes(step.optimizer, trainable)
    planned = {id(parameter): found.get(id(parameter), 0) for parameter in trainable}
    missing = sum(planned.values()) - state_bytes_there(step.optimizer, trainable)
    if missing <= 0:
        return []
    if missing < sum(planned.values()):
        return [torch.empty(missing, dtype=torch.uint8, device=trainable[0].device)]
    pieces = []
    for parameter in trainable:
        left = planned.get(id(parameter), 0)
        while left > 0:
            num_bytes = min(left, max(1, parameter.numel() * parameter.element_size()))
            pieces.append(torch.empty(num_bytes, dtype=torch.uint8, device=parameter.device))
            left -= num_bytes
    return pieces


def _carried(model: nn.Module) -> dict[int, int]:
    """What modules carry from one step to the next in attributes and buffers (hidden states, memories, weights that a
    forward computes): the bytes of each storage, by its address. Other names of parameters are nothing more.
    """
    pending = [value for module in model.modules() for name, value in vars(module).items() if name != "_parameters"]
    storages, seen = dict[int, torch.UntypedStorage](), set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            storages.update(storages_of(value))
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:  # a list may contain itself
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
        elif is_settings(value):
            pending.append(vars(value))
    known = storages_of(list(model.parameters()))
    return {key: storage.nbytes() for key, storage in storages.items() if key not in known}


def _gradient_bytes(model: nn.Module) -> int:
    """What gradients take that a meter of the device counts."""
    gradients = (parameter.grad for parameter in model.parameters())
    return sum(g.numel() * g.element_size() for g in gradients if g is not None and not is_excluded(g))
