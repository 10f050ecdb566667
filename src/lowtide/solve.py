"""From a chain and a budget to a schedule: runs strategies and checks every answer with the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from lowtide.chain import Chain, as_chain
from lowtide.errors import InfeasibleBudgetError, StrategyError, shown
from lowtide.schedule import Predicted, Schedule
from lowtide.simulate import simulate
from lowtide.strategies.base import (
    AUTO,
    GIVE_BANDWIDTH,
    REGISTRY,
    Answer,
    Entry,
    NotFasterError,
    Problem,
    find,
    infeasible,
)
from lowtide.trace import Trace
from lowtide.units import format_bytes, format_seconds, parse_bandwidth, parse_bytes

Progress = Callable[[str, float], None]

# Under `auto`, so many of the fastest answers are improved further; each takes a few seconds at the most.
_NUM_IMPROVED = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """The result of one strategy that `auto` tried."""

    strategy: str
    seconds: float | None
    """Its simulated time; None if infeasible."""
    peak_bytes: int | None
    minimum_bytes: int | None
    """If infeasible, the smallest budget that works."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule, checked by the simulator, and what it costs.

    Attributes:
        chain: the network that it is for.
        schedule: the operations, with the prediction inside.
        trace: what the simulator saw.
        strategy: the strategy that made the schedule; with `auto`, the fastest one.
        memory_budget: the bytes that were allowed.
        solve_seconds: how long solving took.
        model_seconds: the time in the strategy's own model, where that differs from the simulator's.
        lower_bound_seconds: no schedule of the strategy's class is faster, where such a bound is known.
        candidates: with `auto`, every strategy that was tried.
        details: more figures of the strategy, by name.
    """

    chain: Chain
    schedule: Schedule
    trace: Trace
    strategy: str
    memory_budget: int
    bandwidth: int
    solve_seconds: float
    model_seconds: float | None
    lower_bound_seconds: float | None
    candidates: tuple[Candidate, ...]
    details: Mapping[str, float | int | str]

    @property
    def seconds(self) -> float:
        """The simulated time of one step."""
        return self.trace.seconds

    @property
    def peak_bytes(self) -> int:
        """The simulated peak."""
        return self.trace.peak_bytes

    @property
    def idle_seconds(self) -> float:
        """How long compute waits for copies."""
        return self.trace.idle_seconds

    def on(self, chain: Chain) -> Solution:
        """Return the same schedule on a chain with other figures, over a duplex link.

        Candidates, bounds and times in the strategies' own models are left out.
        """
        trace = simulate(chain, self.schedule, bandwidth=self.bandwidth or None)
        predicted = Predicted(trace.seconds, trace.peak_bytes, trace.idle_seconds)
        return replace(
            self,
            chain=chain,
            trace=trace,
            schedule=replace(self.schedule, predicted=predicted),
            model_seconds=None,
            lower_bound_seconds=None,
            candidates=(),
        )

    def __str__(self) -> str:
        plain = self.chain.compute_seconds + self.trace.update_seconds
        more = f" ({self.seconds / plain:.3f} x plain training)" if plain else ""
        return (
            f"{self.strategy} for {self.chain.name}, {self.chain.num_stages} stages: {format_seconds(self.seconds)} a "
            f"step{more}, peak {format_bytes(self.peak_bytes)} of {format_bytes(self.memory_budget)}"
        )


def solve(
    chain: Chain | Mapping[str, Any],
    *,
    memory_budget: int | str,
    strategy: str = AUTO,
    bandwidth: int | str | None = None,
    slots: int | None = None,
    segments: int | None = None,
    duplex: bool = True,
    manage_weights: bool = False,
    step_in_backward: bool = False,
    moves_activations: bool = True,
    progress: Progress | None = None,
) -> Solution:
    """Compute a schedule that stays within a budget.

    Args:
        chain: the network, a `Chain` or its plain data.
        memory_budget: bytes on the device, everything included: an int or a string such as `"8GiB"`.
        strategy: a name from `lowtide strategies`; `"auto"` takes the fastest feasible of all that apply and
            leave weights on the device, and passes over those that must be slower than what it found.
        bandwidth: bytes per second each way between device and host; None: nothing can be moved.
        slots: into how many slots strategies divide memory, if they do; None: each one's default.
        segments: the number of segments, for strategy `"segments"`.
        duplex: both directions at once.
        manage_weights: whether `"auto"` may also take the `weights-` strategies, whose schedules can be simulated, but
            not executed.
        step_in_backward: for strategy `"joint"`, update each stage right after its backward instead of all stages
            after the last backward.
        moves_activations: for strategy `"joint"`; False: it moves weights, weight gradients and optimizer state alone,
            and recomputes.
        progress: called with the name of what is being tried and the share done, 0 to 1.

    Raises:
        InfeasibleBudgetError: with `minimum_bytes`, the smallest budget that works.
        StrategyError: if the strategy is unknown or does not have a setting.

    Example:
        >>> from lowtide import Chain, Stage
        >>> chain = Chain("three", [Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2, 3)])
        >>> solve(chain, memory_budget=100, strategy="rotor").seconds
        11.0
    """
    begin = time.perf_counter()
    chain = as_chain(chain)
    budget = parse_bytes(memory_budget)
    rate = 0 if bandwidth is None else parse_bandwidth(bandwidth)
    settings: dict[str, int | bool | None] = {
        "slots": checked_count("slots", slots),
        "segments": checked_count("segments", segments),
        "step_in_backward": step_in_backward,
        "moves_activations": moves_activations,
    }
    problem = Problem(chain, budget, rate, duplex, lambda s: simulate(chain, s, bandwidth=rate, duplex=duplex))
    if strategy != AUTO:
        entry = find(strategy)
        if segments is not None and entry.name != "segments":
            raise StrategyError(f"strategy {strategy!r} has no setting 'segments'; only the strategy 'segments' has")
        for name in _only_of_joint(step_in_backward, moves_activations) if not entry.lists_updates else ():
            raise StrategyError(f"strategy {strategy!r} has no setting {name!r}; only the strategy 'joint' has")
        answer, trace = _checked(entry, problem, settings)
        return _solution(entry.name, answer, trace, problem, time.perf_counter() - begin, ())
    candidates: list[Candidate] = []
    best: tuple[Entry, Answer, Trace] | None = None
    moving: tuple[Entry, Answer, Trace] | None = None  # the best that manages weights
    others: list[tuple[Entry, Answer, Trace]] = []  # those that do not
    for name in _only_of_joint(step_in_backward, moves_activations):
        raise StrategyError(f"{name} is a setting of the strategy 'joint'; give strategy=\"joint\" with it")
    entries = [entry for entry in applicable(chain, rate, manage_weights=manage_weights) if not entry.lists_updates]
    entries.sort(key=_turn)
    floor = _least_seconds(chain)
    for tried, entry in enumerate(entries):
        if best is not None and _least_seconds(chain, entry) > best[2].seconds:
            continue
        if progress is not None:
            progress(entry.name, tried / len(entries))
        try:
            answer, trace = _checked(entry, problem, settings)
        except NotFasterError:
            continue
        except InfeasibleBudgetError as error:
            candidates.append(Candidate(entry.name, None, None, error.minimum_bytes))
            continue
        candidates.append(Candidate(entry.name, trace.seconds, trace.peak_bytes, None))
        if not entry.manages_weights:
            others.append((entry, answer, trace))
        elif moving is None or trace.seconds < moving[2].seconds:
            moving = (entry, answer, trace)
        if best is None or (trace.seconds, trace.peak_bytes) < (best[2].seconds, best[2].peak_bytes):
            best = (entry, answer, trace)
            if not rate:  # else a slower answer may be the best once some of its values move
                problem = replace(problem, faster_than=trace.seconds)
            if trace.seconds <= floor * (1 + 1e-12):  # sums in another order differ in the last digits
                break  # nothing can be faster
    if best is None:
        raise _nothing_fits(problem, candidates)
    if moving is not None and best[2].seconds > floor * (1 + 1e-12):
        if progress is not None:
            progress("improving the moves of weights", 1.0)
        best = _improved(moving, best, problem)
    if rate and best[2].seconds > floor * (1 + 1e-12):
        if progress is not None:
            progress("improving the moves of activations", 1.0)
        best = _with_better_moves(others, best, problem)
    entry, answer, trace = best
    return _solution(entry.name, answer, trace, problem, time.perf_counter() - begin, tuple(candidates))


def _only_of_joint(step_in_backward: bool, moves_activations: bool) -> list[str]:
    """The settings that were given, and that no other strategy has."""
    given = {"step_in_backward": step_in_backward, "moves_activations": not moves_activations}
    return [name for name, is_given in given.items() if is_given]


def applicable(chain: Chain, bandwidth: int, *, manage_weights: bool = True) -> list[Entry]:
    """The strategies that apply to a chain and a link, in the order of the registry."""
    # Optimizer state moves with the weights, and no weight gradient outlives its backward.
    held = (stage.weight_bytes or stage.weight_grad_bytes or stage.optimizer_bytes for stage in chain.stages)
    has_weights = any(held) and not chain.grads_resident
    return [
        entry
        for entry in REGISTRY.values()
        if (bandwidth or not entry.moves) and (not entry.manages_weights or (manage_weights and has_weights))
    ]


def _turn(entry: Entry) -> tuple[bool, bool, bool, bool]:
    """When `auto` tries a strategy: first what may end the search at once, last what takes the longest."""
    return not entry.runs_once, entry.moves, not entry.is_thorough, entry.runs_twice


def _least_seconds(chain: Chain, entry: Entry | None = None) -> float:
    """A lower bound on the time of any schedule, or of one strategy's: every stage once forward and backward, in its
    fastest variant; where forwards run twice, the second one without what nothing needs.
    """
    if entry is not None and entry.runs_twice:
        firsts, last = chain.stages[:-1], chain.stages[-1]
        twice = (stage.forward_seconds + stage.rerun_seconds + stage.backward_seconds for stage in firsts)
        return sum(twice) + last.forward_seconds + last.backward_seconds
    ways = ([stage.variant(v) for v in range(stage.num_variants)] for stage in chain.stages)
    return sum(min(way.forward_seconds + way.backward_seconds for way in own) for own in ways)


def _checked(entry: Entry, problem: Problem, settings: Mapping[str, int | bool | None]) -> tuple[Answer, Trace]:
    """A strategy's answer and its simulation; fails if the answer is above the budget."""
    answer = entry.make(**settings).plan(problem)
    trace = simulate(problem.chain, answer.schedule, bandwidth=problem.bandwidth, duplex=problem.duplex)
    if trace.peak_bytes > problem.memory_budget:
        raise AssertionError(
            f"strategy {entry.name!r} answered with a peak of {trace.peak_bytes} bytes for a budget of "
            f"{problem.memory_budget}: this is a bug in lowtide"
        )
    return answer, trace


