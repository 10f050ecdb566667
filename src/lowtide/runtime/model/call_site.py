"""The one owner of a module's call: ordered layers between its callers and what it ran before.

`nn.Module.__call__` first looks at the instance's `_compiled_call_impl`, which is where `Module.compile` puts its
result. A `CallSite` stored there sees every call of that one module, hooks included, and `deepcopy`, `pickle` and
`torch.save` leave it out by themselves. Nobody else writes there: whoever wants to see, or to replace, the calls of a
module pushes a `Layer` and removes it again. Layers come and go in any order; with the last one the site goes, and what
stood there before is back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from torch import nn

_ATTRIBUTE = "_compiled_call_impl"
_NOTHING = object()  # the attribute was not there at all


class Rank(IntEnum):
    """Which layer is called first: the highest."""

    CODE = 0
    """Runs the module as compiled code."""
    LAYOUT = 1
    """Lays out what the module is given in another way."""
    UNIT = 2
    """Hands the call to the step that the module is a unit of."""
    MODEL = 3
    """Passes the call to a plan or a recording."""
    REPORT = 4
    """Tells of the call."""


class Layer:
    """Stands between the callers of one module and the module; passes a call on, or does something else.

    Args:
        module: the module; it is not kept alive.
    """

    __slots__ = ("__weakref__", "_code", "_module", "inner", "site")

    rank: Rank
    tells_stages = False
    """Whether a model that runs so can still be followed stage by stage."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._code = code_of(module)
        self.inner: Layer | None = None
        """The layer that comes after this one; the site sees to it."""
        self.site: CallSite | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the module."""
        return self.pass_on(*args, **kwargs)

    def pass_on(self, *args: Any, **kwargs: Any) -> Any:
        """What the call would be without this layer."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return self.plain(*args, **kwargs) if self.site is None else self.site.original(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The module; it is alive whenever it is called."""
        module = self._module()
        assert module is not None
        return module

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """What the module ran when this layer was made: compiled code or its own; also after the layer was removed.

        A plan keeps to the code that it was made with, whatever other plans of the module's models come and go.
        """
        if self._code is not None:
            return self._code(*args, **kwargs)
        return self.module._call_impl(*args, **kwargs)

    def push(self) -> None:
        """Take part in the module's calls; nothing happens where it does already."""
        if self.site is not None and self.site.is_in_place:
            return
        self.remove()
        site = CallSite.of(self.module) or CallSite(self.module)
        site.add(self)

    def remove(self) -> None:
        """Take part in them no more."""
        if self.site is not None:
            self.site.discard(self)


_Layer = TypeVar("_Layer", bound=Layer)


class CallSite:
    """Replaces a module's `_compiled_call_impl`: its layers, and what was there before."""

    __slots__ = ("_module", "_standing", "layers")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._standing: Any = vars(module).get(_ATTRIBUTE, _NOTHING)
        self.layers: list[Layer] = []
        """Those that are called first, first."""

    @classmethod
    def of(cls, module: nn.Module) -> CallSite | None:
        """The site of a module, where it has one."""
        site = vars(module).get(_ATTRIBUTE)
        return site if isinstance(site, cls) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the first layer."""
        return (self.layers[0] if self.layers else self.original)(*args, **kwargs)

    @property
    def is_in_place(self) -> bool:
        """Whether calls of the module still come here; other code may have replaced it."""
        module = self._module()
        return module is not None and vars(module).get(_ATTRIBUTE) is self

    @property
    def compiled(self) -> Callable[..., Any] | None:
        """The compiled code that was there before any layer."""
        return None if self._standing is _NOTHING else self._standing

    def add(self, layer: Layer) -> None:
        """Let a layer take part: before all of its rank and of lower ones."""
        module = self._module()
        assert module is not None
        place = next((i for i, other in enumerate(self.layers) if other.rank <= layer.rank), len(self.layers))
        self.layers.insert(place, layer)
        layer.site = self
        self._connect()
        vars(module)[_ATTRIBUTE] = self

    def discard(self, layer: Layer) -> None:
        """Let a layer go, and with the last one the site."""
        layer.site = layer.inner = None
        self.layers.remove(layer)
        self._connect()
        if not self.layers and self.is_in_place:
            self._put_back()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the call would be without any layer."""
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        module = self._module()
        assert module is not None
        return module._call_impl(*args, **kwargs)

    def _connect(self) -> None:
        following: Layer | None = None
        for layer in reversed(self.layers):
            layer.inner, following = following, layer

    def _put_back(self) -> None:
        module = self._module()
        assert module is not None
        if self._standing is _NOTHING:
            del vars(module)[_ATTRIBUTE]
        else:
            vars(module)[_ATTRIBUTE] = self._standing


def layers_of(module: nn.Module, kind: type[_Layer]) -> list[_Layer]:
    """The layers of one kind that a call of the module passes, in that order."""
    site = CallSite.of(module)
    return [] if site is None else [layer for layer in site.layers if isinstance(layer, kind)]


def code_of(module: nn.Module) -> Callable[..., Any] | None:
    """The compiled code that calls of a module run, below all layers; None: its own."""
    site = CallSite.of(module)
    if site is None:
        return vars(module).get(_ATTRIBUTE)
    return next((layer for layer in site.layers if layer.rank is Rank.CODE), site.compiled)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module run compiled code, below all layers."""
    return code_of(module) is not None


def hides_stages(model: nn.Module) -> bool:
    """Whether a model runs as compiled code that cannot be followed stage by stage."""
    code = code_of(model)
    return code is not None and not (isinstance(code, Layer) and code.tells_stages)
