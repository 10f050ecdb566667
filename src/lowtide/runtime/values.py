"""The values of a schedule while it runs: a[k], the output of a stage, and abar[k], all that its backward needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lowtide.errors import ExecutionError
from lowtide.runtime.cargo import Cargo, Tier, View
from lowtide.runtime.saved import Placeholder, Placeholders
from lowtide.runtime.tape import version_of


class Leaf:
    """One tensor of a stage's output, without its history."""

    __slots__ = ("_tensor", "_version", "_view", "requires_grad")

    def __init__(self, tensor: torch.Tensor, cargo: Cargo | None) -> None:
        self.requires_grad = tensor.requires_grad
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self._view: View | None = None
        if cargo is not None and is_movable(tensor):
            self._view = cargo.view(self._tensor)

    def leave(self) -> None:
        """The cargo has left the device."""
        if self._view is not None:
            self._tensor = None

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as an input of a repeated run: without history, asking for gradients as the first did."""
        tensor = self._tensor
        if tensor is None:
            assert self._view is not None
            tensor = self._view.tensor()
        elif version_of(tensor) != self._version:
            raise ExecutionError(
                f"the output of stage {name!r}, of shape {list(tensor.shape)}, was changed in place between forward "
                "and backward; work on a copy, or change it after the backward pass"
            )
        return tensor.detach().requires_grad_(self.requires_grad)

    @property
    def storage(self) -> torch.UntypedStorage:
        """Its storage, on the device."""
        if self._tensor is not None:
            return self._tensor.untyped_storage()
        assert self._view is not None
        return self._view.tensor().untyped_storage()


class Activation:
    """a[k]: the tensors of stage k that the next stage reads, by number."""

    __slots__ = ("cargo", "leaves", "name")

    def __init__(self, name: str, tensors: Mapping[int, torch.Tensor], *, movable: bool, cargo: Cargo | None = None):
        self.name = name
        self.cargo = (cargo or Cargo()) if movable else None
        self.leaves = {number: Leaf(tensor, self.cargo) for number, tensor in tensors.items()}

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Let go the tensors that the next stage turned out not to read; not for those that move."""
        if self.cargo is None:
            wanted = set(numbers)
            self.leaves = {number: leaf for number, leaf in self.leaves.items() if number in wanted}

    def tensors(self, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        """Inputs for a repeated run of the next stage."""
        if self.cargo is not None:
            self.cargo.arrive()
        return {number: self.leaves[number].tensor(self.name) for number in numbers}

    def offload(self, tier: Tier) -> int:
        """Queue the copies to the lower tier; returns their bytes."""
        assert self.cargo is not None
        return self.cargo.offload(tier)

    def prefetch(self, tier: Tier) -> int:
        """Queue the copies back; returns their bytes."""
        assert self.cargo is not None
        return self.cargo.prefetch(tier)

    def arrive(self) -> None:
        """Wait until a fetched value is there."""
        if self.cargo is not None:
            self.cargo.arrive()

    def leave(self) -> None:
        """Wait for copies under way, and let the value go from the device."""
        if self.cargo is not None:
            self.cargo.leave()
        for leaf in self.leaves.values():
            leaf.leave()


class _OfInput:
    """A saved tensor that is a view of the stage's input."""

    __slots__ = ("number", "view")

    def __init__(self, number: int, view: View) -> None:
        self.number = number
        self.view = view


class Saved(Activation):
    """abar[k]: a[k], and what a sorted run of stage k saved; unsorted runs leave that to autograd."""

    __slots__ = ("items",)

    def __init__(self, name: str, tensors: Mapping[int, torch.Tensor], sorter: Sorter | None, *, movable: bool):
        super().__init__(name, tensors, movable=movable, cargo=None if sorter is None else sorter.cargo)
        self.items: list[View | _OfInput | torch.Tensor] = [] if sorter is None else sorter.items

    def fill(self, placeholders: Placeholders, source: Activation | None) -> None:
        """Fill the stage's placeholders for backward; `source` has the stage's input."""
        self.arrive()
        if source is not None:
            source.arrive()
        for index, item in enumerate(self.items):
            placeholder = placeholders.alive(index)
            if placeholder is None:
                continue
            if isinstance(item, _OfInput):
                assert source is not None
                placeholder.fill(item.view.on(source.leaves[item.number].storage))
            elif isinstance(item, View):
                placeholder.fill(item.tensor())
            else:
                placeholder.fill(item)
        self.items = []


class Sorter:
    """Tells what a run saves apart: views of its input, what must stay as it is, and its own, which can be moved."""

    def __init__(self) -> None:
        self.cargo = Cargo()
        self.items: list[View | _OfInput | torch.Tensor] = []

    def __call__(self, index: int, placeholder: Placeholder | None, tensor: torch.Tensor) -> None:
        """Take in the next saved tensor; some operations fill it only later, so nothing is copied here."""
        self.items.append(tensor.detach())

    def finish(self, inputs: Mapping[int, torch.Tensor], fixed: set[int]) -> None:
        """The run has ended.

        Args:
            inputs: what it read of the previous stage, by number.
            fixed: addresses of storages that are not the stage's: parameters, buffers, held tensors.
        """
        addresses = {t.untyped_storage()._cdata: number for number, t in inputs.items() if is_movable(t)}
        self.items = [self._sorted(item, addresses, fixed) for item in self.items if isinstance(item, torch.Tensor)]

    def _sorted(
        self, tensor: torch.Tensor, inputs: Mapping[int, int], fixed: set[int]
    ) -> View | _OfInput | torch.Tensor:
        if not is_movable(tensor):
            return tensor
        storage = tensor.untyped_storage()
        number = inputs.get(storage._cdata)
        if number is not None:
            return _OfInput(number, View(None, tensor))
        if storage._cdata in fixed or not storage.nbytes():  # FSDP empties the storages of parameters that it gathers
            return tensor
        return self.cargo.view(tensor)


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory that can be copied as bytes and put together again."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
