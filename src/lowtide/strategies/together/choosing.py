"""Which trips to make so that a round fits: greedily, the most excess removed for each byte copied.

This is algorithm 1 of the weights paper (Beaumont, Eyraud-Dubois, Shilova, Zhao: Weight offloading strategies for
training large DNN models, section 5) over every kind of value. The profit of a trip is the excess that it removes,
summed over the computations that it covers, by the copies that it costs: out and in, or only in where another trip of
the same version has paid for the way out, and where nothing ever changes the value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.strategies.numerics.kernels import kernel, kernel_part
from lowtide.strategies.together.order import Bytes, Round

# Of each trip, in this order; `_COPIES` is how many it costs, until its version is paid for.
_BEGIN, _END, _BYTES, _VERSION, _COPIES = range(5)


def chosen_trips(order: Round, memory_budget: int) -> list[int] | None:
    """The trips to make, by index; None where not even all of them are enough."""
    listed = [(t.begin, t.end, t.num_bytes, t.version, 1 if t.made is None else 2) for t in order.trips]
    is_chosen = np.zeros(len(listed), np.bool_)
    excess = np.maximum(0, order.peak_bytes - memory_budget)
    if not _choose(np.array(listed, np.int64).reshape(-1, 5), excess, is_chosen):
        return None
    return [int(index) for index in np.flatnonzero(is_chosen)]


@kernel
def _choose(trips: Bytes, excess: Bytes, is_chosen: NDArray[np.bool_]) -> bool:
    """Choose until nothing exceeds the budget; False where no trip removes any of what does."""
    # What a trip may be worth: profits only fall, but for those of a version that another trip has paid for.
    bounds = np.array([_profit(trips, index, excess) for index in range(len(trips))])
    while excess.any():
        best = _most_profitable(trips, bounds, excess)
        if best < 0:
            return False
        for at in range(trips[best, _BEGIN] + 1, trips[best, _END]):
            excess[at % len(excess)] -= min(excess[at % len(excess)], trips[best, _BYTES])
        is_chosen[best] = True
        bounds[best] = 0.0
        for other in range(len(trips)):
            if trips[other, _VERSION] == trips[best, _VERSION] and not is_chosen[other]:
                trips[other, _COPIES] = 1
                bounds[other] = _profit(trips, other, excess)
    return True


@kernel_part
def _most_profitable(trips: Bytes, bounds: NDArray[np.float64], excess: Bytes) -> int:
    """The trip of the highest profit, -1 where none has any; only those that may be it are looked at."""
    while True:
        best, second = -1, 0.0
        for index in range(len(bounds)):
            if bounds[index] > (bounds[best] if best >= 0 else 0.0):
                best, second = index, (bounds[best] if best >= 0 else 0.0)
            elif bounds[index] > second:
                second = bounds[index]
        if best < 0:
            return -1
        bounds[best] = _profit(trips, best, excess)
        if bounds[best] > 0 and bounds[best] >= second:
            return best


@kernel_part
def _profit(trips: Bytes, index: int, excess: Bytes) -> float:
    removed = 0
    for at in range(trips[index, _BEGIN] + 1, trips[index, _END]):
        removed += min(excess[at % len(excess)], trips[index, _BYTES])
    return float(removed / (trips[index, _BYTES] * trips[index, _COPIES]))
