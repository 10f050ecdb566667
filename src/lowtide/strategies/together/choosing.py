"""Which trips to make so that a round fits: greedily, the most excess removed for each byte copied.

This is algorithm 1 of the weights paper (Beaumont, Eyraud-Dubois, Shilova, Zhao: Weight offloading strategies for
training large DNN models, section 5) over every kind of value. The profit of a trip is the excess that it removes,
summed over the computations that it covers, by the copies that it costs: out and in, or only in where another trip of
the same version has paid for the way out, and where nothing ever changes the value.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from lowtide.strategies.together.order import Round, Trip


def chosen_trips(order: Round, memory_budget: int) -> list[int] | None:
    """The trips to make, by index; None where not even all of them are enough."""
    excess = np.maximum(0, order.peak_bytes - memory_budget)
    paid: set[int] = set()
    trips = order.trips

    def profit(index: int) -> float:
        trip = trips[index]
        removed = sum(int(np.minimum(excess[part], trip.num_bytes).sum()) for part in order.covered(trip))
        return removed / (trip.num_bytes * _copies(trip, paid))

    by_version: dict[int, list[int]] = {}
    for index, trip in enumerate(trips):
        by_version.setdefault(trip.version, []).append(index)
    queue = [(-profit(index), index) for index in range(len(trips))]
    heapq.heapify(queue)
    chosen: list[int] = []
    taken: set[int] = set()
    while excess.any():
        best = _most_profitable(queue, taken, profit)
        if best is None:
            return None
        trip = trips[best]
        for part in order.covered(trip):
            np.subtract(excess[part], np.minimum(excess[part], trip.num_bytes), out=excess[part])
        chosen.append(best)
        taken.add(best)
        paid.add(trip.version)
        for other in by_version[trip.version]:  # they cost less now; all other profits only fall
            if other not in taken:
                heapq.heappush(queue, (-profit(other), other))
    return sorted(chosen)


def _copies(trip: Trip, paid: set[int]) -> int:
    return 1 if trip.made is None or trip.version in paid else 2


def _most_profitable(queue: list[tuple[float, int]], taken: set[int], profit: Callable[[int], float]) -> int | None:
    """The trip of the highest profit; what stands in the queue is at least what a trip is worth by now."""
    while queue:
        _, index = heapq.heappop(queue)
        if index in taken:
            continue
        current = -profit(index)
        if current == 0:
            continue
        if queue and current > queue[0][0]:
            heapq.heappush(queue, (current, index))
            continue
        return index
    return None
