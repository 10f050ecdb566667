"""What all callbacks share: options, one plan, and the figures they log."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

import lowtide
from lowtide.errors import PlanError
from lowtide.integrations.first_call import FirstCall
from lowtide.runtime.fitting.fit import fit
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.plan.plan import Plan
from lowtide.units import parse_budget

SampleFor = Callable[[nn.Module, Sample], Sample]

_OPTIONS = inspect.signature(fit).parameters.keys() - {"model", "sample", "memory_budget"}

LOGGER = logging.getLogger("lowtide")


class BudgetedTraining:
    """A budget, and the plan that is made for it at the first training call.

    Args:
        memory_budget: bytes, as for `fit`; None: what is free, less a reserve.
        options: further arguments of `fit`; they win over what a framework tells.
    """

    def __init__(self, memory_budget: int | str | None, options: dict[str, Any]) -> None:
        if memory_budget is not None:
            parse_budget(memory_budget)  # what is wrong is refused before training begins
        unknown = next((name for name in options if name not in _OPTIONS), None)
        if unknown is not None:
            raise PlanError(
                f"{unknown}= is not an option of this callback, which takes those of lowtide.fit; model and sample are "
                "those of the first training step"
            )
        self._memory_budget = memory_budget
        self._options = options
        self._waiting: list[FirstCall] = []
        self.plan: Plan | None = None

    def wait_for(self, modules: list[nn.Module], sample_for: SampleFor, **inferred: Any) -> None:
        """Plan when the first of these modules is called in training.

        Args:
            modules: candidates; whichever is called first is planned for.
            sample_for: makes the sample of that module and its call.
            inferred: arguments of `fit` that the framework tells.
        """
        self.detach()

        def on_call(module: nn.Module, sample: Sample) -> None:
            self._stop_waiting()
            options = {**inferred, **self._options}
            self.plan = lowtide.fit(module, sample_for(module, sample), memory_budget=self._memory_budget, **options)
            LOGGER.info("%s", self.plan)

        self._waiting = [FirstCall(module, on_call) for module in modules]
        for layer in self._waiting:
            layer.push()

    @property
    def is_waiting(self) -> bool:
        """Whether the first call is still to come."""
        return bool(self._waiting)

    def _stop_waiting(self) -> None:
        for layer in self._waiting:
            layer.remove()
        self._waiting = []

    def detach(self) -> None:
        """Detach the plan."""
        self._stop_waiting()
        if self.plan is not None:
            self.plan.detach()

    def figures(self) -> dict[str, float]:
        """Predicted and measured figures, by the names that loggers show."""
        if self.plan is None:
            return {}
        stats = self.plan.stats()
        found = {
            "predicted_peak_gib": _in_gib(stats.predicted_peak_bytes),
            "measured_peak_gib": _in_gib(stats.measured_peak_bytes),
            "predicted_seconds": stats.predicted_seconds,
            "measured_seconds": stats.measured_seconds,
        }
        return {f"lowtide/{name}": value for name, value in found.items() if value is not None}


def _in_gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30
