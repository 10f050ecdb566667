"""The protocol of strategies, and the registry of all of them.

A strategy is a frozen dataclass whose fields are its settings (`Rotor(slots=500)`). It knows no clock, prints nothing
and does not simulate: one that must evaluate candidates calls `Problem.evaluate`, which it is handed.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError, StrategyError, shown
from lowtide.schedule import Schedule
from lowtide.strategies.numerics.compiling import announce_compilation
from lowtide.units import format_bytes, is_count_of_gib

# The option of the command line, and the argument in Python.
GIVE_BANDWIDTH = "give --bandwidth (bandwidth= in Python), such as 12GB/s"


def infeasible(budget: int, minimum_bytes: int, needed: str, otherwise: str = "") -> InfeasibleBudgetError:
    """Make the error for a budget that is too small.

    Args:
        budget: what was given, in bytes.
        minimum_bytes: the smallest budget that works.
        needed: what needs it, as in "the 3 GiB that ...".
        otherwise: what to do instead of raising the budget.
    """
    if is_count_of_gib(budget) and not is_count_of_gib(minimum_bytes):
        advice = f"did you mean {budget}GiB?"
    else:
        advice = f"raise it, or {otherwise}" if otherwise else "raise it"
    return InfeasibleBudgetError(
        f"budget {format_bytes(budget)} ({budget} bytes) is below the {format_bytes(minimum_bytes)} ({minimum_bytes} "
        f"bytes) that {needed}; {advice}",
        minimum_bytes=minimum_bytes,
    )


class Evaluation(Protocol):
    """What the simulator says about a schedule; `lowtide.simulate.Trace` is one."""

    @property
    def seconds(self) -> float:
        """The makespan, or the steady period."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device at once."""

    @property
    def idle_seconds(self) -> float:
        """How long compute waits for copies."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The input of a strategy.

    Args:
        chain: the network.
        memory_budget: bytes on the device, everything included.
        bandwidth: bytes per second each way between device and host; 0 if nothing can be moved.
        duplex: both directions at once.
        evaluate: simulates a schedule of this chain at this bandwidth; raises ScheduleError if it is illegal.
        known: what strategies have worked out of this chain, for others that need the same; for any budget.
        faster_than: slower schedules are of no use, so that a strategy need not look for them.
    """

    chain: Chain
    memory_budget: int
    bandwidth: int
    duplex: bool
    evaluate: Callable[[Schedule], Evaluation]
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    faster_than: float = math.inf

    def infeasible(self, strategy: str, minimum_bytes: int) -> InfeasibleBudgetError:
        """Make the error for a budget below `minimum_bytes`."""
        lacks_link = not self.bandwidth and strategy in REGISTRY and REGISTRY[strategy].moves
        needed = f"strategy {strategy!r} needs for chain {self.chain.name!r}"
        otherwise = GIVE_BANDWIDTH if lacks_link else "try another strategy"
        return infeasible(self.memory_budget, minimum_bytes, needed, otherwise)


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of a strategy.

    Args:
        schedule: within the budget; the caller checks it with the simulator.
        model_seconds: the time in the strategy's own model, where that differs from the simulator's (pofo frees and
            fetches memory bit by bit).
        lower_bound_seconds: no schedule of the class that the strategy searches is faster than this, if known.
        details: more figures, by name, for reports.
    """

    schedule: Schedule
    model_seconds: float | None = None
    lower_bound_seconds: float | None = None
    details: Mapping[str, float | int | str] = field(default_factory=dict)


class NotFasterError(Exception):
    """A strategy has no schedule within the budget that is faster than `Problem.faster_than`."""


class Strategy(Protocol):
    """One algorithm with its settings."""

    def plan(self, problem: Problem) -> Answer:
        """Return the strategy's best schedule within the budget.

        Raises:
            InfeasibleBudgetError: if there is none; `minimum_bytes` is the smallest budget that works.
            NotFasterError: if there is none that is faster than the problem asks for, where the strategy heeds that.
        """

    def minimum_bytes(self, problem: Problem) -> int:
        """Return the smallest budget with which `plan` succeeds, exact to the byte; ignores the problem's budget."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the registry; the algorithm's module is imported only when it is used."""

    name: str
    summary: str
    paper: str
    module: str
    factory: str
    moves: bool = False
    """Moves values between device and host: needs a bandwidth."""
    manages_weights: bool = False
    lists_updates: bool = False
    """Its times include the optimizer steps: `auto` does not compare it with the others."""
    runs_once: bool = False
    """Runs every computation once: nothing can be faster if no computation waits, so `auto` tries it first."""
    runs_twice: bool = False
    """Runs every forward but the last at least twice."""
    is_thorough: bool = False
    """Seldom slower than others that recompute: `auto` tries it before them, and they need not look for what is."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def executable(self) -> bool:
        """Whether training can follow its schedules; the others can be simulated only."""
        return not self.manages_weights or self.lists_updates

    def make(self, **settings: Any) -> Strategy:
        """Make the strategy with these settings; ignores None, and settings that the strategy does not have."""
        factory = getattr(importlib.import_module(self.module), self.factory)
        known = {entry.name for entry in dataclasses.fields(factory)}
        given = {name: value for name, value in settings.items() if value is not None and name in known}
        announce_compilation()
        strategy: Strategy = factory(**{**self.settings, **given})
        return strategy


