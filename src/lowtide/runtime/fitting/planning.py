"""Decides which schedule to try next, and when to stop: a pure function of what was tried so far.

Nothing here knows a model or a device. Whoever plans asks `next_attempt` what to do, solves for that and runs a trial
step under the schedule, writes down the outcome, and asks again:

    history = Attempts(asked)
    while isinstance(answer := next_attempt(history), Attempt):
        history = history.then(answer, outcome_of(answer))

A prediction that turns out wrong is corrected, a schedule that runs out of memory makes the next one smaller, and where
copies are predicted to save little they are timed against recomputation alone.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TypeVar

from lowtide.units import format_bytes, format_seconds

# A prediction that is off by more than this is corrected, and what it leaves of the budget used; 5 % are promised.
_TOLERANCE = 0.02

# How much less is planned for where a trial step ran out of memory although the budget would hold. An allocator cannot
# use every byte: blocks of many sizes leave gaps. A tenth is also what is left by default.
_LEFT_FOR_GAPS = 0.1
_MOST_TIMES_OUT_OF_MEMORY = 3

# Each correction may choose another schedule; after these, the best that was seen to stay within the budget is taken,
# or, where there is none yet, the first that will be. On an H200 three schedules in a row were seen to take some more
# than the budget, the last of them 3.4 MiB, each after a correction.
_MOST_TRIALS = 3
_MOST_WITHOUT_SUCCESS = 8

# Trials where each compiles the model, so that a second one may stay within the budget where the first did not; and
# what the first one leaves, so that there is seldom a second: one of ResNet-101 on an H200 took 0.9 % more than
# predicted. The second, within a hundredth less, was predicted to take 0.4 % longer, and compiling it took 51 s.
_MOST_COSTLY = 2
_LEFT_WHERE_COSTLY = 0.01

# Copies are kept without timing recomputation alone only where that is predicted to take so much longer than a trial
# step with them took: predictions are off, too.
_CLOSE = 1.25

# A refusal tells what else is on the device where that is such a part of the least budget.
_WORTH_TELLING = 0.2

# Steps that are timed to tell two schedules apart.
_NUM_TIMED = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """What a schedule is wanted for.

    Args:
        memory_budget: bytes of all that a step takes.
        moves: values may be copied to the host.
        moves_weights: so may weights, gradients and optimizer state.
        is_auto: the strategy is not given, so one without copies may be taken, too.
        update_bytes: what is there while the optimizer makes its step, which no schedule changes.
        other_bytes: the part of it that is not the model's: the batch, buffers and what others have on the device.
        rounding_bytes: by which trial steps differ from each other.
        goes_on: training is under way: where nothing stays within the budget, the leanest schedule is taken.
        is_costly: a trial takes so long that the first schedule that stays within the budget is taken.
    """

    memory_budget: int
    moves: bool = False
    moves_weights: bool = False
    is_auto: bool = True
    update_bytes: int = 0
    other_bytes: int = 0
    rounding_bytes: int = 0
    goes_on: bool = False
    is_costly: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """Solve, and run a trial step under the schedule.

    Args:
        memory_budget: to solve for, in bytes.
        more_bytes: to set aside beyond what was measured of the stages; less than that where it is negative.
        moves: values may be copied to the host.
        is_leanest: the schedule should not hang on how long stages were measured to take.
        again: the place in the history of an attempt whose schedule is meant; nothing is solved for.
        is_tried: run a trial step; else only solve.
        num_timed: how many further steps to time.
    """

    memory_budget: int
    more_bytes: int = 0
    moves: bool = False
    is_leanest: bool = False
    again: int | None = None
    is_tried: bool = True
    num_timed: int = 0


WITH_ROOM_FOR_ALL = Attempt(2**62, num_timed=5)
"""Nothing has to be freed; timed often enough to tell two ways to compile apart."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A schedule, as predicted and, where it was tried, as measured."""

    predicted_bytes: int
    predicted_seconds: float
    moves: bool = False
    peak_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No schedule is predicted to stay within the budget."""

    minimum_bytes: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The trial step ran out of the device's memory."""


