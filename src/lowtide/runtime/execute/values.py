"""The values of a schedule while it runs: a[k], the output of a stage, and abar[k], all that its backward needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

import torch

from lowtide.errors import ExecutionError
from lowtide.runtime.execute.saved import Placeholder, Placeholders, kept
from lowtide.runtime.state.environment import version_of
from lowtide.runtime.transfer.cargo import Box, Cargo, Tier, View


class Leaf:
    """One tensor of a stage's output, without its history."""

    __slots__ = ("_tensor", "_version", "_view", "requires_grad")

    def __init__(self, tensor: torch.Tensor, cargo: Cargo | None, fixed: Collection[int]) -> None:
        self.requires_grad = tensor.requires_grad
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = version_of(tensor)
        self._view: View | None = None
        if cargo is not None and is_movable(tensor) and tensor.untyped_storage()._cdata not in fixed:
            self._view = cargo.view(tensor)

    def is_in(self, address: int) -> bool:
        """Whether it holds a tensor in the storage at an address."""
        tensor = self._tensor
        return tensor is not None and tensor.layout is torch.strided and tensor.untyped_storage()._cdata == address

    def leave(self) -> None:
        """The cargo has left the device."""
        if self._view is not None:
            self._tensor = None

    def tensor(self, name: str, is_state: Callable[[torch.Tensor], bool]) -> torch.Tensor:
        """The tensor as an input of a repeated run: without history, asking for gradients as the first did."""
        return self._checked(name, is_state).detach().requires_grad_(self.requires_grad)

    def storage(self, name: str) -> torch.UntypedStorage:
        """Its storage, on the device."""
        return self._checked(name).untyped_storage()

    def _checked(self, name: str, is_state: Callable[[torch.Tensor], bool] | None = None) -> torch.Tensor:
        tensor = self._tensor
        if tensor is None:
            assert self._view is not None
            return self._view.tensor()
        if version_of(tensor) != self._version and not (is_state is not None and is_state(tensor)):
            raise ExecutionError(
                f"the output of stage {name!r}, of shape {list(tensor.shape)}, was changed in place between forward "
                "and backward; work on a copy, or change it after backward"
            )
        return tensor


class Activation:
    """a[k]: the tensors of stage k that the next stage reads, by number.

    Args:
        name: the stage's, for messages.
        tensors: by number.
        movable: whether it leaves the device for some time.
        fixed: addresses of storages that stay where they are: parameters, and buffers, which may change meanwhile.
        cargo: with what it moves.
    """

    __slots__ = ("cargo", "leaves", "name")

    def __init__(
        self,
        name: str,
        tensors: Mapping[int, torch.Tensor],
        *,
        movable: bool,
        fixed: Collection[int] = (),
        cargo: Cargo | None = None,
    ) -> None:
        self.name = name
        self.cargo = (cargo or Cargo()) if movable else None
        self.leaves = {number: Leaf(tensor, self.cargo, fixed) for number, tensor in tensors.items()}

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Take in a tensor that the next stage reads, and that no step before has read; it does not move."""
        if number not in self.leaves:
            self.leaves[number] = Leaf(tensor, None, ())

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Free the tensors that the next stage turned out not to read; not for those that move."""
        if self.cargo is None:
            wanted = set(numbers)
            self.leaves = {number: leaf for number, leaf in self.leaves.items() if number in wanted}

    def tensors(self, numbers: Iterable[int], is_state: Callable[[torch.Tensor], bool]) -> dict[int, torch.Tensor]:
        """Inputs for a repeated run of the next stage; buffers among them, which `is_state` knows, are put back."""
        if self.cargo is not None:
            self.cargo.arrive()
        return {number: self.leaves[number].tensor(self.name, is_state) for number in numbers}

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
        """Wait for copies under way, then free the value on the device."""
        if self.cargo is not None:
            self.cargo.leave()
        for leaf in self.leaves.values():
            leaf.leave()


