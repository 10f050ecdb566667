"""For all tests: what was imported is left out of garbage collections."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest

# Modules that torch imports when it first needs them, with some 300 000 objects; the second one only where something is
# compiled, as in a run of all tests.
_IMPORTED_LATE, _IMPORTED_TO_COMPILE = "torch._dynamo", "torch._inductor.compile_fx"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what is there: `fit` collects several times, each time through some 400 000 objects of torch's modules."""
    if "torch" in sys.modules:
        importlib.import_module(_IMPORTED_LATE)
        if hasattr(session.config, "workerinput"):
            importlib.import_module(_IMPORTED_TO_COMPILE)
    gc.collect()
    gc.freeze()
