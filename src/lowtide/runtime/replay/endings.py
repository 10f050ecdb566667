"""How a stage ends: a matrix product or a convolution saves its arguments before it runs, and nothing afterwards.

When such a stage runs again only for what it saves, the product itself need not be computed: it is up to a third of a
transformer's block. Other operations are left alone: some fill what they save while they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

import torch

_PRODUCTS = frozenset(f"{name}Backward0" for name in ("Addmm", "Baddbmm", "Bmm", "Convolution", "Linear", "Mm", "Mv"))

# These save no tensors.
_SAVE_NOTHING = frozenset(
    f"{name}Backward0"
    for name in (
        "Add", "Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Sub", "T", "ToCopy", "Transpose", "UnsafeView",
        "Unsqueeze", "View",
    )
)  # fmt: skip


class EndOfRunError(BaseException):
    """A repeated forward has saved all that is wanted; not an `Exception`, so that no model takes it for a failure."""


def saves_last_before_a_product(outputs: Iterable[torch.Tensor]) -> bool:
    """Whether the last operation that saved anything for these tensors is a product, looking back from the last one.

    Example:
        >>> weight = torch.ones(2, 2, requires_grad=True)
        >>> saves_last_before_a_product([torch.relu(weight) @ weight + 1])
        True
        >>> saves_last_before_a_product([torch.relu(weight @ weight)])
        False
    """
    pending: list[tuple[int, int, Any]] = []  # the latest first; the second number keeps nodes from being compared
    seen: set[Any] = set()

    def add(node: Any) -> None:
        # what a leaf's gradient goes to has no place in the order, and saves nothing
        if node is not None and node not in seen and node.name() != "torch::autograd::AccumulateGrad":
            seen.add(node)
            heappush(pending, (-node._sequence_nr(), len(seen), node))

    for tensor in outputs:
        add(tensor.grad_fn)
    while pending:
        node = heappop(pending)[2]
        if node.name() in _PRODUCTS:
            return True
        if node.name() not in _SAVE_NOTHING:
            return False
        for following, _ in node.next_functions:
            add(following)
    return False
