"""A second accountant of memory and time, written from the rules of the two file formats alone.

It reads plain data, shares no code with lowtide, and recounts what is stored from scratch at every operation. `account`
gives what a schedule uses or raises `IllegalError`; `legal_schedule` makes random ones by asking what may come next.
"""

from __future__ import annotations

import copy
import random
from typing import Any

Value = tuple[str, int]


class IllegalError(Exception):
    """The schedule breaks a rule."""


def account(
    chain: dict[str, Any], schedule: dict[str, Any], bandwidth: float, *, duplex: bool = True
) -> tuple[float, int, float]:
    """Seconds, peak bytes and idle seconds; a cycle in its steady state.

    A tiny cycle is steady after six rounds, and repeats after 1, 2, 3 or 6 of them.
    """
    ledger = Ledger(chain, schedule, bandwidth, duplex)
    ledger.run()
    if not schedule.get("manages"):
        return ledger.clock, ledger.peak, ledger.clock - ledger.computed
    for _ in range(5):
        ledger.run()
    begin = ledger.clock
    for _ in range(6):
        ledger.run()
    period = (ledger.clock - begin) / 6
    return period, ledger.peak, max(0.0, period - ledger.computed)


class Ledger:
    """What is where, and the clocks."""

    def __init__(self, chain: dict[str, Any], schedule: dict[str, Any], bandwidth: float, duplex: bool = True) -> None:
        self.chain, self.schedule = chain, schedule
        self.bandwidth, self.duplex = bandwidth, duplex
        self.stages = [None, *chain["stages"]]
        self.sides = [None, *chain.get("side_values", [])]
        self.n = len(chain["stages"])
        self.manages = schedule.get("manages", [])
        self.updates = bool(self.manages) and any(op[0] == "update" for op in schedule["operations"])
        self.resident_grads = chain.get("grads_resident", False)
        if self.manages and self.resident_grads and not self.updates:
            raise IllegalError("resident gradients do not go with managed weights")
        self.start = {
            place: {(kind, k) for kind, k in schedule.get("start", {}).get(place, [])} for place in ("device", "host")
        }
        for kind, k in self.start["device"] | self.start["host"]:
            if k > self.n or (kind not in self.manages and not (kind == "g" and self.updates and self.resident_grads)):
                raise IllegalError("start names what cannot be there")
        self.clock, self.busy, self.peak = 0.0, [0.0, 0.0], 0
        self.arrives: dict[Value, float] = {}
        self.leaves: dict[Value, float] = {}
        self.device: set[Value] = {v for v in self.start["device"] if v[0] != "g"}
        self.host: dict[Value, int] = {v: 0 for v in self.start["host"] if v[0] != "g"}
        self.begin()

    def begin(self) -> None:
        """A new round: weights and optimizer state stay where they are."""
        self.device = {value for value in self.device if value[0] in self.manages}
        self.host = {value: v for value, v in self.host.items() if value[0] in self.manages}
        self.arrives = {value: t for value, t in self.arrives.items() if value[0] in self.manages}
        self.leaves = {value: t for value, t in self.leaves.items() if value[0] in self.manages}
        self.device |= {("a", 0), ("delta", self.n)}
        self.ran: set[int] = set()
        if self.updates and self.resident_grads:
            for k in range(1, self.n + 1):
                if ("g", k) in self.start["host"]:
                    self.host["g", k] = 0
                if ("g", k) in self.start["device"] or ("g", k) not in self.start["host"]:
                    self.device.add(("g", k))
        self.way: dict[int, int] = {}
        self.done = self.n + 1  # backward done, done + 1, … have run
        self.updated: set[int] = set()
        self.kept_grads = 0
        self.computed = 0.0

    def run(self) -> None:
        """One round."""
        self.begin()
        for operation in self.schedule["operations"]:
            self.do(operation)
        self.finish()

    def finish(self) -> None:
        """What must hold at the end."""
        if self.done != 1:
            raise IllegalError("a backward is missing")
        if self.updates and any(self.stage_bytes("g", k) and k not in self.updated for k in range(1, self.n + 1)):
            raise IllegalError("an update is missing")
        for place, there in (("device", self.device), ("host", set(self.host))):
            if {v for v in there if v[0] in self.manages} != {v for v in self.start[place] if v[0] in self.manages}:
                raise IllegalError("the end is not the start")

    # Sizes

    def field(self, k: int, name: str, default: Any = 0) -> Any:
        return self.stages[k].get(name, default)

    def stage_bytes(self, kind: str, k: int) -> int:
        weight = self.field(k, "weight_bytes")
        return {"w": weight, "g": self.field(k, "weight_grad_bytes", weight), "opt": self.field(k, "optimizer_bytes")}[
            kind
        ]

    def way_of(self, k: int, variant: int) -> dict[str, Any]:
        variants = self.field(k, "variants", [])
        if variant > len(variants):
            raise IllegalError("no such variant")
        if variant:
            return variants[variant - 1]
        stage = dict(self.stages[k])
        stage.setdefault("rerun_seconds", stage["forward_seconds"])
        stage.setdefault("saving_extra_bytes", stage.get("forward_extra_bytes", 0))
        return stage

    def size(self, value: Value) -> int:
        kind, k = value
        if kind == "a":
            return self.stages[k]["output_bytes"] if k else self.chain.get("input_bytes", 0)
        if kind == "delta":
            if not k:
                return self.chain.get("input_grad_bytes", 0)
            return self.field(k, "grad_bytes", self.stages[k]["output_bytes"])
        if kind == "abar":
            return self.way_of(k, self.way.get(k, 0))["saved_bytes"]
        if kind == "s":
            return self.sides[k]["bytes"]
        if kind == "gradient of s":
            return self.sides[k].get("grad_bytes", self.sides[k]["bytes"])
        return self.stage_bytes(kind, k)

    def stored(self) -> int:
        total = self.chain.get("base_bytes", 0) + sum(self.size(value) for value in self.device) + self.kept_grads
        for k in range(1, self.n + 1):
            total += sum(self.stage_bytes(kind, k) for kind in ("w", "opt") if kind not in self.manages)
            if self.resident_grads and not self.updates:
                total += self.stage_bytes("g", k)
        return total

    # Pieces

    def use(self, *choices: Value) -> None:
        there = [value for value in choices if value in self.device]
        if not there:
            raise IllegalError(f"{choices} is not on the device")
        self.clock = max(self.clock, min(self.arrives.get(value, 0.0) for value in there))

    def gone(self, value: Value) -> None:
        self.clock = max(self.clock, self.leaves.pop(value, 0.0), self.arrives.pop(value, 0.0))
        self.device.remove(value)

    def compute(self, seconds: float) -> None:
        self.clock += seconds
        self.computed += seconds

    def use_sides(self, k: int) -> None:
        for i in range(1, len(self.sides)):
            if k in self.sides[i]["to"]:
                self.use(("s", i))

    def sides_of(self, k: int) -> list[int]:
        return [i for i in range(1, len(self.sides)) if self.sides[i]["from"] == k]

    # Operations

    def do(self, operation: list[Any]) -> None:
        verb, *rest = operation
        k = rest[-1] if verb in ("offload", "release", "prefetch", "await") else rest[0]
        if k > (len(self.sides) - 1 if rest[0] == "s" else self.n):
            raise IllegalError("no such stage")
        getattr(self, f"do_{verb}")(*rest)

    def do_forward(self, k: int, save: str, variant: int = 0) -> None:
        way = self.way_of(k, variant)
        self.use(("a", k - 1), *([] if save == "drop" else [("abar", k - 1)]))
        if self.manages:
            self.use(("w", k))
        self.use_sides(k)
        made = ("abar", k) if save == "all" else ("a", k)
        if made in self.device:
            raise IllegalError("stored already")
        if save == "all":
            if self.host.get(made, variant) != variant:
                del self.host[made]
            self.way[k] = variant
        self.device |= {made, *((("s", i) for i in self.sides_of(k)) if k < self.done else ())}
        extra = way.get("forward_extra_bytes", 0)
        if save == "all":
            extra = way.get("saving_extra_bytes", extra)
        for m, num_bytes in self.stages[k].get("outliving", []) if k not in self.ran else ():
            extra += 0 if {("a", m), ("abar", m)} & self.device else num_bytes
        self.ran.add(k)
        self.peak = max(self.peak, self.stored() + extra)
        early = save == "all" and self.done == k + 1 <= self.n
        self.compute(way.get("rerun_seconds", way["forward_seconds"]) if early else way["forward_seconds"])
        if save == "drop":
            self.gone(("a", k - 1))

    def do_backward(self, k: int) -> None:
        if k != self.done - 1:
            raise IllegalError("backwards run from the last to the first")
        self.use(("abar", k))
        self.use(("a", k - 1), ("abar", k - 1))
        for kind in ["w"] if self.updates else self.manages:
            self.use((kind, k))
        self.use_sides(k)
        way = self.way_of(k, self.way[k])
        weight_grad = 0
        if self.updates:
            if self.resident_grads:
                self.use(("g", k))
                self.host.pop(("g", k), None)
            self.device.add(("g", k))
        elif not self.resident_grads:
            weight_grad = self.stage_bytes("g", k)
        self.device.add(("delta", k - 1))
        self.device |= {("gradient of s", i) for i in range(1, len(self.sides)) if max(self.sides[i]["to"]) == k}
        change = way.get("backward_extra_bytes", 0) - way.get("freed_bytes", 0)
        self.peak = max(self.peak, self.stored() + weight_grad + change)
        self.compute(way["backward_seconds"])
        own = [(kind, i) for i in self.sides_of(k) for kind in ("s", "gradient of s")]
        for value in (("delta", k), ("abar", k), ("a", k - 1), *own):
            if value in self.device:
                self.gone(value)
        if not self.manages:
            self.kept_grads += weight_grad
        elif not self.updates:
            for kind in self.manages:
                self.host.pop((kind, k), None)
        self.done = k

    def do_update(self, k: int) -> None:
        if not self.manages:
            raise IllegalError("weights are not managed")
        if k < self.done or k in self.updated:
            raise IllegalError("once each, after its backward")
        for kind in ("g", *self.manages):
            self.use((kind, k))
            self.host.pop((kind, k), None)
        self.peak = max(self.peak, self.stored())
        self.compute(self.field(k, "update_seconds"))
        self.gone(("g", k))
        self.updated.add(k)

    def copied(self, value: Value, channel: int) -> float:
        channel = channel if self.duplex else 0
        self.busy[channel] = max(self.busy[channel], self.clock) + self.size(value) / self.bandwidth
        return self.busy[channel]

    def movable(self, value: Value) -> Value:
        if value[0] in ("w", "opt") and value[0] not in self.manages:
            raise IllegalError("not managed")
        if value[0] == "g" and not self.updates:
            raise IllegalError("no value of its own")
        return value

    def do_offload(self, kind: str, k: int) -> None:
        value = self.movable((kind, k))
        self.use(value)
        self.leaves[value] = self.copied(value, 0)
        self.host[value] = self.way[k] if kind == "abar" else 0

    def do_release(self, kind: str, k: int) -> None:
        value = self.movable((kind, k))
        self.use(value)
        if value not in self.host and kind != "s":
            raise IllegalError("no copy on the host")
        self.gone(value)

    def do_prefetch(self, kind: str, k: int) -> None:
        value = self.movable((kind, k))
        if value in self.device or value not in self.host:
            raise IllegalError("nothing to fetch")
        if kind == "abar":
            self.way[k] = self.host[value]
        self.device.add(value)
        self.arrives[value] = self.copied(value, 1)
        self.peak = max(self.peak, self.stored())

    def do_await(self, kind: str, k: int) -> None:
        self.use(self.movable((kind, k)))


