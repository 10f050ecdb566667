"""Mixed-integer linear programs row by row, solved with HiGHS."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Term = tuple[int, float]  # a variable and its coefficient

# HiGHS holds rows to 1e-7 and optimality to 1e-7: what it proved is taken back by somewhat more than that, so that it
# stays a bound.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The result of the solver.

    Attributes:
        proven: no solution is below this (the dual bound less the solver's tolerance; at least 0, as all sums are).
        found: the value of the best solution found, None where there is none.
        solution: that solution, by variable.
        done: the best solution is optimal to the gap asked for; False: a limit was reached.
    """

    proven: float
    found: float | None
    solution: NDArray[np.float64] | None
    done: bool


@dataclass(slots=True)
class LinearProgram:
    """A mixed-integer linear program under construction; all variables are at least 0."""

    upper: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variables(self, count: int, upper: float = math.inf, *, integral: bool = False) -> list[int]:
        """New variables from 0 to `upper`."""
        first = len(self.upper)
        self.upper += [upper] * count
        self.integral += [integral] * count
        return list(range(first, first + count))

    def row(self, terms: Iterable[Term], low: float = 0.0, high: float = 0.0) -> None:
        """Require low <= sum of terms <= high; without limits, that the sum is 0."""
        at = len(self.low)
        for column, coefficient in terms:
            if coefficient:
                self.rows.append(at)
                self.columns.append(column)
                self.coefficients.append(coefficient)
        self.low.append(low)
        self.high.append(high)

    def minimize(
        self,
        costs: Sequence[int],
        *,
        relaxed: bool = False,
        time_limit: float = math.inf,
        gap: float = 0.0,
        node_limit: int | None = None,
    ) -> ProgramOutcome:
        """Minimise the sum of some variables with HiGHS.

        Args:
            costs: the variables to sum.
            relaxed: without integrality.
            time_limit: stop after so many seconds.
            gap: stop once the best solution found is within this share of the proven bound.
            node_limit: stop after so many nodes of the search tree.
        """
        objective = np.zeros(len(self.upper))
        objective[list(costs)] = 1.0
        shape = (len(self.low), len(self.upper))
        matrix = csr_array((self.coefficients, (self.rows, self.columns)), shape=shape)
        options: dict[str, Any] = {"mip_rel_gap": gap, "time_limit": time_limit, "node_limit": node_limit}
        result = milp(
            objective,
            integrality=None if relaxed else np.array(self.integral, np.int8),
            bounds=Bounds(np.zeros(len(self.upper)), np.array(self.upper)),
            constraints=LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            options={name: value for name, value in options.items() if value not in (None, math.inf)},  # type: ignore[arg-type]
        )
        done = result.status == 0
        proven = float((result.fun if relaxed and done else result.mip_dual_bound) or 0.0)
        found = None if result.fun is None else float(result.fun)
        solution = None if result.x is None else np.asarray(result.x, np.float64)
        return ProgramOutcome(max(0.0, proven - _TOLERANCE * (1.0 + abs(proven))), found, solution, done)
