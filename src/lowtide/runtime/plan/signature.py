"""What a plan was made for: the shapes of a call, and the model. Both are compared before a plan is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter, is_, le
from typing import Any

import torch
from torch import nn

from lowtide.errors import PlanError
from lowtide.runtime.model.sample import values_in
from lowtide.runtime.model.tables import Tables

_requires_grad = attrgetter("requires_grad")

FIT_AGAIN = "call fit again"

_LONGEST_TEXT = 64  # that tells calls apart

TensorForm = tuple[tuple[int, ...], str, str]
"""Shape, dtype, and what else makes a difference: whether it requires a gradient, and an unusual memory format."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors of one call, the numbers and words beside them, the dtype of autocast around it, and which of the
    model's parameters are trained.
    """

    tensors: tuple[TensorForm, ...]
    autocast: str = ""
    trained: bytes = b""
    """A byte for each parameter, 1 where it requires a gradient; empty: not known."""
    settings: tuple[str, ...] | None = None
    """Whole numbers, floats, flags and short texts among the arguments; None: not known, or of no matter."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str, trained: bytes = b"") -> Signature:
        """The signature of a call."""
        tensors: list[TensorForm] = []
        settings: list[str] = []
        for value in _leaves((args, dict(kwargs))):
            if isinstance(value, torch.Tensor):
                tensors.append((tuple(value.shape), _name(value.dtype), _marks(value)))
            else:
                settings.append(repr(value))
        cast = torch.is_autocast_enabled(device_type)
        autocast = _name(torch.get_autocast_dtype(device_type)) if cast else ""
        return cls(tuple(tensors), autocast, trained, tuple(settings))

    def fits_within(self, planned: Signature) -> bool:
        """Whether a call needs no more than the planned one: the same tensors, none of them larger."""
        return (
            self._has_no_larger_tensors(planned)
            and all(_needs_no_more(now[2], then[2]) for now, then in zip(self.tensors, planned.tensors, strict=True))
            and self.autocast == planned.autocast
            and trains_no_more(self.trained, planned.trained)
            and self.has_same_settings(planned)
        )

    def _has_no_larger_tensors(self, planned: Signature) -> bool:
        """Whether there are the same tensors, none of them larger."""
        return len(self.tensors) == len(planned.tensors) and all(
            dtype == other_dtype and len(shape) == len(other) and all(a <= b for a, b in zip(shape, other, strict=True))
            for (shape, dtype, _), (other, other_dtype, _) in zip(self.tensors, planned.tensors, strict=True)
        )

    def has_same_settings(self, planned: Signature) -> bool:
        """Whether numbers and words among the arguments are the same, as far as they are known."""
        return self.settings == planned.settings or self.settings is None or planned.settings is None

    def has_same_shapes(self, other: Signature) -> bool:
        """Whether two calls are the same but for what `in_shapes_alone` leaves out."""
        return self.in_shapes_alone() == other.in_shapes_alone()

    def in_shapes_alone(self) -> Signature:
        """Without what only `fit` plans for: gradients of inputs, memory formats, numbers and words."""
        forms = tuple((shape, dtype, "") for shape, dtype, _ in self.tensors)
        return Signature(forms, self.autocast, self.trained)

    def without_gradients(self) -> Signature:
        """As if no input required a gradient."""
        forms = tuple((shape, dtype, _without_gradient(marks)) for shape, dtype, marks in self.tensors)
        return replace(self, tensors=forms)

    def difference(self, planned: Signature) -> str:
        """Describe how the call differs from the planned one; empty if it does not."""
        if len(self.tensors) != len(planned.tensors):
            count = f"{len(self.tensors)} tensor{'' if len(self.tensors) == 1 else 's'}"
            return f"the call has {count}, but the plan is for {len(planned.tensors)}"
        for index, (now, then) in enumerate(zip(self.tensors, planned.tensors, strict=True)):
            if now != then:
                return f"tensor {index} of the call is {_form(now)}, but the plan is for {_form(then)}"
        if self.autocast != planned.autocast:
            return f"autocast is {self.autocast or 'off'}, but the plan is for {planned.autocast or 'off'}"
        if not trains_no_more(self.trained, planned.trained):
            return "more parameters require gradients than when the plan was made"
        if self.trained != planned.trained:
            return "fewer parameters require gradients than when the variants of compiled blocks were checked"
        if not self.has_same_settings(planned):
            given, expected = _words(self.settings), _words(planned.settings)
            return f"the call has {given} beside its tensors, but the plan is for {expected}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        tensors = [[list(shape), dtype, *([marks] if marks else [])] for shape, dtype, marks in self.tensors]
        return {"tensors": tensors, "autocast": self.autocast, "trained": self.trained.hex()}

    @classmethod
    def from_dict(cls, values: Any) -> Signature:
        """The inverse of `to_dict`; numbers and words are not kept in files."""
        try:
            tensors = tuple(
                (tuple(int(n) for n in t[0]), str(t[1]), "".join(map(str, t[2:]))) for t in values["tensors"]
            )
            return cls(tensors, str(values["autocast"]), bytes.fromhex(values.get("trained", "")))
        except (KeyError, TypeError, ValueError, IndexError):
            raise PlanError("the signature is invalid; was the file edited?") from None


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors, numbers, flags and short texts in arguments, those of objects of the user's own included."""
    for each in values_in(value):
        if isinstance(each, torch.Tensor | bool | int | float) or (
            isinstance(each, str) and len(each) <= _LONGEST_TEXT
        ):
            yield each


