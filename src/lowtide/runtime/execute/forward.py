"""The model's own forward under a schedule: its stages' first runs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _pop_saved_tensors_default_hooks, _push_saved_tensors_default_hooks

from lowtide.errors import ExecutionError
from lowtide.runtime.compile.regions import Grouping
from lowtide.runtime.execute.checks import Checks, Fingerprints, noting
from lowtide.runtime.execute.executor import RunningStep
from lowtide.runtime.execute.machine import Machine
from lowtide.runtime.execute.program import Mode
from lowtide.runtime.execute.saved import Pack, Sink, Unpack
from lowtide.runtime.execute.values import Activation, Sorter
from lowtide.runtime.model.containers import tensors_of
from lowtide.runtime.replay.endings import saves_last_before_a_product
from lowtide.runtime.replay.staged import StagedForward
from lowtide.runtime.state.environment import Environment, Mark
from lowtide.runtime.state.rng import GeneratorWatch, State
from lowtide.runtime.state.surroundings import refuse_saved_tensor_hooks, refuse_weight_cache
from lowtide.runtime.state.writes import Writes


class ExecutedForward(StagedForward):
    """The model's own forward under a schedule."""

    may_skip = True

    def __init__(self, machine: Machine, step: RunningStep) -> None:
        program = machine.program
        watched = range(1, program.num_stages + 1) if machine.functions else program.watched
        layer = machine.regions
        regions = None if layer is None else (layer, Grouping(program.sizes, joins=layer.joins))
        super().__init__(
            machine.layout,
            program.taped,
            machine.is_state,
            watched=watched,
            functions=machine.functions,
            regions=regions,
        )
        self.machine = machine
        self.step = step
        self._hooks: tuple[Pack, Unpack] | None = None
        self._sorter: Sorter | None = None
        self._before: State | None = None
        self._is_called = False  # whether the current stage has made a call
        self._mark: Mark | None = None
        self._writes: Writes | None = None  # where it is to be seen what a stage changes
        self._random: State | None = None  # as the last stage left it: one stage's end is the next one's beginning

    def run(self, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model under the schedule."""
        if self.machine.program.taped or self.machine.weights is not None:
            refuse_saved_tensor_hooks()
            refuse_weight_cache(self.machine.model)
        self.step.begin_forward()
        try:
            with self.step.moved_sides.guard() if self.machine.program.moved_sides else nullcontext():
                result = super().run(plain, args, kwargs)
        except BaseException:
            self.step.release()
            if self._sorter is not None:
                self._sorter.clear()
            raise
        finally:
            self.step.variants.end()
            for tape in self.tapes.values():
                tape.close()
        reach = partial(self.step.reach, self.stage)
        for tensor in tensors_of(result):
            if tensor.grad_fn is not None:
                self.step.runs[self.stage].requires_grad = True
                tensor.grad_fn.register_prehook(reach)
        self.step.end_forward()
        return result

    def begin_stage(self, k: int) -> None:
        """Get ready for the first run of stage k."""
        step, machine = self.step, self.machine
        if k == 1 and step.program.keeps_outputs(0):
            inputs = Activation("the model's input", self.ledger.alive(0), movable=("a", 0) in step.program.moved)
            step.values[("a", 0)] = inputs
        step.before_first(k)
        step.variants.begin(k)
        super().begin_stage(k)
        run, mode = step.runs[k], step.program.modes[step.program.first[k]]
        run.tape = self.tape
        step.watch_reads(k)
        self._sorter = Sorter(machine.tier.smallest_bytes) if mode is Mode.SORT else None
        self._hooks = None
        if mode is Mode.GUARD:
            self._hooks = run.placeholders.kept_run(step)
            self._begin_call = run.placeholders.begin_call
        elif mode is not Mode.NATIVE:
            sink: Sink | None = None if self._sorter is None else self._sorter.add
            if machine.checks is Checks.ALL and k in step.program.repeats:
                run.fingerprints = Fingerprints()
                sink = noting(sink, run.fingerprints.add)
            pack, unpack = run.placeholders.first_run(step, sink)
            if k in machine.spot_checks.turn:
                run.spot_check = machine.spot_checks.begin(k, machine.stage_name(k), machine.buffer_storages_of(k))
                pack = run.spot_check.first(pack)
            self._hooks = pack, unpack
            self._begin_call = run.placeholders.begin_call
        self._before = None
        if k in step.program.repeats:
            run.note_parameters(machine.parameters_of(k))
            self._before = self._random or machine.generators.state()
        self._mark, self._writes, self._is_called = None, None, False
        if not self.tracking:  # nobody tells what its code between units does
            self._begin_calls(begins_with_unit=False)

    def _begin_calls(self, *, begins_with_unit: bool) -> None:
        """The current stage is about to make its first call: what its code has set before that is found again."""
        self._is_called = True
        environment = self.machine.environment_of(self.stage)
        if environment is not None:
            can_be_watched = self.machine.can_be_watched(self.stage)
            self._mark = environment.mark(others=self.step.read, can_be_watched=can_be_watched)
            if self._mark.observes and can_be_watched:
                self._writes = Writes(partial(environment.write_ahead, self._mark))
            if self.tape is not None:
                self.tape.on_held = partial(self._note_held, environment, self._mark)
            if self._mark.observes or self.stage in self.machine.setting_cells:
                self.watch_cells(self.machine.model, begins_with_unit=begins_with_unit)

    def _note_held(self, environment: Environment, mark: Mark, tensor: torch.Tensor) -> None:
        """The code between units is about to use a tensor that no stage has made."""
        name = self.machine.buffer_name(tensor)
        if name is not None and environment.use(mark, name, tensor):
            self.step.read.append((name, tensor))

    def watch_of(self, k: int) -> GeneratorWatch | None:
        """Where generators are set between calls, in a stage that may be recomputed."""
        return self.machine.watch_of(k)

    def end_stage(self, k: int, outputs: dict[int, torch.Tensor]) -> None:
        """Hand over what the first run of stage k left."""
        if not self._is_called:
            self._begin_calls(begins_with_unit=False)
        super().end_stage(k, outputs)
        run = self.step.runs[k]
        if self.tape is not None and self.tape.refusal is not None:
            raise ExecutionError(self.tape.refusal)
        self._random = None
        if self._before is not None:
            assert self.tape is not None
            self._random = run.random_after = self.machine.generators.state()
            run.random = self._before
            self.machine.note_generators(k, are_set=self.tape.sets_generators)
            if self.tape.sets_cells:
                self.machine.setting_cells.add(k)
            self.step.check_written(k)
        elif self.step.program.taped:  # else everything is stored, and autograd itself looks at what was changed
            run.note_parameters(self.machine.parameters_of(k))
        if self._mark is not None:
            self._end_environment(k, self._mark)
        for tensor in outputs.values() if k < self.layout.num_stages else ():
            node = tensor.grad_fn  # each look makes a new object
            if node is not None:
                run.requires_grad = True
                node.register_prehook(partial(self.step.reach, k))
        if k in self.machine.ending_early:
            run.saves_last_before_a_product = saves_last_before_a_product(outputs.values())
        self.step.after_first(k, outputs, self._sorter)
        self._sorter = None

    def _end_environment(self, k: int, mark: Mark) -> None:
        """Note what the first run of stage k changed besides its outputs."""
        step, run = self.step, self.step.runs[k]
        environment = self.machine.environment_of(k)
        assert environment is not None
        if self.tape is not None:
            run.mark, run.environment, run.is_watched = mark, environment, self._writes is not None
        ran = None
        if self.tape is not None and self.machine.regions is None:
            ran = {entry.name for entry in self.tape.calls if entry.module is not None}
        changed = environment.end(mark, k, step.history, self._writes, ran)
        if run.fingerprints is not None:
            run.fingerprints.finish({t.untyped_storage()._cdata for t in changed if t.layout is torch.strided})

    def invoke(
        self,
        name: str,
        call: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        """Run one call of the current stage under its hooks."""
        if not self._is_called:
            self._begin_calls(begins_with_unit=module is not None)
        if self._writes is not None:
            return self._observe(self._writes, name, call, args, kwargs, module)
        if self._hooks is None:
            return super().invoke(name, call, args, kwargs, module)
        self._begin_call(name)
        # What `saved_tensors_hooks` does, without two calls of Python for each call of the model.
        _push_saved_tensors_default_hooks(*self._hooks)
        try:
            return super().invoke(name, call, args, kwargs, module)
        finally:
            _pop_saved_tensors_default_hooks()

    def _observe(self, writes: Writes, *call: Any) -> Any:
        """Run one call of the current stage, and see what it changes."""
        self._writes = None
        try:
            with writes:
                result = self.invoke(*call)
        finally:
            self._writes = writes
        writes.note_results(tensors_of(result))
        return result
