"""The times and bytes of each stage of a recorded model, measured one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.errors import CaptureError, LowtideError
from lowtide.runtime.compile.compiled import CompiledModel
from lowtide.runtime.measure.backward import BackwardStart, wait_for_autograd
from lowtide.runtime.measure.sides import Skipping, skipping_in, with_outliving
from lowtide.runtime.measure.stage_figures import StageFigures
from lowtide.runtime.measure.stages import (
    SavedForm,
    StagedModel,
    attributes_behind,
    leaves_behind,
    nothing_saved,
    storages_of,
)
from lowtide.runtime.measure.timing import timed
from lowtide.runtime.measure.variants import VariantCheck
from lowtide.runtime.meter import Meter, no_collection
from lowtide.runtime.model.containers import tensors_of
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.replay.endings import EndOfRunError, saves_last_before_a_product
from lowtide.runtime.replay.tape import Origin

# Stages of one kind that hold less than this share of the bytes have no variants.
_LEAST_SHARE = 0.01

Progress = Callable[[str, float], None]
_Storages = dict[int, torch.UntypedStorage]


@dataclass(slots=True)
class _Run:
    """One forward of a stage: what it returned, where its backward starts, and what it left in lists of modules."""

    outputs: list[torch.Tensor]
    result: Any
    starts: list[torch.Tensor]
    left: list[Any]


def measured_stages(
    model: nn.Module,
    split: Split,
    sample: Sample,
    loss: Callable[[Any], Any] | None,
    device: torch.device,
    progress: Progress | None,
    compiled: CompiledModel | None = None,
    *,
    keeps_result: bool = True,
    allow_rounding: bool = False,
    of_kind: dict[str, StageFigures] | None = None,
    visit: Callable[[int], int] | None = None,
) -> tuple[list[StageFigures], list[Skipping]]:
    """The figures of each stage, and what skips stages.

    `of_kind` has the figures of kinds that were measured before, and is given the others; `visit` as for `StagedModel`.
    """
    if compiled is not None and progress is not None:
        progress("compiling blocks", 0.0)
    staged = _recorded(model, split, sample, loss, device, visit)
    measurer = Measurer(staged, device, keeps_result=keeps_result)
    figures: list[StageFigures] = []
    of_kind = {} if of_kind is None else of_kind
    inputs = staged.first_inputs()
    for k, stage in enumerate(split.stages, start=1):
        report = partial(_report, progress, stage.name, k, split.num_stages)
        report("", 0.0)
        known = of_kind.get(stage.kind)
        # the caller has the last one's result: it is measured anyway
        figure = measurer.like(known, k, inputs) if known is not None and k < split.num_stages else None
        if figure is None:
            figure = measurer.measured(k, inputs)
            if compiled is not None:
                figure = measurer.with_variants(figure, k, inputs, compiled, report, allow_rounding=allow_rounding)
            if known is not None:
                figure = replace(figure, notes=())  # they are there already
        if stage.kind:
            of_kind[stage.kind] = figure
        figures.append(measurer.with_first_peak(figure, k))
        inputs = measurer.advance(k, inputs)
    skipping = skipping_in(staged, keeps_result=keeps_result)
    return with_outliving(figures, skipping, staged), skipping


def _report(progress: Progress | None, stage: str, k: int, num_stages: int, variant: str, share: float) -> None:
    """Report what is being done for stage k, and the share done."""
    if progress is not None:
        progress(f"{stage}, compiling as {variant}" if variant else stage, (k - 1 + share) / num_stages)


def _recorded(
    model: nn.Module,
    split: Split,
    sample: Sample,
    loss: Callable[[Any], Any] | None,
    device: torch.device,
    visit: Callable[[int], int] | None,
) -> StagedModel:
    if device.type == "cuda":  # what the first run of all makes and keeps, such as workspaces, is not a stage's
        StagedModel(model, split, sample, loss, visit).record()
    staged = StagedModel(model, split, sample, loss, visit)
    with Meter(device, search=False) as meter:
        for tensor in (*model.parameters(), *model.buffers(), *sample.tensors()):
            meter.see(tensor)
        staged.record(meter)
    return staged


class Measurer:
    """Measures the stages of a recorded model, each from its input."""

    def __init__(self, staged: StagedModel, device: torch.device, *, keeps_result: bool) -> None:
        self._staged = staged
        self._keeps_result = keeps_result
        self._device = device
        self._names = {id(parameter): name for name, parameter in staged.model.named_parameters()}

    def measured(self, k: int, inputs: Sequence[torch.Tensor]) -> StageFigures:
        """Measure stage k from these inputs."""
        leaves = self._staged.leaves(k, inputs)
        figure = self._measured_bytes(k, leaves)
        run = self._forward(k, leaves)
        wanted = leaves_behind(run.starts)
        seeds = [torch.ones_like(tensor) for tensor in run.starts]
        ends_early = k < self._staged.num_stages and saves_last_before_a_product(run.outputs)
        del run
        forward = timed(lambda: self._forward(k, leaves), None, self._device)
        if not wanted:
            return replace(figure, forward=forward)
        rerun = timed(lambda: self._forward_until_saved(k, leaves), None, self._device) if ends_early else None
        kept: list[_Run] = []

        def prepare() -> None:
            kept.clear()
            kept.append(self._forward(k, leaves))

        backward = timed(lambda: _backward(kept[0], wanted, seeds), prepare, self._device)
        return replace(figure, forward=forward, backward=backward, rerun=rerun)

    def like(self, figure: StageFigures, k: int, inputs: Sequence[torch.Tensor]) -> StageFigures | None:
        """The figures of stage k, which is of the same kind as another: only whose tensors it reads is its own.

        None where it reads tensors of earlier stages that the other has from the stage before it, or the reverse.
        """
        with nothing_saved([]):
            run = self._forward(k, self._staged.leaves(k, inputs))
        parameters, held = self._reached(k, leaves_behind(run.starts))
        sizes = [num_bytes for _, num_bytes in figure.held]
        if len(sizes) != len(held):
            return None
        return replace(figure, parameters=parameters, held=tuple(zip(held, sizes, strict=True)), notes=())

    def with_variants(
        self,
        figure: StageFigures,
        k: int,
        inputs: Sequence[torch.Tensor],
        compiled: CompiledModel,
        report: Callable[[str, float], None],
        *,
        allow_rounding: bool,
    ) -> StageFigures:
        """The figures with those of the stage's variants that compute the same."""
        num_variants, choice = compiled.num_variants(k), compiled.choice
        if num_variants == 1 or not self._has_much_to_save(figure, k):
            return figure
        check = VariantCheck(self._staged, k, inputs, choice, allow_rounding=allow_rounding)
        found, notes = [], []
        for index, name in list(enumerate(choice.names))[1:num_variants]:
            report(name, index / num_variants)
            refusal = check.refusal(index)
            if refusal is not None:
                notes.append(
                    f"stage {self._staged.split.stages[k - 1].name!r}: variant {name!r} is not used: {refusal}"
                )
                continue
            with choice.running(index):
                found.append((name, self.measured(k, inputs)))
        return replace(figure, variants=tuple(found), notes=tuple(notes))

    def _has_much_to_save(self, figure: StageFigures, k: int) -> bool:
        """Whether the stages of its kind save more than their outputs: what compiling takes is to be worth it."""
        split = self._staged.split
        kind = split.stages[k - 1].kind
        num_stages = sum(stage.kind == kind for stage in split.stages) if kind else 1
        return num_stages * (figure.saved_bytes - figure.output_bytes) > _LEAST_SHARE * split.activation_bytes

    def with_first_peak(self, figure: StageFigures, k: int) -> StageFigures:
        """The figures with the peak of the model's own run where that is higher."""
        left_bytes = figure.saved_bytes if k == self._staged.num_stages else figure.output_bytes
        extra_bytes = self._staged.first_peak_bytes[k - 1] - left_bytes - figure.own_held_bytes
        more_bytes = max(0, extra_bytes - figure.forward_extra_bytes)
        variants = tuple(
            (name, replace(each, saving_extra_bytes=each.saving_extra_bytes + more_bytes))
            for name, each in figure.variants
        )
        # a stage whose backward runs as a variant runs forward as that variant, too
        most_bytes = max(figure.forward_extra_bytes, *(each.forward_extra_bytes for _, each in figure.variants), 0)
        return replace(
            figure,
            forward_extra_bytes=most_bytes + more_bytes,
            saving_extra_bytes=figure.saving_extra_bytes + more_bytes,
            variants=variants,
        )

    def advance(self, k: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of the stage after k, as the first run made them; after the last stage the result is checked."""
        staged, saved = self._staged, list[SavedForm]()
        # Under a meter, as the first run was: some functions (ctc_loss) save other tensors while they are watched.
        metered = Meter(self._device, search=False)
        with metered, nothing_saved(saved):
            found = staged.look(k)
            outputs = staged.run(k, staged.leaves(k, inputs))
            if k == staged.num_stages:
                staged.check_target(staged.finish(outputs)[1])
            found.restore_sequences()
        staged.check_saved(k, saved)
        return [tensor.detach() for tensor in outputs[: len(staged.stage(k).outputs)]]

    def _forward(self, k: int, leaves: Sequence[torch.Tensor]) -> _Run:
        found = self._staged.look(k)
        try:
            outputs = self._staged.run(k, leaves, repeat_random=False)
            if k < self._staged.num_stages:
                run = _Run(outputs, None, [tensor for tensor in outputs if tensor.requires_grad], [])
            else:
                result, target = self._staged.finish(outputs)
                starts = [tensor for tensor in target if tensor.requires_grad]
                run = _Run(outputs, result, starts, []) if self._keeps_result else _Run([], None, starts, [])
        finally:
            left = found.restore_sequences()  # a graph that stayed there would count in the next run
        run.left = left
        return run

    def _forward_until_saved(self, k: int, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run stage k until the last tensor that it saves is there, as a step does when nobody wants its output."""
        saved: list[torch.Tensor] = []
        num_saved, stage = self._staged.num_saved(k), self._staged.stage(k)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            if len(saved) == num_saved and stage.may_end_in(sys._getframe(1)):
                raise EndOfRunError
            return saved[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is), suppress(EndOfRunError):
            self._forward(k, leaves)
        return saved

    def _measured_bytes(self, k: int, leaves: Sequence[torch.Tensor]) -> StageFigures:
        """All but the times."""
        with Meter(self._device, search=False) as meter, no_collection():
            self._warm_up(k, leaves)
            wait_for_autograd(self._device)
            before_bytes = meter.live_bytes
            meter.reset_peak()
            saved = set[int]()

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                saved.update(storages_of(tensor))
                # What compiled code saves is seen so. Without its history: what a node saves of its own output would
                # hold the node, and where backward never comes nobody ends that.
                return meter.see(tensor.detach())

            with torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is):
                run = self._forward(k, leaves)
            saved.update(storages_of(attributes_behind(run.starts)))
            staying = saved.union(storages_of([run.outputs, tensors_of(run.result)]))
            saves_input = not staying.isdisjoint(storages_of(leaves))
            outputs, held = self._output_storages(k, run)
            saves_output = not saved.isdisjoint(outputs)
            saved_held = tuple(n for n, tensor in self._held(k, run) if not saved.isdisjoint(storages_of(tensor)))
            _see(meter, run.outputs)
            after_bytes, peak_bytes = meter.live_bytes, meter.peak_bytes
            output_bytes, held_bytes = _total(outputs.values()), _total(held.values())
            del outputs, held  # they hold what is to go
            saved_bytes = max(after_bytes - before_bytes - held_bytes, output_bytes)
            extra_bytes = saving_extra_bytes = peak_bytes - before_bytes - held_bytes - saved_bytes
            grad_bytes = self._grad_bytes(k, run)
            start = self._start_of_backward(k, run)
            stored_bytes = meter.live_bytes + start.gradient_bytes
            del run
            figure = self._with_backward(k, leaves, start, stored_bytes, meter)
            del start
            wait_for_autograd(self._device)
            if k < self._staged.num_stages:  # the last stage's forward is always followed by its backward
                dropped_bytes = self._dropped_peak_bytes(k, leaves, meter) - held_bytes - output_bytes
                extra_bytes = max(extra_bytes, dropped_bytes)
        return replace(
            figure,
            output_bytes=output_bytes,
            saved_bytes=saved_bytes,
            grad_bytes=grad_bytes,
            forward_extra_bytes=max(0, extra_bytes),
            saving_extra_bytes=max(0, saving_extra_bytes),
            own_held_bytes=held_bytes,
            saved_held=saved_held,
            saves_input=saves_input,
            saves_output=saves_output,
        )

    def _warm_up(self, k: int, leaves: Sequence[torch.Tensor]) -> None:
        """Run the stage until all that is made once and kept (workspaces, tables) is there, and has been seen."""
        for _ in range(2):
            run = self._forward(k, leaves)
            try:
                _backward(run, leaves_behind(run.starts), [torch.ones_like(tensor) for tensor in run.starts])
            except (LowtideError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                raise CaptureError(
                    f"the backward of stage {self._staged.stage(k).name!r} does not work on its own "
                    f"({str(error).partition('.')[0]}); {self._staged.advice}"
                ) from error

    def _start_of_backward(self, k: int, run: _Run) -> BackwardStart:
        """Where a backward of stage k starts as it does within a step: only its graph holds what is not held."""
        if k == self._staged.num_stages:  # the caller has the result and the loss in hand
            return BackwardStart.held(run.starts, also=(run.outputs, run.result))
        return BackwardStart.owned_by_graph(run.starts, also=[tensor for _, tensor in self._held(k, run)])

    def _held(self, k: int, run: _Run) -> list[tuple[int, torch.Tensor]]:
        """The tensors that stage k makes and that skip stages, with their numbers."""
        stage = self._staged.stage(k)
        if not run.outputs:
            return []
        return [(n, t) for t, n in zip(run.outputs, stage.output_numbers, strict=True) if n in stage.held_numbers]

    def _with_backward(
        self, k: int, leaves: Sequence[torch.Tensor], start: BackwardStart, stored_bytes: int, meter: Meter
    ) -> StageFigures:
        """The figures of a backward; those of the forward are left at 0."""
        wanted = leaves_behind(start.roots)
        meter.reset_peak()
        grads = start.run(wanted)
        peak_bytes = meter.peak_bytes - stored_bytes
        pairs = list(zip(wanted, grads, strict=True)) if grads else []
        inputs = {id(leaf) for leaf in leaves}
        input_grad_bytes = _num_bytes([grad for leaf, grad in pairs if id(leaf) in inputs])
        largest_bytes = max((_num_bytes([grad]) for leaf, grad in pairs if id(leaf) in self._names), default=0)
        parameters, _ = self._reached(k, wanted)
        held = [(origin, grad) for leaf, grad in pairs for origin in self._reached(k, [leaf])[1]]
        held.sort(key=lambda pair: pair[0])
        return StageFigures(
            backward_peak_bytes=peak_bytes - input_grad_bytes,
            largest_weight_grad_bytes=largest_bytes,
            parameters=parameters,
            held=_held_gradients(held),
            passed_on=tuple(place for place, (_, grad) in enumerate(held) if start.is_passed_on(grad)),
        )

    def _dropped_peak_bytes(self, k: int, leaves: Sequence[torch.Tensor], meter: Meter) -> int:
        """The peak of a forward that saves nothing, beyond its input."""
        before_bytes = meter.live_bytes
        meter.reset_peak()
        with nothing_saved([]):
            self._forward(k, leaves)
        return meter.peak_bytes - before_bytes

    def _output_storages(self, k: int, run: _Run) -> tuple[_Storages, _Storages]:
        """The storages of the stage's outputs, and of those tensors of its own that are held."""
        if not run.outputs:  # the caller has the loss alone
            return self._own(storages_of(run.starts)), {}
        stage = self._staged.stage(k)
        held_storages = storages_of([tensor for _, tensor in self._held(k, run)])
        visible = [run.outputs[: len(stage.outputs)], run.starts if k == self._staged.num_stages else []]
        outputs = {key: storage for key, storage in storages_of(visible).items() if key not in held_storages}
        return self._own(outputs), held_storages

    def _own(self, outputs: _Storages) -> _Storages:
        """What a stage returns, without the tensors of earlier stages that are in the model's result."""
        earlier = storages_of(list(self._staged.held.values()))
        return {key: storage for key, storage in outputs.items() if key not in earlier}

    def _grad_bytes(self, k: int, run: _Run) -> int:
        if k == self._staged.num_stages:
            return _num_bytes(run.starts)
        stage = self._staged.stage(k)
        pairs = list(zip(run.outputs, stage.output_numbers, strict=True))[: len(stage.outputs)]
        return _num_bytes([t for t, number in pairs if t.requires_grad and number not in stage.held_numbers])

    def _reached(self, k: int, leaves: Sequence[torch.Tensor]) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
        """The parameters and the held tensors among the leaves of a stage's graph."""
        stage = self._staged.stage(k)
        origins = {id(t): origin for t, origin in zip(stage.held, stage.held_origins, strict=True)}
        parameters = tuple(self._names[id(leaf)] for leaf in leaves if id(leaf) in self._names)
        held = {origins.get(id(leaf)) for leaf in leaves if id(leaf) not in self._names}
        return parameters, tuple(sorted(origin for origin in held if origin is not None and origin[0] > 0))


def _backward(
    run: _Run, wanted: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    if not wanted:
        return ()
    return torch.autograd.grad(run.starts, wanted, seeds, allow_unused=True)


def _held_gradients(gradients: Sequence[tuple[Origin, torch.Tensor | None]]) -> tuple[tuple[Origin, int], ...]:
    """What the gradients of held tensors take; of those that are views of one storage, the first has what is left."""
    sizes = {origin: _num_bytes([grad]) for origin, grad in gradients}
    for address, storage in storages_of([grad for _, grad in gradients]).items():
        within = [origin for origin, grad in gradients if grad is not None and address in storages_of(grad)]
        sizes[within[0]] += max(0, storage.nbytes() - sum(sizes[origin] for origin in within))
    return tuple(sizes.items())


def _see(meter: Meter, tensors: Sequence[torch.Tensor]) -> None:
    """A function of its own: a variable of a loop would keep the last tensor."""
    for tensor in tensors:
        meter.see(tensor)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _num_bytes(tensors: Sequence[torch.Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def _total(storages: Any) -> int:
    return sum(storage.nbytes() for storage in storages)
