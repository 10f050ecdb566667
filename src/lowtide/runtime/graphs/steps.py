"""Runs the steps of a plan as CUDA graphs where that can be done, and under its schedule as ever where it cannot."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from lowtide.errors import ExecutionError
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.graphs.pool import Pool
from lowtide.runtime.graphs.step import GraphedStep, NotCapturableError, addresses_of
from lowtide.runtime.model.containers import tensors_of
from lowtide.runtime.state.cells import Cells, Look
from lowtide.runtime.state.surroundings import Surroundings
from lowtide.units import format_bytes

LOGGER = logging.getLogger("lowtide")

# Steps that run as ever before one is captured: the first shows the executor what stages read, the second goes as all
# later ones do. They also show which results get gradients. There is one more where a first forward sets something.
_NUM_WATCHED = 2

# Graphs that one part of a plan keeps, each for one signature of calls: enough for a few buckets of sequence lengths.
MOST_GRAPHS = 8

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)

_OFF = "steps run without CUDA graphs"


class Replayable(Protocol):
    """A step that was captured."""

    leaves: list[torch.Tensor]
    """The parameters that get gradients."""
    gradients: list[torch.Tensor]
    """Where these are written."""

    @property
    def is_current(self) -> bool:
        """Whether the model's tensors are where they were."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the forward."""


