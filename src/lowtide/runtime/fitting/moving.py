"""Plans that move weights, weight gradients and optimizer state as well: what counts, and where that is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.runtime.execute.program import (
    as_executed,
    is_stepping_in_backward,
    num_late_fetches,
    with_late_fetches,
)
from lowtide.runtime.execute.stepping import check_can_move, movable_parameters
from lowtide.runtime.execute.weights import MANAGED
from lowtide.runtime.fitting.solving import Settings, solution_for, with_even_times
from lowtide.runtime.measure.weights import Optimizer, optimizer_state_bytes, update_figures, updates_of
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import check_steps_alone, device_of, host_bytes
from lowtide.runtime.transfer.arena import rounded
from lowtide.runtime.transfer.bandwidth import measured_bandwidth
from lowtide.runtime.transfer.file_tier import FileTier
from lowtide.runtime.transfer.pinned_tier import PinnedTier
from lowtide.schedule import Offload, Predicted, Release, Update, Value
from lowtide.solve import Solution, solve
from lowtide.strategies.base import AUTO
from lowtide.trace import Trace
from lowtide.units import format_bytes

STRATEGY = "joint"


# Into how many parts the fetches are divided that may be the next step's.
_NUM_LATE = 8

# A schedule that moves weights must take at most this share of what another takes that leaves them on the device: steps
# of such schedules were seen to take up to 28 % longer than simulated on an H200 and 2 % longer than trial steps, and
# loops have more to heed while weights move.
_WORTH = 0.9

# The share of a budget that is left at the least when a trial step has corrected the prediction: as close as that
# predictions are promised to be.
_LEFT = 0.95

# An activation is some storages, each of which takes whole blocks of the lower tier: so many blocks more at the most.
_PIECES = 32

# The leanest schedule is sought for two links, one so many times slower: values that are fetched early have room during
# passes, but not beside an optimizer's step. Of five networks one needed 8 % less with the slow link, one 2 % less with
# the other; more speeds gave nothing.
_SLOW = 16


@dataclass(frozen=True, slots=True)
class Moving:
    """A chain whose weights may move.

    Args:
        chain: parameters that stay on the device (those that two stages share) are in its base.
        step_bytes: what the optimizer's step of each stage takes for its own duration.
        rest_bytes: the same for the parameters that stay.
        mirror_bytes: the room of each value on the lower tier.
        moved: the ids of the parameters that may move, by stage.
        state_bytes: the optimizer's state of each parameter, by its id.
        bandwidth: bytes per second each way while both are busy, which they mostly are.
        moves_activations: schedules may move activations, too.
        placed: the values that are on the lower tier whatever a schedule does: weights that came from the CPU.
        solved: what was solved for while it was planned: most budgets are asked for more than once.
    """

    chain: Chain
    step_bytes: tuple[int, ...]
    rest_bytes: int
    mirror_bytes: Mapping[Value, int]
    moved: Mapping[int, frozenset[int]]
    state_bytes: Mapping[int, int]
    bandwidth: int
    moves_activations: bool = True
    placed: frozenset[Value] = frozenset()
    solved: dict[tuple[Chain, int, int, bool], Solution | int] = field(default_factory=dict, compare=False, repr=False)

    def with_chain(self, chain: Chain) -> Moving:
        """The same with other figures of the stages."""
        return replace(self, chain=chain)

    @property
    def step_bytes_by_stage(self) -> dict[int, int]:
        """What steps take, by stage; 0: that of the parameters that stay."""
        return dict(enumerate((self.rest_bytes, *self.step_bytes)))

    @property
    def movable(self) -> frozenset[int]:
        """The ids of all parameters that may move; their optimizer state moves by itself."""
        return frozenset(key for own in self.moved.values() for key in own)


def why_not(model: nn.Module, settings: Settings) -> str:
    """Why weights of a model cannot be moved; empty if they can."""
    if settings.strategy not in (AUTO, STRATEGY):
        return f"strategy {settings.strategy!r} moves activations alone"
    if not settings.bandwidth:
        return "nothing is offloaded (bandwidth=0); leave bandwidth= out to have it measured"
    if settings.compilation is not None:
        return "stages are compiled"
    if settings.cuda_graphs is True:
        return "steps are to be replayed as CUDA graphs (cuda_graphs=True)"
    try:
        check_steps_alone(check_can_move(model, settings.optimizer))
    except PlanError as error:
        return str(error)
    return ""


def moves_in_any_case(model: nn.Module, settings: Settings) -> bool:
    """Whether weights move because that was asked for by name.

    Raises:
        PlanError: where they cannot.
    """
    if settings.strategy != STRATEGY and not settings.step_in_backward:
        return False
    reason = why_not(model, settings)
    if reason:
        asked = f"strategy {STRATEGY!r}" if settings.strategy == STRATEGY else "step_in_backward=True"
        raise PlanError(f"{asked} moves weights, but they cannot live on the host: {reason}")
    return True


def resident_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """What weights, their gradients and the optimizer's state take."""
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    state = sum(optimizer_state_bytes(optimizer, model.parameters()).values())
    return sum(parameter.nbytes for parameter in model.parameters()) + gradients + state


