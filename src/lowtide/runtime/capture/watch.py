"""Watches one forward of a model: which submodules are called, and when memory is made, read, written and saved.

A clock ticks at every operation and at every beginning and end of a submodule's call. Memory is followed storage by
storage, below autograd, so that views, in-place operations and tensors without gradients are seen for what they are.
What autograd saves is noted and let go at once: a forward that does not fit in memory with all that can be watched.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from lowtide.errors import CaptureError, LowtideError, SampleError
from lowtide.runtime.capture.operations import is_weight_cast, signature_of
from lowtide.runtime.model.bypass import WHOLE_IS_COMPILED
from lowtide.runtime.model.call_site import Layer, Rank, is_compiled
from lowtide.runtime.model.functions import functions_handed_to
from lowtide.runtime.model.interception import handler_of
from lowtide.runtime.model.sample import Sample, tensors_in
from lowtide.runtime.state.preserve import preserved
from lowtide.runtime.state.rng import Generators, State
from lowtide.runtime.state.writes import written_by

NEVER = -1


@dataclass(slots=True)
class SubmoduleCall:
    """One call of a submodule."""

    index: int
    path: str
    occurrence: int
    parent: int
    """The index of the call around it; -1 for the model itself."""
    depth: int
    opaque: bool
    """Nothing inside can be a unit of its own: compiled code, a `whole`, or what is not to be cut inside."""
    entered: int
    left: int = NEVER
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    """Serial numbers of the memory that its outputs show."""
    left_behind: set[int] = field(default_factory=set)
    """Those of tensors that its module has in its attributes when it ends."""
    whole: str = ""
    """What its own code does with a call inside, for a message, where that call cannot be repeated by itself."""


@dataclass(slots=True)
class Memory:
    """One storage. Times are ticks of the clock."""

    serial: int
    num_bytes: int
    role: str
    """`made` in this forward; `cast` from a parameter; `parameter`, `buffer`, `input`; `foreign`: there before, in
    nobody's list."""
    made: int = NEVER
    maker: int = NEVER
    """The innermost call in which it was made."""
    last_read: int = NEVER
    last_written: int = NEVER
    saved: bool = False
    differentiable: bool = False
    names: tuple[str, ...] = ()
    """Of a parameter or buffer: its names."""
    first_read: int = NEVER
    readers: set[int] = field(default_factory=set)
    """The innermost calls in which it was read."""
    hidden_in: set[int] = field(default_factory=set)
    """The calls in which it was read although they were not given it, but have it from an object, a closure or an
    attribute."""


@dataclass(slots=True)
class Observation:
    """What was seen of one forward, with its loss where one was given."""

    calls: list[SubmoduleCall]
    memories: list[Memory]
    operations: list[tuple[int, str]]
    """(tick, what was done on which shapes)."""
    end: int
    trains: bool = False
    """Gradients flow from the output."""
    opaque: str = ""
    """The type of the output if no tensor was found in it."""
    checkpoints: bool = False
    """Whether some part of the model uses torch.utils.checkpoint."""
    caches: list[str] = field(default_factory=list)
    """Submodules that got a key-value cache."""
    cached: str = ""
    """A parametrisation that was computed inside `parametrize.cached()`."""
    shows_values: bool = False
    """Whether Python was given a number, or a size, that depends on what tensors hold."""
    hidden: list[Memory] = field(default_factory=list)
    """What was read in calls that were not given it."""

    def path(self, index: int) -> str:
        """The path of a call, for people."""
        return (self.calls[index].path or "the model itself") if index >= 0 else "the loss"

    def around(self, index: int) -> Iterator[int]:
        """A call and all calls around it, from the inside out."""
        while index != NEVER:
            yield index
            index = self.calls[index].parent

    def find_hidden(self) -> None:
        """Find out, at the end, what was read in calls that were not given it."""
        for memory in (memory for memory in self.memories if memory.role == "made"):
            beside = set(self.around(memory.maker))
            for reader in memory.readers - beside:
                for index in reversed([index for index in self.around(reader) if index not in beside]):
                    if memory.serial in self.calls[index].inputs:
                        break
                    memory.hidden_in.add(index)
        self.hidden = [memory for memory in self.memories if memory.hidden_in]


