"""How a stage ends: a matrix product or a convolution saves its arguments before it runs, and nothing afterwards.

When such a stage is recomputed only for what it saves, the product itself need not be computed: it is up to a third of
a transformer's block. Other operations are left alone: some fill what they save while they run.

A recomputation ends by an error that goes through the code on the stack, so what that code would have done afterwards
is not done. That must be nothing that anybody could miss: `follows_nothing` looks at each frame. A module of the user's
may go on with sums and return; one that calls anything more (a lock is released, a setting is put back), handles errors
or has hooks runs to its end.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable
from heapq import heappop, heappush
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_PRODUCTS = frozenset(f"{name}Backward0" for name in ("Addmm", "Baddbmm", "Bmm", "Convolution", "Linear", "Mm", "Mv"))

# These save no tensors.
_SAVE_NOTHING = frozenset(
    f"{name}Backward0"
    for name in (
        "Add", "Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Sub", "T", "ToCopy", "Transpose", "UnsafeView",
        "Unsqueeze", "View",
    )
)  # fmt: skip


class EndOfRunError(BaseException):
    """A repeated forward has saved all that is wanted; not an `Exception`, so that no model takes it for a failure."""


def saves_last_before_a_product(outputs: Iterable[torch.Tensor]) -> bool:
    """Whether the last operation that saved anything for these tensors is a product, looking back from the last one.

    Example:
        >>> weight = torch.ones(2, 2, requires_grad=True)
        >>> saves_last_before_a_product([torch.relu(weight) @ weight + 1])
        True
        >>> saves_last_before_a_product([torch.relu(weight @ weight)])
        False
    """
    pending: list[tuple[int, int, Any]] = []  # the latest first; the second number keeps nodes from being compared
    seen: set[Any] = set()

    def add(node: Any) -> None:
        # what a leaf's gradient goes to has no place in the order, and saves nothing
        if node is not None and node not in seen and node.name() != "torch::autograd::AccumulateGrad":
            seen.add(node)
            heappush(pending, (-node._sequence_nr(), len(seen), node))

    for tensor in outputs:
        add(tensor.grad_fn)
    while pending:
        node = heappop(pending)[2]
        if node.name() in _PRODUCTS:
            return True
        if node.name() not in _SAVE_NOTHING:
            return False
        for following, _ in node.next_functions:
            add(following)
    return False


# What a function of the user's may still do: add up what it has, and return it.
_HARMLESS = frozenset(
    (
        "BINARY_ADD", "BINARY_OP", "BUILD_TUPLE", "CACHE", "COPY", "COPY_FREE_VARS", "EXTENDED_ARG", "LOAD_CONST",
        "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_FAST_CHECK",
        "LOAD_FAST_LOAD_FAST", "LOAD_SMALL_INT", "NOP", "PRECALL", "RESUME", "STORE_FAST", "STORE_FAST_LOAD_FAST",
        "STORE_FAST_STORE_FAST", "SWAP",
    )
)  # fmt: skip


def _codes_of(*functions: Any) -> frozenset[CodeType]:
    return frozenset(function.__code__ for function in functions)


_CALLS = _codes_of(nn.Module._wrapped_call_impl, nn.Module._call_impl)
_PRODUCT_MODULES = _codes_of(
    nn.Linear.forward,
    *(kind.forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    *(kind._conv_forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
)
_SEQUENTIAL = nn.Sequential.forward.__code__


def follows_nothing(frame: FrameType | None, within: CodeType) -> bool:
    """Whether the code on the stack, up to a function, would do nothing more that matters.

    Args:
        frame: the innermost one.
        within: the code of the function that the error is to end in.
    """
    while frame is not None and frame.f_code is not within:
        if not _does_nothing_more(frame):
            return False
        frame = frame.f_back
    return frame is not None


def _does_nothing_more(frame: FrameType) -> bool:
    code = frame.f_code
    if frame.f_globals.get("__name__", "").startswith("lowtide."):
        return True  # packing hooks and layers of call sites
    if code in _CALLS or code in _PRODUCT_MODULES:
        return True  # a call with hooks runs in a function of its own, which is none of these
    if code is _SEQUENTIAL:
        children = list(frame.f_locals["self"]._modules.values())
        return all(map(is_harmless, children[children.index(frame.f_locals["module"]) + 1 :]))
    return not code.co_exceptiontable and not code.co_flags & _SUSPENDS and _only_returns(code, frame.f_lasti)


# Generators and coroutines: who drives them goes on by itself.
_SUSPENDS = 0x20 | 0x80 | 0x200


@functools.lru_cache(maxsize=4096)
def _only_returns(code: CodeType, index: int) -> bool:
    """Whether a function does nothing harmful from the instruction after an index to its return."""
    for instruction in dis.get_instructions(code):
        if instruction.offset <= index or instruction.opname in _HARMLESS:
            continue
        return instruction.opname == "RETURN_VALUE"
    return False


def is_harmless(module: nn.Module) -> bool:
    """Whether skipping a call of a module is harmless: it and everything in it is torch's own, without hooks."""
    return all(type(each).__module__.startswith("torch.nn.") and not _has_hooks(each) for each in module.modules())


def _has_hooks(module: nn.Module) -> bool:
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(kinds)