class GraphedSteps:
    """Runs an execution's steps as CUDA graphs.

    Args:
        execution: the schedule in place.
        pool: the memory of all graphs of the plan.
        spare_bytes: what graphs may hold while a step runs without them; None: any number.
        make: captures a step.
    """

    def __init__(
        self,
        execution: Execution,
        pool: Pool,
        spare_bytes: int | None = None,
        make: Callable[..., Replayable] = GraphedStep,
    ) -> None:
        self._execution = execution
        self._pool = pool
        self._spare_bytes = spare_bytes
        self._make = make
        self._model = execution.machine.model
        self._cells = Cells(self._model.named_modules())
        self._known: dict[Any, _Watched] = {}
        self._look: Look | None = None
        self.refusal = ""
        """Why steps are not captured; empty: they are, or will be."""
        self.num_replayed = 0

    @property
    def held_bytes(self) -> int:
        """What the graphs hold of the device's memory, whether a step runs or not."""
        return self._pool.reserved_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        if self.refusal:
            return (f"{_OFF}: {self.refusal}",)
        pool = (
            f"; their memory, {format_bytes(self.held_bytes)}, stays reserved between steps" if self.held_bytes else ""
        )
        return (f"steps are replayed as CUDA graphs{pool}",)

    def release(self) -> None:
        """Free all graphs; they are captured again when they are needed."""
        if any(watched.step is not None for watched in self._known.values()):
            self._move_gradients()
            for watched in self._known.values():
                watched.step = None
            self._pool.measure()

    def call(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, with_variants: bool = True
    ) -> Any:
        """Call the model: replayed, or under its schedule."""
        run = partial(self._run, plain, args, kwargs, with_variants=with_variants)
        if self.refusal or not with_variants:
            return run()
        try:
            key = self._key(args, kwargs)
        except NotCapturableError as error:
            self._refuse(str(error))
            return run()
        watched = self._known.get(key)
        if watched is None:
            if len(self._known) >= MOST_GRAPHS:
                return self._run_beside(run)
            watched = self._known[key] = _Watched()
        if not watched.is_ready:
            return self._watch(watched, run)
        if watched.step is None:
            watched.step = self._captured(watched, plain, args, kwargs)
        if watched.step is None or not self._is_usable(watched.step):
            return run()
        with self._execution.machine.alone:
            self._move_gradients()
            self.num_replayed += 1
            return watched.step.call(args, kwargs)

    def _run(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: bool) -> Any:
        """Run a step as ever; graphs make room for it."""
        if not self._has_room and not self._pool.is_busy:
            self.release()
        return self._execution.call(plain, args, kwargs, **options)

    @property
    def _has_room(self) -> bool:
        return self._spare_bytes is None or self.held_bytes <= self._spare_bytes

    def _run_beside(self, run: Callable[[], Any]) -> Any:
        """Run a step of a signature that is one too many."""
        if not self._has_room:
            self._refuse(
                f"calls have more than {MOST_GRAPHS} different shapes, and there is no room for steps beside the "
                "graphs; pad batches to a few lengths"
            )
        return run()

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What must be the same for a graph to be replayed."""
        around = Surroundings.now()
        if any(around.modes):
            raise NotCapturableError("the model is called inside a mode of torch (TorchDispatchMode or the like)")
        trained = bytes(parameter.requires_grad for parameter in self._model.parameters())
        return tuple(_described((args, kwargs))), around, trained

    # Before a step is captured

    def _watch(self, watched: _Watched, run: Callable[[], Any]) -> Any:
        """Run a step as ever, and see what it does that a graph would not."""
        refusal, generators = self._hooks(), self._execution.machine.generators
        before, random, addresses = self._cells.look(), generators.state(), addresses_of(self._model)
        result = run()
        if generators.drawn_on_host_since(random):
            refusal = refusal or "the forward draws random numbers on the host; draw them on the device"
        now = self._cells.look(before)
        changed = before.difference(now)
        if changed is None and addresses_of(self._model) != addresses:
            changed = "data of a parameter or buffer"
        if changed is not None and watched.is_new and not refusal:  # what a first forward sets, later ones find
            watched.is_new, self._look = False, now
            return result
        if changed is not None:
            refusal = refusal or (
                f"the forward sets {changed!r}, which a graph cannot; return what it computes, or keep it in a buffer "
                "that is written in place"
            )
        watched.watch(result)
        if refusal:
            self._refuse(refusal)
        self._look = now
        return result

    def _hooks(self) -> str:
        """Whether hooks run Python code in each step."""
        for name, module in self._model.named_modules():
            if any(getattr(module, table) for table in _HOOKS):
                return f"module {name!r} has a hook, which a graph would leave out; remove it, or log outside the model"
        if any(getattr(global_hooks, table, None) for table in _GLOBAL_HOOKS):
            return "hooks are registered for all modules, which a graph would leave out; remove them"
        return ""

    def _captured(
        self, watched: _Watched, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Replayable | None:
        """Capture a step; None: it cannot be, and nothing has changed."""
        if watched.refusal or self._hooks():
            self._refuse(watched.refusal or self._hooks())
            return None
        look, generators = self._cells.look(), self._execution.machine.generators
        random = generators.state()
        try:
            step = self._make(
                self._execution,
                plain,
                args,
                kwargs,
                wanted=watched.wanted,
                around_backward=watched.around_backward,
                pool=self._pool,
            )
        except Exception as error:  # whatever a capture cannot do ends in an error of its own
            self._refuse(_reason(error, self._model))
            error.__traceback__ = None  # it has the batch
            step = None
        finally:
            look.restore()
            generators.set(random)
        self._look = self._cells.look()
        return step

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self.release()
        self._known.clear()
        LOGGER.info("%s: %s", _OFF, reason)

    # When a step is replayed

    def _is_usable(self, step: Replayable) -> bool:
        """Whether a graph does now what the model would do."""
        assert self._look is not None
        changed = self._look.difference(self._cells.look(self._look))
        if changed is not None or self._hooks() or not step.is_current:
            LOGGER.info("capturing steps again: %s", changed or "the model has changed")
            self.release()
            self._known.clear()  # what was captured does as the model did
            return False
        # A forward whose backward may still come, and gradients that somebody keeps, are in the pool.
        return not self._pool.is_busy and not self._are_gradients_kept()

    def _are_gradients_kept(self) -> bool:
        """Whether somebody besides the parameters has a gradient that a graph has written."""
        for step in self._pool.steps:
            for leaf, gradient in zip(step.leaves, step.gradients, strict=True):
                storage = gradient.untyped_storage()
                num_own = 1 + _has_storage(leaf.grad, storage._cdata)
                if int(torch._C._storage_Use_Count(storage._cdata)) - 1 > num_own:
                    return True
        return False

    def _move_gradients(self) -> None:
        """Move gradients that are still in use out of the way of the next forward."""
        for step in self._pool.steps:
            for leaf, gradient in zip(step.leaves, step.gradients, strict=True):
                if _has_storage(leaf.grad, gradient.untyped_storage()._cdata):
                    assert leaf.grad is not None
                    leaf.grad.data = leaf.grad.data.clone()  # whoever has the gradient itself keeps it


def _has_storage(tensor: torch.Tensor | None, address: int) -> bool:
    return tensor is not None and tensor.layout is torch.strided and tensor.untyped_storage()._cdata == address


class _Watched:
    """Calls of one signature that ran as ever so far."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._reached: set[int] = set()
        self._num_results = 0
        self._task: int | None = None
        self.is_new = True
        """Whether there was no such call before."""
        self.refusal = ""
        self.step: Replayable | None = None
        self.around_backward: Surroundings | None = None

    @property
    def is_ready(self) -> bool:
        """Whether enough was seen."""
        return bool(self.refusal) or (self._num_seen >= _NUM_WATCHED and bool(self._reached))

    @property
    def wanted(self) -> list[bool]:
        """Which tensors of the result got gradients."""
        return [number in self._reached for number in range(self._num_results)]

    def watch(self, result: Any) -> None:
        """See which tensors of a result get gradients."""
        tensors = tensors_of(result)
        self.is_new = False
        self._num_seen += 1
        self._num_results = len(tensors)
        self._task = None
        for number, tensor in enumerate(tensors):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._note, number))

    def _note(self, number: int, _: torch.Tensor) -> None:
        self._reached.add(number)
        task = torch._C._current_graph_task_id()
        if self._task is not None and task != self._task:
            self.refusal = "backward runs more than once for one forward; add the losses up and call backward once"
        self._task = task
        self.around_backward = Surroundings.now()
        if torch.is_grad_enabled():
            self.refusal = "backward is itself differentiated (create_graph=True)"


