"""Runs models on the meta device, without data, and counts what their operations would cost.

Tensors on the meta device have sizes and no memory, so that bytes are those of a real run. Three things need data, and
are answered here instead:

- the time of an operation: the larger of its FLOPs over the card's rate and of its bytes over the memory's bandwidth;
- a number that the model reads from a tensor: 0, and True for a condition; `num_guesses` counts these;
- which attention kernel runs: the one that CUDA would choose, and not the one of last resort, which saves whole
  matrices of scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from lowtide.runtime.measure.cards import Card

# Flash attention takes 16-bit numbers and heads up to this width.
_WIDEST_FLASH_HEAD = 256

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
