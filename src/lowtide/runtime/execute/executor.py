"""Runs a schedule inside autograd: one graph, made by the model's own forward; whatever the schedule asks for besides
(recomputations, copies) is done in the order of its list, when the forward or the backward pass gets there.

A `Step` belongs to one forward and its backward. It is kept alive by the graph alone: an output that is dropped without
a backward takes everything with it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from operator import attrgetter, ne
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import ExecutionError
from lowtide.runtime.execute.checks import Checks, Difference, Fingerprints, SpotCheck, marks, remove_marks
from lowtide.runtime.execute.machine import Machine
from lowtide.runtime.execute.program import Mode
from lowtide.runtime.execute.saved import Pack, Placeholders, discard, never_opened
from lowtide.runtime.execute.sides import MovedSides
from lowtide.runtime.execute.storages import Storages, addresses_of
from lowtide.runtime.execute.values import Activation, Leaf, Saved, Sorter
from lowtide.runtime.execute.variants import StageVariants
from lowtide.runtime.execute.weights import MANAGED
from lowtide.runtime.replay.endings import EndOfRunError
from lowtide.runtime.replay.tape import Origin, Tape, versions_of
from lowtide.runtime.state.environment import Environment, History, Mark
from lowtide.runtime.state.rng import State
from lowtide.runtime.state.surroundings import filling_memory
from lowtide.runtime.state.writes import Watched
from lowtide.schedule import Await, Backward, Forward, Offload, Operation, Prefetch, Release, Update, Value


class _Recomputing(threading.local):
    depth = 0


_recomputing = _Recomputing()


def is_recomputing() -> bool:
    """Whether this thread is recomputing a part of a model; for hooks that count or log calls.

    Example:
        >>> is_recomputing()
        False
    """
    return _recomputing.depth > 0


Suspect = tuple[Difference, torch.Tensor | None]
"""A difference, and where the recomputed tensor holds what fresh memory is to be filled with; None: unknown."""


class StageRun:
    """What a step knows of one stage's first run."""

    __slots__ = (
        "environment",
        "fingerprints",
        "is_watched",
        "mark",
        "parameters",
        "placeholders",
        "random",
        "random_after",
        "requires_grad",
        "saves_last_before_a_product",
        "spot_check",
        "tape",
        "trained",
        "versions",
    )

    def __init__(self, stage: int, name: str) -> None:
        self.placeholders = Placeholders(stage, name)
        self.tape: Tape | None = None
        self.random: State | None = None
        self.random_after: State | None = None
        self.environment: Environment | None = None
        self.mark: Mark | None = None
        self.parameters: list[nn.Parameter] = []
        self.versions: list[int] = []
        self.trained: list[bool] = []
        self.requires_grad = False
        self.is_watched = False
        self.saves_last_before_a_product = False
        self.fingerprints: Fingerprints | None = None
        self.spot_check: SpotCheck | None = None

    def note_parameters(self, parameters: list[nn.Parameter]) -> None:
        """Note which parameters the stage has, how often each was written to, and whether it is trained."""
        self.parameters = parameters
        self.versions = versions_of(parameters)
        self.trained = are_trained(parameters)


