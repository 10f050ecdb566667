"""Train PyTorch networks under a memory budget.

Give lowtide the device memory you have. It measures each stage of the model, computes the fastest schedule of
recomputation and offloading within that budget, and runs it inside your unchanged training loop.

    plan = lowtide.fit(model, (x,), memory_budget="8GiB")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowtide.bound import Bound, bound
from lowtide.chain import Chain, SideValue, Stage, Variant
from lowtide.compare import Comparison, compare
from lowtide.errors import (
    CaptureError,
    ChainError,
    ExecutionError,
    InfeasibleBudgetError,
    LowtideError,
    LowtideWarning,
    PlanError,
    SampleError,
    ScheduleError,
    SizesError,
    StrategyError,
    UnitError,
)
from lowtide.frontier import Frontier, frontier
from lowtide.schedule import Await, Backward, Forward, Offload, Prefetch, Release, Schedule, Update
from lowtide.select import Selection, select
from lowtide.simulate import simulate
from lowtide.solve import Solution, solve
from lowtide.trace import Trace

if TYPE_CHECKING:
    from lowtide.integrations.lightning import LightningCallback
    from lowtide.integrations.transformers import TransformersCallback
    from lowtide.runtime.execute.executor import is_recomputing
    from lowtide.runtime.fitting.estimate import Estimate, estimate
    from lowtide.runtime.fitting.fit import fit
    from lowtide.runtime.fitting.largest import LargestBatch, largest_batch
    from lowtide.runtime.measure.measure import measure
    from lowtide.runtime.plan.attach import attach
    from lowtide.runtime.plan.load import load_plan
    from lowtide.runtime.plan.plan import Plan

# What imports torch is imported when it is first used.
_LAZY = {
    "LightningCallback": "lowtide.integrations.lightning",
    "TransformersCallback": "lowtide.integrations.transformers",
    "LargestBatch": "lowtide.runtime.fitting.largest",
    "Estimate": "lowtide.runtime.fitting.estimate",
    "Plan": "lowtide.runtime.plan.plan",
    "attach": "lowtide.runtime.plan.attach",
    "estimate": "lowtide.runtime.fitting.estimate",
    "fit": "lowtide.runtime.fitting.fit",
    "is_recomputing": "lowtide.runtime.execute.executor",
    "measure": "lowtide.runtime.measure.measure",
    "largest_batch": "lowtide.runtime.fitting.largest",
    "load_plan": "lowtide.runtime.plan.load",
}

__version__ = "0.1.0"

__all__ = [
    "Await",
    "Backward",
    "Bound",
    "CaptureError",
    "Chain",
    "ChainError",
    "Comparison",
    "Estimate",
    "ExecutionError",
    "Forward",
    "Frontier",
    "InfeasibleBudgetError",
    "LargestBatch",
    "LightningCallback",
    "LowtideError",
    "LowtideWarning",
    "Offload",
    "Plan",
    "PlanError",
    "Prefetch",
    "Release",
    "SampleError",
    "Schedule",
    "ScheduleError",
    "Selection",
    "SideValue",
    "SizesError",
    "Solution",
    "Stage",
    "StrategyError",
    "Trace",
    "TransformersCallback",
    "UnitError",
    "Update",
    "Variant",
    "__version__",
    "attach",
    "bound",
    "compare",
    "estimate",
    "fit",
    "frontier",
    "is_recomputing",
    "largest_batch",
    "load_plan",
    "measure",
    "select",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
