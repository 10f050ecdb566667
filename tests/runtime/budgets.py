"""Budgets for tests, where `fit` is called twice: to be told the least budget, and to plan for little more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from lowtide.runtime.fitting import ways
from lowtide.runtime.fitting.solving import Settings


@contextmanager
def measured_once() -> Iterator[None]:
    """In here `fit` measures a model once for all budgets: they change nothing about what its stages take.

    All calls inside are for the same sample and differ in their budget alone.
    """
    measured_for, found = ways.measured_for, dict[tuple[int, bool, bool], Any]()

    def once(model: nn.Module, sample: Any, settings: Settings, *others: Any) -> Any:
        key = id(model), settings.bandwidth > 0, settings.finest
        if key not in found:
            found[key] = measured_for(model, sample, settings, *others)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "measured_for", once)
        yield