TrialOutcome = Trial | Infeasible | OutOfMemory


@dataclass(frozen=True, slots=True)
class Accept:
    """Take the schedule of an attempt.

    Args:
        index: the attempt's place in the history.
        more_bytes: the corrected prediction: what to set aside beyond what was measured of the stages.
        peak_bytes: what a trial step took; None: there was none.
        notes: what people should know.
        refusal: why no schedule stays within the budget, where training goes on under the leanest.
    """

    index: int
    more_bytes: int
    peak_bytes: int | None
    notes: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is none: why, and the least bytes with which there is. `is_out_of_memory`: trial steps ran out of it time
    and again.
    """

    message: str = ""
    minimum_bytes: int = 0
    is_out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Attempts:
    """What was asked for, and what was tried so far."""

    asked: Asked
    entries: tuple[tuple[Attempt, TrialOutcome], ...] = ()

    def then(self, attempt: Attempt, outcome: TrialOutcome) -> Attempts:
        """With one more attempt."""
        return replace(self, entries=(*self.entries, (attempt, outcome)))


def next_attempt(history: Attempts) -> Attempt | Accept | Refuse:
    """What to do next, a function of the history alone.

    Example:
        >>> asked = Asked(memory_budget=1000)
        >>> first = next_attempt(Attempts(asked))
        >>> next_attempt(Attempts(asked).then(first, Trial(990, 1.0, peak_bytes=995)))
        Accept(index=0, more_bytes=0, peak_bytes=995, notes=(), refusal='')
    """
    steps = _decided(history.asked)
    answer = next(steps)
    try:
        for index, (attempt, outcome) in enumerate(history.entries):
            assert attempt == answer, "the history has an attempt that was not asked for"
            answer = steps.send((index, outcome))
    except StopIteration as end:
        decision: Accept | Refuse = end.value
        return decision
    return answer


# The policy is written as code that runs: it yields an attempt, is told its place and outcome, and returns its answer.
_Returned = TypeVar("_Returned")
_Steps = Generator[Attempt, tuple[int, TrialOutcome], _Returned]


class _RefusedError(Exception):
    def __init__(self, refuse: Refuse) -> None:
        super().__init__(refuse.message)
        self.refuse = refuse


class _OutOfMemoryError(Exception):
    """A trial step ran out of memory, and nothing that fits was seen before."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A schedule that stayed within the budget."""

    accept: Accept
    seconds: float
    moves: bool


def _decided(asked: Asked) -> _Steps[Accept | Refuse]:
    answer = yield from _on_the_device(asked)
    if isinstance(answer, Accept) or not asked.goes_on:
        return answer
    probe = Attempt(1, moves=asked.moves, is_leanest=True, is_tried=False)
    index, outcome = yield probe
    if isinstance(outcome, Infeasible):
        index, outcome = yield replace(probe, memory_budget=outcome.minimum_bytes)
    if isinstance(outcome, Trial):
        return Accept(index, 0, None, refusal=answer.message or "trial steps ran out of device memory")
    return answer


def _on_the_device(asked: Asked) -> _Steps[Accept | Refuse]:
    """If a trial step runs out of memory, plan for less, down to what the leanest schedule takes."""
    notes: list[str] = []
    refused: Refuse | None = None
    while True:
        try:
            accepted = yield from _fastest(asked)
            return replace(accepted, notes=(*accepted.notes, *notes))
        except _OutOfMemoryError:
            if refused is not None:
                return refused
            if len(notes) == _MOST_TIMES_OUT_OF_MEMORY:
                return Refuse(is_out_of_memory=True)
            failed = asked.memory_budget
            budget = int(failed * (1 - _LEFT_FOR_GAPS))
        except _RefusedError as error:
            if not notes or refused is not None:
                return refused or error.refuse
            least = error.refuse.minimum_bytes
            refused = Refuse(f"{'; '.join(notes)}, and {error.refuse.message}", least)
            if least >= failed:
                return refused
            notes.pop()
            budget = least  # a tenth less was too much less
        asked = replace(asked, memory_budget=budget)
        notes.append(
            f"a trial step within {format_bytes(failed)} ran out of device memory: other processes use it, or the "
            "allocator lost some to fragmentation (less with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True); "
            f"planned for {format_bytes(budget)}"
        )


