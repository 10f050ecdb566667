"""Measures how many bytes the tensors of a device use, now and at most.

On CUDA the figures are the caching allocator's own. On the CPU there is no such allocator: there every operation is
watched, each storage is counted once from the moment it is made until the last tensor, saved or not, lets it go, and
the figures are the same to the byte in each run. What a kernel, or compiled code, takes and gives back inside itself is
not seen there.

    with Meter("cpu") as meter:
        loss(model(x), y).backward()
    print(meter.peak_bytes, meter.live_bytes)
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from operator import attrgetter
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_iter
from torch.utils.weak import TensorWeakRef

# The tensors that were there when the heap was `settled`: a search of the heap does not meet them.
_settled_tensors: list[TensorWeakRef] = []

# What operations take besides tensors, nearly always.
_NO_TENSORS = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)

# Storages that stand for another tier: mapped files, and pinned memory that CUDA sees.
_excluded: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def exclude(tensor: torch.Tensor) -> torch.Tensor:
    """Never count this tensor's storage: it is on another tier (a mapped file). Returns the tensor."""
    _excluded.add(tensor.untyped_storage())
    return tensor


def is_excluded(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is on another tier, so that no meter counts it."""
    return tensor.layout is torch.strided and tensor.untyped_storage() in _excluded


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's collector from freeing, while counting, what other code (compilers) left behind."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def settled(device: torch.device) -> Iterator[None]:
    """Collect once, and leave all that is there then out of collections and of searches for tensors on this device.

    Planning makes many of both, and each takes as long as the program is large. Where a program has frozen its objects
    itself, they stay as they are, and the others are looked at each time.
    """
    if _is_frozen():  # by the program itself, or by a block around this one
        yield
        return
    gc.collect()
    if device.type != "cuda":  # whose allocator knows
        _settled_tensors.extend(map(TensorWeakRef, _tensors_on_the_heap()))
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _settled_tensors.clear()


def _is_frozen() -> bool:
    """Whether any objects are; Python counts them all to tell."""
    return gc.get_freeze_count() > 0


class _Account(Protocol):
    def open(self) -> None: ...
    def close(self) -> None: ...
    def live_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...
    def see(self, tensor: torch.Tensor) -> None: ...


class Meter:
    """Live and peak bytes of all tensors on a device, those from before included; meters may be nested.

    Args:
        device: `"cpu"`, `"cuda"`, `"cuda:1"`, `"meta"` (tensors that have sizes and no memory) or a `torch.device`.
        search: on the CPU, begin with all tensors that Python holds, which takes a while in a large program; without it
            a tensor counts from its first use on.
        tensors_alone: on CUDA, count as on the CPU: without what a kernel takes for itself while it runs.

    After the `with` block the figures are those of its end.

    Example:
        >>> with Meter("cpu") as meter:
        ...     x = torch.zeros(1000)
        >>> meter.peak_bytes - meter.start_bytes
        4000
    """

    def __init__(self, device: torch.device | str, *, search: bool = True, tensors_alone: bool = False) -> None:
        self.device = torch.device(device)
        kind = self.device.type
        if kind not in ("cpu", "cuda", "meta"):
            raise ValueError(f"cannot measure the memory of device {str(self.device)!r}; use cpu, cuda or meta")
        asks_allocator = kind == "cuda" and not tensors_alone
        self._account: _Account = _CudaAccount(self.device) if asks_allocator else _WatchedAccount(kind, search)
        self._final: tuple[int, int] | None = None
        self.start_bytes = 0
        """Live bytes at the beginning of the `with` block."""

    def __enter__(self) -> Meter:
        self._final = None
        self._account.open()
        self.start_bytes = self._account.live_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._final = (self._account.live_bytes(), self._account.peak_bytes())
        self._account.close()

    @property
    def live_bytes(self) -> int:
        """The bytes of all live tensors now, each storage once."""
        return self._account.live_bytes() if self._final is None else self._final[0]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live at once since the beginning, or since `reset_peak`."""
        return self._account.peak_bytes() if self._final is None else self._final[1]

    def reset_peak(self) -> None:
        """Let the peak start again from what is live now."""
        self._account.reset_peak()

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that no operation has shown, such as one that compiled code made. Returns the tensor."""
        self._account.see(tensor)
        return tensor


class StepMeter:
    """The peak of all live tensors on the CPU from `open` to `close`, which need not nest with blocks of the user's.

    A step of training begins inside the model and ends in the user's loop. So this one stays out of the way: where a
    meter is open already, it reads that one's figures; its own mode goes below those of the user's, which may end
    before it does; where a hook of a backward runs, or torch traces, it counts nothing; and where a mode was opened
    since and is still there, or where it is closed in a backward or by another thread, its own mode stays behind, does
    nothing, and goes when a meter of the thread next opens or closes.
    """

    def __init__(self) -> None:
        self._account: _WatchedAccount | None = None
        self._is_own = False
        self._peak = [0]

    @property
    def is_open(self) -> bool:
        """Whether it counts."""
        return self._account is not None

    def open(self) -> int | None:
        """Begin to count; returns the live bytes now, or None where that is not possible.

        Where it counts already it goes on with what it knows: a graph that is still to be run backward holds tensors
        that are nowhere in Python.
        """
        modes = _get_current_dispatch_mode_stack()
        if self._account is None or _is_in_backward() or not any(mode is self._account for mode in modes):
            self.close()
            if _is_in_backward() or not self._begin(_get_current_dispatch_mode_stack()):
                return None
        assert self._account is not None
        self._peak[0] = self._account.live_bytes()
        return self._peak[0]

    def _begin(self, modes: list[TorchDispatchMode]) -> bool:
        leader = next((mode for mode in reversed(modes) if isinstance(mode, _WatchedAccount) and mode.counts_all), None)
        if leader is None and _has_tracer(modes):
            return False
        self._is_own = leader is None
        self._account = leader or _WatchedAccount("cpu", search=True)
        if self._is_own:
            self._account.open(below=modes)
        self._peak = [0]
        self._account.followers.append(self._peak)
        return True

    @property
    def peak_bytes(self) -> int | None:
        """The peak so far; None where it is not open."""
        return None if self._account is None else self._peak[0]

    def close(self) -> int | None:
        """Count no longer; returns the peak, or None where it was not open."""
        peak_bytes = self.peak_bytes
        self.end()
        _remove_ended()
        return peak_bytes

    def end(self) -> None:
        """Count no longer, and leave the stack of modes as it is: also in a finalizer, which may come while somebody
        changes that stack.
        """
        account, self._account = self._account, None
        if account is not None:
            account.followers = [peak for peak in account.followers if peak is not self._peak]
            if self._is_own:
                account.end()


def held_bytes() -> int:
    """The bytes of all tensors that Python holds on the CPU now, each storage once."""
    account = _WatchedAccount("cpu", search=True)
    for tensor in _existing_tensors():
        account.see(tensor)
    return account.live_bytes()


class _CudaAccount:
    """The allocator keeps one peak for all: each reset first hands it to every open meter of the device."""

    _open: list[_CudaAccount] = []  # noqa: RUF012  # shared by all on purpose

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._seen_bytes = 0

    def open(self) -> None:
        self._open.append(self)
        self.reset_peak()

    def close(self) -> None:
        self._open.remove(self)

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return max(self._seen_bytes, torch.cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._device)
        for account in self._open:
            if account._device == self._device:
                account._seen_bytes = max(account._seen_bytes, peak)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._seen_bytes = self.live_bytes()

    def see(self, tensor: torch.Tensor) -> None:
        """The allocator knows it."""


class _WatchedAccount(TorchDispatchMode):
    """Where no allocator counts: every storage that an operation of this thread shows counts, until it dies."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code goes on running compiled; else a code that has once run under a meter would never again."""
        return True

    def __init__(self, device_type: str, search: bool) -> None:
        super().__init__()
        self._device_type = device_type
        self._is_here = attrgetter(f"is_{device_type}")  # an eighth of what asking for the device takes
        self._search = search
        self._lock = threading.RLock()  # storages may die in any thread
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._live_bytes = 0
        self._peak_bytes = 0
        self.followers: list[list[int]] = []
        """Peaks of others, each in a list of its own."""
        self.is_open = False
        self.is_below = False
        """Whether it was put below modes that were there before, which nobody need end before it."""

    @property
    def counts_all(self) -> bool:
        """Whether it is open, and knows all tensors that the CPU holds."""
        return self.is_open and self._search and self._device_type == "cpu"

    def open(self, below: Sequence[TorchDispatchMode] = ()) -> None:
        self.is_open = True
        for tensor in _existing_tensors() if self._search else ():
            self.see(tensor)
        self.reset_peak()
        _watch_resize(self._resized)
        self.is_below = bool(below)
        if self.is_below:  # the flags that entering sets, and puts back in order, are set by those above
            with _lifted(below):
                _push_mode(self)
        else:
            super().__enter__()

    def close(self) -> None:
        self.end()
        self.leave()

    def leave(self) -> None:
        """Leave the stack of modes, at whose top it is."""
        if self.is_below:
            _pop_mode()
        else:
            super().__exit__(None, None, None)

    def end(self) -> None:
        """Count no longer; the mode itself may still be under others, or on another thread's stack."""
        self.is_open = False
        _unwatch_resize(self._resized)
        with self._lock:
            self._known.clear()

    def live_bytes(self) -> int:
        return self._live_bytes

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self._live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _is_foreach_in_place(func):
            # Else the operations that it is made of count what they change; below a mode they do not.
            torch.autograd.graph.increment_version([each for each in args[0] if not each.is_inference()])
        if not self.is_open:
            return out
        # arguments too: from_numpy and other threads show up only here
        self._see_among((*args, *kwargs.values(), out))
        return out

    def _see_among(self, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                self.see(value)
            elif kind is list or kind is tuple:
                self._see_among(value)
            elif kind not in _NO_TENSORS:  # hardly any: looking for containers takes longer than counting
                for each in tree_iter(value):
                    if isinstance(each, torch.Tensor):
                        self.see(each)

    def see(self, tensor: torch.Tensor) -> None:
        if not self._is_here(tensor) or _has_no_memory(tensor):
            return
        if tensor.layout is torch.strided:
            self._count(tensor.untyped_storage())
        else:
            for part in _parts_of(tensor):
                self._count(part.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        entry = self._known.get(key)
        if entry is not None and entry[1] == num_bytes:  # most are: every argument was a result before
            return
        with self._lock:
            entry = self._known.get(key)
            if entry is not None and entry[1] == num_bytes:
                return
            if entry is None:
                if storage in _excluded:
                    return
                reference = weakref.ref(storage, lambda _: self._forget(key))
                entry = (reference, 0)
            self._known[key] = (entry[0], num_bytes)
            self._live_bytes += num_bytes - entry[1]
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            for peak in self.followers:
                peak[0] = max(peak[0], self._live_bytes)

    def _forget(self, key: int) -> None:
        with self._lock:
            entry = self._known.pop(key, None)
            if entry is not None:
                self._live_bytes -= entry[1]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == self._device_type and storage._cdata in self._known:
            self._count(storage)


@cache
def _is_foreach_in_place(func: Any) -> bool:
    """Whether an operation changes several tensors and does not count their versions itself."""
    name = str(getattr(func, "_schema", "")).partition("(")[0].partition(".")[0]
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _is_in_backward() -> bool:
    """Whether a hook of autograd's runs: when its backward ends, torch puts back the modes that were there before."""
    return torch._C._current_graph_task_id() != -1


def _remove_ended() -> None:
    """Take modes of meters that have ended off this thread's stack, unless others stand in the way."""
    modes = _get_current_dispatch_mode_stack()
    if _is_in_backward() or _has_tracer(modes):
        return
    for index, mode in reversed(list(enumerate(modes))):
        if isinstance(mode, _WatchedAccount) and not mode.is_open and (mode.is_below or index == len(modes) - 1):
            del modes[index]
            with _lifted(modes[index:]):
                mode.leave()


def _has_tracer(modes: Iterable[TorchDispatchMode]) -> bool:
    """Whether torch's own modes are among them, for tensors that stand for others."""
    return any(mode.is_infra_mode() for mode in modes)


@contextmanager
def _lifted(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Take modes off the top of this thread's stack for a moment."""
    for _ in modes:
        _pop_mode()
    try:
        yield
    finally:
        for mode in modes:
            _push_mode(mode)


_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Wrappers around other tensors, and tensors of a tracer: what they stand for is counted by itself."""
    if type(tensor) in _PLAIN_TENSORS:
        return _is_functorch_wrapped(tensor)  # of torch.func's transforms
    fake = torch._subclasses.FakeTensor
    return is_traceable_wrapper_subclass(tensor) or isinstance(tensor, fake) or torch._is_functional_tensor(tensor)


def _parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What holds a sparse tensor, such as the gradient of an embedding; nothing for layouts of libraries."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _existing_tensors() -> Iterable[torch.Tensor]:
    """All tensors that Python holds, with their gradients."""
    settled_before = (reference() for reference in _settled_tensors)
    for tensor in chain(_tensors_on_the_heap(), (tensor for tensor in settled_before if tensor is not None)):
        yield tensor
        if not _has_no_memory(tensor) and tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _tensors_on_the_heap() -> list[torch.Tensor]:
    # A tuple that another thread is just making must be held by that thread alone, or Python raises SystemError there:
    # no other thread may run while all objects are held here.
    interval = sys.getswitchinterval()
    values: list[Any] = []
    sys.setswitchinterval(3600)
    try:
        values = gc.get_objects()
        # type() and not isinstance: proxies in the heap may run arbitrary code when asked for their class
        kinds = {kind for kind in set(map(type, values)) if issubclass(kind, torch.Tensor)}
        kinds.discard(torch._subclasses.FakeTensor)  # compilers leave thousands, and asking each for its device is slow
        return [value for value in values if type(value) in kinds and not torch.nn.parameter.is_lazy(value)]
    finally:
        del values
        sys.setswitchinterval(interval)


# Storages are also resized directly, past the dispatcher (that is how FSDP frees and refills a parameter). The method
# is replaced while a meter is open.
_resize_watchers: list[Callable[[torch.UntypedStorage], None]] = []
_plain_resize = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _plain_resize(storage, size)
    for watcher in _resize_watchers:
        watcher(storage)
    return result


def _watch_resize(watcher: Callable[[torch.UntypedStorage], None]) -> None:
    _resize_watchers.append(watcher)
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]


def _unwatch_resize(watcher: Callable[[torch.UntypedStorage], None]) -> None:
    _resize_watchers.remove(watcher)
    if not _resize_watchers:
        torch.UntypedStorage.resize_ = _plain_resize  # type: ignore[method-assign]