def moving_chain(model: nn.Module, split: Split, chain: Chain, settings: Settings) -> Moving:
    """What a chain is where its weights move, with the times of the optimizer's steps."""
    smallest_bytes = (PinnedTier if device_of(model).type == "cuda" else FileTier).smallest_bytes
    homes = () if settings.placed is None else settings.placed.homes
    optimizer, movable = settings.optimizer, movable_parameters(model, split, smallest_bytes, homes)
    assert isinstance(optimizer, torch.optim.Optimizer)
    state_bytes = optimizer_state_bytes(optimizer, model.parameters())
    moved = {k: frozenset(map(id, own)) for k, own in movable.items()}
    movable_ids = frozenset(key for own in moved.values() for key in own)
    stages, step_bytes, mirrors = [], [], dict[Value, int]()
    updates = updates_of(optimizer, [movable[k] for k in range(1, chain.num_stages + 1)])
    for k, (stage, update) in enumerate(zip(chain.stages, updates, strict=True), start=1):
        own = movable[k]
        trained = [parameter for parameter in own if parameter.requires_grad]
        stages.append(
            replace(
                stage,
                weight_bytes=_num_bytes(own),
                weight_grad_bytes=_num_bytes(trained),
                optimizer_bytes=sum(state_bytes.get(id(parameter), 0) for parameter in trained),
                update_seconds=update.seconds,
            )
        )
        step_bytes.append(update.extra_bytes)
        mirrors["w", k] = sum(map(_room, own))
        mirrors["g", k] = sum(map(_room, trained))
        # State has the parameter's shape, or is so small that a block of the tier holds it.
        mirrors["opt", k] = sum(rounded(state_bytes.get(id(p), 0)) + 4 * rounded(1) for p in trained)
    staying = chain.fixed_bytes - sum(s.weight_bytes + s.optimizer_bytes for s in stages)
    gradients = sum(s.weight_grad_bytes for s in chain.stages) - sum(s.weight_grad_bytes for s in stages)
    base_bytes = staying + (-sum(s.weight_grad_bytes for s in stages) if chain.grads_resident else gradients)
    rest = [parameter for parameter in model.parameters() if id(parameter) not in movable_ids]
    found = replace(chain, base_bytes=max(0, base_bytes), stages=tuple(stages))
    rest_bytes = update_figures(optimizer, rest).extra_bytes
    both_ways = measured_bandwidth(device_of(model), both_ways=True) if settings.measures_link else settings.bandwidth
    placed = frozenset() if settings.placed is None else frozenset(value for value in mirrors if value[0] == "w")
    return Moving(found, tuple(step_bytes), rest_bytes, mirrors, moved, state_bytes, both_ways, placed=placed)


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _room(tensor: torch.Tensor) -> int:
    return rounded(tensor.numel() * tensor.element_size())


