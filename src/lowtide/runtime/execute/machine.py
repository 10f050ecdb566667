"""What all steps of a plan share: the model and its parts by stage, the lower tier, and the counters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.errors import ExecutionError
from lowtide.runtime.compile.loss import Functions
from lowtide.runtime.execute.checks import Checks, SpotChecks
from lowtide.runtime.execute.program import Program
from lowtide.runtime.execute.variants import StageVariants
from lowtide.runtime.model.call_site import is_compiled
from lowtide.runtime.model.split import Split
from lowtide.runtime.replay.staged import Layout
from lowtide.runtime.state.buffers import Key, StageBuffers, is_buffer_of, places_in
from lowtide.runtime.state.mentions import names
from lowtide.runtime.state.rng import Generators, GeneratorWatch, State
from lowtide.runtime.transfer.cargo import Tier


class Counters:
    """What has happened since the plan was attached."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_recomputed = 0
        self.moved_bytes = 0


class Drawing(Protocol):
    """A step whose forward may draw random numbers."""

    draws_unnoticed: bool
    """From Python's or numpy's generator, and no step before has."""


class Machine:
    """A model laid out for a program.

    Args:
        model: the model.
        split: its stages.
        layout: the same, as far as a running forward must know them.
        program: the schedule.
        tier: where values go that leave the device.
        checks: which values of recomputed stages are compared with those of their first run.
        variants: as which the stages run.
        functions: what to call between units in the place of functions of torch; all stages are watched for them.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        layout: Layout,
        program: Program,
        tier: Tier,
        *,
        checks: Checks = Checks.NONE,
        variants: StageVariants | None = None,
        functions: Functions = MappingProxyType({}),
    ) -> None:
        self.model = model
        self.layout = layout
        self.program = program
        self.tier = tier
        self.checks = checks
        self.spot_checks = SpotChecks(program.recomputed if checks is Checks.SPOT else ())
        self.variants = variants or StageVariants(None)
        self.functions = functions
        self.generators = Generators.of(model)
        self.counters = Counters()
        self.reads: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        """By number, the tensors that a stage left, and which of them the next stage turned out to read."""
        self.device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self.ending_early = frozenset(program.operations[index].stage for index in program.unwanted)
        """The stages that may run again without anybody wanting their output."""
        self.repeated: set[int] = set()
        """The stages that have run again at least once."""
        self._lock = threading.RLock()
        self._draws_others = False  # whether a generator that is not torch's was seen to be drawn from
        self._probed: set[int] = set()  # the stages around whose first run ever all generators were looked at
        self._setting: set[int] = set()  # the stages in which code between calls sets a generator
        self._modules = self._modules_by_stage(split)
        self._first_parameter: nn.Parameter | None = None
        self._buffer_tables = [module._buffers for module in model.modules()]
        self._buffer_names: list[str] = []
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        self._buffers: dict[int, StageBuffers] = {}
        self._changes: dict[Key, int] = {}
        self._storages: dict[int, set[int]] = {}
        self.refresh()

    # The model, by stage

    def refresh(self) -> None:
        """Look at the model's parameters again where they are other objects than before (FSDP exchanges them), and at
        its buffers where it has others: some are registered by the first forward that needs them.
        """
        first, names = next(self.model.parameters(), None), list(chain.from_iterable(self._buffer_tables))
        if self._parameters and first is self._first_parameter:
            if names != self._buffer_names:
                self._buffer_names = names
                self._find_buffers()
            return
        self._buffer_names = names
        self._first_parameter = first
        self._storages.clear()
        for k, modules in self._modules.items():
            unique = {id(p): p for _, module in modules for p in module._parameters.values() if p is not None}
            self._parameters[k] = list(unique.values())
            self._places[k] = [(module._parameters, name) for _, module in modules for name in module._parameters]
        self._find_buffers()

    def _find_buffers(self) -> None:
        """Those that each stage may read or change; of a stage that never runs again, those that others read.

        Steps under way keep to those that their forward has found.
        """
        inside = {k: modules[: len(modules) - len(self._outside)] for k, modules in self._modules.items()}
        of_units = {place.key: place for modules in inside.values() for place in places_in(modules)}
        named = [place for place in of_units.values() if any(names(each, place.name) for _, each in self._outside)]
        taped = {id(module) for k in self.program.taped for _, module in inside[k]}
        for k, modules in inside.items():
            swap = not any(is_compiled(module) for _, module in self._modules[k])
            outside, shared = (self._outside, named) if taped else ([], [])
            if k not in self.program.taped:
                shared = [*shared, *places_in((path, module) for path, module in modules if id(module) in taped)]
                modules = []
            self._buffers[k] = StageBuffers(modules, outside, shared, self._changes, swap=swap)

    def _modules_by_stage(self, split: Split) -> dict[int, list[tuple[str, nn.Module]]]:
        """All modules inside a stage's units; those outside of any unit count for every stage."""
        inside: dict[int, dict[str, nn.Module]] = {k: {} for k in range(1, split.num_stages + 1)}
        paths: set[str] = set()
        for unit, k in split.stage_of().items():
            for name, module in self.model.get_submodule(unit.path).named_modules(prefix=unit.path):
                inside[k][name] = module
                paths.add(name)
        self._outside = [(name, module) for name, module in self.model.named_modules() if name not in paths]
        return {k: [*modules.items(), *self._outside] for k, modules in inside.items()}

    def stage_name(self, k: int) -> str:
        """The name of stage k."""
        return self.layout.names[k - 1] if k else "the model's input"

    def parameters_of(self, k: int) -> list[nn.Parameter]:
        """The parameters of stage k."""
        return self._parameters[k]

    def places_of(self, k: int) -> list[tuple[dict[str, Any], str]]:
        """Where the parameters of stage k are registered: each table with a name in it."""
        return self._places[k]

    def buffers_of(self, k: int) -> StageBuffers:
        """The buffers that stage k may read or change."""
        return self._buffers[k]

    def storages_of(self, k: int) -> set[int]:
        """The addresses of the storages of stage k's parameters and buffers.

        Looked up once: a storage that is missing would be moved with the others although that frees nothing, and one
        that is there in vain would not be; neither harms.
        """
        known = self._storages.get(k)
        if known is not None:
            return known
        tensors: list[torch.Tensor] = []
        for _, module in self._modules[k]:
            tensors += [tensor for tensor in module._buffers.values() if tensor is not None]
            tensors += [tensor for tensor in module._parameters.values() if tensor is not None]
        found = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
        self._storages[k] = found
        return found

    def note_reads(self, k: int, alive: frozenset[int], read: frozenset[int]) -> None:
        """The next stage has read some of the tensors that stage k left; those that it read in earlier steps stay."""
        then, earlier = self.reads.get(k, (alive, frozenset()))
        self.reads[k] = (alive, read | earlier if then == alive else read)

    def buffer_storages_of(self, k: int) -> set[int]:
        """The addresses of the storages that the buffers of stage k have now."""
        buffers = (tensor for _, module in self._modules[k] for tensor in module._buffers.values())
        return {t.untyped_storage()._cdata for t in buffers if t is not None and t.layout is torch.strided}

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is (a view of) a buffer of the model; slow, seldom asked."""
        return is_buffer_of(self.model, tensor)

    def describe(self, tensor: torch.Tensor) -> str:
        """A tensor's name for messages."""
        address = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
        for name, parameter in self.model.named_parameters():
            if parameter is tensor or parameter.untyped_storage()._cdata == address:
                return f"parameter {name!r}"
        for name, buffer in self.model.named_buffers():
            if buffer is tensor or buffer.untyped_storage()._cdata == address:
                return f"buffer {name!r}"
        return f"a tensor of shape {list(tensor.shape)} and {tensor.dtype}"

    # Random numbers

    def probes_all_generators(self, k: int) -> bool:
        """Whether Python's and numpy's generators are looked at too: in a stage's first run ever, and where used.

        Once one stage has drawn from them, all are looked at: another may do so in some steps only.
        """
        return self._draws_others or k not in self._probed

    def watch_of(self, k: int) -> GeneratorWatch | None:
        """What notices generators that are set between the calls of stage k: when it first runs, and where some are."""
        return GeneratorWatch(self.generators) if k in self._setting or k not in self._probed else None

    def random_start(self, k: int, before: State, *, sets_generators: bool) -> State:
        """The state from which stage k starts when it runs again.

        Also where the generators are afterwards as they were before: a submodule that draws may put them back itself.
        """
        self._probed.add(k)
        if sets_generators:
            self._setting.add(k)
            self._draws_others = True
        elif before.others is not None and not self._draws_others:
            self._draws_others = self.generators.others_drawn_since(before)
            if not self._draws_others:
                before.others = None
        return before

    @contextmanager
    def noticing_draws(self, step: Drawing) -> Iterator[None]:
        """Run a forward, and notice where it draws from Python's or numpy's generator while nobody looks at them.

        In the first forward each stage is looked at: what is seen then is that a stage draws that never runs again.
        """
        if self._draws_others or not self.program.taped:
            yield
            return
        is_first, before = not self.program.taped <= self._probed, self.generators.others()
        yield
        if not self._draws_others and self.generators.have_moved(before):
            self._draws_others = True
            step.draws_unnoticed = not is_first

    def unknown_numbers(self, k: int) -> ExecutionError:
        """Why stage k of such a step cannot be run again."""
        return ExecutionError(
            f"stage {self.stage_name(k)!r} cannot be run again: this step's forward draws from Python's or numpy's "
            "generator, and none before did; run the step once more"
        )

    # Threads

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse a second thread: two would disturb each other's random numbers and buffers."""
        if not self._lock.acquire(blocking=False):
            raise ExecutionError(
                "this model is already running in another thread, and a plan serves one thread at a time; give each "
                "thread its own copy of the model (copy.deepcopy), or use a lock"
            )
        try:
            yield
        finally:
            self._lock.release()
