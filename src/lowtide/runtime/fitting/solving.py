"""Solves for a schedule, counting the executor's own work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError
from lowtide.runtime.capture.capture import StageNames
from lowtide.runtime.compile.compiled import Compilation
from lowtide.runtime.execute.checks import Checks
from lowtide.runtime.measure.weights import Optimizer
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import host_bytes
from lowtide.runtime.plan.placing import Placed
from lowtide.schedule import COMPUTATIONS
from lowtide.solve import Solution, solve

# What a repeated forward must gain at the least: the executor's own work for it, which is the host's and in no chain.
# Without it, a network of many small stages has dozens of them repeated one by one for next to nothing. DenseNet-121 on
# an H200, side by side, within 80, 60 and 40 % of plain training's memory: without it 40, 66 and 111 repeated stages in
# 84, 95 and 84 ms, with it 18, 38 and 72 in 67, 70 and 75 ms; 62 to 70 ms were simulated for both. ResNets, whose
# kernels are long, do not notice. Beyond 200 us nothing more is left out.
_RERUN_SECONDS = 50e-6

# What sums in another order differ by.
_NO_WAIT = 1e-9


@dataclass(frozen=True, slots=True)
class Settings:
    """What `fit` was asked for; see there."""

    memory_budget: int
    strategy: str
    bandwidth: int
    host_memory_budget: int | None
    optimizer: Optimizer
    loss: Callable[[Any], Any] | None
    stages: StageNames | None
    grads_resident: bool
    keeps_result: bool
    slots: int | None
    checks: Checks
    progress: Callable[[str, float], None] | None
    compilation: Compilation | None = None
    regions: bool | str = False
    """Compile all that the model does, in regions; `"auto"`: where a trial shows that it is faster."""
    allow_rounding: bool = False
    measures_link: bool = False
    """The bandwidth was measured and not given."""
    step_in_backward: bool = False
    may_move: bool = False
    """Weights may move where nothing else stays within the budget: their optimizer was given."""
    cuda_graphs: bool | str = False
    """Replay steps as CUDA graphs; `"auto"`: where a trial shows that they are faster."""
    placed: Placed | None = None
    """The model's weights are on the lower tier."""
    in_blocks: bool = False
    """Cut between blocks, as where they are compiled, and not inside them."""
    finest: bool = False
    """Cut as finely as helps, since memory is short."""
    most_stages: int = 0
    """Compiled in regions, join stages where there are more than so many; 0: do not."""
    each_trial_compiles: bool = False
    """Regions of another schedule are compiled anew, so that there are few trials."""


def solution_for(chain: Chain, settings: Settings) -> Solution:
    """The fastest schedule within the budgets of the device and of the host."""

    def found(bandwidth: int) -> Solution:
        return solved_for_executor(
            chain,
            memory_budget=settings.memory_budget,
            bandwidth=bandwidth,
            strategy=settings.strategy,
            slots=settings.slots,
            manage_weights=False,
            progress=settings.progress,
        )

    solution = found(settings.bandwidth)
    limit = settings.host_memory_budget
    if limit is not None and host_bytes(chain, solution.schedule) > limit:
        return found(0)  # what would have to be moved has no room: recompute instead
    return solution


def leanest_solution(chain: Chain, settings: Settings) -> Solution:
    """A schedule within the least budget of a chain, the same one whatever stages and the link were measured to take.

    Several may be the leanest by prediction, and differ when they are tried. If it hung on how long stages took this
    time which of them is taken, the next `fit` could refuse the budget that this one has named.
    """
    even, bandwidth = with_even_times(chain)
    bandwidth = bandwidth if settings.bandwidth else 0
    found = leanest_of(lambda **asked: solution_for(even, replace(settings, bandwidth=bandwidth, **asked)))
    return replace(found, bandwidth=settings.bandwidth).on(chain)


def leanest_of(solved: Callable[..., Solution]) -> Solution:
    """What a solver, called with a `memory_budget`, finds within the least that works."""
    least = 1
    while True:
        try:
            return solved(memory_budget=least)
        except InfeasibleBudgetError as error:  # of a schedule that the host has no room for, where one is found there
            if error.minimum_bytes <= least:  # it would be asked for without end
                raise
            least = error.minimum_bytes


def cuts_the_peak(finest: Split, split: Split, leanest: Solution) -> bool:
    """Whether the finest split cuts the stage in which the leanest schedule for another one takes the most."""
    operation = leanest.trace.steps[leanest.trace.peak_index].operation
    if not isinstance(operation, COMPUTATIONS):
        return True
    return split.stages[operation.stage - 1].units not in {stage.units for stage in finest.stages}


def with_even_times(chain: Chain) -> tuple[Chain, int]:
    """A chain whose computations each take a second, and a link that copies in one what a stage holds on average."""
    num_bytes = sum(
        stage.saved_bytes + stage.weight_bytes + stage.weight_grad_bytes + stage.optimizer_bytes
        for stage in chain.stages
    )
    return chain.with_times(lambda _: 1.0, lambda _: 1.0), max(1, num_bytes // chain.num_stages)


def solved_for_executor(chain: Chain, *, memory_budget: int, bandwidth: int = 0, **settings: Any) -> Solution:
    """A schedule that is chosen with the executor's own work counted, and simulated on the chain as it is.

    The counted chain takes longer for first forwards, too. That is no matter for recomputation; but copies that are
    hidden behind those forwards may not be behind real ones (DenseNet-121 on an H200 within the middle of its memory:
    pofo's schedule for the counted chain is simulated to wait 8.8 ms, that for the chain itself not at all). So where
    computations wait for copies, the better of the schedules for both is taken. Where they do not, none is better by
    what is compared: it takes no longer on the counted chain than on the chain itself with its forwards counted.

    Args:
        chain: what the stages cost.
        memory_budget: bytes of the device.
        bandwidth: bytes per second of the link to the host; 0: there is none.
        settings: others of `lowtide.solve`.

    Raises:
        InfeasibleBudgetError: where there is none for either.
    """
    found, refused = list[Solution](), list[InfeasibleBudgetError]()
    for each in (with_reruns_counted(chain), chain):
        try:
            solution = solve(each, memory_budget=memory_budget, bandwidth=bandwidth or None, **settings).on(chain)
        except InfeasibleBudgetError as error:  # what needs which memory may depend on times, where values move
            refused.append(error)
        else:
            found.append(solution)
        if not bandwidth or (found and _cannot_be_better(found[0], memory_budget)):
            break
    if not found:
        try:
            raise min(refused, key=lambda error: error.minimum_bytes)
        finally:
            refused.clear()  # their tracebacks have this frame: a batch would stay until the collector comes
    return min(found, key=lambda way: (way.peak_bytes > memory_budget, _counted_seconds(way)))


def _cannot_be_better(solution: Solution, memory_budget: int) -> bool:
    """Whether a schedule for the counted chain is also the best for the chain itself: no computation waits."""
    return solution.peak_bytes <= memory_budget and solution.idle_seconds <= _NO_WAIT * solution.seconds


def _counted_seconds(solution: Solution) -> float:
    return solution.seconds + _RERUN_SECONDS * solution.trace.num_recomputed


def with_reruns_counted(chain: Chain) -> Chain:
    """A chain to solve for: each forward takes a little longer, so that one more of them must be worth it."""
    return chain.with_times(lambda seconds: seconds + _RERUN_SECONDS, lambda seconds: seconds)
