"""`lowtide solve`: a schedule within a budget."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from lowtide.chain import Chain
from lowtide.cli.options import (
    Bandwidth,
    ChainFile,
    HalfDuplex,
    Json,
    Slots,
    bandwidth_option,
    bytes_option,
    strategy_names,
)
from lowtide.cli.output import moved, output_of_others_aside, print_json, print_pairs, print_table, step_time
from lowtide.errors import InfeasibleBudgetError
from lowtide.files import check_can_write
from lowtide.progress import DelayedProgress
from lowtide.report import chart_text
from lowtide.solve import Candidate, Solution, solve
from lowtide.strategies.base import AUTO, find
from lowtide.units import format_bytes, format_seconds

Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="BYTES",
        help="The budget: all bytes on the device, such as 8GiB, 512MiB, 8GB or 1234.",
        show_default=False,
    ),
]
StrategyName = Annotated[
    str,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="A name from 'lowtide strategies'; auto takes the fastest that leaves weights on the device.",
        autocompletion=strategy_names,
    ),
]
Segments = Annotated[
    int | None,
    typer.Option(
        "--segments", metavar="K", help="For strategy segments: their number; else the best.", show_default=False
    ),
]
StepInBackward = Annotated[
    bool,
    typer.Option("--step-in-backward", help="For strategy joint: update each stage right after its backward."),
]
OutputFile = Annotated[
    str | None,
    typer.Option("-o", "--output", metavar="SCHEDULE.json", help="Write the schedule here.", show_default=False),
]

EXAMPLES = (
    "lowtide solve chain.json --memory 8GiB",
    "lowtide solve chain.json --memory 8GiB --strategy rotor -o schedule.json",
    "lowtide solve chain.json --memory 6GiB --bandwidth 12GB/s --json",
)


def command(
    chain_file: ChainFile,
    memory: Memory,
    strategy: StrategyName = AUTO,
    bandwidth: Bandwidth = None,
    slots: Slots = None,
    segments: Segments = None,
    half_duplex: HalfDuplex = False,
    step_in_backward: StepInBackward = False,
    output: OutputFile = None,
    json: Json = False,
) -> None:
    """Compute a schedule that stays within a memory budget.

    Prints its time, its peak and its idle time as the simulator sees them. Strategies that move weights are tried only
    where --strategy names them; of these, joint can be executed, and the others only be simulated. Exit status 3: the
    budget cannot be met; the least that can is printed.
    """
    budget, rate = bytes_option("--memory", memory), bandwidth_option(bandwidth)
    chain = Chain.load(chain_file)
    if output is not None:
        check_can_write(output, chain_file)
    begin = time.perf_counter()
    try:
        with output_of_others_aside(), DelayedProgress() as progress:
            solution = solve(
                chain,
                memory_budget=budget,
                strategy=strategy,
                bandwidth=rate,
                slots=slots,
                segments=segments,
                duplex=not half_duplex,
                step_in_backward=step_in_backward,
                progress=progress,
            )
    except InfeasibleBudgetError as error:
        if json:
            print_json(_infeasible(strategy, budget, error.minimum_bytes, time.perf_counter() - begin))
        raise
    if output is not None:
        solution.schedule.save(output)
    if json:
        print_json(_solved(solution))
    else:
        _print_solution(chain, solution, output)


def _infeasible(strategy: str, budget: int, minimum_bytes: int, solve_seconds: float) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "feasible": False,
        "seconds": None,
        "peak_bytes": None,
        "idle_seconds": None,
        "solve_seconds": solve_seconds,
        "memory_budget": budget,
        "minimum_bytes": minimum_bytes,
    }


def _solved(solution: Solution) -> dict[str, Any]:
    trace = solution.trace
    return {
        "strategy": solution.strategy,
        "feasible": True,
        "seconds": solution.seconds,
        "peak_bytes": solution.peak_bytes,
        "idle_seconds": solution.idle_seconds,
        "solve_seconds": solution.solve_seconds,
        "memory_budget": solution.memory_budget,
        "bandwidth": solution.bandwidth,
        "model_seconds": solution.model_seconds,
        "lower_bound_seconds": solution.lower_bound_seconds,
        "num_operations": len(trace.steps),
        "num_recomputed": trace.num_recomputed,
        "moved_bytes": trace.moved_bytes,
        "candidates": [_candidate(candidate) for candidate in solution.candidates],
        "details": dict(solution.details),
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": candidate.strategy,
        "feasible": candidate.seconds is not None,
        "seconds": candidate.seconds,
        "peak_bytes": candidate.peak_bytes,
        "minimum_bytes": candidate.minimum_bytes,
    }


def _print_solution(chain: Chain, solution: Solution, output: str | None) -> None:
    trace = solution.trace
    pairs = [
        ("chain", f"{chain.name}, {chain.num_stages} stages"),
        ("strategy", solution.strategy),
        ("time", step_time(solution.seconds, chain, trace.update_seconds)),
        ("peak", f"{format_bytes(solution.peak_bytes)} of {format_bytes(solution.memory_budget)}"),
        ("recomputed", f"{trace.num_recomputed} forwards"),
    ]
    if trace.copies:
        pairs.append(("moved", moved(trace)))
    if solution.lower_bound_seconds and solution.seconds > solution.lower_bound_seconds * (1 + 1e-9):
        above = solution.seconds / solution.lower_bound_seconds - 1
        pairs.append(
            ("at best", f"{format_seconds(solution.lower_bound_seconds)} for such moves; this is {above:.1%} more")
        )
    if trace.copies and solution.model_seconds:
        more = solution.seconds / solution.model_seconds - 1
        pairs.append(
            (
                "model",
                f"{format_seconds(solution.model_seconds)} if memory were freed bit by bit; as it is {more:+z.1%}",
            )
        )
    if solution.schedule.manages:
        pairs.append(("note", _how_to_train(solution)))
    pairs.append(("solved in", format_seconds(solution.solve_seconds)))
    if output is not None:
        pairs.append(("written to", output))
    print_pairs(pairs)
    print()
    print(chart_text(trace, memory_budget=solution.memory_budget))
    if len(solution.candidates) > 1:
        print()
        print_table(
            ("strategy", "time", "peak", "least memory"),
            [_row(candidate, solution.strategy) for candidate in solution.candidates],
        )
        print()
        print("* taken, the fastest; least memory: what a strategy needs that does not fit")


def _how_to_train(solution: Solution) -> str:
    """What a schedule that manages weights is for."""
    if find(solution.strategy).lists_updates:
        return f"to train so: lowtide.fit with strategy={solution.strategy!r} and optimizer="
    what = "moves weights" if solution.trace.moved_bytes else "updates each stage's weights inside its backward"
    return f"{what}: for the simulator only; to train, leave --strategy out"


def _row(candidate: Candidate, best: str) -> tuple[str, str, str, str]:
    if candidate.seconds is None or candidate.peak_bytes is None:
        return candidate.strategy, "-", "-", format_bytes(candidate.minimum_bytes or 0)
    mark = " *" if candidate.strategy == best else ""
    return candidate.strategy + mark, format_seconds(candidate.seconds), format_bytes(candidate.peak_bytes), ""
