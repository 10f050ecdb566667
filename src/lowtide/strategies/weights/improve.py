"""How `auto` improves the greedy answer for weights, beyond the paper: other selections, placed the same way.

Algorithm 2 places a given selection nearly as well as the lower bound allows; what costs time at low bandwidths is the
selection. Two sources of better ones: the program behind the bound, solved coarsely at its first node, says which
weights it would move; and from the best so far, single choices are added and taken out while that helps.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.schedule import Backward, Forward, Release
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.weights.choices import Choice, choices_of, typical_bytes
from lowtide.strategies.weights.periods import Period, cyclic_schedule, period_of, without_vain_copies
from lowtide.strategies.weights.relaxation import relaxation_of
from lowtide.strategies.weights.transfers import Placed, place

# An answer this near to its lower bound is left alone.
_CLOSE_ENOUGH = 1e-3
# Bytes held back for weights on their way, in typical weights; other reserves hardly ever won.
_RESERVES = (1.0, 2.0, 3.0)
# The program is looked at in this many points, and for so long; a minute of it finds little that this does not.
_NUM_POINTS = 32
_LARGEST_SECONDS_OF_PROGRAM = 3.0
# How many changes of one choice are tried; a try takes some 2 ms for 74 stages, 10 times that for 1000.
_LARGEST_NUM_TRIES = 400


def improve(problem: Problem, answer: Answer, seconds: float) -> Answer | None:
    """Look for a faster schedule than a strategy's answer.

    Args:
        problem: what it answers.
        answer: from a strategy that manages weights.
        seconds: its simulated period.

    Returns:
        A faster answer, or None.
    """
    bound = answer.lower_bound_seconds or 0.0
    period = period_of(problem.chain)
    best: tuple[Placed, list[Choice]] | None = None
    for chosen in _selections_of_the_program(period, problem):
        if (placed := _placed(period, problem, chosen)) is not None and (
            best is None or placed.seconds < best[0].seconds
        ):
            best = (placed, chosen)
    if best is None or best[0].seconds > seconds:
        known = _selection_of(period, answer)
        placed = _placed(period, problem, known)
        best = best if placed is None or (best and best[0].seconds <= placed.seconds) else (placed, known)
    if best is None:
        return None
    placed = _climb(period, problem, *best, bound * (1 + _CLOSE_ENOUGH))
    if placed.seconds >= seconds * (1 - 1e-9):
        return None
    schedule = cyclic_schedule(answer.schedule.strategy, period.num_stages, without_vain_copies(placed.operations))
    return Answer(schedule, None, answer.lower_bound_seconds, {"cut": placed.cut, "greedy_seconds": seconds})


def is_close(answer: Answer, seconds: float) -> bool:
    """Whether an answer is so close to its lower bound that a search cannot help."""
    return answer.lower_bound_seconds is not None and seconds <= answer.lower_bound_seconds * (1 + _CLOSE_ENOUGH)


def _placed(
    period: Period, problem: Problem, chosen: Sequence[Choice], cuts: Sequence[int] | None = None
) -> Placed | None:
    return place(
        period,
        chosen,
        memory_budget=problem.memory_budget,
        bandwidth=problem.bandwidth,
        duplex=problem.duplex,
        cuts=cuts,
    )


def _selections_of_the_program(period: Period, problem: Problem) -> list[list[Choice]]:
    """What the program behind the bound would move, for several reserves."""
    choices, found = choices_of(period), []
    for reserve in _RESERVES:
        budget = problem.memory_budget - int(reserve * typical_bytes(choices))
        if budget < period.least_bytes:
            continue
        program = relaxation_of(
            period,
            memory_budget=budget,
            bandwidth=problem.bandwidth,
            duplex=problem.duplex,
            whole_values=True,
            num_points=_NUM_POINTS,
        )
        outcome = program.program.minimize(
            program.idle, gap=_CLOSE_ENOUGH, node_limit=1, time_limit=_LARGEST_SECONDS_OF_PROGRAM
        )
        if outcome.solution is not None:
            made = {("w", False): program.after_backward, ("w", True): program.after_forward}
            made["opt", False] = program.around
            found.append([c for c in choices if outcome.solution[made[c.kind, c.clean][c.stage - 1]] > 0.5])
    return found


def _selection_of(period: Period, answer: Answer) -> list[Choice]:
    """The choices that a schedule makes: each value that is released, after a forward or after a backward."""
    after: set[tuple[str, int, bool]] = set()
    was_forward: dict[int, bool] = {}  # by stage, its last computation
    for turn in range(2):  # in the first, to know what came last before the period begins
        for operation in answer.schedule.operations:
            if isinstance(operation, Forward | Backward):
                was_forward[operation.stage] = isinstance(operation, Forward)
            elif turn and isinstance(operation, Release):
                clean = operation.kind == "w" and was_forward[operation.stage]
                after.add((operation.kind, operation.stage, clean))
    return [choice for choice in choices_of(period) if (choice.kind, choice.stage, choice.clean) in after]


def _climb(period: Period, problem: Problem, placed: Placed, chosen: list[Choice], enough: float) -> Placed:
    """Add and take out single choices while that helps, round and round, within a number of tries."""
    choices, current = choices_of(period), {(c.kind, c.stage, c.clean) for c in chosen}
    since_better = 0
    for attempt in range(_LARGEST_NUM_TRIES):
        if since_better == len(choices) or placed.seconds <= enough:
            break
        changed = choices[attempt % len(choices)]
        trial = current ^ {(changed.kind, changed.stage, changed.clean)}
        near = range(max(0, placed.cut - 1), placed.cut + 2)
        selection = [c for c in choices if (c.kind, c.stage, c.clean) in trial]
        found = _placed(period, problem, selection, near)
        since_better += 1
        if found is not None and found.seconds < placed.seconds * (1 - 1e-9):
            placed, current, since_better = found, trial, 0
    return placed