def joint_solution(moving: Moving, settings: Settings, *, is_leanest: bool = False) -> Solution:
    """The fastest schedule found within the budgets of device and host, the optimizer's own memory included.

    Where the host has no room for activations besides, they stay on the device. If the device has none, either, as few
    of them move as possible, the same ones whatever stages were measured to take: the next `fit` does not refuse the
    host memory that this one has named.

    Args:
        moving: what weights are.
        settings: what was asked for.
        is_leanest: take the leanest schedule, where the host has room for it.

    Raises:
        InfeasibleBudgetError: with the least budget that works.
    """
    solution = _leanest(moving, settings) if is_leanest else _within_budget(moving, settings)
    if _has_room(moving, solution, settings):
        return solution
    other = _staying(moving, settings) or _moving_little(moving, settings)
    if not _has_room(moving, other, settings):
        raise _short_of_host(_enough_host_bytes(moving, settings), settings)
    return other


def _staying(moving: Moving, settings: Settings) -> Solution | None:
    """A schedule whose activations stay on the device; None: it has no room for them."""
    try:
        return _within_budget(replace(moving, moves_activations=False), settings)
    except InfeasibleBudgetError:
        return None


def _moving_little(moving: Moving, settings: Settings) -> Solution:
    """A schedule with which whatever can stay does: the link is slow."""
    return _on_measured(_within_budget(replace(_with_even_times(moving), bandwidth=1), settings), moving)


def _enough_host_bytes(moving: Moving, settings: Settings) -> int:
    """Host memory that is enough in each `fit`, also if trial steps show that less of the budget is left than was
    predicted: with room for all weights, gradients and optimizer state there is a schedule if activations can stay, and
    else none needs more than the leanest.
    """
    less = replace(settings, memory_budget=int(settings.memory_budget * _LEFT))
    if _staying(moving, less) is not None:
        return _mirror_bytes(moving, settings)
    return max(_host_bytes(moving, each) for each in (_leanest(moving, settings), _moving_little(moving, settings)))


def _mirror_bytes(moving: Moving, settings: Settings) -> int:
    """The room on the lower tier of all that may move but for activations."""
    kinds = ("w", "opt") if settings.step_in_backward else MANAGED  # else gradients are used up
    return sum(room for (kind, _), room in moving.mirror_bytes.items() if kind in kinds)


def _within_budget(moving: Moving, settings: Settings) -> Solution:
    """The fastest schedule found within the budget of the device."""
    budget, steps = settings.memory_budget, max(*moving.step_bytes, moving.rest_bytes)
    minimum = _minimum_bytes(_with_even_times(moving), settings)
    # The leanest schedule takes little more than its passes and any step: where that fits, another one mostly does.
    solution = _fastest(moving, settings, minimum, steps) if budget >= minimum + steps else None
    if solution is None:
        leanest = _leanest(moving, settings)
        if budget < leanest.peak_bytes:
            raise InfeasibleBudgetError(
                f"budget {format_bytes(budget)} ({budget} bytes) is below the {format_bytes(leanest.peak_bytes)} "
                f"({leanest.peak_bytes} bytes) that this model needs with weights, gradients and optimizer state on "
                "the host; raise it",
                minimum_bytes=leanest.peak_bytes,
            )
        solution = _fastest(moving, settings, minimum, steps) if budget < minimum + steps else None
        solution = solution or leanest
    return replace(solution, memory_budget=budget)


