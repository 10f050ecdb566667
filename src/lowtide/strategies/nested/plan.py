"""The best nested persistent schedule for a problem: shared by `rotor` and `revolve`."""

from __future__ import annotations

from dataclasses import replace

from lowtide.schedule import Schedule
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.nested.costs import Costs, from_below, operations_of, outside_bytes
from lowtide.strategies.nested.table import Table, least_memory
from lowtide.strategies.sides import freed


def plan_nested(problem: Problem, costs: Costs, strategy: str, most_slots: int | None) -> Answer:
    """The fastest schedule within the budget.

    Where the code around the stages holds outputs beyond their use, it depends on the whole schedule whether that
    counts. The schedule that is the fastest where it counts as little as it can is taken if it is within the budget by
    simulation; else the fastest where it counts in any case.

    Raises:
        InfeasibleBudgetError: below `nested_minimum_bytes`.
    """
    if not costs.outliving.shape[0]:
        return _fastest(problem, costs, strategy, most_slots)
    minimum = nested_minimum_bytes(problem, costs)
    if problem.memory_budget < minimum:
        raise problem.infeasible(strategy, minimum)
    hopeful = _fastest(problem, from_below(costs, problem.chain), strategy, most_slots)
    if problem.evaluate(hopeful.schedule).peak_bytes <= problem.memory_budget:
        return hopeful
    found = _fastest(problem, costs, strategy, most_slots)
    return replace(found, lower_bound_seconds=hopeful.lower_bound_seconds)


def _fastest(problem: Problem, costs: Costs, strategy: str, most_slots: int | None) -> Answer:
    """The fastest schedule within the budget by these costs."""
    least = least_memory(costs)
    outside = outside_bytes(problem.chain)
    minimum = outside + int(least.least_bytes[1, costs.num_stages])
    if problem.memory_budget < minimum:
        raise problem.infeasible(strategy, minimum)
    available = problem.memory_budget - outside
    if problem.bandwidth:  # strategies that move values ask for parts and other budgets of the same table
        table = Table.shared(problem.known, costs, least, available, most_slots)
    else:
        table = Table.of_one_budget(costs, least, available, most_slots)
    decisions, slower = table.decisions(available)
    # Costs count side values from above: whether one is idle may depend on more of the schedule than they know.
    is_bound = table.is_exact and not problem.chain.side_values
    return Answer(
        Schedule(strategy, freed(problem.chain, operations_of(costs, decisions))),
        lower_bound_seconds=costs.fastest_seconds + slower if is_bound else None,
        details={} if table.slots is None else {"slots": table.slots.num_slots, "slot_bytes": table.slots.unit_bytes},
    )


def nested_minimum_bytes(problem: Problem, costs: Costs) -> int:
    """The lowest peak of any schedule of the class, exact to the byte."""
    return outside_bytes(problem.chain) + int(least_memory(costs).least_bytes[1, costs.num_stages])