def watch(model: nn.Module, sample: Sample, loss: Callable[[Any], Any] | None = None) -> Observation:
    """Run the model once on the sample, and the loss on its output, and return what happened.

    The caller sees to it that nothing that this changes stays changed (`lowtide.runtime.state.preserve`).
    """
    watcher = _Watcher(model, sample)
    torch.clear_autocast_cache()  # else who casts which weight was seen by an earlier forward
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)  # casts of all weights are not what a stage takes
        if "torch._dynamo" in sys.modules:  # else nothing can have been compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_patched(model, watcher))
        stack.enter_context(_checkpoint_alarm(watcher))
        stack.enter_context(functions_handed_to(watcher.call_function))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watcher.pack, _unpack))
        stack.enter_context(watcher)
        stack.enter_context(_ReadsWatcher(watcher.observation))
        output = _result(model, sample)
        if loss is not None:
            output = _loss(loss, output)
        watcher.finish(output)
    return watcher.observation


# Of forwards whose path random numbers may decide so many are tried: all, where they are not of one kind (LayerDrop,
# stochastic depth); the first ones, where these are. Of five layers that are left out with a probability of 0.4 all are
# called in one of 13 forwards.
_MOST_DRAWS = 48
_FEW_DRAWS = 8


def draw_the_fullest(model: nn.Module, sample: Sample) -> None:
    """Leave the random generators where the next forward calls as much as any: where layers are left out at random,
    what is planned for is a step that leaves out as few as possible.

    The first forward is watched, so that what cannot be planned for is refused before it changes a parameter.
    """
    generators = Generators.of(model)
    found: list[tuple[int, State]] = []
    shows_values = False
    with preserved(model):
        while len(found) < _MOST_DRAWS:
            before, num_nodes = generators.state(), _get_sequence_nr()
            if found:
                _run_unsaved(model, sample)
            else:
                shows_values = watch(model, sample).shows_values
            found.append((_get_sequence_nr() - num_nodes, before))
            # What torch draws decides nothing as long as it stays in tensors, as that of dropout does.
            is_random = generators.drawn_since(before) if shows_values else generators.drawn_beside_torch_since(before)
            if not is_random or (len(found) == _FEW_DRAWS and len({num for num, _ in found}) == 1):
                return
    generators.set(max(found, key=lambda entry: entry[0])[1])


def _run_unsaved(model: nn.Module, sample: Sample) -> None:
    """Run the model once and keep nothing that autograd saves."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda _: None, _unpack))
        _result(model, sample)


# What says nothing about the arguments: lowtide's own refusals, and a full memory.
_NOT_OF_THE_ARGUMENTS = (LowtideError, torch.OutOfMemoryError, MemoryError)


def _result(model: nn.Module, sample: Sample) -> Any:
    """Run the model on the sample; if it fails, the error shows the sample."""
    try:
        return sample.call(model)
    except _NOT_OF_THE_ARGUMENTS:
        raise
    except Exception as error:
        raise SampleError(
            f"the model, on {_places(model)}, failed on the sample with {described(error)}; the sample is ({sample}); "
            f"{_advice(model, sample)}"
        ) from error


def _advice(model: nn.Module, sample: Sample) -> str:
    """What to pass instead of a sample on which the model fails."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*sample.args, **sample.kwargs)
    except TypeError:
        taken = [str(each.replace(annotation=each.empty, default=each.empty)) for each in signature.parameters.values()]
        names = ", ".join([*taken[:8], *["..."][: len(taken) > 8]])
        return (
            f"its forward takes ({names}): pass these, in a tuple by position or in a dict by name, and leave out "
            "labels that are for a loss outside of the model"
        )
    return "pass the arguments of a training step: a tensor, a tuple of positional or a dict of keyword arguments"


def _places(model: nn.Module) -> str:
    """The devices of a model, for a message."""
    found = {str(tensor.device): None for tensor in (*model.parameters(), *model.buffers())}
    return " and ".join(found) or "no device"


