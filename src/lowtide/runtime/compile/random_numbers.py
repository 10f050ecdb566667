"""Has a compiler save what random numbers are made of, so that a backward never draws them anew.

Where inductor may keep only a share of what a function saves, it computes operations again in backward, random ones
among them: the mask of a dropout, or of stochastic depth, would be another one there, and gradients would be wrong. All
random numbers of a graph come from seeds, a few bytes, which are drawn in forward; saved, they make the same masks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

# An operation that drops nothing draws nothing, though its kind does: attention, above all.
_SHARES = ("dropout_p", "p")


@functools.cache
def pass_that_saves_seeds() -> Any:
    """A pass over the graph of forward and backward, after which inductor decides what to save."""
    from torch._inductor.custom_graph_pass import CustomGraphPass  # importing it takes seconds

    class SavesSeeds(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            save_what_is_drawn(graph)

        def uuid(self) -> str:
            return "lowtide.saves_seeds.1"  # another one where it does something else: what is compiled is kept on disk

    return SavesSeeds()


def save_what_is_drawn(graph: fx.Graph) -> None:
    """Mark what draws random numbers as to be saved."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _draws(node, node.target):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _draws(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name in _SHARES:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True
