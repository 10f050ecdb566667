"""From cuts to units: which calls are run as a whole, and to which side of a cut the glue between them belongs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from lowtide.runtime.capture.cuts import Cut, Cuts, Tally, cut_at, opened_by, reason_against, sides_of
from lowtide.runtime.capture.watch import NEVER, Observation, SubmoduleCall


def units_between(observation: Observation, cuts: Sequence[Cut]) -> list[SubmoduleCall]:
    """The outermost calls that contain no cut and are opened for none, in order."""
    positions = [cut.position for cut in cuts]
    opened = {index for cut in cuts for index in opened_by(observation, cut)}
    units: list[SubmoduleCall] = []
    last_left = NEVER
    for call in observation.calls:  # in the order in which they begin
        contains = bisect.bisect_right(positions, call.left) > bisect.bisect_right(positions, call.entered)
        if call.depth and not contains and call.index not in opened and call.entered > last_left:
            units.append(call)
            last_left = call.left
    return units


def settle(observation: Observation, cuts: Cuts) -> tuple[Cuts, list[SubmoduleCall], list[bool]]:
    """Make every cut lie at one end of the glue between two units.

    A cut that was found at the end of a call which is opened by another cut lies amid glue: after a block's last sum,
    before what its caller does with it. It is moved to the beginning of the next unit or to the end of the one before,
    or given up where neither is possible.

    Returns:
        The cuts, the units, and for each cut whether the glue before it belongs to the stage that it ends.
    """
    ticks = [tick for tick, _ in observation.operations]
    chosen = list(cuts.chosen)
    while True:
        units = units_between(observation, chosen)
        trailing: list[bool] = []
        for index, cut in enumerate(chosen):
            before = next((unit for unit in reversed(units) if unit.left < cut.position), None)
            after = next((unit for unit in units if unit.entered >= cut.position), None)
            start = chosen[index - 1].position if index else NEVER
            if before is None or after is None or before.entered < start:
                del chosen[index]  # a stage of glue alone
                break
            place = bisect.bisect_left(ticks, cut.position)
            if bisect.bisect_left(ticks, before.left) == place:
                trailing.append(False)
            elif bisect.bisect_left(ticks, after.entered) == place:
                trailing.append(True)
            else:
                chosen[index : index + 1] = _moved(observation, chosen, index, before, after, cuts.sides)
                break
        else:
            return Cuts(chosen, sides_of(observation, chosen)), units, trailing


def _moved(
    observation: Observation,
    chosen: list[Cut],
    index: int,
    before: SubmoduleCall,
    after: SubmoduleCall,
    sides: set[int],
) -> list[Cut]:
    """The cut at one end of its gap, or none."""
    tally = Tally(observation)
    most_together = max(1, tally.differentiable(chosen[index].crossing - sides))
    neighbours = [*chosen[max(0, index - 1) : index], *chosen[index + 1 : index + 2]]
    for candidate in (
        cut_at(observation, after.entered, after.index, at_entry=True),
        cut_at(observation, before.left + 1, before.index, at_entry=False),
    ):
        passing = candidate.crossing - sides
        possible = reason_against(observation, candidate) is None and tally.differentiable(passing) <= most_together
        if possible and all(passing.isdisjoint(neighbour.crossing) for neighbour in neighbours):
            return [candidate]
    return []
