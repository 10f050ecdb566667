"""`joint`: where weights, gradients and optimizer state live, with recomputation and offloading of activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.chain import Chain
from lowtide.errors import InfeasibleBudgetError, StrategyError
from lowtide.schedule import Backward, Forward, Operation, Schedule, Update
from lowtide.strategies.base import GIVE_BANDWIDTH, Answer, Problem
from lowtide.strategies.continuous.conversion import once_each
from lowtide.strategies.continuous.search import DEFAULT_NUM_SLOTS, ContinuousModel
from lowtide.strategies.nested.costs import costs_of, operations_of, outside_bytes
from lowtide.strategies.nested.table import Table, least_memory
from lowtide.strategies.pofo import Pofo
from lowtide.strategies.slots import default_num_slots
from lowtide.strategies.together.bound import least_seconds
from lowtide.strategies.together.choosing import chosen_trips
from lowtide.strategies.together.order import Round, updated_stages, with_weights_passing
from lowtide.strategies.together.placing import PlacedMoves, cyclic, one_by_one, place
from lowtide.strategies.weights_greedy import WeightsGreedy

Order = tuple[Forward | Backward, ...]

# How many memories for activations are tried, from the least that recomputation needs up.
_NUM_MEMORIES = 10
# Bytes held back for values on their way, in values of typical size: for every order, and then for the best. On
# transformers of 7 G parameters within 24 GiB the best held back 5, and without any it took 1.4 times as long.
_FIRST_RESERVES = (0.0, 2.0, 5.0, 9.0)
_RESERVES = (0.5, 1.0, 3.0, 4.0, 6.5, 12.0)
_NUM_REFINED = 3
# How many changes of one trip are tried on the best, and less on long chains: so many computations in all. A try takes
# some 10 ms for a hundred stages.
_NUM_TRIES = 60
_MOST_COMPUTATIONS = 12_000
# An answer this near to its lower bound is left alone.
_CLOSE_ENOUGH = 1e-3


@dataclass(frozen=True, slots=True)
class _Found:
    """A placed choice of trips."""

    order: Round
    trips: frozenset[int]
    placed: PlacedMoves


@dataclass(frozen=True, slots=True)
class Joint:
    """Everything that can leave the device, planned together.

    A byte of optimizer state costs a copy each way in a step, so does one of a weight gradient; one of weights costs
    two copies in and one out. So what should move is nearly ordered, and what is left to search is how much memory
    activations get. For several such memories, `rotor` and `pofo` give orders of computations, on the chain whose
    weights pass through. For each, trips to the host are chosen greedily among all values until the budget holds, and
    their copies are placed. The best is improved by single changes. The answers of `pofo` and, where steps are taken in
    backward, `weights-greedy` are tried too, so that moving activations alone or weights alone is never faster.

    Args:
        step_in_backward: update each stage right after its backward. False: all updates come after the last backward,
            as in a loop that calls `optimizer.step()`.
        slots: how finely `pofo` tells amounts of memory apart on long chains.
        moves_activations: False: activations and side values stay on the device, so that they take no host memory.

    Example:
        >>> from lowtide import Chain, Stage, solve
        >>> stages = [Stage(str(k), 1.0, 2.0, 1, 1, weight_bytes=10, optimizer_bytes=20) for k in range(4)]
        >>> solve(Chain("four", stages), memory_budget=100, strategy="joint", bandwidth=10).seconds
        20.0
    """

    step_in_backward: bool = False
    slots: int = DEFAULT_NUM_SLOTS
    moves_activations: bool = True

    def plan(self, problem: Problem) -> Answer:
        """The fastest schedule found.

        Raises:
            InfeasibleBudgetError: below `minimum_bytes`.
        """
        least = self._least(problem)
        if problem.memory_budget < least.need_bytes():
            raise problem.infeasible("joint", least.need_bytes())
        bound = least_seconds(problem, step_in_backward=self.step_in_backward)
        schedules = [*self._alone(problem), self._fallback(problem, least)]
        best = self._best(problem, [*self._orders(problem), tuple(_passes(least))], bound)
        if best is not None:
            schedules.append(_schedule(problem.chain, best.placed.listed()))
        evaluated = [(problem.evaluate(schedule), schedule) for schedule in schedules]
        fitting = [pair for pair in evaluated if pair[0].peak_bytes <= problem.memory_budget]
        trace, schedule = min(fitting, key=lambda pair: pair[0].seconds)
        gap = trace.seconds / bound - 1 if bound else 0.0
        return Answer(schedule, lower_bound_seconds=bound, details={"gap_to_bound": max(0.0, gap)})

    def minimum_bytes(self, problem: Problem) -> int:
        """What the leanest order needs if each computation has only its own stage's values on the device."""
        return self._least(problem).need_bytes()

    @property
    def _forms(self) -> tuple[str, ...]:
        return ("between",) if self.step_in_backward else ("down", "up")

    def _least(self, problem: Problem) -> Round:
        """The round with the least memory."""
        if not problem.bandwidth:
            raise StrategyError(f"strategy 'joint' moves weights; {GIVE_BANDWIDTH}")
        lean = with_weights_passing(problem.chain)
        model = ContinuousModel.of(lean, problem.bandwidth, recompute=True)
        orders = [model.least_order(), once_each(lean).order, _recomputed(lean, None)[0]]
        rounds = (self._round(problem, order, form) for order in dict.fromkeys(orders) for form in self._forms)
        return min(rounds, key=lambda each: each.need_bytes())

    def _round(self, problem: Problem, order: Iterable[Forward | Backward], form: str) -> Round:
        return Round(problem.chain, tuple(order), form, moves_activations=self.moves_activations)

    def _orders(self, problem: Problem) -> list[Order]:
        """Orders of forwards and backwards to choose from."""
        lean = with_weights_passing(problem.chain)
        orders = [*_recomputed(lean, problem.memory_budget), once_each(lean).order]
        model = ContinuousModel.of(lean, problem.bandwidth, recompute=True)
        if problem.memory_budget >= model.minimum_bytes:
            orders += [plan.order for plan in model.plans(problem.memory_budget, self.slots, _NUM_REFINED)]
        return list(dict.fromkeys(orders))

    def _best(self, problem: Problem, orders: Iterable[Order], bound: float) -> _Found | None:
        """The best choice of an order and trips: every order coarsely, the best of them with care."""
        first, *others = self._forms
        rounds = [self._round(problem, order, first) for order in dict.fromkeys(orders)]
        found = [each for order in rounds for each in _placed(problem, order, _FIRST_RESERVES)]
        found.sort(key=lambda each: each.placed.seconds)
        if found and found[0].placed.seconds <= bound * (1 + _CLOSE_ENOUGH):
            return found[0]
        refined = list(dict.fromkeys(each.order for each in found))[:_NUM_REFINED] or rounds
        found += [each for order in refined for each in _placed(problem, order, _RESERVES)]
        turned = [self._round(problem, _passes(order), form) for order in refined for form in others]
        found += [each for order in turned for each in _placed(problem, order, _FIRST_RESERVES)]
        best = min(found, key=lambda each: each.placed.seconds, default=None)
        return None if best is None else _climbed(problem, best, bound)

    def _fallback(self, problem: Problem, least: Round) -> Schedule:
        """What always works: the leanest order, each value there only when it is needed."""
        return _schedule(problem.chain, one_by_one(least, least.trips))

    def _alone(self, problem: Problem) -> Iterator[Schedule]:
        """Activations alone, and where steps are taken in backward, weights alone."""
        try:
            alone = problem if self.moves_activations else replace(problem, bandwidth=0)
            schedule = Pofo(slots=self.slots).plan(alone).schedule
            yield _schedule(problem.chain, self._with_updates(problem.chain, schedule.operations))
        except InfeasibleBudgetError:
            pass
        if not self.step_in_backward or problem.chain.grads_resident:
            return
        try:
            schedule = WeightsGreedy().plan(problem).schedule
        except InfeasibleBudgetError:
            return
        yield _schedule(problem.chain, self._with_updates(problem.chain, schedule.operations))

    def _with_updates(self, chain: Chain, operations: Sequence[Operation]) -> list[Operation]:
        updated, listed = updated_stages(chain), list[Operation]()
        for operation in operations:
            listed.append(operation)
            if self.step_in_backward and isinstance(operation, Backward) and operation.stage in updated:
                listed.append(Update(operation.stage))
        if not self.step_in_backward:
            listed += [Update(k) for k in sorted(updated, reverse=True)]
        return listed


