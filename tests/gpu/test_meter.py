from __future__ import annotations

import gc

import pytest
import torch

from lowtide.runtime.meter import Meter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 2**20


@pytest.fixture(autouse=True)
def _nothing_cached():
    """A block that is there already, and a little larger, is given out as it is."""
    gc.collect()
    torch.cuda.empty_cache()


def test_the_allocator_is_read() -> None:
    with Meter("cuda") as meter:
        x = torch.zeros(8 * MIB // 4, device="cuda")
        torch.zeros(4 * MIB // 4, device="cuda")
        assert meter.live_bytes - meter.start_bytes == 8 * MIB
        assert meter.peak_bytes - meter.start_bytes == 12 * MIB
        meter.reset_peak()
        assert meter.peak_bytes - meter.start_bytes == 8 * MIB
        del x
    assert meter.live_bytes == meter.start_bytes


def test_nested_meters_do_not_lose_the_outer_peak() -> None:
    with Meter("cuda") as outer:
        torch.zeros(8 * MIB // 4, device="cuda")
        with Meter("cuda") as inner:
            torch.zeros(2 * MIB // 4, device="cuda")
        assert inner.peak_bytes - inner.start_bytes == 2 * MIB
        assert outer.peak_bytes - outer.start_bytes == 8 * MIB
