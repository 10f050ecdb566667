"""Intercepts calls of a model and its units, for one plan or one recording."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.errors import CaptureError, PlanError
from lowtide.runtime.model.bypass import WHOLE_IS_COMPILED, Bypass, end_guard, guard_against_compiling
from lowtide.runtime.model.call_site import Layer, Rank, hides_stages, layers_of


class Session(Protocol):
    """Whoever watches one call of the model."""

    def call_unit(self, layer: UnitLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one unit and return its result."""


class _CurrentSession(threading.local):
    """The session of each thread."""

    session: Session | None = None
    num_inside: int = 0
    """How many calls of the model are under way, with a session or without one."""


class _AllCalls(threading.local):
    """Of each thread, those of all models that are intercepted."""

    num_inside: int = 0


_all_calls = _AllCalls()


class UnitLayer(Layer):
    """The calls of one submodule; `positions` says which of them are units, and where in the order of all units."""

    __slots__ = ("bypass", "current", "path", "positions")

    rank = Rank.UNIT

    def __init__(
        self,
        module: nn.Module,
        path: str,
        positions: dict[int, int],
        current: _CurrentSession,
        bypass: Bypass | None = None,
    ) -> None:
        super().__init__(module)
        self.bypass = bypass
        self.path = path
        self.positions = positions
        self.current = current

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to the session of this thread, where there is one."""
        session = self.current.session
        if session is None:
            if self.bypass is not None and not self.current.num_inside and torch.is_grad_enabled():
                self.bypass.notice()
            return self.pass_on(*args, **kwargs)
        return session.call_unit(self, args, kwargs)


class ModelLayer(Layer):
    """The calls of the model itself, handed to `handler(plain, args, kwargs)`."""

    __slots__ = ("current", "handler")

    rank = Rank.MODEL

    def __init__(self, module: nn.Module, handler: Callable[..., Any], current: _CurrentSession) -> None:
        super().__init__(module)
        self.handler = handler
        self.current = current

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to the handler."""
        self.current.num_inside += 1
        _all_calls.num_inside += 1
        try:
            return self.handler(self.pass_on, args, kwargs)
        finally:
            self.current.num_inside -= 1
            _all_calls.num_inside -= 1


class Interception:
    """The layers of one model and of its units; put in place by `install`, taken away by `remove`.

    Args:
        model: the model.
        units: (path, occurrence) of each unit, in the order of their calls.
        handler: called as `handler(plain, args, kwargs)` in place of the model.
        guards: whether calls that pass the handler by are noticed, and compiling the model is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[tuple[str, int]],
        handler: Callable[..., Any],
        *,
        guards: bool = False,
    ) -> None:
        self._guards = guards
        self._is_installed = False
        self.current = _CurrentSession()
        positions: dict[str, dict[int, int]] = {}
        for position, (path, occurrence) in enumerate(units):
            positions.setdefault(path, {})[occurrence] = position
        modules = {path: _submodule(model, path) for path in positions}
        if any(positions) and (hides_stages(model) or type(model).__name__ == "OptimizedModule"):
            raise PlanError(WHOLE_IS_COMPILED)
        if len(set(map(id, modules.values()))) != len(modules):
            raise PlanError("a submodule appears under two paths among the units; use only one of them")
        bypass = Bypass(model) if guards else None
        self._layers: list[Layer] = [
            UnitLayer(modules[path], path, found, self.current, bypass) for path, found in positions.items() if path
        ]
        self._whole = UnitLayer(model, "", positions[""], self.current) if "" in positions else None
        self._layers.append(ModelLayer(model, handler, self.current))

    @property
    def is_within_another(self) -> bool:
        """Whether this thread, in a call of the model, is in a step of a plan that watches some of its modules, too."""
        if _all_calls.num_inside < 2:  # nearly always: the call itself is one
            return False
        others = (other for layer in self._layers for other in layers_of(layer.module, UnitLayer))
        return any(other.current.session is not None for other in others)

    def whole_or(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """How the session calls the model: as a unit where the model as a whole is one, else plainly."""
        return plain if self._whole is None else self._whole

    def install(self) -> None:
        """Step in."""
        if self._guards and not self._is_installed:
            guard_against_compiling()
        self._is_installed = True
        for layer in self._layers:
            layer.push()

    def remove(self) -> None:
        """Step out; each module is called as before."""
        if self._guards and self._is_installed:
            end_guard()
        self._is_installed = False
        for layer in self._layers:
            layer.remove()


def handler_of(model: nn.Module) -> Callable[..., Any] | None:
    """The handler that is called instead of a model, if any."""
    return next((layer.handler for layer in layers_of(model, ModelLayer)), None)


def planned_part_of(model: nn.Module) -> str | None:
    """The path of a submodule that has its own plan."""
    parts = ((path, module) for path, module in model.named_modules() if module is not model)
    return next((path for path, module in parts if handler_of(module) is not None), None)


def refuse_scripted(model: nn.Module) -> None:
    """Refuse TorchScript: what its modules keep and change is in C++, where it can be neither seen nor put back.

    Raises:
        CaptureError: with the first part that is scripted or traced.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            part = f"submodule {path!r}" if path else "the model"
            raise CaptureError(
                f"{part} is a TorchScript module (torch.jit.script, torch.jit.trace), whose calls and state cannot be "
                "watched; use the module that it was made from, and compile_stages=True to have it compiled"
            )


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise PlanError(f"the model has no submodule {path!r}; use the model that the plan was made for") from None
    return module
