"""Compiles all that a model's forward does, in regions that begin and end where stages do.

Dynamo takes the forward as one graph: blocks, heads, the code between them, a loss. It is cut where the stages of a
schedule meet, and each piece, a *region*, is compiled by itself. Stages that a schedule always treats alike run as one
region, so that fusions, layouts and launches do not end at the borders of blocks; where everything is stored, that is
the whole model. Equal regions share compilations.

A model that is not one graph (it reads a value on the host, say) has no regions: its units are compiled one by one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from lowtide.runtime.compile.cutting import NoRegionsError, Piece, pieces_of, stages_of
from lowtide.runtime.compile.modes import Modes, hooks_of
from lowtide.runtime.compile.pieces import GraphCompiler, PieceFunction, forget_pieces
from lowtide.runtime.model.call_site import Layer, Rank, layers_of
from lowtide.runtime.model.containers import tensors_of
from lowtide.runtime.model.split import Split

# Equal blocks that a compiler cannot take for equal (each asks for its own number) are entries of one function; beyond
# this many it would run them without compilation. Far more than a network has blocks of one kind.
RECOMPILE_LIMIT = 512


RegionHandler = Callable[[int, Callable[..., Any], tuple[torch.Tensor, ...]], Any]
"""Called with a stage, from 1, a region of it, and the tensors that it reads besides parameters and buffers; returns
what the region returns."""


# Who follows a forward


@dataclass(frozen=True, slots=True)
class Grouping:
    """How the stages of a split are grouped by whoever follows a forward.

    Args:
        sizes: how many of them each of the follower's stages stands for.
        joins: whether each group is one region; else each stage is, which equal stages share.
    """

    sizes: tuple[int, ...]
    joins: bool = True

    @classmethod
    def finest(cls, num_stages: int) -> Grouping:
        """Each stage by itself."""
        return cls((1,) * num_stages, joins=False)

    def group_of(self) -> list[int]:
        """The group of each stage, from 1; entry 0 is unused."""
        return [0, *(group for group, size in enumerate(self.sizes, start=1) for _ in range(size))]


class _Following(threading.local):
    """Who is handed the regions of the model that runs in this thread."""

    model: nn.Module | None = None
    grouping: Grouping | None = None
    handler: RegionHandler | None = None
    running: tuple[RegionLayer, Grouping] | None = None


_following = _Following()


@contextmanager
def regions_handed_to(handler: RegionHandler, model: nn.Module, grouping: Grouping) -> Iterator[None]:
    """Pass each region of a model that runs within the block to a handler."""
    before = _following.model, _following.grouping, _following.handler
    _following.model, _following.grouping, _following.handler = model, grouping, handler
    try:
        yield
    finally:
        _following.model, _following.grouping, _following.handler = before


class RegionLayer(Layer):
    """Runs a model in compiled regions.

    Args:
        model: the model.
        split: its stages.
        compilers: of variant 0 and of the others, for regions inside the model and for its last one.
        num_variants: for each stage, from stage 1 on, how many ways it can run.
        choice: which variant runs.
    """

    __slots__ = (
        "_compilers",
        "_functions",
        "_hooks",
        "_modes",
        "_regions",
        "_shapes",
        "choice",
        "joins",
        "num_variants",
        "split",
    )

    rank = Rank.CODE
    tells_stages = True

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        compilers: tuple[Sequence[GraphCompiler], Sequence[GraphCompiler]],
        num_variants: Sequence[int],
        choice: Any,
    ) -> None:
        super().__init__(model)
        self.split = split
        self.joins = any(stage.kind for stage in split.stages)
        """Whether stages are joined that are treated alike: not where they were joined before, and are large."""
        self.choice = choice
        self.num_variants = tuple(num_variants)
        self._compilers = compilers
        self._functions = _functions_of(model)
        self._regions: dict[tuple[_Traced, Grouping], _RunningRegions] = {}
        self._shapes: dict[Grouping, list[torch.Size]] = {}
        self._hooks = [kind for each in model.modules() for kind in _kinds_of_hooks(each)]
        self._modes = [
            [(unit.path, Modes(model.get_submodule(unit.path))) for unit in stage.units] if count > 1 else []
            for stage, count in zip(split.stages, num_variants, strict=True)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in regions, as whoever follows it has them; if nobody does, without compilation."""
        model = self.module
        if _following.model is not model or _following.grouping is None:
            return self.pass_on(*args, **kwargs)
        return self._run(model, _following.grouping, args, kwargs)

    def _run(self, model: nn.Module, grouping: Grouping, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = [tensor.shape for tensor in tensors_of((args, kwargs))]
        if self._shapes.setdefault(grouping, shapes) != shapes:  # few regions of each further shape: equal ones share
            grouping = replace(grouping, joins=False)
        before, _following.running = _following.running, (self, grouping)
        try:
            return self._call_traced(model, args, kwargs)
        finally:
            _following.running = before

    def _call_traced(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = self._function(model)
        try:
            return function(model, *args, **kwargs)
        except NoRegionsError:  # perhaps of a later region: earlier ones have run
            raise
        except not_one_graph():  # before anything ran
            pass
        with many_compilations(), _logging_ignored():
            return function(model, *args, **kwargs)

    def _function(self, model: nn.Module) -> Callable[..., Any]:
        """The forward of the model, to be traced where it is called first."""
        hooks = tuple(map(hooks_of, model.modules())) if any(self._hooks) else ()  # Dynamo would not notice others
        function = self._functions.get(hooks)
        if function is None:
            own = FunctionType(_call.__code__.replace(), _call.__globals__, "forward")
            function = torch.compile(own, backend=_Traced, fullgraph=True, dynamic=False)
            self._functions[hooks] = function
        return function

    def regions_of(self, traced: _Traced, grouping: Grouping) -> _RunningRegions:
        """What Dynamo has traced, cut for a grouping."""
        regions = self._regions.get((traced, grouping))
        if regions is None:
            graph = traced.graph
            regions = _RunningRegions(self, graph, stages_of(graph.graph, self.module, self.split), grouping)
            self._regions[traced, grouping] = regions
        return regions

    def functions_for(self, piece: Piece, stages: Sequence[int]) -> list[PieceFunction]:
        """A piece of some stages in each of its variants, as far as it has any: one where it is in other modes than it
        was checked for. What was traced in other modes is another graph.
        """
        compilers = self._compilers[stages[-1] == self.split.num_stages]
        modes, model = self._modes[stages[0] - 1], self.module
        as_checked = len(stages) == 1 and all(each.are_as_then(model.get_submodule(path)) for path, each in modes)
        count = self.num_variants[stages[0] - 1] if as_checked else 1
        return [PieceFunction(piece, compiler) for compiler in compilers[:count]]


class _Region:
    """A compiled piece, in its variants.

    Args:
        layer: that it is compiled by.
        piece: what it does.
        stages: of the split that it is of.
        group: the stage of whoever follows that it is of.
        fixed: where its parameters and buffers are among what the whole graph is given.
        dead: the values, by name, that nobody reads after it.
    """

    __slots__ = ("_choice", "_functions", "dead", "fixed", "group", "piece")

    def __init__(
        self,
        layer: RegionLayer,
        piece: Piece,
        stages: Sequence[int],
        *,
        group: int,
        fixed: list[int],
        dead: list[str],
    ) -> None:
        self.piece = piece
        self.group = group
        self.fixed = fixed
        self.dead = dead
        self._choice = layer.choice
        self._functions = layer.functions_for(piece, stages)

    def run(self, fixed: Sequence[torch.Tensor], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run it as the variant that is chosen."""
        functions = self._functions
        return functions[self._choice.index if len(functions) > 1 else 0](fixed, args)


class _Traced:
    """Dynamo's backend: a graph of a whole forward, which runs in the regions of whichever layer calls it.

    It holds no tensors but constants, and neither the model nor a layer.
    """

    def __init__(self, graph: fx.GraphModule, _: Any) -> None:
        self.graph = graph

    def __call__(self, *given: Any) -> Any:
        assert _following.running is not None
        layer, grouping = _following.running
        return layer.regions_of(self, grouping)(*given)


class _RunningRegions:
    """Runs the regions of a graph one after the other."""

    def __init__(
        self, layer: RegionLayer, graph: fx.GraphModule, stages: dict[fx.Node, int], grouping: Grouping
    ) -> None:
        self._layer = layer
        self._groups = grouping.group_of()
        self._places = {node.name: place for place, node in enumerate(graph.graph.nodes) if node.op == "placeholder"}
        outputs: Any = graph.graph.output_node().args[0]
        if not all(isinstance(node, fx.Node) for node in outputs):
            raise NoRegionsError("its result has something else than tensors")
        self._outputs = [node.name for node in outputs]
        self._uncut: tuple[fx.GraphModule, dict[fx.Node, int]] | None = (graph, stages)
        self._joins = grouping.joins
        self._regions: list[_Region] = []
        self._entering: dict[str, int] = {}
        """Of the values that enter regions, or are returned as they are, where they are among what is given."""

    def _make(self, given: Sequence[Any], graph: fx.GraphModule, stages: dict[fx.Node, int]) -> None:
        """Make the regions; with the first call, which shows what is a parameter or a buffer."""
        model = self._layer.module
        state = set(map(id, chain(model.parameters(), model.buffers())))
        fixed = {name for name, place in self._places.items() if id(given[place]) in state}
        pieces = self._pieces(graph, stages, fixed)
        last: dict[str, int] = {}
        for place, piece in enumerate(pieces):
            last.update(dict.fromkeys((*piece.inputs, *piece.outputs), place))
        self._entering = {name: place for name, place in self._places.items() if name in last or name in self._outputs}
        for name in self._outputs:
            last.pop(name, None)
        self._regions = [
            self._region(piece, [name for name, end in last.items() if end == place])
            for place, piece in enumerate(pieces)
        ]

    def _pieces(self, graph: fx.GraphModule, stages: dict[fx.Node, int], fixed: set[str]) -> list[Piece]:
        """One for each group, or for each stage where the graph can be cut there: a model whose stages are all joined
        need not be one that can.
        """
        joined = {node: self._groups.index(self._groups[k]) for node, k in stages.items()}
        if not self._joins:
            try:
                return pieces_of(graph, stages, fixed)
            except NoRegionsError:
                if len(set(joined.values())) == len(set(stages.values())):
                    raise
                self._joins = True
        return pieces_of(graph, joined, fixed)

    def _region(self, piece: Piece, dead: list[str]) -> _Region:
        group = self._groups[piece.stage]
        stages = [k for k, other in enumerate(self._groups) if other == group] if self._joins else [piece.stage]
        fixed = [self._places[name] for name in piece.fixed]
        return _Region(self._layer, piece, stages, group=group, fixed=fixed, dead=dead)

    def __call__(self, *given: Any) -> Any:
        if self._uncut is not None:
            self._make(given, *self._uncut)
            self._uncut = None
        values = {name: given[place] for name, place in self._entering.items()}
        handler = _following.handler
        assert handler is not None
        for region in self._regions:
            piece = region.piece
            call = partial(region.run, [given[place] for place in region.fixed])
            args = tuple(values[name] for name in piece.inputs)
            result = handler(region.group, call, args)
            del args
            values.update(zip(piece.outputs, result, strict=True))
            del result
            for name in region.dead:
                del values[name]
        return tuple(values[name] for name in self._outputs)


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


_functions: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], dict[Hashable, Callable[..., Any]]]]
_functions = weakref.WeakKeyDictionary()


def _functions_of(model: nn.Module) -> dict[Hashable, Callable[..., Any]]:
    """The traced forwards of a model by their hooks, which all layers of it share, from one `fit` to the next."""
    modules = tuple(map(id, model.modules()))  # graphs know stages by these
    if _functions.get(model, (None,))[0] != modules:
        _functions[model] = modules, {}
    return _functions[model][1]


def forget_regions() -> None:
    """Compile all regions anew from now on."""
    _functions.clear()
    forget_pieces()


def regions_of(model: nn.Module) -> RegionLayer | None:
    """What runs a model in regions, where it does."""
    return next(iter(layers_of(model, RegionLayer)), None)


def not_one_graph() -> tuple[type[Exception], ...]:
    """The errors that say that a model has no regions, or that it has more of them than Dynamo's usual limit."""
    from torch._dynamo import exc  # importing it takes seconds

    return NoRegionsError, exc.TorchDynamoException, exc.FailOnRecompileLimitHit


@contextmanager
def many_compilations() -> Iterator[None]:
    """Let Dynamo compile one function for many blocks within the block, whatever its usual limit."""
    from torch._dynamo import config

    names = [name for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(config, name)]
    with config.patch({name: max(RECOMPILE_LIMIT, getattr(config, name)) for name in names}):
        yield


@contextmanager
def _logging_ignored() -> Iterator[None]:
    """Let Dynamo pass over what loggers say once within the block: planning has said it before anything is compiled."""
    from torch._dynamo import config

    said_once = {_Ignored(name, value) for name, value in vars(logging.Logger).items() if name.endswith("_once")}
    names = ("ignore_logging_functions", "ignore_logger_methods")  # the same in newer and in older torch
    name = next((name for name in names if hasattr(config, name)), None)
    with nullcontext() if name is None else config.patch({name: {*getattr(config, name), *said_once}}):
        yield


class _Ignored(str):
    """A function in a set of Dynamo's settings, which torch copies, sorts and writes down as text."""

    function: Callable[..., Any]

    def __new__(cls, name: str, function: Callable[..., Any]) -> _Ignored:
        made = super().__new__(cls, name)
        made.function = function
        return made

    def __eq__(self, other: object) -> bool:
        return other is self.function or (isinstance(other, _Ignored) and other.function is self.function)

    def __hash__(self) -> int:
        return hash(self.function)

    def __deepcopy__(self, _: Any) -> _Ignored:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def _kinds_of_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
