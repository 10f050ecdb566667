"""Has a compiler save what would be something else if it were recomputed.

Where inductor may keep only a share of what a function saves, it recomputes operations in backward, whichever they are.
Some would not give what they gave in forward:

- What is drawn: the mask of a dropout, or of stochastic depth, would be another one, and gradients would be wrong.
  Inductor makes random numbers from seeds, a few bytes, which are drawn in forward; saved, they make the same masks.
- What is added up: another kernel may add in another order, and on CUDA those that add into places of a tensor do so in
  an order of their own each time. The results of reductions are mostly small (two numbers for each row that is
  normalised). Those that are not may be recomputed.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowtide.runtime.compile.milestones import mark_milestones

# An operation that drops nothing draws nothing, though its kind does: attention, above all.
_SHARES = ("dropout_p", "p")

# Reductions that torch does not mark as such.
_REDUCTIONS = ("prims::sum", "prims::prod", "prims::prepare_softmax_online")

# How many times as much as it returns a reduction has to read: the partitioner's own figure for what is cheap to save.
_SMALLER = 4

_ADD_INTO_PLACES = ("scatter_add", "scatter_reduce", "index_add", "index_reduce", "_embedding_bag")


@functools.cache
def pass_that_marks(*, milestones: bool = False) -> Any:
    """A pass over the graph of forward and backward, after which inductor decides what to save.

    Args:
        milestones: whether it also marks those that keep short what is recomputed at once.
    """
    from torch._functorch import config
    from torch._inductor.custom_graph_pass import CustomGraphPass  # importing it takes seconds

    class MarksWhatMustBeSaved(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            mark(graph)
            if milestones:
                mark_milestones(graph, config.activation_memory_budget)

        def uuid(self) -> str:
            # Another one where it does something else: what is compiled is kept on disk.
            return "lowtide.must_save.2" + (", milestones.1" if milestones else "")

    return MarksWhatMustBeSaved()


def mark(graph: fx.Graph) -> None:
    """Mark what draws random numbers, and what adds up, as to be saved; not what the user has marked."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in list(graph.nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or "recompute" in node.meta:
            continue
        marked = [node] if _draws(node, target) else []
        if _adds_into_places(node, target) or _reduces(node, target):
            marked = _results(graph, node)
        for each in marked:
            each.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _results(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The tensors that an operation makes, as nodes that can be marked.

    Where it makes several, that is a copy of each, which inductor takes out again: the partitioner does not look at
    the marks of what is taken from a tuple, and cannot save the tuple.
    """
    parts = [user for user in node.users if user.target is operator.getitem]
    if not parts:
        return [node]
    copies = []
    for part in parts:
        with graph.inserting_after(part):
            copy = graph.call_function(torch.ops.aten.clone.default, (part,))
        copy.meta = dict(part.meta)
        part.replace_all_uses_with(copy, delete_user_cb=functools.partial(operator.is_not, copy))
        copies.append(copy)
    return copies


def _draws(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name in _SHARES:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True


def _adds_into_places(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    name = target.name().removeprefix("aten::").partition(".")[0]
    if name == "index_put":
        return bool(node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate"))
    return name in _ADD_INTO_PLACES


def _reduces(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.reduction not in target.tags and target.name() not in _REDUCTIONS:
        return False
    return bool(_num_elements(node) * _SMALLER <= sum(map(_num_elements, node.all_input_nodes)))


def _num_elements(node: fx.Node) -> Any:
    tensors = pytree.tree_leaves(node.meta.get("val"))
    return max((tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)), default=0)
