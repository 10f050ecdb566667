"""The arguments of a model's call, and the tensors in them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from lowtide.errors import CaptureError, shown
from lowtide.runtime.model.containers import GENERATORS, Held, build, exchange, template

# What of arguments is looked at, at each call.
_MOST_DEPTH = 4
_MOST_VALUES = 512

_WHOLE = (
    *(torch.Tensor, bool, int, float, str, bytes, type(None)),
    *(type, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module),
    *GENERATORS,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The arguments of one call of a model.

    Example:
        >>> Sample.of((torch.zeros(1), torch.ones(1))).args[1].item()
        1.0
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Sample:
        """Read a sample: a tensor, a tuple (or list) of positional arguments or a mapping of keyword arguments."""
        if isinstance(value, Sample):
            return value
        if isinstance(value, torch.Tensor):
            return cls((value,))
        if not isinstance(value, Mapping | tuple | list):
            is_loader = isinstance(value, DataLoader | Dataset | Iterator)
            one = "; take one batch, such as next(iter(loader))" if is_loader else ""
            raise CaptureError(
                f"the sample is {shown(value)}; pass a tensor, a tuple of positional or a dict of keyword "
                f"arguments{one}"
            )
        sample = cls((), dict(value)) if isinstance(value, Mapping) else cls(tuple(value))
        for name, argument in (*enumerate(sample.args), *sample.kwargs.items()):
            if isinstance(argument, Iterator):
                raise CaptureError(
                    f"argument {name!r} of the sample is an iterator ({type(argument).__name__}), which can be read "
                    "only once, but the model runs several times; pass a list"
                )
        return sample

    def with_keywords(self, keywords: Mapping[str, Any]) -> Sample:
        """The same call with more keyword arguments, instead of those of the caller that have the same names."""
        return Sample(self.args, {**self.kwargs, **keywords})

    def on(self, device: torch.device) -> Sample:
        """The same call with its tensors on a device."""

        def encode(tensor: torch.Tensor) -> Held:
            return Held(tensor.detach().to(device).requires_grad_(tensor.requires_grad))

        args, kwargs = build(template((self.args, dict(self.kwargs)), encode), [])
        return Sample(args, kwargs)

    def call(self, model: torch.nn.Module) -> Any:
        """Call the model with new containers each time, because some models take values out of them.

        Generators are copied too, or put back where they are in objects of the caller's own, so that they give the
        training loop the same numbers as before.
        """
        hidden = [value for value in values_in((self.args, self.kwargs)) if isinstance(value, GENERATORS)]
        put_back = [_putting_back(generator) for generator in hidden]
        copies: dict[int, Any] = {}

        def own(generator: Any) -> Any:
            return copies.setdefault(id(generator), _copied(generator))

        args, kwargs = build(exchange(template((self.args, dict(self.kwargs)), Held), GENERATORS, own), [])
        try:
            return model(*args, **kwargs)
        finally:
            for put in put_back:
                put()

    def __str__(self) -> str:
        named = [f"{name}={_described(value)}" for name, value in self.kwargs.items()]
        return ", ".join([*map(_described, self.args), *named]) or "no arguments"

    def tensors(self) -> list[torch.Tensor]:
        """All tensors in it."""
        return list(tensors_in((self.args, self.kwargs)))


def _copied(generator: Any) -> Any:
    """A generator in the same state."""
    return generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator)


def _putting_back(generator: Any) -> Callable[[], object]:
    """What lets a generator give again what it is about to give."""
    kept = _copied(generator)
    if isinstance(generator, torch.Generator):
        return lambda: generator.set_state(kept.get_state())
    if isinstance(generator, random.Random):
        return lambda: generator.setstate(kept.getstate())
    if isinstance(generator, numpy.random.RandomState):
        return lambda: generator.set_state(kept.get_state())
    return lambda: setattr(generator.bit_generator, "state", kept.bit_generator.state)


def values_in(value: Any) -> Iterator[Any]:
    """All that is in arguments, objects of the user's own (a batch of graphs) included: containers, and what they hold.

    So deep inside others, and no more values than this, so that a large object costs a step nothing to speak of.
    """
    pending, num_seen = [(value, 0)], 0
    seen: set[int] = set()
    while pending and num_seen < _MOST_VALUES:
        each, depth = pending.pop()
        num_seen += 1
        yield each
        if depth <= _MOST_DEPTH and not isinstance(each, _WHOLE) and id(each) not in seen:
            seen.add(id(each))
            pending += [(part, depth + 1) for part in reversed(_parts_of(each))]


def _parts_of(value: Any) -> list[Any]:
    """What a container or an object holds."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    names = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    slots = [getattr(value, name, None) for name in names if not name.startswith("__")]
    return [*slots, *getattr(value, "__dict__", {}).values()]


def _described(value: Any) -> str:
    """Format an argument for an error message."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"
    plain = value is None or isinstance(value, str | int | float | bool)
    return shown(value) if plain else type(value).__name__


def tensors_in(value: Any, above: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """All tensors in nested containers: lists, tuples, sets, mappings, dataclasses; one may contain itself."""
    entries: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, str | bytes | int | float | bool) or value is None or id(value) in above:
        return
    elif isinstance(value, Mapping):
        entries = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        entries = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = [getattr(value, entry.name, None) for entry in dataclasses.fields(value)]
    for entry in entries:
        yield from tensors_in(entry, (*above, id(value)))


def without_cache(model: torch.nn.Module, sample: Sample) -> dict[str, Any]:
    """The keyword arguments that keep a language model from building a cache of keys and values while it trains."""
    if "use_cache" in sample.kwargs:
        return {"use_cache": False} if sample.kwargs["use_cache"] else {}
    config = getattr(model, "config", None)
    if config is None or not getattr(config, "use_cache", _text_config_uses_cache(config)):
        return {}
    names = list(inspect.signature(model.forward).parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    if "use_cache" not in names and not takes_any:
        return {}
    is_given = "use_cache" in names and names.index("use_cache") < len(sample.args)
    return {} if is_given else {"use_cache": False}


def _text_config_uses_cache(config: Any) -> bool:
    text = getattr(config, "text_config", None)
    return bool(getattr(text, "use_cache", False))
