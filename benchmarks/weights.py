"""How long it takes to plan the moves of weights, and to prove a lower bound.

    python -m benchmarks.weights

Each figure is the shortest of several calls after one that compiles. The reach: greedy for 128 stages under 1 s and for
1000 under 60 s, the bound for 74 stages within 60 s. Chains are transformers of blocks of 432 MiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lowtide
from lowtide import Chain, Stage

MiB = 2**20
NUM_CALLS = 3


def transformer(num_stages: int) -> Chain:
    """Blocks of 432 MiB and 0.33 s between an embedding of 612 MiB and a loss."""
    kept = {"output_bytes": 20 * MiB, "saved_bytes": 20 * MiB}
    blocks = [Stage(f"block {k}", 0.08, 0.25, weight_bytes=432 * MiB, **kept) for k in range(num_stages - 2)]
    embedding = Stage("embedding", 0.0, 0.0, weight_bytes=612 * MiB, **kept)
    return Chain(f"{num_stages} stages", [embedding, *blocks, Stage("loss", 0.0, 0.0, output_bytes=0, saved_bytes=0)])


def shortest(call: Callable[[], Any], num_calls: int = NUM_CALLS) -> tuple[float, Any]:
    """The shortest of several calls, and what the last one returned."""
    seconds, result = [], None
    for _ in range(num_calls):
        begin = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), result


def main() -> None:
    lowtide.solve(transformer(10), memory_budget="3GiB", strategy="weights-greedy", bandwidth="3GB/s")
    print(f"{'what':16} {'stages':>6} {'memory':>8} {'GB/s':>5} {'seconds':>8} {'period':>9} {'above bound':>11}")
    for num_stages, gibibytes, reach in ((74, 8, None), (128, 16, 1), (1000, 110, 60)):
        chain = transformer(num_stages)
        for gigabytes in (12, 2):
            given = {"memory_budget": f"{gibibytes}GiB", "bandwidth": f"{gigabytes}GB/s"}

            def plan(chain: Chain = chain, given: dict[str, str] = given) -> lowtide.Solution:
                return lowtide.solve(chain, strategy="weights-greedy", **given)

            seconds, solution = shortest(plan)
            above = f"{solution.seconds / solution.lower_bound_seconds - 1:.2%}"
            figures = (
                f"{num_stages:6} {gibibytes:5} GiB {gigabytes:5} {seconds:8.2f} {solution.seconds:8.2f}s {above:>11}"
            )
            print(f"{'weights-greedy':16} {figures}" + (f"  (reach {reach} s)" if reach else ""))
    for gigabytes in (12, 3, 2, 1):
        given = {"memory_budget": "8GiB", "bandwidth": f"{gigabytes}GB/s"}

        def prove(given: dict[str, str] = given) -> lowtide.Bound:
            return lowtide.bound(transformer(74), time_limit=60.0, **given)

        seconds, proven = shortest(prove, 1)
        state = "optimal" if proven.proven_optimal else f"open {proven.gap:.2%}"
        size = f"{74:6} {8:4} GiB {gigabytes:5}"
        print(f"{'bound':16} {size} {seconds:8.2f} {proven.seconds:8.2f}s {state:>11}  (reach 60 s)")


if __name__ == "__main__":
    main()
