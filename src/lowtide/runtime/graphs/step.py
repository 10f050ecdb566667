"""One training step as two CUDA graphs: a model's forward under its schedule, and the backward of its results.

A graph is a list of kernels at fixed addresses. So arguments are copied to where the graph reads them, and results are
copied from where it writes them; both belong to one call. Gradients are handed out where the graph has written them:
the user's own code reads them there, and the next forward, which may write over them, moves those that are still in use
(accumulation, `zero_grad(set_to_none=False)`).

The loss and the optimizer are not in it, nor are hooks of parameters: around the two graphs stands one node of
autograd, whose gradients reach parameters as any others do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from lowtide.errors import ExecutionError
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.graphs.pool import Pool, new_graph
from lowtide.runtime.measure.stages import leaves_behind
from lowtide.runtime.model.containers import Slot, build, template, tensors_of
from lowtide.runtime.state.environment import hook_tables, versions_of
from lowtide.runtime.state.surroundings import Surroundings
from lowtide.runtime.transfer.cargo import View


class NotCapturableError(Exception):
    """A step cannot be captured; the message says why."""


class GraphedStep:
    """A step as two graphs.

    Args:
        execution: the schedule.
        plain: the model's plain call.
        args: of the call; other calls have the same tensors but for their contents.
        kwargs: the same.
        wanted: which tensors of the result get gradients.
        around_backward: in what surroundings backward runs.
        pool: where its memory is.

    Raises:
        NotCapturableError: where something in the step cannot be captured.
        Exception: what the model raises while it is captured, or CUDA, where it does what a graph cannot.
    """

    def __init__(
        self,
        execution: Execution,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        wanted: Sequence[bool],
        around_backward: Surroundings,
        pool: Pool,
    ) -> None:
        self.execution = execution
        self.pool = pool
        self._wanted = wanted
        self._addresses = addresses_of(execution.machine.model)
        self._graphs = new_graph(pool.device), new_graph(pool.device)
        self._inputs: list[_Input] = []
        form = template((args, kwargs), self._take_in)
        counters = execution.machine.counters
        before = dict(vars(counters))
        tier, parameters = execution.machine.tier, list(execution.machine.model.parameters())
        tier.join()
        pool.renew()
        _forget_accumulators(parameters)
        with ExitStack() as stack:
            stack.callback(tier.forget)  # events of a capture mean nothing outside it
            stack.callback(vars(counters).update, before)  # nothing has run
            stack.enter_context(_without_hooks(parameters))
            stack.enter_context(execution.machine.unchecked())
            own_args, own_kwargs = build(form, [given.tensor for given in self._inputs])
            with _without_cached_casts(), pool.capturing(self._graphs[0]):
                result = execution.call(plain, own_args, own_kwargs, is_captured=True)
                tier.join()
            del form, own_args, own_kwargs
            self._take_results(result)
            starts = [t for t, is_wanted in zip(tensors_of(result), wanted, strict=True) if is_wanted]
            leaves = leaves_behind(starts)
            self.gradients_in = [torch.empty_like(tensor) for tensor in starts]
            edges = [get_gradient_edge(tensor) for tensor in starts]
            del result, starts
            with around_backward.applied(), pool.capturing(self._graphs[1]):
                gradients = _apart(torch.autograd.grad(edges, leaves, self.gradients_in, allow_unused=True))
                tier.join()
            self._take_gradients(leaves, gradients)
            del edges, leaves, gradients
            self._num_recomputed = counters.num_recomputed - before["num_recomputed"]
            self._moved_bytes = counters.moved_bytes - before["moved_bytes"]
        pool.steps.add(self)
        pool.measure()

    def _take_in(self, tensor: torch.Tensor) -> Slot:
        self._inputs.append(_Input(tensor, self.execution.machine.device))
        return Slot(len(self._inputs) - 1)

    def _take_results(self, result: Any) -> None:
        """Note where the graph leaves its results."""
        self._outputs: list[torch.Tensor] = []
        self._is_trained: list[bool] = []

        def take(tensor: torch.Tensor) -> Slot:
            if tensor.device != self.pool.device:
                raise NotCapturableError(
                    f"a tensor of the result is on {tensor.device}; compute it on {self.pool.device}, or outside"
                )
            self._outputs.append(_borrowed(tensor, self._graphs))
            self._is_trained.append(tensor.requires_grad)
            return Slot(len(self._outputs) - 1)

        self._form = template(result, take)

    def _take_gradients(self, leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Note where the graph leaves gradients, and whose they are."""
        numbers = {id(given.tensor): number for number, given in enumerate(self._inputs)}
        self.leaves: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self._gradients_of_inputs: list[tuple[int, torch.Tensor]] = []
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise NotCapturableError("a gradient is sparse")
            borrowed = _borrowed(gradient, self._graphs)
            if id(leaf) in numbers:
                self._gradients_of_inputs.append((numbers[id(leaf)], borrowed))
            else:
                self.leaves.append(leaf)
                self.gradients.append(borrowed)

    @property
    def is_current(self) -> bool:
        """Whether the model's tensors are where they were when the step was captured."""
        return addresses_of(self.execution.machine.model) == self._addresses

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the forward for other arguments."""
        given = tensors_of((args, kwargs))
        for own, tensor in zip(self._inputs, given, strict=True):
            own.fill(tensor)
        run = _Replay(self)
        trained = [given[number] for number, _ in self._gradients_of_inputs]
        outputs = _Replayed.apply(run, *trained, *self.leaves)
        return build(self._form, outputs)

    def replay_forward(self) -> tuple[torch.Tensor, ...]:
        """Replay the forward; returns copies of its results."""
        self._graphs[0].replay()
        return tuple([output.clone() for output in self._outputs])

    @property
    def untrained(self) -> list[int]:
        """Which results have no gradients."""
        return [number for number, is_trained in enumerate(self._is_trained) if not is_trained]

    def replay_backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Replay the backward; returns the gradients of trained arguments and of parameters."""
        into = iter(self.gradients_in)
        for gradient, is_wanted in zip(gradients, self._wanted, strict=True):
            if is_wanted:
                target = next(into)
                target.zero_() if gradient is None else target.copy_(gradient)
            elif gradient is not None:
                raise ExecutionError(
                    "backward reached a part of the model's result that no step had a gradient for when steps were "
                    "captured as CUDA graphs; use every part from the first step on, or fit(..., cuda_graphs=False)"
                )
        self._graphs[1].replay()
        counters = self.execution.machine.counters
        counters.num_steps += 1
        counters.num_recomputed += self._num_recomputed
        counters.moved_bytes += self._moved_bytes
        own = [gradient.clone() for _, gradient in self._gradients_of_inputs]
        return own + [gradient.detach() for gradient in self.gradients]


