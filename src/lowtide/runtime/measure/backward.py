"""The backward of one stage alone, with memory freed as in a whole step.

Within a step, when the backward of stage k begins, its output and the gradient of that output are in autograd's hands
alone, and are freed as soon as the first nodes have used them: a convolution's backward behind a ReLU's finds neither
any more. Whoever measures a stage must not hold them either.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class BackwardStart:
    """Where a backward starts.

    Args:
        roots: the tensors that it starts from.
        seeds: their gradients.
        gradient_bytes: of the gradients that are made when it starts, beside the seeds.
        also: what is kept alive as long as this.
        made: filled by `run` with the storages of the gradients that are made when it starts; not kept alive.
    """

    roots: list[torch.Tensor]
    seeds: list[torch.Tensor]
    gradient_bytes: int
    also: Any
    made: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)

    @classmethod
    def held(cls, starts: Sequence[torch.Tensor], also: Any = ()) -> BackwardStart:
        """The caller keeps the tensors and their gradients."""
        return cls(list(starts), [torch.ones_like(tensor) for tensor in starts], 0, also)

    @classmethod
    def owned_by_graph(cls, starts: Sequence[torch.Tensor], also: Any = ()) -> BackwardStart:
        """Only the graph holds the tensors, and autograd makes and owns their gradients."""
        if not starts:
            return cls([], [], 0, also)
        made: list[weakref.ref[torch.UntypedStorage]] = []
        with torch.enable_grad():
            root = _Root.apply(made, *starts)
        gradient_bytes = sum(tensor.numel() * tensor.element_size() for tensor in starts)
        return cls([root], [torch.ones_like(root)], gradient_bytes, also, made)

    def is_passed_on(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient that was found is one of those that were made, or a view of it."""
        if gradient is None or gradient.layout is not torch.strided:
            return False
        return any(reference() is gradient.untyped_storage() for reference in self.made)

    def run(self, wanted: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of these leaves."""
        if not wanted:
            return ()
        return torch.autograd.grad(self.roots, wanted, self.seeds, allow_unused=True)


def wait_for_autograd(device: torch.device) -> None:
    """Wait until autograd has freed everything of the last backward.

    On CUDA it runs in a thread of its own, which says that it is done while it still has its last gradient in hand, and
    turns to this empty backward when it has freed it. On a busy machine with an H200 the gradient was still there in
    15 of 1500 tries, and in none after waiting. It may count as there before whatever is counted next, which then seems
    to take less: presumably why a prediction was once too low by the 50 MiB of an embedding's gradient.
    """
    if device.type == "cuda":
        leaf = torch.empty(0, device=device, requires_grad=True)
        with torch.enable_grad():
            torch.autograd.grad(leaf * 1, leaf, torch.empty_like(leaf))


class _Root(torch.autograd.Function):
    """An empty tensor behind others, whose gradients are made in backward; it holds none of them."""

    @staticmethod
    def forward(ctx: Any, made: list[weakref.ref[torch.UntypedStorage]], *starts: torch.Tensor) -> torch.Tensor:
        ctx.made = made
        ctx.devices = [tensor.device for tensor in starts]
        ctx.forms = [torch.empty_like(tensor, device="meta") for tensor in starts]
        return starts[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [torch.ones_like(f, device=d) for f, d in zip(ctx.forms, ctx.devices, strict=True)]
        ctx.made += [weakref.ref(gradient.untyped_storage()) for gradient in gradients]
        return None, *gradients
