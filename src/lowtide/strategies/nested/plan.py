"""The best nested persistent schedule for a problem: shared by `rotor` and `revolve`."""

from __future__ import annotations

from lowtide.schedule import Schedule
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.nested.costs import Costs, operations_of, outside_bytes
from lowtide.strategies.nested.table import Table, least_memory
from lowtide.strategies.sides import freed
from lowtide.strategies.slots import default_num_slots


def plan_nested(problem: Problem, costs: Costs, strategy: str, most_slots: int | None) -> Answer:
    """The fastest schedule within the budget.

    Raises:
        InfeasibleBudgetError: below `nested_minimum_bytes`.
    """
    least = least_memory(costs)
    outside = outside_bytes(problem.chain)
    minimum = outside + int(least.least_bytes[1, costs.num_stages])
    if problem.memory_budget < minimum:
        raise problem.infeasible(strategy, minimum)
    available = problem.memory_budget - outside
    table = Table.of(costs, least, available, most_slots or default_num_slots(costs.num_stages))
    decisions, slower = table.decisions(available)
    return Answer(
        Schedule(strategy, freed(problem.chain, operations_of(costs, decisions))),
        lower_bound_seconds=costs.fastest_seconds + slower if table.is_exact else None,
        details={} if table.slots is None else {"slots": table.slots.num_slots, "slot_bytes": table.slots.unit_bytes},
    )


def nested_minimum_bytes(problem: Problem, costs: Costs) -> int:
    """The lowest peak of any schedule of the class, exact to the byte."""
    return outside_bytes(problem.chain) + int(least_memory(costs).least_bytes[1, costs.num_stages])
