"""What a network costs: a chain of stages, each with its times and sizes.

Stage k = 1..n turns a[k-1] into a[k]; a[0] is the input of the chain. Backward k turns delta[k], the gradient of a[k],
into delta[k-1], and needs abar[k], everything that forward k saved for it.

| papers | here |
| --- | --- |
| a^k | `output_bytes` of stage k; `Chain.input_bytes` for k = 0 |
| ā^k | `saved_bytes`: all that backward k needs, a[k] included, a[k-1] and the parameters excluded |
| δ^k | `grad_bytes` of stage k; `Chain.input_grad_bytes` for k = 0 |
| u_F, u_B | `forward_seconds`, `backward_seconds`; `rerun_seconds` where a repeated forward may end early |
| o_f, o_b | `forward_extra_bytes`, `backward_extra_bytes`; `saving_extra_bytes` of a forward that saves all |
| w_k | `weight_bytes` |

Beside this chain of values a stage may make *side values* that later stages read (`SideValue`): skip connections,
auxiliary losses, a router's logits.

    >>> chain = Chain("two", [Stage("conv", 0.1, 0.2, output_bytes=10, saved_bytes=30),
    ...                       Stage("head", 0.1, 0.2, output_bytes=1, saved_bytes=1)], input_bytes=5)
    >>> chain.activation_bytes(0), chain.activation_bytes(1)
    (5, 10)
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.errors import ChainError, shown
from lowtide.files import read_json, write_json
from lowtide.units import format_seconds

FORMAT = "lowtide.chain/1"

# One size may not exceed this, so that sums over thousands of stages stay within 64-bit integers.
LARGEST_BYTES = 2**50
# Nor may one time exceed this, 30 million years: whatever is made of such numbers stays finite.
LARGEST_SECONDS = 10**15


@dataclass(frozen=True, slots=True)
class Variant:
    """Another way to run a stage for backward: the same values, with its own times and saved bytes."""

    name: str
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    freed_bytes: int = 0

    def __post_init__(self) -> None:
        _check_fields(self, where=f"variant {self.name!r}")

    @property
    def rerun_seconds(self) -> float:
        """The time of a recomputation; compiled code cannot stop early, so this is `forward_seconds`."""
        return self.forward_seconds

    @property
    def saving_extra_bytes(self) -> int:
        """Extra bytes while a forward saves everything; the only kind of forward that a variant has."""
        return self.forward_extra_bytes

    def backward_more_bytes(self, made_bytes: int) -> int:
        """As for a stage."""
        return max(0, made_bytes + self.backward_extra_bytes - self.freed_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the variant as in a chain file."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        if not self.freed_bytes:
            del values["freed_bytes"]
        return values


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain. Sizes are whole bytes, times are seconds.

    `grad_bytes` defaults to `output_bytes` and `weight_grad_bytes` to `weight_bytes`. `variants` lists the other ways
    to run the stage for backward; variant 0 is the stage itself (see `Stage.variant`). `rerun_seconds`, by default
    `forward_seconds`, is the time of a forward `all` after the backward of the next stage: only what it saves is needed
    then, so it can stop before its last matrix product. `saving_extra_bytes`, by default `forward_extra_bytes`, is what
    a forward `all` needs while it runs: what another forward makes and frees may be part of what it saves.
    `freed_bytes` are those of `saved_bytes` that are gone when the backward takes the most: a convolution's own output,
    which only the next stage's backward needs.
    `update_seconds` is the time of the stage's optimizer step with everything on the device. `outliving` lists pairs
    (m, bytes): so much of a[m] the code around the stages still holds while this one runs forward for the first time.
    Where neither a[m] nor abar[m] is on the device, that counts besides.

    Raises:
        ChainError: for a negative, fractional or oversized number, and where `saved_bytes < output_bytes`,
            `rerun_seconds > forward_seconds`, `saving_extra_bytes > forward_extra_bytes` or
            `freed_bytes > saved_bytes`.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int
    grad_bytes: int = None  # type: ignore[assignment]  # None: output_bytes
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    weight_bytes: int = 0
    weight_grad_bytes: int = None  # type: ignore[assignment]  # None: weight_bytes
    optimizer_bytes: int = 0
    variants: tuple[Variant, ...] = ()
    rerun_seconds: float = None  # type: ignore[assignment]  # None: forward_seconds
    saving_extra_bytes: int = None  # type: ignore[assignment]  # None: forward_extra_bytes
    update_seconds: float = 0.0
    outliving: tuple[tuple[int, int], ...] = ()
    freed_bytes: int = 0

    def __post_init__(self) -> None:
        if self.grad_bytes is None:
            object.__setattr__(self, "grad_bytes", self.output_bytes)
        if self.weight_grad_bytes is None:
            object.__setattr__(self, "weight_grad_bytes", self.weight_bytes)
        if self.rerun_seconds is None:
            object.__setattr__(self, "rerun_seconds", self.forward_seconds)
        if self.saving_extra_bytes is None:
            object.__setattr__(self, "saving_extra_bytes", self.forward_extra_bytes)
        object.__setattr__(self, "variants", tuple(self.variants))
        where = f"stage {self.name!r}"
        _check_fields(self, where=where)
        if not _are_outliving(self.outliving):
            raise ChainError(
                f"{where}: outliving is {shown(self.outliving)}, expected a list of pairs, the number of an earlier "
                "stage and whole bytes"
            )
        object.__setattr__(self, "outliving", tuple((m, num_bytes) for m, num_bytes in self.outliving))
        for variant in self.variants:
            if not isinstance(variant, Variant):
                raise ChainError(f"{where}: variants holds {shown(variant)}, expected a Variant")
        if self.rerun_seconds > self.forward_seconds:
            raise ChainError(
                f"{where}: rerun_seconds is {self.rerun_seconds}, more than its forward_seconds "
                f"{self.forward_seconds}; a recomputation takes at most as long as a forward"
            )
        if self.saving_extra_bytes > self.forward_extra_bytes:
            raise ChainError(
                f"{where}: saving_extra_bytes is {self.saving_extra_bytes}, more than its forward_extra_bytes "
                f"{self.forward_extra_bytes}, which is the most that any forward needs"
            )
        ways: dict[str, Stage | Variant] = {where: self, **{f"{where}, variant {v.name!r}": v for v in self.variants}}
        for owner, way in ways.items():
            if way.saved_bytes < self.output_bytes:
                raise ChainError(
                    f"{owner}: saved_bytes is {way.saved_bytes}, less than the stage's output_bytes "
                    f"{self.output_bytes}; what is saved includes the output"
                )
            if way.freed_bytes > way.saved_bytes:
                raise ChainError(
                    f"{owner}: freed_bytes is {way.freed_bytes}, more than its saved_bytes {way.saved_bytes}; only "
                    "what is saved can be freed"
                )

    @property
    def num_variants(self) -> int:
        """How many variants the stage has, counting itself."""
        return 1 + len(self.variants)

    def variant(self, index: int) -> Stage | Variant:
        """Variant `index`; 0 is the stage itself, which has the same fields."""
        return self.variants[index - 1] if index else self

    def backward_more_bytes(self, made_bytes: int) -> int:
        """What the backward takes at its peak beyond what is stored before it, where it makes so many bytes of
        gradients.
        """
        return max(0, made_bytes + self.backward_extra_bytes - self.freed_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the stage as in a chain file."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        variants = values.pop("variants")
        values["outliving"] = [list(pair) for pair in self.outliving]
        if not self.outliving:
            del values["outliving"]
        if self.rerun_seconds == self.forward_seconds:
            del values["rerun_seconds"]
        if self.saving_extra_bytes == self.forward_extra_bytes:
            del values["saving_extra_bytes"]
        for name in ("update_seconds", "freed_bytes"):
            if not values[name]:
                del values[name]
        return {**values, "variants": [v.to_dict() for v in variants]} if variants else values


@dataclass(frozen=True, slots=True)
class SideValue:
    """A value that one stage makes and later stages read besides their input.

    Args:
        name: for people.
        num_bytes: its size; `bytes` in a file.
        maker: the stage that makes it, counted from 1; `from` in a file.
        readers: the stages that read it, all after `maker`; `to` in a file.
        grad_bytes: the size of its gradient, by default `num_bytes`.
        stays: it cannot be moved to the host: the caller has it in hand, or what runs the chain cannot move it.
        held_until: the code around the stages holds it until the first forward of this stage, if that comes after all
            readers: a list of skip connections. Freed without a copy on the host, it counts in those forwards besides.

    Raises:
        ChainError: for a wrong size or flag, and if a reader does not come after the maker.
    """

    name: str
    num_bytes: int
    maker: int
    readers: tuple[int, ...]
    grad_bytes: int = None  # type: ignore[assignment]  # None: num_bytes
    stays: bool = False
    held_until: int = 0

    def __post_init__(self) -> None:
        if self.grad_bytes is None:
            object.__setattr__(self, "grad_bytes", self.num_bytes)
        readers = self.readers
        if isinstance(readers, list | tuple):
            object.__setattr__(self, "readers", tuple(sorted(set(readers)) if _are_stages(readers) else readers))
        where = f"side value {self.name!r}"
        if not isinstance(self.name, str):
            raise ChainError(f"{where}: name is {shown(self.name)}, expected a string")
        for field_name, value in (("bytes", self.num_bytes), ("grad_bytes", self.grad_bytes)):
            if not _is_size(value):
                raise ChainError(f"{where}: {field_name} is {shown(value)}, expected {_expected('_bytes')}")
        if not isinstance(self.stays, bool):
            raise ChainError(f"{where}: stays is {shown(self.stays)}, expected true or false")
        if self.held_until != 0 and not _are_stages([self.held_until]):
            raise ChainError(f"{where}: held_until is {shown(self.held_until)}, expected the number of a stage")
        if not _are_stages([self.maker]):
            raise ChainError(f"{where}: from is {shown(self.maker)}, expected the number of a stage")
        if not isinstance(readers, list | tuple) or not readers or not _are_stages(readers):
            raise ChainError(f"{where}: to is {shown(readers)}, expected a list of at least one stage number")
        if self.readers[0] <= self.maker:
            raise ChainError(
                f"{where}: to holds {self.readers[0]}, expected only stages after stage {self.maker}, which makes it"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the side value as in a chain file."""
        values = {
            "name": self.name,
            "bytes": self.num_bytes,
            "grad_bytes": self.grad_bytes,
            "from": self.maker,
            "to": list(self.readers),
        }
        more = {"stays": self.stays, "held_until": self.held_until}
        return values | {name: value for name, value in more.items() if value}


