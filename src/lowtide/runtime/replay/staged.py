"""One forward of a model, followed stage by stage while the model's own code runs.

Units are met at their call sites. The code between them is followed by a mode that sees each function of torch; it is
taken away while a unit runs, so that units run at full speed and compiled ones are not disturbed. A model that runs in
compiled regions has no code between them: each region is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lowtide.errors import ExecutionError
from lowtide.runtime.compile.cutting import FoundLateError, NoRegionsError
from lowtide.runtime.compile.loss import CONVERSIONS, Functions
from lowtide.runtime.compile.regions import Grouping, RegionLayer, not_one_graph, regions_handed_to
from lowtide.runtime.model.containers import tensors_of
from lowtide.runtime.model.functions import functions_handed_to
from lowtide.runtime.model.interception import UnitLayer
from lowtide.runtime.model.split import Split
from lowtide.runtime.replay.tape import Ledger, Tape
from lowtide.runtime.state.cells import CellWatch
from lowtide.runtime.state.preserve import preserved
from lowtide.runtime.state.rng import GeneratorWatch


@dataclass(frozen=True, slots=True)
class StageLayout:
    """A split as the running forward needs it: for each unit, by its position among all, where it stands.

    Args:
        names: the stages' names.
        units: (path, occurrence) of each unit.
        stage_at: the stage of each unit.
        ends_stage: whether the stage ends when that unit returns; where its glue trails, it ends when the next unit is
            called instead.
    """

    names: tuple[str, ...]
    units: tuple[tuple[str, int], ...]
    stage_at: tuple[int, ...]
    ends_stage: tuple[bool, ...]

    @classmethod
    def of(cls, split: Split) -> StageLayout:
        """Read a split."""
        names, units, stage_at, ends_stage = [], [], [], []
        for k, stage in enumerate(split.stages, start=1):
            names.append(stage.name)
            for unit in stage.units:
                units.append((unit.path, unit.occurrence))
                stage_at.append(k)
                is_last = unit == stage.units[-1] and k < split.num_stages
                ends_stage.append(is_last and not stage.trailing_glue)
        return cls(tuple(names), tuple(units), tuple(stage_at), tuple(ends_stage))

    def without_units_of(self, stages: Collection[int]) -> StageLayout:
        """The same, met at fewer places: of these stages only their first and last units are called through a site.

        After another stage all units stay, since the model may leave out the first of them: whichever is called first
        ends that stage. A unit that contains another one stays: calls of the inner one inside of it must not be
        counted.
        """
        paths = {path for path, _ in self.units}
        kept = []
        for position, ((path, _), k) in enumerate(zip(self.units, self.stage_at, strict=True)):
            is_first = position == 0 or self.stage_at[position - 1] != k
            may_begin = is_first or (k > 1 and k - 1 not in stages)
            contains = any(other.startswith(f"{path}." if path else "") and other != path for other in paths)
            if k not in stages or may_begin or self.ends_stage[position] or contains:
                kept.append(position)
        return StageLayout(
            self.names,
            tuple(self.units[position] for position in kept),
            tuple(self.stage_at[position] for position in kept),
            tuple(self.ends_stage[position] for position in kept),
        )

    def without_units(self) -> StageLayout:
        """The same for a model that runs in regions."""
        return StageLayout(self.names, (), (), ())

    def paths_of(self, k: int) -> list[str]:
        """The units of stage k in the order of their calls."""
        return [path for (path, _), stage in zip(self.units, self.stage_at, strict=True) if stage == k]

    @property
    def num_stages(self) -> int:
        """n, the number of stages."""
        return len(self.names)


class StagedForward:
    """Follows one call of a model; a session of `lowtide.runtime.model.interception`.

    Args:
        layout: where stages begin and end.
        taped: the stages to record.
        is_state: whether a tensor is a buffer of the model.
        watched: further stages whose tensors are to be known by number; those before a recorded one are anyway.
        functions: what to call between units instead of torch functions, in stages that are recorded or
            watched.
        regions: what runs the model in compiled regions instead of units, and how its stages are grouped here; None:
            it runs in units.
    """

    may_skip = False
    """Whether the model may leave units out. What it does is recorded anew in each call, so that a stage may have less
    to do than others of its calls, or nothing at all; what comes after it then reads what was made before it."""

    def __init__(
        self,
        layout: StageLayout,
        taped: Collection[int],
        is_state: Callable[[torch.Tensor], bool],
        *,
        watched: Collection[int] = (),
        functions: Functions = MappingProxyType({}),
        regions: tuple[RegionLayer, Grouping] | None = None,
    ) -> None:
        self.layout = layout
        self._regions = regions
        self.taped = taped
        self.is_state = is_state
        self.functions = functions
        self.ledger = Ledger()
        self.tapes: dict[int, Tape] = {}
        self.stage = 0
        self.tape: Tape | None = None
        self.tracking = False
        self._watched = {*watched, *taped, *(k - 1 for k in taped)}
        self._mode = GlueMode(self) if self._watched and regions is None else None
        self._depth: int | None = None  # how many modes were below ours when it was taken away; None: it is in place
        self._next = 0
        self._counts: dict[str, int] = {}
        self._inside_unit = False

    # What users of this class refine

    def begin_stage(self, k: int) -> None:
        """Stage k is about to run."""
        self.stage = k
        self.tracking = k in self._watched
        self.tape = None
        if k in self.taped:
            name = self.layout.names[k - 1]
            self.tape = self.tapes[k] = Tape(k, name, self.ledger, self.is_state, self.watch_of(k))

    def watch_of(self, k: int) -> GeneratorWatch | None:
        """What notices generators that are set between the calls of stage k, which is about to run; None: nothing."""
        return None

    def watch_cells(self, model: torch.nn.Module, *, begins_with_unit: bool) -> None:
        """From the first call of the current stage on, put what is set in cells of its units on its tape."""
        paths = self.layout.paths_of(self.stage)
        if self.tape is not None and not (begins_with_unit and len(paths) == 1):  # else no code comes before its call
            self.tape.cell_watch = CellWatch((path, model.get_submodule(path)) for path in dict.fromkeys(paths))

    def end_stage(self, k: int, outputs: dict[int, torch.Tensor]) -> None:
        """Stage k has run; `outputs` are its tensors, by number, that somebody still holds (that the model returned,
        for the last stage).
        """
        if self.tape is not None:
            self.tape.end()
            self.tape.finish(outputs)
            if k - 1 in self.tapes:
                self.tapes[k - 1].finish(self.tape.inputs)  # by now it is known which of them matter
            for stage, number in self.tape.sides:
                if stage in self.tapes:
                    self.tapes[stage].finish(dict.fromkeys((*self.tapes[stage].outputs, number)))

    def invoke(
        self,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: torch.nn.Module | None = None,
    ) -> Any:
        """Run one call of the current stage, a unit's or a function's between units."""
        if self.tape is not None:
            return self.tape.record(name, call, args, kwargs, module)
        result = call(*args, **kwargs)
        if self.tracking:
            for tensor in tensors_of(result):
                self.ledger.add(tensor, self.stage)
        return result

    # The run

    def run(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model and follow it."""
        for tensor in tensors_of((args, kwargs)):
            self.ledger.add(tensor, 0)
        self.begin_stage(1)
        result = self._followed(plain, args, kwargs)
        if self._next != len(self.layout.units) and not self.may_skip and self._regions is None:
            path, occurrence = self.layout.units[self._next]
            raise ExecutionError(
                f"the model's forward ended before it called {path!r} (call {occurrence}) of stage "
                f"{self.layout.names[self.layout.stage_at[self._next] - 1]!r}: it took a different code path than "
                f"during capture; {_ADVICE}"
            )
        while self.stage < self.layout.num_stages:
            self._cross()
        returned = {
            found[1]: t for t in tensors_of(result) if (found := self.ledger.find(t)) and found[0] == self.stage
        }
        self.end_stage(self.stage, returned)
        return result

    def _followed(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, and be told of what it calls."""
        if self._regions is not None:
            return self._followed_in_regions(*self._regions, args, kwargs)
        if self._mode is None:
            return plain(*args, **kwargs)
        try:
            with self._mode, functions_handed_to(self._call_function):
                try:
                    return plain(*args, **kwargs)
                finally:
                    self._resume_mode()
        finally:
            self._mode.forward = None

    def _followed_in_regions(
        self, layer: RegionLayer, grouping: Grouping, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            with regions_handed_to(self._call_region, layer.module, grouping):
                result = layer(*args, **kwargs)
        except NoRegionsError:
            raise
        except not_one_graph():  # before anything ran
            with preserved(layer.module), torch.no_grad():
                layer.module._call_impl(*args, **kwargs)  # what fails without a compiler fails with its own error
            raise
        if self._next == 0:
            raise FoundLateError("compiling is switched off (torch.compiler.set_stance, TORCHDYNAMO_DISABLE)")
        return result

    def _call_region(self, k: int, call: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Any:
        """One compiled region, all or a part of stage k."""
        self._next += 1
        while self.stage < k:
            self._cross()
        return self.invoke(self.layout.names[k - 1], call, args, {})

    def call_unit(self, layer: UnitLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a submodule that has units."""
        if self._regions is not None:  # of the model's own code, to see how that fails
            return layer.plain(*args, **kwargs)
        occurrence = self._counts.get(layer.path, 0)
        self._counts[layer.path] = occurrence + 1  # calls inside of units count, too: a split counts all of them
        position = None if self._inside_unit else layer.positions.get(occurrence)
        if position is None:
            return layer.plain(*args, **kwargs)
        if position != self._next and (position < self._next or not self.may_skip):
            raise self._out_of_order(layer, occurrence)
        self._next = position + 1
        self._inside_unit = True
        self._suspend_mode()  # for what is done between stages, too
        try:
            while self.layout.stage_at[position] != self.stage:
                self._cross()
            result = self.invoke(layer.path, layer.plain, args, kwargs, layer.module)
            if self.layout.ends_stage[position]:
                self._cross()
        finally:
            self._inside_unit = False
            if self.tracking:
                self._resume_mode()
        return result

    def _call_function(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One custom autograd function; between units it is one call of the stage."""
        if torch._C._are_functorch_transforms_active():
            return self.pass_by(call, args, kwargs)
        between = self.tracking and any(mode is self._mode for mode in _get_current_function_mode_stack())
        if not between:  # inside a unit, or inside a function of torch that is followed as a whole
            return call(*args, **kwargs)
        self._suspend_mode()
        try:
            return self.invoke(name, call, args, kwargs)
        finally:
            self._resume_mode()

    def pass_by(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call inside a transform of torch.func, of which the tape is shown tensors that are none by themselves.

        What comes out of the transform is held as it is, which is right where no gradient flows through it (masks).
        """
        result = call(*args, **kwargs)
        if self.tape is not None and any(is_differentiable(tensor) for tensor in tensors_of(result)):
            self.tape.refuse_transform()
        return result

    def _out_of_order(self, layer: UnitLayer, occurrence: int) -> ExecutionError:
        expected = "nothing more"
        if self._next < len(self.layout.units):
            expected = "{!r} (call {})".format(*self.layout.units[self._next])
        return ExecutionError(
            f"the model called {layer.path!r} (call {occurrence}) where {expected} was expected: its forward took a "
            f"different code path than during capture; {_ADVICE}"
        )

    def _cross(self) -> None:
        self.end_stage(self.stage, self.ledger.alive(self.stage))
        self.begin_stage(self.stage + 1)

    # The mode

    def _suspend_mode(self) -> None:
        """Take the mode off the stack, wherever it is: the user's code may have put modes above it."""
        if self._mode is None or self._depth is not None:
            return
        above = []
        while (top := _pop_torch_function_stack()) is not self._mode:
            above.append(top)
        self._depth = _len_torch_function_stack()
        while above:
            _push_on_torch_function_stack(above.pop())

    def _resume_mode(self) -> None:
        """Put it back in its place, below whatever the user's code has put on the stack since."""
        if self._mode is None or self._depth is None:
            return
        above = []
        while _len_torch_function_stack() > self._depth:
            above.append(_pop_torch_function_stack())
        self._depth = None
        _push_on_torch_function_stack(self._mode)
        while above:
            _push_on_torch_function_stack(above.pop())


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether gradients flow through a tensor, or through what a transform of torch.func has wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


_ADVICE = "call fit again, or merge the stages whose order varies"


class GlueMode(TorchFunctionMode):
    """Hands each function of torch that is called between units to the forward."""

    def __init__(self, forward: StagedForward) -> None:
        super().__init__()
        self.forward: StagedForward | None = forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        forward = self.forward
        if forward is None or not forward.tracking:
            return func(*args, **(kwargs or {}))
        if torch._C._are_functorch_transforms_active():
            return forward.pass_by(func, args, kwargs or {})
        if func is torch.Tensor.__iter__ and args[0].dim() > 0:
            # The iterator hides its tensors; these are the ones that it would give.
            return iter(forward.invoke("unbind", torch.Tensor.unbind, (args[0], 0), {}))
        name, call = getattr(func, "__name__", str(func)), func
        if forward.functions and func in forward.functions:
            call, args = forward.functions[func].instead(args)  # so that a recording has what is read
        result = forward.invoke(name, call, args, kwargs or {})
        if forward.functions and func in CONVERSIONS:
            for each in forward.functions.values():
                each.note_conversion(args[0], result)
        return result
