"""Random numbers: a recomputed stage draws the same ones as in its first run, and nothing else is affected; the same
holds for measuring and trial steps.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ctypes import string_at
from functools import cache, partial
from operator import methodcaller
from typing import Any

import numpy
import torch

Glance = Callable[[], Any]


class Source:
    """A generator, by how its state is read and set.

    Args:
        get: reads its state.
        set: sets it.
        glance: tells in much less time than `get` whether it has moved; None, or where it gives None: nothing does.
    """

    def __init__(
        self,
        get: Callable[[], Any],
        set: Callable[[Any], object],  # noqa: A002
        glance: Glance | None = None,
    ) -> None:
        self._get = get
        self._set = set
        self._glance = glance
        self._seen: Any = None
        self._state: Any = None

    @classmethod
    def of(cls, value: Any) -> Source | None:
        """A generator that a module keeps, or a call is handed; None: it is no generator."""
        if isinstance(value, torch.Generator):
            return cls(partial(_bytes_of, value), partial(_set_bytes, value), _glance_at_torch(value))
        if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            return cls(value.getstate, value.setstate, _glance_at_python(value))
        if isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            return cls(lambda: bits.state, lambda state: setattr(bits, "state", state))
        if isinstance(value, numpy.random.RandomState):
            return cls(partial(value.get_state, legacy=False), value.set_state, _glance_at_numpy(value))
        return None

    def state(self) -> Any:
        """What it is about to give: the same object as long as nothing was drawn."""
        seen = None if self._glance is None else self._glance()
        if seen is not None and seen == self._seen and self._state is not None:
            return self._state
        state = self._get()
        if self._state is not None and _is_same(state, self._state):
            state = self._state
        self._seen, self._state = seen, state
        return state

    def set(self, state: Any) -> None:
        """Make it give again what it was about to give."""
        if self.state() is not state:
            self._set(state)
            self._seen, self._state = None if self._glance is None else self._glance(), state


def _bytes_of(generator: torch.Generator) -> bytes:
    """A state, not as a tensor, which would count as the step's on a CPU."""
    state: bytes = generator.get_state().numpy().tobytes()
    return state


