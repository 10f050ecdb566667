"""Weights, weight gradients and optimizer state that live on the lower tier and visit the device.

Every such tensor has a *mirror*, its place on the lower tier as a tensor of the same device. While it is away, the
user's own object (the parameter, its gradient, the optimizer's state) has the mirror's memory: whatever the user's code
does with it works, at the link's speed, and is not lost. While it is there, the object has device memory.

Memory that has a second name (a view, a `state_dict`, a numpy array, another process) does not move: a tensor whose
device memory has one stays on the device, and one whose mirror has one is back in it whenever the user's code runs. So
every name for a tensor's memory sees the tensor. What autograd saves is no such name: it is kept as a view of the
parameter, and put together when it is opened.

The list of operations says what is where, and nothing here depends on it: a value that is needed is fetched if it is
not there, and one that leaves without a current mirror is copied first. So a step that is skipped, ends in an exception
or is run twice costs time and never a number.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.errors import ExecutionError, LowtideWarning, PlanError
from lowtide.runtime.meter import exclude
from lowtide.runtime.state.environment import version_of
from lowtide.runtime.transfer.cargo import Mirror, Ticket, Tier
from lowtide.schedule import Await, Offload, Prefetch, Release, Value

MANAGED = ("w", "g", "opt")

# How often weights that leave with a current mirror are compared with it: after a forward, and after a backward; from
# then on in turn.
_NUM_COMPARED = 2

# How many integers are compared at a time: on CUDA each takes a byte of device memory meanwhile.
_NUM_COMPARED_AT_ONCE = 2**20


def _num_names(storage: torch.UntypedStorage) -> int:
    """How many tensors have this memory."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the Python object counts, too


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether other processes may have this memory."""
    return storage.device.type == "cpu" and storage.is_shared()


def has_other_names(tensor: torch.Tensor, num_own: int = 1) -> bool:
    """Whether something besides so many tensors of lowtide's refers to a tensor's memory, so that it cannot move."""
    storage = tensor.untyped_storage()
    # What `tensor.numpy()` returns is another name for its memory, and all that tells of it is this mark. A tensor that
    # requires gradients has no `numpy()`; a view of it has, which counts by itself.
    is_array = not storage.resizable() and not tensor.requires_grad
    return is_array or _is_shared(storage) or _num_names(storage) > num_own


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory of one of torch's own devices, with something in it."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel() > 0


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, so that the storage can be emptied and filled again for it."""
    return is_plain(tensor) and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Whether a tensor's strides are not those of a copy of it."""
    return not tensor.is_contiguous() and tensor.stride() != torch.empty_like(tensor, device="meta").stride()


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and without gaps hold the same; NaN is equal to itself."""
    words, others = _words_of(one), _words_of(other)
    if len(words) <= _NUM_COMPARED_AT_ONCE:
        return torch.equal(words, others)
    return all(map(torch.equal, words.split(_NUM_COMPARED_AT_ONCE), others.split(_NUM_COMPARED_AT_ONCE)))


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as integers, eight bytes each where that is possible."""
    flat, begin_bytes = tensor.as_strided((tensor.numel(),), (1,)), tensor.storage_offset() * tensor.element_size()
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 and begin_bytes % 8 == 0 else torch.uint8)


class _ChangedUnseenError(Exception):
    """A weight was changed while its stage ran, or a gradient after backward, which could not be foreseen; `key` is
    that of the tensor.
    """

    def __init__(self, key: Hashable) -> None:
        self.key = key


