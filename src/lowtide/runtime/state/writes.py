"""Which memory operations write to, as they declare it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class Watched(TorchDispatchMode):
    """Changes nothing but this: while any mode sees operations, torch computes some in another way.

    Such is `ctc_loss` with lengths in tensors. What was recorded under `Writes` is recomputed under this one.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code between units goes on running compiled; else an observed run would compute other bits."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Writes(Watched):
    """Notes the storages that operations write to, and those that they only bring up to date.

    Some write without counting a version: the statistics of batch normalisation, whose operation does not even declare
    it, and what observers of quantisation-aware training have seen.

    Args:
        ahead: called with what an operation is about to write to.
    """

    def __init__(self, ahead: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()
        self._ahead = ahead
        self.addresses: set[int] = set()
        self._updated: set[int] = set()
        self._read: set[int] = set()

    @property
    def unread(self) -> set[int]:
        """The storages that were brought up to date, and that nothing else in the run depended on."""
        return self._updated - self._read

    def note_results(self, tensors: Iterable[torch.Tensor]) -> None:
        """A call has ended: what it returns is read by others."""
        self._read |= _storages(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _given(func, args, kwargs)
        updated, written = updated_by(func, given), written_by(func, args, kwargs)
        self.addresses |= _storages(written)
        self._ahead([*written, *(given[name] for name in updated if given[name] is not None)])
        self._updated |= _storages(value for name, value in given.items() if name in updated)
        self._read |= _storages(value for name, value in given.items() if name not in updated)
        return func(*args, **kwargs)


def updated_by(func: Any, given: dict[str, Any]) -> set[str]:
    """The arguments on which nothing but their own next content depends: statistics in training, and counters.

    Counters are whole numbers: of others that change in place, autograd may save what they held.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return set()
    if "running_mean" in given and "running_var" in given:
        in_training = given.get("training", given.get("train", schema.name in _GATHERING))
        return {"running_mean", "running_var"} if in_training is True else set()
    written = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    if len(written) != 1 or len(schema.returns) != 1 or schema.returns[0].alias_info is None:
        return set()
    value = given.get(written[0].name)
    is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
    return {written[0].name} if is_whole else set()


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operation's arguments by name."""
    schema = getattr(func, "_schema", None)
    names = [str(n) for n in range(len(args))] if schema is None else [each.name for each in schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


# Those of `SyncBatchNorm`, which is in training wherever it calls them.
_GATHERING = frozenset({"aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"})


def _storages(values: Iterable[Any]) -> set[int]:
    tensors = (each for value in values for each in tree_iter(value) if isinstance(each, torch.Tensor))
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
