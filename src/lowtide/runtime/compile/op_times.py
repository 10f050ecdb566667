"""How long operations take on the device, for a compiler that decides which of them it recomputes.

By itself inductor counts what products, convolutions and attention calculate, and recomputes what calculates least for
the bytes it frees. Much of that waits for memory instead: attention in windows of 49 tokens takes an H200 0.065 ms,
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

# The shortest of so many tries, each the mean of so many runs: so on an H200, beside other processes, the times of
# Swin-B's attention added up to what it takes in a step.
_NUM_TRIES = 5
_RUNS_EACH = 4

# The device waits so long before the runs of a try, a quarter of a millisecond, in which the host launches them.
_CYCLES_AHEAD = 500_000


# Products of equal numbers can be faster than others. Torch does not draw numbers of other types.
_DRAWN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def measured_times() -> Any:
    """What the compiler asks for the time of an operation; None: this version of torch does not ask.

    PyTorch's caches know it by a name: what was compiled once is found again, and nothing is measured for that.
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
    """What an operation of a graph takes with inputs of the same form: torch's own with random numbers.

    One that reads whole numbers is not run, since they may be places in another tensor, and neither is one that torch
    does not know. It is taken to be as fast as a copy of its result. Where a size is not known, it takes no time.
    """
    args, kwargs = _values((node.args, node.kwargs))
    tensors, results = _tensors((args, kwargs)), _tensors(_values(node))
    if not all(map(_has_known_form, (*tensors, *results))):
        return 0.0
    target: Any = node.target
    is_known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    with _disable_current_modes(), torch.no_grad():
        if is_known and all(each.is_floating_point() for each in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, made_up, (args, kwargs))
            return _seconds(lambda: target(*args, **kwargs), _device_of(tensors))
        copied = [made_up(each) for each in results]
        return _seconds(lambda: [each.clone() for each in copied], _device_of(copied))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


def _has_known_form(tensor: torch.Tensor) -> bool:
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


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


def made_up(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers in the form of a tensor that has none: random ones, where torch draws them."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    numbers = torch.empty(max(0, extent), dtype=tensor.dtype, device=tensor.device)
    numbers = numbers.normal_() if tensor.dtype in _DRAWN else numbers.fill_(1)
    return numbers.as_strided(tensor.shape, tensor.stride())


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
