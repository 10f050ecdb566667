"""Records one forward of a model stage by stage, and recomputes each stage from its input.

    with Recording(model, split) as recording:
        output = model(x)
    stage = recording.stage(2)
    outputs = stage.run(inputs)          # the tensors of stage 1 that stage 2 reads, as in stage.inputs

The model runs as it always does and is as before afterwards.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from lowtide.runtime.compile.loss import Functions, functions_of
from lowtide.runtime.compile.regions import Grouping, RegionLayer, regions_of
from lowtide.runtime.model.containers import tensors_of
from lowtide.runtime.model.interception import Interception
from lowtide.runtime.model.split import Split
from lowtide.runtime.replay.staged import StagedForward, StageLayout
from lowtide.runtime.replay.tape import Ledger, Origin, Tape
from lowtide.runtime.state.environment import is_buffer_of
from lowtide.runtime.state.rng import Generators, GeneratorWatch


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of a tensor that is not kept."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """The form of a tensor."""
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return cls(tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad)


class RecordedStage:
    """One stage of a recorded forward."""

    def __init__(self, tape: Tape, inputs: dict[int, Form], outputs: dict[int, Form]) -> None:
        self._tape = tape
        self.input_numbers = list(inputs)
        """For each input its number among the previous stage's tensors (among the caller's, for stage 1)."""
        self.inputs = list(inputs.values())
        """The forms of the previous stage's tensors that this stage reads (of the caller's, for stage 1)."""
        self.outputs = list(outputs.values())
        """The forms of this stage's tensors that the next stage reads; for the last stage, of the model's result."""
        self.output_numbers = list(outputs)
        """The numbers of the same among this stage's tensors, and then of those that only others read."""
        self.held_numbers: set[int] = set()
        """The numbers of this stage's tensors that later stages than the next one, or the caller, read."""

    @property
    def name(self) -> str:
        """The stage's name."""
        return self._tape.name

    @property
    def refusal(self) -> str | None:
        """Why the stage cannot be recomputed; None if it can."""
        return self._tape.refusal

    @property
    def held(self) -> list[torch.Tensor]:
        """The tensors that it reads and that are neither its own nor the previous stage's; parameters included."""
        return [held.tensor for held in self._tape.held]

    @property
    def held_origins(self) -> list[tuple[int, int] | None]:
        """For each of `held` the stage that made it and its number there; stage 0 is the caller."""
        return [held.origin for held in self._tape.held]

    def may_end_in(self, frame: FrameType) -> bool:
        """Whether a run of it can be ended in a frame without leaving anything undone."""
        return self._tape.may_end_in(frame)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Recompute the stage: `inputs` as in `self.inputs`, the result as in `self.outputs`.

        Random numbers and buffers are not looked after here: the caller does, where it matters.
        """
        return self.run_all(inputs)[: len(self.outputs)]

    def run_all(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same, with the result as in `self.output_numbers`."""
        return self._tape.run(dict(zip(self.input_numbers, inputs, strict=True)))


class Recording:
    """Records the next call of a model; a context manager.

    Args:
        model: the model.
        split: its stages.
        stages: the stages to record, from 1; None: all.
        on_stage: called with k when stage k begins, and with n + 1 at the end.
        on_first_call: called before the first call of each stage; by then the call with which the stage before it has
            ended has returned, and holds its arguments no more.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        *,
        stages: Sequence[int] | None = None,
        on_stage: Callable[[int], None] | None = None,
        on_first_call: Callable[[], None] | None = None,
    ) -> None:
        self._layout = StageLayout.of(split)
        self._stages = frozenset(range(1, split.num_stages + 1) if stages is None else stages)
        self._on_stage = on_stage
        self._on_first_call = on_first_call
        self._model = model
        self._regions = regions_of(model)
        if self._regions is not None:
            self._layout = self._layout.without_units()
        self._interception = Interception(model, self._layout.units, self._call)
        self._forward: _RecordedForward | None = None
        self.ledger: Ledger | None = None
        """Who made which tensor, from the beginning of the forward on."""

    def __enter__(self) -> Recording:
        self._interception.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._interception.remove()

    def stage(self, k: int) -> RecordedStage:
        """Stage k, counted from 1."""
        if self._forward is None:
            raise RuntimeError("nothing was recorded: call the model inside the with block")
        return self._forward.recorded[k]

    def origin(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The stage that made a tensor of the model's result, and its number there; stage 0 is the caller."""
        return None if self._forward is None else self._forward.ledger.find(tensor)

    def _call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        current = self._interception.current
        if current.session is not None:
            return plain(*args, **kwargs)
        forward = _RecordedForward(
            self._model,
            self._layout,
            self._stages,
            self._is_state,
            Generators.of(self._model),
            self._on_stage,
            self._on_first_call,
            functions_of(self._model),
            self._regions,
        )
        current.session, self.ledger = forward, forward.ledger
        try:
            result = forward.run(self._interception.whole_or(plain), args, kwargs)
        finally:
            current.session = None
        if self._on_stage is not None:
            self._on_stage(self._layout.num_stages + 1)
        self._forward = forward
        return result

    def _is_state(self, tensor: torch.Tensor) -> bool:
        return is_buffer_of(self._model, tensor)


