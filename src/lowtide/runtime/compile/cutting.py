"""Cuts the graph of a model's forward where its stages begin and end."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lowtide.errors import PlanError
from lowtide.runtime.model.split import Split

# What switches gradients on and off inside a graph.
_GRAD_SWITCHES = (torch._C._set_grad_enabled, torch.set_grad_enabled)

# What Dynamo has for numbers that it does not know; shapes are known here.
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NoRegionsError(PlanError):
    """Why a model's forward cannot be cut into regions."""


class FoundLateError(NoRegionsError):
    """The same, found when some of the forward may have run."""


class NotCompiledError(FoundLateError):
    """Why one region does not compile; smaller ones may."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a graph as a function of its own.

    Args:
        stage: the stage whose operations it has, from 1.
        module: runs it.
        fixed: the names, in the whole graph, of what it reads first: parameters and buffers.
        inputs: of what it reads after them.
        outputs: of what it returns, a tuple.
        key: equal for pieces that do the same; None: it has constants or modules of its own.
    """

    stage: int
    module: fx.GraphModule
    fixed: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    key: Hashable | None


def stages_of(graph: fx.Graph, model: nn.Module, split: Split) -> dict[fx.Node, int]:
    """The stage of each operation; the code between units belongs where `Split` says.

    Raises:
        NoRegionsError: where operations of a stage come after those of a later one, and where shapes or numbers depend
            on what a tensor holds.
    """
    if any(isinstance(node.meta.get("example_value"), _NUMBERS) for node in _operations(graph)):
        raise NoRegionsError("it reads a number from a tensor (.item())")
    units = _Units(model, split)
    found: dict[fx.Node, int] = {}
    between: list[fx.Node] = []
    last = 1
    for node in _operations(graph):
        source = _pair_behind(node)
        if source in found:
            found[node] = found[source]  # what a split or a pair gives crosses as tensors
            continue
        k = units.stage_of(node)
        if k is None:
            between.append(node)
            continue
        if k < last:
            raise NoRegionsError(f"operations of stage {split.stages[k - 1].name!r} come after those of a later one")
        trails = k > last and split.stages[last - 1].trailing_glue
        found.update(dict.fromkeys(between, last if trails else k))
        between.clear()
        found[node] = last = k
    if not found:
        raise NoRegionsError("none of its operations is known to be of one of its stages")
    found.update(dict.fromkeys(between, split.num_stages))
    return found


class _Units:
    """Finds the unit that an operation belongs to by the modules that it was called in."""

    def __init__(self, model: nn.Module, split: Split) -> None:
        self._stages: dict[int, dict[int, int]] = {}  # by module: the stage of each call that is a unit
        for k, stage in enumerate(split.stages, start=1):
            for unit in stage.units:
                module = model.get_submodule(unit.path)
                self._stages.setdefault(id(module), {})[unit.occurrence] = k
        self._calls: dict[int, dict[tuple[str, str], int]] = {}  # by module: the place among its calls of each

    def stage_of(self, node: fx.Node) -> int | None:
        for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
            address, _, count = key.partition("@")
            stages = self._stages.get(int(address)) if address.isdigit() else None
            if stages is None:
                continue
            occurrence = self._occurrence(int(address), name, count)
            if occurrence in stages:
                return stages[occurrence]
        return None

    def _occurrence(self, address: int, name: str, count: str) -> int:
        """Which call of a module it is; dynamo counts calls by name, and a module may have several names."""
        calls = self._calls.setdefault(address, {})
        if (name, count) not in calls:
            calls[name, count] = int(count or 0) + sum(other != name for other, _ in calls)
        return calls[name, count]


def pieces_of(whole: fx.GraphModule, stages: Mapping[fx.Node, int], fixed: Collection[str]) -> list[Piece]:
    """The pieces of a graph, in order.

    Args:
        whole: the graph.
        stages: of each operation.
        fixed: the names of the graph's inputs that are parameters and buffers.

    Raises:
        NoRegionsError: where something else than tensors would cross from one piece to another.
    """
    by_stage: dict[int, list[fx.Node]] = {}
    for node in _operations(whole.graph):
        by_stage.setdefault(stages[node], []).append(node)
    parts = [(k, nodes) for k in sorted(by_stage) for nodes in _returned_apart(by_stage[k])]
    for _, nodes in parts:
        _check_grad_mode(nodes)
    return [_piece(whole, k, nodes, fixed) for k, nodes in parts]


def _returned_apart(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """The operations of a stage, cut behind the last value that the model returns and goes on computing with.

    Compiled as one, the logits of a language model and the loss of them would have a gradient each: that of the logits,
    which nobody uses, would be a tensor of zeros of their size, to which the loss's is added.
    """
    own = set(nodes)
    ends = [place for place, node in enumerate(nodes) if _is_returned(node) and not own.isdisjoint(node.users)]
    if not ends:
        return [nodes]
    first = set(nodes[: ends[-1] + 1])
    first.update(node for node in nodes if _pair_behind(node) in first)
    return [[node for node in nodes if node in first], [node for node in nodes if node not in first]]


def _pair_behind(node: fx.Node) -> fx.Node | None:
    """The operation of whose several results a node is one."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and not _is_tensor(source) else None


def _is_returned(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    is_differentiable = isinstance(value, torch.Tensor) and value.requires_grad
    return is_differentiable and any(user.op == "output" for user in node.users)


def _piece(whole: fx.GraphModule, stage: int, nodes: list[fx.Node], fixed: Collection[str]) -> Piece:
    own = set(nodes)
    read = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in own)
    constants = [arg for arg in read if arg.op == "get_attr"]
    first = [arg for arg in read if arg.name in fixed]
    rest = [arg for arg in read if arg.name not in fixed and arg.op != "get_attr"]
    outputs = [node for node in nodes if any(user not in own for user in node.users)]
    for node in (*rest, *outputs):
        if not _is_tensor(node):
            name = getattr(node.target, "__name__", node.target)
            raise NoRegionsError(f"{name} gives something else than a tensor to another stage")
    graph = fx.Graph()
    copies = {arg: graph.placeholder(f"x{place}") for place, arg in enumerate((*first, *rest))}
    copies |= {arg: graph.get_attr(str(arg.target)) for arg in constants}
    for arg, copy in copies.items():
        if _is_tensor(arg):  # else PyTorch's cache on disk passes over graphs that call a method of it
            copy.meta["example_value"] = arg.meta["example_value"]
    for place, node in enumerate(nodes):  # names of its own, so that equal pieces have equal code
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"y{place}")
        copies[node].meta = dict(node.meta)  # compilers have the user's line in their messages
    graph.output(tuple(copies[node] for node in outputs))
    module = fx.GraphModule(whole, graph)
    targets = tuple(node.target if isinstance(node.target, str) else id(node.target) for node in nodes)
    is_alone = bool(constants) or any(node.op == "call_module" for node in nodes)
    key = None if is_alone else (module.code, targets)
    return Piece(stage, module, _names(first), _names(rest), _names(outputs), key)


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _check_grad_mode(nodes: list[fx.Node]) -> None:
    switches: list[Any] = [node.args[0] for node in nodes if node.target in _GRAD_SWITCHES]
    if switches and switches[-1] is not True:
        raise NoRegionsError("gradients are switched off from one stage to another")
