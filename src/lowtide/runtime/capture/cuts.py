"""Decides where to cut a watched forward into stages; computes only with an `Observation`.

A cut lies at the beginning or the end of a submodule's call; all calls around it are then *opened*, their own code
becomes glue. What crosses a cut is the memory that was made before it and is read after it. A cut is possible where

- nothing that crosses is written in place afterwards, and
- whatever crosses was returned by the call that made it, or left in an attribute, or handed out by code that can be
  opened (collected by a hook, put into a caller's list or into an object that others have too); and it is read by code
  that is opened, or by calls that are given it.

Of the possible cuts those are taken between which exactly one activation passes: no two neighbouring cuts are crossed
by the same memory, except by *side values*. Small tensors without gradients (masks, tables) are side values as a matter
of course; others (skip connections, an encoder's output, a position bias, the features of a dense block) become side
values where a large stage cannot be cut otherwise. Where that does not help, several activations may pass together (two
streams that run side by side). Whether a side value is worth its bytes is for the solver to say: stages can be joined
again, and memory that skips none of them is no side value any more.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lowtide.runtime.capture.watch import NEVER, Observation

# A stage below this share of the bytes is fine enough; nothing becomes a side value for the sake of cutting it further.
# Without it a diffusion U-Net has 100 stages instead of 63, a block that is called over and over 66 instead of 42 and a
# detector 136 instead of 126. Their least budgets are 3, 6 and 0 % lower; `auto` takes 2.6, 5 and 1.4 times as long.
_SMALL_STAGE_SHARE = 0.10
# The same where memory is short, so that time counts less. By shapes, the least budget of ResNet-101 (16 x 500 pixels)
# is 26 % lower with it, that of ViT-L 3 %; those of ResNet-50 and DenseNet-121 are not.
_FINEST_STAGE_SHARE = 0.02
# A tensor without gradients up to this share of the bytes is a side value without further thought.
_FREE_SIDE_SHARE = 0.01
# Stages whose bytes are together below this share are not worth a cut.
_TINY_STAGE_SHARE = 1e-3
# What a byte of an output that nothing saves costs beside a byte of a stage, in the sum of squares.
_LOST_PRICE = 4
# How many earlier cuts are tried as a stage's beginning, beyond the nearest possible one.
_LOOK_BACK = 48


@dataclass(frozen=True, slots=True)
class Cut:
    """A place where the forward can be cut."""

    position: int
    """Before this tick of the clock."""
    call: int
    at_entry: bool
    """At the beginning of that call, after the glue before it; else at its end, before the glue after it."""
    depth: int
    """How many calls are opened by it."""
    crossing: frozenset[int]
    """Serial numbers of the memory that crosses."""
    last_unit_entered: int
    """When the last call that ends before the cut began: a stage needs one."""


@dataclass(slots=True)
class Cuts:
    """A choice of cuts, in order, and the memory that crosses more than one of them."""

    chosen: list[Cut]
    sides: set[int] = field(default_factory=set)


class Tally:
    """An observation's bytes, looked up by time."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        made = [memory for memory in observation.memories if memory.role == "made"]
        self._saved = _Sums((m.made, m.num_bytes) for m in made if m.saved)

    @property
    def total_bytes(self) -> int:
        """Everything the forward saves, each storage once."""
        return self._saved.total

    def saved_bytes(self, start: int, end: int) -> int:
        """What is made from tick `start` on and before tick `end`, and saved at some time."""
        return self._saved.between(start, end)

    def lost_bytes(self, serials: Iterable[int]) -> int:
        """The bytes that nothing saves: a stage that ends there keeps them, plain training does not."""
        memories = self.observation.memories
        return sum(memories[serial].num_bytes for serial in serials if not memories[serial].saved)

    def num_bytes(self, serials: Iterable[int]) -> int:
        """The bytes of some memory."""
        return sum(self.observation.memories[serial].num_bytes for serial in serials)

    def differentiable(self, serials: Iterable[int]) -> int:
        """Through how many of these gradients flow."""
        return sum(self.observation.memories[serial].differentiable for serial in serials)