def _fastest(asked: Asked) -> _Steps[Accept]:
    """The fastest schedule that a trial step has shown to stay within the budget.

    A schedule that copies may be predicted to be the leanest and take more than recomputation alone when it is tried.
    """
    if asked.update_bytes > asked.memory_budget and not asked.goes_on:
        yield from _check_update(asked)
    try:
        return (yield from _as_asked(asked))
    except _RefusedError as error:
        if not asked.is_auto or not asked.moves:
            raise
        refuse = error.refuse
    try:
        return (yield from _as_asked(replace(asked, moves=False)))
    except _RefusedError as error:
        least = error.refuse.minimum_bytes
        if refuse.minimum_bytes <= least:
            raise _RefusedError(refuse) from None
        message = (  # its own message would advise to allow offloading
            f"{_given(asked)} is below the {format_bytes(least)} ({least} bytes) that this model needs "
            f"with recomputation alone (with offloading: {format_bytes(refuse.minimum_bytes)}); raise it"
        )
        raise _RefusedError(Refuse(message, least)) from None


def _check_update(asked: Asked) -> _Steps[None]:
    """After backward all gradients are there, and the optimizer's step takes some more: no schedule helps there."""
    least = enough = asked.update_bytes
    _, outcome = yield Attempt(asked.memory_budget, moves=asked.moves, is_tried=False)
    if isinstance(outcome, Infeasible) and outcome.minimum_bytes >= least:
        return  # refused by whoever solves next, with that figure
    try:
        yield from _fastest(replace(asked, memory_budget=least))
    except _RefusedError as error:
        enough = error.refuse.minimum_bytes  # a trial step takes more than predicted
    except _OutOfMemoryError:
        pass
    message = (
        f"{_given(asked)} is below the {_least(least, asked)} that parameters, gradients and the "
        f"optimizer's state and step take alone; raise it{f' to {enough} bytes' if enough > least else ''}, or "
        "use an optimizer with less state"
    )
    raise _RefusedError(Refuse(message, enough))


def _as_asked(asked: Asked) -> _Steps[Accept]:
    best: _Seen | None = None
    notes: list[str] = []
    more, last_bytes = int(_LEFT_WHERE_COSTLY * asked.memory_budget) if asked.is_costly else 0, 0
    most = 1 if asked.is_costly else _MOST_TRIALS
    for num_tried in range(_MOST_COSTLY if asked.is_costly else _MOST_WITHOUT_SUCCESS):
        if best is not None and num_tried >= most:
            break
        index, outcome = yield Attempt(asked.memory_budget, more, asked.moves)
        if isinstance(outcome, Infeasible):
            if best is not None:
                break  # a corrected prediction fits no more; what was seen to fit does
            best = yield from _leanest(outcome, asked, more)
            notes, more = list(best.accept.notes), best.accept.more_bytes  # there may be a quicker one now
            continue
        if isinstance(outcome, OutOfMemory):
            if best is None:
                raise _OutOfMemoryError
            break  # a corrected prediction was too bold; what was seen to fit does
        last_bytes = outcome.peak_bytes
        off, fits = outcome.peak_bytes - outcome.predicted_bytes, outcome.peak_bytes <= asked.memory_budget
        is_close = abs(off) <= _TOLERANCE * outcome.peak_bytes and fits
        if not is_close:
            notes = [_correction(outcome)]  # the last one says how far predictions were off in the end
            more += off * 2 if not fits and num_tried else off  # schedules differ in how far they are off
        if fits and (best is None or outcome.predicted_seconds < best.seconds):
            best = _seen(index, outcome, more, notes)
        if is_close:
            break
    if best is None:
        message = (
            f"every schedule that was tried took more than {_given(asked)}; raise it to {format_bytes(last_bytes)} "
            f"({last_bytes} bytes), which the last one took"
        )
        raise _RefusedError(Refuse(message, last_bytes))
    return (yield from _no_slower_than_recomputing(best, asked))


