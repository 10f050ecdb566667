"""Models whose own code uses the transforms of torch.func: what is refused. That training is equal with them:
`tests/runtime/test_awkward.py`.
"""

from __future__ import annotations

import pytest
import torch
from tests.runtime.awkward.paths import WIDTH, Between

import lowtide


def test_a_model_whose_own_code_differentiates_through_a_transform_is_refused_in_one_line():
    with pytest.raises(lowtide.CaptureError, match=r"transform of torch.func .* inside a submodule"):
        lowtide.measure(Between(), torch.ones(4, WIDTH))
