"""Weights, weight gradients and optimizer state that live on the lower tier and visit the device.

Every such tensor has a *mirror*, its place on the lower tier as a tensor of the same device. While it is away, the
user's own object (the parameter, its gradient, the optimizer's state) is that mirror: whatever the user's code does
with it works, at the link's speed, and is not lost. While it is there, the object has device memory. A parameter keeps
one storage on the device for as long as the plan lives, emptied and filled again, because autograd's graph refers to
views of it.

The list of operations says what is where, and nothing here depends on it: a value that is needed is fetched if it is
not there, and one that leaves without a current mirror is copied first. So a step that is skipped, ends in an exception
or is run twice costs time and never a number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.errors import ExecutionError, PlanError
from lowtide.runtime.meter import exclude
from lowtide.runtime.transfer.cargo import Mirror, Ticket, Tier
from lowtide.schedule import Await, Offload, Prefetch, Release, Value

MANAGED = ("w", "g", "opt")

# Of a storage: the tensor, and the Python object through which it is counted.
_NUM_OWN_USES = 2
# How often weights that leave with a current mirror are compared with it: after a forward, and after a backward.
_NUM_COMPARED = 2


class _Item:
    """One tensor of the user's, and its two places; the one on the lower tier is made when it first leaves."""

    __slots__ = ("memory", "mirror", "num_bytes", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor, mirror: Mirror | None) -> None:
        self.tensor = tensor
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.mirror = mirror
        if mirror is None and not tensor.untyped_storage().resizable():  # of a file, or another library
            tensor.data = torch.empty_like(tensor, memory_format=torch.preserve_format).copy_(tensor)
        # of its own version: copies into it are no changes of the tensor
        self.memory = tensor.data if mirror is None else torch.empty_like(mirror.tensor)
        self.storage = self.memory.untyped_storage()
        if mirror is not None:
            self.storage.resize_(0)

    def place(self, tier: Tier) -> Mirror:
        """Its place on the lower tier."""
        if self.mirror is None:
            self.mirror = tier.mirror(self.memory)
        return self.mirror

    @property
    def is_there(self) -> bool:
        """Whether the tensor has device memory: its own, or some that the user gave it."""
        if self.mirror is None:
            return True
        return bool(self.tensor.untyped_storage()._cdata != self.mirror.tensor.untyped_storage()._cdata)

    @property
    def is_known(self) -> bool:
        """Whether it is in one of its two places."""
        return not self.is_there or self.tensor.untyped_storage()._cdata == self.storage._cdata