class RunningStep:
    """One forward and its backward: the values on the device, and how far the list has been executed."""

    def __init__(self, machine: Machine, on_end: Callable[[], None], variants: StageVariants | None = None) -> None:
        self.machine = machine
        self.variants = variants or machine.variants
        self._on_end: Callable[[], None] | None = on_end
        self.program = machine.program
        self._weights = machine.weights
        self.runs = [StageRun(k, machine.stage_name(k)) for k in range(self.program.num_stages + 1)]
        self.values: dict[Value, Activation] = {}
        self.host: dict[Value, Activation] = {}
        self.history = History()
        self.sides: dict[Origin, Leaf] = {}
        """The tensors of earlier stages than the previous one that a recomputation will read."""
        self.moved_sides = MovedSides(machine.tier)
        self._readers: dict[Origin, set[int]] = {}  # the stages that may be recomputed and read such a tensor
        self.read: list[tuple[str, torch.Tensor]] = []
        """The buffers that tapes read and that are other stages', with their names."""
        self._alive: dict[int, frozenset[int]] = {}  # the numbers of each stage's tensors that it left
        self.next_index = 0
        self.in_forward = True
        self._watched: list[nn.Parameter] = []  # those that recomputations read, and that stay where they are
        self._storages: Storages | None = None  # theirs, when the forward ended
        self._lock = threading.RLock()
        self._filled = self.program.num_stages + 1  # the lowest stage whose placeholders are filled
        self._task = -1

    # In the forward pass

    def begin_forward(self) -> None:
        """The model's forward begins."""
        watch = self.machine.storages
        if self.program.repeats and watch.is_unsettled:
            watch.begin([p for k in self.program.repeats for p in self.machine.parameters_of(k)])

    def before_first(self, k: int) -> None:
        """Do what the list asks for before the first forward of stage k."""
        self._walk(self.program.first[k])
        if self._weights is not None:
            self._weights.need(k)
        self.moved_sides.need_values(self.program.sides_read(k))

    def after_first(self, k: int, outputs: Mapping[int, torch.Tensor], sorter: Sorter | None) -> None:
        """The model has run stage k for the first time."""
        operation = self.program.operations[self.next_index]
        assert isinstance(operation, Forward)
        self.next_index += 1
        tape = self.runs[k].tape
        source = self._input_of(k)
        if tape is not None:
            # They would keep the stage's input until the forward has ended.
            tape.on_input = tape.on_side = tape.on_held = None
            if k > 1 and tape.calls:  # else the model has left it out
                self.machine.note_reads(k - 1, self._alive[k - 1], frozenset(tape.inputs))
            if source is not None:
                source.keep_only(tape.inputs)
        for i, side in self.program.moved_sides.items():
            if side.maker == k and side.tensor in outputs:
                self.moved_sides.take(i, outputs[side.tensor])
        if sorter is not None:
            assert tape is not None
            inputs = {} if source is None else source.tensors(tape.inputs, self.machine.is_state)
            sorter.finish(inputs, self._fixed(tape), self.lenders(k), self.moved_sides.boxes)
        self._produce(operation, k, self._wanted(k, outputs), sorter)
        if tape is not None:
            self._free_sides(tape, self.next_index - 1)

    def watch_reads(self, k: int) -> None:
        """Stage k begins: keep what it turns out to read of the stage before, also where no step before has, and of
        earlier ones.
        """
        tape, source = self.runs[k].tape, self._input_of(k)
        if tape is not None:
            tape.on_side = partial(self._keep_side, k)
            if source is not None:
                tape.on_input = source.add

    def _keep_side(self, k: int, origin: Origin, tensor: torch.Tensor) -> None:
        """Stage k reads a tensor of an earlier stage than the previous one."""
        self._readers.setdefault(origin, set()).add(k)
        self.machine.side_numbers.setdefault(origin[0], set()).add(origin[1])
        if origin not in self.sides:
            self.sides[origin] = Leaf(tensor, None, ())

    def _is_needed(self, origin: Origin, index: int) -> bool:
        """Whether a recomputation after an index of the list reads a side value before it is made anew; one that moves
        is not made anew.
        """
        moves = origin in self.program.moved_origins
        remade = len(self.program.operations) if moves else self.program.next_repeat(origin[0], index)
        return any(self.program.next_repeat(k, index) < remade for k in self._readers[origin])

    def _free_sides(self, tape: Tape, index: int) -> None:
        """Free the side values that a stage has read at an index of the list and that nothing needs after it."""
        for origin in tape.sides:
            if origin in self.sides and not self._is_needed(origin, index):
                del self.sides[origin]

    def _sides_of(self, tape: Tape) -> dict[Origin, torch.Tensor]:
        """The side values that a stage reads, for a recomputation."""
        name, is_state = self.machine.stage_name, self.machine.is_state
        found = {origin: self.sides[origin].tensor(name(origin[0]), is_state) for origin in tape.sides}
        self.moved_sides.need(found.values())
        return found

    def _num_names(self, address: int) -> int:
        """How many tensors of this step's own are in the storage at an address."""
        leaves = [leaf for value in {*self.values.values(), *self.host.values()} for leaf in value.leaves.values()]
        return sum(leaf.is_in(address) for leaf in (*leaves, *self.sides.values()))

    def _wanted(self, k: int, outputs: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Of a stage's living tensors those that the next stage reads, as far as an earlier step or measuring has shown
        it; what it turns out to read besides is taken in then.
        """
        if not self.program.keeps_outputs(k):
            return {}
        alive = self._alive[k] = frozenset(outputs)
        earlier, reads = self.machine.reads.get(k, (None, frozenset()))
        if earlier != alive:  # the first step, or a hook of the user's made other tensors than before
            reads = self.machine.expected.get(k, alive) if earlier is None else alive
        return {number: tensor for number, tensor in outputs.items() if number in reads}

    def end_forward(self) -> None:
        """The model's forward has ended; copies that are due before backward begin now."""
        self.in_forward = False
        self._watch_parameters()
        self.moved_sides.end_forward(self._num_names)
        operations = self.program.operations
        while isinstance(operations[self.next_index], Offload | Release):
            self._walk(self.next_index + 1)

    # In the backward pass

    def reach(self, k: int, *_: Any) -> None:
        """Backward has reached stage k: do what the list asks for before it, and fill the stage's placeholders."""
        with self._lock:
            if self.in_forward:
                raise ExecutionError(
                    f"backward reached stage {self.machine.stage_name(k)!r} before the model's forward had ended; "
                    "compute gradients outside the model, or call plan.detach()"
                )
            self._enter_task()
            if self._filled > k:
                with self.machine.alone, _outside_vmap():
                    self._walk(self.program.backward[k])
                    self._fill(k)
            if self._weights is not None:
                self._weights.need(k)  # also where backward comes by once more

    @property
    def is_away(self) -> Callable[[int], bool] | None:
        """Tells whether a stage's weights are not on the device; None: no stage's ever leave."""
        return None if self._weights is None else self._weights.is_away

    def lenders(self, k: int) -> Mapping[int, nn.Parameter]:
        """The weights of stage k whose memory comes and goes, by the address of the storage that they have now."""
        return {} if self._weights is None else self._weights.lenders(k)

    def changed(self, k: int, tensor: torch.Tensor) -> None:
        """A saved tensor was changed in place."""
        raise ExecutionError(
            f"stage {self.machine.stage_name(k)!r} needs {self.machine.describe(tensor)} for its backward, but it "
            f"was changed in place after forward; {self._advice_on_changes()}"
        )

    def _advice_on_changes(self) -> str:
        placement = self.program.placement
        if placement is not None and placement.steps_in_backward:
            return "step_in_backward=True updates weights in the first backward; use step_in_backward=False for several"
        return "change it after backward"

    def _enter_task(self) -> None:
        """Note which call of backward this is, and ask to be told of its end."""
        task = torch._C._current_graph_task_id()
        if task != self._task and task >= 0:
            self._task = task
            if self._weights is not None:
                self._weights.check()
                self._weights.change()  # the user's code has had its turn since the forward
            for k in range(self._filled - 1, 0, -1):
                self._check_parameters(k)
            self._check_storages()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_task, task))

    def _end_task(self, task: int) -> None:
        if self._weights is not None:
            assert self.program.placement is not None
            if self._filled <= self._lowest() and self._on_end is not None:
                self._finish_updates()
            self._weights.settle(self.program.placement.after_backward, fetch=False)
            self._weights.hand_over()
        if self._filled <= self._lowest() and self._on_end is not None:
            self.release()
            self._on_end()
            self._on_end = None
            machine = self.machine
            # The graph holds this step. A model that keeps a result with its graph must not hold itself through both.
            self.machine = weakref.proxy(machine)
            machine.counters.num_steps += 1
            machine.spot_checks.judge(machine.can_repeat)
        elif self._storages is not None:  # what ran until now may have exchanged memory itself
            self._storages = Storages(self._watched, addresses_of(self._watched))

    def _finish_updates(self) -> None:
        """Update the stages that are left, and move what is left to move: no backward of a stage comes by any more."""
        for operation in self.program.operations[self.next_index :]:
            if isinstance(operation, Update) or getattr(operation, "kind", None) in MANAGED:
                self._execute(operation, None)

    def _lowest(self) -> int:
        """The first stage that backward reaches: before it everything is frozen."""
        return next((k for k, run in enumerate(self.runs) if run.requires_grad), self.program.num_stages + 1)

    def _fill(self, k: int) -> None:
        self._filled = k
        saved = self.values.pop(("abar", k), None)
        source = self._input_of(k)
        if isinstance(saved, Saved):
            self.moved_sides.need_boxes(saved.boxes if self.moved_sides.absent else ())
            saved.fill(self.runs[k].placeholders, source)
            saved.leave()
        # From here on autograd's graph holds what the backward of stage k needs, and lets it go bit by bit.
        alone = self.values.pop(("a", k - 1), None)
        if alone is not None:
            alone.leave()
        if self.host:
            self._drop_host_copies()
        self.runs[k].tape = None

    def release(self) -> None:
        """Free everything."""
        for value in (*self.values.values(), *self.host.values()):
            value.leave()
        self.values.clear()
        self.host.clear()
        self.sides.clear()
        self.moved_sides.close(self._num_names)
        self._readers.clear()
        self.history.clear()
        self.read.clear()
        self._watched, self._storages = [], None
        for run in self.runs:
            run.tape = None
            run.mark = run.environment = None
            run.spot_check = None
            run.random = run.random_after = None

    # The list

    def _walk(self, until: int) -> None:
        """Execute the list up to, and without, an index."""
        while self.next_index < until:
            operation = self.program.operations[self.next_index]
            self._execute(operation, self.program.modes.get(self.next_index))
            self.next_index += 1

    def _execute(self, operation: Operation, mode: Mode | None) -> None:
        if isinstance(operation, Forward):
            assert mode is not None
            self._repeat(operation, mode)
        elif isinstance(operation, Backward):
            if self._filled > operation.stage:
                self._fill(operation.stage)  # it was not part of this backward, and may be part of the next
            self._forget(operation.stage)
        elif isinstance(operation, Update):
            assert self.machine.update is not None
            self.machine.update(operation.stage)
        elif self._weights is not None and operation.kind in MANAGED:
            self._weights.execute(operation)
        elif operation.kind == "s":
            self._execute_side(operation)
        elif isinstance(operation, Offload):
            value = self.values[operation.value]
            self.host[operation.value] = value
            self.machine.counters.moved_bytes += value.offload(self.machine.tier)
        elif isinstance(operation, Release):
            self.values.pop(operation.value).leave()
        elif isinstance(operation, Prefetch):
            value = self.values[operation.value] = self.host[operation.value]
            self.machine.counters.moved_bytes += value.prefetch(self.machine.tier)
        else:
            assert isinstance(operation, Await)
            awaited = self.values.get(operation.value)  # what only autograd holds is there
            if awaited is not None:
                awaited.arrive()

    def _execute_side(self, operation: Offload | Release | Prefetch | Await) -> None:
        moved_bytes = self.moved_sides.moved_bytes
        if isinstance(operation, Release) and self.next_index > self.program.moved_sides[operation.stage].last_fetch:
            self.moved_sides.drop(operation.stage)
        else:
            self.moved_sides.execute(operation, self._num_names, in_forward=self.in_forward)
        self.machine.counters.moved_bytes += self.moved_sides.moved_bytes - moved_bytes

    def _forget(self, k: int) -> None:
        for key in (("abar", k), ("a", k - 1)):
            value = self.values.pop(key, None)
            if value is not None:
                value.leave()
        if self.host:
            self._drop_host_copies()

    def _drop_host_copies(self) -> None:
        """Give back the room of values that are not fetched any more."""
        for value in [v for v in self.host if self.program.last_prefetch.get(v, -1) < self.next_index]:
            if value not in self.values:
                del self.host[value]

    def _produce(self, operation: Forward, k: int, outputs: Mapping[int, torch.Tensor], sorter: Sorter | None) -> None:
        name = self.machine.stage_name(k)
        movable = ("abar" if operation.save == "all" else "a", k) in self.program.moved
        fixed = self.machine.storages_of(k).union(self.moved_sides.boxes) if movable else ()
        if operation.save == "all":
            self.values[("abar", k)] = Saved(name, outputs, sorter, movable=movable, fixed=fixed)
            return
        self.values[("a", k)] = Activation(name, outputs, movable=movable, fixed=fixed)
        if operation.save == "drop":
            alone = self.values.pop(("a", k - 1), None)
            if alone is not None:
                alone.leave()

    def _input_of(self, k: int) -> Activation | None:
        """a[k-1], on its own or inside abar[k-1]."""
        return self.values.get(("a", k - 1)) or self.values.get(("abar", k - 1))

    def _let_input_go(self, k: int) -> None:
        """Free a[k-1], which nothing reads any more; what autograd keeps of it stays."""
        alone = self.values.pop(("a", k - 1), None)
        if alone is not None:
            alone.leave()
        around = self.values.get(("abar", k - 1))
        if around is not None:
            around.keep_only(())

    # Running a stage again

    def _repeat(self, operation: Forward, mode: Mode) -> None:
        k = operation.stage
        run = self.runs[k]
        tape, source = run.tape, self._input_of(k)
        assert tape is not None
        assert source is not None
        self._check_parameters(k)
        if self._weights is not None:
            self._weights.need(k)
        inputs = source.tensors(tape.inputs, self.machine.is_state)
        self.moved_sides.need(inputs.values())
        sorter = Sorter(self.machine.tier.smallest_bytes) if mode is Mode.SORT else None
        if operation.save != "all":
            outputs = self._run_again(k, inputs, discard)
        else:
            outputs = self._run_for_backward(k, inputs, sorter)
        if sorter is not None:
            sorter.finish(inputs, self._fixed(tape), self.lenders(k), self.moved_sides.boxes)
        made = dict(zip(tape.outputs, outputs, strict=True)) if outputs else {}
        for number in self.machine.side_numbers.get(k, ()):
            origin = (k, number)
            is_there = origin in self.sides and origin in self.program.moved_origins
            if number in made and origin in self._readers and not is_there and self._is_needed(origin, self.next_index):
                self.sides[origin] = Leaf(made[number], None, ())
        self._free_sides(tape, self.next_index)
        self._produce(operation, k, made if self.program.keeps_outputs(k) else {}, sorter)
        if self.next_index in self.program.last_reads:
            self._let_input_go(k)
        self.machine.counters.num_recomputed += self.program.sizes[k - 1]

    def _run_for_backward(
        self, k: int, inputs: Mapping[int, torch.Tensor], sorter: Sorter | None
    ) -> list[torch.Tensor]:
        run = self.runs[k]
        ends_early = sorter is None and self._may_end_early(k)
        assert run.tape is not None
        may_end_in = run.tape.may_end_in if ends_early else None
        sink = None if sorter is None else sorter.add
        catch = run.placeholders.repeated_run(sink, may_end_in, self.lenders(k))
        check, run.spot_check = run.spot_check, None  # the first recomputation of a step is looked at
        if check is not None and run.environment is not None and run.mark is not None:
            check.watch(run.environment.unchanging(run.mark))
        try:
            try:
                outputs = self._run_again(k, inputs, catch.pack if check is None else check.again(catch.pack))
            except EndOfRunError:
                outputs = []
            catch.check()
            suspects = self._suspects(k, check, catch.tensors)
            if not suspects:
                catch.fill()
        except BaseException:
            if sorter is not None:
                sorter.clear()
            raise
        finally:
            catch.tensors.clear()  # the graph of the run holds the hook, the hook this list, and these the graph
        if not suspects:
            return outputs
        outputs = []
        if sorter is not None:
            sorter.clear()
        self._settle(k, inputs, suspects)  # with nothing else of this run: that would not be in the budget
        return self._run_for_backward(k, inputs, sorter)

    def _suspects(self, k: int, check: SpotCheck | None, tensors: list[torch.Tensor]) -> list[Suspect]:
        """Of what a recomputation of stage k has saved, what differs from the first run.

        Raises:
            ExecutionError: where that can only be an error.
        """
        run, machine = self.runs[k], self.machine
        found: list[Difference] = []
        if run.fingerprints is not None:
            found = Fingerprints.of(tensors).differences(run.fingerprints, machine.stage_name(k))
        if check is not None:
            found = machine.spot_checks.finish(check, tensors)
        found = [each for each in found if (k, each.position) not in machine.unwritten]
        if found and not machine.can_repeat(k):
            raise found[0].error
        return [(each, marks(tensors[each.position]) if each.position < len(tensors) else None) for each in found]

    def _settle(self, k: int, inputs: Mapping[int, torch.Tensor], suspects: list[Suspect]) -> None:
        """Refuse what differs from the first run of stage k, except memory that is never written: that is noted."""
        unwritten = self._with_marks(k, inputs, {each.position: usual for each, usual in suspects})
        rest = [each for each, _ in suspects if each.position not in unwritten]
        if rest:  # memory that was filled before may have been used again, and had its marks as a rule
            saved = self._saved_once_more(k, inputs, {each.position for each in rest})
            usual = {position: marks(tensor) for position, tensor in saved.items()}
            saved.clear()
            unwritten |= self._with_marks(k, inputs, usual)
        for position, error in rest:
            if position not in unwritten:
                raise error
        self.machine.unwritten.update((k, position) for position in unwritten)

    def _with_marks(
        self, k: int, inputs: Mapping[int, torch.Tensor], usual: Mapping[int, torch.Tensor | None]
    ) -> set[int]:
        """Of what stage k saves, what has marks only where fresh memory is filled."""
        with filling_memory():
            saved = self._saved_once_more(k, inputs, usual)
        return {position for position, tensor in saved.items() if remove_marks(tensor, usual[position])}

    def _saved_once_more(
        self, k: int, inputs: Mapping[int, torch.Tensor], wanted: Container[int]
    ) -> dict[int, torch.Tensor]:
        """What stage k saves, by position; of what is not wanted, nothing is kept."""
        found: dict[int, torch.Tensor] = {}
        positions = itertools.count()

        def pack(tensor: torch.Tensor) -> None:
            position = next(positions)
            if position in wanted:
                found[position] = tensor.detach()

        self._run_again(k, inputs, pack)
        return found

    def _may_end_early(self, k: int) -> bool:
        """Whether the repeated run of stage k that comes now can end with the last tensor that it saves.

        The first one goes to the end, and in strict mode all do, so that the number of tensors is compared, too.
        """
        is_known = k in self.machine.repeated and self.machine.checks is not Checks.ALL
        self.machine.repeated.add(k)
        return is_known and self.next_index in self.program.unwanted and self.runs[k].saves_last_before_a_product

    def _run_again(self, k: int, inputs: Mapping[int, torch.Tensor], pack: Pack) -> list[torch.Tensor]:
        run = self.runs[k]
        assert run.tape is not None
        assert run.random is not None
        environment, mark = run.environment, run.mark
        assert environment is not None
        assert mark is not None
        sides = self._sides_of(run.tape)
        read = (*inputs.values(), *sides.values())
        earlier = environment.earlier(mark, k, self.history, partial(_storages_read, run.tape, read))
        if earlier.contents:
            pack = _copying(pack, {tensor.untyped_storage()._cdata for tensor, _ in earlier.contents})
        with (
            Watched() if run.is_watched else nullcontext(),
            _MarkedAsRecomputing(),
            environment.rewound(mark, earlier),
            _trained_as_then(run),
            self.variants.running(k),
            self.machine.generators.replayed(run.random),
            torch.enable_grad(),
            saved_tensors_hooks(pack, never_opened),
        ):
            outputs = run.tape.run(inputs, sides)
            self._check_random(k)
            return outputs

    def _check_random(self, k: int) -> None:
        """Refuse if other code has drawn random numbers during a stage."""
        run = self.runs[k]
        assert run.tape is not None
        assert run.random_after is not None
        if run.tape.sets_generators or run.tape.hands_generators:
            return
        if self.machine.generators.are_at(run.random_after):
            return
        raise ExecutionError(
            f"stage {self.machine.stage_name(k)!r} drew different random numbers when it was recomputed than the "
            "first time; if another thread draws from torch's default generator, give that thread its own "
            "torch.Generator"
        )

    def check_written(self, k: int) -> None:
        """Refuse a stage that has changed a parameter in its first run: recomputed, it would change it once more."""
        run = self.runs[k]
        if versions_of(run.parameters) == run.versions:
            return
        for parameter, version in zip(run.parameters, run.versions, strict=True):
            if parameter._version != version:
                raise ExecutionError(
                    f"stage {self.machine.stage_name(k)!r} changes {self.machine.describe(parameter)} in place in its "
                    "forward, so it cannot be recomputed; change it after the optimizer step, or make it a buffer"
                )

    def _check_parameters(self, k: int) -> None:
        run = self.runs[k]
        if versions_of(run.parameters) == run.versions:
            return
        for parameter, version in zip(run.parameters, run.versions, strict=True):
            if parameter._version != version and (parameter.requires_grad or k in self.program.taped):
                raise ExecutionError(
                    f"{self.machine.describe(parameter)}, which stage {self.machine.stage_name(k)!r} uses, was changed "
                    f"in place between forward and backward; {self._advice_on_changes()}"
                )

    def _watch_parameters(self) -> None:
        """The forward has ended: note in which memory the parameters are."""
        if not self.program.repeats:
            return
        moved = () if self._weights is None else self._weights.managed  # which looks after them itself
        read = (parameter for k in self.program.repeats for parameter in self.runs[k].parameters)
        self._watched = [parameter for parameter in read if id(parameter) not in moved]
        self._storages = self.machine.storages.end(self._watched)

    def _check_storages(self) -> None:
        """Refuse to recompute stages whose parameters were given other memory since the forward."""
        changed = [] if self._storages is None else self.machine.storages.given_other(self._watched, self._storages)
        if not changed:
            return
        ahead, num_operations = self.next_index - 1, len(self.program.operations)
        for k in range(self._filled - 1, 0, -1):
            if self.program.next_repeat(k, ahead) == num_operations:
                continue  # what it has saved is there
            own = set(map(id, self.runs[k].parameters))
            parameter = next((each for each in changed if id(each) in own), None)
            if parameter is not None:
                raise ExecutionError(
                    f"{self.machine.describe(parameter)}, which stage {self.machine.stage_name(k)!r} uses, was given "
                    "other memory (param.data = ...) between forward and backward; change it after backward"
                )

    def _fixed(self, tape: Tape) -> set[int]:
        """Addresses of storages that a stage reads and that are not its own."""
        held = {held.tensor.untyped_storage()._cdata for held in tape.held if held.tensor.layout is torch.strided}
        return held | self.machine.storages_of(tape.stage) | self._side_storages(tape)

    def _side_storages(self, tape: Tape) -> set[int]:
        """Addresses of the storages of the side values that a stage reads."""
        found = (self.sides[origin].storage(tape.name) for origin in tape.sides if origin in self.sides)
        return {storage._cdata for storage in found}


