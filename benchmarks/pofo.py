"""How long pofo takes, how that grows with stages and slots, and what its slots and its conversion cost.

    python -m benchmarks.pofo [--plot FILE.png]

Synthetic heterogeneous chains (those of `benchmarks.solvers`) and the example networks, at 12 GB/s, after a first call
that compiles. The reach on 2 cores with 50 slots: 1 s for 37 stages, 8 s for 110, 90 s for 339 in under 2 GiB; and 50
slots lose less than 1 % against 200 on the example networks.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

from benchmarks.solvers import chain_of

import lowtide

BANDWIDTH = 12 * 10**9  # the paper's measured link
REACH_SECONDS = {37: 1.0, 110: 8.0, 339: 90.0}
SHARES = (0.2, 0.5)
SLOTS = (12, 25, 50, 100, 200)
EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "chains").glob("**/*.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="draw time against stages and slots into this file")
    options = parser.parse_args()
    solved(chain_of(12), 0.4, 50)
    solved(chain_of(5), 0.6, 50)
    by_stages = [
        point for num_stages in (37, 110, 339) for share in SHARES for point in [stages_row(num_stages, share)]
    ]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"most memory of this process: {most:.2f} GiB\n")
    by_slots = [slots_row(num_stages, slots) for num_stages in (37, 110) for slots in SLOTS]
    print()
    for path in EXAMPLES:
        example_row(path)
    if options.plot:
        draw(options.plot, by_stages, by_slots)


def budget_of(chain: lowtide.Chain, share: float) -> int:
    """A share of the way from the least that pofo needs to what plain training takes."""
    try:
        lowtide.solve(chain, memory_budget=0, strategy="pofo", bandwidth=BANDWIDTH)
    except lowtide.InfeasibleBudgetError as error:
        least = error.minimum_bytes
    high = lowtide.solve(chain, memory_budget="100TiB", strategy="store-all").peak_bytes
    return least + int(share * (high - least))


def solved(chain: lowtide.Chain, share: float, slots: int) -> tuple[lowtide.Solution, float]:
    """Pofo's answer, and the seconds that it took."""
    budget = budget_of(chain, share)
    begin = time.perf_counter()
    solution = lowtide.solve(chain, memory_budget=budget, strategy="pofo", bandwidth=BANDWIDTH, slots=slots)
    return solution, time.perf_counter() - begin


def stages_row(num_stages: int, share: float) -> tuple[int, float, float]:
    chain = chain_of(num_stages)
    solution, seconds = solved(chain, share, 50)
    model = (solution.model_seconds or 0.0) / chain.compute_seconds
    print(
        f"{num_stages:4} stages, 50 slots, share {share}: {seconds:7.2f} s (reach {REACH_SECONDS[num_stages]:g} s), "
        f"step {solution.seconds / chain.compute_seconds:.4f}x, continuous model {model:.4f}x",
        flush=True,
    )
    return num_stages, share, seconds


def slots_row(num_stages: int, slots: int) -> tuple[int, int, float]:
    chain = chain_of(num_stages)
    solution, seconds = solved(chain, 0.2, slots)
    model = (solution.model_seconds or 0.0) / chain.compute_seconds
    print(
        f"{num_stages:4} stages, {slots:3} slots: {seconds:7.2f} s, "
        f"step {solution.seconds / chain.compute_seconds:.4f}x, continuous model {model:.4f}x",
        flush=True,
    )
    return num_stages, slots, seconds


def example_row(path: Path) -> None:
    """What 50 slots lose against 200, and what conversion costs, on one of the example networks."""
    chain = lowtide.Chain.from_dict(json.loads(path.read_text()))
    for share in SHARES:
        few, many = (solved(chain, share, slots)[0] for slots in (50, 200))
        print(
            f"{path.stem:24} share {share}: 50 slots {few.seconds / chain.compute_seconds:.4f}x, 200 slots "
            f"{many.seconds / chain.compute_seconds:.4f}x, loss {100 * (few.seconds / many.seconds - 1):+.2f} %, "
            f"conversion {100 * (few.seconds / (few.model_seconds or few.seconds) - 1):+.2f} %",
            flush=True,
        )


def draw(path: Path, by_stages: list[tuple[int, float, float]], by_slots: list[tuple[int, int, float]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for share in SHARES:
        points = [(stages, seconds) for stages, own, seconds in by_stages if own == share]
        left.loglog(*zip(*points, strict=True), marker="o", label=f"share {share}")
    left.loglog(list(REACH_SECONDS), list(REACH_SECONDS.values()), "k--", label="reach")
    left.set(xlabel="stages", ylabel="solve seconds", title="50 slots")
    for num_stages in dict.fromkeys(entry[0] for entry in by_slots):
        points = [(slots, seconds) for stages, slots, seconds in by_slots if stages == num_stages]
        right.loglog(*zip(*points, strict=True), marker="o", label=f"{num_stages} stages")
    right.set(xlabel="slots", ylabel="solve seconds", title="share 0.2")
    for axes in (left, right):
        axes.legend()
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
