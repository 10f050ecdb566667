"""How long it takes to choose checkpoints for a list of sizes, and how that grows.

    python -m benchmarks.selection

Each figure is the processor time of the best of several calls of `lowtide.select`, after one call that compiles; the
list is checked and converted each time. The reach is 0.2 s for a million sizes with the linear algorithm, and a time
that grows linearly.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable

import lowtide

NUM_CALLS = 5
LINEAR_LENGTHS = (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000)
QUADRATIC_LENGTHS = (5_000, 10_000, 20_000)
STATIC_LENGTHS = (250, 500, 1_000)


def sizes_of(kind: str, length: int) -> list[int]:
    """A list of sizes: random, rising, falling or all equal."""
    rng = random.Random(length)
    if kind == "equal":
        return [2**20] * length
    sizes = [rng.randrange(2**20) for _ in range(length)]
    if kind != "random":
        sizes.sort(reverse=kind == "falling")
    return array("q", sizes).tolist()  # new numbers in the order of the list: a sorted list's are scattered in memory


def best_seconds(call: Callable[[], object]) -> float:
    """The shortest of several calls, after one that does not count."""
    call()
    seconds = []
    for _ in range(NUM_CALLS):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def main() -> None:
    print(f"{'model':8} {'algorithm':10} {'sizes':8} {'number':>9} {'seconds':>9} {'ns a size':>10} {'growth':>7}")
    for kind in ("random", "rising", "falling", "equal"):
        report("dynamic", "linear", kind, LINEAR_LENGTHS)
    report("dynamic", "quadratic", "random", QUADRATIC_LENGTHS)
    report("static", "linear", "random", STATIC_LENGTHS)


def report(model: str, algorithm: str, kind: str, lengths: tuple[int, ...]) -> None:
    before = None
    for length in lengths:
        sizes = sizes_of(kind, length)
        seconds = best_seconds(lambda sizes=sizes: lowtide.select(sizes, model=model, algorithm=algorithm))
        growth = f"{seconds / before:.2f}x" if before else ""  # each list is twice as long as the one before
        named = algorithm if model == "dynamic" else "-"
        print(f"{model:8} {named:10} {kind:8} {length:9} {seconds:9.4f} {1e9 * seconds / length:10.0f} {growth:>7}")
        before = seconds


if __name__ == "__main__":
    main()