def _storages_read(tape: Tape, inputs: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the storages that a stage's glue reads beside its own."""
    tensors = (*(held.tensor for held in tape.held), *inputs)
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


def _copying(pack: Pack, addresses: set[int]) -> Pack:
    """A packing hook that saves a copy where the memory will be written to."""

    def copying(tensor: torch.Tensor) -> Any:
        own = tensor.layout is not torch.strided or tensor.untyped_storage()._cdata not in addresses
        return pack(tensor if own else tensor.detach().clone())

    return copying


def are_trained(parameters: list[nn.Parameter]) -> list[bool]:
    """Whether each of them requires a gradient."""
    return list(map(_requires_grad, parameters))


_requires_grad = attrgetter("requires_grad")


def _trained_as_then(run: StageRun) -> AbstractContextManager[None]:
    """Train the parameters that the first run trained: some may have been frozen since, or begun to be trained."""
    now = are_trained(run.parameters)
    return nullcontext() if now == run.trained else _switched(compress(run.parameters, map(ne, run.trained, now)))


@contextmanager
def _switched(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Train those that are not trained, and the other way round."""
    changed = list(parameters)
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


_VMAP = torch._C._dispatch_key_parse("VmapMode")
"""What the dispatcher calls the transform of `is_grads_batched=True`, which is older than that of `torch.func`."""


@contextmanager
def _outside_old_vmap() -> Iterator[None]:
    torch._C._dispatch_tls_set_dispatch_key_included(_VMAP, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_VMAP, True)


def _outside_vmap() -> AbstractContextManager[Any]:
    """Leave the transform in which backward runs: gradients are in it, and nothing that a recomputation reads; and
    `vmap` refuses random numbers.
    """
    if torch._C._dispatch_tls_is_dispatch_key_included(_VMAP):
        return _outside_old_vmap()
    return temporarily_clear_interpreter_stack() if torch._C._are_functorch_transforms_active() else nullcontext()


class _MarkedAsRecomputing:
    """While inside, `is_recomputing` says so."""

    def __enter__(self) -> None:
        _recomputing.depth += 1

    def __exit__(self, *_: object) -> None:
        _recomputing.depth -= 1