class Writer:
    """Writes a random schedule that is legal: tries operations on a ledger, and keeps those that it takes.

    Args:
        chain: plain data.
        rng: which schedule.
        manages: `[]`, `["w"]` or `["w", "opt"]`.
        updates: list them.
        moves: how likely copies are.
    """

    def __init__(
        self, chain: dict[str, Any], rng: random.Random, *, manages: list[str], updates: bool, moves: float
    ) -> None:
        self.rng, self.moves = rng, moves
        self.operations: list[list[Any]] = []
        start: dict[str, list[Value]] = {"device": [], "host": []}
        num_stages = len(chain["stages"])
        kinds = [*manages, *(["g"] if updates and chain.get("grads_resident") else [])]
        for value in ((kind, k) for kind in kinds for k in range(1, num_stages + 1)):
            places = rng.choice([["device"], ["host"], ["device", "host"]])
            for place in places:
                start[place].append(value)
        self.stays = set(start["device"]) - set(start["host"])  # without a copy on the host when the period begins
        listed = {place: [list(value) for value in values] for place, values in start.items()}
        self.schedule = {
            "format": "lowtide.schedule/1",
            "strategy": "random",
            "operations": self.operations,
            **({"manages": manages, "start": listed} if manages else {}),
        }
        self.ledger = Ledger(chain, {**self.schedule, "operations": [["update", 1]] if updates else []}, 1.0)

    def write(self) -> dict[str, Any]:
        """The schedule; now and then one that does not end as it starts."""
        n, ledger = self.ledger.n, self.ledger
        for k in range(1, n + 1):
            self.disturb()
            if self.rng.random() < 0.9:
                save = self.rng.choice(["all", "keep", *(["drop"] if k > 1 else [])])
                self.reach(["forward", k, save, *([self.variant(k)] if save == "all" else [])])
        for k in range(n, 0, -1):
            self.disturb()
            self.reach(["backward", k])
            if ledger.updates and self.rng.random() < 0.5:
                self.reach(["update", k])
        for k in range(1, n + 1):
            self.disturb()
            if ledger.updates and k not in ledger.updated:
                self.reach(["update", k])
        self.close()
        return self.schedule

    def variant(self, k: int) -> int:
        return self.rng.randint(0, len(self.ledger.field(k, "variants", [])))

    def close(self) -> None:
        """Come back to the start."""
        start = self.ledger.start
        for value in sorted(start["device"] | start["host"]):
            if value[0] not in self.ledger.manages:
                continue
            if value in start["host"] and value not in self.ledger.host:
                self.attempt(["offload", *value])
            if value in start["device"] and value not in self.ledger.device:
                self.attempt(["prefetch", *value])
            if value not in start["device"] and value in self.ledger.device:
                self.attempt(["release", *value])

    def attempt(self, operation: list[Any]) -> bool:
        """Add an operation if it is legal now."""
        before = copy.copy(self.ledger)
        for name in ("device", "host", "arrives", "leaves", "way", "updated", "busy"):
            setattr(before, name, copy.copy(getattr(self.ledger, name)))
        try:
            self.ledger.do(operation)
        except IllegalError:
            self.ledger = before
            return False
        self.operations.append(operation)
        return True

    def disturb(self) -> None:
        """Move something, whether or not that is of use."""
        while self.rng.random() < self.moves:
            ledger = self.ledger
            values = sorted(value for value in ledger.device if value[0] in ("a", "abar", "w", "opt", "g", "s"))
            ways = [["offload", *value] for value in values if value not in self.stays]
            ways += [["release", *value] for value in values if value in ledger.host or value[0] == "s"] * 3
            ways += [["prefetch", *value] for value in sorted(set(ledger.host) - ledger.device)]
            ways += [["await", *value] for value in values[:1]]
            if not ways or not self.attempt(self.rng.choice(ways)):
                return

    def reach(self, operation: list[Any], depth: int = 0) -> bool:
        """Add an operation, and before it whatever brings its values to the device."""
        for _ in range(6):
            if self.attempt(operation):
                return True
            for value in self.needs(operation):
                if depth > 6 or not self.bring(value, depth):
                    return False
        return False

    def needs(self, operation: list[Any]) -> list[Value]:
        ledger, (verb, k, *rest) = self.ledger, operation
        if verb == "update":
            return [(kind, k) for kind in ("g", *ledger.manages)]
        values: list[Value] = [("abar", k)] if verb == "backward" else []
        if ("abar", k - 1) not in ledger.device or rest[:1] == ["drop"]:
            values.append(("a", k - 1))
        values += [("w", k)] if ledger.manages else []
        if verb == "backward":
            values += [("g", k)] if ledger.updates and ledger.resident_grads else []
            values += [("opt", k)] if "opt" in ledger.manages and not ledger.updates else []
        return values + [("s", i) for i in range(1, len(ledger.sides)) if k in ledger.sides[i]["to"]]

    def bring(self, value: Value, depth: int) -> bool:
        ledger, (kind, k) = self.ledger, value
        if value in ledger.device:
            return True
        if value in ledger.host and (kind in ("w", "opt", "g") or value == ("a", 0) or self.rng.random() < 0.6):
            return self.attempt(["prefetch", kind, k])
        if kind == "abar":
            return self.reach(["forward", k, "all", self.variant(k)], depth + 1)
        if kind == "a":
            return k > 0 and self.reach(["forward", k, "keep"], depth + 1)
        if kind == "s":
            maker = ledger.sides[k]["from"]
            for made, save in (("a", "keep"), ("abar", "all")):
                if (made, maker) not in ledger.device and self.reach(["forward", maker, save], depth + 1):
                    return True
            return self.attempt(["offload", "a", maker]) and self.attempt(["release", "a", maker])
        return False


