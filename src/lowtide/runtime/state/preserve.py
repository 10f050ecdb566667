"""Running a model without a trace: afterwards everything is as it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.runtime.meter import exclude
from lowtide.runtime.state.lists import Contents
from lowtide.runtime.state.rng import Generators


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back, at the end of the `with` block, whatever running the model changes.

    That is: the values of its buffers, gradients, the modules' attributes (modes, counters, caches that a forward
    fills) and what lists, dicts, sets, deques, namespaces and dataclasses (but for those with slots) among these hold,
    the states of the random number generators (torch's, Python's, numpy's, and the modules' own), and torch's global
    flags. Hooks on parameters do not run inside: one may be an optimizer's step.
    """
    modules = [_ModuleState(module) for module in model.modules()]
    contents = Contents(value for module in model.modules() for value in vars(module).values())
    tensors = [_TensorState(tensor) for tensor in {id(t): t for t in _tensors_of(model)}.values()]
    generators = Generators.of(model)
    random, flags = generators.state(everything=True), _Flags()
    hooks = [_ParameterHooks(parameter) for parameter in model.parameters()]
    try:
        yield
    finally:
        for module in modules:
            module.restore()
        contents.restore()
        for tensor in tensors:
            tensor.restore()
        for each in hooks:
            each.restore()
        generators.set(random)
        flags.restore()


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


class _TensorState:
    """A buffer's value, and a parameter's or buffer's gradient. A forward that changes a parameter is refused."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        self._data = tensor.data if is_plain else None
        self._grad = tensor.grad if tensor.is_leaf else None
        self._value: torch.Tensor | None = None
        if not isinstance(tensor, nn.Parameter):
            # In host memory, and not counted where that is the device: training has no such copies, trial steps show
            # what it takes. Tables, queues and quantised weights may be large.
            is_moved = is_plain and tensor.device.type in ("cpu", "cuda")
            value = _each_once(tensor.detach())
            self._value = exclude(value.to("cpu", copy=True)) if is_moved else value.clone()

    def restore(self) -> None:
        if self._data is not None and self._data.data_ptr() != self._tensor.data_ptr():
            self._tensor.data = self._data  # somebody gave it other memory
        if self._value is not None and (place := _each_once(self._tensor.data)).shape == self._value.shape:
            # BatchNorm's kernel changes its statistics without telling the version counter: always copy.
            place.copy_(self._value)
        if self._tensor.is_leaf:
            self._tensor.grad = self._grad


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the repetitions of `expand`, which cannot be written to."""
    for dim, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class _ModuleState:
    """A module's attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)

    def restore(self) -> None:
        now: dict[str, Any] = self._module.__dict__
        for name in [name for name in now if name not in self._attributes]:
            del now[name]
        for name, value in self._attributes.items():
            if name not in now or now[name] is not value:
                now[name] = value


class _ParameterHooks:
    """A parameter's own hooks, which are taken away when this is made. autograd looks at the tables themselves."""

    def __init__(self, parameter: nn.Parameter) -> None:
        tables = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        self._tables: list[tuple[dict[int, Any], dict[int, Any]]] = [(table, dict(table)) for table in tables if table]
        for table, _ in self._tables:
            table.clear()

    def restore(self) -> None:
        for table, hooks in self._tables:
            table.clear()
            table.update(hooks)


class _Flags:
    """torch's global switches that measuring, or a forward, may turn."""

    def __init__(self) -> None:
        cudnn = torch.backends.cudnn
        self._cudnn = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
        self._grad_enabled = torch.is_grad_enabled()

    def restore(self) -> None:
        cudnn = torch.backends.cudnn
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = self._cudnn
        torch.set_grad_enabled(self._grad_enabled)