def _schedule(chain: Chain, operations: Sequence[Operation]) -> Schedule:
    return cyclic("joint", chain.num_stages, operations)


def _passes(order: Round) -> Iterator[Forward | Backward]:
    return (each for each in order.computations if not isinstance(each, Update))


def _recomputed(chain: Chain, memory_budget: int | None) -> list[Order]:
    """The fastest recomputations for several memories up to a budget; without one, that for the least memory."""
    costs = costs_of(chain)
    least, n = least_memory(costs), chain.num_stages
    lowest, ample = int(least.least_bytes[1, n]), int(least.ample_bytes[1, n])
    most = lowest if memory_budget is None else min(ample, memory_budget - outside_bytes(chain))
    if most < lowest:
        return []
    slots, steps = default_num_slots(n), _NUM_MEMORIES - 1 if most > lowest else 0
    memories = dict.fromkeys(lowest + (most - lowest) * step // max(1, steps) for step in range(steps + 1))
    # A table for all that helps knows the fastest schedule alone; one for a byte less knows all below.
    tables = {
        memory >= ample: Table.of(costs, least, min(memory, most), slots) for memory in (most, min(most, ample - 1))
    }
    return [operations_of(costs, tables[memory >= ample].decisions(memory)[0]) for memory in memories]


def _placed(problem: Problem, order: Round, reserves: Iterable[float]) -> Iterator[_Found]:
    """The round within the budget, for several reserves; each choice of trips once."""
    sizes = [trip.num_bytes for trip in order.trips]
    typical = sum(size * size for size in sizes) / max(1, sum(sizes))
    seen: set[frozenset[int]] = set()
    for reserve in reserves:
        chosen = chosen_trips(order, problem.memory_budget - int(reserve * typical))
        if chosen is None or frozenset(chosen) in seen:
            continue
        seen.add(frozenset(chosen))
        placed = place(problem, order, [order.trips[index] for index in chosen])
        if placed is not None:
            yield _Found(order, frozenset(chosen), placed)


def _climbed(problem: Problem, best: _Found, bound: float) -> _Found:
    """Add and take out single trips while that helps, the largest first, within a number of tries."""
    order = best.order
    by_size = sorted(range(len(order.trips)), key=lambda index: -order.trips[index].num_bytes)
    since_better = 0
    for attempt in range(min(_NUM_TRIES, _MOST_COMPUTATIONS // order.size)):
        if not by_size or since_better == len(by_size) or best.placed.seconds <= bound * (1 + _CLOSE_ENOUGH):
            break
        trips = best.trips ^ {by_size[attempt % len(by_size)]}
        since_better += 1
        if not _fits(order, trips, problem.memory_budget):
            continue
        placed = place(problem, order, [order.trips[index] for index in sorted(trips)])
        if placed is not None and placed.seconds < best.placed.seconds * (1 - 1e-9):
            best, since_better = _Found(order, trips, placed), 0
    return best


def _fits(order: Round, trips: Iterable[int], memory_budget: int) -> bool:
    need = order.peak_bytes.copy()
    for index in trips:
        for part in order.covered(order.trips[index]):
            need[part] -= order.trips[index].num_bytes
    return int(need.max()) <= memory_budget
