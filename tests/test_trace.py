from __future__ import annotations

import pytest
from tests.report.chains import MIB, moving_schedule, recomputing_schedule, small_chain

from lowtide import Backward, Forward, Prefetch, Release, simulate
from lowtide.trace import CATEGORIES


@pytest.mark.parametrize("schedule", [recomputing_schedule(), moving_schedule()], ids=["recomputing", "moving"])
def test_the_peak_of_each_operation_is_known_by_category(schedule):
    chain = small_chain()
    for step in simulate(chain, schedule, bandwidth="1GB/s").steps:
        operation, expected = step.operation, 0
        if isinstance(operation, Forward):
            stage = chain.stage(operation.stage)
            expected = stage.saving_extra_bytes if operation.save == "all" else stage.forward_extra_bytes
        elif isinstance(operation, Backward):
            expected = chain.stage(operation.stage).backward_extra_bytes
        assert step.transient_bytes == expected
        assert sum(step.peak_by_category) + expected == step.peak_bytes
        assert all(peak >= 0 for peak in step.peak_by_category)
        if isinstance(operation, Release):
            assert sum(step.peak_by_category) == step.stored_before_bytes
        if isinstance(operation, Prefetch):
            assert step.peak_by_category == step.stored_by_category


def test_what_a_backward_holds_is_what_it_reads_and_what_it_makes():
    trace = simulate(small_chain(), recomputing_schedule())
    step = trace.steps[-2]
    assert step.operation == Backward(2)
    held = {name: num_bytes // MIB for name, num_bytes in zip(CATEGORIES, step.peak_by_category, strict=True)}
    # base 1 + weights 3 + optimizer 1; a[0]; abar[1] and abar[2], run again; delta[2], delta[1] and the weight
    # gradients of stages 4 and 2.
    assert held == {
        "base": 5,
        "weights": 0,
        "activations": 4,
        "saved": 0,
        "recomputed": 50,
        "in flight": 0,
        "gradients": 8 + 8 + 3,
    }


def test_a_trace_knows_what_it_starts_from():
    trace = simulate(small_chain(), recomputing_schedule())
    # base 1 + weights 3 + optimizer 1; a[0]; delta[4].
    assert trace.start_by_category == (5 * MIB, 0, 4 * MIB, 0, 0, 0, MIB)
    assert sum(trace.start_by_category) == trace.steps[0].stored_before_bytes