def _loss(loss: Callable[[Any], Any], result: Any) -> Any:
    """Run the caller's loss on the model's result."""
    try:
        return loss(result)
    except _NOT_OF_THE_ARGUMENTS:
        raise
    except Exception as error:
        raise CaptureError(
            f"loss= failed with {described(error)}; it gets only the model's result, and is called again for larger "
            "batches; pass loss=lambda result: loss_fn(result, y), with a y that matches the batch"
        ) from error


def described(error: Exception) -> str:
    """Format an error for a message: its type and text, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _unpack(_: Any) -> torch.Tensor:
    raise CaptureError(
        "the model's forward computes gradients itself; fit only the network that is differentiated, and compute the "
        "gradients in your loop from its result"
    )


@cache
def _shows_values(func: Any) -> bool:
    """Whether Python learns from an operation's result, or its shape, what its arguments hold."""
    return not _SHOWING.isdisjoint(getattr(func, "tags", ()))


_SHOWING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class _ReadsWatcher(TorchFunctionMode):
    """Notices what reads a tensor's memory without an operation."""

    def __init__(self, observation: Observation) -> None:
        super().__init__()
        self._observation = observation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._observation.shows_values |= getattr(func, "__name__", "") in _READING
        return func(*args, **(kwargs or {}))


_READING = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


