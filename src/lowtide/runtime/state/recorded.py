"""What modules keep and a recorded forward changes, buffers, numbers and lists: what each stage found, so that it finds
the same when it runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from lowtide.runtime.model.split import Split
from lowtide.runtime.state.attributes import Noted, StageAttributes
from lowtide.runtime.state.exchange import put
from lowtide.runtime.state.lists import Found, StageLists
from lowtide.runtime.state.mentions import names


class _Found(NamedTuple):
    """A buffer at one moment: the tensor that stood in its place, and a copy of what it held."""

    tensor: torch.Tensor
    value: torch.Tensor

    @classmethod
    def now(cls, tensor: torch.Tensor) -> _Found:
        return cls(tensor, tensor.detach().clone())

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether the same tensor stands there and holds the same; sparse ones count as unchanged."""
        if tensor is not self.tensor or tensor.layout is not torch.strided:
            return tensor is self.tensor
        return torch.equal(tensor, self.value)


class _Place:
    """One buffer of the model in the course of a forward."""

    __slots__ = ("_changes", "_last", "_table", "name", "path")

    def __init__(self, path: str, table: dict[str, torch.Tensor | None], name: str) -> None:
        self.path = path
        self.name = name
        self._table = table
        self._changes: list[tuple[int, _Found]] = []  # the stage that changed it, and what that stage found
        tensor = self.tensor
        self._last = None if tensor is None else _Found.now(tensor)

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._table.get(self.name)

    @property
    def changes(self) -> bool:
        return bool(self._changes)

    def look(self, k: int) -> None:
        """Stage k has run."""
        tensor = self.tensor
        if tensor is None or self._last is None or self._last.is_still(tensor):
            return
        self._changes.append((k, self._last))
        self._last = _Found.now(tensor)

    def put_back(self, k: int) -> None:
        """Make it what stage k found."""
        found = next((found for stage, found in self._changes if stage >= k), self._last)
        assert found is not None
        self._table[self.name] = found.tensor
        found.tensor.data.copy_(found.value)  # no version is counted: nobody else is to notice


class RecordedState:
    """The buffers of a model, and the plain attributes and lists of its modules, in the course of one forward.

    A stage may change those of its units, those of modules that lie around units, and buffers that the code of such a
    module names; after a stage these buffers are compared with what they held before.

    Args:
        model: the model, before its forward.
        split: its stages.
    """

    def __init__(self, model: nn.Module, split: Split) -> None:
        places: dict[tuple[int, str], _Place] = {}
        for path, module in model.named_modules():
            for name in module._buffers:
                places[id(module), name] = _Place(f"{path}.{name}" if path else name, module._buffers, name)
        units = [[model.get_submodule(unit.path) for unit in stage.units] for stage in split.stages]
        own = [{id(inner) for unit in stage for inner in unit.modules()} for stage in units]
        inside = set().union(*own)
        around = [module for module in model.modules() if id(module) not in inside]
        modules = [[*(inner for unit in stage for inner in unit.modules()), *around] for stage in units]
        self._attributes = [StageAttributes(each) for each in modules]
        self._lists = [StageLists(each) for each in modules]
        self._values: dict[int, tuple[Noted, Sequence[Found | None]]] = {}  # of both, when a stage began
        named = {name for name in {key[1] for key in places} if any(names(module, name) for module in around)}
        self._own = [[place for key, place in places.items() if key[0] in modules] for modules in own]
        self._others = [place for key, place in places.items() if key[0] not in inside or key[1] in named]

    @property
    def changing(self) -> list[str]:
        """The paths of those that the forward changed."""
        places = {id(place): place for own in (*self._own, self._others) for place in own}
        return sorted(place.path for place in places.values() if place.changes)

    def of_units(self, k: int) -> list[torch.Tensor]:
        """The buffers of stage k's units."""
        return [tensor for place in self._own[k - 1] if (tensor := place.tensor) is not None]

    def begin(self, k: int) -> None:
        """Stage k begins in the recorded forward."""
        self._values[k] = self._attributes[k - 1].before(), self._lists[k - 1].before()

    def end(self, k: int) -> None:
        """Stage k has run in the recorded forward."""
        for place in (*self._own[k - 1], *self._others):
            place.look(k)

    def put_back(self, k: int) -> None:
        """Let stage k find what it found in the recorded forward."""
        for place in (*self._own[k - 1], *self._others):
            if place.changes:
                place.put_back(k)
        attributes, lists = self._values[k]
        for entry in self._attributes[k - 1].changed_since(attributes):
            put(entry)
        self._lists[k - 1].put_back(lists)
