"""For all tests: what was imported is left out of garbage collections."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what is there: `fit` collects several times, each time through some 400 000 objects of torch's modules."""
    gc.collect()
    gc.freeze()
