"""Stepping between a caller and a module, in a way that leaves no trace in the module's type, names, state or copies.

`nn.Module.__call__` first looks at the instance's `_compiled_call_impl`, which is where `Module.compile` puts its
result. A call site stored there sees every call of that one module, hooks included, and `deepcopy`, `pickle` and
`torch.save` leave it out by themselves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.errors import PlanError

_ATTRIBUTE = "_compiled_call_impl"


class Session(Protocol):
    """Whoever watches one call of the model."""

    def call_unit(self, site: UnitSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one unit and return its result."""


class _Current(threading.local):
    """The session of each thread."""

    session: Session | None = None


class _Site:
    """What stands in a module's `_compiled_call_impl`."""

    __slots__ = ("__weakref__", "_compiled", "_module", "_standing", "previous")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.previous: Callable[..., Any] | None = module.__dict__.get(_ATTRIBUTE)
        self._standing: Any = self.previous  # what is put back; another one where the module is compiled anew
        self._compiled = _behind_sites(module)  # what is called where no site of another plan follows

    @property
    def module(self) -> nn.Module:
        """The module; it is alive whenever it is called."""
        module = self._module()
        assert module is not None
        return module

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """What the call would be without lowtide."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return self.module._call_impl(*args, **kwargs)

    def install(self) -> None:
        standing = self.module.__dict__.get(_ATTRIBUTE)
        if standing is not self:
            self._standing = standing
            self.previous = self._standing if isinstance(standing, _Site) else self._compiled
        self.module.__dict__[_ATTRIBUTE] = self

    def remove(self) -> None:
        module = self._module()
        if module is None or module.__dict__.get(_ATTRIBUTE) is not self:
            self._leave_chain(module)  # the module is gone, compiled since, or another plan stands before this one
        elif self._standing is None or getattr(self._standing, "is_removed", False):
            del module.__dict__[_ATTRIBUTE]
        else:
            module.__dict__[_ATTRIBUTE] = self._standing
        self.previous = self._compiled  # a site of another plan may be gone, or stand before this one, by the next time

    def _leave_chain(self, module: nn.Module | None) -> None:
        """Let the site that stands before this one call what this one called."""
        site = None if module is None else module.__dict__.get(_ATTRIBUTE)
        while isinstance(site, _Site):
            following: object = site.previous
            if following is self:
                site.previous = self.previous if isinstance(self.previous, _Site) else site._compiled
                if site._standing is self:
                    site._standing = self._standing
                return
            site = following


class UnitSite(_Site):
    """The calls of one submodule; `positions` says which of them are units, and where in the order of all units."""

    __slots__ = ("current", "path", "positions")

    def __init__(self, module: nn.Module, path: str, positions: dict[int, int], current: _Current) -> None:
        super().__init__(module)
        self.path = path
        self.positions = positions
        self.current = current

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to the session of this thread, where there is one."""
        session = self.current.session
        if session is None:
            return self.plain(*args, **kwargs)
        return session.call_unit(self, args, kwargs)


class ModelSite(_Site):
    """The calls of the model itself, handed to `handler(plain, args, kwargs)`."""

    __slots__ = ("handler",)

    def __init__(self, module: nn.Module, handler: Callable[..., Any]) -> None:
        super().__init__(module)
        self.handler = handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to the handler."""
        return self.handler(self.plain, args, kwargs)


class Interception:
    """The call sites of one model and of its units; put in place by `install`, taken away by `remove`.

    Args:
        model: the model.
        units: (path, occurrence) of each unit, in the order of their calls.
        handler: called as `handler(plain, args, kwargs)` in place of the model.
    """

    def __init__(self, model: nn.Module, units: Iterable[tuple[str, int]], handler: Callable[..., Any]) -> None:
        self.current = _Current()
        positions: dict[str, dict[int, int]] = {}
        for position, (path, occurrence) in enumerate(units):
            positions.setdefault(path, {})[occurrence] = position
        modules = {path: _submodule(model, path) for path in positions}
        if len(set(map(id, modules.values()))) != len(modules):
            raise PlanError("one submodule appears under two paths among the units; name it by one of them")
        self._sites: list[_Site] = [
            UnitSite(modules[path], path, found, self.current) for path, found in positions.items() if path
        ]
        self._whole = UnitSite(model, "", positions[""], self.current) if "" in positions else None
        self._sites.append(ModelSite(model, handler))

    @property
    def is_within_another(self) -> bool:
        """Whether this thread is inside a step of a plan that watches some of the same modules."""
        standing = (other for site in self._sites for other in _sites_of(site.module))
        return any(isinstance(other, UnitSite) and other.current.session is not None for other in standing)

    def whole_or(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """How the session calls the model: as a unit where the model as a whole is one, else plainly."""
        return plain if self._whole is None else self._whole

    def install(self) -> None:
        """Step in."""
        for site in self._sites:
            site.install()

    def remove(self) -> None:
        """Step out; each module is called as before."""
        for site in self._sites:
            site.remove()


def attached_site(model: nn.Module) -> Any:
    """Whatever stands between a model and its callers, where anything does."""
    return model.__dict__.get(_ATTRIBUTE)


def planned_part_of(model: nn.Module) -> str | None:
    """The path of a submodule that has a plan of its own."""
    parts = ((path, module) for path, module in model.named_modules() if module is not model)
    return next((path for path, module in parts if isinstance(attached_site(module), ModelSite)), None)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module run compiled code, whoever stands in between."""
    return _behind_sites(module) is not None


def _behind_sites(module: nn.Module) -> Callable[..., Any] | None:
    call: Callable[..., Any] | None = module.__dict__.get(_ATTRIBUTE)
    for site in _sites_of(module):
        call = site.previous
    return call


def _sites_of(module: nn.Module) -> Iterator[_Site]:
    """The sites that a call of the module passes, of whatever plans."""
    call = module.__dict__.get(_ATTRIBUTE)
    while isinstance(call, _Site):
        yield call
        call = call.previous


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise PlanError(f"the model has no submodule {path!r}, which the plan names as a unit") from None
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(f"submodule {path!r} is a TorchScript module, which cannot be watched; attach to the original")
    return module
