"""pofo's search as a whole: from a chain and a budget to the best schedules of the continuous model.

The forward phase is searched twice: with few slots, under a limit on the time that starts near the lower bound and
rises until something is found; then with all slots, under the time that was found. The lower bound is close, so that
either search meets only a small part of the states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from lowtide.chain import Chain
from lowtide.schedule import Backward, Forward
from lowtide.strategies.continuous.backward import Blocks, blocks_of
from lowtide.strategies.continuous.bounds import Bounds, bounds_of, least_blocks, least_forward, least_rest, rest_of
from lowtide.strategies.continuous.forward import KIND, MOVED, PARENT, STAGE, Found, search
from lowtide.strategies.continuous.readoff import ContinuousPlan, ContinuousStep, read_off
from lowtide.strategies.nested.least import Least
from lowtide.strategies.numerics.arrays import ChainArrays, Integers, arrays_of

# The paper's number of slots.
DEFAULT_NUM_SLOTS = 50
# Labels are told apart twice as finely as the paper's states: they are few, and exact in bytes otherwise.
_LABEL_SLOTS = 2
# Beyond this many a side, the array of label slots would outgrow 256 MiB.
_MOST_LABEL_SLOTS = 400
# With 50 slots this keeps the 500 best labels of each (i, x); four times as many gain under 0.1 % of the time.
_LABELS_PER_SLOT = 10
# The first search, which only has to find a time that is reachable, uses half of the slots,
_COARSER = 2
# and, where the first reach is not enough, a backward phase with a fourth of them.
_COARSER_BLOCKS = 4
# The backward phase has two state variables fewer, and can afford finer slots.
_BLOCK_SLOTS = 10
# How far above plain training the first search looks, as factors of what the lower bound says, one after the other.
_REACH = (1.25, 1.6, 2.5, 5.0, 20.0)
# A time this much above plain training is worth a look whatever the bound says.
_LEAST_REACH = 0.01
# The backward phase is tabulated in single precision; a time found so is right to this share of itself.
_SINGLE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class ContinuousModel:
    """A chain and a link, ready to be searched for any budget.

    Args:
        chain: the network.
        bandwidth: β, bytes per second, above 0.
        recompute: False: every forward runs once, in variant 0.
    """

    chain: Chain
    bandwidth: float
    recompute: bool
    arrays: ChainArrays
    least_block: Least
    least: Integers
    bounds: Bounds
    tables: dict[int, tuple[int, float, Blocks]] = field(default_factory=dict)
    """The backward phase as it was last made, by slots: for how much memory, and how much time."""

    @classmethod
    def of(cls, chain: Chain, bandwidth: int, *, recompute: bool) -> ContinuousModel:
        """The model of a chain."""
        arrays = arrays_of(chain, variants=recompute)
        least_block = least_blocks(arrays)
        least = least_forward(arrays, least_block.least_bytes, recompute)
        link = float(bandwidth)  # whole numbers beyond 64 bits do not go into compiled loops
        return cls(chain, link, recompute, arrays, least_block, least, bounds_of(arrays, link))

    @property
    def minimum_bytes(self) -> int:
        """The least budget with which the model has a schedule."""
        return self.chain.fixed_bytes + int(self.least[1, 0])

    def plans(self, memory_budget: int, slots: int, num_plans: int) -> list[ContinuousPlan]:
        """The best schedules that the search finds within a budget of at least `minimum_bytes`, best first."""
        memory = memory_budget - self.chain.fixed_bytes
        plain = float(self.bounds.total[1])
        steps = self._steps_of_least_memory()
        fallback = read_off(self.arrays, self._blocks(memory, slots, 0.0), steps, memory, self.bandwidth)
        limit, found = self._first_search(memory, slots, plain, fallback.seconds)
        blocks = self._blocks(memory, slots, limit - plain)
        best = self._search(memory, slots, limit, blocks)
        if not best.totals.size:
            best = found if found is not None else best
        plans = self._read_off(best, blocks, memory, num_plans)
        return sorted([*plans, fallback], key=lambda plan: plan.seconds)[:num_plans]

    def bound_seconds(self, memory_budget: int) -> float:
        """No schedule within a budget is faster, whatever it recomputes and moves."""
        room = (memory_budget - self.chain.fixed_bytes - int(self.arrays.output[0])) / self.bandwidth
        return least_rest(rest_of(self.bounds, 1), room, 0.0, 0.0)

    def least_order(self) -> tuple[Forward | Backward, ...]:
        """The computations of a schedule for `minimum_bytes`."""
        memory, slots = self.minimum_bytes - self.chain.fixed_bytes, max(1, DEFAULT_NUM_SLOTS // _BLOCK_SLOTS)
        blocks = self._blocks(memory, slots, 0.0)
        return read_off(self.arrays, blocks, self._steps_of_least_memory(), memory, self.bandwidth).order

    def plans_within(
        self, memory_budget: int, slots: int, num_plans: int, limit_seconds: float
    ) -> list[ContinuousPlan]:
        """Schedules for a little less memory than `plans` was asked for, faster than a limit; maybe none.

        The backward phase that `plans` made serves again, the forward phase is searched more coarsely.
        """
        memory = memory_budget - self.chain.fixed_bytes
        blocks = self._blocks(memory, slots, 0.0)
        found = self._search(memory, max(1, slots // _COARSER), limit_seconds, blocks)
        return self._read_off(found, blocks, memory, num_plans)

    def _read_off(self, found: Found, blocks: Blocks, memory: int, num_plans: int) -> list[ContinuousPlan]:
        """The best of what a search found."""
        plans = (
            read_off(self.arrays, blocks, self._steps(found, end), memory, self.bandwidth)
            for end in range(min(num_plans, found.totals.size))
        )
        return sorted(plans, key=lambda plan: plan.seconds)

    def _first_search(self, memory: int, slots: int, plain: float, known: float) -> tuple[float, Found | None]:
        """A time that is reachable, near the best, and the search that found it (None: it was known)."""
        bound = self.bound_seconds(memory + self.chain.fixed_bytes)
        label_slots, block_slots = max(4, slots // _COARSER), slots  # mostly it is, and the table serves again
        for reach in (*_REACH, math.inf):
            limit = min(known, plain + reach * (bound - plain + _LEAST_REACH * plain))
            found = self._search(memory, label_slots, limit, self._blocks(memory, block_slots, limit - plain))
            if found.totals.size:
                return float(found.totals[0]), found
            if limit == known:
                break
            block_slots = max(4, slots // _COARSER_BLOCKS)
        return known, None

    def _blocks(self, memory: int, slots: int, spare_seconds: float) -> Blocks:
        """The backward phase; reuses one for more memory or more time."""
        spare = spare_seconds + _SINGLE * float(self.bounds.total[1]) if self.recompute else -1.0
        known = self.tables.get(slots)
        if known is None or known[0] < memory or known[1] < spare:
            blocks = blocks_of(self.arrays, self.least_block, memory, self.bandwidth, _BLOCK_SLOTS * slots, spare)
            self.tables[slots] = known = (memory, spare, blocks)
        return known[2]

    def _search(self, memory: int, slots: int, limit: float, blocks: Blocks) -> Found:
        return search(
            self.arrays,
            blocks,
            self.least,
            self.bounds,
            self.recompute,
            memory,
            self.bandwidth,
            min(_LABEL_SLOTS * slots, _MOST_LABEL_SLOTS),
            _LABELS_PER_SLOT * slots,
            limit * (1 + _SINGLE),
        )

    def _steps(self, found: Found, end: int) -> list[ContinuousStep]:
        """The decisions that lead to a completed label."""
        row, variant = found.ends[end]
        n = self.arrays.output.size - 1
        steps = [ContinuousStep(n, n, int(variant), moved=False)]
        while found.numbers[row, PARENT] >= 0:
            label, before = found.numbers[row], found.numbers[found.numbers[row, PARENT]]
            way = int(label[KIND]) - 1
            steps.append(
                ContinuousStep(
                    int(before[STAGE]), int(label[STAGE]) - 1, way if way >= 0 else None, moved=bool(label[MOVED])
                )
            )
            row = label[PARENT]
        return steps[::-1]

    def _steps_of_least_memory(self) -> list[ContinuousStep]:
        """Decisions with which `minimum_bytes` suffice: everything that is kept is moved."""
        n, arrays, need = self.arrays.output.size - 1, self.arrays, int(self.least[1, 0])
        i, kind = 1, 0
        steps: list[ContinuousStep] = []
        while i <= n:
            given = int(arrays.output[i - 1] if kind == 0 else arrays.saved[i - 1, kind - 1])
            step = self._step_of_least_memory(i, given, need)
            steps.append(step)
            i, kind = step.last + 1, 0 if step.variant is None else step.variant + 1
        return steps

    def _step_of_least_memory(self, i: int, given: int, need: int) -> ContinuousStep:
        """A decision for stage i with which `need` bytes still suffice, without recomputation where possible."""
        n, arrays = self.arrays.output.size - 1, self.arrays
        moved = i < n and given > 0
        ways = sorted(range(int(arrays.num_variants[i])), key=lambda v: float(np.sum(arrays.forward_seconds[i, v])))
        for v in ways:
            own = given + max(int(arrays.heavy_peak[i, v] + arrays.standing_first[i]), int(arrays.backward_peak[i, v]))
            if max(own, int(self.least[i + 1, v + 1])) <= need:
                return ContinuousStep(i, i, v, moved)
        use = given + int(arrays.light_peak[i] + arrays.standing_first[i])
        for j in range(i, n):
            if j > i:
                use = max(use, int(arrays.output[j - 1] + arrays.light_peak[j] + arrays.standing_first[j]))
            if max(use, given + int(self.least_block.least_bytes[i, j]), int(self.least[j + 1, 0])) <= need:
                return ContinuousStep(i, j, None, moved)
        raise AssertionError(f"no decision for stage {i} fits in {need} bytes: this is a bug in lowtide")
