"""`rotor`: the optimal nested persistent schedule of recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.schedule import Schedule
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.nested import costs_of, operations_of, outside_bytes
from lowtide.strategies.nested_table import Table, least_memory
from lowtide.strategies.slots import DEFAULT_NUM_SLOTS

NAME = "rotor"


@dataclass(frozen=True, slots=True)
class Rotor:
    """Each stage is run forward with all it saves, or from a kept input as often as it takes, in the best nesting.

    Chooses among the variants of each stage too. Reference: Beaumont et al., "Optimal checkpointing for heterogeneous
    chains", 2019, §4.

    Args:
        slots: how finely memory is cut; with a budget of no more bytes than that the answer is optimal.
    """

    slots: int = DEFAULT_NUM_SLOTS

    def plan(self, problem: Problem) -> Answer:
        """The fastest schedule within the budget.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        costs = costs_of(problem.chain)
        least = least_memory(costs)
        outside = outside_bytes(problem.chain)
        minimum = outside + int(least.least_bytes[1, costs.num_stages])
        if problem.memory_budget < minimum:
            raise problem.infeasible(NAME, minimum)
        available = problem.memory_budget - outside
        table = Table.of(costs, least, available, self.slots)
        decisions, _ = table.decisions(available)
        return Answer(Schedule(NAME, operations_of(costs, decisions)))

    def minimum_bytes(self, problem: Problem) -> int:
        """The least peak of any nested schedule."""
        costs = costs_of(problem.chain)
        return outside_bytes(problem.chain) + int(least_memory(costs).least_bytes[1, costs.num_stages])