class Parked:
    """The weights, or the optimizer state, of one stage.

    Args:
        tier: where they go.
        tensors: the user's tensors, as they are now.
        mirrors: places on the tier that new tensors may be in already, by the address of the storage.
    """

    def __init__(self, tier: Tier, tensors: Callable[[], Iterable[torch.Tensor]], mirrors: dict[int, Mirror]) -> None:
        self._tier = tier
        self._tensors = tensors
        self._mirrors = mirrors
        self._items: dict[int, _Item] = {}
        self.is_away = False
        """Whether it has left and not arrived since."""
        self._is_current = False  # whether the mirrors hold what the device holds
        self._num_compared = 0
        self._is_written = False
        self._leaving: Ticket | None = None
        self._arriving: tuple[list[_Item], Ticket] | None = None
        self._taken: Ticket | None = None  # of the device memory that was filled last

    def find(self) -> list[_Item]:
        """Look at the user's tensors again: optimizer state comes into being with the first step."""
        found: dict[int, _Item] = {}
        for tensor in self._tensors():
            known = self._items.get(id(tensor))
            if known is None:
                known = _Item(tensor, self._mirrors.pop(tensor.untyped_storage()._cdata, None))
                self._is_current = False
            found[id(tensor)] = known
        self._items = found
        return list(found.values())

    def forget(self) -> None:
        """Hold no memory of the user's any more."""
        self._items.clear()

    @property
    def items(self) -> Collection[_Item]:
        """The tensors as they were found last."""
        return self._items.values()

    @property
    def is_there(self) -> bool:
        """Whether all of it is on the device, or on its way."""
        return self._arriving is not None or all(item.is_there for item in self._items.values())

    def change(self) -> None:
        """What is on the device may have been changed: mirrors are not current."""
        self._is_current = False

    def offload(self) -> int:
        """Queue copies to the mirrors; returns their bytes."""
        self.arrive()
        there = [item for item in self.find() if item.is_there]
        if not there or self._is_current:
            return 0
        self._wait_for_leaving()
        self._leaving = self._tier.copy_down([(item.tensor.data, item.place(self._tier)) for item in there])
        self._is_current = True
        return sum(item.num_bytes for item in there)

    def leave(self) -> int:
        """Free the device memory, copying first what has no current mirror; returns the bytes copied."""
        self.arrive()
        if self._is_current and self._num_compared < _NUM_COMPARED:
            self._compare()
        if self._is_written:
            self._is_current = False
        moved = self.offload()
        self._wait_for_leaving()
        if self._taken is not None:
            self._taken.hand_back()
            self._taken = None
        for item in self._items.values():
            if item.is_there:
                item.tensor.data = item.place(self._tier).tensor
            item.storage.resize_(0)
        self.is_away = bool(self._items)
        return moved

    def _compare(self) -> None:
        """See whether the stage itself writes to its weights (`weight.data.clamp_(0)` in a forward), which no version
        tells: then they are copied whenever they leave.
        """
        self._num_compared += 1
        self._wait_for_leaving()
        there = [item for item in self._items.values() if item.is_there and item.mirror is not None]
        self._is_written |= not all(torch.equal(item.tensor.data, item.place(self._tier).tensor) for item in there)

    def prefetch(self) -> int:
        """Take device memory and queue copies from the mirrors; returns their bytes."""
        if self._arriving is not None:
            return 0
        away = [item for item in self.find() if not item.is_there]
        if not away:
            return 0
        for item in away:
            item.storage.resize_(item.num_bytes)
        self._taken = self._tier.copy_up([(item.memory, item.place(self._tier)) for item in away])
        self._arriving = (away, self._taken)
        return sum(item.num_bytes for item in away)

    def arrive(self) -> None:
        """Wait for what was fetched; from here on the user's tensors are on the device."""
        if self._arriving is None:
            return
        (items, ticket), self._arriving = self._arriving, None
        ticket.wait()
        self.is_away = False
        self._is_current = self._is_current or len(items) == len(self._items)
        for item in items:
            if not item.is_there:
                item.tensor.data = item.memory

    def _wait_for_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None


class Spent(torch.Tensor):
    """A gradient that was used up in backward: it has no memory, can be set to None or zero, and nothing else."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Spent:
        """Of the shape of another tensor."""
        made: Spent = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        exclude(made)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a placeholder of another form
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse all but zeroing."""
        if func is torch.ops.aten.zero_.default:
            return args[0]
        if func is torch.ops.aten._foreach_zero_.default:
            return None
        raise ExecutionError(
            "this gradient was used up: with step_in_backward=True weights are updated in backward, so gradients "
            "cannot be clipped, scaled or read afterwards; use step_in_backward=False for that"
        )


