"""`pofo`: the optimal combination of recomputation and offloading."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.continuous.conversion import (
    converted_plans,
    fastest,
    moved_as_needed,
    offloaded_plans,
    once_each,
    plans_with_other_values_moved,
)
from lowtide.strategies.continuous.search import DEFAULT_NUM_SLOTS, ContinuousModel
from lowtide.strategies.copies.gaps import Placement, Profile
from lowtide.strategies.nested.costs import costs_of, operations_of, outside_bytes
from lowtide.strategies.nested.plan import nested_minimum_bytes, plan_nested
from lowtide.strategies.nested.table import Table, least_memory
from lowtide.strategies.numerics.arrays import from_above

# How much more memory, as shares of the budget, orders are made for that know when side values are recomputed.
_SHARES_MORE = (1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True, slots=True)
class Pofo:
    """Recompute or move each value, whichever is cheaper, so that both the device and the link are busy.

    Searches the continuous model (memory is freed and fetched bit by bit), converts its best plans into schedules that
    move each value at once, and answers with the fastest by simulation; pure recomputation and pure offloading are in
    the search space and are tried too. Chooses among the variants of each stage. Side values stay on the device in the
    model; local search over what moves also tries to move them. Reference: Beaumont, Eyraud-Dubois, Shilova, "Efficient
    combination of rematerialization and offloading for training DNNs", 2021, §4 and appendix B.

    Args:
        slots: how finely amounts of memory are told apart on long chains.

    Example:
        >>> from lowtide import Chain, Stage, solve
        >>> chain = Chain("four", [Stage(str(k), 1.0, 1.0, output_bytes=8, saved_bytes=8) for k in range(4)])
        >>> solve(chain, memory_budget=40, strategy="pofo", bandwidth=8).seconds
        8.0
    """

    slots: int = DEFAULT_NUM_SLOTS

    def plan(self, problem: Problem) -> Answer:
        """The fastest of the converted plans, by simulation.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        if not problem.bandwidth:
            return plan_nested(problem, costs_of(problem.chain), "pofo", None)
        model = ContinuousModel.of(from_above(problem.chain), problem.bandwidth, recompute=True)
        leanest = _leanest(problem)
        minimum = _minimum_bytes(problem.chain, model, leanest)
        if problem.memory_budget < minimum:
            raise problem.infeasible("pofo", minimum)
        placements: list[Placement] = []
        if leanest is not None and problem.memory_budget < model.minimum_bytes:
            placements += moved_as_needed(problem, leanest)
        seconds: float | None = None
        if problem.memory_budget >= model.minimum_bytes:
            converted, seconds = converted_plans(problem, model, self.slots)
            placements += converted
        recomputed = _recomputed(problem)
        placements += [*([] if recomputed is None else [recomputed]), *self._offloaded(problem)]
        sides, stages = problem.chain.side_values, problem.chain.stages
        if any(not side.stays for side in sides) or any(stage.outliving for stage in stages):
            best = min((placement.seconds for placement in placements), default=math.inf)
            placements += plans_with_other_values_moved(problem, self.slots, best)
            for order in _recomputed_for_more(problem):
                if order.compute_seconds < min((placement.seconds for placement in placements), default=math.inf):
                    placements += moved_as_needed(problem, order)
        return Answer(fastest("pofo", placements), model_seconds=seconds)

    def minimum_bytes(self, problem: Problem) -> int:
        """What is needed if every kept value is moved; without a link, what rotor needs."""
        if not problem.bandwidth:
            return nested_minimum_bytes(problem, costs_of(problem.chain))
        model = ContinuousModel.of(from_above(problem.chain), problem.bandwidth, recompute=True)
        return _minimum_bytes(problem.chain, model, _leanest(problem))

    def _offloaded(self, problem: Problem) -> list[Placement]:
        """Pure offloading: the plans of `offload`, if feasible."""
        if problem.memory_budget < once_each(problem.chain).need_bytes(None):
            return []
        return offloaded_plans(problem, self.slots)[0]


def _minimum_bytes(chain: Chain, model: ContinuousModel, leanest: Profile | None) -> int:
    """The model counts side values, and what the code around the stages holds, from above. Where each computation runs
    once, and in the leanest schedule that recomputes alone, everything can move that nothing needs.
    """
    if leanest is None:
        return model.minimum_bytes
    return min(model.minimum_bytes, once_each(chain).need_bytes(None), leanest.need_bytes(None))


def _leanest(problem: Problem) -> Profile | None:
    """The leanest schedule that recomputes alone; None where the model knows all that is there."""
    chain = problem.chain
    if not chain.has_other_values:
        return None
    costs = costs_of(chain)
    least = least_memory(costs)
    available = int(least.least_bytes[1, costs.num_stages])
    decisions, _ = Table.shared(problem.known, costs, least, available).decisions(available)
    return Profile(chain, operations_of(costs, decisions))


def _recomputed_for_more(problem: Problem) -> Iterator[Profile]:
    """The orders of `rotor` for more memory than there is: what they lack may be found by moving.

    Only these know of side values that are freed and recomputed with their makers; the model keeps all of them.
    """
    costs = costs_of(problem.chain)
    least = least_memory(costs)
    available = problem.memory_budget - outside_bytes(problem.chain)
    budgets = [available + int(share * problem.memory_budget) for share in _SHARES_MORE]
    enough, ample = int(least.least_bytes[1, costs.num_stages]), int(least.ample_bytes[1, costs.num_stages])
    budgets = [budget for budget in budgets if enough <= budget < ample]
    if budgets:
        table = Table.shared(problem.known, costs, least, budgets[-1])
        for budget in budgets:
            yield Profile(problem.chain, operations_of(costs, table.decisions(budget)[0]))


def _recomputed(problem: Problem) -> Placement | None:
    """Pure recomputation: the answer of `rotor`, if feasible."""
    costs = costs_of(problem.chain)
    least = least_memory(costs)
    available = problem.memory_budget - outside_bytes(problem.chain)
    if available < int(least.least_bytes[1, costs.num_stages]):
        return None
    decisions, _ = Table.shared(problem.known, costs, least, available).decisions(available)
    order = operations_of(costs, decisions)
    return Profile(problem.chain, order).place((), problem.memory_budget, problem.bandwidth)