def _improved(
    moving: tuple[Entry, Answer, Trace], best: tuple[Entry, Answer, Trace], problem: Problem
) -> tuple[Entry, Answer, Trace]:
    """The best so far, or the answer that moves weights, improved until it is faster."""
    from lowtide.strategies.weights.improve import improve, is_close

    entry, answer, trace = moving
    hopeless = (answer.lower_bound_seconds or 0.0) >= best[2].seconds
    if hopeless or is_close(answer, trace.seconds):
        return best
    better = improve(problem, answer, trace.seconds)
    if better is None:
        return best
    trace = simulate(problem.chain, better.schedule, bandwidth=problem.bandwidth, duplex=problem.duplex)
    fits = trace.peak_bytes <= problem.memory_budget
    return (entry, better, trace) if fits and trace.seconds < best[2].seconds else best


def _with_better_moves(
    others: list[tuple[Entry, Answer, Trace]], best: tuple[Entry, Answer, Trace], problem: Problem
) -> tuple[Entry, Answer, Trace]:
    """The best so far, or one of the fastest answers with a better choice of activations to move."""
    from lowtide.strategies.copies.improve import improve

    for entry, answer, _ in sorted(others, key=lambda other: other[2].seconds)[:_NUM_IMPROVED]:
        schedule = improve(problem, answer.schedule)
        if schedule is None:
            continue
        trace = simulate(problem.chain, schedule, bandwidth=problem.bandwidth, duplex=problem.duplex)
        if trace.peak_bytes <= problem.memory_budget and trace.seconds < best[2].seconds:
            best = (entry, replace(answer, schedule=schedule), trace)
    return best


