"""Intercepts calls of a model and its units, for one plan or one recording."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.errors import PlanError
from lowtide.runtime.model.call_site import Layer, Rank, layers_of


class Session(Protocol):
    """Whoever watches one call of the model."""

    def call_unit(self, layer: UnitLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one unit and return its result."""


class _CurrentSession(threading.local):
    """The session of each thread."""

    session: Session | None = None


class UnitLayer(Layer):
    """The calls of one submodule; `positions` says which of them are units, and where in the order of all units."""

    __slots__ = ("current", "path", "positions")

    rank = Rank.UNIT

    def __init__(self, module: nn.Module, path: str, positions: dict[int, int], current: _CurrentSession) -> None:
        super().__init__(module)
        self.path = path
        self.positions = positions
        self.current = current

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to the session of this thread, where there is one."""
        session = self.current.session
        if session is None:
            return self.pass_on(*args, **kwargs)
        return session.call_unit(self, args, kwargs)


class ModelLayer(Layer):
    """The calls of the model itself, handed to `handler(plain, args, kwargs)`."""

    __slots__ = ("handler",)

    rank = Rank.MODEL

    def __init__(self, module: nn.Module, handler: Callable[..., Any]) -> None:
        super().__init__(module)
        self.handler = handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to the handler."""
        return self.handler(self.pass_on, args, kwargs)


class Interception:
    """The layers of one model and of its units; put in place by `install`, taken away by `remove`.

    Args:
        model: the model.
        units: (path, occurrence) of each unit, in the order of their calls.
        handler: called as `handler(plain, args, kwargs)` in place of the model.
    """

    def __init__(self, model: nn.Module, units: Iterable[tuple[str, int]], handler: Callable[..., Any]) -> None:
        self.current = _CurrentSession()
        positions: dict[str, dict[int, int]] = {}
        for position, (path, occurrence) in enumerate(units):
            positions.setdefault(path, {})[occurrence] = position
        modules = {path: _submodule(model, path) for path in positions}
        if len(set(map(id, modules.values()))) != len(modules):
            raise PlanError("a submodule appears under two paths among the units; use only one of them")
        self._layers: list[Layer] = [
            UnitLayer(modules[path], path, found, self.current) for path, found in positions.items() if path
        ]
        self._whole = UnitLayer(model, "", positions[""], self.current) if "" in positions else None
        self._layers.append(ModelLayer(model, handler))

    @property
    def is_within_another(self) -> bool:
        """Whether this thread is inside a step of a plan that watches some of the same modules."""
        others = (other for layer in self._layers for other in layers_of(layer.module, UnitLayer))
        return any(other.current.session is not None for other in others)

    def whole_or(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """How the session calls the model: as a unit where the model as a whole is one, else plainly."""
        return plain if self._whole is None else self._whole

    def install(self) -> None:
        """Step in."""
        for layer in self._layers:
            layer.push()

    def remove(self) -> None:
        """Step out; each module is called as before."""
        for layer in self._layers:
            layer.remove()


def handler_of(model: nn.Module) -> Callable[..., Any] | None:
    """Who is called in place of a model, where anybody is."""
    return next((layer.handler for layer in layers_of(model, ModelLayer)), None)


def planned_part_of(model: nn.Module) -> str | None:
    """The path of a submodule that has a plan of its own."""
    parts = ((path, module) for path, module in model.named_modules() if module is not model)
    return next((path for path, module in parts if handler_of(module) is not None), None)


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise PlanError(f"the model has no submodule {path!r}; use the model that the plan was made for") from None
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(f"submodule {path!r} is a TorchScript module, which cannot be watched; use the original module")
    return module
