"""Which schedule is tried next, and when to stop: the policy alone, without a model, a device or torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from lowtide.runtime.fitting.planning import (
    Accept,
    Asked,
    Attempt,
    Attempts,
    Infeasible,
    OutOfMemory,
    Refuse,
    Trial,
    TrialOutcome,
    next_attempt,
)

BUDGET = 1000


def driven(asked: Asked, outcome_of: Callable[[Attempt, int], TrialOutcome]) -> tuple[Accept | Refuse, list[Attempt]]:
    """Ask until there is an answer; the history is asked twice each time, and must say the same."""
    history = Attempts(asked)
    for _ in range(50):
        answer = next_attempt(history)
        assert next_attempt(history) == answer
        if not isinstance(answer, Attempt):
            return answer, [attempt for attempt, _ in history.entries]
        history = history.then(answer, outcome_of(answer, len(history.entries)))
    raise AssertionError("the policy finds no end")


def device(fixed: int, off: int = 0, *, copies: int = 0, room: int = 10**9) -> Callable[[Attempt, int], TrialOutcome]:
    """A device on which a schedule uses all of its budget, the leanest takes `fixed`, and a trial step `off` more than
    predicted, `copies` more where values move; it has `room`.
    """

    def outcome(attempt: Attempt, _: int) -> TrialOutcome:
        least = fixed + attempt.more_bytes
        if attempt.memory_budget < least and attempt.again is None:
            return Infeasible(least, f"the least is {least}")
        predicted = max(least, attempt.memory_budget)
        peak = predicted + off - attempt.more_bytes + (copies if attempt.moves else 0)
        if attempt.is_tried and peak > room:
            return OutOfMemory()
        return Trial(predicted, 1 / peak, attempt.moves, peak, 1 / peak)

    return outcome


def test_it_imports_no_torch():
    code = "import sys; import lowtide.runtime.fitting.planning; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_schedule_that_takes_what_was_predicted_is_accepted_at_once():
    assert driven(Asked(BUDGET), device(500)) == (Accept(0, 0, BUDGET), [Attempt(BUDGET)])


def test_a_prediction_that_was_too_high_is_corrected_and_the_rest_of_the_budget_used():
    answer, attempts = driven(Asked(BUDGET), device(500, off=-100))
    assert [attempt.more_bytes for attempt in attempts] == [0, -100]
    assert (answer.index, answer.more_bytes, answer.peak_bytes) == (1, -100, BUDGET)
    assert answer.notes == ("a trial step took 900 B instead of the predicted 1000 B; the prediction was corrected",)


def test_several_corrections_are_one_note():
    peaks = [800, 900, 1000]
    answer, attempts = driven(Asked(BUDGET), lambda _, place: Trial(BUDGET, 1 / (place + 1), peak_bytes=peaks[place]))
    assert len(attempts) == 3
    assert answer.notes == ("a trial step took 900 B instead of the predicted 1000 B; the prediction was corrected",)


def test_a_schedule_that_takes_more_than_the_budget_is_never_accepted():
    answer, attempts = driven(Asked(BUDGET), device(500, off=100))
    assert isinstance(answer, Accept)
    assert answer.peak_bytes <= BUDGET
    assert attempts[answer.index].more_bytes == 100


def test_schedules_that_exceed_the_budget_each_time_are_refused_with_what_the_last_one_took():
    answer, attempts = driven(Asked(BUDGET), lambda *_: Trial(900, 1.0, peak_bytes=1001))
    assert answer.minimum_bytes == 1001
    assert "every schedule that was tried took more than budget" in answer.message
    assert len(attempts) == 8


@pytest.mark.parametrize(("off", "num_trials"), [(-100, 1), (100, 2)])
def test_where_trials_are_costly_the_first_schedule_that_fits_is_taken(off, num_trials):
    answer, attempts = driven(Asked(BUDGET, is_costly=True), device(500, off=off))
    assert isinstance(answer, Accept)
    assert answer.more_bytes == off
    assert answer.peak_bytes <= BUDGET
    assert len(attempts) == num_trials
    refused, attempts = driven(Asked(BUDGET, is_costly=True), lambda *_: Trial(900, 1.0, peak_bytes=1001))
    assert isinstance(refused, Refuse)
    assert len(attempts) == 2


def test_where_trials_are_costly_a_small_excess_needs_no_second_one():
    answer, attempts = driven(Asked(BUDGET, is_costly=True), device(500, off=9))
    assert isinstance(answer, Accept)
    assert answer.peak_bytes <= BUDGET
    assert len(attempts) == 1


def test_the_leanest_schedule_is_tried_where_the_prediction_says_no():
    answer, attempts = driven(Asked(BUDGET), device(1050, off=-100))
    assert attempts[1] == Attempt(1050, is_leanest=True)
    assert isinstance(answer, Accept)
    assert answer.peak_bytes <= BUDGET
    answer, _ = driven(Asked(BUDGET), device(1500, off=-100))
    assert (answer.minimum_bytes, "1400 bytes" in answer.message) == (1400, True)
    answer, _ = driven(Asked(BUDGET, rounding_bytes=30), device(1500, off=-100))
    assert answer.minimum_bytes == 1430


def test_a_device_with_less_memory_than_the_budget_is_planned_for():
    answer, attempts = driven(Asked(BUDGET), device(500, room=800))
    assert [attempt.memory_budget for attempt in attempts] == [1000, 900, 810, 729]
    assert len(answer.notes) == 3
    answer, _ = driven(Asked(BUDGET), device(500, room=600))
    assert answer == Refuse(is_out_of_memory=True)
    answer, attempts = driven(Asked(BUDGET), device(950, room=980))  # a tenth less is too much less
    assert (attempts[answer.index].memory_budget, len(answer.notes)) == (950, 1)


def test_copies_that_take_more_than_recomputation_do_not_make_a_budget_too_small():
    answer, attempts = driven(Asked(BUDGET, moves=True), device(500, copies=600))
    assert isinstance(answer, Accept)
    assert not attempts[answer.index].moves
    answer, _ = driven(Asked(BUDGET, moves=True), device(1200, copies=600))
    assert (answer.minimum_bytes, "with recomputation alone (with offloading" in answer.message) == (1200, True)
    answer, _ = driven(Asked(BUDGET, moves=True, is_auto=False), device(500, copies=600))
    assert isinstance(answer, Refuse)


@pytest.mark.parametrize(("seconds", "moves", "timed"), [(2.0, False, [3, 3]), (0.9, True, [3, 3]), (0.5, True, [3])])
def test_copies_are_timed_against_recomputation(seconds, moves, timed):
    def outcome(attempt: Attempt, index: int) -> TrialOutcome:
        return Trial(BUDGET, 1.0, attempt.moves, BUDGET, seconds if attempt.moves else 1.0)

    answer, attempts = driven(Asked(BUDGET, moves=True), outcome)
    assert attempts[answer.index].moves == moves
    assert [attempt.num_timed for attempt in attempts][2:] == timed
    answer, attempts = driven(Asked(BUDGET, moves=True, is_auto=False), outcome)
    assert (answer.index, len(attempts)) == (0, 1)


def test_an_optimizer_step_that_exceeds_the_budget_is_refused_with_what_is_enough_for_a_schedule_too():
    answer, _ = driven(Asked(BUDGET, update_bytes=1200), device(500, off=50))
    assert (answer.minimum_bytes, "1200 bytes" in answer.message) == (1200, True)
    answer, _ = driven(Asked(BUDGET, update_bytes=1200), device(1190, off=50))
    assert (answer.minimum_bytes, "raise it to 1240 bytes" in answer.message) == (1240, True)


def test_a_run_that_was_accepted_goes_on_with_the_leanest_schedule():
    asked = Asked(BUDGET, goes_on=True, update_bytes=1200)
    answer, attempts = driven(asked, device(1500))
    assert attempts[answer.index] == Attempt(1500, is_leanest=True, is_tried=False)
    assert (answer.peak_bytes, "is below the" in answer.refusal) == (None, True)
    assert driven(asked, device(500)) == (Accept(0, 0, BUDGET), [Attempt(BUDGET)])