def _set_bytes(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _glance_at_python(generator: random.Random) -> Glance | None:
    """Reads a few numbers in the generator's memory: how many were given out, and some of those that are at hand.

    Not the first of these, which is the same after every seed.
    """
    memory, state = _memory_at(id(generator) + object.__basicsize__, 16), generator.getstate()[1]
    if struct.unpack("iIII", memory.raw) != (state[-1], *state[:3]):
        return None  # another Python, which lays it out in another way
    return lambda: (memory.raw, generator.gauss_next)  # type: ignore[attr-defined]


def _glance_at_numpy(generator: numpy.random.RandomState) -> Glance | None:
    """The same of numpy's; the normal number that it keeps for the next time stands in the object itself."""
    bits = generator._bit_generator
    if not isinstance(bits, numpy.random.MT19937):
        return None
    start, state = bits.ctypes.state_address, bits.state["state"]
    words, position, own = _memory_at(start, 12), _memory_at(start + state["key"].nbytes, 4), _memory_of(generator)
    if words.raw + position.raw != struct.pack("IIIi", *state["key"][:3], state["pos"]) or not _shows_normal_numbers():
        return None
    # Somebody may give it other bits, which these addresses do not show.
    return lambda: (words.raw, position.raw, own.raw) if generator._bit_generator is bits else None


@cache
def _shows_normal_numbers() -> bool:
    """Whether the memory of a generator of numpy's shows that it keeps a normal number."""
    probe = numpy.random.RandomState(0)
    memory = _memory_of(probe)
    before = memory.raw
    probe.standard_normal()
    return bool(memory.raw != before)


def _glance_at_torch(generator: torch.Generator) -> Glance | None:
    """The same of torch's on the CPU, with the normal numbers that it keeps for the next time."""
    if generator.device.type != "cpu":
        return None
    # A state has 24 bytes that tell seed and position, then the numbers at hand, in twice the room they have in memory.
    words = numpy.frombuffer(_bytes_of(generator), numpy.uint64)[3 : 3 + 624].astype(numpy.uint32).tobytes()
    address: int = generator._cdata  # type: ignore[attr-defined]
    start = address + string_at(address, 256).find(words[:16])
    if string_at(start, len(words)) != words:
        return None  # another torch, which lays it out in another way
    position, kept = _memory_at(start - 20, 28), _memory_at(start + len(words), 28)
    return lambda: (position.raw, kept.raw)


def _memory_at(address: int, num_bytes: int) -> Any:
    return (ctypes.c_char * num_bytes).from_address(address)


def _memory_of(value: object) -> Any:
    """That of an object, without what every object has."""
    return _memory_at(id(value) + object.__basicsize__, type(value).__basicsize__ - object.__basicsize__)


_PYTHON = Source(random.getstate, random.setstate, _glance_at_python(random._inst))
_NUMPY = Source(
    partial(numpy.random.get_state, legacy=False), numpy.random.set_state, _glance_at_numpy(numpy.random.mtrand._rand)
)

_seed_of = methodcaller("initial_seed")


_KINDS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


class Generators:
    """The generators that a model's code may draw from.

    Args:
        devices: the devices of the model.
        own: what modules keep as attributes; the generators among it count.
    """

    def __init__(self, devices: set[torch.device], own: Iterable[Any]) -> None:
        kept = list(own)
        # Of a large model's values few are generators, and there are few kinds of values.
        kinds = {kind for kind in set(map(type, kept)) if issubclass(kind, _KINDS)}
        unique = list({id(value): value for value in kept if type(value) in kinds}.values())
        self._torch = [torch.default_generator, *(value for value in unique if isinstance(value, torch.Generator))]
        indices = {device.index or 0 for device in devices if device.type == "cuda"}
        if not devices and torch.cuda.is_available() and torch.cuda.is_initialized():
            indices = {torch.cuda.current_device()}  # a model without tensors runs where its input is
        self._on_device = slice(len(self._torch), len(self._torch) + len(indices))
        self._torch += [torch.cuda.default_generators[index] for index in sorted(indices)]
        others = (value for value in unique if not isinstance(value, torch.Generator))
        found = (Source.of(value) for value in (*self._torch, *others))
        self.seeds: Callable[[], Any] = self._torch[0].initial_seed if len(self._torch) == 1 else self._seeds
        """Reads the seeds of torch's generators, in less time than their states."""
        self._sources = [*(source for source in found if source is not None), _PYTHON, _NUMPY]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Generators:
        """Those of a model."""
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        return cls(devices, (value for module in model.modules() for value in vars(module).values()))

    def state(self) -> State:
        """What they are about to give."""
        return State([source.state() for source in self._sources])

    def of_torch(self) -> list[bytes]:
        """The states of torch's own."""
        return [source.state() for source in self._sources[: len(self._torch)]]

    def _seeds(self) -> list[int]:
        return list(map(_seed_of, self._torch))

    def drawn_since(self, before: State) -> bool:
        """Whether any of them was used since a state."""
        return self.state() != before

    def drawn_beside_torch_since(self, before: State) -> bool:
        """Whether any was used since a state that is not torch's."""
        start = len(self._torch)
        return not all(map(_is_same, self.state().values[start:], before.values[start:]))

    def drawn_on_host_since(self, before: State) -> bool:
        """Whether any was used since a state but the device's own, whose numbers kernels make."""
        now = self.state().values
        same = list(map(_is_same, now, before.values))
        return not all(same[: self._on_device.start] + same[self._on_device.stop :])

    def are_at(self, state: State) -> bool:
        """Whether torch's are in a state."""
        return all(map(_is_same, self.of_torch(), state.values))

    @contextmanager
    def replayed(self, state: State) -> Iterator[None]:
        """Run the block with the generators as in `state`, and leave them as they are."""
        now = self.state()
        self.set(state)
        try:
            yield
        finally:
            self.set(now)

    def set(self, state: State) -> None:
        """Make them give again what they were about to give."""
        for source, value in zip(self._sources, state.values, strict=True):
            source.set(value)


class State:
    """The states of all generators at one moment; two are equal if nothing was drawn."""

    __slots__ = ("values",)

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and all(map(_is_same, self.values, other.values))

    __hash__ = None  # type: ignore[assignment]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal: all of them, a normal number that is kept for the next time included."""
    if one is other:
        return True
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, numpy.ndarray):
        return bool((one == other).all())
    return bool(one == other)


class GeneratorWatch:
    """Notices where the code between a stage's calls sets a generator (`torch.manual_seed`, `fork_rng`, `random.seed`).

    That code is not on a tape, so the call that comes next must find the generators as it did. Reading all of them at
    every call takes longer than many calls do: it is done when a stage runs for the first time, and later where that
    has shown something. Else seeds tell.

    Args:
        generators: all of them.
        reads_all: whether all are read at every call.
    """

    def __init__(self, generators: Generators, *, reads_all: bool) -> None:
        self.generators = generators
        self.has_seen_one = False
        """Whether a generator was set in this run of the stage."""
        self._read: Callable[[], Any] = generators.state if reads_all else generators.seeds
        self._left = self._read()
        self._set: State | None = None

    def before_call(self) -> None:
        """The stage is about to make a call."""
        if self._read() != self._left:
            self._set = self.generators.state()
            self.has_seen_one = True
            self._read = self.generators.state  # the same seed may be set again

    def after_call(self) -> None:
        """A call has ended."""
        self._left = self._read()

    def take(self) -> State | None:
        """The state that the call on the tape must find; None: the one in which the call before it left them."""
        found, self._set = self._set, None
        return found