_HERE = "lowtide.strategies"

REGISTRY: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "store-all",
            "keep everything, as plain training does",
            "-",
            f"{_HERE}.store_all",
            "StoreAll",
            runs_once=True,
        ),
        Entry(
            "segments",
            "periodic checkpointing in K equal segments",
            "Chen et al. 2016; rotor §5.3",
            f"{_HERE}.segments",
            "Segments",
        ),
        Entry("chen", "Chen's greedy search over segment budgets", "Hong §2.2", f"{_HERE}.chen", "Chen"),
        Entry(
            "revolve",
            "optimal in the automatic-differentiation model: saves only outputs",
            "rotor §5.3",
            f"{_HERE}.revolve",
            "Revolve",
            runs_twice=True,
        ),
        Entry(
            "rotor",
            "the optimal persistent recomputation",
            "rotor §4",
            f"{_HERE}.rotor",
            "Rotor",
            is_thorough=True,
        ),
        Entry(
            "selection",
            "lowest sum of checkpoints and largest segment",
            "Hong §3, algorithm 3",
            f"{_HERE}.selection",
            "SelectionStrategy",
        ),
        Entry(
            "dynamic-selection",
            "lowest peak, given how PyTorch really behaves",
            "Hong §4, algorithms 5 and 6",
            f"{_HERE}.dynamic_selection",
            "DynamicSelection",
        ),
        Entry(
            "offload",
            "each computation once, the best choice of activations to move",
            "pofo §5.2",
            f"{_HERE}.offload",
            "OffloadOnly",
            moves=True,
            runs_once=True,
        ),
        Entry(
            "opportunist",
            "move a stage whenever the link is free, recompute those in between",
            "pofo §5.1",
            f"{_HERE}.opportunist",
            "Opportunist",
            moves=True,
        ),
        Entry(
            "autocapper",
            "rotor for the best of 40 larger memories, then move what exceeds the budget",
            "pofo §5.1",
            f"{_HERE}.autocapper",
            "Autocapper",
            moves=True,
        ),
        Entry(
            "pofo",
            "the optimal combination of recomputation and offloading",
            "pofo §4, appendix B",
            f"{_HERE}.pofo",
            "Pofo",
            moves=True,
        ),
        Entry(
            "weights-greedy",
            "move weights: greedy selection and scheduling",
            "weights §5",
            f"{_HERE}.weights_greedy",
            "WeightsGreedy",
            moves=True,
            manages_weights=True,
        ),
        Entry(
            "weights-greedy-nodiscount",
            "the same, with one offload for each fetch",
            "weights §7",
            f"{_HERE}.weights_greedy",
            "WeightsGreedy",
            moves=True,
            manages_weights=True,
            settings={"discount": False},
        ),
        Entry(
            "weights-l2l",
            "layer to layer: one stage's weights at a time",
            "weights §2, §7",
            f"{_HERE}.weights_l2l",
            "WeightsL2L",
            moves=True,
            manages_weights=True,
        ),
        Entry(
            "joint",
            "weights, gradients, optimizer state and activations: move or recompute",
            "-",
            f"{_HERE}.joint",
            "Joint",
            moves=True,
            manages_weights=True,
            lists_updates=True,
        ),
    )
}

AUTO = "auto"
AUTO_SUMMARY = "the fastest of all that apply and leave weights on the device, by simulation"


def find(name: str) -> Entry:
    """Return the entry of a strategy; the error for a wrong name suggests the nearest one."""
    if not isinstance(name, str):
        raise StrategyError(f"strategy is {shown(name)}, expected a name such as 'rotor'; omit it for the fastest")
    if name in REGISTRY:
        return REGISTRY[name]
    names = [*REGISTRY, AUTO]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
    raise StrategyError(f"unknown strategy {name!r}; {hint}")