class _Replay:
    """One forward that was replayed, until its backward has been."""

    def __init__(self, step: GraphedStep) -> None:
        self._step = step
        self._generator = torch.cuda.default_generators[step.pool.device.index or 0]
        self._random: torch.Tensor | None = None
        self._versions: list[int] = []
        self._is_over = False
        self._clock = step.execution.start_clock()

    def forward(self) -> tuple[torch.Tensor, ...]:
        step = self._step
        self._versions = versions_of(step.leaves)
        before = self._generator.get_state()
        step.pool.begin(self)
        outputs = step.replay_forward()
        if not torch.equal(before, self._generator.get_state()):
            self._random = before
        return outputs

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        step = self._step
        if self._is_over:
            raise ExecutionError(
                "backward ran a second time through a step that was replayed as a CUDA graph; call the model again, or "
                "use fit(..., cuda_graphs=False) for retain_graph=True"
            )
        if versions_of(step.leaves) != self._versions:
            changed = next(
                leaf for leaf, then in zip(step.leaves, self._versions, strict=True) if leaf._version != then
            )
            raise ExecutionError(
                f"{step.execution.machine.describe(changed)} was changed in place between forward and backward; change "
                "it after backward"
            )
        self._is_over = True
        with self._as_in_forward():
            found = step.replay_backward(gradients)
        step.pool.end()
        self._clock.stop()
        return found

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """Random numbers are counted from where they stood when the forward began: recomputed stages draw them anew."""
        if self._random is None:
            yield
            return
        now = self._generator.get_state()
        self._generator.set_state(self._random)
        try:
            yield
        finally:
            self._generator.set_state(now)


