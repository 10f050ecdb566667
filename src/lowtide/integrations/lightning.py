"""Lightning within a memory budget: `L.Trainer(callbacks=[lowtide.LightningCallback("20GiB")])`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data import DataLoader

from lowtide.errors import PlanError, shown
from lowtide.integrations.planned import BudgetedTraining
from lowtide.runtime.fitting.loader import can_read_ahead, largest_batch_of
from lowtide.runtime.model.sample import Sample

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback  # type: ignore[assignment]


class LightningCallback(Callback):
    """Keeps the training steps of a LightningModule within a memory budget.

    What is planned for is the network that `training_step` calls first: the LightningModule itself (`self(x)`) or one
    of its children (`self.network(x)`); the plan is made in that call, under the Trainer's precision, for the largest
    of a few batches where the network is called with tensors of the batch (of a stream, an `IterableDataset`, for the
    first). Accumulation and the optimizers are taken from the Trainer. Predicted and measured figures go to its loggers
    (`lowtide/...`). When training ends, the module is as it was.

    Args:
        memory_budget: bytes that a training step may allocate on the device, such as `"20GiB"`; None: what is free,
            less a reserve.
        module: the name of the submodule to plan for, where `training_step` calls several.
        options: further arguments of `lowtide.fit`.

    Example:
        L.Trainer(callbacks=[lowtide.LightningCallback("20GiB")]).fit(module, loader)
    """

    def __init__(self, memory_budget: int | str | None = None, *, module: str | None = None, **options: Any) -> None:
        if not isinstance(module, str | None):
            raise PlanError(f"module is {shown(module)}, expected the name of a submodule, such as 'network'")
        self._module = module
        self._steps_in_backward = bool(options.get("step_in_backward"))
        self._batch: Any = None
        self._planned = BudgetedTraining(memory_budget, options)

    @property
    def plan(self) -> Any:
        """The plan; None before the first step."""
        return self._planned.plan

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the first step."""
        if self._steps_in_backward and pl_module.automatic_optimization:
            raise PlanError(
                "Lightning runs forward and backward inside the optimizer's step, so the first step has begun when "
                "LightningCallback plans, and cannot become one that updates weights in backward; leave out "
                "step_in_backward=True, or step by hand (self.automatic_optimization = False)"
            )

        def sample_for(module: nn.Module, sample: Sample) -> Sample:
            _check_holds_all(pl_module, module, self._module)
            batch, self._batch = self._batch, None
            return with_largest(sample, batch, trainer.train_dataloader)

        self._planned.wait_for(
            self._candidates(pl_module),
            sample_for,
            optimizer=tuple(trainer.optimizers) or None,
            grads_resident=trainer.accumulate_grad_batches > 1,
        )

    def _candidates(self, pl_module: nn.Module) -> list[nn.Module]:
        if self._module is None:
            return [pl_module, *(child for child in pl_module.children() if any(True for _ in child.parameters()))]
        try:
            return [pl_module.get_submodule(self._module)]
        except AttributeError:
            names = ", ".join(repr(name) for name, _ in pl_module.named_children())
            raise PlanError(f"module={self._module!r} is not a submodule; this LightningModule has {names}") from None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the batch from which the first call's arguments are taken."""
        if self._planned.is_waiting:
            self._batch = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures as often as the Trainer logs."""
        if trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
            figures = self._planned.figures()
            for logger in trainer.loggers if figures else ():
                logger.log_metrics(figures, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach the plan."""
        self._planned.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach the plan."""
        self._planned.detach()


def with_largest(sample: Sample, batch: Any, loader: Any) -> Sample:
    """A call with the tensors of the largest of a few batches in place of the current batch's own, where all of its
    tensors are those.
    """
    if not isinstance(loader, DataLoader) or not can_read_ahead(loader):
        return sample
    now, form = tree_flatten(batch)
    largest, largest_form = tree_flatten(largest_batch_of(loader))
    others: dict[int, torch.Tensor] = {id(one): other for one, other in zip(now, largest, strict=False)}
    if form != largest_form or not all(isinstance(others.get(id(t)), torch.Tensor) for t in sample.tensors()):
        return sample
    if sum(others[id(t)].nbytes for t in sample.tensors()) <= sum(t.nbytes for t in sample.tensors()):
        return sample

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        return others[id(tensor)].to(tensor.device, tensor.dtype)

    args, kwargs = tree_map_only(torch.Tensor, exchanged, (sample.args, dict(sample.kwargs)))
    return Sample(args, kwargs)


def _check_holds_all(pl_module: nn.Module, module: nn.Module, named: str | None) -> None:
    """Refuse to plan for a part of what is trained, unless the user has named it."""
    held = {id(parameter) for parameter in module.parameters()}
    other = next((name for name, p in pl_module.named_parameters() if p.requires_grad and id(p) not in held), None)
    if other is not None and named is None:
        raise PlanError(
            f"training_step first calls a submodule without {other!r}, so a plan for it would miss part of what is "
            "trained; call self(x) in training_step, with everything in forward, or name the submodule to plan for: "
            'LightningCallback(..., module="network")'
        )
