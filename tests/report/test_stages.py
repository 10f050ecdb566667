from __future__ import annotations

import pytest
from tests.report.chains import (
    MIB,
    moving_schedule,
    periodic_schedule,
    recomputing_schedule,
    small_chain,
    store_all_schedule,
)

from lowtide import Backward, Chain, Forward, Offload, Prefetch, Release, Schedule, simulate
from lowtide.report.stages import FATES, stage_uses


def uses(schedule, chain=None):
    chain = chain or small_chain()
    return stage_uses(chain, schedule, simulate(chain, schedule, bandwidth="1GB/s"))


def test_plain_training_saves_everything():
    assert [(use.num_forwards, use.fate, use.moved_bytes) for use in uses(store_all_schedule(4))] == [(1, "s", 0)] * 4


def test_what_is_recomputed_was_dropped_or_kept_as_output():
    # Forward 1 keeps a[0] and makes a[1]; forward 2 drops a[1]; forward 3 saves all and so keeps a[2].
    found = uses(recomputing_schedule())
    assert [use.fate for use in found] == ["d", "k", "s", "s"]
    assert [use.num_forwards for use in found] == [2, 2, 1, 1]


def test_what_moves_is_counted_both_ways():
    found = uses(moving_schedule())
    assert [use.fate for use in found] == ["h", "s", "s", "s"]
    assert [use.moved_bytes for use in found] == [40 * MIB, 0, 0, 0]


def test_an_output_on_the_host():
    schedule = Schedule(
        "by hand",
        [
            Forward(1, "keep"),
            Offload("a", 1),
            Forward(2, "all"),
            Release("a", 1),
            Forward(3, "all"),
            Forward(4, "all"),
            Backward(4),
            Backward(3),
            Prefetch("a", 1),
            Backward(2),
            Forward(1, "all"),
            Backward(1),
        ],
    )
    assert [use.fate for use in uses(schedule)] == ["m", "s", "s", "s"]


@pytest.mark.parametrize("length", [2, 3, 5])
def test_periodic_checkpointing_keeps_the_ends_of_segments(length):
    chain = Chain("twelve", [*small_chain().stages] * 3)
    found = uses(periodic_schedule(12, length), chain)
    last = 12 - (12 % length or length)
    for k, use in enumerate(found, start=1):
        assert use.fate == ("s" if k > last else "k" if k % length == 0 else "d")
        assert use.num_forwards == (1 if k > last else 2)
    assert set(FATES) >= {use.fate for use in found}
