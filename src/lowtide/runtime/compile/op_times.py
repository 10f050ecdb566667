"""How long operations take on the device, for a compiler that decides which of them it computes again.

By itself inductor counts what products, convolutions and attention calculate, and computes again what calculates least
for the bytes it frees. Much of that waits for memory instead: attention in windows of 49 tokens takes an H200 0.065 ms,
and the product that frees four times as many bytes 0.043 ms, though it calculates twenty times as much.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_NUM_TRIES = 5
_RUNS_EACH = 4

# Of the device, before the first run: time for the host to launch all of them.
_CYCLES_AHEAD = 500_000


@functools.cache
def measured_times() -> Any:
    """What the compiler asks for the time of an operation; None: this version of torch does not ask.

    It stands for itself in PyTorch's caches: what was compiled once is found again, whatever would be measured then.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomRuntimeEstimator  # importing it takes seconds
    except ImportError:  # torch 2.10 does not have it
        return None

    class MeasuredTimes(CustomRuntimeEstimator):
        def __init__(self) -> None:
            self._seconds: dict[Hashable, float] = {}

        def __call__(self, node: fx.Node) -> float:
            key = _form(node)
            if key not in self._seconds:
                self._seconds[key] = seconds_of(node)
            return self._seconds[key]

        def uuid(self) -> str:
            return "lowtide.op_times.1"  # another one where it measures something else

    return MeasuredTimes()


def seconds_of(node: fx.Node) -> float:
    """What an operation of a graph takes with inputs of the same form.

    Numbers that an operation finds its way by are not made up, nor are those of operations of others: such a one is
    taken to be as fast as copies of what it reads and returns.
    """
    args, kwargs = _values((node.args, node.kwargs))
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    target: Any = node.target
    is_known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    with _disable_current_modes(), torch.no_grad():
        if is_known and all(each.is_floating_point() for each in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _like, (args, kwargs))
            return _seconds(lambda: target(*args, **kwargs), _device_of(tensors))
        results = [each for each in pytree.tree_leaves(_values(node)) if isinstance(each, torch.Tensor)]
        copied = [_like(each) for each in (*tensors, *results)]
        return _seconds(lambda: [each.clone() for each in copied], _device_of(copied))


def _values(nodes: Any) -> Any:
    return pytree.tree_map_only(fx.Node, lambda node: node.meta["val"], nodes)


def _form(node: fx.Node) -> Hashable:
    """What the time of an operation depends on."""
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    return str(node.target), tuple(map(_described, _values(leaves)))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}"
    return repr(value)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    numbers = torch.empty(max(0, extent), dtype=tensor.dtype, device=tensor.device)
    return numbers.fill_(1).as_strided(tensor.shape, tensor.stride())


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    return next((each.device for each in tensors if each.is_cuda), torch.device("cpu"))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few tries, after one that counts for nothing."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        run()
        return min(_try_on_cuda(run) if device.type == "cuda" else _try(run) for _ in range(_NUM_TRIES))


def _try(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _try_on_cuda(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES_AHEAD)
    begin.record()
    for _ in range(_RUNS_EACH):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / _RUNS_EACH