def _marks(tensor: torch.Tensor) -> str:
    """Whether a tensor requires a gradient, and whether its images lie channels last."""
    wants = "requires grad" if tensor.requires_grad else ""
    if tensor.dim() != 4 or tensor.layout is not torch.strided or tensor.is_contiguous():
        return wants
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return ", ".join(filter(None, (wants, "channels last" if is_last else "")))


def _needs_no_more(marks: str, planned: str) -> bool:
    if marks == planned:
        return True
    return marks == _without_gradient(planned)


def _without_gradient(marks: str) -> str:
    return marks.removeprefix("requires grad").removeprefix(", ")


def _words(settings: tuple[str, ...] | None) -> str:
    return ", ".join(settings or ())[:80] or "nothing"


def trained_of(parameters: Iterable[nn.Parameter]) -> bytes:
    """Which parameters require gradients."""
    return bytes(map(_requires_grad, parameters))


def trains_no_more(trained: bytes, planned: bytes) -> bool:
    """Whether no more parameters require gradients than when a plan was made, as far as is known."""
    if trained == planned or not planned or not trained:
        return True
    return len(trained) == len(planned) and all(map(le, trained, planned))


class Structure:
    """The submodules of a model at one moment; quickly compared, since that is done at each call."""

    def __init__(self, model: nn.Module) -> None:
        self._look(model)

    def _look(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._submodules = Tables(module._modules for module in self._modules.values())
        self._parameters = Tables(module._parameters for module in self._modules.values())
        self._then = self._submodules.entries()

    def parameters(self) -> list[nn.Parameter | None]:
        """All parameters, quickly; one that modules share appears several times."""
        return self._parameters.entries()

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose submodules have changed; new names for the same ones are fine.

        Raises:
            PlanError: with the path of one that was added, replaced or removed.
        """
        now = self._submodules.entries()
        if len(now) == len(self._then) and all(map(is_, now, self._then)):
            return
        known, modules = set(map(id, self._modules.values())), dict(model.named_modules())
        changed = [path for path, module in modules.items() if id(module) not in known]
        changed += [path for path, module in self._modules.items() if not _stands_at(module, model, path)]
        if changed:
            raise PlanError(f"submodule {changed[0]!r} has changed since the plan was made; {FIT_AGAIN}")
        self._look(model)


def _stands_at(module: nn.Module, model: nn.Module, path: str) -> bool:
    try:
        return model.get_submodule(path) is module
    except AttributeError:
        return False


def fingerprint(model: nn.Module, device: torch.device | None = None) -> dict[str, str]:
    """What must stay the same in a model and its machine for a plan to be valid, by name; None: the model's device."""
    parameters = [f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    buffers = [f"{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    modules = [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    return {
        "modules": _digest(modules),
        "parameters": _digest(parameters),
        "buffers": _digest(buffers),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _form(form: TensorForm) -> str:
    return " ".join(filter(None, (str(list(form[0])), form[1], form[2] and f"({form[2]})")))