class _Whole:
    """A tensor that a sorted run saved and that stays as it is: it is some other's, or too small to be moved."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, version: int, lenders: Mapping[int, torch.nn.Parameter]) -> None:
        self._tensor, self._version = kept(tensor, version, lenders)

    def fill(self, placeholder: Placeholder, source: Activation | None) -> None:
        """Give the placeholder the tensor."""
        placeholder.tensor = self._tensor
        placeholder.version = self._version


class _Part(View):
    """A tensor that a sorted run saved, as a view of a storage that can be moved, or of the stage's input.

    Args:
        box: the storage; None: the stage's input.
        tensor: the tensor.
        number: which tensor of the input.
        unchanged: whether nobody wrote to it between its saving and the end of the run.
    """

    __slots__ = ("_number", "_unchanged")

    def __init__(self, box: Box | None, tensor: torch.Tensor, number: int | None, *, unchanged: bool) -> None:
        super().__init__(box, tensor)
        self._number = number
        self._unchanged = unchanged

    def fill(self, placeholder: Placeholder, source: Activation | None) -> None:
        """Put the tensor together on the device, and give it to the placeholder."""
        if self._number is None:
            tensor = self.tensor()
        else:
            assert source is not None
            tensor = self.on(source.leaves[self._number].storage(source.name))
        placeholder.tensor = tensor
        # No version is -1: whoever opens what was changed is told.
        placeholder.version = version_of(tensor) if self._unchanged else -1


class Saved(Activation):
    """abar[k]: a[k], and what a sorted run of stage k saved; unsorted runs leave that to autograd."""

    __slots__ = ("_sorted", "items")

    def __init__(
        self,
        name: str,
        tensors: Mapping[int, torch.Tensor],
        sorter: Sorter | None,
        *,
        movable: bool,
        fixed: Collection[int] = (),
    ) -> None:
        self._sorted = None if sorter is None else sorter.cargo
        super().__init__(name, tensors, movable=movable, fixed=fixed, cargo=self._sorted)
        self.items: list[_Whole | _Part] = [] if sorter is None else sorter.items

    @property
    def boxes(self) -> list[Box | None]:
        """The storages that what was saved is in."""
        return [item.box for item in self.items if isinstance(item, _Part)]

    def fill(self, placeholders: Placeholders, source: Activation | None) -> None:
        """Fill the stage's placeholders for backward; `source` has the stage's input."""
        self.arrive()
        if source is not None:
            source.arrive()
        # An unsorted run has no items: it filled them itself.
        for item, placeholder in zip(self.items, placeholders.take() if self.items else (), strict=True):
            item.fill(placeholder, source)
        # Autograd keeps packing hooks, and with them the sorter, as long as any saved tensor of the stage: it must not
        # hold on to all of them until then.
        self.items.clear()
        if self._sorted is not None:
            self._sorted.leave()


class Sorter:
    """Tells what a run saves apart: views of its input, what must stay as it is, and its own, which can be moved.

    Args:
        smallest_bytes: storages smaller than this stay as they are.
    """

    __slots__ = ("_smallest_bytes", "_tensors", "_versions", "cargo", "items")

    def __init__(self, smallest_bytes: int) -> None:
        self.cargo = Cargo()
        self.items: list[_Whole | _Part] = []
        self._smallest_bytes = smallest_bytes
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Take in the next saved tensor; some operations fill it only later, so nothing is copied here."""
        self._tensors.append(tensor)
        self._versions.append(version_of(tensor))

    def clear(self) -> None:
        """Free the saved tensors: the graph of the run holds the hook, the hook this object, and these the graph."""
        self._tensors.clear()
        self._versions.clear()

    def finish(
        self,
        inputs: Mapping[int, torch.Tensor],
        fixed: set[int],
        lenders: Mapping[int, torch.nn.Parameter],
        sides: Mapping[int, Box] = MappingProxyType({}),
    ) -> None:
        """The run has ended.

        Args:
            inputs: what it read of the previous stage, by number.
            fixed: addresses of storages that are not the stage's: parameters, buffers, held tensors.
            lenders: the parameters among these whose memory comes and goes, by address.
            sides: the storages of side values that move by themselves, by address.
        """
        addresses = {t.untyped_storage()._cdata: number for number, t in inputs.items() if is_movable(t)}
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            self.items.append(self._sorted(tensor, version, addresses, fixed, lenders, sides))
        self.clear()

    def _sorted(
        self,
        tensor: torch.Tensor,
        version: int,
        inputs: Mapping[int, int],
        fixed: set[int],
        lenders: Mapping[int, torch.nn.Parameter],
        sides: Mapping[int, Box],
    ) -> _Whole | _Part:
        if not is_movable(tensor):
            return _Whole(tensor, version, lenders)
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in sides:
            return _Part(sides[address], tensor, None, unchanged=version_of(tensor) == version)
        number = inputs.get(address)
        # FSDP empties the storages of parameters that it gathers, so they may be small as well.
        is_small = storage.nbytes() < self._smallest_bytes
        if number is None and (address in lenders or address in fixed or is_small):
            return _Whole(tensor, version, lenders)
        box = self.cargo.box(storage, address) if number is None else None
        return _Part(box, tensor, number, unchanged=version_of(tensor) == version)


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by a transform of torch.func


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory that can be copied as bytes and put together again."""
    kind = type(tensor)
    is_plain = (kind is torch.Tensor or kind is torch.nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not _is_wrapped(tensor) and not tensor._is_zerotensor()  # zeros of jvp have no memory
