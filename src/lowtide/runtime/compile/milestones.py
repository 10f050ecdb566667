"""Has a compiler save, every so often, a value that everything after it is computed from.

Where a compiler may keep only a share of what a function saves, it recomputes what is cheap, such as the sums of a
residual stream. But each of these is computed from the one before. So backward, which begins with the last block, first
recomputes the stream from its beginning, and all of it is there at once, beside everything that was saved: for
ResNet-101 at half of what it saves, more than another third. If such a value is saved now and then, what is recomputed
at once is short. That pays most near the end of a network: when backward comes to its beginning, most has been freed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

# Of the largest value: a smaller one may pass a milestone (statistics, tables, masks). As where stages are cut.
_SMALL = 0.01

_NUM_HALVINGS = 20  # to a millionth of what is saved


def mark_milestones(graph: fx.Graph, share: float) -> None:
    """Mark some of a network's milestones as to be saved; not what is marked already.

    Args:
        graph: of forward and backward.
        share: of what it saves by itself, that may be saved.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    forward = forward_of(graph)
    milestones = _milestones(forward)
    saved = {
        owner_of(each)
        for node in graph.nodes
        if node not in forward
        for each in node.all_input_nodes
        if each in forward
    }
    ends, num_bytes, places = [], 0, set(milestones[1:])
    for node in forward:
        if node in places:
            ends.append(num_bytes)
        num_bytes += bytes_of(node) if node in saved else 0
    for place in worth_saving([bytes_of(node) for node in milestones], [*ends, num_bytes], share):
        milestones[place].meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def worth_saving(sizes: Sequence[int], ends: Sequence[int], share: float) -> list[int]:
    """Which milestones to save, so that backward takes the least at once.

    When backward comes to a milestone, what was saved before is there, all saved milestones are, and what is recomputed
    from the last of them up to here: the milestones in between, and the rest but for what is saved of it.

    Args:
        sizes: bytes of the milestones, in order.
        ends: the bytes that a function saves by itself before the milestone after each one, the last: at all.
        share: of these, that are saved.

    Returns:
        their places in the order.

    Example:
        >>> worth_saving([10] * 9, [20, 40, 60, 80, 100, 120, 140, 160, 180], 0.5)
        [5, 8]
    """
    if not sizes:
        return []
    least, most = share * ends[-1], float(ends[-1] + sum(sizes))
    found: list[int] = []
    for _ in range(_NUM_HALVINGS):
        limit = (least + most) / 2
        places = _saved_within(limit, sizes, ends, share)
        if places is None:
            least = limit
        else:
            most, found = limit, places
    return found


def _saved_within(limit: float, sizes: Sequence[int], ends: Sequence[int], share: float) -> list[int] | None:
    """The milestones to save, of the fewest bytes, where backward may take so much; None: that cannot be."""
    nowhere, end = -1, len(sizes)
    saved_bytes, before = {nowhere: 0}, dict[int, int]()
    for last in (nowhere, *range(end)):  # the last saved one so far
        if last not in saved_bytes:
            continue
        saved, own = saved_bytes[last], sizes[last] if last != nowhere else 0
        between, start = -own, ends[last - 1] if last > 0 else 0
        for place in range(max(last, 0), end):
            between += sizes[place]
            rest = max(0, ends[place] - start - own - between)
            if share * ends[place] + saved + between + (1 - share) * rest > limit:
                break
            there = saved + (sizes[place + 1] if place + 1 < end else 0)
            if there < saved_bytes.get(place + 1, there + 1):  # the next one to save, or the end
                saved_bytes[place + 1], before[place + 1] = there, last
        if last == nowhere:
            saved_bytes[0], before[0] = sizes[0], nowhere
    if end not in saved_bytes or share * ends[-1] + saved_bytes[end] > limit:
        return None
    places, place = list[int](), before[end]
    while place != nowhere:
        places.append(place)
        place = before[place]
    return places[::-1]


def forward_of(graph: fx.Graph) -> dict[fx.Node, None]:
    """What forward computes, in order, from numbers with a fraction: gradients may flow through it."""
    placeholders = graph.find_nodes(op="placeholder")
    gradients = [node for node in placeholders if "tangents" in str(node.target)]  # as partitioners tell them
    late = _made_of(gradients, graph)
    flows = _made_of([node for node in placeholders if node not in late and _is_fraction(node)], graph)
    waiting = [node for node in graph.output_node().all_input_nodes if node not in late]
    needed = set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in needed and node.op != "placeholder":
            needed.add(node)
            waiting += node.all_input_nodes
    return {node: None for node in graph.nodes if node in needed and node in flows}


def _made_of(nodes: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """Some nodes, and all that is computed with them."""
    found = set(nodes)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _milestones(forward: dict[fx.Node, None]) -> list[fx.Node]:
    """The values from which, each alone, everything after them is computed, but for small ones."""
    last_reader = {owner_of(each): node for node in forward for each in node.all_input_nodes if each in forward}
    enough = _SMALL * max(map(bytes_of, forward), default=0)
    alive, found = dict[fx.Node, None](), list[fx.Node]()
    ending: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last_reader.items():
        ending.setdefault(reader, []).append(node)
    for node in forward:
        if node in last_reader and bytes_of(node) > enough:
            alive[node] = None
        for each in ending.get(node, ()):
            alive.pop(each, None)
        if len(alive) == 1:
            (only,) = alive
            if isinstance(only.meta.get("val"), torch.Tensor) and only not in found[-1:]:
                found[-1:] = [only] if found and _is_another_form(only, found[-1]) else [*found[-1:], only]
    return found


def _is_another_form(node: fx.Node, other: fx.Node) -> bool:
    """Whether a value is another one, of the same size, entry by entry and with nothing else that is large."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    large = {owner_of(each) for each in node.all_input_nodes if each.op != "placeholder" and not _is_small(each, node)}
    return large == {other} and bytes_of(node) == bytes_of(other)


def _is_small(node: fx.Node, beside: fx.Node) -> bool:
    return bytes_of(node) <= _SMALL * bytes_of(beside)


def owner_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node shows: a view's, or one of several results'."""
    while node.op == "call_function" and (node.target is operator.getitem or _is_view(node)):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(each.alias_info for each in target._schema.returns)


def _is_fraction(node: fx.Node) -> bool:
    return any(tensor.is_floating_point() for tensor in _tensors(node))


def bytes_of(node: fx.Node) -> int:
    """The bytes of what a node computes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(node))


def _tensors(node: fx.Node) -> Iterator[Any]:
    return (leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor))
