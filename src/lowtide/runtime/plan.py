"""A plan: what `lowtide.fit` and `lowtide.attach` return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lowtide.runtime.execution import Execution
from lowtide.runtime.interception import ModelSite, attached_site


@dataclass(frozen=True, slots=True)
class Stats:
    """Predicted against measured; None where it is not known (yet)."""

    num_steps: int
    predicted_seconds: float | None
    measured_seconds: float | None
    """From the start of forward to the end of backward, the median of the last steps."""
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    recomputed_per_step: float
    """How many stages run forward again in a step."""
    moved_bytes_per_step: float
    """Bytes copied between device and host in a step, both ways."""


class Plan:
    """A schedule attached to a model.

    The model object is the user's own, with its type, its parameter names and its state; it is used as before. A call
    runs under the schedule where the model is in training mode and gradients are enabled, and plainly otherwise.
    """

    def __init__(self, model: nn.Module, make: Callable[[Callable[..., Any]], Execution]) -> None:
        previous = attached_plan(model)
        if previous is not None:
            previous.detach()
        self.model = model
        self._execution = make(self._call)
        self._execution.install()
        self._attached = True

    # What it is

    @property
    def is_attached(self) -> bool:
        """Whether the model runs under it."""
        return self._attached

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The names of the stages."""
        return self._execution.machine.layout.names

    def stats(self) -> Stats:
        """What was predicted, and what has been measured since."""
        execution = self._execution
        counters, predicted = execution.machine.counters, execution.schedule.predicted
        steps = max(1, counters.num_steps)
        return Stats(
            counters.num_steps,
            None if predicted is None else predicted.seconds,
            execution.measured_seconds(),
            None if predicted is None else predicted.peak_bytes,
            None,
            counters.num_recomputed / steps,
            counters.moved_bytes / steps,
        )

    # Attaching

    def detach(self) -> None:
        """Give the model back as it was; graphs that are still alive can be used as before."""
        if self._attached:
            self._attached = False
            self._execution.remove()

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def _call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        applies = self._attached and self.model.training and torch.is_grad_enabled()
        if not applies or self._execution.is_busy or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        return self._execution.call(plain, args, kwargs)


def attached_plan(model: nn.Module) -> Plan | None:
    """The plan under which a model runs, where there is one."""
    site = attached_site(model)
    if isinstance(site, ModelSite):
        owner = getattr(site.handler, "__self__", None)
        if isinstance(owner, Plan):
            return owner
    return None
