"""Watches real training steps: which optimizer makes them, and what they take."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.runtime.meter import StepMeter, is_excluded

# On the CPU the first steps are measured: the first optimizer step makes its state, the second shows what stays. Later
# ones are at steps whose number is a power of two, so that what it costs goes to nothing.
_NUM_MEASURED = 3


class RealSteps:
    """Watches a model while it trains.

    On CUDA the allocator has the figures. On the CPU some steps are measured, from the model's forward to the end of
    the optimizer's step, or to the next forward.

    Args:
        model: the model.
        device: where it is.
        measures: whether what steps take is of interest.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, measures: bool = True) -> None:
        self._model = weakref.ref(model)
        self._device = device
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._meter = StepMeter()
        self._is_metered = measures and device.type == "cpu"
        self._peak_bytes: int | None = None
        self._own_peak_bytes = 0
        self._num_begun = 0
        self._result_bytes: int | None = None
        self._planned_others_bytes = 0
        self._others_bytes = 0
        self.forget()
        looking = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps = looking()
            if steps is not None:
                steps._stepped(optimizer)

        self._hook = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, _ended, self._hook, self._meter)

    # The optimizer

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of this model or of another, has made a step."""
        if optimizer not in self._optimizers and optimizer not in self._strangers:
            model = self._model()
            trained = set[int]() if model is None else set(map(id, model.parameters()))
            is_ours = any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"])
            (self._optimizers if is_ours else self._strangers).add(optimizer)
        if optimizer in self._optimizers:
            self.end()

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

    # What steps take

    def begin(self, planned_others_bytes: int) -> None:
        """A forward of a training step begins, under a plan that was made while others held so much."""
        self.end()
        self._planned_others_bytes = planned_others_bytes
        self._num_begun += 1
        if not self._is_metered or not self._is_measured():
            return
        live_bytes = self._meter.open()
        if live_bytes is not None:
            self._others_bytes = live_bytes - self._known_bytes()

    def _is_measured(self) -> bool:
        return self._num_begun <= _NUM_MEASURED or self._num_begun & (self._num_begun - 1) == 0

    def returned(self, result_bytes: int) -> None:
        """The forward has returned so much; where that is more than before, the next steps are measured."""
        if self._result_bytes is not None and result_bytes > self._result_bytes:
            self._num_begun = 0
        self._result_bytes = max(result_bytes, self._result_bytes or 0)

    def end(self) -> None:
        """The step, if one is measured, is over."""
        peak_bytes = self._meter.close()
        if peak_bytes is not None:
            self._peak_bytes = max(peak_bytes, self._peak_bytes or 0)
            more_bytes = max(0, self._others_bytes - self._planned_others_bytes)
            self._own_peak_bytes = max(peak_bytes - more_bytes, self._own_peak_bytes)

    @property
    def peak_bytes(self) -> int | None:
        """The most that real steps took since the last plan was made; None: not known."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) if self._num_begun else None
        return self._peak_bytes

    @property
    def own_peak_bytes(self) -> int:
        """The same without what the process holds on the CPU since then that is not the model's or its optimizer's."""
        return (self.peak_bytes or 0) if self._device.type == "cuda" else self._own_peak_bytes

    def forget(self) -> None:
        """Another plan is in place: what measuring, trials and steps took before it is no matter any more."""
        self._meter.close()
        self._peak_bytes, self._own_peak_bytes, self._num_begun = None, 0, 0
        self._result_bytes = None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def others_bytes(self) -> int:
        """What other code than the model and its optimizers holds on the CPU now."""
        live_bytes = self._meter.open() if self._is_metered else None
        self._meter.close()
        return 0 if live_bytes is None else live_bytes - self._known_bytes()

    def _known_bytes(self) -> int:
        """The bytes of the model's parameters, buffers and gradients, and of its optimizers' state."""
        model = self._model()
        tensors: list[torch.Tensor] = [] if model is None else [*model.parameters(), *model.buffers()]
        tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        for optimizer in self._optimizers:
            states = (state.values() for state in optimizer.state.values() if isinstance(state, dict))
            tensors += [value for values in states for value in values if isinstance(value, torch.Tensor)]
        return _storage_bytes(tensors)

    def close(self) -> None:
        """Stop watching."""
        self.end()
        self._hook.remove()


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return sum({storage._cdata: storage.nbytes() for storage in storages if not is_excluded(storage)}.values())


def _ended(hook: Any, meter: StepMeter) -> None:
    """The plan is gone."""
    hook.remove()
    meter.close()