class _Item:
    """One tensor of the user's, and its two places; the one on the lower tier is made when it first leaves."""

    __slots__ = ("_copied", "is_bound", "mirror", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor, mirror: Mirror | None) -> None:
        self.tensor = tensor
        self.mirror = mirror
        # The version and the memory of the tensor when its mirror was last equal to it.
        self._copied: tuple[int, int] | None = None
        self.is_bound = False  # to its mirror, for good
        # Its own device memory, empty while it is away: the tensor has the same storage whenever it is there.
        self.storage = tensor.untyped_storage() if self.is_there else None

    @property
    def _home(self) -> torch.UntypedStorage | None:
        return None if self.mirror is None else self.mirror.tensor.untyped_storage()

    @property
    def is_there(self) -> bool:
        """Whether the tensor has device memory: its own, or some that the user gave it."""
        home = self._home
        return home is None or bool(self.tensor.untyped_storage()._cdata != home._cdata)

    @property
    def is_known(self) -> bool:
        """Whether it is in one of its two places."""
        # Without device memory of its own it was on the lower tier: what it has now is from somebody else.
        is_own = self.storage is not None and self.tensor.untyped_storage()._cdata == self.storage._cdata
        return not self.is_there or is_own

    @property
    def is_named_at_home(self) -> bool:
        """Whether something else refers to its memory on the lower tier."""
        home = self._home
        return home is not None and (_is_shared(home) or _num_names(home) > (1 if self.is_there else 2))

    @property
    def is_current(self) -> bool:
        """Whether the mirror holds what the device holds, as far as the tensor's version and memory tell."""
        return self._copied == (version_of(self.tensor), self.tensor.untyped_storage()._cdata)

    def note_copy(self) -> None:
        """The mirror holds what the device holds."""
        self._copied = (version_of(self.tensor), self.tensor.untyped_storage()._cdata)

    def note_change(self) -> None:
        """The mirror may not hold what the device holds."""
        self._copied = None

    def close_gaps(self) -> None:
        """Give it strides that a copy can have, as autograd leaves gradients but for rare cases."""
        if _has_gaps(self.tensor):
            self.tensor.data = torch.empty_like(self.tensor.data).copy_(self.tensor.data)

    def make_memory(self) -> torch.Tensor:
        """Take device memory for it."""
        assert self.mirror is not None
        like = self.mirror.tensor
        if self.storage is None:
            self.storage = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device).untyped_storage()
        elif self.storage.nbytes() != like.nbytes:  # resizing takes other memory, also to the size that there is
            self.storage.resize_(like.nbytes)
        return torch.empty(0, dtype=like.dtype, device=like.device).set_(self.storage, 0, like.shape, like.stride())

    def go_home(self) -> None:
        """Free its device memory; the mirror is current, and nothing else refers to what is freed."""
        assert self.mirror is not None
        storage = self.tensor.untyped_storage()
        can_be_emptied = is_whole(self.tensor) and storage.resizable()
        self.tensor.data = self.mirror.tensor
        self.storage = storage if can_be_emptied else None
        if can_be_emptied:
            storage.resize_(0)


