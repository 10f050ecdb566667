"""Records what one stage did, so that it can be recomputed from another input.

A tape lists the calls of a stage in order: its units, and the functions of torch that the code between them called. A
tape keeps no activation alive: tensors that the stage itself made, or that the stage before it made, stand as slots,
and so do side values, tensors of earlier stages, where somebody keeps them (`on_side`). Whatever else it reads
(parameters, masks) is kept as it is, without its history.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import FrameType, MappingProxyType
from typing import Any

import torch

from lowtide.errors import ExecutionError
from lowtide.runtime.model.containers import GENERATORS, Held, Slot, build, parts, template, tensors_of
from lowtide.runtime.replay.endings import follows_nothing, is_harmless
from lowtide.runtime.state.cells import Assigned, CellWatch
from lowtide.runtime.state.environment import version_of
from lowtide.runtime.state.rng import GeneratorWatch, Source, State
from lowtide.runtime.state.surroundings import Surroundings

Origin = tuple[int, int]
"""The stage that made a tensor, and its number among those of the stage; stage 0 is the caller."""

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_NOWHERE = -1  # the slot of a result that is one of the tensors handed in


class Ledger:
    """Which stage made which tensor, during one forward; tensors are known by identity and not kept alive.

    Stage 0 are the tensors that the caller handed to the model.
    """

    __slots__ = ("_entries", "_made", "look_up")

    def __init__(self) -> None:
        self.look_up: Callable[[torch.Tensor], Origin | None] | None = None
        """Asked for the origin of a tensor that no call has returned."""
        # id -> (the tensor, (the stage that made it, its number among the tensors of that stage))
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}
        self._made: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def add(self, tensor: torch.Tensor, stage: int) -> int:
        """Note that a stage made a tensor; returns its number among those of the stage."""
        made = self._made.setdefault(stage, [])
        reference, number = weakref.ref(tensor), len(made)
        self._entries[id(tensor)] = (reference, (stage, number))
        made.append(reference)
        return number

    def note(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Note the origin of a tensor that is not numbered among those that calls return."""
        self._entries[id(tensor)] = (weakref.ref(tensor), origin)

    def find(self, tensor: torch.Tensor) -> Origin | None:
        """The stage and number of a tensor; None where no stage made it.

        An entry whose tensor died is never taken for a new tensor at the same address.
        """
        entry = self._entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None if self.look_up is None else self.look_up(tensor)
        return entry[1]

    def alive(self, stage: int) -> dict[int, torch.Tensor]:
        """The tensors of a stage that are still alive, by number; one that has several has the last."""
        found: dict[int, torch.Tensor] = {}
        for number, reference in enumerate(self._made.get(stage, ())):
            tensor = reference()
            if tensor is not None and self._entries[id(tensor)][1] == (stage, number):
                found[number] = tensor
        return found


class TapedCall:
    """One call on a tape: templates of its arguments, the slots of the tensors it returned, and what was around it."""

    __slots__ = (
        "args",
        "assigned",
        "call",
        "dead",
        "drawn_from",
        "kwargs",
        "module",
        "name",
        "random",
        "results",
        "surroundings",
        "training",
    )

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        module: torch.nn.Module | None,
    ) -> None:
        self.name = name
        self.call = call
        self.args = args
        self.kwargs = kwargs
        self.results: list[int] = []
        self.module = module
        self.training = module is not None and module.training
        self.surroundings: Surroundings | None = None
        self.dead: list[int] = []
        self.assigned: Assigned | None = None
        """What the code before the call has set in cells of the unit."""
        self.random: State | None = None
        """Of all generators, where the code before the call has set one."""
        self.drawn_from: Sequence[tuple[Source, Any]] = ()
        """The generators that were handed to the call, and their states."""


