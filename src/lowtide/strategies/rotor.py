"""`rotor`: the optimal nested persistent schedule of recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.strategies.base import Answer, Problem
from lowtide.strategies.nested.costs import costs_of
from lowtide.strategies.nested.plan import nested_minimum_bytes, plan_nested


@dataclass(frozen=True, slots=True)
class Rotor:
    """Run each stage and save everything, or recompute it from a kept input as often as needed, in the best nesting.

    Chooses among the variants of each stage too. Reference: Beaumont et al., "Optimal checkpointing for heterogeneous
    chains: how to train deep neural networks with limited memory", 2019, §4.

    Args:
        slots: how finely memory is cut for a long chain; None: 500, or more where that takes no time. Up to about a
            hundred stages, and where the bytes to share out are no more than the slots, the answer is optimal; else it
            is found by interpolating between slots.

    Example:
        >>> from lowtide import Chain, Stage, solve
        >>> chain = Chain("three", [Stage(str(k), 1.0, 2.0, output_bytes=10, saved_bytes=40) for k in (1, 2, 3)])
        >>> solve(chain, memory_budget=110, strategy="rotor").seconds
        10.0
    """

    slots: int | None = None

    def plan(self, problem: Problem) -> Answer:
        """The fastest nested persistent schedule within the budget.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        return plan_nested(problem, costs_of(problem.chain), "rotor", self.slots)

    def minimum_bytes(self, problem: Problem) -> int:
        """The lowest peak of any nested persistent schedule."""
        return nested_minimum_bytes(problem, costs_of(problem.chain))
