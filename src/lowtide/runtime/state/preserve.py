"""Runs a model and restores everything afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide.runtime.meter import exclude
from lowtide.runtime.model.containers import reached_by
from lowtide.runtime.state.cells import Cells, fill, is_of_user, is_settings
from lowtide.runtime.state.environment import Backup, hook_tables, remove_hooks
from lowtide.runtime.state.rng import Generators
from lowtide.runtime.state.surroundings import kernels_now, set_kernels

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# How far from a hook to look for what it fills: lists in a dict of an object. What is longer is data.
_DEEPEST = 3
_LONGEST = 1000


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore, at the end of the `with` block, whatever running the model changes.

    That is: the modules' cells (attributes, modes, hooks, and what containers and objects among them hold), the
    containers and objects that their hooks fill, the contents of their tensors, gradients, the states of the random
    number generators (torch's, Python's, numpy's, and the modules' own), and torch's switches. Hooks on parameters do
    not run inside: one may be an optimizer's step.
    """
    look = Cells(model.named_modules()).look()
    parameters = list(model.parameters())
    filled = [(container, _copied(container)) for container in _filled_by_hooks(model)]
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
        for container, content in filled:
            fill(container, content)
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


def _filled_by_hooks(model: nn.Module) -> list[Any]:
    """The containers that hooks of modules can fill (features that a loop collects, counters of an object)."""
    hooks = [hook for module in model.modules() for name in _HOOKS for hook in vars(module)[name].values()]
    users = [hook for hook in hooks if is_of_user(getattr(hook, "func", hook))]  # that of a partial
    pending = [(value, 0) for hook in users for value in reached_by(hook)]
    found, own = dict[int, Any](), set(map(id, model.modules()))
    while pending:
        value, depth = pending.pop()
        is_beside = isinstance(value, nn.Module) and id(value) not in own
        content = vars(value) if is_beside or is_settings(value) else value
        if not isinstance(content, list | dict | deque | set) or id(content) in found:
            continue
        found[id(content)] = content
        if depth < _DEEPEST and len(content) <= _LONGEST:
            pending += [(each, depth + 1) for each in (content.values() if isinstance(content, dict) else content)]
    return list(found.values())


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, not counted where that is the device: training has no such copies, trial steps show what
    it takes. Tables, queues and quantised weights may be large.
    """
    is_moved = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    return exclude(tensor.to("cpu", copy=True)) if is_moved else tensor.clone()