def _described(value: Any) -> Iterator[Any]:
    """What of arguments must be the same: all of it but the contents of tensors."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
    elif value is None or kind in (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size):
        yield kind, value
    elif isinstance(value, tuple | list):
        yield kind, len(value)
        for item in value:
            yield from _described(item)
    elif isinstance(value, dict):
        yield kind, tuple(value)
        for item in value.values():
            yield from _described(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield kind
        for entry in fields(value):
            yield from _described(getattr(value, entry.name, None))
    else:
        raise NotCapturableError(
            f"an argument is an object of {kind.__name__}, whose contents may change; pass tensors and numbers"
        )


def _reason(error: BaseException, model: nn.Module) -> str:
    """Why a capture failed, with the module and the line of the user's code where it did."""
    while isinstance(error.__context__, Exception) and not isinstance(error, NotCapturableError | ExecutionError):
        error = error.__context__  # the first one is what the model did; CUDA complains once more when a capture ends
    if isinstance(error, NotCapturableError | ExecutionError):
        return str(error)
    first = " ".join(str(error).split("\n", 1)[0].split())
    advice = "; keep values on the device (no item, tolist, print, if on a tensor)" if "captur" in first else ""
    return f"{first or type(error).__name__}{_place(error, model)}{advice}"


def _place(error: BaseException, model: nn.Module) -> str:
    """Where in the user's code an error came from."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    ours = [Path(torch.__file__).parent, Path(__file__).parent.parent.parent]
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if any(path.is_relative_to(folder) for folder in ours):
            continue
        name = names.get(id(frame.f_locals.get("self")))
        where = f"module {name!r}, " if name else ""
        found = f" ({where}{path.name}, line {line})"
    return found
