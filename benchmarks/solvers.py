"""How long the solvers take, and how that grows with the number of stages.

    python -m benchmarks.solvers [--large]

Synthetic heterogeneous chains at half and at a fifth of what plain training takes, and ResNet-1001 as measured; after a
first call that compiles, the best of three. The reach for `rotor` at 339 stages and 500 slots is 1.5 s on two cores;
1000 stages (--large) must complete within 60 s and 8 GiB. CPU seconds are those of all threads: with both cores free
the solve takes half of them.
"""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path

from benchmarks.refusing import Parser

import lowtide

SHARES = (0.5, 0.2)
STRATEGIES = ("segments", "chen", "revolve", "rotor", "dynamic-selection")
RESNET1001 = Path(__file__).parents[1] / "examples" / "chains" / "h200" / "resnet1001-b64-224.json"
NUM_RUNS = 3


def chain_of(num_stages: int) -> lowtide.Chain:
    """Sizes and times that vary by a factor of four, as in the networks of the papers."""
    rng = random.Random(num_stages)
    stages = []
    for k in range(num_stages):
        output = rng.randint(10, 40) * 2**20
        saved = output + rng.randint(10, 120) * 2**20
        seconds = rng.uniform(0.5e-3, 2e-3)
        stages.append(lowtide.Stage(f"stage {k}", seconds, 2 * seconds, output, saved))
    return lowtide.Chain(f"{num_stages} stages", stages, input_bytes=20 * 2**20)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--large", action="store_true", help="1000 stages too")
    large = parser.parse_args().large
    for strategy in STRATEGIES:  # compile
        lowtide.solve(chain_of(6), memory_budget="100TiB", strategy=strategy)
        lowtide.solve(chain_of(40), memory_budget=_budget(chain_of(40), 0.5), strategy=strategy)
        lowtide.solve(chain_of(150), memory_budget=_budget(chain_of(150), 0.5), strategy=strategy)
    print("step: relative to plain training; kind: optimal in exact bytes, or by so many slots")
    print(f"{'strategy':18} {'stages':>6} {'share':>6} {'solve':>9} {'cpu':>9} {'step':>8}  kind")
    for num_stages in (37, 110, 339, *((1000,) if large else ())):
        chain = chain_of(num_stages)
        for strategy in STRATEGIES if num_stages < 1000 else ("rotor",):
            for share in SHARES:
                _report(chain, strategy, share)
    for share in SHARES:
        _report(lowtide.Chain.load(RESNET1001), "rotor", share)
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def _budget(chain: lowtide.Chain, share: float) -> int:
    return int(share * lowtide.solve(chain, memory_budget="100TiB", strategy="store-all").peak_bytes)


def _report(chain: lowtide.Chain, strategy: str, share: float) -> None:
    budget, best, cpu, step, kind = _budget(chain, share), float("inf"), 0.0, "does not fit", ""
    for _ in range(NUM_RUNS if chain.num_stages < 1000 else 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        try:
            solution = lowtide.solve(chain, memory_budget=budget, strategy=strategy)
        except lowtide.InfeasibleBudgetError:
            solution = None
        if time.perf_counter() - begin < best:
            best, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    if solution is not None:
        step = f"{solution.seconds / chain.compute_seconds:7.4f}x"
        if "slots" in solution.details:
            kind = f"{solution.details['slots']} slots"
        elif solution.lower_bound_seconds is not None:
            kind = "optimal"
    print(f"{strategy:18} {chain.num_stages:6} {share:6.2f} {best:7.3f} s {cpu:7.3f} s {step:>8}  {kind}", flush=True)


if __name__ == "__main__":
    main()