def _getter_of(model: nn.Module, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """What reads a tensor from the attribute of a module that holds it, in lists and dicts too; None: there is none."""
    for module in model.modules():
        for name, value in vars(module).items():
            path = _path_to(value, tensor)
            if path is not None:
                return partial(_at, module, name, path)
    return None


def _path_to(value: Any, tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The keys that lead from a value to a tensor in it."""
    if value is tensor:
        return ()
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return None
    for key, item in items:
        if (rest := _path_to(item, tensor)) is not None:
            return key, *rest
    return None


def _at(module: nn.Module, name: str, path: tuple[Any, ...]) -> torch.Tensor:
    value = getattr(module, name)
    for key in path:
        value = value[key]
    found: torch.Tensor = value
    return found


class _RecordedForward(StagedForward):
    """Notes the forms of what crosses from stage to stage."""

    def __init__(
        self,
        model: nn.Module,
        layout: StageLayout,
        taped: frozenset[int],
        is_state: Callable[[torch.Tensor], bool],
        generators: Generators,
        on_stage: Callable[[int], None] | None,
        on_first_call: Callable[[], None] | None,
        functions: Functions,
        regions: RegionLayer | None,
    ) -> None:
        followed = None if regions is None else (regions, Grouping.finest(layout.num_stages))
        super().__init__(layout, taped, is_state, functions=functions, regions=followed)
        self._model = model
        self._starts: list[int] = []  # the sequence number of the first node of autograd's graph in each stage
        self.ledger.look_up = self._origin_in_attribute
        self._generators = generators
        self.recorded: dict[int, RecordedStage] = {}
        self._forms: dict[int, dict[int, Form]] = {}
        self._on_stage = on_stage
        self._on_first_call = on_first_call
        self._is_called = False

    def run(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().run(plain, args, kwargs)
        self._find_held(result)
        for tape in self.tapes.values():
            tape.close()
        return result

    def watch_of(self, k: int) -> GeneratorWatch:
        return GeneratorWatch(self._generators, reads_all=True)

    def _find_held(self, result: Any) -> None:
        """Find what others than the next stage read."""
        returned = [self.ledger.find(tensor) for tensor in tensors_of(result)]
        read = [held.origin for tape in self.tapes.values() for held in tape.held]
        for origin in (*returned, *read):
            if origin is not None and origin[0] in self.recorded and origin[0] != self.layout.num_stages:
                self.recorded[origin[0]].held_numbers.add(origin[1])
        for k, stage in self.recorded.items():
            if stage.held_numbers:
                stage.output_numbers = list(dict.fromkeys([*stage.output_numbers, *sorted(stage.held_numbers)]))
                self.tapes[k].finish(stage.output_numbers)

    def begin_stage(self, k: int) -> None:
        if k == 1:
            self._forms[0] = {number: Form.of(tensor) for number, tensor in self.ledger.alive(0).items()}
        self._starts.append(torch._C._autograd._get_sequence_nr())
        super().begin_stage(k)
        self._is_called = False
        if self._on_stage is not None:
            self._on_stage(k)

    def invoke(
        self,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        if not self._is_called:
            self._is_called = True
            if self._on_first_call is not None:
                self._on_first_call()
            self.watch_cells(self._model, begins_with_unit=module is not None)
        return super().invoke(name, call, args, kwargs, module)

    def _origin_in_attribute(self, tensor: torch.Tensor) -> Origin | None:
        """The origin of a tensor that an earlier stage has left in an attribute of a module, with a number below 0."""
        node = tensor.grad_fn
        stage = 0 if node is None else bisect.bisect_right(self._starts, node._sequence_nr())
        if not 0 < stage < self.stage or stage not in self.tapes:
            return None
        getter = _getter_of(self._model, tensor)
        if getter is None:
            return None
        number = -1 - len(self.tapes[stage].left)
        self.tapes[stage].left[number] = getter
        self.ledger.note(tensor, (stage, number))
        self._forms[stage][number] = Form.of(tensor)
        return stage, number

    def end_stage(self, k: int, outputs: dict[int, torch.Tensor]) -> None:
        forms = self._forms[k] = {number: Form.of(tensor) for number, tensor in outputs.items()}
        super().end_stage(k, outputs)
        if self.tape is not None:
            inputs = {number: self._forms[k - 1][number] for number in self.tape.inputs}
            self.recorded[k] = RecordedStage(self.tape, inputs, forms)
            if k - 1 in self.recorded:
                self.recorded[k - 1].output_numbers = list(inputs)
                self.recorded[k - 1].outputs = list(inputs.values())
