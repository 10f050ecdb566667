"""The environments of a recorded forward's stages: each sees what it saw, whenever it runs."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.runtime.model.split import Split
from lowtide.runtime.state.cells import Look
from lowtide.runtime.state.environment import Environment, History, Mark, Together, write


class RecordedState:
    """The environments of all stages in the course of one forward.

    Args:
        model: the model, before its forward.
        split: its stages.
    """

    def __init__(self, model: nn.Module, split: Split) -> None:
        units = [list(dict.fromkeys(unit.path for unit in stage.units)) for stage in split.stages]
        self._modules = [
            [(name, module) for path in paths for name, module in model.get_submodule(path).named_modules(prefix=path)]
            for paths in units
        ]
        inside = {name for modules in self._modules for name, _ in modules}
        around = [(name, module) for name, module in model.named_modules() if name not in inside]
        together = Together()
        self._environments = [Environment(modules, around, together) for modules in self._modules]
        self._names = {id(buffer): name for name, buffer in model.named_buffers()}
        self._marks: dict[int, Mark] = {}
        self._history = History()
        self._last: dict[int, torch.Tensor] = {}

    @property
    def changing(self) -> list[str]:
        """The paths of the buffers that the forward changed."""
        return sorted(self._names[id(tensor)] for tensor in self._history.tensors() if id(tensor) in self._names)

    def of_units(self, k: int) -> list[torch.Tensor]:
        """The buffers of stage k's units."""
        modules = {id(module): module for _, module in self._modules[k - 1]}.values()
        return [tensor for module in modules for tensor in module._buffers.values() if tensor is not None]

    def look(self, k: int) -> Look:
        """What the cells of stage k hold now."""
        return self._environments[k - 1].look()

    def begin(self, k: int) -> None:
        """Stage k is about to make its first call in the recorded forward."""
        self._marks[k] = self._environments[k - 1].mark(observes=True)

    def has_begun(self, k: int) -> bool:
        """Whether it has."""
        return k in self._marks

    def end(self, k: int) -> None:
        """Stage k has run in the recorded forward."""
        self._environments[k - 1].end(self._marks[k], k, self._history)

    def finish(self) -> None:
        """The recorded forward has ended."""
        self._last = {id(tensor): tensor.detach().clone() for tensor in self._history.tensors()}

    def put_back(self, k: int) -> None:
        """Let stage k find what it found in the recorded forward."""
        changes = ((tensor, self._history.next_change(tensor, k)) for tensor in self._history.tensors())
        write((t, self._last[id(t)] if change is None or change[1] is None else change[1]) for t, change in changes)
        self._environments[k - 1].restore(self._marks[k])