@dataclass(frozen=True, slots=True)
class Chain:
    """A network as a chain of stages 1..n, with what each one costs.

    Args:
        name: for people.
        stages: stage 1 first.
        input_bytes: a[0], the input of the chain.
        input_grad_bytes: its gradient, 0 if nothing needs it.
        base_bytes: always on the device, whatever the schedule does; the stages' own weights, weight gradients and
            optimizer state are not in it.
        grads_resident: the weight gradients exist from the start (gradient accumulation).
        side_values: what later stages read besides their input; s[1] first.
        provenance: where the figures come from (machine, versions, spread of the times); never interpreted.
    """

    name: str
    stages: tuple[Stage, ...]
    input_bytes: int = 0
    input_grad_bytes: int = 0
    base_bytes: int = 0
    grads_resident: bool = False
    side_values: tuple[SideValue, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "side_values", tuple(self.side_values))
        _check_fields(self, where=f"chain {self.name!r}")
        for k, stage in enumerate(self.stages, start=1):
            if not isinstance(stage, Stage):
                raise ChainError(f"chain {self.name!r}: stage {k} is {shown(stage)}, expected a Stage")
            if any(m >= k - 1 for m, _ in stage.outliving):
                raise ChainError(
                    f"stage {k} ({_on_one_line(stage.name)}): outliving names stage {max(stage.outliving)[0]}, "
                    f"expected only stages before stage {k - 1}, whose output is its input"
                )
        if not self.stages:
            raise ChainError(f"chain {self.name!r}: stages is empty; a chain has at least one stage")
        for i, side in enumerate(self.side_values, start=1):
            if not isinstance(side, SideValue):
                raise ChainError(f"chain {self.name!r}: side value {i} is {shown(side)}, expected a SideValue")
            for field_name, k in (("to", side.readers[-1]), ("held_until", side.held_until)):
                if k > len(self.stages):
                    raise ChainError(
                        f"side value {i} ({_on_one_line(side.name)}): {field_name} holds {shown(k)}, but the chain has "
                        f"{len(self.stages)} stages"
                    )

    def __str__(self) -> str:
        return f"{self.name}, {self.num_stages} stages, {format_seconds(self.compute_seconds)} a plain step"

    @property
    def num_stages(self) -> int:
        """n, the number of stages."""
        return len(self.stages)

    def stage(self, k: int) -> Stage:
        """Stage k, counted from 1."""
        if not 1 <= k <= len(self.stages):
            raise IndexError(f"the chain has no stage {k}; its stages are 1 to {len(self.stages)}")
        return self.stages[k - 1]

    def activation_bytes(self, k: int) -> int:
        """a[k]; a[0] is the input of the chain."""
        return self.stages[k - 1].output_bytes if k else self.input_bytes

    def gradient_bytes(self, k: int) -> int:
        """delta[k]; delta[0] is the gradient of the input."""
        return self.stages[k - 1].grad_bytes if k else self.input_grad_bytes

    @property
    def has_other_values(self) -> bool:
        """Whether more is on the device than weights, outputs, what stages save, and gradients: side values, or what
        the code around the stages holds. How long these live depends on the whole schedule.
        """
        return bool(self.side_values) or any(stage.outliving for stage in self.stages)

    def side_value(self, i: int) -> SideValue:
        """Side value i, counted from 1."""
        if not 1 <= i <= len(self.side_values):
            raise IndexError(f"the chain has no side value {i}; its side values are 1 to {len(self.side_values)}")
        return self.side_values[i - 1]

    @property
    def fixed_bytes(self) -> int:
        """What is stored throughout the step if weights stay on the device: base, weights, optimizer state, and
        resident weight gradients.
        """
        total = self.base_bytes + sum(stage.weight_bytes + stage.optimizer_bytes for stage in self.stages)
        return total + (sum(stage.weight_grad_bytes for stage in self.stages) if self.grads_resident else 0)

    @property
    def compute_seconds(self) -> float:
        """The time of plain training without optimizer steps: every forward and backward once, as variant 0."""
        return math.fsum(stage.forward_seconds + stage.backward_seconds for stage in self.stages)

    def with_times(self, forward: Callable[[float], float], backward: Callable[[float], float]) -> Chain:
        """Return the chain with other times, for every stage and variant.

        Args:
            forward: maps the seconds of a forward, first or recomputed, to new ones.
            backward: the same for a backward.
        """

        def changed(record: Any, **more: Any) -> Any:
            times = {
                "forward_seconds": forward(record.forward_seconds),
                "backward_seconds": backward(record.backward_seconds),
            }
            return dataclasses.replace(record, **times, **more)

        stages = (
            changed(stage, rerun_seconds=forward(stage.rerun_seconds), variants=tuple(map(changed, stage.variants)))
            for stage in self.stages
        )
        return dataclasses.replace(self, stages=tuple(stages))

    def to_dict(self) -> dict[str, Any]:
        """Return the chain as plain data, in the format `lowtide.chain/1`."""
        values: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "input_bytes": self.input_bytes,
            "input_grad_bytes": self.input_grad_bytes,
            "base_bytes": self.base_bytes,
            "grads_resident": self.grads_resident,
            "stages": [stage.to_dict() for stage in self.stages],
        }
        if self.side_values:
            values["side_values"] = [side.to_dict() for side in self.side_values]
        if self.provenance:
            values["provenance"] = dict(self.provenance)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Chain:
        """Read a chain from plain data; the inverse of `to_dict`.

        Raises:
            ChainError: in one line that names the stage, the field and what was expected.
        """
        if not isinstance(values, Mapping):
            is_path = isinstance(values, str | os.PathLike)
            hint = "Chain.load reads a file" if is_path else "lowtide.measure(model, sample) makes a chain of a model"
            raise ChainError(f"a chain is a JSON object, not {shown(values)}; {hint}")
        found = values.get("format")
        if found != FORMAT:
            raise ChainError(f"format is {shown(found)}, expected {FORMAT!r}; write one with lowtide measure")
        given = {key: value for key, value in values.items() if key != "format"}
        stages = given.pop("stages", None)
        if not isinstance(stages, list | tuple) or not stages:
            raise ChainError(f"stages is {shown(stages)}, expected a list of at least one stage")
        _check_keys(cls, {**given, "stages": stages}, where="chain")
        sides = given.pop("side_values", ())
        if not isinstance(sides, list | tuple):
            raise ChainError(f"side_values is {shown(sides)}, expected a list")
        if not isinstance(given.get("provenance", {}), Mapping):
            raise ChainError(f"provenance is {shown(given['provenance'])}, expected an object")
        return cls(
            stages=tuple(_stage_from_dict(entry, k) for k, entry in enumerate(stages, start=1)),
            side_values=tuple(_side_from_dict(entry, i) for i, entry in enumerate(sides, start=1)),
            **given,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Chain:
        """Read a chain file; an error is one line that starts with the file's name."""
        values = read_json(path, ChainError, check=cls.from_dict)
        try:
            return cls.from_dict(values)
        except ChainError as error:
            raise ChainError(f"{os.fspath(path)}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a chain file, atomically."""
        write_json(path, self.to_dict())


def _stage_from_dict(values: Any, k: int) -> Stage:
    where = f"stage {k}"
    if not isinstance(values, Mapping):
        raise ChainError(f"{where}: is {shown(values)}, expected an object")
    if isinstance(values.get("name"), str):
        where = f"stage {k} ({_on_one_line(values['name'])})"
    _check_keys(Stage, values, where=where)
    variants = values.get("variants", ())
    if not isinstance(variants, list | tuple):
        raise ChainError(f"{where}: variants is {shown(variants)}, expected a list")
    made = []
    for v, entry in enumerate(variants, start=1):
        if not isinstance(entry, Mapping):
            raise ChainError(f"{where}, variant {v}: is {shown(entry)}, expected an object")
        _check_keys(Variant, entry, where=f"{where}, variant {v}")
        made.append(_made(Variant, entry, where=f"{where}, variant {v}"))
    for key in ("grad_bytes", "weight_grad_bytes", "rerun_seconds", "saving_extra_bytes"):
        if key in values and values[key] is None:
            raise ChainError(f"{where}: {key} is null, expected {_expected(key)} (leave the field out for its default)")
    stage: Stage = _made(Stage, {**values, "variants": tuple(made)}, where=where)
    return stage


# A side value's fields in a file, and in Python.
_SIDE_FIELDS = {
    "name": "name",
    "bytes": "num_bytes",
    "from": "maker",
    "to": "readers",
    "grad_bytes": "grad_bytes",
    "stays": "stays",
    "held_until": "held_until",
}


def _side_from_dict(values: Any, i: int) -> SideValue:
    where = f"side value {i}"
    if not isinstance(values, Mapping):
        raise ChainError(f"{where}: is {shown(values)}, expected an object")
    if isinstance(values.get("name"), str):
        where = f"{where} ({_on_one_line(values['name'])})"
    for key in values:
        if key not in _SIDE_FIELDS:
            raise ChainError(f"{where}: {key!r} is not a field here; the fields are {', '.join(_SIDE_FIELDS)}")
    for key in _SIDE_FIELDS:
        if key not in values and key not in ("grad_bytes", "stays", "held_until"):
            raise ChainError(f"{where}: {key} is missing")
    if "grad_bytes" in values and values["grad_bytes"] is None:
        raise ChainError(
            f"{where}: grad_bytes is null, expected {_expected('_bytes')} (leave the field out for its default)"
        )
    try:
        return SideValue(**{_SIDE_FIELDS[key]: value for key, value in values.items()})
    except ChainError as error:
        own = f"side value {values['name']!r}"
        raise ChainError(f"{where}{str(error).removeprefix(own)}") from None


def _on_one_line(name: str) -> str:
    return repr(name)[1:-1]


def _are_stages(numbers: Any) -> bool:
    return all(isinstance(number, int) and not isinstance(number, bool) and number >= 1 for number in numbers)


def _are_outliving(pairs: Any) -> bool:
    return isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and _are_stages(pair[:1]) and _is_size(pair[1])
        for pair in pairs
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_BYTES


def _made(cls: type, values: Mapping[str, Any], *, where: str) -> Any:
    """Make an instance of `cls`; its errors name the place in the file instead of the record."""
    try:
        return cls(**values)
    except ChainError as error:
        own = f"{cls.__name__.lower()} {values['name']!r}"
        raise ChainError(f"{where}{str(error).removeprefix(own)}") from None


def _check_keys(cls: type, values: Mapping[str, Any], *, where: str) -> None:
    known = {entry.name: entry for entry in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise ChainError(f"{where}: {key!r} is not a field here; the fields are {', '.join(known)}")
    for name, entry in known.items():
        has_default = entry.default is not dataclasses.MISSING or entry.default_factory is not dataclasses.MISSING
        if name not in values and not has_default:
            raise ChainError(f"{where}: {name} is missing, expected {_expected(name)}")


def _check_fields(record: Any, *, where: str) -> None:
    """Check each field of a record by what its name says it holds."""
    for entry in dataclasses.fields(record):
        name, value = entry.name, getattr(record, entry.name)
        if name.endswith("_bytes"):
            right = _is_size(value)
        elif name.endswith("_seconds"):
            right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST_SECONDS
        elif name == "name":
            right = isinstance(value, str)
        elif name in _FLAGS:
            right = isinstance(value, bool)
        else:
            continue
        if not right:
            raise ChainError(f"{where}: {name} is {shown(value)}, expected {_expected(name)}")


_FLAGS = ("grads_resident",)


def _expected(name: str) -> str:
    if name.endswith("_bytes"):
        return f"whole bytes from 0 to {LARGEST_BYTES}"
    if name.endswith("_seconds"):
        return f"seconds, a number from 0 to {LARGEST_SECONDS:.0e}"
    return {"name": "a string", **dict.fromkeys(_FLAGS, "true or false")}.get(name, "a list")


def as_chain(chain: Chain | Mapping[str, Any]) -> Chain:
    """Return a `Chain` unchanged, or read one from plain data."""
    if isinstance(chain, Chain):
        return chain
    return Chain.from_dict(chain)