class ParkedGradients:
    """The gradients of one stage's parameters. autograd makes them anew, so nothing of theirs on the device is kept.

    Args:
        tier: where they go.
        parameters: whose they are.
    """

    def __init__(self, tier: Tier, parameters: Sequence[nn.Parameter]) -> None:
        self._tier = tier
        self._parameters = parameters
        self._mirrors: dict[int, Mirror] = {}
        self._copied: dict[int, torch.Tensor] = {}  # gradients whose mirrors are current, or will be; kept until then
        self._leaving: Ticket | None = None
        self._arriving: tuple[list[tuple[nn.Parameter, torch.Tensor]], Ticket] | None = None
        self._taken: Ticket | None = None

    def forget(self) -> None:
        """Hold no memory of the user's any more."""
        self._copied.clear()

    @property
    def is_there(self) -> bool:
        """Whether a gradient is on the device, or on its way."""
        return self._arriving is not None or any(True for _ in self._there())

    def exist(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def change(self) -> None:
        """What is on the device may have been changed: mirrors are not current."""
        self._copied.clear()

    def offload(self) -> int:
        """Queue copies to the mirrors; returns their bytes."""
        self.arrive()
        pairs: list[tuple[torch.Tensor, Mirror]] = []
        for parameter, gradient in self._there():
            if self._copied.get(id(parameter)) is not gradient:
                gradient = self._without_gaps(parameter, gradient)
                pairs.append((gradient, self._mirror_of(parameter, gradient)))
                self._copied[id(parameter)] = gradient
        if not pairs:
            return 0
        self._wait_for_leaving()
        self._leaving = self._tier.copy_down(pairs)
        return sum(gradient.numel() * gradient.element_size() for gradient, _ in pairs)

    def leave(self) -> int:
        """Free the device memory, copying first what has no current mirror; returns the bytes copied."""
        moved = self.offload()
        self._wait_for_leaving()
        if self._taken is not None:
            self._taken.hand_back()
            self._taken = None
        for parameter, _ in list(self._there()):
            parameter.grad = self._mirrors[id(parameter)].tensor
        self._copied.clear()
        return moved

    def prefetch(self) -> int:
        """Take device memory and queue copies from the mirrors; returns their bytes."""
        if self._arriving is not None:
            return 0
        away = [parameter for parameter in self._parameters if self._is_away(parameter)]
        if not away:
            return 0
        mirrors = [self._mirrors[id(parameter)] for parameter in away]
        made = [torch.empty_like(mirror.tensor, memory_format=torch.preserve_format) for mirror in mirrors]
        self._taken = self._tier.copy_up(list(zip(made, mirrors, strict=True)))
        self._arriving = (list(zip(away, made, strict=True)), self._taken)
        return sum(tensor.numel() * tensor.element_size() for tensor in made)

    def arrive(self) -> None:
        """Wait for what was fetched; from here on it is the parameters' gradient."""
        if self._arriving is None:
            return
        (made, ticket), self._arriving = self._arriving, None
        ticket.wait()
        for parameter, gradient in made:
            if self._is_away(parameter):  # else the user has set it to None meanwhile
                parameter.grad = gradient
                self._copied[id(parameter)] = gradient

    def make_room(self) -> None:
        """Take the room on the lower tier now: taken between activations that come and go, it would leave gaps."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._mirror_of(parameter, parameter.data)

    def spend(self) -> None:
        """Free the gradients; whoever reads them now is told why they are gone."""
        self.arrive()
        self._wait_for_leaving()
        self._copied.clear()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = Spent(parameter)
        if self._taken is not None:
            self._taken.hand_back()
            self._taken = None

    def _there(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and is_plain(gradient) and not self._is_away(parameter):
                yield parameter, gradient

    def _is_away(self, parameter: nn.Parameter) -> bool:
        mirror = self._mirrors.get(id(parameter))
        return mirror is not None and parameter.grad is mirror.tensor

    def _without_gaps(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with the strides of its parameter, as autograd leaves it but for rare cases."""
        if gradient.stride() == parameter.stride():
            return gradient
        parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient).detach()
        return parameter.grad

    def _mirror_of(self, parameter: nn.Parameter, gradient: torch.Tensor) -> Mirror:
        mirror = self._mirrors.get(id(parameter))
        if mirror is None or mirror.tensor.dtype != gradient.dtype:
            mirror = self._mirrors[id(parameter)] = self._tier.mirror(gradient)
        return mirror

    def _wait_for_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory of one of torch's own devices, with something in it."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel() > 0


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, so that the storage can be emptied and filled again for it."""
    num_bytes = tensor.numel() * tensor.element_size()
    return is_plain(tensor) and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == num_bytes


def has_other_users(tensor: torch.Tensor) -> bool:
    """Whether something else, such as a `state_dict` that the user holds, refers to a tensor's memory, too."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > _NUM_OWN_USES


