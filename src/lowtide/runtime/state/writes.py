"""Which memory operations write to, as they declare it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation changes, by its own declaration."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in tree_iter(value) if isinstance(tensor, torch.Tensor)]
    return found


class Writes(TorchDispatchMode):
    """Notes the storages that operations write to.

    Some write without counting a version: the statistics of batch normalisation, whose operation does not even declare
    it, and what observers of quantisation-aware training have seen.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code between units goes on running compiled; else an observed run would compute other bits."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            if tensor.layout is torch.strided:
                self.addresses.add(tensor.untyped_storage()._cdata)
        return func(*args, **kwargs)
