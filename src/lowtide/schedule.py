"""A schedule: one list of operations, in order.

| operation | in a file | meaning |
| --- | --- | --- |
| `Forward(k, "all")` | `["forward", k, "all"]` | run stage k, keep all that backward k needs (F_all) |
| `Forward(k, "keep")` | `["forward", k, "keep"]` | run stage k, keep its input and its output (F_ck) |
| `Forward(k, "drop")` | `["forward", k, "drop"]` | run stage k, free its input (F_∅) |
| `Backward(k)` | `["backward", k]` | the gradient passes stage k |
| `Update(k)` | `["update", k]` | the optimizer step of stage k, in a schedule that manages weights |
| `Offload(kind, k)` | `["offload", kind, k]` | queue a copy to the host; the value stays |
| `Release(kind, k)` | `["release", kind, k]` | wait for that copy, then the value leaves the device |
| `Prefetch(kind, k)` | `["prefetch", kind, k]` | make room for the value and queue its copy back |
| `Await(kind, k)` | `["await", kind, k]` | wait until the value has arrived |

The kinds of value are `"a"` and `"abar"` (activations), `"s"` (a side value; k is its place in the chain's list, from
1), `"w"` (weights), `"opt"` (optimizer state) and `"g"` (the weight gradients of a stage). What an operation needs,
uses and leaves behind is in `lowtide.simulate`.

    >>> Schedule("by hand", [Forward(1, "all"), Backward(1)]).to_dict()["operations"]
    [['forward', 1, 'all'], ['backward', 1]]
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from lowtide.chain import Chain
from lowtide.errors import ScheduleError, shown
from lowtide.files import read_json, write_json

FORMAT = "lowtide.schedule/1"

Save = Literal["all", "keep", "drop"]
Kind = Literal["a", "abar", "w", "opt", "g", "s"]
Value = tuple[str, int]  # (kind, k): ("abar", 3) is abar[3]

SAVES = ("all", "keep", "drop")
KINDS = ("a", "abar", "w", "opt", "g", "s")
# What may be somewhere when a period begins.
_START_KINDS = ("w", "opt", "g")

# No chain has so many bytes or seconds; nothing larger, or infinite, is a real prediction.
_LARGEST_PREDICTION = 1e300


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward of a stage; `save` says what is kept. `variant` is used only with `save="all"`."""

    stage: int
    save: Save
    variant: int = 0

    def to_list(self) -> list[Any]:
        """Return the operation as in a schedule file."""
        return ["forward", self.stage, self.save, *([self.variant] if self.variant else [])]


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of a stage, in the variant of its forward."""

    stage: int

    def to_list(self) -> list[Any]:
        """Return the operation as in a schedule file."""
        return ["backward", self.stage]


@dataclass(frozen=True, slots=True)
class Update:
    """Change the weights of stage `stage` by the optimizer's step, and free their gradients."""

    stage: int

    def to_list(self) -> list[Any]:
        """Return the operation as in a schedule file."""
        return ["update", self.stage]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """An operation on one value, `(kind, stage)`."""

    kind: Kind
    stage: int
    verb: ClassVar[str]

    @property
    def value(self) -> Value:
        """The value that is moved."""
        return (self.kind, self.stage)

    def to_list(self) -> list[Any]:
        """Return the operation as in a schedule file."""
        return [self.verb, self.kind, self.stage]


@dataclass(frozen=True, slots=True)
class Offload(_Transfer):
    """Start a copy to the host; the value stays on the device."""

    verb = "offload"


@dataclass(frozen=True, slots=True)
class Release(_Transfer):
    """Wait for the copy to the host, then free the value on the device."""

    verb = "release"


@dataclass(frozen=True, slots=True)
class Prefetch(_Transfer):
    """Take device memory and start the copy back from the host."""

    verb = "prefetch"


@dataclass(frozen=True, slots=True)
class Await(_Transfer):
    """Wait until a prefetched value has arrived."""

    verb = "await"


Operation = Forward | Backward | Update | Offload | Release | Prefetch | Await

# What runs on the compute clock.
COMPUTATIONS = (Forward, Backward, Update)

_TRANSFERS: dict[str, type[Offload | Release | Prefetch | Await]] = {
    cls.verb: cls for cls in (Offload, Release, Prefetch, Await)
}