class Tape:
    """The calls of one stage.

    Tensors of a stage are numbered in the order in which they are made (see `Ledger`); slots are places in the table of
    values of one run.

    Args:
        stage: its position in the chain, from 1.
        name: its name, for messages.
        ledger: who made which tensor.
        is_state: whether a tensor is a buffer of the model: writing into it is allowed, and undone by whoever runs the
            tape.
        watch: notices generators that are set between calls; None: the tape only tells what the stage reads, and is
            never run.
    """

    def __init__(
        self,
        stage: int,
        name: str,
        ledger: Ledger,
        is_state: Callable[[torch.Tensor], bool],
        watch: GeneratorWatch | None = None,
    ) -> None:
        self.stage = stage
        self.name = name
        self.calls: list[TapedCall] = []
        self.inputs: dict[int, int] = {}
        """Slot of each tensor of the previous stage that this one reads, by its number there."""
        self.sides: dict[Origin, int] = {}
        """Slot of each differentiable tensor of a stage before the previous one that this one reads, where `on_side` is
        told of them."""
        self.held: list[Held] = []
        self._held_of: dict[int, tuple[weakref.ref[torch.Tensor], Held]] = {}
        self.refusal: str | None = None
        """Why the stage cannot be recomputed; None if it can."""
        self.hands_generators = False
        """Whether a call was handed a generator: after a recomputation it is where it was before."""
        self.outputs: tuple[int, ...] = ()
        """The numbers of the tensors that a run returns."""
        self.on_input: Callable[[int, torch.Tensor], None] | None = None
        """Called while recording with each tensor of the previous stage that the stage turns out to read."""
        self.left: dict[int, Callable[[], torch.Tensor]] = {}
        """By number, below 0, tensors that a call leaves in an attribute: what gives each after a run."""
        self.on_side: Callable[[Origin, torch.Tensor], None] | None = None
        """Called while recording with each of these; None: the tape keeps them itself."""
        self.on_held: Callable[[torch.Tensor], None] | None = None
        """Called while recording with each tensor that is no stage's, before the first call that reads it."""
        self._made: dict[int, int] = {}
        self._read_slots: list[int] = []  # by the call that is recorded
        self._last: dict[int, int] = {}  # by slot, the position of the last call that reads it
        self._in_numpy: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Tensors whose memory was handed to numpy, which counts no version, and what they held then."""
        self._num_slots = 0
        self._position = 0  # of the call that runs
        self._outputs: list[int] = []
        self._is_ready = False  # whether it is known which call is the last to read each slot
        self._ledger: Ledger | None = ledger
        self._is_state = is_state
        self._watch = watch
        self.cell_watch: CellWatch | None = None
        """Notices what is set between calls in cells of units; None: nothing does."""

    @property
    def sets_cells(self) -> bool:
        """Whether the code between its calls was seen to set cells of units."""
        return self.cell_watch is not None and self.cell_watch.has_seen_one

    @property
    def sets_generators(self) -> bool:
        """Whether the code between its calls was seen to set a generator."""
        return self._watch is not None and self._watch.has_seen_one

    # Recording

    def record(
        self,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: torch.nn.Module | None = None,
    ) -> Any:
        """Run a call and put it on the tape."""
        read: list[tuple[torch.Tensor, int]] = []
        self._read_slots.clear()
        if len(args) == 1 and type(args[0]) is torch.Tensor:  # most modules; without the detour over `template`
            forms = [self._encode(read, args[0])]
        else:
            forms = [template(value, partial(self._encode, read)) for value in args]
        keyword_forms = {key: template(value, partial(self._encode, read)) for key, value in kwargs.items()}
        entry = TapedCall(name, call, forms, keyword_forms, module)
        if self._watch is not None:
            self._note_surroundings(entry)
            self._watch.before_call()
        if module is not None and self.cell_watch is not None:
            entry.assigned = self.cell_watch.before_call(name)
        result = call(*args, **kwargs)
        if module is not None and self.cell_watch is not None:
            self.cell_watch.after_call(name)
        if name in _TO_NUMPY and isinstance(args[0], torch.Tensor):
            self._in_numpy[id(args[0])] = weakref.ref(args[0]), _checksum(args[0])
        if self._watch is not None:
            self._watch.after_call()
        changes = False
        for tensor, version in read:
            if version_of(tensor) != version:
                changes = True
                self._note_change(tensor, name)
        if name == "__set__" and call == _SET_DATA:  # no version tells of it
            self._note_change(args[0], "data")
        entry.results = [self._add(tensor, read) for tensor in tensors_of(result)]
        # What is left out is a question about a tensor, such as its shape: the answer stands in the later calls.
        if entry.results or changes or name == "__set__":
            if self._watch is not None:
                entry.random = self._watch.take()
            self._last.update(dict.fromkeys((*entry.results, *self._read_slots), len(self.calls)))
            self.calls.append(entry)
        return result

    def _note_surroundings(self, entry: TapedCall) -> None:
        entry.surroundings = Surroundings.now()
        forms = (*entry.args, *entry.kwargs.values())
        if not _NO_GENERATORS.issuperset(map(type, forms)):
            others = [form for form in forms if type(form) not in _NO_GENERATORS]
            entry.drawn_from = [(source, source.state()) for source in _sources_in(others)]
            self.hands_generators |= bool(entry.drawn_from)

    def _encode(self, read: list[tuple[torch.Tensor, int]], tensor: torch.Tensor) -> Slot | Held:
        """What represents a tensor passed to a call; the tensor and its version are added to `read`."""
        assert self._ledger is not None
        read.append((tensor, version_of(tensor)))
        if self._in_numpy:
            self._check_numpy(tensor)
        found = self._ledger.find(tensor)
        if found is not None:
            stage, number = found
            slot: int | None = None
            if stage == self.stage:
                slot = self._made[number]
            elif stage == self.stage - 1:
                if number not in self.inputs:
                    self.inputs[number] = self._new_slot()
                    if self.on_input is not None:
                        self.on_input(number, tensor)
                slot = self.inputs[number]
            elif stage > 0 and self.on_side is not None and tensor.grad_fn is not None:
                if found not in self.sides:
                    self.sides[found] = self._new_slot()
                    self.on_side(found, tensor)
                slot = self.sides[found]
            if slot is not None:
                self._read_slots.append(slot)
                return Slot(slot)
        known = self._held_of.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1].version == version_of(tensor):
            return known[1]  # a module may ask whether two of its arguments are the same (`key is value`)
        if self.on_held is not None:
            self.on_held(tensor)
        held = Held(without_history(tensor), found)
        self.held.append(held)
        self._held_of[id(tensor)] = (weakref.ref(tensor), held)
        return held

    def _add(self, tensor: torch.Tensor, read: Iterable[tuple[torch.Tensor, int]]) -> int:
        assert self._ledger is not None
        for other, _ in read:
            if other is tensor and self._ledger.find(tensor) is None:
                return _NOWHERE  # a parameter or a mask, handed through
        slot = self._made[self._ledger.add(tensor, self.stage)] = self._new_slot()
        return slot

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _note_change(self, tensor: torch.Tensor, name: str) -> None:
        """Note a write: into the stage's own tensors it is repeated in recomputation, into others' it cannot be."""
        assert self._ledger is not None
        found = self._ledger.find(tensor)
        if (found is not None and found[0] == self.stage) or self._is_state(tensor):
            return
        if found is None:
            self._refuse(f"a tensor of shape {list(tensor.shape)} that is not its own", name)
        else:
            self._refuse("its input" if found[0] == self.stage - 1 else "an earlier stage's tensor", name)

    def _check_numpy(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that was written to through numpy: no tape can repeat that."""
        known = self._in_numpy.get(id(tensor))
        if known is not None and known[0]() is tensor and _checksum(tensor) != known[1]:
            self._refuse(f"a tensor of shape {list(tensor.shape)}", "through numpy")

    def _refuse(self, what: str, name: str) -> None:
        self.refusal = (
            f"stage {self.name!r} changes {what} in place ({name}), so it cannot be recomputed; "
            "merge it with the stage before, or work on a copy"
        )

    def refuse_transform(self) -> None:
        """The stage differentiates through a transform of torch.func between its calls, which no tape can repeat."""
        self.refusal = (
            f"stage {self.name!r} uses a transform of torch.func (vmap, jvp) between its submodules, so it cannot be "
            "recomputed; do that inside a submodule"
        )

    def end(self) -> None:
        """The stage has ended; what follows belongs to the next one."""
        for reference, _ in self._in_numpy.values():
            tensor = reference()
            if tensor is not None:
                self._check_numpy(tensor)
        if self._watch is not None:
            self._watch.before_call()  # a generator may have been set after the last call, too

    def finish(self, outputs: Iterable[int]) -> None:
        """Say which of the stage's tensors, by number, a run is to return; may be called again."""
        self.outputs = tuple(outputs)
        self._is_ready = False

    def _get_ready(self) -> None:
        """Find out when each slot can be freed; before the first run, since many tapes are finished twice."""
        self._is_ready = True
        self._outputs = [self._made[number] for number in self.outputs if number >= 0]
        for entry in self.calls:
            entry.dead = []
        for slot, position in self._last.items():
            if slot not in self._outputs and slot != _NOWHERE:
                self.calls[position].dead.append(slot)

    def close(self) -> None:
        """End the recording."""
        self._ledger = None
        self.on_input = self.on_side = self.on_held = None
        self._held_of.clear()
        self._in_numpy.clear()

    # Running

    def run(
        self, inputs: Mapping[int, torch.Tensor], sides: Mapping[Origin, torch.Tensor] = MappingProxyType({})
    ) -> list[torch.Tensor]:
        """Recompute the stage.

        Args:
            inputs: the previous stage's tensors by number; those that the stage reads must be there.
            sides: the same of earlier stages' tensors.

        Returns:
            The stage's outputs, in the order given to `finish`.

        Raises:
            ExecutionError: where the stage changes its input in place, where a held tensor was changed since, and where
                a call returns another number of tensors than the first time.
        """
        if self.refusal is not None:
            raise ExecutionError(self.refusal)
        self.check_held()
        if not self._is_ready:
            self._get_ready()
        values: list[Any] = [None] * self._num_slots
        for number, slot in self.inputs.items():
            values[slot] = inputs[number]
        for origin, slot in self.sides.items():
            values[slot] = sides[origin]
        with self._generators_left_alone() if self.hands_generators else nullcontext():
            position = 0
            while position < len(self.calls):
                position = self._run_alike(position, values)
        return [values[self._made[number]] if number >= 0 else self.left[number]() for number in self.outputs]

    def _run_alike(self, position: int, values: list[Any]) -> int:
        """Run the calls from one on that had the same surroundings; returns the position of the next one."""
        surroundings = self.calls[position].surroundings
        assert surroundings is not None
        applied = None if surroundings == Surroundings.now() else surroundings.applied()
        with nullcontext() if applied is None else applied:
            for entry in self.calls[position:]:
                if entry.surroundings is not surroundings and entry.surroundings != surroundings:
                    break
                self._position = position
                self._run_call(entry, values)
                if applied is not None:
                    torch.clear_autocast_cache()  # else copies of all weights would be there until the last call
                position += 1
        return position

    @contextmanager
    def _generators_left_alone(self) -> Iterator[None]:
        """Put back, after the block, the states of generators that calls were handed."""
        states = [(source, source.state()) for entry in self.calls for source, _ in entry.drawn_from]
        try:
            yield
        finally:
            for source, state in states:
                source.set(state)

    def may_end_in(self, frame: FrameType) -> bool:
        """Whether the current run can be ended in a frame without leaving anything undone."""
        rest = self.calls[self._position + 1 :]
        is_harmless_rest = all(
            _is_of_torch(entry.call) if (m := entry.module) is None else is_harmless(m) for entry in rest
        )
        return is_harmless_rest and follows_nothing(frame, _RUN_CALL)

    def check_held(self) -> None:
        """Refuse if a tensor that the stage reads was changed since."""
        for held in self.held:
            if version_of(held.tensor) != held.version and not self._is_state(held.tensor):
                raise ExecutionError(
                    f"stage {self.name!r} reads a tensor of shape {list(held.tensor.shape)} that was changed in place "
                    "between forward and backward; work on a copy, or change it after backward"
                )

    def _run_call(self, entry: TapedCall, values: list[Any]) -> None:
        if entry.assigned is not None:
            entry.assigned.repeat()
        if entry.module is not None and entry.module.training != entry.training:
            raise ExecutionError(
                f"stage {self.name!r}: module {entry.name!r} changed between train() and eval() after forward; "
                "switch modes after backward"
            )
        args = [build(form, values) for form in entry.args]
        kwargs = {key: build(form, values) for key, form in entry.kwargs.items()}
        if entry.random is not None and self._watch is not None:
            self._watch.generators.set(entry.random)
        for source, state in entry.drawn_from:
            source.set(state)
        made = tensors_of(entry.call(*args, **kwargs))
        if len(made) != len(entry.results):
            raise ExecutionError(
                f"stage {self.name!r}: {entry.name} returned {len(made)} tensors when recomputed, but "
                f"{len(entry.results)} the first time; what a stage does must depend only on its input"
            )
        for slot, tensor in zip(entry.results, made, strict=True):
            if slot != _NOWHERE:
                values[slot] = tensor
        for slot in entry.dead:
            values[slot] = None


_RUN_CALL = Tape._run_call.__code__


def _is_of_torch(function: Any) -> bool:
    """Whether a function between submodules is torch's own, and not a custom one, which is called through another."""
    return not isinstance(function, partial)


def _sources_in(forms: Iterable[Any]) -> list[Source]:
    """The generators among the arguments of a call, nested ones too."""
    found = (value for form in forms for value in parts(form, GENERATORS))
    return [source for value in found if (source := Source.of(value)) is not None]


_NO_GENERATORS = frozenset({Slot, Held, type(None), bool, int, float, str})


_TO_NUMPY = frozenset({"numpy", "__array__"})


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().numpy(force=True).tobytes())


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without the graph that made it, so that keeping it keeps nothing else; leaves are as they are."""
    if tensor.grad_fn is None:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


_version = attrgetter("_version")


def versions_of(parameters: Iterable[torch.nn.Parameter]) -> list[int]:
    """The same of many tensors, none of which is an inference tensor, in one go."""
    return list(map(_version, parameters))
