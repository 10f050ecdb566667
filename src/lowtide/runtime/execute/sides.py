"""Side values that leave the device for a while: skip connections, an encoder's output.

While the model's own forward runs, its code has tensors of them in hand, and so may hooks and lists. So the memory of a
side value does not change owners: its storage is emptied when it leaves and filled again when it comes back, and every
tensor in it is as it was. What autograd saves of it is kept as a view (see `Sorter`).

The list says what is where, and nothing here depends on it: whoever is about to read a side value that is away gets it
first. In the forward a guard looks at the tensors of every operation. After it only lowtide may have such a tensor: a
side value that something else refers to stays on the device, or comes back. What the guard cannot see, compiled code,
has side values that stay; an extension that takes a tensor's address in C++ must not begin to read one, unannounced,
that it did not read when the model was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lowtide.runtime.execute.values import is_movable
from lowtide.runtime.execute.weights import has_other_names
from lowtide.runtime.state.environment import version_of
from lowtide.runtime.transfer.cargo import Box, Cargo, Tier
from lowtide.schedule import Await, Offload, Prefetch, Release

NumOwn = Callable[[int], int]
"""How many tensors of a step's own, besides those here, are in the storage at an address."""


class _Side:
    """One side value: its storage, and a tensor in it."""

    __slots__ = ("address", "box", "cargo", "copied_version", "is_away", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.cargo = Cargo(empties=True)
        storage = tensor.untyped_storage()
        self.address = storage._cdata
        self.box = self.cargo.box(storage, self.address)
        self.copied_version: int | None = None
        self.is_away = False

    @property
    def has_copy(self) -> bool:
        """Whether the host has what the device has."""
        return self.copied_version == version_of(self.tensor)


class MovedSides:
    """The side values of one step that a schedule moves, by their place in the chain.

    Args:
        tier: where they go.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._sides: dict[int, _Side] = {}
        self._boxes: dict[int, Box] = {}
        self.absent: dict[int, _Side] = {}
        """Those that are away or on their way back, by the address of the storage."""
        self.moved_bytes = 0

    def take(self, i: int, tensor: torch.Tensor) -> None:
        """The maker's first forward has made side value i."""
        is_large = is_movable(tensor) and tensor.untyped_storage().nbytes() >= max(1, self._tier.smallest_bytes)
        if is_large and i not in self._sides:
            side = self._sides[i] = _Side(tensor)
            self._boxes[side.address] = side.box

    @property
    def boxes(self) -> Mapping[int, Box]:
        """The storages of all that were taken in this step, by address."""
        return self._boxes

    def drop(self, i: int) -> None:
        """Nothing needs side value i any more but what autograd has saved of it."""
        side = self._sides.pop(i, None)
        if side is not None:
            self._bring(side)
            del self._boxes[side.address]  # else its memory would stay until the step has ended

    def execute(self, operation: Offload | Release | Prefetch | Await, num_own: NumOwn, *, in_forward: bool) -> None:
        """Do what an operation asks for, as far as it can be done."""
        side = self._sides.get(operation.stage)
        if side is None:
            return
        if isinstance(operation, Offload):
            self._copy(side)
        elif isinstance(operation, Release):
            # In the forward the model's code has names for it, and the guard looks after those; not after arrays.
            storage = side.tensor.untyped_storage()
            self._leave(side, is_named=not storage.resizable() if in_forward else _is_named(side, num_own))
        elif isinstance(operation, Prefetch):
            self._fetch(side)
        else:
            self._bring(side)

    def _copy(self, side: _Side) -> None:
        if side.address not in self.absent:
            self.moved_bytes += side.cargo.offload(self._tier)
            side.copied_version = version_of(side.tensor)

    def _leave(self, side: _Side, *, is_named: bool) -> None:
        if not side.is_away and side.has_copy and not is_named:
            side.cargo.leave()
            side.is_away = True
            self.absent[side.address] = side

    def _fetch(self, side: _Side) -> None:
        if side.is_away:
            del self.absent[side.address]  # the guard sees the copy, which must not wait for itself
            self.moved_bytes += side.cargo.prefetch(self._tier)
            self.absent[side.address] = side
            side.is_away = False

    def _bring(self, side: _Side) -> None:
        self._fetch(side)
        if self.absent.pop(side.address, None) is not None:
            side.cargo.arrive()

    def need(self, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody is about to read these tensors."""
        for tensor in tensors if self.absent else ():
            if tensor.layout is torch.strided:
                side = self.absent.get(tensor.untyped_storage()._cdata)
                if side is not None:
                    self._bring(side)

    def need_values(self, numbers: Iterable[int]) -> None:
        """A stage is about to run that reads these."""
        for i in numbers if self.absent else ():
            if i in self._sides:
                self._bring(self._sides[i])

    def need_boxes(self, boxes: Iterable[Box | None]) -> None:
        """Views of these storages are about to be put together."""
        wanted = {id(box) for box in boxes} if self.absent else ()
        for side in list(self.absent.values()):
            if id(side.box) in wanted:
                self._bring(side)

    def end_forward(self, num_own: NumOwn) -> None:
        """The model's code has returned: what anything else still refers to comes back, and nobody reads the others."""
        for side in list(self.absent.values()):
            if _is_named(side, num_own):
                self._bring(side)

    def close(self, num_own: NumOwn) -> None:
        """The step is over, or has failed: nothing that others refer to stays away."""
        self.end_forward(num_own)
        self._sides.clear()
        self.absent.clear()
        self._boxes.clear()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """See to it, while the model's own code runs in the block, that nothing is read that is away."""
        with _OperationGuard(self), _MethodGuard(self):
            yield


def _is_named(side: _Side, num_own: NumOwn) -> bool:
    return has_other_names(side.tensor, 1 + num_own(side.address))


# What reads a tensor's memory, or tells where it is, without being an operation.
_READING = frozenset(
    {
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
    }
)


class _MethodGuard(TorchFunctionMode):
    """Has side values fetched whose memory is about to be read past all operations, by kernels of Triton as well."""

    def __init__(self, sides: MovedSides) -> None:
        super().__init__()
        self._sides = sides

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING and self._sides.absent:
            with torch._C.DisableTorchFunction():
                self._sides.need(args[:1])
        return func(*args, **(kwargs or {}))


class _OperationGuard(TorchDispatchMode):
    """Has side values fetched that an operation is about to read: the model may take another path than when it was
    captured, and hooks may read what they have collected.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code goes on running compiled."""
        return True

    def __init__(self, sides: MovedSides) -> None:
        super().__init__()
        self._sides = sides

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._sides.absent:
            self._sides.need([each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)])
        return func(*args, **kwargs)
