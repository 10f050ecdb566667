"""Runs the calls of a model under a schedule, until it is removed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.chain import Chain
from lowtide.errors import ExecutionError, PlanError, shown
from lowtide.runtime.compile.loss import functions_of
from lowtide.runtime.compile.regions import regions_of
from lowtide.runtime.execute.checks import Checks
from lowtide.runtime.execute.coarse import Coarse, coarsened
from lowtide.runtime.execute.executor import RunningStep
from lowtide.runtime.execute.forward import ExecutedForward
from lowtide.runtime.execute.machine import Machine
from lowtide.runtime.execute.program import Program
from lowtide.runtime.execute.stepping import StagedSteps, weights_of
from lowtide.runtime.execute.variants import StageVariants
from lowtide.runtime.model.interception import Interception
from lowtide.runtime.model.split import Split
from lowtide.runtime.replay.staged import StageLayout
from lowtide.runtime.transfer.cargo import Mirror, Tier
from lowtide.schedule import Schedule

CallHandler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a model, with the plain call and its arguments."""

# The steps whose times are remembered: enough for a median.
_NUM_REMEMBERED = 9


class Execution:
    """One schedule for one split of one model.

    Args:
        model: the model.
        split: its stages.
        schedule: what to do; legal for a chain of that length.
        chain: what the stages cost, where it is known.
        tier: where values go that leave the device.
        checks: which values of recomputed stages are compared with those of their first run.
        optimizer: whose state the schedule moves, and who updates weights that it moves.
        is_trial: where the schedule updates weights in backward, leave that out: gradients are freed, weights stay the
            same.
        homes: as for `Weights`, whose weights are on the lower tier before and after.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        schedule: Schedule,
        chain: Chain | None,
        tier: Tier,
        *,
        checks: Checks = Checks.SPOT,
        optimizer: torch.optim.Optimizer | None = None,
        is_trial: bool = False,
        homes: dict[int, Mirror] | None = None,
    ) -> None:
        self.split = split
        self.schedule = schedule
        self.chain = chain
        # Strict mode is for finding out which stage differs, so each runs by itself there; and so do stages whose
        # weights are moved and updated one by one.
        joins = checks is not Checks.ALL and not schedule.manages
        sides = chain.side_values if chain is not None else ()
        coarse = coarsened(split, schedule, sides) if joins else Coarse.finest(split, schedule)
        program = Program.of(
            schedule,
            coarse,
            sides,
            side_tensors(chain),
            grads_resident=chain is not None and chain.grads_resident,
        )
        functions = functions_of(model)
        regions = regions_of(model)
        layout = StageLayout.of(coarse.split).without_units_of(() if functions else program.unwatched)
        # In regions no unit is met; those that Dynamo does not look at still tell of calls that pass the plan by.
        units = [unit for unit in layout.units if regions is None or _is_called_plainly(model, unit[0])]
        self._interception = Interception(model, units, self._handle, guards=True)
        self.handler: CallHandler | None = None
        variants = StageVariants.of(model, split, program, chain)
        is_moved = program.placement is not None
        self.weights = weights_of(model, split, tier, optimizer, homes) if is_moved else None
        self.machine = Machine(
            model,
            coarse.split,
            layout if regions is None else layout.without_units(),
            program,
            tier,
            checks=checks,
            variants=variants,
            functions=functions,
            weights=self.weights,
            regions=regions,
            expected=_by_stage(coarse, read_tensors(chain)),
        )
        self._steps: StagedSteps | None = None
        if self.weights is not None and program.placement is not None:
            self._steps = StagedSteps(self.weights, program.placement, self._end_of_step)
            self.machine.update = self._steps.leave_out_update if is_trial else self._steps.update_in_backward
        self._clocks: deque[Clock] = deque(maxlen=_NUM_REMEMBERED)

    def _end_of_step(self) -> None:
        """The optimizer has made its step, which a schedule that moves weights includes."""
        if self._clocks:
            self._clocks[-1].stop()

    def leave_out_updates(self) -> None:
        """After the backward of a trial step, move what the optimizer's step moves, and leave that out."""
        if self._steps is not None:
            self._steps.leave_out_updates()

    def install(self, handler: CallHandler) -> None:
        """From now on call `handler(plain, args, kwargs)` instead of the model."""
        self.handler = handler
        self._interception.install()
        if self._steps is not None:
            self._steps.install()

    def _handle(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.handler is not None
        return self.handler(plain, args, kwargs)

    def remove(self, successor: Execution | None = None) -> None:
        """Call the model directly again; weights that were moved come back, but for those that another execution, which
        is installed next, goes on with.

        Raises:
            ExecutionError: where the device has no room for all of them; the rest stays usable in host memory.
        """
        self._interception.remove()
        if self._steps is not None:
            shares = successor is not None and successor.machine.tier is self.machine.tier
            self._steps.remove(successor._steps if successor is not None and shares else None)

    @property
    def is_busy(self) -> bool:
        """Whether this thread is inside a call of the model under this schedule."""
        return self._interception.current.session is not None

    @property
    def compiles_regions(self) -> bool:
        """Whether its first step compiles."""
        return self.machine.regions is not None

    @property
    def has_variants(self) -> bool:
        """Whether a stage runs as a variant other than 0."""
        return self.machine.variants.are_used

    def call(
        self,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        with_variants: bool = True,
        is_captured: bool = False,
    ) -> Any:
        """Call the model under the schedule.

        Args:
            plain: the model's plain call.
            args: of the call.
            kwargs: of the call.
            with_variants: False: all stages run as variant 0.
            is_captured: kernels are recorded and do not run: there is nothing to time.

        Raises:
            ExecutionError: within a step of another plan, whose model this one is a part of.
        """
        if self._interception.is_within_another:
            raise ExecutionError(
                "a model with a plan has a submodule with its own plan, but only one plan can decide what is kept; "
                "call plan.detach() on one of them"
            )
        machine, current = self.machine, self._interception.current
        with machine.alone:
            machine.spot_checks.judge(machine.can_repeat)
            machine.spot_checks.next_turn()
            machine.refresh()
            if self._steps is not None:
                self._steps.begin()
            clock = None if is_captured else self.start_clock()
            variants = machine.variants if with_variants else machine.variants.left_out()
            step = RunningStep(machine, _nothing if clock is None else clock.stop, variants)
            current.session = forward = ExecutedForward(machine, step)
            try:
                result = forward.run(self._interception.whole_or(plain), args, {**kwargs, **self.split.call_keywords})
            finally:
                current.session = None
                if self.weights is not None:
                    self.weights.hand_over()
        return result

    def start_clock(self) -> Clock:
        """A step begins; it is over when the clock is stopped."""
        clock = Clock(self.machine.device)
        self._clocks.append(clock)
        return clock

    def measured_seconds(self, num_steps: int = _NUM_REMEMBERED) -> float | None:
        """The median time from the start of forward to the end of backward over the last steps; None: no step yet."""
        clocks = list(self._clocks)[-num_steps:]
        found = sorted(seconds for clock in clocks if (seconds := clock.seconds()) is not None)
        return found[len(found) // 2] if found else None


def side_tensors(chain: Chain | None) -> list[int]:
    """Which tensor of its maker each side value of a measured chain is.

    Raises:
        PlanError: where that is not a list of numbers.
    """
    found = [] if chain is None else chain.provenance.get("side_tensors", [])
    if not isinstance(found, list | tuple) or any(type(number) is not int for number in found):
        raise PlanError(f"side_tensors is {shown(found)}, expected a list of whole numbers; was the file edited?")
    return list(found)


def read_tensors(chain: Chain | None) -> list[frozenset[int]]:
    """By stage of a measured chain, which of its tensors are read later.

    Raises:
        PlanError: where these are no lists of numbers.
    """
    found = [] if chain is None else chain.provenance.get("read_tensors", [])
    if not isinstance(found, list | tuple) or not all(isinstance(numbers, list | tuple) for numbers in found):
        raise PlanError(f"read_tensors is {shown(found)}, expected a list of lists; was the file edited?")
    if any(type(number) is not int for numbers in found for number in numbers):
        raise PlanError(f"read_tensors is {shown(found)}, expected lists of whole numbers; was the file edited?")
    return [frozenset(numbers) for numbers in found]


def _by_stage(coarse: Coarse, read: Sequence[frozenset[int]]) -> dict[int, frozenset[int]]:
    """The same by the stages that are executed, as far as these are the chain's own: joined ones count tensors anew."""
    stages = ((coarse.stage_of(k), numbers) for k, numbers in enumerate(read[: sum(coarse.sizes)], start=1))
    return {k: numbers for k, numbers in stages if coarse.sizes[k - 1] == 1}


def _nothing() -> None:
    pass


def _is_called_plainly(model: nn.Module, path: str) -> bool:
    return bool(path) and type(model.get_submodule(path)).__call__ is nn.Module.__call__


class Clock:
    """The time of one step: by events on CUDA, which cost nothing until they are read, else by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._start = self._now()
        self._end: Any = None

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """Backward has ended."""
        self._end = self._now()

    def seconds(self) -> float | None:
        """The time between; None where backward has not run."""
        if self._end is None:
            return None
        if not self._on_cuda:
            return float(self._end - self._start)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3
