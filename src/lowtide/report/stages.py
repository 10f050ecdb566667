"""What a schedule does with each stage: how often it runs, and where its activations go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.schedule import Forward, Offload, Schedule
from lowtide.trace import Trace

# Where the activations of a stage go after its first forward, by the letter that stands for it in the page's data.
FATES = {
    "s": "saved on the device",
    "h": "saved, moved to the host",
    "k": "output kept, rest recomputed",
    "m": "output moved to the host, rest recomputed",
    "d": "dropped, recomputed",
}


@dataclass(frozen=True, slots=True)
class StageUse:
    """One stage in one schedule."""

    num_forwards: int
    fate: str
    """A letter of `FATES`."""
    variant: int
    """The variant that its backward runs as."""
    moved_bytes: int
    """All bytes of the stage that are copied, activations, side values and weights, both ways."""


def stage_uses(chain: Chain, schedule: Schedule, trace: Trace) -> tuple[StageUse, ...]:
    """What a schedule does with each stage, stage 1 first."""
    num_forwards: Counter[int] = Counter()
    first: dict[int, Forward] = {}
    variants: dict[int, int] = {}
    offloaded: set[tuple[str, int]] = set()
    for operation in schedule.operations:
        if isinstance(operation, Forward):
            num_forwards[operation.stage] += 1
            first.setdefault(operation.stage, operation)
            if operation.save == "all":
                variants[operation.stage] = operation.variant
        elif isinstance(operation, Offload):
            offloaded.add(operation.value)
    moved: Counter[int] = Counter()
    for copy in trace.copies:
        kind, k = copy.value
        moved[chain.side_value(k).maker if kind == "s" else k] += copy.num_bytes
    return tuple(
        StageUse(num_forwards[k], _fate(k, first, offloaded), variants.get(k, 0), moved[k])
        for k in range(1, chain.num_stages + 1)
    )


def _fate(k: int, first: dict[int, Forward], offloaded: set[tuple[str, int]]) -> str:
    if first[k].save == "all":
        return "h" if ("abar", k) in offloaded else "s"
    if ("a", k) in offloaded:
        return "m"
    # The next stage's first forward decides whether a[k] outlives it.
    follower = first.get(k + 1)
    return "d" if follower is None or follower.save == "drop" else "k"
