"""`revolve`: the optimal schedule in the model of automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.nested.costs import Costs, costs_of
from lowtide.strategies.nested.plan import nested_minimum_bytes, plan_nested


@dataclass(frozen=True, slots=True)
class Revolve:
    """Keep only outputs, in the best nesting; recompute each stage in full right before its backward.

    So every stage but the last runs forward at least twice, and memory beyond all outputs is of no use. Reference:
    Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, §5.3; Gruslys et al., "Memory-efficient
    backpropagation through time", 2016, appendix C.

    Args:
        slots: how finely memory is cut; see `Rotor`.
    """

    slots: int | None = None

    def plan(self, problem: Problem) -> Answer:
        """The fastest schedule of this kind within the budget.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        return plan_nested(problem, _costs(problem.chain), "revolve", self.slots)

    def minimum_bytes(self, problem: Problem) -> int:
        """The lowest peak of any schedule of this kind."""
        return nested_minimum_bytes(problem, _costs(problem.chain))


def _costs(chain: Chain) -> Costs:
    return costs_of(chain, saves_ahead=False, variants=False)
