"""What all steps of a plan share: the model and its parts by stage, the lower tier, and the counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType

import torch
from torch import nn

from lowtide.errors import ExecutionError
from lowtide.runtime.compile.loss import Functions
from lowtide.runtime.compile.regions import RegionLayer
from lowtide.runtime.execute.checks import Checks, SpotChecks
from lowtide.runtime.execute.program import Program
from lowtide.runtime.execute.storages import StorageWatch
from lowtide.runtime.execute.variants import StageVariants
from lowtide.runtime.execute.weights import Weights
from lowtide.runtime.model.call_site import is_compiled
from lowtide.runtime.model.processes import is_distributed
from lowtide.runtime.model.split import Split
from lowtide.runtime.model.tables import Tables
from lowtide.runtime.replay.staged import StageLayout
from lowtide.runtime.state.environment import Environment, Together, is_buffer_of
from lowtide.runtime.state.rng import Generators, GeneratorWatch
from lowtide.runtime.transfer.cargo import Tier


class Counters:
    """What has happened since the plan was attached."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_recomputed = 0
        self.moved_bytes = 0


class _Alone:
    """Refuses a second thread: two would disturb each other's random numbers and buffers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ExecutionError(
                "this model is already running in another thread, and a plan serves one thread at a time; give each "
                "thread its own copy of the model (copy.deepcopy), or use a lock"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


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
        functions: what to call between units instead of torch functions; all stages are watched for them.
        weights: those that the program moves; None: it moves none.
        regions: what runs the model in compiled regions; None: it runs in units.
        expected: by stage, the numbers of its tensors that are read later, as far as it is known before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        layout: StageLayout,
        program: Program,
        tier: Tier,
        *,
        checks: Checks = Checks.NONE,
        variants: StageVariants | None = None,
        functions: Functions = MappingProxyType({}),
        weights: Weights | None = None,
        regions: RegionLayer | None = None,
        expected: Mapping[int, frozenset[int]] = MappingProxyType({}),
    ) -> None:
        self.expected = expected
        self.weights = weights
        self.storages = StorageWatch()
        self.regions = regions
        self.update: Callable[[int], None] | None = None
        """Makes the optimizer's step of a stage, where that is done in backward."""
        self.model = model
        self.layout = layout
        self.program = program
        self.tier = tier
        self.checks = checks
        self.unwritten: set[tuple[int, int]] = set()
        """The stages and positions of saved tensors parts of which were seen to be never written."""
        checked = program.recomputed if checks is Checks.SPOT else ()
        self.spot_checks = SpotChecks(checked, self.unwritten)
        self.variants = variants or StageVariants(None)
        self.functions = functions
        self.generators = Generators.of(model)
        self.counters = Counters()
        self.reads: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        """By number, the tensors that a stage left, and which of them the next stage turned out to read."""
        self.side_numbers: dict[int, set[int]] = {}
        """By stage, the numbers of its tensors that later stages than the next one turned out to read."""
        self.device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self.ending_early = frozenset(program.operations[index].stage for index in program.unwanted)
        """The stages that may be recomputed without needing their output."""
        self.repeated: set[int] = set()
        """The stages that have been recomputed at least once."""
        self.alone = _Alone()
        """Held by the thread that the model runs in."""
        self.setting_cells: set[int] = set()
        """The stages whose code between calls was seen to set cells of units."""
        self._probed: set[int] = set()  # the stages around whose first run ever all generators were looked at
        self._sets_generators = False  # whether code between calls was seen to set one
        self._modules = self._modules_by_stage(split)
        self._first_parameter: nn.Parameter | None = None
        self._storages: dict[int, set[int]] = {}
        self._parameters = {k: Tables(module._parameters for _, module in each) for k, each in self._modules.items()}
        self._compiled = {k for k, each in self._modules.items() if any(is_compiled(module) for _, module in each)}
        self._environments = self._environments_by_stage()
        self._buffer_tables = Tables(module._buffers for module in model.modules())
        self._buffer_tables_of: dict[int, list[dict[str, torch.Tensor | None]]] = {}
        self._buffers: list[int] = []
        self._buffer_names: dict[int, str] = {}
        self.refresh()

    # The model, by stage

    def refresh(self) -> None:
        """Look at the model's parameters and buffers again where they are other objects than before."""
        if self.program.taped:  # else nobody asks for buffers
            buffers = list(map(id, self._buffer_tables.entries()))
            if buffers != self._buffers:  # by address: a buffer that a forward replaces is not kept alive
                self._buffers = buffers
                self._buffer_tables_of.clear()
                self._buffer_names = {id(buffer): name for name, buffer in self.model.named_buffers()}
        if self._storages and next(self.model.parameters(), None) is not self._first_parameter:
            self._storages.clear()

    def _environments_by_stage(self) -> dict[int, Environment]:
        """Of a stage that is never recomputed, what it has in common with those that are."""
        repeated = self.program.repeats
        inside = {k: modules[: len(modules) - len(self._outside)] for k, modules in self._modules.items()}
        shared = {id(module) for k in repeated for _, module in inside[k]}
        together = Together()
        found = {}
        for k, modules in inside.items() if repeated else ():
            own = [(path, module) for path, module in modules if k in repeated or id(module) in shared]
            found[k] = Environment(own, self._outside, together, exchanges=self.can_be_watched(k))
        return found

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
        """The parameters of stage k, as they are now."""
        return [p for p in self._parameters[k].entries() if p is not None]

    def environment_of(self, k: int) -> Environment | None:
        """What stage k may read or change besides its inputs; None: no stage is recomputed, so it does not matter."""
        return self._environments.get(k)

    def can_be_watched(self, k: int) -> bool:
        """Whether the operations of stage k can be seen without changing what it does: not those of compiled code."""
        return k not in self._compiled

    def can_repeat(self, k: int) -> bool:
        """Whether stage k can run once more to see whether it saves memory that it never writes.

        Compiled code would be compiled anew for that, and other processes would not take part.
        """
        is_compiled = k in self._compiled or self.regions is not None or bool(self.functions)
        return not (is_compiled or is_distributed())

    def buffer_name(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that was a buffer of the model when the forward began; None: it was none."""
        return self._buffer_names.get(id(tensor))

    def storages_of(self, k: int) -> set[int]:
        """The addresses of the storages of stage k's parameters and buffers.

        Looked up once: a storage that is missing would be moved with the others although that frees nothing, and one
        that is there in vain would not be; neither harms.
        """
        known = self._storages.get(k)
        if known is not None:
            return known
        if not self._storages:
            self._first_parameter = next(self.model.parameters(), None)
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
        tables = self._buffer_tables_of.get(k)
        if tables is None:
            tables = self._buffer_tables_of[k] = [each._buffers for _, each in self._modules[k] if each._buffers]
        buffers = chain.from_iterable(map(dict.values, tables))
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

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Run the block without spot checks, which read values on the host."""
        checks, self.spot_checks = self.spot_checks, SpotChecks(())
        try:
            yield
        finally:
            self.spot_checks = checks

    # Random numbers

    def watch_of(self, k: int) -> GeneratorWatch | None:
        """What notices generators that are set between the calls of stage k; None: it is never recomputed."""
        if k not in self.program.repeats:
            return None
        return GeneratorWatch(self.generators, reads_all=self._sets_generators or k not in self._probed)

    def note_generators(self, k: int, *, are_set: bool) -> None:
        """Stage k has run, and its code between calls was seen to set generators or not."""
        self._probed.add(k)
        self._sets_generators |= are_set
