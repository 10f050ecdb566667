"""What a plan was made for: the shapes of a call, and the model. Both are compared before a plan is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, le
from typing import Any

import torch
from torch import nn

from lowtide.errors import PlanError
from lowtide.runtime.model.containers import tensors_of

_requires_grad = attrgetter("requires_grad")

FIT_AGAIN = "call fit again"

TensorForm = tuple[tuple[int, ...], str]
"""Shape and dtype."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors of one call, the dtype of autocast around it, and which of the model's parameters are trained."""

    tensors: tuple[TensorForm, ...]
    autocast: str = ""
    trained: bytes = b""
    """A byte for each parameter, 1 where it requires a gradient; empty: not known."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str, trained: bytes = b"") -> Signature:
        """The signature of a call."""
        forms = tuple((tuple(t.shape), _name(t.dtype)) for t in tensors_of((args, dict(kwargs))))
        cast = torch.is_autocast_enabled(device_type)
        return cls(forms, _name(torch.get_autocast_dtype(device_type)) if cast else "", trained)

    def fits_within(self, planned: Signature) -> bool:
        """Whether a call needs no more than the planned one: the same tensors, none of them larger."""
        if len(self.tensors) != len(planned.tensors) or self.autocast != planned.autocast:
            return False
        if not trains_no_more(self.trained, planned.trained):
            return False
        return all(
            dtype == other_dtype and len(shape) == len(other) and all(a <= b for a, b in zip(shape, other, strict=True))
            for (shape, dtype), (other, other_dtype) in zip(self.tensors, planned.tensors, strict=True)
        )

    def difference(self, planned: Signature) -> str:
        """Describe how the call differs from the planned one; empty if it does not."""
        if len(self.tensors) != len(planned.tensors):
            return f"the call has {len(self.tensors)} tensors, but the plan is for {len(planned.tensors)}"
        for index, (now, then) in enumerate(zip(self.tensors, planned.tensors, strict=True)):
            if now != then:
                return f"tensor {index} of the call is {_form(now)}, but the plan is for {_form(then)}"
        if self.autocast != planned.autocast:
            return f"autocast is {self.autocast or 'off'}, but the plan is for {planned.autocast or 'off'}"
        if not trains_no_more(self.trained, planned.trained):
            return "more parameters require gradients than when the plan was made"
        if self.trained != planned.trained:
            return "fewer parameters require gradients than when the variants of compiled blocks were checked"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        tensors = [[list(shape), dtype] for shape, dtype in self.tensors]
        return {"tensors": tensors, "autocast": self.autocast, "trained": self.trained.hex()}

    @classmethod
    def from_dict(cls, values: Any) -> Signature:
        """The inverse of `to_dict`."""
        try:
            tensors = tuple((tuple(int(n) for n in shape), str(dtype)) for shape, dtype in values["tensors"])
            return cls(tensors, str(values["autocast"]), bytes.fromhex(values.get("trained", "")))
        except (KeyError, TypeError, ValueError):
            raise PlanError("the signature is invalid; was the file edited?") from None


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
        self._tables = [module._modules for module in self._modules.values()]
        self._then = self._now()

    def _now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose submodules have changed; new names for the same ones are fine.

        Raises:
            PlanError: with the path of one that was added, replaced or removed.
        """
        now = self._now()
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


def fingerprint(model: nn.Module) -> dict[str, str]:
    """What must stay the same in a model and its machine for a plan to be valid, by name."""
    parameters = [f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    buffers = [f"{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    modules = [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
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
    return f"{list(form[0])} {form[1]}"
