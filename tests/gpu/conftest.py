"""For all tests on a GPU: matrix products are deterministic, and whoever compares bits can ask for all else to be."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import pytest
import torch


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Operations whose bits do not differ from run to run; afterwards nothing is left on the device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()