def _solution(
    name: str,
    answer: Answer,
    trace: Trace,
    problem: Problem,
    solve_seconds: float,
    candidates: tuple[Candidate, ...],
) -> Solution:
    predicted = Predicted(trace.seconds, trace.peak_bytes, trace.idle_seconds)
    return Solution(
        chain=problem.chain,
        schedule=replace(answer.schedule, strategy=name, predicted=predicted),
        trace=trace,
        strategy=name,
        memory_budget=problem.memory_budget,
        bandwidth=problem.bandwidth,
        solve_seconds=solve_seconds,
        model_seconds=answer.model_seconds,
        lower_bound_seconds=answer.lower_bound_seconds,
        candidates=candidates,
        details=answer.details,
    )


def _nothing_fits(problem: Problem, candidates: list[Candidate]) -> InfeasibleBudgetError:
    least = min((c.minimum_bytes, c.strategy) for c in candidates if c.minimum_bytes is not None)
    needed = f"chain {problem.chain.name!r} needs at least, with strategy {least[1]!r}"
    otherwise = "" if problem.bandwidth else f"allow offloading: {GIVE_BANDWIDTH}"
    return infeasible(problem.memory_budget, least[0], needed, otherwise)


def checked_count(name: str, value: int | None) -> int | None:
    """A count that was given, or None; anything else is refused."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise StrategyError(f"{name} is {shown(value)}, expected a whole number of at least 1")
    return int(value)  # also numpy's whole numbers
