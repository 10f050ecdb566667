"""The mixed-integer program of the weights paper (section 6), weight by weight: a lower bound on every period.

| paper | here |
| --- | --- |
| m_i,k | the value's bytes less `away` at the start of position k |
| P_i,j, D_i,j | `into`, and what makes `away` grow |
| sum of O_i,j since backward i | `copied` |
| D_i^(0), D_i^(1) | `Relaxation.after_backward`, `Relaxation.after_forward` |
| O*_i | not a variable: a value is copied out where it makes a trip |

With the paper's slips corrected: in equations 1 and 4 the layer's own weight counts once, the first part of equation 6
reads sum of (P - D) <= 0, and equation 5 sums over j = 1..2L. `weight_relaxation` states the same summed up over the
weights, for long chains. Both hold for schedules in which every stage runs forward once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.strategies.numerics.linear_program import LinearProgram, Term
from lowtide.strategies.weights.choices import from_backward
from lowtide.strategies.weights.periods import Period
from lowtide.strategies.weights.relaxation import Relaxation


@dataclass(frozen=True, slots=True)
class _Travel:
    """The variables of one value along the period that begins with its backward, at `changed`."""

    changed: int
    away: list[int]
    into: list[int]
    copied: list[int]  # after each step

    def out(self, step: int) -> list[Term]:
        """What is copied to the host during a step."""
        before = [(self.copied[step - 1], -1.0)] if step else []
        return [(self.copied[step], 1.0), *before]


def program_of(
    period: Period, *, memory_budget: int, bandwidth: int, duplex: bool = True, whole_values: bool = False
) -> Relaxation:
    """Write the program down; the arguments are those of `weight_relaxation.relaxation_of`."""
    n, program = period.num_stages, LinearProgram()
    unit = max(1, *period.weight_bytes, *period.optimizer_bytes)
    seconds = (from_backward(period, period.seconds) * (bandwidth / unit)).tolist()
    excess = (period.resident_bytes + from_backward(period, period.standing_bytes) - memory_budget) / unit
    idle = program.variables(2 * n)
    first, second, third = (program.variables(n, 1.0, integral=True) for _ in range(3))
    travels: list[_Travel] = []
    for k in range(1, n + 1):
        # Steps are counted from backward k; forward k is 2k - 1 steps later.
        sizes = period.weight_bytes[k - 1] / unit, period.optimizer_bytes[k - 1] / unit
        weight_trips = [(first[k - 1], 0, 2 * k - 1), (second[k - 1], 2 * k - 1, 2 * n)]
        for size, trips in zip(sizes, (weight_trips, [(third[k - 1], 0, 2 * n)]), strict=True):
            travels += [_travel(program, n - k, size, trips, 2 * n)] if size else []
    for position in range(2 * n):
        steps = [(travel, (position - travel.changed) % (2 * n)) for travel in travels]
        arriving = [(travel.into[step], 1.0) for travel, step in steps]
        leaving = [term for travel, step in steps for term in travel.out(step)]
        for copies in [arriving, leaving] if duplex else [arriving + leaving]:  # equation 2
            program.row([*copies, (idle[position], -1.0)], -math.inf, seconds[position])
        own = [term for travel, step in steps if step == 0 for term in travel.out(0)]  # equation 3
        program.row([*own, (idle[position], -1.0)], -math.inf)
        room = [(travel.away[step], 1.0) for travel, step in steps]  # equation 4
        if whole_values:
            (during,) = program.variables(1, seconds[position])
            program.row([*arriving, (during, -1.0), (idle[position], -1.0)], -math.inf)
            room.append((during, -1.0))
        program.row(room, max(0.0, float(excess[position])), math.inf)
    return Relaxation(program, idle, first, second, third, unit / bandwidth, math.fsum(period.seconds))


def _travel(
    program: LinearProgram, changed: int, size: float, trips: list[tuple[int, int, int]], num_positions: int
) -> _Travel:
    """One value: equations 5 to 8. A trip is (whether it is made, the step of its use, the step of its need)."""
    away = program.variables(num_positions, size)
    into, copied = program.variables(num_positions, size), program.variables(num_positions, size)
    for made, use, need in trips:
        program.upper[away[use]] = 0.0
        if need - use == 1:
            program.upper[made] = 0.0  # it covers no computation
        program.row([*((into[step], 1.0) for step in range(use, need)), (made, -size)])
        program.row([(copied[-1], 1.0), (made, -size)], 0.0, math.inf)
        for step in range(use + 1, need):
            program.row([(away[step], 1.0), (made, -size)], -math.inf)
    for step in range(num_positions):
        following = away[(step + 1) % num_positions]
        program.row([(following, 1.0), (away[step], -1.0), (into[step], 1.0)], 0.0, math.inf)
        if step:
            program.row([(copied[step], 1.0), (copied[step - 1], -1.0)], 0.0, math.inf)
            program.row([(copied[step - 1], 1.0), (away[step], -1.0)], 0.0, math.inf)
    return _Travel(changed, away, into, copied)
