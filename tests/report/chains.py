"""Chains and schedules made by hand: pictures can be checked against what they are known to hold."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from typing import Any

from lowtide import Await, Backward, Chain, Forward, Offload, Prefetch, Release, Schedule, Stage, simulate
from lowtide.report.survey import Curve, Point, ShownPlan, Survey

MIB = 2**20


def small_chain() -> Chain:
    """Four stages with every kind of byte that a chain knows."""
    stages = [
        Stage("stem", 1e-3, 2e-3, output_bytes=8 * MIB, saved_bytes=20 * MIB, forward_extra_bytes=3 * MIB),
        Stage("block.1", 2e-3, 4e-3, output_bytes=8 * MIB, saved_bytes=30 * MIB, weight_bytes=2 * MIB),
        Stage("block.2", 2e-3, 4e-3, output_bytes=8 * MIB, saved_bytes=30 * MIB, backward_extra_bytes=5 * MIB),
        Stage("head", 1e-3, 1e-3, output_bytes=1 * MIB, saved_bytes=1 * MIB, weight_bytes=MIB, optimizer_bytes=MIB),
    ]
    return Chain("small", stages, input_bytes=4 * MIB, base_bytes=MIB)


def recomputing_schedule() -> Schedule:
    """Keeps a[0] and what stages 3 and 4 save, and runs stages 1 and 2 again."""
    forward = [Forward(1, "keep"), Forward(2, "drop"), Forward(3, "all"), Forward(4, "all")]
    backward = [Backward(4), Backward(3), Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1)]
    return Schedule("by hand", [*forward, *backward])


def moving_schedule() -> Schedule:
    """Each computation once; abar[1] goes to the host and comes back too late, so that compute waits for it."""
    return Schedule(
        "by hand",
        [
            Forward(1, "all"),
            Forward(2, "all"),
            Offload("abar", 1),
            Forward(3, "all"),
            Release("abar", 1),
            Forward(4, "all"),
            Backward(4),
            Backward(3),
            Prefetch("abar", 1),
            Await("abar", 1),
            Backward(2),
            Backward(1),
        ],
    )


def deep_chain(num_stages: int = 339) -> Chain:
    """A residual network's shape: sizes halve four times, times and bytes differ a little from stage to stage."""
    stages = []
    for k in range(1, num_stages + 1):
        level = 4 * (k - 1) // num_stages
        output = (64 * MIB >> level) + 4096 * (k % 7)
        stages.append(
            Stage(
                f"layer{level + 1}.{k}",
                (1.0 + 0.1 * (k % 5)) * 1e-3,
                (2.1 + 0.2 * (k % 3)) * 1e-3,
                output_bytes=output,
                saved_bytes=4 * output + 8192 * (k % 11),
                forward_extra_bytes=output // 2,
                backward_extra_bytes=output,
                weight_bytes=MIB << level,
            )
        )
    return Chain(f"residual network, {num_stages} stages", stages, input_bytes=12 * MIB, base_bytes=300 * MIB)


def periodic_schedule(num_stages: int, segment: int) -> Schedule:
    """Periodic checkpointing: each segment but the last runs twice."""
    operations: list[Forward | Backward] = []
    starts = list(range(1, num_stages + 1, segment))
    for start in starts[:-1]:
        operations.append(Forward(start, "keep"))
        operations.extend(Forward(k, "drop") for k in range(start + 1, start + segment))
    for start in reversed(starts):
        stages = range(start, min(start + segment, num_stages + 1))
        operations.extend(Forward(k, "all") for k in stages)
        operations.extend(Backward(k) for k in reversed(stages))
    return Schedule("by hand", operations)


def store_all_schedule(num_stages: int) -> Schedule:
    """Everything once."""
    stages = range(1, num_stages + 1)
    return Schedule("store-all", [*(Forward(k, "all") for k in stages), *(Backward(k) for k in reversed(stages))])


def periodic_survey(chain: Chain, *, memory_budget: int | None = None) -> Survey:
    """A survey without a solver: store-all, and periodic checkpointing in 3, 4, … segments."""
    store_all = store_all_schedule(chain.num_stages)
    lengths = {-(-chain.num_stages // parts) for parts in range(3, chain.num_stages // 2 + 1)}
    schedules = [periodic_schedule(chain.num_stages, length) for length in sorted(lengths)]
    points = [point_of(chain, "segments", schedule) for schedule in schedules]
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    last = point_of(chain, "store-all", store_all)
    curves = (
        Curve("store-all", last.peak_bytes, (last,), (), 0),
        Curve("segments", kept[0].peak_bytes, tuple(kept), (), 0),
    )
    plans = [ShownPlan(p.peak_bytes + MIB, p.schedule, simulate(chain, p.schedule)) for p in (*kept, last)]
    if memory_budget is not None:
        best = curves[1].at(memory_budget)
        plans.append(ShownPlan(memory_budget, best.schedule, simulate(chain, best.schedule)))
        plans.sort(key=lambda plan: plan.memory_budget)
    return Survey(chain, 0, True, simulate(chain, store_all), curves, tuple(plans))


def bare_survey(chain: Chain) -> Survey:
    """A survey that knows plain training alone."""
    point = point_of(chain, "store-all", store_all_schedule(chain.num_stages))
    trace = simulate(chain, point.schedule)
    plan = ShownPlan(point.peak_bytes, point.schedule, trace)
    return Survey(chain, 0, True, trace, (Curve("store-all", point.peak_bytes, (point,), (), 0),), (plan,))


def point_of(chain: Chain, strategy: str, schedule: Schedule) -> Point:
    trace = simulate(chain, schedule)
    return Point(strategy, trace.peak_bytes, trace.seconds, replace(schedule, strategy=strategy))


def data_of(page: str) -> dict[str, Any]:
    """What a report page holds."""
    packed = re.search('<script type="application/octet-stream" id="data">(.*?)</script>', page)
    assert packed is not None
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))
