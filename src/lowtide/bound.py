"""A proven lower bound on the time of schedules that move weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lowtide.chain import Chain, as_chain
from lowtide.errors import InfeasibleBudgetError, StrategyError
from lowtide.units import format_bytes, parse_bandwidth, parse_bytes

Model = Literal["paper", "lists"]

# Chains up to this length also get the program that looks at each weight by itself: it has some 6 n² variables, which
# takes HiGHS a few seconds here and minutes from 40 stages on, and is rarely above the one that sums them up.
_LARGEST_NUM_STAGES_BY_WEIGHT = 16


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound.

    Attributes:
        seconds: no period is shorter, if every stage runs forward once and only weights and optimizer state move.
        lists_seconds: the same for lowtide's own schedules, in which a value takes its room as soon as its copy is
            queued: at least `seconds`, and at least what `lowtide solve` calls the best.
        compute_seconds: the time of the computations alone.
        gap: how much the program's own optimum may still lie above, as a share of it; 0 where it was found.
        proven_optimal: the program was solved to the gap asked for; False: the time limit came first.
        solve_seconds: how long that took.
    """

    seconds: float
    lists_seconds: float
    compute_seconds: float
    gap: float
    proven_optimal: bool
    solve_seconds: float


def bound(
    chain: Chain | Mapping[str, Any],
    *,
    memory_budget: int | str,
    bandwidth: int | str,
    time_limit: float = 60.0,
    gap: float = 1e-4,
    duplex: bool = True,
    model: Model = "paper",
) -> Bound:
    """Compute a lower bound on the time of every schedule that moves weights (weights paper, section 6).

    The mixed-integer program is solved with HiGHS. What is returned is its dual bound, never the value of a solution
    that was found on the way.

    Args:
        chain: the network, a `Chain` or its plain data.
        memory_budget: bytes on the device, everything included.
        bandwidth: bytes per second each way between device and host.
        time_limit: seconds; what is proven by then is returned.
        gap: stop once the optimum is known to this share.
        duplex: both directions at once.
        model: `"paper"`: what the paper demands of a schedule. `"lists"`: also that a value takes its room as soon as
            its copy is queued, as it does in lowtide's schedules; the bound can only rise.

    Raises:
        InfeasibleBudgetError: if no such schedule stays within the budget.
        StrategyError: for a chain whose weight gradients are resident, and for a wrong limit, gap or model.

    Example:
        >>> from lowtide import Chain, Stage
        >>> stages = [Stage(str(k), 1.0, 2.0, output_bytes=1, saved_bytes=1, weight_bytes=10) for k in range(4)]
        >>> round(bound(Chain("four", stages), memory_budget=30, bandwidth=5).seconds, 3)
        15.2
    """
    begin = time.perf_counter()
    chain, budget, rate = as_chain(chain), parse_bytes(memory_budget), parse_bandwidth(bandwidth)
    _check(chain, rate, time_limit, gap, model)
    from lowtide.strategies.weights.periods import period_of  # scipy comes with it

    period = period_of(chain)
    if budget < period.least_bytes:
        raise InfeasibleBudgetError(
            f"budget {format_bytes(budget)} ({budget} bytes) is below the {format_bytes(period.least_bytes)} "
            f"({period.least_bytes} bytes) that chain {chain.name!r} needs with its weights moved; raise it",
            minimum_bytes=period.least_bytes,
        )
    from lowtide.strategies.weights.bound import program_of
    from lowtide.strategies.weights.relaxation import Relaxation, relaxation_of, relaxed_seconds

    formulations: list[Callable[..., Relaxation]] = [relaxation_of]
    if chain.num_stages <= _LARGEST_NUM_STAGES_BY_WEIGHT:
        formulations.append(program_of)
    best: tuple[float, float, bool] | None = None
    for write in formulations:
        program = write(period, memory_budget=budget, bandwidth=rate, duplex=duplex, whole_values=model == "lists")
        left = max(0.1, time_limit - (time.perf_counter() - begin))
        outcome = program.program.minimize(program.idle, time_limit=left, gap=gap)
        proven = program.seconds(outcome.proven)
        found = None if outcome.found is None else program.seconds(outcome.found)
        open_share = 1.0 if found is None else max(0.0, 1 - proven / found) if found else 0.0
        if best is None or proven > best[0]:
            best = (proven, 0.0 if outcome.done else open_share, outcome.done)
    assert best is not None
    lists_seconds = max(best[0], relaxed_seconds(period, memory_budget=budget, bandwidth=rate, duplex=duplex))
    return Bound(
        lists_seconds if model == "lists" else best[0],
        lists_seconds,
        chain.compute_seconds,
        best[1],
        best[2],
        time.perf_counter() - begin,
    )


def _check(chain: Chain, bandwidth: int, time_limit: float, gap: float, model: str) -> None:
    if chain.grads_resident:
        raise StrategyError(
            f"chain {chain.name!r} accumulates weight gradients (grads_resident), but schedules that move weights "
            "update them inside each backward; use a chain without grads_resident"
        )
    if not bandwidth:
        raise StrategyError("a bound on schedules that move weights needs a bandwidth above 0, for instance 12GB/s")
    if not time_limit > 0:
        raise StrategyError(f"time_limit is {time_limit!r}, expected seconds above 0")
    if not 0 <= gap < 1:
        raise StrategyError(f"gap is {gap!r}, expected a number from 0 to below 1, for instance 0.01")
    if model not in get_args(Model):
        raise StrategyError(f"model is {model!r}, expected one of {', '.join(get_args(Model))}")
