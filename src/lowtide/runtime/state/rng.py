"""Random numbers: a stage that drew some draws the same ones when it runs again, and nobody else notices; the same
holds for measuring and trial steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ctypes import string_at
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch


class _Other(NamedTuple):
    """A generator that is not torch's, by how its state is read and set."""

    get: Callable[[], Any]
    set: Callable[[Any], None]

    @classmethod
    def of(cls, value: Any) -> _Other | None:
        """One that a module keeps as an attribute; None: it is no such generator."""
        if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            return cls(value.getstate, value.setstate)
        if isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            return cls(lambda: bits.state, lambda state: setattr(bits, "state", state))
        if isinstance(value, numpy.random.RandomState):
            return cls(partial(value.get_state, legacy=False), value.set_state)
        return None


_PYTHON = _Other(random.getstate, random.setstate)
_NUMPY = _Other(partial(numpy.random.get_state, legacy=False), numpy.random.set_state)


class Generators:
    """The generators that a model's code may draw from.

    Args:
        devices: the devices of the model.
        own: what modules keep as attributes; the generators among it count.

    Python's and numpy's generators take longer to read than torch's, and few models use them: they are looked at only
    where `everything` is asked for.
    """

    def __init__(self, devices: set[torch.device], own: Iterable[Any]) -> None:
        unique = list({id(value): value for value in own}.values())
        self._others = [_PYTHON, _NUMPY, *(found for value in unique if (found := _Other.of(value)) is not None)]
        self._torch = [torch.default_generator, *(value for value in unique if isinstance(value, torch.Generator))]
        indices = {device.index or 0 for device in devices if device.type == "cuda"}
        if not devices and torch.cuda.is_available() and torch.cuda.is_initialized():
            indices = {torch.cuda.current_device()}  # a model without tensors runs where its input is
        self._torch += [torch.cuda.default_generators[index] for index in sorted(indices)]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Generators:
        """Those of a model."""
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        return cls(devices, (value for module in model.modules() for value in vars(module).values()))

    def state(self, *, everything: bool) -> State:
        """What they are about to give."""
        return State([generator.get_state() for generator in self._torch], self.others() if everything else None)

    def others(self) -> list[Any]:
        """The states of those that are not torch's."""
        return [other.get() for other in self._others]

    def drawn_since(self, before: State) -> bool:
        """Whether any of them was used since a state."""
        return self.drawn_between(before, self.state(everything=False))

    def drawn_between(self, before: State, now: State) -> bool:
        """Whether any of them was used between a state and now."""
        if now.contents != before.contents:
            return True
        return before.others is not None and self.others_drawn_since(before)

    def others_drawn_since(self, before: State) -> bool:
        """Whether one that is not torch's was used since a state that includes them."""
        assert before.others is not None
        return self.have_moved(before.others)

    def have_moved(self, others: list[Any]) -> bool:
        """Whether those that are not torch's are other than they were."""
        return not all(_is_same(other.get(), state) for other, state in zip(self._others, others, strict=True))

    @contextmanager
    def replayed(self, state: State) -> Iterator[None]:
        """Run the block with the generators as in `state`, and leave them as they are."""
        now = self.state(everything=state.others is not None)
        self.set(state)
        try:
            yield
        finally:
            self.set(now)

    def set(self, state: State) -> None:
        """Make them give again what they were about to give."""
        for generator, value in zip(self._torch, state.of_torch, strict=True):
            generator.set_state(value)
        if state.others is not None:
            for other, value in zip(self._others, state.others, strict=True):
                other.set(value)


class State:
    """The states of all generators at one moment."""

    __slots__ = ("of_torch", "others")

    def __init__(self, of_torch: list[torch.Tensor], others: list[Any] | None) -> None:
        self.of_torch = of_torch
        self.others = others

    @property
    def contents(self) -> list[bytes]:
        """Those of torch as bytes, which are compared in a twentieth of the time of `torch.equal`."""
        return [string_at(state.data_ptr(), state.nbytes) for state in self.of_torch]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal: all of them, a normal number that is kept for the next time included."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, numpy.ndarray):
        return bool((one == other).all())
    return bool(one == other)


class GeneratorWatch:
    """Notices where the code between a stage's calls sets a generator (`torch.manual_seed`, `fork_rng`, `random.seed`).

    That code is not on a tape, so the call that comes next must find the generators as it did. Reading all of them at
    every call takes longer than many calls do: a stage is watched when it runs for the first time, and later where that
    has shown something.
    """

    def __init__(self, generators: Generators) -> None:
        self.generators = generators
        self.has_seen_one = False
        """Whether a generator was set in this run of the stage."""
        self._left = generators.state(everything=True)
        self._set: State | None = None

    def before_call(self) -> None:
        """The stage is about to make a call."""
        now = self.generators.state(everything=True)
        if self.generators.drawn_between(self._left, now):
            self._set = now
            self.has_seen_one = True

    def after_call(self) -> None:
        """A call has ended."""
        self._left = self.generators.state(everything=True)

    def take(self) -> State | None:
        """The state that the call on the tape must find; None: the one in which the call before it left them."""
        found, self._set = self._set, None
        return found
