"""What surrounds a computation besides its arguments: gradient mode, autocast, modes, and the choice of kernels.

A stage that is recomputed in backward must see these as in its first run, although by then the user's `with`
blocks have ended. Random numbers are in `lowtide.runtime.state.rng`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import (
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from lowtide.errors import ExecutionError

_DEVICE_TYPES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


# The process-wide switches that decide which kernel an operation takes, and with which numbers: what reads each, and
# what sets it. The first ones matter to CUDA alone.
_KERNELS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch._C._get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch._C._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch._C._get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
)
_NUM_FOR_CUDA = 5

Kernels = tuple[Any, ...]
"""What these switches say."""


def kernels_now() -> Kernels:
    """As they are for this process."""
    return tuple([read() for read, _ in _KERNELS])


def set_kernels(kernels: Kernels) -> None:
    """Set them."""
    for (_, write), value in zip(_KERNELS, kernels, strict=True):
        write(value)


# What is asked for at every recorded call.
_SWITCHES = (
    torch.is_grad_enabled,
    torch.is_autocast_cache_enabled,
    *(read for read, _ in _KERNELS[0 if torch.cuda.is_available() else _NUM_FOR_CUDA :]),
)


class Surroundings(NamedTuple):
    """Gradient mode, autocast, modes and the choice of kernels at one moment; equal if nothing has changed."""

    grad_enabled: bool
    autocast: tuple[torch.dtype | None, ...]
    """For each type of device the dtype, None where autocast is off."""
    autocast_cache: bool
    modes: tuple[tuple[Any, ...], tuple[Any, ...]]
    """The user's modes that see functions (`TorchFunctionMode`), and those that see operations, the outermost first."""
    kernels: Kernels

    @classmethod
    def now(cls) -> Surroundings:
        """As they are for this thread; without modes, the same object as long as nothing changes."""
        global _last
        switches = None
        autocast = _autocast_now() if _is_any_autocast_enabled() else _NO_AUTOCAST
        if not (_len_torch_function_stack() or _len_torch_dispatch_stack()):
            switches = [autocast, *[read() for read in _SWITCHES]]
            if _last is not None and switches == _last[0]:
                return _last[1]
        modes = _function_modes(), _dispatch_modes()
        found = cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), modes, kernels_now())
        if switches is not None:
            _last = switches, found
        return found

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the block in these surroundings."""
        kernels = kernels_now()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device_type, dtype in zip(_DEVICE_TYPES, self.autocast, strict=True):
                enabled = dtype is not None
                stack.enter_context(torch.autocast(device_type, dtype, enabled, self.autocast_cache))
            stack.enter_context(_modes_in_place(self.modes))
            if kernels != self.kernels:
                stack.callback(set_kernels, kernels)
                set_kernels(self.kernels)
            if _is_filling:
                _fill_memory()
            yield


@contextmanager
def filling_memory() -> Iterator[None]:
    """Run the block with fresh memory filled with NaN, or the largest whole number, in whatever surroundings.

    torch does that with deterministic algorithms; where an operation has none, it is to warn nobody.
    """
    global _is_filling
    kernels, fills = kernels_now(), torch._C._get_deterministic_fill_uninitialized_memory()
    _is_filling = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _fill_memory()
            yield
    finally:
        _is_filling = False
        set_kernels(kernels)
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


_is_filling = False


def _fill_memory() -> None:
    if torch.get_deterministic_debug_mode() == 0:
        torch.set_deterministic_debug_mode("warn")
    torch._C._set_deterministic_fill_uninitialized_memory(True)


_last: tuple[list[Any], Surroundings] | None = None  # switches without modes, and what they say


def _autocast_now() -> tuple[torch.dtype | None, ...]:
    """For each type of device the dtype, None where autocast is off."""
    return tuple(
        [torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None for each in _DEVICE_TYPES]
    )


_NO_AUTOCAST: tuple[torch.dtype | None, ...] = (None,) * len(_DEVICE_TYPES)


def _function_modes() -> tuple[Any, ...]:
    """The modes that see functions; lowtide's own, which follows the code between units, is not one of the user's."""
    stack = (_get_function_stack_at(index) for index in range(_len_torch_function_stack()))
    return tuple(mode for mode in stack if not _is_ours(mode))


def _dispatch_modes() -> tuple[Any, ...]:
    """The modes that see operations; those that only count or watch are lowtide's own."""
    return tuple(mode for mode in _get_current_dispatch_mode_stack() if not _is_ours(mode))


def _is_ours(mode: Any) -> bool:
    return type(mode).__module__.startswith("lowtide.")


@contextmanager
def _modes_in_place(modes: tuple[tuple[Any, ...], tuple[Any, ...]]) -> Iterator[None]:
    """Run the block with these modes instead of the user's current ones."""
    of_functions, of_operations = modes
    if (_function_modes(), _dispatch_modes()) == modes:
        yield
        return
    taken = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    seen = _get_current_dispatch_mode_stack()
    try:
        _set_dispatch_modes([*of_operations, *filter(_is_ours, seen)])
        for mode in (*of_functions, *filter(_is_ours, reversed(taken))):
            _push_on_torch_function_stack(mode)
        yield
    finally:
        while _len_torch_function_stack():
            _pop_torch_function_stack()
        for mode in reversed(taken):
            _push_on_torch_function_stack(mode)
        _set_dispatch_modes(seen)


def _set_dispatch_modes(modes: list[Any]) -> None:
    while _get_current_dispatch_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def refuse_saved_tensor_hooks() -> None:
    """Refuse the user's hooks around a call: the plan's own hooks would replace them.

    Raises:
        ExecutionError: where there are some.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or (getattr(hooks[0], "__module__", None) or "").startswith("lowtide."):
        return
    raise ExecutionError(
        "the model is called inside saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks, save_on_cpu), which "
        "would not see what autograd saves under a plan; call it outside them, or call plan.detach()"
    )


def refuse_weight_cache(model: nn.Module) -> None:
    """Refuse a call inside `parametrize.cached()` of a model with parametrised weights: the cache is gone in backward.

    Raises:
        ExecutionError: where it is.
    """
    if not parametrize._cache_enabled:
        return
    found = next((path for path, module in model.named_modules() if parametrize.is_parametrized(module)), None)
    if found is not None:
        raise ExecutionError(
            f"the model is called inside parametrize.cached(), so a recomputation of {found!r} would not find its "
            "weight in that cache; call the model outside of it, or call plan.detach()"
        )
