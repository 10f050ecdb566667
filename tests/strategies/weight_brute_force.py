"""The fastest period of tiny chains by trying every legal list: knows the operations and nothing of the strategies."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from numba import njit

from lowtide import Backward, Chain, Forward, Offload, Prefetch, Release, Schedule
from lowtide.schedule import Operation, Start

# What may happen to one value in one gap: O offload, R release, P prefetch. Copying out what has just come only costs.
_ACTIONS = ("", "O", "R", "OR", "P")
# A value may also leave and come back within one gap, which makes room for others to arrive. That is rarely of use and
# too much to try with more than two values.
_TRIPS_WITHIN_A_GAP = ("RP", "ORP")


def legal_patterns(
    uses: list[bool], changes: list[bool], actions: tuple[str, ...]
) -> set[tuple[tuple[str, ...], bool, bool]]:
    """What one value may do in each gap of a cycle, with the state (on the device, current on the host) it starts from.

    Gap j comes before computation j; `uses[j]` and `changes[j]` say what that computation does with the value.
    """
    found = set()
    for start in itertools.product((True, False), repeat=2):
        partial: list[tuple[tuple[str, ...], bool, bool]] = [((), *start)]
        for used, changed in zip(uses, changes, strict=True):
            longer = []
            for pattern, on_device, current in partial:
                for action in actions:
                    after = _after(action, on_device, current)
                    if after is None or (used and not after[0]):
                        continue
                    longer.append(((*pattern, action), after[0], after[1] and not changed))
            partial = longer
        found |= {(pattern, *start) for pattern, *end in partial if tuple(end) == start}
    return found


def _after(action: str, on_device: bool, current: bool) -> tuple[bool, bool] | None:
    for step in action:
        if step == "P":
            if on_device or not current:
                return None
            on_device = True
        elif not on_device or (step == "R" and not current) or (step == "O" and current):
            return None
        elif step == "O":
            current = True
        else:
            on_device = False
    return on_device, current


def _is_useful(pattern: tuple[str, ...], uses: list[bool], changes: list[bool]) -> bool:
    """Whether each copy to the host serves a release, and the value leaves once at most between two uses.

    A list without the superfluous copies needs no more memory and no more time.
    """
    wanted = trips = 0
    for action, used, changed in [*zip(pattern, uses, changes, strict=True)] * 2:  # twice: the cycle closes
        for step in action:
            wanted = {"O": 1, "R": 0, "P": wanted}[step]
            trips += step == "R"
        if trips > 1 or (changed and wanted):
            return False
        trips = 0 if used else trips
    return True


def _orders(strings: list[str], duplex: bool) -> list[list[tuple[int, str]]]:
    """The orders of the values' actions in one gap.

    Where copies out have a channel of their own they may all come first, since an offload waits for nothing.
    """
    found: list[list[tuple[int, str]]] = []

    def extend(order: list[tuple[int, str]], left: list[str]) -> None:
        if not any(left):
            found.append(order)
        first = [index for index, string in enumerate(left) if string[:1] == "O"] if duplex else []
        for index in first or [index for index, string in enumerate(left) if string]:
            rest = [string[1:] if at == index else string for at, string in enumerate(left)]
            extend([*order, (index, left[index][0])], rest)

    extend([], strings)
    return found


@njit(cache=True)
def _run(codes, seconds, used, copy_seconds, duplex, num_rounds=12):
    clock, out, into, half_way = 0.0, 0.0, 0.0, 0.0
    arrival, copied = np.zeros(len(copy_seconds)), np.zeros(len(copy_seconds))
    for turn in range(num_rounds):
        if turn == num_rounds // 2:
            half_way = clock
        for code in codes:
            value = code // 3
            if code < 0:
                for needed in range(len(copy_seconds)):
                    if used[needed, -1 - code]:
                        clock = max(clock, arrival[needed])
                clock += seconds[-1 - code]
            elif code % 3 == 0:
                out = max(out, clock, arrival[value]) + copy_seconds[value]
                copied[value] = out
                into = into if duplex else out
            elif code % 3 == 1:
                clock = max(clock, arrival[value], copied[value])
            else:
                into = max(into, clock) + copy_seconds[value]
                arrival[value] = into
                out = out if duplex else into
    return (clock - half_way) / (num_rounds - num_rounds // 2)


class TinyProblem:
    """A chain, a budget and a bandwidth, with all that the search needs to know of them."""

    def __init__(self, chain: Chain, memory_budget: int, bandwidth: int, duplex: bool = True) -> None:
        n = chain.num_stages
        self.chain, self.bandwidth, self.duplex, self.memory_budget = chain, bandwidth, duplex, memory_budget
        self.computations = [Forward(k, "all") for k in range(1, n + 1)] + [Backward(k) for k in range(n, 0, -1)]
        self.seconds = [s.forward_seconds for s in chain.stages] + [s.backward_seconds for s in chain.stages[::-1]]
        self.values = [("w", k) for k in range(1, n + 1)]
        if any(stage.optimizer_bytes for stage in chain.stages):
            self.values += [("opt", k) for k in range(1, n + 1)]
        self.bytes = [
            chain.stage(k).weight_bytes if kind == "w" else chain.stage(k).optimizer_bytes for kind, k in self.values
        ]
        self.uses, self.changes = [], []
        for kind, k in self.values:
            backward = [operation == Backward(k) for operation in self.computations]
            forward = [operation == Forward(k, "all") for operation in self.computations]
            self.changes.append(backward)
            self.uses.append([b or (f and kind == "w") for b, f in zip(backward, forward, strict=True)])
        self.used = np.array(self.uses)
        self.copy_seconds = np.array(self.bytes) / bandwidth
        self.before, self.peak = self._standing()

    def _standing(self) -> tuple[list[int], list[int]]:
        chain, before, peak = self.chain, [], []
        stored = chain.base_bytes + chain.input_bytes + chain.gradient_bytes(chain.num_stages)
        for stage in chain.stages:
            before.append(stored)
            stored += stage.saved_bytes
            peak.append(stored + stage.saving_extra_bytes)
        for k in range(chain.num_stages, 0, -1):
            stage = chain.stage(k)
            before.append(stored)
            stored += chain.gradient_bytes(k - 1)
            peak.append(stored + stage.weight_grad_bytes + stage.backward_extra_bytes)
            stored -= chain.gradient_bytes(k) + stage.saved_bytes
        return before, peak

    def patterns(self, value: int) -> list[tuple[tuple[str, ...], bool, bool]]:
        """What one value may do; one of no bytes stays."""
        uses, changes = self.uses[value], self.changes[value]
        actions = _ACTIONS + (_TRIPS_WITHIN_A_GAP if len(self.values) <= 2 else ())
        found = {entry for entry in legal_patterns(uses, changes, actions) if _is_useful(entry[0], uses, changes)}
        if not self.bytes[value]:
            found = {entry for entry in found if not any(entry[0])}
        return sorted(found)

    def period(self, gaps: list[list[tuple[int, str]]]) -> float:
        """The steady period of a list, by running it again and again."""
        codes = []
        for j, gap in enumerate(gaps):
            codes += [3 * value + "ORP".index(action) for value, action in gap]
            codes.append(-1 - j)
        return _run(np.array(codes), np.array(self.seconds), self.used, self.copy_seconds, self.duplex)

    def copying(self, chosen: tuple[tuple[tuple[str, ...], bool, bool], ...]) -> float:
        """How long the busier channel is busy."""
        total = {"O": 0, "R": 0, "P": 0}
        for (pattern, *_), size in zip(chosen, self.bytes, strict=True):
            for action in "".join(pattern):
                total[action] += size
        busy = max(total["O"], total["P"]) if self.duplex else total["O"] + total["P"]
        return busy / self.bandwidth

    def fits(self, gaps: list[list[tuple[int, str]]], on_device: list[bool]) -> bool:
        """Whether a list stays within the budget."""
        resident = sum(size for size, there in zip(self.bytes, on_device, strict=True) if there)
        for j, gap in enumerate(gaps):
            for value, action in gap:
                resident += {"O": 0, "R": -1, "P": 1}[action] * self.bytes[value]
                if self.before[j] + resident > self.memory_budget:
                    return False
            if self.peak[j] + resident > self.memory_budget:
                return False
        return True

    def fits_at_computations(
        self, chosen: tuple[tuple[tuple[str, ...], bool, bool], ...], on_device: list[bool]
    ) -> bool:
        """Whether the computations have room, whatever the order in the gaps."""
        there = list(on_device)
        for j, peak in enumerate(self.peak):
            for value, (pattern, *_) in enumerate(chosen):
                last = pattern[j][-1:]
                there[value] = there[value] if last in ("", "O") else last == "P"
            resident = sum(size for size, present in zip(self.bytes, there, strict=True) if present)
            if peak + resident > self.memory_budget:
                return False
        return True

    def schedule(self, gaps: list[list[tuple[int, str]]], states: list[tuple[bool, bool]]) -> Schedule:
        """A list as a schedule."""
        kinds = tuple(dict.fromkeys(kind for kind, _ in self.values))
        return Schedule("brute force", self.operations(gaps), kinds, self.start(states))

    def operations(self, gaps: list[list[tuple[int, str]]]) -> list[Operation]:
        """A list as operations."""
        made = {"O": Offload, "R": Release, "P": Prefetch}
        operations = []
        for gap, computation in zip(gaps, self.computations, strict=True):
            operations += [made[action](*self.values[value]) for value, action in gap]
            operations.append(computation)
        return operations

    def start(self, states: list[tuple[bool, bool]]) -> Start:
        """Where the values are at the beginning."""
        device = {value for value, (there, _) in zip(self.values, states, strict=True) if there}
        host = {value for value, (_, current) in zip(self.values, states, strict=True) if current}
        return Start(frozenset(device), frozenset(host))


@functools.cache  # several tests ask for the same
def fastest_period(problem: TinyProblem) -> tuple[float, Schedule | None]:
    """The least period of all legal lists, and one list that has it; infinity where none fits.

    With more than two values lists in which a value leaves and returns within one gap are left out.
    """
    best, winner = math.inf, None
    floor = math.fsum(problem.seconds)
    for chosen in itertools.product(*(problem.patterns(value) for value in range(len(problem.values)))):
        states = [(on_device, current) for _, on_device, current in chosen]
        on_device = [there for there, _ in states]
        if problem.copying(chosen) >= best - 1e-9 or not problem.fits_at_computations(chosen, on_device):
            continue
        strings = [[pattern[0][j] for pattern in chosen] for j in range(len(problem.seconds))]
        for gaps in map(list, itertools.product(*(_orders(gap, problem.duplex) for gap in strings))):
            if problem.fits(gaps, on_device) and (period := problem.period(gaps)) < best - 1e-9:
                best, winner = period, problem.schedule(gaps, states)
            if best <= floor + 1e-9:
                return best, winner
    return best, winner
