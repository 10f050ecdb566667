"""How long the solvers take, and how that grows with the number of stages.

    python -m benchmarks.solvers [--large]

Synthetic heterogeneous chains at half and at a fifth of what plain training takes; after a first call that compiles.
The reach for `rotor` at 339 stages and 500 slots is 1.5 s; 1000 stages (--large) must complete within 60 s and 8 GiB.
"""

from __future__ import annotations

import argparse
import random
import resource
import time

import lowtide

SHARES = (0.5, 0.2)
STRATEGIES = ("segments", "chen", "revolve", "rotor", "dynamic-selection")


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="1000 stages too")
    large = parser.parse_args().large
    for strategy in STRATEGIES:  # compile
        lowtide.solve(chain_of(6), memory_budget="100TiB", strategy=strategy)
        lowtide.solve(chain_of(40), memory_budget=_budget(chain_of(40), 0.5), strategy=strategy)
    print(f"{'strategy':18} {'stages':>6} {'share':>6} {'solve':>9} {'step':>7}  (step: relative to plain training)")
    for num_stages in (37, 110, 339, *((1000,) if large else ())):
        chain = chain_of(num_stages)
        for strategy in STRATEGIES if num_stages < 1000 else ("rotor",):
            for share in SHARES:
                _report(chain, strategy, share)
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def _budget(chain: lowtide.Chain, share: float) -> int:
    return int(share * lowtide.solve(chain, memory_budget="100TiB", strategy="store-all").peak_bytes)


def _report(chain: lowtide.Chain, strategy: str, share: float) -> None:
    begin = time.perf_counter()
    try:
        solution = lowtide.solve(chain, memory_budget=_budget(chain, share), strategy=strategy)
        step = f"{solution.seconds / chain.compute_seconds:6.3f}x"
    except lowtide.InfeasibleBudgetError:
        step = "does not fit"
    seconds = time.perf_counter() - begin
    print(f"{strategy:18} {chain.num_stages:6} {share:6.2f} {seconds:7.2f} s {step:>7}", flush=True)


if __name__ == "__main__":
    main()
