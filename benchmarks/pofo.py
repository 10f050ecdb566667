"""How long pofo takes, how that grows with stages and slots, and what its slots and its conversion cost.

    python -m benchmarks.pofo [--part stages|slots|examples] [--most-stages N] [--bandwidth 12GB/s]
                             [--plot FILE.svg] [--json FILE.json]

Synthetic heterogeneous chains (those of `benchmarks.solvers`) and the example networks, after a first call that
compiles. The reach on 2 cores with 50 slots: 1 s for 37 stages, 8 s for 110, 90 s for 339 in under 2 GiB; and 50 slots
lose less than 1 % against 200 on the example networks. On a machine that others use, seconds of the processor (which
count both threads of the backward phase) say more than those of the clock.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.refusing import Parser, refuse, usable_file
from benchmarks.solvers import chain_of

import lowtide
from lowtide.files import read_json
from lowtide.units import parse_bandwidth

REACH_SECONDS = {37: 1.0, 110: 8.0, 339: 90.0}
SHARES = (0.2, 0.5)
SLOTS = (12, 25, 50, 100, 200)
PARTS = ("stages", "slots", "examples")
EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "chains").glob("**/*.json"))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--most-stages", type=int, default=100, help="skip longer example networks")
    parser.add_argument("--bandwidth", default="12GB/s", help="the default is the paper's measured link")
    parser.add_argument("--plot", type=Path, help="draw time against stages and slots into this file")
    parser.add_argument("--json", type=Path, help="store the figures here; parts that are not run are kept")
    options = parser.parse_args()
    for path in (options.plot, options.json):
        if path is not None:
            usable_file(path)
    try:
        kept = kept_figures(options.json)
        bandwidth = parse_bandwidth(options.bandwidth)
    except lowtide.LowtideError as error:
        refuse(str(error))
    solved(chain_of(12), 0.4, 50, bandwidth)
    solved(chain_of(5), 0.6, 50, bandwidth)
    for part in options.part or PARTS:
        kept[part] = run_part(part, options.most_stages, bandwidth)
        if options.json:
            options.json.write_text(json.dumps(kept, indent=1) + "\n")
    if options.plot and "stages" in kept and "slots" in kept:
        draw(options.plot, kept["stages"], kept["slots"])


def kept_figures(path: Path | None) -> dict[str, Any]:
    """The parts that an earlier run has kept in a file; none where there is no file yet."""
    kept = read_json(path, lowtide.LowtideError) if path is not None and path.exists() else {}
    if not isinstance(kept, dict) or not all(isinstance(rows, list) for rows in kept.values()):
        raise lowtide.LowtideError(f"{path}: is not a file of figures of this command; pass another one")
    return kept


def run_part(part: str, most_stages: int, bandwidth: int) -> list[dict[str, Any]]:
    if part == "stages":
        rows = [row(chain_of(n), share, 50, bandwidth) for n in REACH_SECONDS for share in SHARES]
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"most memory of this process: {most:.2f} GiB", flush=True)
        return [*rows, {"most_gibibytes": most}]
    if part == "slots":
        return [row(chain_of(n), 0.2, slots, bandwidth) for n in (37, 110) for slots in SLOTS]
    chains = [lowtide.Chain.from_dict(json.loads(path.read_text())) for path in EXAMPLES]
    return [
        example_row(chain, share, bandwidth) for chain in chains if chain.num_stages <= most_stages for share in SHARES
    ]


def budget_of(chain: lowtide.Chain, share: float, bandwidth: int) -> int:
    """A share of the way from the least that pofo needs to what plain training takes."""
    try:
        lowtide.solve(chain, memory_budget=0, strategy="pofo", bandwidth=bandwidth)
    except lowtide.InfeasibleBudgetError as error:
        least = error.minimum_bytes
    high = lowtide.solve(chain, memory_budget="100TiB", strategy="store-all").peak_bytes
    return least + int(share * (high - least))


def solved(chain: lowtide.Chain, share: float, slots: int, bandwidth: int) -> tuple[lowtide.Solution, float, float]:
    """Pofo's answer, and the seconds that it took: on the clock and of the processor."""
    budget = budget_of(chain, share, bandwidth)
    begin, used = time.perf_counter(), time.process_time()
    solution = lowtide.solve(chain, memory_budget=budget, strategy="pofo", bandwidth=bandwidth, slots=slots)
    return solution, time.perf_counter() - begin, time.process_time() - used


def row(chain: lowtide.Chain, share: float, slots: int, bandwidth: int) -> dict[str, Any]:
    solution, seconds, processor_seconds = solved(chain, share, slots, bandwidth)
    found = {
        "chain": chain.name,
        "num_stages": chain.num_stages,
        "share": share,
        "slots": slots,
        "bandwidth": bandwidth,
        "solve_seconds": seconds,
        "processor_seconds": processor_seconds,
        "step": solution.seconds / chain.compute_seconds,
        "continuous": (solution.model_seconds or 0.0) / chain.compute_seconds,
    }
    reach = (
        f" (reach {REACH_SECONDS[chain.num_stages]:g} s)" if slots == 50 and chain.num_stages in REACH_SECONDS else ""
    )
    print(
        f"{chain.name:34.34} {chain.num_stages:4} stages, {slots:3} slots, share {share}: {seconds:7.2f} s{reach}, "
        f"processor {processor_seconds:7.2f} s, step {found['step']:.4f}x, continuous model {found['continuous']:.4f}x",
        flush=True,
    )
    return found


def example_row(chain: lowtide.Chain, share: float, bandwidth: int) -> dict[str, Any]:
    """What 50 slots lose against 200, and what conversion costs, on one of the example networks."""
    few, many = (row(chain, share, slots, bandwidth) for slots in (50, 200))
    loss, conversion = few["step"] / many["step"] - 1, few["step"] / few["continuous"] - 1
    print(f"{chain.name:34.34} loss of 50 slots {100 * loss:+.2f} %, conversion {100 * conversion:+.2f} %", flush=True)
    return {"few": few, "many": many, "loss": loss, "conversion": conversion}


def draw(path: Path, by_stages: list[dict[str, Any]], by_slots: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters: fewer bytes
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for share in SHARES:
        points = [(r["num_stages"], r["processor_seconds"]) for r in by_stages if r.get("share") == share]
        left.loglog(*zip(*points, strict=True), marker="o", label=f"share {share}")
    left.loglog(list(REACH_SECONDS), list(REACH_SECONDS.values()), "k--", label="reach")
    left.set(xlabel="stages", ylabel="processor seconds", title="50 slots")
    for num_stages in dict.fromkeys(r["num_stages"] for r in by_slots):
        points = [(r["slots"], r["processor_seconds"]) for r in by_slots if r["num_stages"] == num_stages]
        right.loglog(*zip(*points, strict=True), marker="o", label=f"{num_stages} stages")
    right.set(xlabel="slots", ylabel="processor seconds", title="share 0.2")
    for axes, values in ((left, list(REACH_SECONDS)), (right, list(SLOTS))):
        axes.set_xticks(values, [str(value) for value in values])
        axes.set_xticks([], minor=True)
        axes.legend()
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
