"""A plan: a schedule attached to a model."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lowtide.runtime.executor import ExecutedForward, Step
from lowtide.runtime.file_tier import FileTier
from lowtide.runtime.interception import Interception
from lowtide.runtime.machine import Machine
from lowtide.runtime.program import Program
from lowtide.runtime.split import Split
from lowtide.runtime.staged import Layout
from lowtide.schedule import Schedule


class Plan:
    """A schedule attached to a model; made by `lowtide.fit` and `lowtide.attach`."""

    def __init__(self, model: nn.Module, split: Split, schedule: Schedule) -> None:
        self.split = split
        self.schedule = schedule
        layout = Layout.of(split)
        self.machine = Machine(model, layout, Program.of(schedule, layout.num_stages), FileTier())
        self._interception = Interception(model, layout.units, self._call)
        self._interception.install()

    def detach(self) -> None:
        """Give the model back as it was."""
        self._interception.remove()

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def _call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        current = self._interception.current
        if current.session is not None or not self._applies():
            return plain(*args, **kwargs)
        with self.machine.alone():
            self.machine.refresh()
            step = Step(self.machine)
            current.session = forward = ExecutedForward(self.machine, step)
            try:
                return forward.run(self._interception.whole_or(plain), args, kwargs)
            finally:
                current.session = None

    def _applies(self) -> bool:
        return self.machine.model.training and torch.is_grad_enabled()
