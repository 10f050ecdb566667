"""Compiling the units of a split: each by itself, so that equal ones share one compilation and stages stay apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide.runtime.split import Split


class CompiledUnits:
    """Units that run compiled until `remove` is called.

    Units without submodules (one layer each) stay as they are: there is nothing to fuse in them.

    Args:
        model: the model.
        split: its stages.
        options: for `torch.compile`.
    """

    def __init__(self, model: nn.Module, split: Split, options: Mapping[str, Any]) -> None:
        self._modules: list[nn.Module] = []
        for path in split.paths:
            module = model.get_submodule(path)
            if path and next(module.children(), None) is not None and "_compiled_call_impl" not in vars(module):
                module.compile(**options)
                self._modules.append(module)

    def __len__(self) -> int:
        return len(self._modules)

    def remove(self) -> None:
        """Run them as before."""
        for module in self._modules:
            vars(module).pop("_compiled_call_impl", None)
        self._modules = []
        torch.clear_autocast_cache()
