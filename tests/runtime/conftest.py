"""For all tests of the runtime: none finds the garbage of another."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _without_garbage_of_others() -> None:
    """Collect before a test what would else go during it, under the eyes of a meter."""
    gc.collect()