class Parked:
    """The weights, the gradients or the optimizer state of one stage.

    Args:
        tier: where they go.
        tensors: the user's tensors, as they are now, each with a key that it keeps when another takes its place.
        adopted: places on the tier that new tensors may be in already, by the address of the storage.
        are_renewed: in each step they are other tensors, as gradients are: none is held longer than necessary.
    """

    def __init__(
        self,
        tier: Tier,
        tensors: Callable[[], Iterable[tuple[Hashable, torch.Tensor]]],
        adopted: dict[int, Mirror],
        *,
        are_renewed: bool = False,
    ) -> None:
        self._tier = tier
        self._tensors = tensors
        self._adopted = adopted
        self._are_renewed = are_renewed
        self._items: dict[Hashable, _Item] = {}
        self._places: dict[Hashable, Mirror] = {}
        self.is_away = False
        """Whether some of it has left and not arrived since."""
        self._num_compared = 0
        self._is_written = False
        self.is_watched = False
        """Whether it is compared with its mirrors in this step, wherever it leaves without a copy."""
        self._leaving: Ticket | None = None
        self._arriving: tuple[list[tuple[_Item, torch.Tensor]], Ticket] | None = None
        self._taken: Ticket | None = None  # of the device memory that was filled last

    def find(self) -> list[_Item]:
        """Look at the user's tensors again: gradients and optimizer state come into being in steps."""
        known, self._items = self._items, {}
        for key, tensor in self._tensors():
            item = known.pop(key, None)
            if item is None or item.tensor is not tensor:
                item = None  # what it held does not count as a name for its place
                item = _Item(tensor, self._place_of(key, tensor))
                self.is_away |= not item.is_there
            self._items[key] = item
        return list(self._items.values())

    def _place_of(self, key: Hashable, tensor: torch.Tensor) -> Mirror | None:
        """The place of a new tensor: that in which it is, or that of its predecessor if nobody refers to that."""
        address = tensor.untyped_storage()._cdata
        place = self._adopted.pop(address, None) or self._places.get(key)
        if place is None:
            return None
        home = place.tensor.untyped_storage()
        if home._cdata != address:
            is_alike = place.tensor.dtype == tensor.dtype and place.tensor.shape == tensor.shape
            if not is_alike or place.tensor.stride() != tensor.stride() or _is_shared(home) or _num_names(home) > 1:
                return None
        self._places[key] = place
        return place

    def make_room(self, tensors: Iterable[tuple[Hashable, torch.Tensor]]) -> None:
        """Take the room on the lower tier now: taken between activations that come and go, it would leave gaps."""
        for key, tensor in tensors:
            if key not in self._places:
                self._places[key] = self._tier.mirror(tensor)

    def forget(self) -> None:
        """Hold no memory of the user's any more."""
        self._items.clear()

    def homes(self) -> dict[int, Mirror]:
        """The places of what is on the lower tier, by the address of the storage."""
        away = [item for item in self.find() if not item.is_there and item.mirror is not None]
        return {item.tensor.untyped_storage()._cdata: item.mirror for item in away if item.mirror is not None}

    def give_up_places(self) -> None:
        """Hold no room on the lower tier any more, either: other schedules need it."""
        self.forget()
        self._places.clear()

    @property
    def items(self) -> Collection[_Item]:
        """The tensors as they were found last."""
        return self._items.values()

    @property
    def is_there(self) -> bool:
        """Whether some of it is on the device, or on its way."""
        return self._arriving is not None or any(item.is_there for item in self.find())

    def change(self) -> None:
        """What is on the device may have been changed: mirrors are not current."""
        self.arrive()
        for item in self._items.values():
            item.note_change()
        if self._are_renewed:
            self._wait_for_leaving()
            self.forget()

    def offload(self) -> int:
        """Queue copies to the mirrors; returns their bytes."""
        self.arrive()
        return self._copy(self._able_to_leave())

    def leave(self) -> int:
        """Free the device memory, copying first what has no current mirror; returns the bytes copied."""
        self.arrive()
        self._compare()
        return self._send(self._able_to_leave())

    def hand_over(self) -> int:
        """The user's code comes next: what was fetched is there, and what has a second name on the lower tier is where
        that is; returns the bytes copied.
        """
        if self._are_renewed and self._is_compared_next:
            # A copy that still runs could take up what the user writes now, and comparing would show nothing.
            self._wait_for_leaving()
        self.arrive()
        if not any(item.is_named_at_home for item in self._items.values()):
            return 0
        return self._send([item for item in self._able_to_leave() if item.is_named_at_home])

    def _able_to_leave(self) -> list[_Item]:
        """What is on the device and has no second name there."""
        there = [item for item in self.find() if item.is_there]
        sharing = Counter(item.tensor.untyped_storage()._cdata for item in there)  # gradients may be parts of one
        return [i for i in there if not has_other_names(i.tensor, sharing[i.tensor.untyped_storage()._cdata])]

    def _copy(self, items: Sequence[_Item]) -> int:
        """Queue copies of what has no current mirror; returns their bytes."""
        stale = [item for item in items if not item.is_current]
        if not stale:
            return 0
        self._wait_for_leaving()
        keys = {id(item): key for key, item in self._items.items()}
        pairs = []
        for item in stale:
            item.close_gaps()
            if item.mirror is None:
                item.mirror = self._places[keys[id(item)]] = self._tier.mirror(item.tensor.data)
            pairs.append((item.tensor.data, item.mirror))
            item.note_copy()
        self._leaving = self._tier.copy_down(pairs)
        return sum(item.tensor.nbytes for item in stale)

    def _send(self, items: Sequence[_Item]) -> int:
        """Free the device memory of some tensors; returns the bytes copied first."""
        moved = self._copy(items)
        self._wait_for_leaving()
        self.hand_back()
        for item in items:
            item.go_home()
        self.is_away = any(not item.is_there for item in self._items.values())
        return moved

    def _compare(self) -> None:
        """See whether somebody writes to it in a way that no version tells (`weight.data.clamp_(0)` in a forward, the
        same with a gradient after backward): then it is copied whenever it leaves.

        Raises:
            _ChangedUnseenError: where nobody did at first, and such writes are lost already.
        """
        is_first = self._num_compared < _NUM_COMPARED
        current = {key: item for key, item in self._items.items() if item.is_there and item.is_current}
        if current and self._is_compared_next:
            self._num_compared += 1
            self._wait_for_leaving()
            places = [(key, item, item.mirror) for key, item in current.items() if item.mirror is not None]
            changed = [key for key, item, place in places if not _have_same_bits(item.tensor.data, place.tensor)]
            if changed and not is_first:
                raise _ChangedUnseenError(changed[0])
            self._is_written |= bool(changed)
        if self._is_written:
            for item in self._items.values():
                item.note_change()

    @property
    def _is_compared_next(self) -> bool:
        """Whether it is compared with its mirrors when it leaves next."""
        return not self._is_written and (self._num_compared < _NUM_COMPARED or self.is_watched)

    def prefetch(self) -> int:
        """Take device memory and queue copies from the mirrors; returns their bytes."""
        if self._arriving is not None:
            return 0
        away = [item for item in self.find() if not item.is_there and not item.is_bound]
        if not away:
            return 0
        made = [(item, item.make_memory()) for item in away]
        self._taken = self._tier.copy_up([(memory, item.mirror) for item, memory in made if item.mirror is not None])
        self._arriving = (made, self._taken)
        return sum(memory.nbytes for _, memory in made)

    def arrive(self) -> None:
        """Wait for what was fetched; from here on the user's tensors are on the device."""
        if self._arriving is None:
            return
        (made, ticket), self._arriving = self._arriving, None
        ticket.wait()
        self.is_away = False
        for item, memory in made:
            if not item.is_there:
                item.tensor.data = memory
                item.note_copy()

    def bind(self) -> int:
        """Leave what has a second name on the lower tier there, for good; returns how many tensors that are."""
        self.arrive()
        for item in self.find():
            item.is_bound = not item.is_there and item.is_named_at_home
        return sum(item.is_bound for item in self._items.values())

    def drop(self) -> None:
        """Nobody needs it any more."""
        self.arrive()
        self._wait_for_leaving()
        self.forget()

    def hand_back(self) -> None:
        """The device memory that was filled last is freed now."""
        if self._taken is not None:
            self._taken.hand_back()
            self._taken = None

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
        if func is torch.ops.aten._foreach_zero_.default:  # gradients of weights that stay may be among them
            for gradient in args[0]:
                if type(gradient) is not cls:
                    gradient.zero_()
            return None
        raise ExecutionError(
            "this gradient was used up: with step_in_backward=True weights are updated in backward, so gradients "
            "cannot be clipped, scaled or read afterwards; use step_in_backward=False for that"
        )


