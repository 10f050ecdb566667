"""Runs the stages of a recorded forward one by one, each from its real input, without keeping the others' data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from lowtide.errors import CaptureError, ExecutionError
from lowtide.runtime.meter import Meter
from lowtide.runtime.model.containers import Held, Slot, build, template, tensors_of
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.replay.replay import RecordedStage, Recording
from lowtide.runtime.replay.tape import Origin
from lowtide.runtime.state.cells import Look
from lowtide.runtime.state.recorded import RecordedState
from lowtide.runtime.state.rng import Generators, State

SavedForm = tuple[torch.Size, torch.dtype]  # the form of one tensor that autograd saves


class UnfaithfulStageError(CaptureError):
    """A stage does something else when it is recomputed; `stage` counts from 1."""

    def __init__(self, message: str, *, stage: int) -> None:
        super().__init__(message)
        self.stage = stage


class StagedModel:
    """One recorded forward of a model, whose stages can be recomputed in order.

    Nothing that autograd saves is kept while recording, so a model whose plain step does not fit can be recorded. Where
    backward needs it all the same, the stage is recomputed.

    Args:
        model: the model.
        split: its stages.
        sample: what to call it with.
        loss: what the caller computes from its result; it becomes part of the last stage.
        visit: where weights are on the lower tier, has those of a stage on the device and of no other, and returns
            the bytes of all that are there.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        sample: Sample,
        loss: Callable[[Any], Any] | None = None,
        visit: Callable[[int], int] | None = None,
    ) -> None:
        self._visit = visit
        self._visiting_bytes = 0
        self._visited = 0  # the stage whose weights are there
        self.model = model
        self.split = split
        self.num_stages = split.num_stages
        self._sample = sample.with_keywords(split.call_keywords)
        self._loss = loss
        self._stage = 1
        self._saved: list[list[SavedForm]] = [[] for _ in range(self.num_stages + 1)]
        self._generators = Generators.of(model)
        self._random: list[State] = []
        self._state = RecordedState(model, split)
        self._inputs: list[list[torch.Tensor]] = []
        self._saved_again: dict[int, list[torch.Tensor]] = {}
        self._meter: Meter | None = None
        self._start_bytes = 0  # before the first call of the last stage so far
        self.first_start_bytes: list[int] = []
        """What was there before the first call of each stage in the model's own run, without weights that visit."""
        self.first_alive: list[dict[Origin, tuple[int, int]]] = []
        """The tensors that were alive then, without those of the stage just before: the addresses and the sizes of
        their storages."""
        self.first_peak_bytes: list[int] = []
        """The peak of each stage in the model's own run, beyond what was there when it began."""
        self.held: dict[Origin, torch.Tensor] = {}
        """The tensors that skip stages, by the stage that made them and their number there."""
        self.readers: dict[Origin, set[int]] = {}
        """The stages that read each of them."""
        self.returned: set[Origin] = set()
        """Those of them that are in the model's result."""

    def record(self, meter: Meter | None = None) -> list[torch.Tensor]:
        """Run the model; returns where backward starts, with its graph.

        With a meter, the peak of each stage is noted as the model's own code makes it, whose variables live longer than
        a stage that is recomputed needs them; the last stage then keeps what it saves, as it always does.
        """
        self._meter = meter
        recording = Recording(self.model, self.split, on_stage=self._begin, on_first_call=self._note_start)
        self._recording = recording  # what is noted on the way asks it
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            with recording:
                result = self._sample.call(self.model)
            target = self.target(result)
            self._note_peak()
        self._state.end(self.num_stages)
        self._state.finish()
        self.first_target = [tensor.detach() for tensor in target]
        self._result = self._template(recording, result)
        for k in range(1, self.num_stages + 1):
            recorded = recording.stage(k)
            if recorded.refusal is not None:
                raise UnfaithfulStageError(recorded.refusal, stage=k)
            for origin, tensor in zip(recorded.held_origins, recorded.held, strict=True):
                if origin is not None and origin[0] > 0:
                    self.held[origin] = tensor
                    self.readers.setdefault(origin, set()).add(k)
        for origin in self.held:
            readers = self.readers.setdefault(origin, set())
            if origin[0] < self.num_stages and origin[1] in recording.stage(origin[0] + 1).input_numbers:
                readers.add(origin[0] + 1)
        return target

    def _begin(self, k: int) -> None:
        if k > self.num_stages:
            return  # what the caller does with the result is part of the last stage
        if k > 1:
            self._note_peak()
            self._state.end(k - 1)
        self._stage = k
        self._random.append(self._generators.state())
        self._have_weights(k)

    def _have_weights(self, k: int) -> None:
        if self._visit is not None and k != self._visited:  # runs of one stage are timed
            self._visiting_bytes, self._visited = self._visit(k), k

    def _note_start(self) -> None:
        self._state.begin(self._stage)
        if self._meter is not None:
            self._meter.reset_peak()
            self._start_bytes = self._meter.live_bytes
            self.first_start_bytes.append(self._start_bytes - self._visiting_bytes)
            self.first_alive.append(dict(self._alive_before(self._stage - 1)))

    def _alive_before(self, end: int) -> Iterator[tuple[Origin, tuple[int, int]]]:
        """The tensors of the stages before one that are alive, with the addresses and the sizes of their storages."""
        ledger = self._recording.ledger
        assert ledger is not None
        for m in range(1, end):
            for number, tensor in ledger.alive(m).items():
                if tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    yield (m, number), (storage._cdata, storage.nbytes())

    def _note_peak(self) -> None:
        if not self._state.has_begun(self._stage):  # a stage without calls
            self._note_start()
        if self._meter is not None:
            self.first_peak_bytes.append(self._meter.peak_bytes - self._start_bytes)

    def _pack(self, tensor: torch.Tensor) -> tuple[int, int] | torch.Tensor:
        self._saved[self._stage].append((tensor.shape, tensor.dtype))
        if self._meter is not None and self._stage == self.num_stages:
            return self._meter.see(tensor.detach())  # an output that its own node held would never die
        return self._stage, len(self._saved[self._stage]) - 1

    def _unpack(self, place: tuple[int, int] | torch.Tensor) -> torch.Tensor:
        if isinstance(place, torch.Tensor):
            return place
        k, index = place
        if k not in self._saved_again:
            self._saved_again[k] = self._run_for_backward(k)
        return self._saved_again[k][index]

    def _run_for_backward(self, k: int) -> list[torch.Tensor]:
        """What stage k saves when it is recomputed."""
        while len(self._inputs) < k:
            done = len(self._inputs)
            previous = self.run(done, self.leaves(done, self._inputs[-1])) if done else self.first_inputs()
            count = len(self.stage(done + 1).inputs)
            self._inputs.append([tensor.detach() for tensor in previous[:count]])
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is):
            outputs = self.run(k, self.leaves(k, self._inputs[k - 1]))
            if k == self.num_stages:
                self.finish(outputs)
        self.check_saved(k, [(tensor.shape, tensor.dtype) for tensor in saved])
        return saved

    def _template(self, recording: Recording, result: Any) -> Any:
        numbers = recording.stage(self.num_stages).output_numbers

        def encode(tensor: torch.Tensor) -> Slot | Held:
            origin = recording.origin(tensor)
            if origin is not None and origin[0] == self.num_stages:
                return Slot(numbers.index(origin[1]))
            value = tensor.detach().requires_grad_(tensor.requires_grad)
            if origin is not None and origin[0] > 0:
                self.held[origin] = value
                self.returned.add(origin)
            return Held(value, origin)

        return template(result, encode)

    def stage(self, k: int) -> RecordedStage:
        """Stage k, counted from 1."""
        return self._recording.stage(k)

    def buffers(self, k: int) -> list[torch.Tensor]:
        """The buffers of stage k's units."""
        return self._state.of_units(k)

    def look(self, k: int) -> Look:
        """What the modules of stage k keep now."""
        return self._state.look(k)

    def has_drawn(self, k: int) -> bool:
        """Whether the generators have changed since stage k began; asked after it has run."""
        return self._generators.drawn_since(self._random[k - 1])

    def generator_states(self) -> list[torch.Tensor]:
        """The states of torch's generators now."""
        return [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in self._generators.of_torch()]

    def inputs(self) -> list[torch.Tensor]:
        """The caller's tensors."""
        return tensors_of((self._sample.args, self._sample.kwargs))

    def first_inputs(self) -> list[torch.Tensor]:
        """The caller's tensors that stage 1 reads."""
        given = self.inputs()
        return [given[number] for number in self.stage(1).input_numbers]

    def leaves(self, k: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs of stage k cut off from what made them, asking for gradients where they had them."""
        forms = self.stage(k).inputs
        return [tensor.detach().requires_grad_(f.requires_grad) for tensor, f in zip(inputs, forms, strict=True)]

    def run(self, k: int, inputs: Sequence[torch.Tensor], *, repeat_random: bool = True) -> list[torch.Tensor]:
        """Run stage k; the result as in `RecordedStage.output_numbers`.

        With `repeat_random` it finds generators and buffers as the first run did, and gives the same numbers.
        """
        if repeat_random:
            self._generators.set(self._random[k - 1])
            self._state.put_back(k)
        self._have_weights(k)
        try:
            with torch.enable_grad():
                return self.stage(k).run_all(inputs)
        except ExecutionError as error:
            raise UnfaithfulStageError(str(error), stage=k) from error

    def finish(self, outputs: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """What the caller makes of the last stage's outputs: the model's result, and where backward starts."""
        result = build(self._result, outputs)
        with torch.enable_grad():
            return result, self.target(result)

    def target(self, result: Any) -> list[torch.Tensor]:
        """Where backward starts: the given loss, else the loss in the model's result, else all of the result."""
        if self._loss is not None:
            return [_the_loss(self._loss(result))]
        found = _loss_in(result)
        return [found] if found is not None else [t for t in tensors_of(result) if t.requires_grad]

    @property
    def advice(self) -> str:
        """What to do where a stage's backward reaches beyond the stage."""
        cause = (
            "it uses a tensor that an earlier stage left in an object or an attribute: hand it on as an argument and a "
            "result, or name coarser stages (stages=...)"
        )
        if self._loss is None:
            return cause
        return f"{cause}; where loss= reads such tensors of the model, return them from its forward, or leave loss= out"

    def num_saved(self, k: int) -> int:
        """How many tensors stage k saved when the model ran, as often as each was saved."""
        return len(self._saved[k])

    def check_saved(self, k: int, saved: list[SavedForm]) -> None:
        """Refuse a stage that saved something else when it was recomputed."""
        if saved == self._saved[k]:
            return
        name = self.split.stages[k - 1].name
        raise UnfaithfulStageError(
            f"stage {name!r} saved {len(saved)} tensors when recomputed and {len(self._saved[k])} the first time, or "
            "different ones: some of its work bypasses torch's functions; name coarser stages (stages=...)",
            stage=k,
        )

    def check_target(self, target: Sequence[torch.Tensor]) -> None:
        """Refuse stages that together give a different result than the model."""
        for first, again in zip(self.first_target, target, strict=True):
            # the same kernels on the same numbers: equal but for sums whose order is left open
            tolerance = 64 * torch.finfo(first.dtype).eps
            if not torch.allclose(first, again.detach(), rtol=tolerance, atol=tolerance, equal_nan=True):
                raise CaptureError(
                    "running the stages one after the other gives a different result than the model itself; does a "
                    "module read a global that the model's code changes, or keep something that changes with each "
                    f"call, besides buffers and numbers{self._about_buffers()}? Pass it as an argument, or set it as "
                    "an attribute of the module that reads it; otherwise name coarser stages (stages=...)"
                )

    def _about_buffers(self) -> str:
        """Which buffers the forward changes, as one of the reasons why a stage may give something else."""
        changing = self._state.changing
        if not changing:
            return ""
        shown = ", ".join(map(repr, changing[:3])) + (", ..." if len(changing) > 3 else "")
        return f", or read another module's buffer by a computed name (the forward changes {shown})"


@contextmanager
def nothing_saved(saved: list[SavedForm]) -> Iterator[None]:
    """Free everything that autograd saves in the block, and list it."""
    is_running = True

    def pack(tensor: torch.Tensor) -> None:
        saved.append((tensor.shape, tensor.dtype))

    def unpack(_: Any) -> torch.Tensor:
        if is_running:
            raise CaptureError("the model's forward calls backward itself; that cannot be measured in stages")
        raise RuntimeError("it needs what an earlier stage has saved")

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        is_running = False


def leaves_behind(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaf tensors that a backward from these tensors would reach, each once."""
    found: dict[int, torch.Tensor] = {id(t): t for t in tensors if t.grad_fn is None and t.requires_grad}
    for node in _nodes_behind(tensors):
        variable = getattr(node, "variable", None)  # AccumulateGrad's
        if variable is not None:
            found[id(variable)] = variable
    return list(found.values())


def attributes_behind(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that functions written in Python keep as attributes for their backward: no hook sees them."""
    custom = (node for node in _nodes_behind(tensors) if isinstance(node, torch.autograd.function.BackwardCFunction))
    return [tensor for node in custom for tensor in tensors_of(vars(node))]


def _nodes_behind(tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the graph that a backward from these tensors would reach, each once."""
    pending: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _the_loss(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        raise CaptureError(f"loss= returned {type(value).__name__}; it must return a tensor that has gradients")
    return value


def _loss_in(result: Any) -> torch.Tensor | None:
    """The loss that a model returns: what is named so, or a number in first place."""
    candidate = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if candidate is None and isinstance(result, tuple | list) and result:
        candidate = result[0]
    if candidate is None:
        candidate = result
    right = isinstance(candidate, torch.Tensor) and candidate.dim() == 0 and candidate.requires_grad
    return candidate if right else None


def storages_of(values: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested containers, each once."""
    tensors = (tensor for tensor in tree_iter(values) if isinstance(tensor, torch.Tensor))
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.layout is torch.strided}