def _leanest(infeasible: Infeasible, asked: Asked, more: int) -> _Steps[_Seen]:
    """The leanest schedule, where a trial step shows that it takes less than predicted and stays within the budget;
    else a refusal with the least budget that the trial step has shown to be enough.
    """
    index, outcome = yield Attempt(infeasible.minimum_bytes, more, asked.moves, is_leanest=True)
    if not isinstance(outcome, Trial):
        raise _RefusedError(Refuse(infeasible.message, infeasible.minimum_bytes))
    measured = outcome.peak_bytes
    if measured <= asked.memory_budget:
        return _seen(index, outcome, more + measured - outcome.predicted_bytes, [_correction(outcome)])
    least = max(measured, min(measured + asked.rounding_bytes, infeasible.minimum_bytes), asked.update_bytes)
    moved = " with weights on the host" if asked.moves_weights else ""
    message = (
        f"{_given(asked)} is below the {_least(least, asked)} that this model needs{moved}, measured in "
        f"a trial step of its leanest schedule; {'raise it' if asked.moves else 'raise it, or allow offloading'}"
    )
    raise _RefusedError(Refuse(message, least))


def _no_slower_than_recomputing(best: _Seen, asked: Asked) -> _Steps[Accept]:
    """Where recomputation alone is predicted to come close to what a schedule that copies takes, both are timed.

    What copies cost besides the link, above all the time to launch them, is in no chain: steps with copies were seen to
    take 1.4 to 29 % longer than predicted on an H200, and 50 % longer where the host sets the pace.
    """
    accept = best.accept
    if not asked.is_auto or not best.moves:
        return accept
    alone, outcome = yield Attempt(asked.memory_budget, accept.more_bytes, is_tried=False)
    if not isinstance(outcome, Trial):
        return accept
    timed = Attempt(asked.memory_budget, accept.more_bytes, asked.moves, again=accept.index, num_timed=_NUM_TIMED)
    _, copying = yield timed
    if not isinstance(copying, Trial):
        raise _OutOfMemoryError
    if outcome.predicted_seconds > _CLOSE * copying.seconds:
        return accept
    _, tried = yield replace(timed, moves=False, again=alone)
    if not isinstance(tried, Trial):
        return accept  # which was seen to fit
    if tried.peak_bytes > asked.memory_budget or copying.seconds <= tried.seconds:
        return accept
    note = (
        f"a trial step took {format_seconds(copying.seconds)} with offloading and {format_seconds(tried.seconds)} with "
        "recomputation alone, so nothing is offloaded"
    )
    return replace(accept, index=alone, peak_bytes=tried.peak_bytes, notes=(*accept.notes, note))


def _seen(index: int, found: Trial, more: int, notes: list[str]) -> _Seen:
    return _Seen(Accept(index, more, found.peak_bytes, tuple(notes)), found.predicted_seconds, found.moves)


def _given(asked: Asked) -> str:
    return f"budget {format_bytes(asked.memory_budget)} ({asked.memory_budget} bytes)"


def _least(num_bytes: int, asked: Asked) -> str:
    """A least budget, and what it contains that is not the model's, where that is a good part of it."""
    others = ""
    if asked.other_bytes > _WORTH_TELLING * num_bytes:
        others = f", {format_bytes(asked.other_bytes)} of them for the batch, buffers and other tensors on the device"
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes{others})"


def _correction(found: Trial) -> str:
    """The note of a trial step that was not as predicted."""
    return (
        f"a trial step took {format_bytes(found.peak_bytes)} instead of the predicted "
        f"{format_bytes(found.predicted_bytes)}; the prediction was corrected"
    )