class _Watcher(TorchDispatchMode):
    """Keeps the clock and the books."""

    def __init__(self, model: nn.Module, sample: Sample) -> None:
        super().__init__()
        self.observation = Observation([], [], [], 0)
        self._serial_of: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._clock = 0
        self._stack: list[int] = []
        self._num_calls: dict[str, int] = {}
        self.is_in_function = False
        """Whether a custom autograd function runs."""
        self._parameters = {id(parameter) for parameter in model.parameters()}
        names: dict[int, list[str]] = {}
        for role, named in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
            for name, tensor in named(remove_duplicate=False):
                if nn.parameter.is_lazy(tensor):
                    raise CaptureError(f"{role} {name!r} has no shape yet; call the model once on a batch before fit")
                for storage in _storages(tensor):
                    serial = self._register(storage, role)
                    if self.observation.memories[serial].role == role:  # else a parameter by a buffer's name
                        names.setdefault(serial, []).append(name)
        for serial, listed in names.items():
            self.observation.memories[serial].names = tuple(listed)
        for tensor in sample.tensors():
            for storage in _storages(tensor):
                self._register(storage, "input")

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._clock += 1
        self._read((args, kwargs))
        written = written_by(func, args, kwargs)
        for tensor in written:
            for memory in self._see(tensor, "made"):
                self._check_write(memory)  # beforehand: what is refused is left as it is
        self.observation.operations.append((self._clock, signature_of(func, args, kwargs)))
        self.observation.shows_values |= _shows_values(func)
        out = func(*args, **kwargs)
        role = "cast" if is_weight_cast(func, args) else "made"
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._see(value, role)
        for tensor in written:
            for memory in self._see(tensor, "made"):
                memory.last_written = self._clock
        return out

    def pack(self, tensor: torch.Tensor) -> None:
        """A saved-tensors hook: note what autograd saves, keep nothing."""
        for memory in self._see(tensor, "made"):
            memory.saved = True

    def enter(self, path: str, opaque: bool, inputs: Any) -> SubmoduleCall:
        """A submodule's call begins."""
        self._clock += 1
        occurrence = self._num_calls.get(path, 0)
        self._num_calls[path] = occurrence + 1
        calls = self.observation.calls
        parent = self._stack[-1] if self._stack else NEVER
        call = SubmoduleCall(len(calls), path, occurrence, parent, len(self._stack), opaque, self._clock)
        calls.append(call)
        self._stack.append(call.index)
        call.inputs = self._read(inputs, nested=True)
        self._look_for_caches(path, inputs)
        if parametrize._cache_enabled and ".parametrizations." in f".{path}.":
            self.observation.cached = path
        return call

    def call_function(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A custom autograd function is applied: it is one operation, whatever modules it calls."""
        self.is_in_function = True
        try:
            return call(*args, **kwargs)
        finally:
            self.is_in_function = False

    def pass_by(self, path: str) -> None:
        """A submodule is called where nothing can be cut; it counts among its calls."""
        self._num_calls[path] = self._num_calls.get(path, 0) + 1

    def leave(self, call: SubmoduleCall, outputs: Any, module: nn.Module) -> None:
        """A submodule's call ends."""
        self._clock += 1
        self._stack.pop()
        call.left = self._clock
        for tensor in tensors_in(outputs):
            self._look_for_checkpoint(tensor)
            for memory in self._see(tensor, "foreign"):
                call.outputs.add(memory.serial)
                memory.readers.add(call.index)  # it may be none of its own
                memory.differentiable |= tensor.requires_grad
        for tensor in tensors_in({name: value for name, value in vars(module).items() if name not in _MODULE_TABLES}):
            known = (self._serial_of.get(storage._cdata) for storage in _storages(tensor))
            call.left_behind.update(entry[1] for entry in known if entry is not None)
        if call.whole:
            self._close(call)

    def fail(self, call: SubmoduleCall) -> None:
        """A submodule's call ends with an error, which whoever called it may catch."""
        self._clock += 1
        self._stack.pop()
        call.left = self._clock
        self._keep_whole_around(call, "catches an error of")

    def look_for_other_weights(self, call: SubmoduleCall, module: nn.Module) -> None:
        """See whether the code around a call has put tensors in the place of its weights (`functional_call`), which a
        recomputation of the call by itself would not find.
        """
        given = (p for p in module.parameters() if not isinstance(p, nn.Parameter) and id(p) not in self._parameters)
        if call.parent != NEVER and next(given, None) is not None:
            self._keep_whole_around(call, "gives other weights (functional_call) to")

    def _keep_whole_around(self, call: SubmoduleCall, what: str) -> None:
        if call.parent != NEVER:
            parent = self.observation.calls[call.parent]
            parent.whole = parent.whole or f"{what} its submodule {call.path!r}"

    def _close(self, call: SubmoduleCall) -> None:
        """Make one whole of a call, as if its submodules were not seen."""
        call.opaque = True
        del self.observation.calls[call.index + 1 :]
        for memory in self.observation.memories:
            memory.maker = min(memory.maker, call.index)
            memory.readers = {min(reader, call.index) for reader in memory.readers}

    def finish(self, output: Any) -> None:
        """The forward has ended; what its output shows is read by the caller."""
        self._clock += 1
        self._read(output, nested=True)
        self.observation.end = self._clock
        shown = list(tensors_in(output))
        self.observation.trains = any(tensor.requires_grad for tensor in shown)
        self.observation.opaque = "" if shown else type(output).__name__
        self.observation.find_hidden()

    def _read(self, values: Any, *, nested: bool = False) -> set[int]:
        serials = set()
        for tensor in tensors_in(values) if nested else tree_iter(values):
            if isinstance(tensor, torch.Tensor):
                for memory in self._see(tensor, "foreign"):
                    memory.last_read = self._clock
                    memory.readers.add(self._stack[-1] if self._stack else NEVER)
                    if memory.first_read == NEVER:
                        memory.first_read = self._clock
                    memory.differentiable |= tensor.requires_grad
                    serials.add(memory.serial)
        return serials

    def _see(self, tensor: torch.Tensor, role: str) -> list[Memory]:
        if tensor.is_nested:
            raise CaptureError(
                f"{self._where} works on nested tensors (torch.nested), and stages on plain ones only; pad the batch, "
                "or keep its rows in one tensor with their offsets beside it"
            )
        return [self.observation.memories[self._register(storage, role)] for storage in _storages(tensor)]

    def _register(self, storage: torch.UntypedStorage, role: str) -> int:
        """The serial number of a storage; one seen for the first time gets `role`."""
        key = storage._cdata
        known = self._serial_of.get(key)
        memories = self.observation.memories
        if known is not None:
            memory = memories[known[1]]
            memory.num_bytes = max(memory.num_bytes, storage.nbytes())
            return known[1]
        serial = len(memories)
        memory = Memory(serial, storage.nbytes(), role)
        if role in ("made", "cast"):
            memory.made, memory.maker = self._clock, self._stack[-1] if self._stack else NEVER
            memory.last_read = self._clock
        memories.append(memory)
        self._serial_of[key] = (weakref.ref(storage, lambda _: self._serial_of.pop(key, None)), serial)
        return serial

    @property
    def _where(self) -> str:
        """What runs now, for messages."""
        return self.observation.path(self._stack[-1]) if self._stack else "the loss"

    def _check_write(self, memory: Memory) -> None:
        if memory.role in ("made", "buffer", "cast"):
            return
        name = "".join(map(repr, memory.names[:1]))
        what = {"parameter": f"its parameter {name}", "input": "its input"}.get(
            memory.role, "a tensor that is neither a buffer nor its input"
        )
        raise CaptureError(
            f"{self._where} changes {what} in place, so recomputing it would give different numbers; "
            "use an out-of-place operation there, or register the tensor as a buffer"
        )

    def _look_for_caches(self, path: str, inputs: Any) -> None:
        args, kwargs = inputs
        for value in (*args, *kwargs.values()):
            if any(cls.__name__ == "Cache" and "transformers" in cls.__module__ for cls in type(value).__mro__):
                self.observation.caches.append(path)

    def _look_for_checkpoint(self, tensor: torch.Tensor) -> None:
        if type(tensor.grad_fn).__name__ == "CheckpointFunctionBackward":
            self.observation.checkpoints = True


# What nn.Module keeps in tables of its own: not tensors that a forward leaves.
_MODULE_TABLES = frozenset(vars(nn.Module()))


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """A tensor's storage; those inside a wrapper such as DTensor, and inside those of torch.func's transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if type(tensor) not in (torch.Tensor, nn.Parameter) and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def is_opaque(module: nn.Module) -> bool:
    """Whether a module's inside cannot be watched call by call: it is compiled."""
    # By name: importing torch._dynamo takes seconds.
    return type(module).__name__ == "OptimizedModule" or is_compiled(module)


def watched_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The submodules whose calls can be units, each with its first path; the model itself first, with path ""."""
    hidden: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{prefix}.") for prefix in hidden):
            continue
        if not path and handler_of(module) is not None:
            raise CaptureError("the model already has a plan; call plan.detach() first")
        if is_opaque(module):
            if not path:
                raise CaptureError(WHOLE_IS_COMPILED)
            hidden.append(path)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield path, module


@contextmanager
def _patched(model: nn.Module, watcher: _Watcher) -> Iterator[None]:
    """Each submodule tells the watcher when its call begins and ends."""
    layers = [_ReportingLayer(module, path, watcher) for path, module in watched_modules(model)]
    try:
        for layer in layers:
            layer.push()
        yield
    finally:
        for layer in layers:
            layer.remove()


class _ReportingLayer(Layer):
    """Tells the watcher of the calls of one submodule."""

    __slots__ = ("_is_opaque", "_path", "_watcher")

    rank = Rank.REPORT

    def __init__(self, module: nn.Module, path: str, watcher: _Watcher) -> None:
        super().__init__(module)
        self._is_opaque = is_opaque(module)
        self._path = path
        self._watcher = watcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In vmap, say: one call of many, on tensors that are none. In a custom function: it saves what it chooses.
        if torch._C._are_functorch_transforms_active() or self._watcher.is_in_function:
            self._watcher.pass_by(self._path)
            return self.pass_on(*args, **kwargs)
        record = self._watcher.enter(self._path, self._is_opaque, (args, kwargs))
        self._watcher.look_for_other_weights(record, self.module)
        try:
            output = self.pass_on(*args, **kwargs)
        except BaseException:
            self._watcher.fail(record)
            raise
        self._watcher.leave(record, output, self.module)
        return output


@contextmanager
def _checkpoint_alarm(watcher: _Watcher) -> Iterator[None]:
    """Notice `torch.utils.checkpoint`, whose regions save nothing that can be seen."""
    hook = torch.utils.checkpoint._checkpoint_hook
    plain = hook.__init__

    def noticing(self: Any, *args: Any, **kwargs: Any) -> None:
        watcher.observation.checkpoints = True
        plain(self, *args, **kwargs)

    hook.__init__ = noticing  # type: ignore[method-assign]
    try:
        yield
    finally:
        hook.__init__ = plain  # type: ignore[method-assign]