class _Replayed(torch.autograd.Function):
    """The node of autograd that stands for the model."""

    @staticmethod
    def forward(ctx: Any, run: _Replay, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = run.forward()
        ctx.mark_non_differentiable(*[outputs[number] for number in run._step.untrained])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.run.backward(gradients))


class _Input:
    """A tensor of the call, at an address of its own.

    Whatever its strides are, its memory is copied as a whole, so that kernels see the same tensor.
    """

    __slots__ = ("_memory", "tensor")

    def __init__(self, given: torch.Tensor, device: torch.device) -> None:
        if given.device != device:
            raise NotCapturableError(
                f"an argument of shape {list(given.shape)} is on {given.device}; move it to {device} before the call"
            )
        is_plain = type(given) in (torch.Tensor, nn.Parameter) and given.layout is torch.strided
        if not is_plain or given.is_conj() or given.is_neg():
            raise NotCapturableError(f"an argument of shape {list(given.shape)} is not a plain tensor")
        memory = _memory_of(given.detach())
        self._memory = torch.empty_like(memory)
        self.tensor = self._memory.as_strided(given.shape, given.stride(), 0).detach()
        self.tensor.requires_grad_(given.requires_grad)
        self.fill(given)

    def fill(self, given: torch.Tensor) -> None:
        """Copy another tensor's contents."""
        self._memory.copy_(_memory_of(given.detach()), non_blocking=True)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements between the first and the last of a tensor, whatever its strides are."""
    return tensor.as_strided((_num_spanned(tensor),), (1,), tensor.storage_offset())


def _num_spanned(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Borrowed:
    """Memory of a pool as CUDA sees it; a tensor made of it keeps the graphs, and with them the pool."""

    def __init__(self, address: int, num_bytes: int, graphs: Any) -> None:
        self._kept = graphs
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _borrowed(tensor: torch.Tensor, graphs: Any) -> torch.Tensor:
    """The same tensor without holding its memory, which other graphs of the pool are to have, too."""
    tensor = tensor.detach()
    num_bytes = _num_spanned(tensor) * tensor.element_size()
    if num_bytes == 0 or tensor.is_conj() or tensor.is_neg():
        return tensor
    memory = torch.as_tensor(_Borrowed(tensor.data_ptr(), num_bytes, graphs), device=tensor.device)
    view = View(None, tensor)
    view.offset = 0
    return view.on(memory.untyped_storage())


def _apart(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of which each has its own memory: a kernel that passes its argument on gives it to several."""
    seen: set[int] = set()
    found: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and gradient.layout is torch.strided:
            address = gradient.untyped_storage()._cdata
            others = int(torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)) - 2
            if address in seen or others > 0:
                gradient = gradient.clone()
            seen.add(address)
        found.append(gradient)
    return found


@contextmanager
def _without_hooks(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Hooks of parameters run where their gradients arrive, outside the graphs."""
    tables = [(table, dict(table)) for table in hook_tables(parameters)]
    for table, _ in tables:
        table.clear()
    try:
        yield
    finally:
        for table, found in tables:
            table.update(found)


def _forget_accumulators(parameters: list[nn.Parameter]) -> None:
    """Let graphs of autograd that are made from now on have new nodes where gradients arrive.

    A node belongs to the stream on which it was made, and stays while any graph has it: that of the last step lives as
    long as its loss has a name. A capture cannot wait for another stream. What makes torch forget it is data of another
    dtype, for a moment.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_leaf and type(parameter.data) is torch.Tensor:
            data, dtype = parameter.data, torch.float32 if parameter.dtype is torch.float16 else torch.float16
            parameter.data = torch.empty(0, dtype=dtype, device=data.device)
            parameter.data = data


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Autocast keeps casts of weights until its block ends: a graph must make its own, each time."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


_address = methodcaller("data_ptr")


def addresses_of(model: nn.Module) -> list[int]:
    """Where the parameters and buffers of a model are."""
    return [*map(_address, model.parameters()), *map(_address, model.buffers())]
