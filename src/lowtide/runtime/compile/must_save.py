"""Has a compiler save what it could not compute again as it was.

Where inductor may keep only a share of what a function saves, it computes operations again in backward, whichever they
are. Two kinds would not give what they gave in forward:

- What is drawn: the mask of a dropout, or of stochastic depth, would be another one, and gradients would be wrong. All
  random numbers of a graph come from seeds, a few bytes, which are drawn in forward; saved, they make the same masks.
- What is summed up: another kernel may add in another order. The results of reductions are mostly small (two numbers
  for each row that is normalised), and with them at hand the rest is computed again element by element, or by the same
  product, convolution or attention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

# An operation that drops nothing draws nothing, though its kind does: attention, above all.
_SHARES = ("dropout_p", "p")

# Reductions that torch does not mark as such.
_REDUCTIONS = ("prims::sum", "prims::prod", "prims::prepare_softmax_online")


@functools.cache
def pass_that_marks() -> Any:
    """A pass over the graph of forward and backward, after which inductor decides what to save."""
    from torch._inductor.custom_graph_pass import CustomGraphPass  # importing it takes seconds

    class MarksWhatMustBeSaved(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            mark(graph)

        def uuid(self) -> str:
            return "lowtide.must_save.1"  # another one where it does something else: what is compiled is kept on disk

    return MarksWhatMustBeSaved()


def mark(graph: fx.Graph) -> None:
    """Mark what draws random numbers, and what adds up, as to be saved."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and (_draws(node, target) or _reduces(target)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _draws(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name in _SHARES:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True


def _reduces(target: torch._ops.OpOverload) -> bool:
    return torch.Tag.reduction in target.tags or target.name() in _REDUCTIONS
