"""lowtide trains PyTorch networks that do not fit.

State one number, the device memory you have; lowtide measures each stage of the model, computes the fastest schedule of
recomputation and offloading that stays under it, and runs it inside your unchanged training loop.

    plan = lowtide.fit(model, (x,), memory_budget="8GiB")
"""

from __future__ import annotations

from lowtide.chain import Chain, Stage, Variant
from lowtide.errors import (
    CaptureError,
    ChainError,
    InfeasibleBudgetError,
    LowtideError,
    ScheduleError,
    SizesError,
    StrategyError,
    UnitError,
)
from lowtide.schedule import Await, Backward, Forward, Offload, Prefetch, Release, Schedule
from lowtide.select import Selection, select
from lowtide.simulate import simulate
from lowtide.solve import Solution, solve
from lowtide.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "Await",
    "Backward",
    "CaptureError",
    "Chain",
    "ChainError",
    "Forward",
    "InfeasibleBudgetError",
    "LowtideError",
    "Offload",
    "Prefetch",
    "Release",
    "Schedule",
    "ScheduleError",
    "Selection",
    "SizesError",
    "Solution",
    "Stage",
    "StrategyError",
    "Trace",
    "UnitError",
    "Variant",
    "__version__",
    "select",
    "simulate",
    "solve",
]
