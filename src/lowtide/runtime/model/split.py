"""How a model's forward is cut into stages: the contract between capture, measuring and the executor.

A *unit* is one call of one submodule during one forward of the model: `Unit("layer1.0.conv1", 0)` is the first call of
`model.get_submodule("layer1.0.conv1")`. Units never lie inside one another. A *stage* is a run of consecutive units in
the order in which they are called.

*Glue* is what the code of the modules around the units does between them: views, residual sums, `F.relu`, a loss inside
the model's own `forward`. Glue belongs to the stage of the unit that follows it, but

- glue before the first unit belongs to the first stage,
- glue after the last unit belongs to the last stage, and
- where a stage says `trailing_glue`, the glue between its last unit and the first unit of the next stage is its own.
  So a transformer block whose residual sums are glue can be cut between attention and MLP: the cut lies after the sum.

What crosses the boundary after stage k are the tensors that stages 1..k made and that a later stage, or the caller as
part of the model's output, reads. Parameters, buffers and tensors that the caller handed in do not count: they are
there anyway.

- a[k], the *activation*, is what stage k made and stage k+1 alone reads. As a rule that is one tensor through which
  gradients flow; it may be none (the encoder's output before a decoder), or a few that pass together.
- Every other tensor that crosses (made before stage k, or read by any other stage than k+1) is a *side value*: a skip
  connection, a mask, a rotary table, an encoder's output, the features of a dense block.

Which tensors these are follows from the run itself: watching it shows what is made and read where. Capture also
promises that no tensor is changed in place by a later stage than the one that made it, and that no unit writes into the
arguments that it is given (lists and dicts excepted: those are rebuilt whenever a stage is recomputed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

_Kind = TypeVar("_Kind")

# In messages a stage that stands for so many at most is called by the names of all.
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """One call of a submodule: the `occurrence`-th (from 0) of `model.get_submodule(path)` in one forward."""

    path: str
    occurrence: int = 0

    def __str__(self) -> str:
        return f"{self.path}#{self.occurrence}" if self.occurrence else self.path


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Consecutive units that make one stage.

    Args:
        name: for people; unique within the split.
        units: at least one, in the order of their calls.
        trailing_glue: whether the glue up to the next stage's first unit belongs to this stage.
        kind: stages with the same kind run the same code on the same shapes (24 equal transformer blocks): measuring
            one of them is measuring all. Empty: like no other.
        parameters: the names of the parameters that this stage is the first to read, all names of each; a tied
            parameter belongs to one stage.
    """

    name: str
    units: tuple[Unit, ...]
    trailing_glue: bool = False
    kind: str = ""
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.units:
            raise ValueError(f"stage {self.name!r} has no units")

    @classmethod
    def joined(cls, stages: Sequence[StageSplit]) -> StageSplit:
        """Consecutive stages as one, which is like no other."""
        if len(stages) == 1:
            return stages[0]
        names = [stage.name for stage in stages]
        return cls(
            name=" + ".join(names) if len(names) <= _MOST_NAMES else f"{names[0]} to {names[-1]}",
            units=tuple(unit for stage in stages for unit in stage.units),
            trailing_glue=stages[-1].trailing_glue,
            parameters=tuple(name for stage in stages for name in stage.parameters),
        )


@dataclass(frozen=True, slots=True)
class Split:
    """A model cut into stages.

    Args:
        stages: stage 1 first.
        call_keywords: keyword arguments of each call of the model while it runs in stages, whatever the caller gives
            (`use_cache=False`: a cache of keys and values would keep what should be freed).
        side_bytes: the memory that skips stages, each storage once.
        activation_bytes: all that the forward saves for backward, each storage once, without parameters and buffers.
        largest_stage_bytes: the most of these that one stage makes.
        notes: what people should know of this split, one sentence each.
    """

    stages: tuple[StageSplit, ...]
    call_keywords: Mapping[str, Any] = field(default_factory=dict)
    side_bytes: int = 0
    activation_bytes: int = 0
    largest_stage_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a split has at least one stage")
        if len({stage.name for stage in self.stages}) != len(self.stages):
            raise ValueError("two stages of a split have the same name")
        if len(set(self.units)) != len(self.units):
            raise ValueError("a unit belongs to two stages")

    @property
    def num_stages(self) -> int:
        """n, the number of stages."""
        return len(self.stages)

    def numbered(self) -> list[tuple[int, StageSplit]]:
        """The stages with their numbers, from 1."""
        return list(enumerate(self.stages, start=1))

    @property
    def num_kinds(self) -> int:
        """How many stages differ from all before them."""
        return len({stage.kind or stage.name for stage in self.stages})

    def with_at_most(self, num_stages: int) -> Split:
        """The same model in fewer stages: runs of about as many of them each, joined."""
        size = -(-self.num_stages // num_stages)
        runs = [self.stages[first : first + size] for first in range(0, self.num_stages, size)]
        return self if size == 1 else replace(self, stages=tuple(map(StageSplit.joined, runs)))

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units in the order of their calls."""
        return tuple(unit for stage in self.stages for unit in stage.units)

    @property
    def paths(self) -> tuple[str, ...]:
        """The submodules that are called as units, each once."""
        return tuple(dict.fromkeys(unit.path for unit in self.units))

    def stage_of(self) -> dict[Unit, int]:
        """The stage, counted from 1, of each unit."""
        return {unit: k for k, stage in enumerate(self.stages, start=1) for unit in stage.units}

    def to_dict(self) -> dict[str, Any]:
        """The split as plain data."""
        return {
            "stages": [
                {
                    "name": stage.name,
                    "units": [[unit.path, unit.occurrence] for unit in stage.units],
                    "trailing_glue": stage.trailing_glue,
                    "kind": stage.kind,
                    "parameters": list(stage.parameters),
                }
                for stage in self.stages
            ],
            "call_keywords": dict(self.call_keywords),
            "side_bytes": self.side_bytes,
            "activation_bytes": self.activation_bytes,
            "largest_stage_bytes": self.largest_stage_bytes,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Split:
        """The inverse of `to_dict`.

        Raises:
            KeyError: where an entry is missing.
            TypeError: where one is of another kind.
            ValueError: where stages or units are wrong.
        """
        stages = tuple(
            StageSplit(
                _of(str, entry["name"]),
                tuple(Unit(_of(str, path), _of(int, occurrence)) for path, occurrence in _of(list, entry["units"])),
                _of(bool, entry["trailing_glue"]),
                _of(str, entry["kind"]),
                tuple(_of(str, name) for name in _of(list, entry["parameters"])),
            )
            for entry in _of(list, values["stages"])
        )
        return cls(
            stages,
            {_of(str, name): value for name, value in _of(dict, values["call_keywords"]).items()},
            _of(int, values["side_bytes"]),
            _of(int, values["activation_bytes"]),
            _of(int, values["largest_stage_bytes"]),
            tuple(_of(str, note) for note in _of(list, values["notes"])),
        )


def _of(kind: type[_Kind], value: Any) -> _Kind:
    """Check the type of a value; a bool is not a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {kind.__name__}, not {type(value).__name__}")
    return value