def legal_schedule(
    chain: dict[str, Any], rng: random.Random, *, manages: list[str], updates: bool, moves: float
) -> dict[str, Any]:
    """A random schedule, as plain data."""
    return Writer(chain, rng, manages=manages, updates=updates, moves=moves).write()


def spoiled(schedule: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same with one thing changed; most often that is illegal."""
    operations = [list(operation) for operation in schedule["operations"]]
    at, other = rng.randrange(len(operations)), rng.randrange(len(operations))
    change = rng.choice(["leave out", "repeat", "swap", "stage", "kind", "start"])
    if change == "leave out":
        del operations[at]
    elif change == "repeat":
        operations.insert(other, operations[at])
    elif change == "swap":
        operations[at], operations[other] = operations[other], operations[at]
    elif change == "stage":
        place = 2 if operations[at][0] in ("offload", "release", "prefetch", "await") else 1
        operations[at][place] = max(1, operations[at][place] + rng.choice([-1, 1]))
    elif change == "kind" and len(operations[at]) > 2 and operations[at][0] != "forward":
        operations[at][1] = rng.choice(["abar", "w", "opt", "g", "s"])
    elif change == "start" and "start" in schedule:
        start = {place: list(values) for place, values in schedule["start"].items()}
        place = rng.choice(["device", "host"])
        if start[place]:
            start[place].pop(rng.randrange(len(start[place])))
        return {**schedule, "operations": operations, "start": start}
    # an operation on a stage that is not a number from 1 up does not come out of here, but an "a" of stage 0 may go
    operations = [op for op in operations if not (len(op) == 3 and op[0] != "forward" and op[1] != "a" and op[2] < 1)]
    return {**schedule, "operations": operations}
