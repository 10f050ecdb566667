"""What `benchmarks.peers` measures lowtide against: each a context that yields what is called instead of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
from benchmarks.peer_networks import InSegments, gradient_checkpointing, layers_of, trunk_replaced
from torch import nn

Call = Callable[..., Any]


@contextmanager
def as_it_is(model: nn.Module) -> Iterator[Call]:
    """The model as it is."""
    yield model


@contextmanager
def saved_on_cpu(model: nn.Module, device: torch.device) -> Iterator[Call]:
    """Everything that autograd saves goes to host memory."""

    def call(**batch: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
            return model(**batch)

    yield call


@contextmanager
def in_segments(model: nn.Module, trunk: str, count: int) -> Iterator[Call]:
    """`checkpoint_sequential` over the layers of the trunk."""
    with trunk_replaced(model, trunk, InSegments(layers_of(model, trunk), count)):
        yield model


@contextmanager
def each_layer(model: nn.Module, trunk: str | None) -> Iterator[Call]:
    """Every layer checkpointed."""
    with gradient_checkpointing(model, trunk):
        yield model


@contextmanager
def compiled_whole(model: nn.Module, backend: str, memory_budget: float, *, graphs: bool = False) -> Iterator[Call]:
    """The whole model compiled, with so much of its activations kept (1.0: as the compiler likes); with `graphs` the
    compiler replays CUDA graphs.
    """

    def call(**batch: Any) -> Any:
        return model(**batch)

    def step(**batch: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(**batch)

    # Compiled code is kept by code object: that of the call, and, where the model is not one graph (GPT-2 of
    # transformers), that of its own forward, which would serve every budget as the first was compiled.
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=memory_budget):
        compiled = torch.compile(call, dynamic=False, backend=backend, mode="reduce-overhead" if graphs else None)
        yield step if graphs else compiled
