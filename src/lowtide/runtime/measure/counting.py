"""Runs models on the meta device, without data, and counts what their operations would cost.

Tensors on the meta device have sizes and no memory, so that bytes are those of a real run. Three things need data, and
are answered here instead:

- the time of an operation: the larger of its FLOPs over the card's rate and of its bytes over the memory's bandwidth;
- a number that the model reads from a tensor: 0, and True for a condition; `num_guesses` counts these;
- which attention kernel runs: the one that CUDA would choose, and not the one of last resort, which saves whole
  matrices of scores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

from lowtide.errors import LowtideError
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.measure.cards import Card, find_card
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split

# Flash attention takes 16-bit numbers and heads up to this width.
_WIDEST_FLASH_HEAD = 256

# Where no time is asked for, any will do.
_ANY_CARD = "a100"

_COMPARISONS = frozenset((torch.ops.aten.equal.default, torch.ops.aten.allclose.default))
_READS = _COMPARISONS | {torch.ops.aten._local_scalar_dense.default}


class Counter(TorchDispatchMode):
    """Adds up what operations on the meta device would take on a card."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card
        self.seconds = 0.0
        self.num_guesses = 0
        """How many numbers the model has read from tensors that have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            return self._guessed(func, args)
        out = func(*args, **kwargs)
        self.seconds += self._seconds(func, args, kwargs, out)
        return out

    def _guessed(self, func: Any, args: Any) -> bool | int:
        if func in _COMPARISONS:  # lowtide itself asks whether something has changed
            return True
        self.num_guesses += 1
        return True if args[0].dtype is torch.bool else 0

    def _seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        made = [value for value in tree_iter(out) if isinstance(value, torch.Tensor)]
        if not made or func.is_view:
            return 0.0
        tensors = [value for value in tree_iter((args, kwargs, out)) if isinstance(value, torch.Tensor)]
        moving = sum(map(_num_bytes, tensors)) / self._card.bandwidth_bytes_per_second
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count is not None else 0
        return max(moving, flops / self._card.flops(made[0].dtype))


class _Attention(TorchFunctionMode):
    """Runs the fused kernels of attention for tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention or not args[0].is_meta:
            return func(*args, **kwargs)
        return _fused(*args, **kwargs)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    is_flash = query.dtype in (torch.float16, torch.bfloat16) and query.size(-1) <= _WIDEST_FLASH_HEAD
    if is_flash and attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_counters: list[Counter] = []


@contextmanager
def counting(card: Card) -> Iterator[Counter]:
    """Within the block, measure models on the meta device: what they would cost on a card."""
    counter = Counter(card)
    _counters.append(counter)
    try:
        with counter, _Attention():
            yield counter
    finally:
        _counters.remove(counter)


def current_counter() -> Counter | None:
    """The innermost counter."""
    return _counters[-1] if _counters else None


def without_data(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have shapes but no data; the model itself if it has none."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return model
    known: dict[int, Any] = {}  # what `deepcopy` takes for each tensor, so that it copies none
    for tensor in tensors:
        empty = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, known)


def capture_without_data(
    model: nn.Module, sample: Any, *, loss: Callable[[Any], Any] | None = None, **options: Any
) -> Split:
    """As `capture`, by shapes alone; where that does not work, by running the model with its weights where they are.

    A loss may have data of its own, such as labels: then the model is captured without it.
    """
    empty, called = without_data(model), Sample.of(sample)
    given = (called.args, dict(called.kwargs))
    shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta").requires_grad_(tensor.requires_grad), given)
    for tried in dict.fromkeys((loss, None)):
        try:
            with counting(find_card(_ANY_CARD)):
                return capture(empty, Sample(*shapes), loss=tried, **options)
        except (LowtideError, RuntimeError, TypeError, ValueError):
            continue
    return capture(model, sample, loss=loss, **options)
