"""Calls that would pass a plan by: `model.forward(x)`, and code that is compiled while the plan is attached.

A plan is met at the call of its model. Whoever calls `forward` directly never comes there, and neither does compiled
code, which has the model's operations in it and none of its calls. The first is noticed when a unit is called; the
second is refused by `torch.compile` itself, as long as a plan is attached. What `torch.compile(model)` has returned
before is looked for when a plan is attached.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.errors import LowtideWarning, PlanError
from lowtide.runtime.model.call_site import Layer, Rank, layers_of
from lowtide.runtime.model.containers import reached_by

WHOLE_IS_COMPILED = (
    "the whole model is compiled, so its stages cannot be seen; pass the model without torch.compile, and "
    "compile_stages=True to compile its blocks"
)

WRAPPER_EXISTS = (
    "what torch.compile(model) has returned before runs this model without the plan; call the model itself, and pass "
    "compile_stages=True to fit to have it compiled"
)


class Bypass:
    """Warns, once, where a model's forward runs past its plan.

    Args:
        model: the model; it is not kept alive.
    """

    __slots__ = ("_is_told", "_model")

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._is_told = False

    def is_of(self, part: nn.Module) -> bool:
        """Whether a module is the model, or a part of it."""
        model = self._model()
        return model is not None and any(module is part for module in model.modules())

    def notice(self) -> None:
        """A unit is called outside of any step; that is a bypass where the model's own forward calls it."""
        model = self._model()
        if self._is_told or model is None or not model.training or torch.compiler.is_compiling():
            return
        depth = _depth_of_forward(model)
        if depth is None:
            return
        self._is_told = True
        kind = type(model).__name__
        how = "its forward was called directly; call the model itself, model(x)"
        if type(model).__call__ is not nn.Module.__call__:
            how = f"the __call__ of {kind} does not call nn.Module's; end it with super().__call__(...)"
        warnings.warn(
            f"this {kind} runs without its plan and may exceed the budget: {how}; or detach the plan (plan.detach())",
            LowtideWarning,
            stacklevel=depth + 2,
        )


def _depth_of_forward(model: nn.Module) -> int | None:
    """How many frames up a model's forward is called; None: it does not run."""
    own = getattr(getattr(model.forward, "__func__", model.forward), "__code__", None)
    frame, depth = sys._getframe(1), 0
    while (back := frame.f_back) is not None:
        frame, depth = back, depth + 1
        code = frame.f_code
        if code.co_name != "forward" and code is not own:
            continue
        if code.co_varnames and frame.f_locals.get(code.co_varnames[0]) is model:
            return depth
    return None


def has_compiled_wrapper(model: nn.Module) -> bool:
    """Whether there is a module somewhere that `torch.compile(model)` has returned."""
    holders = (each for each in gc.get_referrers(model) if isinstance(each, dict))
    return any(each.get("_orig_mod") is model for each in holders)


# torch.compile is replaced while plans are attached.
_lock = threading.Lock()
_num_guarded = 0
_plain_compile = torch.compile


@functools.wraps(torch.compile)
def _compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    for module in _modules_compiled_with(model):
        _refuse_under_plan(module)
    return _plain_compile(model, *args, **kwargs)


def guard_against_compiling() -> None:
    """A plan is attached: `torch.compile` refuses to compile its model until `end_guard`."""
    global _num_guarded, _plain_compile
    with _lock:
        _num_guarded += 1
        if _num_guarded == 1:
            _plain_compile = torch.compile
            torch.compile = _compile


def end_guard() -> None:
    """A plan is detached."""
    global _num_guarded
    with _lock:
        _num_guarded -= 1
        if not _num_guarded and torch.compile is _compile:  # else somebody has replaced it since
            torch.compile = _plain_compile


def _modules_compiled_with(target: Any) -> Iterator[nn.Module]:
    """The modules that a module, a method (`Module.compile` hands over one) or a function holds, as far as is seen."""
    return (value for value in (target, *reached_by(target)) if isinstance(value, nn.Module))


def _refuse_under_plan(module: nn.Module) -> None:
    found: tuple[nn.Module, str] | None = None
    for each in module.modules():
        for layer in layers_of(each, Layer):
            bypass = getattr(layer, "bypass", None)
            if layer.rank is Rank.MODEL:
                found = each, "runs"
            elif found is None and isinstance(bypass, Bypass) and bypass.is_of(module):
                found = module, "is part of a model that runs"
    if found is None:
        return
    raise PlanError(
        f"this {type(found[0]).__name__} {found[1]} under a plan, which compiled code would bypass; call plan.detach() "
        "and pass compile_stages=True to fit, which compiles its blocks and plans with them"
    )
