"""One round of training with its optimizer steps: what each computation takes, and which values may be away when.

A *round* is an order of forwards and backwards with the updates in it, repeated for ever. Between two computations that
touch a value lies a *trip* that it may make to the host. Weights are touched by every forward and backward of their
stage and changed by its update; optimizer state is touched by the update alone; weight gradients are made by backward
and freed by the update; activations and side values make the trips that `copies.gaps` finds. Trips of one *version* of
a value, from one change to the next, share one copy to the host: that is why a byte of weights costs two copies in and
one out in a round, one of optimizer state or gradients one each way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain, Stage
from lowtide.schedule import Backward, Forward, Operation, Update, Value
from lowtide.strategies.copies.gaps import Profile

Bytes = NDArray[np.int64]
Computation = Forward | Backward | Update


@dataclass(frozen=True, slots=True)
class Trip:
    """A stretch of a round during which a value may be on the host.

    `begin` and `end` are indices of computations: the one that touches the value before, and the one that needs it
    again; an `end` beyond the last computation is in the next round. `made` is the computation that made or last
    changed the value, below 0 in the round before, None if nothing changes it. `version` numbers what shares one copy.
    """

    value: Value
    num_bytes: int
    begin: int
    end: int
    made: int | None
    version: int


class Round:
    """The computations of one round, what is stored with everything on the device, and every trip.

    Args:
        chain: the network.
        order: forwards and backwards, legal where every value stays on the device until it is removed.
        updates: `"down"` or `"up"`, after the last backward from stage n to 1 or from 1 to n; `"between"`, each right
            after its backward.
        moves_activations: activations and side values make trips, too.
    """

    def __init__(
        self, chain: Chain, order: Sequence[Forward | Backward], updates: str, *, moves_activations: bool = True
    ) -> None:
        self.chain = chain
        self.moves_activations = moves_activations
        profile = Profile(without_weights(chain), order)
        self.updated = updated_stages(chain)
        self.computations, self._at = _with_updates(profile.order, self.updated, updates)
        self.freed: dict[int, list[Operation]] = {self._at[p]: [*listed] for p, listed in profile.freed.items()}
        self.size = size = len(self.computations)
        self.seconds = np.zeros(size)
        self.before_bytes, self.peak_bytes = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._count(profile)
        self.trips: list[Trip] = []
        self._add_trips(profile)

    @property
    def compute_seconds(self) -> float:
        """The time of all computations."""
        return float(self.seconds.sum())

    def covered(self, trip: Trip) -> Iterable[slice]:
        """The computations during which a value on a trip is away, as one or two slices."""
        yield slice(trip.begin + 1, min(trip.end, self.size))
        if trip.end > self.size:
            yield slice(0, trip.end - self.size)

    def need_bytes(self) -> int:
        """The smallest budget with which the round works, with every value away that a computation does not need."""
        need = self.peak_bytes.copy()
        for trip in self.trips:
            for part in self.covered(trip):
                need[part] -= trip.num_bytes
        return int(need.max())

    def _count(self, profile: Profile) -> None:
        """The bytes at each computation with everything on the device."""
        chain = self.chain
        resident = sum(stage.weight_bytes + stage.optimizer_bytes for stage in chain.stages)
        stored = chain.base_bytes + chain.input_bytes + chain.gradient_bytes(chain.num_stages)
        gradients, position = 0, 0
        if chain.grads_resident:
            resident += sum(stage.weight_grad_bytes for stage in chain.stages)
        for index, computation in enumerate(self.computations):
            stage = chain.stage(computation.stage)
            made = 0 if chain.grads_resident else stage.weight_grad_bytes
            self.before_bytes[index] = self.peak_bytes[index] = stored + resident + gradients
            if isinstance(computation, Update):
                self.seconds[index] = stage.update_seconds
                gradients -= made
                continue
            if isinstance(computation, Backward):
                gradients += made
            self.seconds[index] = profile.seconds[position]
            self.peak_bytes[index] = int(profile.peak_bytes[position]) + resident + gradients
            stored = int(profile.after_bytes[position])
            position += 1

    def _add_trips(self, profile: Profile) -> None:
        chain, size, version = self.chain, self.size, 0
        uses: dict[int, list[int]] = {}
        for index, computation in enumerate(self.computations):
            uses.setdefault(computation.stage, []).append(index)
        for k, stage in enumerate(chain.stages, start=1):
            own = uses[k]
            update = own[-1] if k in self.updated else None
            backward = own[-2] if update is not None else own[-1]
            for begin, end in zip(own, (*own[1:], own[0] + size), strict=True):
                made = None if update is None else update if begin == update else update - size
                self._add(("w", k), stage.weight_bytes, begin, end, made, version)
            if update is not None:
                self._add(("opt", k), stage.optimizer_bytes, update, update + size, update, version + 1)
                if not chain.grads_resident:
                    self._add(("g", k), stage.weight_grad_bytes, backward, update, backward, version + 2)
            version += 3
        numbers: dict[tuple[Value, int], int] = {}
        for gap in profile.gaps if self.moves_activations else ():
            if gap.begin >= 0:  # the input of the chain stays until it has been used
                number = numbers.setdefault((gap.value, gap.made), version + len(numbers))
                made = self._at[max(0, gap.made)]
                self._add(gap.value, gap.num_bytes, self._at[gap.begin], self._at[gap.end], made, number)

    def _add(self, value: Value, num_bytes: int, begin: int, end: int, made: int | None, version: int) -> None:
        if num_bytes and end - begin > 1:
            self.trips.append(Trip(value, num_bytes, begin, end, made, version))


def updated_stages(chain: Chain) -> frozenset[int]:
    """The stages with an update: those with weight gradients or a time for it, or all where none has any."""
    stages = enumerate(chain.stages, start=1)
    found = frozenset(k for k, stage in stages if stage.weight_grad_bytes or stage.update_seconds)
    return found or frozenset(range(1, chain.num_stages + 1))


def _with_updates(
    order: Sequence[Forward | Backward], updated: frozenset[int], updates: str
) -> tuple[tuple[Computation, ...], list[int]]:
    """The order with its updates, and where each of its own computations stands there."""
    listed: list[Computation] = []
    at: list[int] = []
    for computation in order:
        at.append(len(listed))
        listed.append(computation)
        if updates == "between" and isinstance(computation, Backward) and computation.stage in updated:
            listed.append(Update(computation.stage))
    if updates != "between":
        listed += [Update(k) for k in sorted(updated, reverse=updates == "down")]
    return tuple(listed), at


def without_weights(chain: Chain) -> Chain:
    """The same network with no weights, and so with nothing that belongs to them."""
    stages = (replace(stage, weight_bytes=0, weight_grad_bytes=0, optimizer_bytes=0) for stage in chain.stages)
    return replace(chain, stages=tuple(stages), grads_resident=False)


def with_weights_passing(chain: Chain) -> Chain:
    """The same network where each computation has its own stage's weights and gradients for a moment, and no others.

    What strategies for activations find for it fits where all weights, gradients and optimizer state are moved.
    """
    stages = tuple(_passing(stage, grads_resident=chain.grads_resident) for stage in chain.stages)
    kept = sum(stage.weight_grad_bytes for stage in chain.stages) if chain.grads_resident else 0
    return replace(chain, stages=stages, grads_resident=False, base_bytes=chain.base_bytes + kept)


def _passing(stage: Stage, *, grads_resident: bool) -> Stage:
    forward = stage.weight_bytes
    backward = stage.weight_bytes + (0 if grads_resident else stage.weight_grad_bytes)
    variants = tuple(
        replace(
            variant,
            forward_extra_bytes=variant.forward_extra_bytes + forward,
            backward_extra_bytes=variant.backward_extra_bytes + backward,
        )
        for variant in stage.variants
    )
    return replace(
        stage,
        forward_extra_bytes=stage.forward_extra_bytes + forward,
        saving_extra_bytes=stage.saving_extra_bytes + forward,
        backward_extra_bytes=stage.backward_extra_bytes + backward,
        weight_bytes=0,
        weight_grad_bytes=0,
        optimizer_bytes=0,
        variants=variants,
    )
