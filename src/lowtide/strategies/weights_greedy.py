"""`weights-greedy` and `weights-greedy-nodiscount`: greedy selection, greedy scheduling (weights paper, section 5).

Algorithm 1 (`weight_selection`) says which weights leave and when, algorithm 2 (`weight_transfers`) places the copies.
Followed to the letter, algorithm 1 leaves no room for weights on their way: here it is run with some bytes of the
budget held back for them, and the best of several such reserves is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.weights.choices import Choice, choices_of, select_greedily, typical_bytes
from lowtide.strategies.weights.periods import Period, checked_period, cyclic_schedule, without_vain_copies
from lowtide.strategies.weights.relaxation import relaxed_seconds
from lowtide.strategies.weights.transfers import Placed, place

# Reserves tried, in typical weights. About two are on their way at a time, one out and one in; at low bandwidths and
# with uneven weights more can pay, and with very little memory none is to be had.
_RESERVES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class WeightsGreedy:
    """Take the most profitable choices until the budget holds, then move each weight as early as possible.

    Beaumont, Eyraud-Dubois, Shilova, Zhao: Weight offloading strategies for training large DNN models, section 5.

    Optimizer state, where the chain has any, is moved too wherever that is the most profitable choice.

    Args:
        discount: one copy to the host may serve two fetches, since a forward does not change its weights. False: each
            fetch needs its own copy out (the paper's Greedy*).

    Example:
        >>> from lowtide import Chain, Stage, solve
        >>> stages = [Stage(str(k), 1.0, 2.0, output_bytes=1, saved_bytes=1, weight_bytes=10) for k in range(8)]
        >>> solve(Chain("eight", stages), memory_budget=70, strategy="weights-greedy", bandwidth=10).seconds
        24.0
    """

    discount: bool = True

    @property
    def _name(self) -> str:
        return "weights-greedy" if self.discount else "weights-greedy-nodiscount"

    def plan(self, problem: Problem) -> Answer:
        """The best schedule over the reserves and, for each, over all cuts of the copies."""
        period = checked_period(problem, self._name)
        if problem.memory_budget < period.least_bytes:
            raise problem.infeasible(self._name, period.least_bytes)
        best: tuple[Placed, float] | None = None
        for chosen, reserve, discount in _selections(period, problem.memory_budget, discount=self.discount):
            placed = place(
                period,
                chosen,
                memory_budget=problem.memory_budget,
                bandwidth=problem.bandwidth,
                duplex=problem.duplex,
                discount=discount,
            )
            if placed is not None and (best is None or placed.seconds < best[0].seconds):
                best = (placed, reserve)
        if best is None:
            raise AssertionError(
                f"strategy {self._name!r} found no schedule for a budget of {problem.memory_budget} bytes, but "
                f"{period.least_bytes} are enough: this is a bug in lowtide"
            )
        placed, reserve = best
        return Answer(
            cyclic_schedule(self._name, period.num_stages, without_vain_copies(placed.operations)),
            lower_bound_seconds=relaxed_seconds(
                period, memory_budget=problem.memory_budget, bandwidth=problem.bandwidth, duplex=problem.duplex
            ),
            details={"cut": placed.cut, "reserve_bytes": int(reserve)},
        )

    def minimum_bytes(self, problem: Problem) -> int:
        """Each computation with only its own stage's weights and optimizer state."""
        return checked_period(problem, self._name).least_bytes


def _selections(period: Period, memory_budget: int, *, discount: bool) -> Iterator[tuple[list[Choice], float, bool]]:
    """The selections to place, each once: the choices, the reserve, and whether copies are shared.

    With the discount also those that algorithm 1 makes without it, so that it never makes an answer worse.
    """
    choices = choices_of(period)
    seen: set[tuple[frozenset[int], bool]] = set()
    for reserve in _RESERVES:
        for profit_discounted, shared in (
            ((True, True), (False, True), (False, False)) if discount else ((False, False),)
        ):
            held_back = int(reserve * typical_bytes(choices))
            taken = select_greedily(period, choices, memory_budget - held_back, discount=profit_discounted)
            if taken is None or (frozenset(taken), shared) in seen:
                continue
            seen.add((frozenset(taken), shared))
            yield [choices[index] for index in taken], held_back, shared
