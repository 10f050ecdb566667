"""What real steps show: which optimizer makes them, and what they take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class RealSteps:
    """Looks on while a model is trained.

    Args:
        model: the model.
        device: where it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = weakref.ref(model)
        self._device = device
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        looking = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps = looking()
            if steps is not None:
                steps._stepped(optimizer)

        self.forget()
        self._hook = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, self._hook.remove)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of this model or of another, has made a step."""
        model = self._model()
        if model is None or optimizer in self._optimizers or optimizer in self._others:
            return
        trained = {id(parameter) for parameter in model.parameters()}
        is_ours = any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"])
        (self._optimizers if is_ours else self._others).add(optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The one that steps the model's parameters; None: none has, or several do, or it does not have all of them."""
        model = self._model()
        if model is None or len(self._optimizers) != 1:
            return None
        optimizer = next(iter(self._optimizers))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        return optimizer if trained <= held else None

    @property
    def peak_bytes(self) -> int | None:
        """The most that steps took since the last plan was made; None: not known."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def forget(self) -> None:
        """Another plan is in place: what measuring, trials and steps took before it is no matter any more."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        """Look on no longer."""
        self._hook.remove()