def _leanest(moving: Moving, settings: Settings) -> Solution:
    """Of the schedules within the least for passes alone, the one that takes the least with the optimizer's steps."""

    def found(link: Moving) -> Solution:
        solution = _solved(link, settings, _minimum_bytes(link, settings))
        assert isinstance(solution, Solution)
        return _on_measured(solution, moving)

    even = _with_even_times(moving)
    slow = replace(even, bandwidth=-(-even.bandwidth // _SLOW))
    leanest = min((found(even), found(slow)), key=lambda solution: solution.peak_bytes)
    return replace(leanest, memory_budget=leanest.peak_bytes)


def _on_measured(found: Solution, moving: Moving) -> Solution:
    """A schedule for even times with what stages and the link were measured to take."""
    return counted(replace(found, bandwidth=moving.bandwidth).on(moving.chain), moving)


def _fastest(moving: Moving, settings: Settings, minimum: int, steps: int) -> Solution | None:
    """The fastest schedule that stays within the budget with all that steps of the optimizer take; None: none found."""
    budget = settings.memory_budget
    for left in (budget, budget - steps):  # the second has room for any step
        if left <= minimum:
            break
        found = _solved(moving, settings, left)  # what needs which memory may depend on times
        if isinstance(found, Solution) and found.peak_bytes <= budget:
            return found
    return None


def _with_even_times(moving: Moving) -> Moving:
    """For the leanest schedule, which is the same whatever stages, updates and the link were measured to take."""
    even, bandwidth = with_even_times(moving.chain)
    stages = tuple(replace(stage, update_seconds=1.0) for stage in even.stages)
    return replace(moving, chain=replace(even, stages=stages), bandwidth=bandwidth)


def _minimum_bytes(even: Moving, settings: Settings) -> int:
    found = _solved(even, settings, 1)
    return found.memory_budget if isinstance(found, Solution) else found


def _solved(moving: Moving, settings: Settings, budget: int) -> Solution | int:
    """The fastest schedule within a budget, or the least that works where this one does not."""
    key = moving.chain, moving.bandwidth, budget, moving.moves_activations
    if key not in moving.solved:
        try:
            moving.solved[key] = _newly_solved(moving, settings, budget)
        except InfeasibleBudgetError as error:
            moving.solved[key] = error.minimum_bytes
    return moving.solved[key]


def _newly_solved(moving: Moving, settings: Settings, budget: int) -> Solution:
    solution = solve(
        moving.chain,
        memory_budget=budget,
        strategy=STRATEGY,
        bandwidth=moving.bandwidth,
        slots=settings.slots,
        step_in_backward=settings.step_in_backward,
        moves_activations=moving.moves_activations,
        progress=settings.progress,
    )
    executed = min(_executed(solution, moving), key=lambda each: each.seconds)
    return counted(replace(executed, lower_bound_seconds=solution.lower_bound_seconds), moving)


def _executed(solution: Solution, moving: Moving) -> Iterator[Solution]:
    """A schedule as it is executed, with some of its last fetches at the beginning of the next step."""
    most = num_late_fetches(solution.schedule)
    for number in sorted({most * share // _NUM_LATE for share in range(_NUM_LATE + 1)}):
        schedule = with_late_fetches(solution.schedule, number)
        executed = as_executed(schedule, grads_resident=moving.chain.grads_resident)
        yield replace(solution, schedule=executed).on(moving.chain)


def as_timed(solution: Solution, seconds: float) -> Solution:
    """A schedule as on a machine on which it takes, without the optimizer's own steps, as long as its trial step did.

    What copies and computations cost each other, and what the host does for either, is in no measured stage.
    """

    def slower(chain: Chain, ratio: float, update_ratio: float) -> Solution:
        found = chain.with_times(lambda one: one * ratio, lambda one: one * ratio)
        stages = (replace(stage, update_seconds=stage.update_seconds * update_ratio) for stage in found.stages)
        rate = max(1, round(solution.bandwidth / ratio))
        return replace(solution, bandwidth=rate).on(replace(found, stages=tuple(stages)))

    ratio = seconds / slower(solution.chain, 1.0, 0.0).seconds
    return slower(solution.chain, ratio, ratio)


def counted(solution: Solution, moving: Moving) -> Solution:
    """A solution whose peak has what the optimizer's steps take for their own duration."""
    trace = solution.trace
    peak_bytes = max(trace.peak_bytes, update_peak_bytes(trace, moving))
    predicted = Predicted(trace.seconds, peak_bytes, trace.idle_seconds)
    return replace(
        solution,
        trace=replace(trace, peak_bytes=peak_bytes),
        schedule=replace(solution.schedule, predicted=predicted),
    )


def update_peak_bytes(trace: Trace, moving: Moving) -> int:
    """The peak of the optimizer's step."""
    steps = [step for step in trace.steps if isinstance(step.operation, Update)]
    rest = trace.steps[-1].stored_after_bytes + moving.rest_bytes
    return max((step.peak_bytes + moving.step_bytes[step.operation.stage - 1] for step in steps), default=rest)


def could_be_faster(alone: Solution, chain: Chain, settings: Settings) -> bool:
    """Whether moving weights, too, might be worth solving for and a trial.

    A byte of them costs the link as much as one of activations, so it gains something only where weights take most; and
    no more than if all that they take had room besides. What `joint` predicts decides afterwards: this saves solving
    for it, which takes two to three times as long as activations alone. For chains of GPT-2, ResNet-50 and ResNet-152
    from an H200, whose weights take 5 to 13 % of the budget, it predicts the same time to the last digit.

    Args:
        alone: what moves activations alone.
        chain: what the stages cost.
        settings: what was asked for.
    """
    budget, most_seconds = settings.memory_budget, _WORTH * alone.on(chain).seconds
    resident = sum(each.weight_bytes + each.weight_grad_bytes + each.optimizer_bytes for each in chain.stages)
    if resident < (budget - chain.base_bytes) / 2 or chain.compute_seconds > most_seconds:
        return False
    return solution_for(chain, replace(settings, memory_budget=budget + resident)).seconds <= most_seconds


def is_faster(alone: Solution, moved: Solution, moving: Moving) -> bool:
    """Whether a schedule that moves weights is so much faster that it is worth it, and not slower in a loop that clips
    gradients.
    """
    seconds = seconds_with_updates(alone, moving)
    return moved.seconds <= _WORTH * seconds and moved.seconds + clipping_seconds(moved, moving) <= seconds


def clipping_seconds(moved: Solution, moving: Moving) -> float:
    """About what clipping adds to a step: gradients on the host are read, and read and written, over the link, and
    others are copied there once more in their update.
    """
    stages, operations = moving.chain.stages, moved.schedule.operations
    away = {operation.stage for operation in operations if isinstance(operation, Release) and operation.kind == "g"}
    num_bytes = sum(stage.weight_grad_bytes * (2 if k in away else 1) for k, stage in enumerate(stages, start=1))
    return num_bytes / moving.bandwidth


def seconds_with_updates(alone: Solution, moving: Moving) -> float:
    """A step of a schedule that moves activations alone, with the optimizer's step."""
    return alone.seconds + sum(stage.update_seconds for stage in moving.chain.stages)


def host_bytes_of(moving: Moving, solution: Solution) -> int:
    """What the lower tier must hold for weights, gradients and optimizer state: what leaves, or is there in any case,
    all gradients that can be read after their update, and all state, which goes there when it is loaded.
    """
    operations = solution.schedule.operations
    leaving = {operation.value for operation in operations if isinstance(operation, Offload | Release)}
    kinds = ("opt",) if is_stepping_in_backward(operations) else ("opt", "g")  # else gradients are used up
    updated = {(kind, operation.stage) for operation in operations if isinstance(operation, Update) for kind in kinds}
    return sum(moving.mirror_bytes.get(value, 0) for value in leaving | updated | moving.placed)


def _host_bytes(moving: Moving, solution: Solution) -> int:
    """What the lower tier must hold of everything."""
    values = {op.value for op in solution.schedule.operations if isinstance(op, Offload) and op.kind in ("a", "abar")}
    needed = host_bytes_of(moving, solution) + host_bytes(moving.chain, solution.schedule)
    return needed + len(values) * _PIECES * rounded(1)


def _has_room(moving: Moving, solution: Solution, settings: Settings) -> bool:
    limit = settings.host_memory_budget
    return limit is None or _host_bytes(moving, solution) <= limit


def _short_of_host(needed: int, settings: Settings) -> InfeasibleBudgetError:
    limit = settings.host_memory_budget or 0
    return InfeasibleBudgetError(
        f"host_memory_budget {format_bytes(limit)} ({limit} bytes) is below the {format_bytes(needed)} ({needed} "
        "bytes) that weights, gradients and optimizer state take there within this memory_budget; raise either",
        minimum_bytes=settings.memory_budget,
    )