class _Sums:
    """Bytes summed over time."""

    def __init__(self, entries: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(entries)
        self._ticks = [tick for tick, _ in ordered]
        self._sums = list(itertools.accumulate((num_bytes for _, num_bytes in ordered), initial=0))

    @property
    def total(self) -> int:
        return self._sums[-1]

    def between(self, start: int, end: int) -> int:
        return self._sums[bisect.bisect_left(self._ticks, end)] - self._sums[bisect.bisect_left(self._ticks, start)]


def possible_cuts(observation: Observation) -> list[Cut]:
    """All possible cuts, in order; of those with no operation between them the one that opens the fewest calls."""
    return [
        cut for cut in nearest_cuts(observation, _boundaries(observation)) if reason_against(observation, cut) is None
    ]


def nearest_cuts(observation: Observation, boundaries: Sequence[tuple[int, int, bool]]) -> list[Cut]:
    """Cuts at `boundaries` (position, call, at entry), one for each place in the sequence of operations."""
    ticks = [tick for tick, _ in observation.operations]
    groups: dict[int, tuple[int, int, bool]] = {}
    for boundary in boundaries:
        place = bisect.bisect_left(ticks, boundary[0])
        best = groups.get(place)
        if best is None or observation.calls[boundary[1]].depth < observation.calls[best[1]].depth:
            groups[place] = boundary
    return _with_crossings(observation, [groups[place] for place in sorted(groups)])


def _boundaries(observation: Observation) -> list[tuple[int, int, bool]]:
    found = []
    for call in observation.calls:
        around = [observation.calls[index] for index in observation.around(call.parent)]
        if not around or any(other.opaque for other in around):
            continue
        found.append((call.entered, call.index, True))
        found.append((call.left + 1, call.index, False))
    return sorted(found, key=lambda boundary: boundary[0])


def _with_crossings(observation: Observation, boundaries: list[tuple[int, int, bool]]) -> list[Cut]:
    made = sorted((m for m in observation.memories if m.role == "made"), key=lambda memory: memory.made)
    calls = sorted((call for call in observation.calls if call.depth), key=lambda call: call.left)
    alive: dict[int, int] = {}
    cuts: list[Cut] = []
    next_made, next_call, last_entered = 0, 0, NEVER
    for position, call, at_entry in boundaries:
        while next_made < len(made) and made[next_made].made < position:
            alive[made[next_made].serial] = made[next_made].last_read
            next_made += 1
        for serial in [serial for serial, last_read in alive.items() if last_read < position]:
            del alive[serial]
        while next_call < len(calls) and calls[next_call].left < position:
            last_entered = max(last_entered, calls[next_call].entered)
            next_call += 1
        depth = observation.calls[call].depth
        cuts.append(Cut(position, call, at_entry, depth, frozenset(alive), last_entered))
    return [cut for cut in cuts if cut.last_unit_entered != NEVER]


def cut_at(observation: Observation, position: int, call: int, *, at_entry: bool) -> Cut:
    """The cut at one end of a call."""
    return _with_crossings(observation, [(position, call, at_entry)])[0]


def reason_against(observation: Observation, cut: Cut) -> str | None:
    """Why a cut is impossible; None if it is possible."""
    for serial in cut.crossing:
        memory = observation.memories[serial]
        maker = observation.path(memory.maker)
        if memory.last_written >= cut.position:
            return f"a tensor made in {maker} is changed in place after it"
        ended = _ended_before(observation, memory.maker, cut.position)
        if ended and _opened_to_show(observation, serial, ended) is None:
            return f"a tensor made in {maker} is used after it but not returned by {observation.path(ended[-1])}"
    closed = next((index for index in opened_by(observation, cut) if observation.calls[index].opaque), None)
    if closed is not None:
        return f"{observation.path(closed)} reads a tensor that was made elsewhere and is none of its arguments"
    return None


def opened_by(observation: Observation, cut: Cut) -> set[int]:
    """The calls that are opened for a cut besides those around it, so that it can be seen what crosses where it is
    made, and what is made by code that is opened, or crosses, where it is read by calls that are not given it.

    Where no gradient flows through it (a mask) and the call cannot be opened, it need not be: a recomputation finds it
    where it was when the stage began.
    """
    calls, opened = observation.calls, set[int]()
    for serial in cut.crossing:
        ended = _ended_before(observation, observation.memories[serial].maker, cut.position)
        opened.update((_opened_to_show(observation, serial, ended) or ()) if ended else ())
    glue = {*opened, *observation.around(calls[cut.call].parent)}
    while True:
        shown = [memory for memory in observation.hidden if memory.maker in glue or memory.serial in cut.crossing]
        inside = {
            index
            for memory in shown
            for index in memory.hidden_in
            if calls[index].parent in glue and (memory.differentiable or not calls[index].opaque)
        }
        if inside <= glue:
            return opened
        opened |= inside
        glue |= inside


def _ended_before(observation: Observation, maker: int, position: int) -> list[int]:
    """The call that made some memory and those around it, from the inside out, that end before a position."""
    around = observation.around(maker)
    return [index for index in around if NEVER < observation.calls[index].left < position]


def _opened_to_show(observation: Observation, serial: int, ended: Sequence[int]) -> Sequence[int] | None:
    """Of calls inside one another, from the inside out, those to open so that memory can be seen after they have ended;
    None if it cannot be.

    The outermost of all shows what it returns, or what it has left in an attribute of its module or of one inside. Else
    it is opened, where that can be, and what a call inside returns is seen where it is returned (a hook that collects
    outputs); or all are, and what the code of the innermost makes is seen where it is made (a loss that it hands to a
    closure, a value in an object that others have too).
    """
    calls = observation.calls
    if serial in calls[ended[-1]].outputs:
        return ()
    if NEVER in observation.memories[serial].readers and serial not in calls[0].outputs:
        return None  # the caller's loss has it from the model itself
    if any(serial in calls[index].left_behind for index in ended):
        return ()
    for place in range(len(ended) - 1, -1, -1):
        if calls[ended[place]].opaque:
            return None
        if place and serial in calls[ended[place - 1]].outputs:
            return ended[place:]
    return ended


def choose(observation: Observation, cuts: list[Cut], *, finest: bool = False) -> Cuts:
    """The finest choice among possible cuts that makes stages smaller by more than the side values that it takes.

    There is no need for a coarser one: what a schedule treats alike is one stage to the executor, and the side values
    inside are then recomputed with their makers, or saved, as if there were no cut. But it takes time to measure and to
    solve, so that small stages are left whole; with `finest`, only very small ones.
    """
    tally = Tally(observation)
    small_bytes = int((_FINEST_STAGE_SHARE if finest else _SMALL_STAGE_SHARE) * tally.total_bytes)
    sides = _sides_as_a_matter_of_course(tally, cuts)
    whole = (_START, end_of(observation))
    result = Cuts(_best_chain(tally, cuts, sides, *whole), sides)
    tried: set[tuple[Cut, Cut]] = set()
    while (large := _largest_stage(tally, result, whole, tried, small_bytes)) is not None:
        tried.add(large)
        _cut_large_stage(tally, cuts, result, large)
    result.chosen = result.chosen or _best_chain(tally, cuts, sides, *whole, must_cut=True)
    result.sides = sides_of(observation, result.chosen)
    return result


_START = Cut(NEVER, NEVER, True, 0, frozenset(), NEVER)


def end_of(observation: Observation) -> Cut:
    """The end of the forward as a cut: crossed by what the caller reads."""
    last_entered = max((call.entered for call in observation.calls if call.depth), default=NEVER)
    read = frozenset(m.serial for m in observation.memories if m.role == "made" and m.last_read >= observation.end)
    return Cut(observation.end, NEVER, False, 0, read, last_entered)


def sides_of(observation: Observation, chosen: list[Cut]) -> set[int]:
    """What crosses more than one cut of a choice, the end included."""
    counts: dict[int, int] = {}
    for cut in [*chosen, end_of(observation)]:
        for serial in cut.crossing:
            counts[serial] = counts.get(serial, 0) + 1
    return {serial for serial, count in counts.items() if count > 1}


def _sides_as_a_matter_of_course(tally: Tally, cuts: list[Cut]) -> set[int]:
    crossing = {serial for cut in cuts for serial in cut.crossing}
    limit = _FREE_SIDE_SHARE * tally.total_bytes
    memories = tally.observation.memories
    return {s for s in crossing if not memories[s].differentiable and memories[s].num_bytes <= limit}


def _best_chain(
    tally: Tally,
    cuts: list[Cut],
    sides: set[int],
    left: Cut,
    right: Cut,
    *,
    together: bool = False,
    must_cut: bool = False,
) -> list[Cut]:
    """The cuts between two others that make the sum of the stages' squared bytes least, no two crossed by the same
    memory.

    Squares, because many small stages give the solver the most to choose from; a constant for each stage keeps it from
    making stages of nothing, and so does a price for outputs that nothing saves. Where several activations may pass
    together, their bytes count too: the narrowest place. A network that saves one activation alone (two layers) gains
    by no cut; it must have one all the same, to have a plan.
    """
    constant = (_TINY_STAGE_SHARE * max(1, tally.total_bytes)) ** 2
    inner = [cut for cut in cuts if left.position < cut.position < right.position]
    row = [left, *(cut for cut in inner if together or tally.differentiable(cut.crossing - sides) <= 1), right]
    passing = [cut.crossing - sides for cut in row]
    price = [_LOST_PRICE * float(tally.lost_bytes(serials)) ** 2 for serials in passing]
    if together:
        price = [cost + float(tally.num_bytes(serials)) ** 2 for cost, serials in zip(price, passing, strict=True)]
    cost, before = [0.0], [NEVER]  # of the best chain that ends at each cut of the row
    for index in range(1, len(row)):
        best, previous, looked = float("inf"), NEVER, 0
        for candidate in range(index - 1, -1, -1):
            no_unit = row[index].last_unit_entered < row[candidate].position
            if no_unit or cost[candidate] == float("inf") or not passing[candidate].isdisjoint(passing[index]):
                continue
            if must_cut and candidate == 0 and index == len(row) - 1 and previous != NEVER:
                continue
            stage_bytes = tally.saved_bytes(row[candidate].position, row[index].position)
            if cost[candidate] + float(stage_bytes) ** 2 < best:
                best, previous = cost[candidate] + float(stage_bytes) ** 2, candidate
            looked += 1
            if looked > _LOOK_BACK:
                break
        cost.append(best + constant + price[index])
        before.append(previous)
    chain: list[Cut] = []
    index = before[-1]
    while index > 0:
        chain.append(row[index])
        index = before[index]
    return chain[::-1]


def _largest_stage(
    tally: Tally, result: Cuts, whole: tuple[Cut, Cut], tried: set[tuple[Cut, Cut]], small_bytes: int
) -> tuple[Cut, Cut] | None:
    """The largest stage that is not small and has not been tried."""
    row = [whole[0], *result.chosen, whole[1]]
    stages = [pair for pair in itertools.pairwise(row) if pair not in tried]
    sizes = [tally.saved_bytes(left.position, right.position) for left, right in stages]
    if not stages or max(sizes) <= small_bytes:
        return None
    return stages[sizes.index(max(sizes))]


def _cut_large_stage(tally: Tally, cuts: list[Cut], result: Cuts, bounds: tuple[Cut, Cut]) -> None:
    """Make side values of the memory that prevents cutting a large stage, as far as that makes its parts smaller."""
    left, right = bounds
    inner = [cut for cut in cuts if left.position < cut.position < right.position]
    sides, added_bytes = set(result.sides), 0
    best_bytes, best_sides = tally.saved_bytes(left.position, right.position), sides
    best_chain: list[Cut] = []
    for serial in _obstacles(tally, [left, *inner, right], sides):
        sides, added_bytes = sides | {serial}, added_bytes + tally.observation.memories[serial].num_bytes
        if added_bytes >= best_bytes:
            break
        chain = _best_chain(tally, inner, sides, left, right)
        positions = [left.position, *(cut.position for cut in chain), right.position]
        largest_bytes = max(tally.saved_bytes(*pair) for pair in itertools.pairwise(positions))
        if chain and largest_bytes + added_bytes < best_bytes:
            best_bytes, best_sides, best_chain = largest_bytes + added_bytes, sides, chain
    if not best_chain:
        best_chain = _best_chain(tally, inner, best_sides, left, right, together=True)
    result.sides = best_sides
    result.chosen = sorted([*result.chosen, *best_chain], key=lambda cut: cut.position)


def _obstacles(tally: Tally, inner: list[Cut], sides: set[int]) -> list[int]:
    """The memory that prevents cuts, with the most cuts per byte first."""
    spans: dict[int, int] = {}
    for cut in inner:
        for serial in cut.crossing - sides:
            spans[serial] = spans.get(serial, 0) + 1
    score: dict[int, float] = {}
    for cut in inner:
        passing = cut.crossing - sides
        if len(passing) < 2:
            continue
        edge = min(passing, key=lambda serial: (spans[serial], -serial))
        for serial in passing - {edge}:
            score[serial] = score.get(serial, 0.0) + 1 / (len(passing) - 1)
    memories = tally.observation.memories
    return sorted(score, key=lambda serial: -score[serial] / max(1, memories[serial].num_bytes))
