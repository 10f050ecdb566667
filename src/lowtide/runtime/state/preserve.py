"""Runs a model and restores everything afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide.runtime.meter import exclude
from lowtide.runtime.state.cells import Cells
from lowtide.runtime.state.environment import Backup, hook_tables, remove_hooks
from lowtide.runtime.state.rng import Generators
from lowtide.runtime.state.surroundings import kernels_now, set_kernels


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore, at the end of the `with` block, whatever running the model changes.

    That is: the modules' cells (attributes, modes, hooks, and what containers and objects among them hold), the
    contents of their tensors, gradients, the states of the random number generators (torch's, Python's, numpy's, and
    the modules' own), and torch's switches. Hooks on parameters do not run inside: one may be an optimizer's step.
    """
    look = Cells(model.named_modules()).look()
    parameters = list(model.parameters())
    tensors = [*look.kept().contents()[0], *model.buffers()]
    backups = [Backup(parameter, None) for parameter in parameters]
    backups += [Backup(tensor, _to_host) for tensor in {id(t): t for t in tensors}.values()]
    gradients = [(tensor, tensor.grad) for tensor in (*parameters, *tensors) if tensor.is_leaf]
    generators, first_hook = Generators.of(model), RemovableHandle.next_id
    hooks = [(table, dict(table)) for table in hook_tables(parameters)]
    random, kernels, is_grad_enabled = generators.state(), kernels_now(), torch.is_grad_enabled()
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        look.restore()
        for backup in backups:
            backup.restore()
        for tensor, gradient in gradients:
            tensor.grad = gradient
        remove_hooks(parameters, first_hook)
        for table, found in hooks:
            table.update(found)
        generators.set(random)
        set_kernels(kernels)
        torch.set_grad_enabled(is_grad_enabled)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, not counted where that is the device: training has no such copies, trial steps show what
    it takes. Tables, queues and quantised weights may be large.
    """
    is_moved = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    return exclude(tensor.to("cpu", copy=True)) if is_moved else tensor.clone()
