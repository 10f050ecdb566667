from __future__ import annotations

import pytest
from tests.report.chains import MIB, deep_chain, moving_schedule, periodic_schedule, recomputing_schedule, small_chain

from lowtide import Release, simulate
from lowtide.report.palette import LAYERS
from lowtide.report.timeline import spans

CASES = {
    "recomputing": (small_chain(), recomputing_schedule()),
    "moving": (small_chain(), moving_schedule()),
    "deep": (deep_chain(), periodic_schedule(339, 18)),
}


@pytest.mark.parametrize("case", CASES)
def test_spans_cover_the_step_without_gaps(case):
    chain, schedule = CASES[case]
    trace = simulate(chain, schedule, bandwidth="1GB/s")
    clock = 0.0
    for span in spans(trace):
        assert span.begin == clock
        assert span.begin <= span.start <= span.end <= span.finish
        pieces = list(span.pieces)
        assert pieces[0][0] == span.begin
        assert pieces[-1][1] == span.finish
        assert all(len(layers) == len(LAYERS) and min(layers) >= 0 for _, _, layers in pieces)
        assert max(sum(layers) for _, _, layers in pieces) == span.step.peak_bytes
        assert len(pieces) == 1 or span.step.idle_seconds > 0
        clock = span.finish
    assert clock == pytest.approx(trace.seconds, rel=1e-12)
    waited = sum(span.finish - span.begin - (span.end - span.start) for span in spans(trace))
    assert waited == pytest.approx(trace.idle_seconds, abs=1e-15)


def test_the_wait_of_a_release_lies_in_its_span():
    trace = simulate(small_chain(), moving_schedule(), bandwidth="4GB/s")
    span = spans(trace)[4]
    assert isinstance(span.step.operation, Release)
    assert span.step.waits_for == 2
    # 20 MiB at 4 GB/s from the end of forward 2; forward 3 covers 2 ms of it.
    assert span.finish - span.begin == pytest.approx(20 * MIB / 4e9 - 2e-3)
    assert span.phase is None


def test_what_is_awaited_is_in_flight_until_it_has_arrived():
    trace = simulate(small_chain(), moving_schedule(), bandwidth="4GB/s")
    waiting = spans(trace)[9]
    ((begin, end, layers),) = waiting.pieces
    assert end - begin == pytest.approx(20 * MIB / 4e9)
    assert layers[LAYERS.index("in flight")] == 20 * MIB
    assert spans(trace)[10].before[LAYERS.index("in flight")] == 0
