"""transformers' Trainer within a memory budget: `callbacks=[lowtide.TransformersCallback("20GiB")]`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from lowtide.integrations.planned import BudgetedTraining
from lowtide.runtime.fitting.loader import can_read_ahead, largest_batch_of
from lowtide.runtime.model.sample import Sample


class TransformersCallback(TrainerCallback):
    """Keeps a Trainer's steps within a memory budget.

    The plan is made in the first training step, under the Trainer's own precision and with its own arguments, for the
    largest of a few batches (of a stream, an `IterableDataset`, for the first). Accumulation and the optimizer are
    taken from the Trainer. Predicted and measured figures are in the Trainer's logs (`lowtide/...`). When training
    ends, the model is as it was.

    Args:
        memory_budget: bytes that a training step may allocate on the device, such as `"20GiB"`; None: what is free,
            less a reserve.
        options: further arguments of `lowtide.fit`.

    Example:
        trainer = Trainer(model, args, train_dataset=data, callbacks=[lowtide.TransformersCallback("20GiB")])
    """

    def __init__(self, memory_budget: int | str | None = None, **options: Any) -> None:
        self._planned = BudgetedTraining(memory_budget, options)

    @property
    def plan(self) -> Any:
        """The plan; None before the first step."""
        return self._planned.plan

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Wait for the first step."""
        assert model is not None
        _go_first(self)
        self._planned.wait_for(
            [model],
            lambda _, sample: with_largest(sample, train_dataloader),
            optimizer=optimizer,
            grads_resident=args.gradient_accumulation_steps > 1,
            keeps_result=False,  # the Trainer keeps the loss alone
        )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures to what the Trainer logs."""
        figures = self._planned.figures()
        if logs is not None:
            logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Detach the plan."""
        self._planned.detach()


def _go_first(callback: TrainerCallback) -> None:
    """Put a callback before those that report (TensorBoard, wandb), which the Trainer calls first: each is handed the
    dict of what is logged as the one before left it. A callback is not told who calls it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    handler = frame.f_locals.get("self")
    if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)


def with_largest(sample: Sample, loader: Any) -> Sample:
    """A call with the largest of a few batches, if that is larger than its own."""
    loader = getattr(loader, "base_dataloader", loader)  # accelerate wraps loaders
    if loader is None or not can_read_ahead(loader):
        return sample
    largest = largest_batch_of(loader)
    if not isinstance(largest, dict):
        return sample
    shared = {
        name: tensor
        for name, tensor in largest.items()
        if isinstance(tensor, torch.Tensor) and isinstance(sample.kwargs.get(name), torch.Tensor)
    }
    if sum(tensor.nbytes for tensor in shared.values()) <= sum(sample.kwargs[name].nbytes for name in shared):
        return sample
    moved = {name: tensor.to(sample.kwargs[name].device) for name, tensor in shared.items()}
    return Sample(sample.args, {**sample.kwargs, **moved})