class Weights:
    """All values of a model that a schedule may move besides activations.

    Args:
        tier: where they go.
        parameters: of each stage, by its number: those that no other stage reads.
        names: of the parameters, by id.
        optimizer: whose state moves; None: nobody's.
    """

    def __init__(
        self,
        tier: Tier,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        names: Mapping[int, str],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._tier = tier
        self._names = names
        self._mirrors: dict[int, Mirror] = {}
        self.parameters = parameters
        self.optimizer = optimizer
        self.moved_bytes = 0
        self._values: dict[Value, Parked | ParkedGradients] = {}
        for k, own in parameters.items():
            self._values[("w", k)] = Parked(tier, partial(iter, own), self._mirrors)
            self._values[("g", k)] = ParkedGradients(tier, own)
            self._values[("opt", k)] = Parked(tier, partial(self._state_of, own), self._mirrors)

    def _state_of(self, parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
        if self.optimizer is None:
            return
        for parameter in parameters:
            state = self.optimizer.state.get(parameter, {})
            for value in state.values() if isinstance(state, Mapping) else ():
                is_there = isinstance(value, torch.Tensor) and value.device == parameter.device
                if is_there and is_whole(value) and value.nbytes >= self._tier.smallest_bytes:
                    yield value

    def adopt(self, tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of a tensor in a place on the tier, to become optimizer state of a parameter."""
        mirror = self._tier.mirror(parameter)  # state of its shape has its dtype and strides
        mirror.tensor.copy_(tensor)
        self._mirrors[mirror.tensor.untyped_storage()._cdata] = mirror
        return mirror.tensor.detach()  # an object of its own, which will have device memory from time to time

    # The list

    def execute(self, operation: Offload | Release | Prefetch | Await) -> None:
        """Do what an operation asks for, as far as it is not done already."""
        value = self._values.get(operation.value)
        if value is None:
            return
        if isinstance(operation, Offload):
            self.moved_bytes += value.offload()
        elif isinstance(operation, Release):
            self.moved_bytes += value.leave()
        elif isinstance(operation, Prefetch):
            self.moved_bytes += value.prefetch()
        else:
            value.arrive()

    def need(self, k: int) -> None:
        """Have the weights of stage k on the device."""
        value = self._values.get(("w", k))
        if isinstance(value, Parked) and value.is_away:
            self._fetch(value)

    def need_all(self, k: int) -> None:
        """Have weights, gradients and optimizer state of stage k on the device."""
        for kind in MANAGED:
            self._fetch(self._values[kind, k])

    def _fetch(self, value: Parked | ParkedGradients) -> None:
        self.moved_bytes += value.prefetch()
        value.arrive()

    def is_away(self, k: int) -> bool:
        """Whether weights of stage k are not on the device."""
        value = self._values.get(("w", k))
        return isinstance(value, Parked) and value.is_away

    def change(self) -> None:
        """Somebody may have written to what is on the device."""
        for value in self._values.values():
            value.change()

    def begin(self, start: Collection[Value], copied: Iterable[Value]) -> None:
        """A step begins: have on the device what the list starts with, whatever has happened since the last one."""
        self.check()
        self.change()
        self.settle(start, fetch=True)
        for name in copied:
            value = self._values.get(name)
            if value is not None:
                self.moved_bytes += value.offload()

    def arrive(self) -> None:
        """Have all that is on its way: the user's code comes next, and must not write to what was copied already."""
        for value in self._values.values():
            value.arrive()

    def make_room(self) -> None:
        """Take the room for gradients on the lower tier."""
        for value in self._values.values():
            if isinstance(value, ParkedGradients):
                value.make_room()

    def has_gradients(self, k: int) -> bool:
        """Whether stage k has anything to update."""
        value = self._values.get(("g", k))
        return isinstance(value, ParkedGradients) and value.exist()

    def end_update(self, k: int, *, are_gradients_changed: bool, spends_gradients: bool) -> None:
        """The weights and optimizer state of stage k are new; its gradients leave the device and stay readable, or are
        gone for good.
        """
        for kind in ("w", "opt") if not are_gradients_changed else MANAGED:
            self._values[kind, k].change()
        gradients = self._values["g", k]
        if spends_gradients:
            assert isinstance(gradients, ParkedGradients)
            gradients.spend()
        else:
            self.moved_bytes += gradients.leave()

    def forget_spent(self) -> None:
        """Gradients that were used up are None when the next forward begins, as after `zero_grad()`."""
        for own in self.parameters.values():
            for parameter in own:
                if type(parameter.grad) is Spent:
                    parameter.grad = None

    def settle(self, device: Collection[Value], *, fetch: bool) -> None:
        """Have on the device only these values, and with `fetch` all of them."""
        leaving = [value for name, value in self._values.items() if name not in device]
        for value in leaving:
            if value.is_there:
                self.moved_bytes += value.offload()
        for value in leaving:
            if value.is_there:
                self.moved_bytes += value.leave()
        for name, value in self._values.items() if fetch else ():
            if name in device and name[0] != "g":
                self._fetch(value)

    def bring_back(self) -> None:
        """Have everything on the device, for good.

        Raises:
            ExecutionError: where the device has no room; what is left on the host stays usable there.
        """
        try:
            for value in self._values.values():
                self._fetch(value)
                value.forget()
        except torch.OutOfMemoryError:
            raise ExecutionError(
                "the device has no room for all weights, gradients and optimizer state; what did not fit is still in "
                "host memory, where every operation can use it, slowly"
            ) from None
        self._tier.finish()

    def check(self) -> None:
        """Refuse parameters that were moved or given other memory while lowtide looks after theirs.

        Raises:
            PlanError: with the parameter's name.
        """
        for (kind, _), value in self._values.items():
            if kind != "w":
                continue
            assert isinstance(value, Parked)
            for item in value.items:
                if not item.is_known:
                    raise PlanError(
                        f"parameter {self._names[id(item.tensor)]!r} was moved or given other memory (model.to, "
                        "param.data = ...) while its plan keeps weights on the host; call plan.detach() first, and "
                        "call fit again afterwards"
                    )