@dataclass(frozen=True, slots=True)
class Start:
    """What is on the device and on the host when a period of a schedule that moves weights begins and ends."""

    device: frozenset[Value] = frozenset()
    host: frozenset[Value] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Return the start as in a schedule file."""
        return {"device": [list(v) for v in sorted(self.device)], "host": [list(v) for v in sorted(self.host)]}


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the simulator predicted when the schedule was made."""

    seconds: float
    peak_bytes: int
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """A list of operations, with the state it starts from if it moves weights.

    The form is checked here; `lowtide.simulate` checks whether the schedule is legal for a chain.
    """

    strategy: str
    operations: tuple[Operation, ...]
    manages: tuple[str, ...] = ()
    start: Start = field(default_factory=Start)
    predicted: Predicted | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operations", tuple(self.operations))
        object.__setattr__(self, "manages", tuple(self.manages))
        if not isinstance(self.strategy, str):
            raise ScheduleError(f"strategy is {shown(self.strategy)}, expected a string")
        if self.manages not in ((), ("w",), ("w", "opt")):
            raise ScheduleError(f'manages is {list(self.manages)}, expected [], ["w"] or ["w", "opt"]')
        for index, operation in enumerate(self.operations):
            if not _is_well_formed(operation):
                raise _refusal_of(operation, index)
        for where, values in (("device", self.start.device), ("host", self.start.host)):
            for kind, k in values:
                if kind not in self.manages and not (kind == "g" and self.manages):
                    raise ScheduleError(
                        f"start.{where} names {[kind, k]}, but the schedule manages only "
                        f"{', '.join(self.manages) or 'nothing'}"
                    )

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain data, in the format `lowtide.schedule/1`."""
        values: dict[str, Any] = {
            "format": FORMAT,
            "strategy": self.strategy,
            "operations": [operation.to_list() for operation in self.operations],
        }
        if self.manages:
            values["manages"] = list(self.manages)
            values["start"] = self.start.to_dict()
        if self.predicted is not None:
            values["predicted"] = {
                "seconds": self.predicted.seconds,
                "peak_bytes": self.predicted.peak_bytes,
                "idle_seconds": self.predicted.idle_seconds,
            }
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schedule:
        """Read a schedule from plain data; the inverse of `to_dict`.

        Raises:
            ScheduleError: in one line, with the operation's index where an operation is wrong.
        """
        if not isinstance(values, Mapping):
            hint = "; Schedule.load reads a file" if isinstance(values, str | os.PathLike) else ""
            if isinstance(getattr(values, "schedule", None), Schedule):  # a solution
                hint = "; give its .schedule"
            elif isinstance(values, Chain):
                hint = "; lowtide.solve(chain, memory_budget=...) computes one"
            raise ScheduleError(f"a schedule is a JSON object, not {shown(values)}{hint}")
        found = values.get("format")
        if found != FORMAT:
            raise ScheduleError(f"format is {shown(found)}, expected {FORMAT!r}; write one with lowtide solve -o")
        known = {"format", "strategy", "operations", "manages", "start", "predicted"}
        for key in values:
            if key not in known:
                raise ScheduleError(f"{key!r} is not a field of a schedule; the fields are {', '.join(sorted(known))}")
        strategy, operations = values.get("strategy", ""), values.get("operations")
        if not isinstance(operations, list | tuple):
            raise ScheduleError(f"operations is {shown(operations)}, expected a list of operations")
        manages = values.get("manages", [])
        if not isinstance(manages, list | tuple) or not all(isinstance(kind, str) for kind in manages):
            raise ScheduleError(f'manages is {shown(manages)}, expected [], ["w"] or ["w", "opt"]')
        return cls(
            strategy,
            tuple(operation_from_list(entry, index) for index, entry in enumerate(operations)),
            tuple(sorted(manages, reverse=True)),  # "w" before "opt"
            _start_from_dict(values.get("start", {})),
            _predicted_from_dict(values.get("predicted")),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a schedule file; an error is one line that starts with the file's name."""
        values = read_json(path, ScheduleError, check=cls.from_dict)
        try:
            return cls.from_dict(values)
        except ScheduleError as error:
            raise ScheduleError(f"{os.fspath(path)}: {error}", index=error.index, operation=error.operation) from None

    @property
    def num_stages(self) -> int:
        """The number of stages, which is the stage of the first backward; 0 without a backward."""
        return max((op.stage for op in self.operations if isinstance(op, Backward)), default=0)

    @property
    def has_updates(self) -> bool:
        """Whether it lists its optimizer steps; otherwise managed weights are updated in backward."""
        return any(isinstance(operation, Update) for operation in self.operations)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a schedule file, atomically."""
        write_json(path, self.to_dict())


def operation_from_list(entry: Any, index: int) -> Operation:
    """Read one operation from its file form; `index` is its position, for the message."""
    if not isinstance(entry, list | tuple) or not entry:
        raise _refusal(entry, index, 'an operation is a list such as ["forward", 1, "all"]')
    verb, *rest = entry
    if verb == "forward":
        if len(rest) not in (2, 3) or not _is_stage(rest[0]) or rest[1] not in SAVES:
            raise _refusal(entry, index, 'expected ["forward", k, "all" | "keep" | "drop"]')
        variant = rest[2] if len(rest) == 3 else 0
        if isinstance(variant, bool) or not isinstance(variant, int) or variant < 0:
            raise _refusal(entry, index, "a variant is a whole number, 0 or more")
        if variant and rest[1] != "all":
            raise _refusal(entry, index, 'only "all" takes a variant; "keep" and "drop" run as variant 0')
        return Forward(rest[0], rest[1], variant)
    if verb == "backward":
        if len(rest) != 1 or not _is_stage(rest[0]):
            raise _refusal(entry, index, 'expected ["backward", k]')
        return Backward(rest[0])
    if verb == "update":
        if len(rest) != 1 or not _is_stage(rest[0]):
            raise _refusal(entry, index, 'expected ["update", k]')
        return Update(rest[0])
    if isinstance(verb, str) and verb in _TRANSFERS:
        if len(rest) != 2 or rest[0] not in KINDS or not _is_stage(rest[1], smallest=0 if rest[0] == "a" else 1):
            kinds = " | ".join(f'"{kind}"' for kind in KINDS)
            raise _refusal(entry, index, f'expected ["{verb}", {kinds}, k]')
        return _TRANSFERS[verb](rest[0], rest[1])
    raise _refusal(entry, index, f"expected forward, backward, update, {', '.join(_TRANSFERS)}")


def _is_well_formed(operation: Any) -> bool:
    """Whether an operation made in Python is valid; fast, because solvers make many schedules."""
    if isinstance(operation, Forward):
        variant = operation.variant
        right = _is_stage(variant, smallest=0) and (not variant or operation.save == "all")
        return right and operation.save in SAVES and _is_stage(operation.stage)
    if isinstance(operation, _Transfer):
        return operation.kind in KINDS and _is_stage(operation.stage, smallest=0 if operation.kind == "a" else 1)
    return isinstance(operation, Backward | Update) and _is_stage(operation.stage)


def _refusal_of(operation: Any, index: int) -> ScheduleError:
    """The error for an invalid operation, worded as for one in a file."""
    if not isinstance(operation, Operation):
        return _refusal(operation, index, "expected Forward, Backward, Update, Offload, Release, Prefetch or Await")
    try:
        operation_from_list(operation.to_list(), index)
    except ScheduleError as error:
        return error
    raise AssertionError(f"{operation} is invalid in Python but not in a file: this is a bug in lowtide")


def _start_from_dict(values: Any) -> Start:
    if not isinstance(values, Mapping) or not set(values) <= {"device", "host"}:
        raise ScheduleError(f'start is {shown(values)}, expected {{"device": [[kind, k], …], "host": [[kind, k], …]}}')
    parts = []
    for where in ("device", "host"):
        entries = values.get(where, [])
        if not isinstance(entries, list | tuple):
            raise ScheduleError(f"start.{where} is {shown(entries)}, expected a list of [kind, k]")
        for entry in entries:
            right = isinstance(entry, list | tuple) and len(entry) == 2 and entry[0] in _START_KINDS
            if not right or not _is_stage(entry[1]):
                raise ScheduleError(f'start.{where} holds {shown(entry)}, expected ["w" | "opt" | "g", k]')
        parts.append(frozenset((kind, k) for kind, k in entries))
    return Start(*parts)


def _predicted_from_dict(values: Any) -> Predicted | None:
    if values is None:
        return None
    fields = ("seconds", "peak_bytes", "idle_seconds")
    if not isinstance(values, Mapping) or set(values) != set(fields):
        raise ScheduleError(f"predicted is {shown(values)}, expected an object with {', '.join(fields)}")
    for name in fields:
        value = values[name]
        right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST_PREDICTION
        if name == "peak_bytes" and right:
            right = value == int(value)
        if not right:
            raise ScheduleError(
                f"predicted.{name} is {shown(value)}, expected {'whole bytes' if name == 'peak_bytes' else 'seconds'} "
                "of at least 0"
            )
    return Predicted(float(values["seconds"]), int(values["peak_bytes"]), float(values["idle_seconds"]))


def _is_stage(k: Any, *, smallest: int = 1) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= smallest


def _refusal(entry: Any, index: int, reason: str) -> ScheduleError:
    listed = list(entry) if isinstance(entry, Sequence) and not isinstance(entry, str) else [entry]
    return ScheduleError(f"operation {index}, {shown(entry)}: {reason}", index=index, operation=listed)


def as_schedule(schedule: Schedule | Mapping[str, Any]) -> Schedule:
    """Return a `Schedule` unchanged, or read one from plain data."""
    if isinstance(schedule, Schedule):
        return schedule
    return Schedule.from_dict(schedule)