class Weights:
    """All values of a model that a schedule may move besides activations.

    Args:
        tier: where they go.
        parameters: of each stage, by its number: those that no other stage reads.
        names: of the parameters, by id.
        optimizer: whose state moves; None: nobody's.
        homes: places on the tier that weights and optimizer state are in from the beginning, and to which they go back
            in the end, by the address of the storage; None: they have device memory.
    """

    def __init__(
        self,
        tier: Tier,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        names: Mapping[int, str],
        optimizer: torch.optim.Optimizer | None,
        homes: dict[int, Mirror] | None = None,
    ) -> None:
        self._tier = tier
        self._homes = homes
        self._names: Mapping[Any, str] = names
        self._adopted: dict[int, Mirror] = {**(homes or {})}
        self.parameters = parameters
        self.optimizer = optimizer
        self.moved_bytes = 0
        self._turn = 0
        self._stand_ins: dict[int, list[torch.Tensor]] = {}  # by the parameter's id
        self._step_bytes: Mapping[int, int] = {}  # by stage; 0: of the parameters that stay
        self._values: dict[Value, Parked] = {}
        for k, own in parameters.items():
            self._values[("w", k)] = Parked(tier, partial(_keyed, own), self._adopted)
            self._values[("g", k)] = Parked(tier, partial(_gradients_of, own), self._adopted, are_renewed=True)
            self._values[("opt", k)] = Parked(tier, partial(self._state_of, own), self._adopted)

    def _state_of(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[Hashable, torch.Tensor]]:
        if self.optimizer is None:
            return
        for parameter in parameters:
            for index, tensor in enumerate(self._stand_ins.get(id(parameter), ())):
                yield (id(parameter), index), tensor
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items() if isinstance(state, Mapping) else ():
                is_there = isinstance(value, torch.Tensor) and value.device == parameter.device
                if is_there and is_whole(value) and value.nbytes >= self._tier.smallest_bytes:
                    yield (id(parameter), name), value

    def stand_in(self, state_bytes: Mapping[int, int], step_bytes: Mapping[int, int]) -> None:
        """Have memory move that is as large as state that the optimizer has not made yet, for a trial.

        Args:
            state_bytes: of each parameter, by its id.
            step_bytes: what `stand_in_for_step` takes.
        """
        assert self.optimizer is not None
        self._step_bytes = step_bytes
        for parameter in (parameter for own in self.parameters.values() for parameter in own):
            if parameter.requires_grad and not self.optimizer.state.get(parameter):
                num_tensors = state_bytes.get(id(parameter), 0) // max(1, parameter.nbytes)
                self._stand_ins[id(parameter)] = [self._at_home(parameter) for _ in range(num_tensors)]

    def stand_in_for_step(self, k: int) -> None:
        """Take what the optimizer's step of a stage takes for its own duration, where a trial leaves it out; 0: the
        step of the parameters that stay.
        """
        device = next((parameter.device for own in self.parameters.values() for parameter in own), None)
        torch.empty(self._step_bytes.get(k, 0), dtype=torch.uint8, device=device)

    def adopt(self, tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of a tensor in a place on the tier, to become optimizer state of a parameter.

        Raises:
            ExecutionError: where the tier has no room for it beside the state that there is.
        """
        try:
            adopted = self._at_home(parameter)
        except ExecutionError as error:
            raise ExecutionError(
                f"loading optimizer state takes host memory beside the state that there is, and {error}; nothing was "
                "loaded: load it before fit, or raise host_memory_budget"
            ) from None
        adopted.copy_(tensor)
        return adopted

    def _at_home(self, parameter: nn.Parameter) -> torch.Tensor:
        """A new tensor in a place on the tier; state of a parameter's shape has its dtype and strides."""
        mirror = self._tier.mirror(parameter)
        self._adopted[mirror.tensor.untyped_storage()._cdata] = mirror
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
            if operation.kind == "w":
                self.check([operation.stage])  # what it was given since would go, too
            self._leave(value)
        elif isinstance(operation, Prefetch):
            self.moved_bytes += value.prefetch()
        else:
            value.arrive()

    def _leave(self, value: Parked) -> None:
        try:
            self.moved_bytes += value.leave()
        except _ChangedUnseenError as error:
            raise ExecutionError(
                f"parameter {self._names[error.key]!r} was changed while its stage ran, through .data, and not "
                "in the first steps, so changes may be lost; change it after the optimizer's step, or use a strategy "
                "that moves activations alone"
            ) from None

    def _next_turn(self) -> None:
        """In each step the weights and gradients of one stage, in turn, are compared with their mirrors."""
        stages = list(self.parameters)
        for k in stages:
            for kind in ("w", "g"):
                self._values[kind, k].is_watched = k == stages[self._turn % len(stages)]
        self._turn += 1

    def need(self, k: int) -> None:
        """Have the weights of stage k on the device."""
        value = self._values.get(("w", k))
        if value is not None and value.is_away:
            self._fetch(value)

    def need_all(self, k: int) -> None:
        """Have weights, gradients and optimizer state of stage k on the device."""
        for kind in MANAGED:
            self._fetch(self._values[kind, k])

    def _fetch(self, value: Parked) -> None:
        self.moved_bytes += value.prefetch()
        value.arrive()

    @property
    def managed(self) -> frozenset[int]:
        """The ids of the parameters that come and go."""
        return frozenset(id(parameter) for own in self.parameters.values() for parameter in own)

    def is_away(self, k: int) -> bool:
        """Whether weights of stage k are not on the device."""
        value = self._values.get(("w", k))
        return value is not None and value.is_away

    def lenders(self, k: int) -> dict[int, nn.Parameter]:
        """The weights of stage k that come and go, by the address of the storage that they have now."""
        return {parameter.untyped_storage()._cdata: parameter for parameter in self.parameters.get(k, ())}

    def change(self) -> None:
        """Somebody may have written to what is on the device."""
        for value in self._values.values():
            value.change()

    def begin_updates(self) -> None:
        """The optimizer's step begins: somebody may have written to what is on the device; of gradients versions tell,
        and comparisons.
        """
        for (kind, _), value in self._values.items():
            if kind == "g":
                value.arrive()
            else:
                value.change()

    def begin(self, start: Collection[Value]) -> None:
        """A step begins: have on the device what the list starts with, whatever has happened since the last one."""
        self.check()
        self._next_turn()
        self.hand_over()
        self.change()
        self.settle(start, fetch=True)

    def hand_over(self) -> None:
        """The user's code comes next: all that is on its way is there, and what has a second name is where that is."""
        for value in self._values.values():
            self.moved_bytes += value.hand_over()

    def make_room(self) -> None:
        """Take the room for gradients on the lower tier."""
        for k, own in self.parameters.items():
            self._values["g", k].make_room((id(p), p.data) for p in own if p.requires_grad)

    def has_gradients(self, k: int) -> bool:
        """Whether stage k has anything to update."""
        gradients = (parameter.grad for parameter in self.parameters.get(k, ()))
        return any(gradient is not None and type(gradient) is not Spent for gradient in gradients)

    def end_update(self, k: int, *, are_gradients_changed: bool, spends_gradients: bool) -> None:
        """The weights and optimizer state of stage k are new; its gradients leave the device and stay readable, or are
        gone for good.
        """
        for kind in ("w", "opt") if not are_gradients_changed else MANAGED:
            self._values[kind, k].change()
        gradients = self._values["g", k]
        if not spends_gradients:
            self._free_gradients(gradients)
            return
        gradients.drop()
        for parameter in self.parameters[k]:
            if parameter.grad is not None:
                parameter.grad = Spent(parameter)
        gradients.hand_back()

    def _free_gradients(self, gradients: Parked) -> None:
        try:
            self.moved_bytes += gradients.leave()
        except _ChangedUnseenError as error:
            raise ExecutionError(
                f"the gradient of parameter {self._names[error.key]!r} was changed through .data after backward, and "
                "not in the first steps, so gradients that are read after optimizer.step() may be older; change "
                "gradients without .data, or use a strategy that moves activations alone"
            ) from None

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
                self._leave(value)
        for name, value in self._values.items() if fetch else ():
            if name in device and name[0] != "g":
                self._fetch(value)

    def hand_to(self, other: Weights) -> None:
        """Weights of another schedule for the same model, on the same tier, go on with what is on the host."""
        for value in self._values.values():
            value.arrive()
            other._adopted.update(value.homes())
            value.give_up_places()
        self._adopted.clear()

    def visit(self, k: int) -> int:
        """Have the weights of stage k on the device, and of no other stage; returns the bytes of all that are there."""
        own = {j: self._values["w", j] for j in self.parameters}
        for j, value in own.items():
            if j != k and value.is_there:
                self._leave(value)
        if k in own:
            self._fetch(own[k])
        items = (item for value in own.values() for item in value.items)
        return sum(item.tensor.nbytes for item in items if item.is_there)

    @property
    def home_bytes(self) -> int:
        """The bytes of what is on the lower tier from the beginning."""
        return sum(mirror.tensor.nbytes for mirror in (self._homes or {}).values())

    def bring_back(self) -> None:
        """Have everything where it was in the beginning, for good: on the device, or at home on the lower tier.

        Raises:
            ExecutionError: where the device has no room; what is left on the host stays usable there.
        """
        self._stand_ins.clear()
        if self._homes is not None:
            self.settle((), fetch=False)
            self._tier.finish()
            self._homes.clear()  # state may be other tensors by now
            for (kind, _), value in self._values.items():
                self._homes.update(value.homes() if kind != "g" else {})
            return
        num_bound = sum(value.bind() for value in self._values.values())
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
        for value in self._values.values():
            value.give_up_places()
        self._adopted.clear()
        if num_bound:
            warnings.warn(
                f"{num_bound} weights, gradients or tensors of optimizer state stay in host memory after detaching, "
                "where every operation can use them, slowly: something else (a view, a state_dict, a numpy array) "
                "refers to their memory there; free it before plan.detach() to have them on the device",
                LowtideWarning,
                stacklevel=2,
            )

    def name_of_other_than(self, registered: Iterable[torch.Tensor]) -> str | None:
        """The name of a parameter that is not among those that a model has now; None: all are."""
        there = set(map(id, registered))
        missing = (id(p) for own in self.parameters.values() for p in own if id(p) not in there)
        return next((self._names[key] for key in missing), None)

    def check(self, stages: Collection[int] | None = None) -> None:
        """Refuse parameters that were moved or given other memory while lowtide looks after theirs.

        Args:
            stages: those to look at; None: all.

        Raises:
            PlanError: with the parameter's name.
        """
        for (kind, k), value in self._values.items():
            if kind != "w" or (stages is not None and k not in stages):
                continue
            for item in value.items:
                if not item.is_known:
                    raise PlanError(
                        f"parameter {self._names[id(item.tensor)]!r} was moved or given other memory (model.to, "
                        "param.data = ...) while its plan keeps weights on the host; call plan.detach() first, and "
                        "call fit again afterwards"
                    )


def _keyed(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[Hashable, torch.Tensor]]:
    return ((id(tensor), tensor) for tensor in tensors)


def _gradients_of(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[Hashable, torch.Tensor]]:
    """The gradients that can be moved, with the keys of their parameters."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and is_plain(gradient):
            yield id(parameter), gradient
