"""The memory of CUDA graphs, and how a graph is captured into it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.runtime.meter import no_collection

# With segments that grow, the pool of DenseNet-121's step within 60 % of its memory reserves 1.02 of what the step
# takes on an H200; with the allocator's usual ones, which cannot be put together, 1.73.
_GROWING = "expandable_segments:True"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def new_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that waits for the device before it dies.

    With the last one the memory of a pool becomes free, and torch takes segments that grow away as soon as the stream
    of the capture is done. But graphs are replayed, and what they leave is read, in other streams.
    """
    graph = torch.cuda.CUDAGraph()
    weakref.finalize(graph, _wait_for, device).atexit = False
    return graph


def _wait_for(device: torch.device) -> None:
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


class Pool:
    """Memory that all graphs of a plan have in common: they never run at the same time.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._pending: weakref.ref[Any] | None = None
        self.steps: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that were captured into it."""
        self.reserved_bytes = 0
        """What the allocator holds for it; nothing else can use that."""

    def renew(self) -> None:
        """A step is to be captured: once all graphs of a pool are gone, torch takes no others into it."""
        if not self.steps:
            self.handle = torch.cuda.graph_pool_handle()

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what the block launches. Nothing of it runs; where the block or the capture fails, all is as before,
        but for what the block has changed on the host.
        """
        before, generator = torch.cuda.current_stream(self.device), torch.cuda.default_generators[self._index]
        random = generator.get_state()
        # Other threads may go on using the device meanwhile: that which puts batches into pinned memory does.
        mode = "thread_local"
        try:
            # What the collector frees, a graph or memory of another stream, would end a capture; it waits from before
            # the beginning until after the end, since whatever is left to it meanwhile goes as soon as it may run.
            with no_collection(), _growing(), torch.cuda.graph(graph, self.handle, self._stream, mode):
                yield
        except BaseException:
            # Where a capture breaks off, torch leaves its stream in place, and the generator waiting for its end.
            torch.cuda.set_stream(before)
            generator.graphsafe_set_state(generator.clone_state())
            generator.set_state(random)
            raise

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def measure(self) -> None:
        """Note what the allocator holds; what no graph needs any more is given back."""
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()  # each stream has its own: those of the capture are the pool's
        segments = torch.cuda.memory_snapshot()
        self.reserved_bytes = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == self.handle)
        torch.cuda.reset_peak_memory_stats(self.device)  # a capture allocates what no step does

    @property
    def is_busy(self) -> bool:
        """Whether a forward was replayed whose backward may still come: its activations are in the pool."""
        return self._pending is not None and self._pending() is not None

    def begin(self, run: object) -> None:
        """A forward is replayed; it is over when `end` is called, or the object dies."""
        self._pending = weakref.ref(run)

    def end(self) -> None:
        """The backward of the last forward has been replayed."""
        self._pending = None


@contextmanager
def _growing() -> Iterator[None]:
    """Let the allocator take segments that grow, beside what the user has set for it."""
    given = next((value for name in _VARIABLES if (value := os.environ.get(name))), "")
    if "expandable_segments" in given:
        yield  # as the user wants it
        return
    _set_allocator(f"{given},{_GROWING}" if given else _GROWING)
    try:
        yield
    finally:
        usual = _GROWING.replace("True", "False")
        _set_allocator(f"{given},{usual}" if given else usual)


def _set_allocator(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)
