"""The memory and time of a schedule: nothing else in lowtide computes them.

Memory follows from the order of the operations alone. Time has three clocks: compute, device-to-host, host-to-device.
Computations run one after the other. A copy starts when its channel is free and everything before it in the list has
been computed. An operation that needs an arriving value, or that removes a leaving one, waits for that copy.

| operation | needs on the device | peak while it runs | afterwards |
| --- | --- | --- | --- |
| forward k all | a[k-1] or abar[k-1] | stored + saved_bytes[k] + saving_extra[k] | + abar[k] |
| forward k keep | a[k-1] or abar[k-1] | stored + output_bytes[k] + forward_extra[k] | + a[k] |
| forward k drop | a[k-1] | stored + output_bytes[k] + forward_extra[k] | + a[k], - a[k-1] |
| backward k | delta[k], abar[k], a[k-1] or abar[k-1] | stored + grad_bytes[k-1] + weight_grad[k] + backward_extra[k]
- freed_bytes[k], at least stored | + delta[k-1], + weight_grad[k], - delta[k], - abar[k], - a[k-1] |
| update k | w[k], g[k], opt[k] | stored | - g[k]; the host copies of w[k] and opt[k] are stale |
| offload | the value | stored | a copy to the host is queued |
| release | the value and a current host copy | stored | - the value, once that copy has ended |
| prefetch | a host copy, and not the value | stored + the value | + the value; a copy from the host is queued |
| await | the value | stored | the value has arrived |

A forward `all` of stage k after backward k+1 takes rerun_seconds[k]: a[k] is not wanted any more.

A schedule that manages weights is one period of a cycle: the same list is run round after round until the state at the
seam repeats, and its time is the steady period. Where it lists updates, backward k leaves the weight gradients g[k] for
update k; where it does not, the update is done inside backward k.

Side value i is made by any forward of its maker that does not find it on the device, and is needed by every forward and
backward of its readers. It stays until the backward of its maker, or until it is released: also without a host copy,
for another forward of the maker makes it again. Its gradient exists from the backward of its last reader on. Where the
chain says that side values stay, they cannot be offloaded. One that the code around the stages holds beyond its readers
counts in the peaks of those first forwards also after a release, unless the host has a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from lowtide.chain import Chain, as_chain
from lowtide.errors import ScheduleError, shown
from lowtide.schedule import (
    COMPUTATIONS,
    Backward,
    Forward,
    Offload,
    Operation,
    Prefetch,
    Release,
    Schedule,
    Update,
    Value,
    as_schedule,
)
from lowtide.stored import IN_FLIGHT, RECOMPUTED, Stored
from lowtide.trace import Copy, Step, Trace
from lowtide.units import parse_bandwidth

# A cycle of copies and computations settles within a few rounds; one that has not by then is averaged.
_LARGEST_NUM_ROUNDS = 64


def simulate(
    chain: Chain | Mapping[str, Any],
    schedule: Schedule | Mapping[str, Any],
    *,
    bandwidth: int | str | None = None,
    duplex: bool = True,
) -> Trace:
    """Compute the time and peak memory of a schedule on a chain.

    Args:
        chain: the network, a `Chain` or its plain data.
        schedule: what to do, a `Schedule` or its plain data.
        bandwidth: bytes per second each way, for instance `"12GB/s"`; needed if the schedule has copies.
        duplex: copies run in both directions at once; False: they share one channel.

    Raises:
        ScheduleError: if the schedule is illegal, with the operation's index, the operation and the reason.

    Example:
        >>> from lowtide import Chain, Stage, Schedule, Forward, Backward
        >>> chain = Chain("one", [Stage("a", 1.0, 2.0, output_bytes=4, saved_bytes=6)], input_bytes=3)
        >>> trace = simulate(chain, Schedule("by hand", [Forward(1, "all"), Backward(1)]))
        >>> trace.seconds, trace.peak_bytes
        (3.0, 13)
    """
    chain, schedule = as_chain(chain), as_schedule(schedule)
    rate = None if bandwidth is None else parse_bandwidth(bandwidth)
    try:
        return _simulated(chain, schedule, rate, duplex)
    except ScheduleError as error:
        if schedule.num_stages in (0, chain.num_stages):
            raise
        raise ScheduleError(
            f"the schedule ({schedule.strategy!r}) is for {shown(schedule.num_stages)} stages, but chain "
            f"{chain.name!r} has {chain.num_stages}; use the chain it was made for, or solve this one ({error})",
            index=error.index,
            operation=error.operation,
        ) from None


def _simulated(chain: Chain, schedule: Schedule, rate: int | None, duplex: bool) -> Trace:
    machine = _Machine(chain, schedule, rate, duplex)
    seams = [(0.0, machine.seam())]
    machine.run_round()
    if not schedule.manages:
        return machine.trace(machine.clock)
    seams.append((machine.clock, machine.seam()))
    period, known = machine.clock, False
    while not known and len(seams) <= _LARGEST_NUM_ROUNDS:
        machine.begin_round()
        machine.run_round()
        seam = machine.seam()
        for earlier, (clock, other) in enumerate(seams):
            if _same_seam(seam, other, tolerance=1e-9 * (machine.clock - clock)):
                period = (machine.clock - clock) / (len(seams) - earlier)
                known = True
                break
        seams.append((machine.clock, seam))
    if not known:
        half = len(seams) // 2
        period = (seams[-1][0] - seams[half][0]) / (len(seams) - 1 - half)
    return machine.trace(period)


def _same_seam(one: dict[Any, float], other: dict[Any, float], tolerance: float) -> bool:
    return one.keys() == other.keys() and all(abs(one[key] - other[key]) <= tolerance for key in one)


class _Machine:
    """The state of the device while a schedule runs: what is stored, what is under way, and the three clocks."""

    def __init__(self, chain: Chain, schedule: Schedule, bandwidth: int | None, duplex: bool) -> None:
        self.chain = chain
        self.schedule = schedule
        self.bandwidth = bandwidth
        self.duplex = duplex
        self.manages_weights = "w" in schedule.manages
        self.lists_updates = self.manages_weights and schedule.has_updates
        if self.manages_weights and chain.grads_resident and not self.lists_updates:
            raise ScheduleError(
                f"chain {chain.name!r} accumulates weight gradients (grads_resident), but the schedule moves weights "
                "and updates them inside each backward; list the updates as operations, or use a chain without "
                "grads_resident"
            )
        self.makes, self.reads, self.last_reads = _side_values_by_stage(chain)
        self.held_long = [(i, side) for i, side in enumerate(chain.side_values, start=1) if side.held_until]
        self.clock = 0.0
        self.channel_free = {"to host": 0.0, "to device": 0.0}
        self.arriving: dict[Value, tuple[float, int]] = {}  # value -> end of its copy, the operation that queued it
        self.leaving: dict[Value, tuple[float, int]] = {}
        self.host: dict[Value, int] = dict.fromkeys(schedule.start.host, 0)  # value -> the variant of that copy
        self.stored = Stored()
        self.variant: dict[int, int] = {}  # the variant of each abar on the device
        for kind, k in schedule.start.device | schedule.start.host:
            if k > chain.num_stages:
                raise ScheduleError(f"start names {[kind, k]}, but the chain has {chain.num_stages} stages")
            if kind == "g" and not (self.lists_updates and chain.grads_resident):
                raise ScheduleError(
                    f"start names {[kind, k]}, but weight gradients exist at the start only if the chain has "
                    "grads_resident and the schedule lists updates"
                )
        for value in schedule.start.device:
            self.stored.put(value, self._bytes_of(value))
        self.begin_round()

    # Rounds

    def begin_round(self) -> None:
        """Start a new period: fresh activations, the same weights, clocks that continue."""
        chain, manages = self.chain, self.schedule.manages
        for kept in (self.arriving, self.leaving, self.host):
            for value in [value for value in kept if value[0] not in manages]:
                del kept[value]
        base_bytes = chain.base_bytes
        for stage in chain.stages:
            base_bytes += stage.weight_bytes if "w" not in manages else 0
            base_bytes += stage.optimizer_bytes if "opt" not in manages else 0
        resident_bytes = sum(stage.weight_grad_bytes for stage in chain.stages) if chain.grads_resident else 0
        self.stored.restart(manages, base_bytes, 0 if self.lists_updates else resident_bytes)
        if self.lists_updates and chain.grads_resident:
            self._put_resident_gradients()
        self.stored.put(("a", 0), chain.input_bytes)
        self.stored.put(("delta", chain.num_stages), chain.gradient_bytes(chain.num_stages))
        self.next_backward = chain.num_stages
        self.has_run: set[int] = set()
        self.updated: set[int] = set()
        self.round_start = self.clock
        self.start_by_category = self.stored.by_category
        self.idle = 0.0
        self.steps: list[Step] = []
        self.copies: list[Copy] = []
        self.held: tuple[int, ...] = ()  # the bytes by category at the peak of the operation under way

    def _put_resident_gradients(self) -> None:
        """Store the weight gradients, except those that start on the host."""
        start = self.schedule.start
        for k, stage in enumerate(self.chain.stages, start=1):
            value = ("g", k)
            if value in start.host:
                self.host[value] = 0
            if value in start.device or value not in start.host:
                self.stored.put(value, stage.weight_grad_bytes)

    def run_round(self) -> None:
        """Run the whole list once."""
        for index, operation in enumerate(self.schedule.operations):
            self._run(index, operation)
        if self.next_backward:
            raise ScheduleError(f"the schedule ends before backward {self.next_backward} has run")
        for k, stage in enumerate(self.chain.stages if self.lists_updates else (), start=1):
            if stage.weight_grad_bytes and k not in self.updated:
                raise ScheduleError(
                    f"the schedule ends before update {k} has run; a schedule that lists updates needs one for each "
                    "stage with weight gradients"
                )
        start = self.schedule.start
        for where, at_end, at_start in (("device", self.stored, start.device), ("host", self.host, start.host)):
            # weight gradients are made anew in every period
            end, begin = (
                {value for value in there if value[0] in self.schedule.manages} for there in (at_end, at_start)
            )
            for value in sorted(end ^ begin):
                first, second = ("end", "start") if value in end else ("start", "end")
                raise ScheduleError(
                    f"a schedule that moves weights must end as it starts, but {list(value)} is on the {where} at its "
                    f"{first} and not at its {second}"
                )

    def seam(self) -> dict[Any, float]:
        """What crosses into the next round, in seconds from now."""
        ahead: dict[Any, float] = {channel: max(0.0, free - self.clock) for channel, free in self.channel_free.items()}
        for name, under_way in (("arriving", self.arriving), ("leaving", self.leaving)):
            for value, (end, _) in under_way.items():
                if value[0] in self.schedule.manages and end > self.clock:
                    ahead[(name, value)] = end - self.clock
        return ahead

    def trace(self, seconds: float) -> Trace:
        """The last round as a trace."""
        if self.round_start:
            shift = self.round_start
            # Made anew field by field: solvers simulate thousands of schedules, and `replace` looks up each field.
            self.steps = [
                Step(
                    step.index,
                    step.operation,
                    step.start_seconds - shift,
                    step.end_seconds - shift,
                    step.idle_seconds,
                    step.waits_for,
                    step.stored_before_bytes,
                    step.peak_bytes,
                    step.stored_after_bytes,
                    step.stored_by_category,
                    step.peak_by_category,
                    step.repeated,
                )
                for step in self.steps
            ]
            self.copies = [
                Copy(
                    copy.index,
                    copy.direction,
                    copy.value,
                    copy.num_bytes,
                    copy.start_seconds - shift,
                    copy.end_seconds - shift,
                )
                for copy in self.copies
            ]
        peak = max((step.peak_bytes for step in self.steps), default=self.stored.total_bytes)
        idle = self.idle if not self.schedule.manages else max(0.0, seconds - self._compute_seconds())
        return Trace(seconds, peak, idle, tuple(self.steps), tuple(self.copies), self.start_by_category)

    def _compute_seconds(self) -> float:
        return Trace(0.0, 0, 0.0, tuple(self.steps), ()).compute_seconds

    # One operation

    def _run(self, index: int, operation: Operation) -> None:
        self.index, self.operation = index, operation
        self.waited = 0.0
        self.waits_for: int | None = None
        self._check_stage(operation)
        before = self.stored.total_bytes
        start = self.clock
        repeated = False
        if isinstance(operation, Forward):
            repeated = operation.stage in self.has_run
            start, end, peak = self._forward(operation, repeated)
        elif isinstance(operation, Backward):
            start, end, peak = self._backward(operation)
        elif isinstance(operation, Update):
            start, end, peak = self._update(operation)
        else:
            if isinstance(operation, Offload):
                self._offload(operation.value)
            elif isinstance(operation, Release):
                self._release(operation.value)
            elif isinstance(operation, Prefetch):
                self._prefetch(operation.value)
            else:
                self._await(operation.value)
            end = self.clock
            peak = max(before, self.stored.total_bytes)
            if not isinstance(operation, Release):
                self.held = self.stored.by_category
        self.idle += self.waited
        self.steps.append(
            Step(
                index,
                operation,
                start,
                end,
                self.waited,
                self.waits_for,
                before,
                peak,
                self.stored.total_bytes,
                self.stored.by_category,
                self.held,
                repeated,
            )
        )

    def _forward(self, operation: Forward, repeated: bool) -> tuple[float, float, int]:
        k, save = operation.stage, operation.save
        stage = self.chain.stages[k - 1]
        if operation.variant > len(stage.variants):
            self._refuse(f"stage {k} has {stage.num_variants} variants, 0 to {stage.num_variants - 1}")
        if save == "drop":
            self._use(("a", k - 1))
        else:
            self._use_input(k)
        if self.manages_weights:
            self._use(("w", k))
        for value in self.reads.get(k, ()):
            self._use(value)
        made, num_bytes = ("a", k), stage.output_bytes
        seconds, extra = stage.forward_seconds, stage.forward_extra_bytes
        if save == "all":
            way = stage.variant(operation.variant)
            made, num_bytes = ("abar", k), way.saved_bytes
            seconds, extra = way.forward_seconds, way.saving_extra_bytes
            if k == self.next_backward < len(self.chain.stages):  # the next stage is done: nothing needs a[k]
                seconds = way.rerun_seconds
        if made in self.stored:
            self._refuse(f"{_named(made)} is already stored")
        if k in self.makes:
            self._make_side_values(k)
        if stage.outliving and not repeated:
            for m, held_bytes in stage.outliving:
                if ("a", m) not in self.stored and ("abar", m) not in self.stored:
                    extra += held_bytes
        if self.held_long and not repeated:
            extra += self._held_bytes(k)
        peak = self.stored.total_bytes + num_bytes + extra
        start = self.clock
        self.clock = end = start + seconds
        self.stored.put(made, num_bytes, RECOMPUTED if repeated and save == "all" else None)
        self.held = self.stored.by_category
        if save == "all":
            self.variant[k] = operation.variant
            if self.host.get(made, operation.variant) != operation.variant:
                del self.host[made]
        elif save == "drop":
            self._remove(("a", k - 1))
        self.has_run.add(k)
        return start, end, peak

    def _backward(self, operation: Backward) -> tuple[float, float, int]:
        k = operation.stage
        if k != self.next_backward:
            expected = f"backward {self.next_backward} comes next" if self.next_backward else "all have run"
            self._refuse(f"each backward runs once, from the last stage to the first; {expected}")
        stage = self.chain.stages[k - 1]
        self._use(("abar", k))
        self._use_input(k)
        if self.manages_weights:
            self._use_weights(k)
        for value in self.reads.get(k, ()):
            self._use(value)
        way = stage.variant(self.variant[k])
        weight_grad = 0 if self.chain.grads_resident else stage.weight_grad_bytes
        gradient = self.chain.gradient_bytes(k - 1)
        stored = self.stored.total_bytes
        for i, num_bytes in self.last_reads.get(k, ()):
            self.stored.put(("ds", i), num_bytes)
        peak = stored + way.backward_more_bytes(self.stored.total_bytes - stored + gradient + weight_grad)
        start = self.clock
        self.clock = end = start + way.backward_seconds
        self.stored.put(("delta", k - 1), gradient)
        self._make_weight_gradients(k, weight_grad)
        self.held = self.stored.by_category_without(("abar", k), way.freed_bytes)
        for value in (("delta", k), ("abar", k), ("a", k - 1), *self._side_values_of(k)):
            if value in self.stored:
                self._remove(value)
        self.next_backward -= 1
        return start, end, peak

    def _use_weights(self, k: int) -> None:
        """What backward k needs of the values that do not belong to one step alone."""
        for kind in ("w",) if self.lists_updates else self.schedule.manages:
            self._use((kind, k))
        if self.lists_updates and self.chain.grads_resident:
            self._use(("g", k))

    def _make_weight_gradients(self, k: int, num_bytes: int) -> None:
        """Account for the weight gradients of backward k, or for the update inside it."""
        if not self.manages_weights:
            self.stored.add_gradients(num_bytes)
        elif not self.lists_updates:
            for kind in self.schedule.manages:
                self.host.pop((kind, k), None)
        elif self.chain.grads_resident:
            self.host.pop(("g", k), None)
        else:
            self.stored.put(("g", k), num_bytes)

    def _make_side_values(self, k: int) -> None:
        """Add the side values of forward k if they are not stored; after backward k nothing needs them."""
        for i, num_bytes in self.makes[k] if k <= self.next_backward else ():
            if ("s", i) not in self.stored:
                self.stored.put(("s", i), num_bytes)

    def _held_bytes(self, k: int) -> int:
        """The side values that were freed although the code around the stages holds them in the first forward of k."""
        return sum(
            side.num_bytes
            for i, side in self.held_long
            if side.maker < k <= side.held_until and ("s", i) not in self.stored and ("s", i) not in self.host
        )

    def _side_values_of(self, k: int) -> list[Value]:
        """The side values that stage k makes, and their gradients."""
        return [(kind, i) for i, _ in self.makes.get(k, ()) for kind in ("s", "ds")]

    def _update(self, operation: Update) -> tuple[float, float, int]:
        k = operation.stage
        if k <= self.next_backward:
            self._refuse(f"update {k} must come after backward {k}, which has not run")
        if k in self.updated:
            self._refuse(f"each update runs once, and update {k} has already run")
        for kind in ("g", *self.schedule.manages):
            self._use((kind, k))
        start, peak = self.clock, self.stored.total_bytes
        self.clock = end = start + self.chain.stages[k - 1].update_seconds
        self.held = self.stored.by_category
        self._remove(("g", k))
        for kind in ("g", *self.schedule.manages):
            self.host.pop((kind, k), None)
        self.updated.add(k)
        return start, end, peak

    def _offload(self, value: Value) -> None:
        if value[0] == "s" and self.chain.side_value(value[1]).stays:
            self._refuse(f"{_named(value)} stays on the device (its `stays` is true)")
        self._use(value)
        self.stored.depart(value)
        end = self._copy("to host", value, self.stored[value])
        self.leaving[value] = (end, self.index)
        self.host[value] = self.variant.get(value[1], 0) if value[0] == "abar" else 0

    def _release(self, value: Value) -> None:
        self._use(value)
        if value not in self.host and value[0] != "s":  # a forward of its maker makes a side value again
            self._refuse(f"{_named(value)} has no current copy on the host; offload it first")
        self.held = self.stored.by_category
        self._remove(value)

    def _prefetch(self, value: Value) -> None:
        if value in self.stored:
            self._refuse(f"{_named(value)} is already on the device")
        if value not in self.host:
            self._refuse(f"{_named(value)} has no current copy on the host; offload it before you prefetch it")
        if value[0] == "abar":
            self.variant[value[1]] = self.host[value]
        num_bytes = self._bytes_of(value)
        self.stored.put(value, num_bytes, IN_FLIGHT)
        self.arriving[value] = (self._copy("to device", value, num_bytes), self.index)

    def _await(self, value: Value) -> None:
        if value not in self.stored:
            self._refuse(f"{_named(value)} is neither on the device nor on its way; prefetch it first")
        self._use(value)

    # Pieces of operations

    def _check_stage(self, operation: Operation) -> None:
        kind = None if isinstance(operation, COMPUTATIONS) else operation.kind
        if kind == "s":
            if operation.stage > len(self.chain.side_values):
                self._refuse(f"the chain has {len(self.chain.side_values)} side values")
        elif operation.stage > len(self.chain.stages):
            self._refuse(f"the chain has {self.chain.num_stages} stages")
        if kind in ("w", "opt") and kind not in self.schedule.manages:
            self._refuse(f'the schedule does not manage "{kind}"')
        if kind == "g" and not self.lists_updates:
            self._refuse("weight gradients can be moved only in a schedule that lists updates")
        if not self.manages_weights and isinstance(operation, Update):
            self._refuse('only a schedule that manages weights lists updates ("manages": ["w"] or ["w", "opt"])')

    def _use(self, value: Value) -> None:
        """Require a value on the device; wait if it is still arriving."""
        if value not in self.stored:
            self._refuse(f"{_named(value)} is not on the device")
        if value in self.arriving:
            self._wait(*self.arriving.pop(value))
        if value not in self.leaving and self.stored.is_in_flight(value):
            self.stored.settle(value)

    def _use_input(self, k: int) -> None:
        """Require a[k-1], on its own or inside abar[k-1], whichever is there first."""
        alone, inside = ("a", k - 1), ("abar", k - 1)
        if inside not in self.stored:
            if alone not in self.stored:
                missing = f"neither a[{k - 1}] nor abar[{k - 1}] is" if k > 1 else "a[0] is not"
                self._refuse(f"{missing} on the device")
            self._use(alone)
        elif alone not in self.stored:
            self._use(inside)
        else:
            self._use(min(alone, inside, key=lambda value: self.arriving.get(value, (0.0, 0))[0]))

    def _wait(self, until: float, copied_by: int) -> None:
        if until > self.clock:
            self.waited += until - self.clock
            self.waits_for = copied_by
            self.clock = until

    def _copy(self, direction: str, value: Value, num_bytes: int) -> float:
        """Queue a copy and return its end."""
        if not self.bandwidth:
            self._refuse(
                f"a copy needs a bandwidth above 0, but {self.bandwidth or 'none'} was given; pass "
                "--bandwidth 12GB/s, or bandwidth= in Python"
            )
        start = max(self.channel_free[direction], self.clock)
        end = start + num_bytes / self.bandwidth
        for channel in self.channel_free if not self.duplex else (direction,):
            self.channel_free[channel] = end
        self.copies.append(Copy(self.index, direction, value, num_bytes, start, end))
        return end

    def _remove(self, value: Value) -> None:
        """Free a value on the device once no copy reads or writes it."""
        if value in self.leaving:
            self._wait(*self.leaving.pop(value))
        if value in self.arriving:
            self._wait(*self.arriving.pop(value))
        self.stored.take(value)

    def _bytes_of(self, value: Value) -> int:
        kind, k = value
        if kind == "a":
            return self.chain.activation_bytes(k)
        if kind == "s":
            return self.chain.side_values[k - 1].num_bytes
        stage = self.chain.stages[k - 1]
        if kind == "abar":
            return stage.variant(self.variant.get(k, 0)).saved_bytes
        return {"w": stage.weight_bytes, "opt": stage.optimizer_bytes, "g": stage.weight_grad_bytes}[kind]

    def _refuse(self, reason: str) -> NoReturn:
        listed = self.operation.to_list()
        raise ScheduleError(f"operation {self.index}, {shown(listed)}: {reason}", index=self.index, operation=listed)


_Sized = dict[int, list[tuple[int, int]]]


def _side_values_by_stage(chain: Chain) -> tuple[_Sized, dict[int, list[Value]], _Sized]:
    """By stage: what it makes, with bytes; what it reads; and what it is the last to read, with a gradient's bytes."""
    makes: _Sized = {}
    reads: dict[int, list[Value]] = {}
    last_reads: _Sized = {}
    for i, side in enumerate(chain.side_values, start=1):
        makes.setdefault(side.maker, []).append((i, side.num_bytes))
        last_reads.setdefault(side.readers[-1], []).append((i, side.grad_bytes))
        for k in side.readers:
            reads.setdefault(k, []).append(("s", i))
    return makes, reads, last_reads


def _named(value: Value) -> str:
    return f"{value[0]}[{value[1]}]"
