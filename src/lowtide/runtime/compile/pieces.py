"""Compiled functions of pieces of a graph.

A piece is a graph already: the compiler gets it as it is. Dynamo would trace it a second time, and check at each call
what it assumes of every weight, which it has just done for the whole model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import fx
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.runtime.compile.cutting import NotCompiledError, Piece

# Compiled pieces that are kept for the next `fit`: those of a few models in all their variants.
_MOST_KEPT = 512

# Compilers look once at whether a parameter begins at a multiple of this in its storage.
_ALIGNED_BYTES = 16

_Function = Callable[..., tuple[torch.Tensor, ...]]
_Entries = list[tuple[Any, _Function]]
"""Functions, each beside the settings of torch (gradients, autocast, precision, ...) that it was compiled under."""


class GraphCompiler(Protocol):
    """Compiles graphs; two that do the same are equal."""

    is_kept: bool
    """Whether another one that is equal may use what it has compiled."""

    def compiled_graph(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> _Function:
        """The function of a graph for such inputs; the graph may be changed on the way."""


class PieceFunction:
    """A piece, compiled when it is first called, and again for inputs of another form and under other settings.

    Args:
        piece: of a graph whose own caller checks that its parameters and buffers are of the form that they were.
        compiler: of the piece.
    """

    __slots__ = ("_compiler", "_entries", "_piece")

    def __init__(self, piece: Piece, compiler: GraphCompiler) -> None:
        self._piece = piece
        self._compiler = compiler
        self._entries: dict[Hashable, _Entries] = {}

    def __call__(self, fixed: Sequence[torch.Tensor], args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run it with its parameters and buffers, and with its other inputs."""
        entries = self._entries.setdefault(tuple(map(_form, args)), [])
        function = _fitting(entries)
        if function is None:
            function = _compiled(self._piece, self._compiler, [*fixed, *args])
            entries.append((_settings(), function))
        return function(*fixed, *args)


_kept: OrderedDict[Hashable, _Entries] = OrderedDict()


def _compiled(piece: Piece, compiler: GraphCompiler, inputs: list[torch.Tensor]) -> _Function:
    """The function of a piece, which equal ones share: in one model, and from one `fit` to the next."""
    if piece.key is None or not compiler.is_kept:
        return _newly_compiled(piece, compiler, inputs)
    storages = [tensor.untyped_storage()._cdata if _is_strided(tensor) else id(tensor) for tensor in inputs]
    are_aligned = tuple(map(_is_aligned, inputs))
    key = piece.key, compiler, tuple(map(_form, inputs)), tuple(map(storages.index, storages)), are_aligned
    entries = _kept.get(key, [])
    function = _fitting(entries)
    if function is None:
        function = _newly_compiled(piece, compiler, inputs)
        entries.append((_settings(), function))
    _kept[key] = entries  # only now: what fails leaves nothing
    _kept.move_to_end(key)
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    return function


def _newly_compiled(piece: Piece, compiler: GraphCompiler, inputs: list[torch.Tensor]) -> _Function:
    graph = fx.Graph()
    graph.output(graph.graph_copy(piece.module.graph, {}))
    module = fx.GraphModule(piece.module, graph)
    if len(set(map(id, inputs))) == len(inputs):  # else torch looks for where in the user's program the equal ones are
        _mark_fixed(module, len(piece.fixed))
    try:
        with _as_dynamo_compiles(inputs):
            return compiler.compiled_graph(module, inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler is a program of others: whatever it raises, it did not compile this
        raise NotCompiledError(f"compiling one failed: {error}") from error


def _mark_fixed(module: fx.GraphModule, num_fixed: int) -> None:
    """Say, as Dynamo does, that the first inputs are there in any case: they are saved for nothing, and stay where they
    are. Compilers take all for activations otherwise, and save transposed or rounded weights in their place.
    """
    module.meta["dynamo_compile_id"] = None
    module._param_name_to_source = {}  # type: ignore[assignment]
    for place, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node._dynamo_source = None
        if place < num_fixed:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


@contextmanager
def _as_dynamo_compiles(inputs: list[torch.Tensor]) -> Iterator[None]:
    """What Dynamo does around a compiler: shapes are numbers, what was compiled is found in caches on disk, no random
    numbers are used up, and modes of the user's (a default device is one), which were there when the model was traced,
    have no say.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # importing it takes a while

    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    known = [fake_mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]  # the mode finds them while alive
    modes = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    try:
        with (
            torch.random.fork_rng({tensor.device for tensor in inputs if tensor.is_cuda}),
            _disable_current_modes(),
            tracing(TracingContext(fake_mode)),
        ):
            yield
    finally:
        del known
        while modes:
            _push_on_torch_function_stack(modes.pop())


def forget_pieces() -> None:
    """Compile all pieces anew from now on."""
    _kept.clear()


def _fitting(entries: _Entries) -> _Function | None:
    """The function that was compiled under the settings of now."""
    return next((function for settings, function in entries if settings.check()), None)


def _settings() -> Any:
    """The settings of now, which can tell later whether they are the same."""
    return torch._C._dynamo.guards.GlobalStateGuard()


def _form(tensor: torch.Tensor) -> Hashable:
    """What a compiled function assumes of an input."""
    strides = tensor.stride() if _is_strided(tensor) else tensor.layout
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad


def _is_aligned(tensor: torch.Tensor) -> bool:
    return not _is_strided(tensor) or tensor.storage_offset() * tensor.element_size() % _ALIGNED_BYTES == 0


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
