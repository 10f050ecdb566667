"""For all tests of the runtime: none finds the garbage of another, and few look at what others have left."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lowtide.runtime import meter
from lowtide.runtime.fitting import moving
from lowtide.strategies import joint

# So many objects are looked at in some 10 milliseconds; compilers leave hundreds of thousands.
_FEW_OBJECTS = 50_000

_settled: list[meter.TensorWeakRef] = []
"""The tensors among what was frozen here: meters find them by these, as they do where `fit` freezes."""


@pytest.fixture(autouse=True)
def _without_garbage_of_others() -> None:
    """Collect before a test what would else go during it, under the eyes of a meter, and leave out what stays."""
    gc.collect()
    if len(gc.get_objects()) > _FEW_OBJECTS:
        _settled.extend(map(meter.TensorWeakRef, meter._tensors_on_the_heap()))
        gc.freeze()
    meter._settled_tensors[:] = _settled


@pytest.fixture(autouse=True)
def _few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """How good schedules are that move weights is tested where they are made; here any do that stay within a budget."""
    few = {"_NUM_TRIES": 1, "_NUM_MEMORIES": 3, "_FIRST_RESERVES": (0.0,), "_RESERVES": (1.0,), "_NUM_REFINED": 1}
    for name, value in few.items():
        monkeypatch.setattr(joint, name, value)
    monkeypatch.setattr(moving, "_NUM_LATE", 1)


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_frozen() -> Iterator[None]:
    """What is shared by the tests of a file, such as compiled code, ends with it."""
    num_settled = len(_settled)
    yield
    if len(_settled) > num_settled:
        gc.unfreeze()
        gc.collect()
        _settled[:] = map(meter.TensorWeakRef, meter._tensors_on_the_heap())
        gc.freeze()
