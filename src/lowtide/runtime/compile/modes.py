"""What a compiler assumes to be fixed when it compiles a block, and what its variants were checked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Modes:
    """The modes of a block: what trains in it, and what is switched off.

    Where these change, a compiler compiles the block anew, and chooses anew what its backward computes again: a variant
    that keeps dropout's mask may then draw it anew.

    Args:
        module: the block; it is not kept alive.
    """

    __slots__ = ("_inside", "_own", "_then")

    def __init__(self, module: nn.Module) -> None:
        self._own = _names_of_floats(module)
        self._inside = [(each, _names_of_floats(each)) for each in module.modules() if each is not module]
        self._then = list(self._now(module))

    def are_as_then(self, module: nn.Module) -> bool:
        """Whether the block's modes have not changed since."""
        return self._then == list(self._now(module))

    def _now(self, module: nn.Module) -> Iterator[Any]:
        for each, names in ((module, self._own), *self._inside):
            yield each.training
            for parameter in each._parameters.values():
                yield parameter is not None and parameter.requires_grad
            values = vars(each)
            for name in names:
                yield values.get(name) == 0.0  # a dropout that begins, or ends


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Put a model in `eval()` into training mode within the block, for planning and steps."""
    if model.training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _names_of_floats(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if type(value) is float]


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The numbers that torch has given to the hooks of a module; no two hooks ever have the same."""
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return tuple(number for hooks in kinds for number in hooks) if any(kinds) else ()
