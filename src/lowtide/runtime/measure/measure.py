"""What each stage of a model costs: `measure(model, sample) -> Chain`.

Stages are run one after the other from their real inputs, each one's data freed before the next, so a model whose plain
step does not fit can be measured. Stages of one kind (24 equal blocks) are measured once.

| field | what is measured |
| --- | --- |
| `forward_seconds`, `backward_seconds` | medians; on CUDA at the pace of the launching thread where that is slower |
| `rerun_seconds` | of a forward that ends with the last tensor it saves, before a matrix product or a convolution |
| `output_bytes` | the storages of what the next stage reads, without side values |
| `saved_bytes` | what is more on the device after forward than before, the input being there in both; for chains
without moves less the input where neither this stage nor the one before saves it, which then goes |
| `grad_bytes` | the gradients of these outputs |
| `forward_extra_bytes` | the peak of a forward that saves all, or of one that saves nothing, beyond what it leaves; and
the model's result, which the caller holds while stages before the last one run again |
| `backward_extra_bytes` | the peak of backward beyond what was stored and the gradients of output, input and weights;
and the model's result, as above |
| `outliving` | outputs of earlier stages that the model's own code holds when the stage begins: a variable, an argument
of a call around it, a list; see `lowtide.runtime.measure.sides` |
| `side_values` | the storages that skip stages, see `lowtide.runtime.measure.sides`; no stage counts them |
| `base_bytes` | all else: the batch, buffers, workspaces, what others have there |
"""

from __future__ import annotations

import gc
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import le
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from lowtide.chain import Chain, Stage, Variant
from lowtide.errors import CaptureError
from lowtide.progress import check_progress
from lowtide.runtime.capture.capture import StageNames, capture, check_arguments, check_has_data
from lowtide.runtime.compile.compiled import CompiledModel
from lowtide.runtime.measure.backward import wait_for_autograd
from lowtide.runtime.measure.counting import capture_without_data
from lowtide.runtime.measure.figures import Progress, measured_stages
from lowtide.runtime.measure.overhead import stage_overhead
from lowtide.runtime.measure.sides import with_side_values
from lowtide.runtime.measure.stage_figures import StageFigures, unsaved_input_bytes
from lowtide.runtime.measure.stages import UnfaithfulStageError
from lowtide.runtime.measure.timing import NOTHING, Timing, paced
from lowtide.runtime.measure.weights import (
    Optimizer,
    StageWeights,
    existing_state_bytes,
    optimizer_of,
    optimizer_state_bytes,
    stage_weights,
    with_updates,
)
from lowtide.runtime.meter import Meter
from lowtide.runtime.model.call_site import is_compiled
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split
from lowtide.runtime.state.preserve import preserved

# How often stages may be found that cannot be run again as they were cut, each time cutting less finely there.
_MOST_ATTEMPTS = 8

Result = TypeVar("Result")


class Visits(Protocol):
    """Weights that are on the lower tier, and visit the device."""

    @property
    def home_bytes(self) -> int:
        """The bytes of what is on the lower tier, optimizer state included."""

    def visit(self, k: int) -> int:
        """Have those of stage k on the device, and of no other stage; returns the bytes of all that are there."""


def measure(
    model: nn.Module,
    sample: Any,
    *,
    stages: StageNames | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Optimizer = None,
    name: str | None = None,
    grads_resident: bool = False,
    keeps_result: bool = True,
    moves_activations: bool = True,
    progress: Progress | None = None,
) -> Chain:
    """Measure what each stage of a model costs.

    Args:
        model: any module, on the CPU or a CUDA device; it is not changed.
        sample: a tensor, a tuple of positional or a dict of keyword arguments, like those of a training step.
        stages: the stages by hand; see `lowtide.runtime.capture.capture.capture`. None: the finest useful chain.
        loss: what the training loop computes from the model's result; None: the loss in the result where there is one.
        optimizer: the optimizer, a list of several, or its kind (`"adam"`, `"sgd-momentum"`, ...); its state is counted
            and its steps are timed.
        name: of the chain; None: the model's class.
        grads_resident: weight gradients exist from the start (accumulation over several steps).
        keeps_result: the training loop has the model's result in hand while backward runs.
        moves_activations: schedules for this chain may copy activations to the host; False: a stage's input that
            neither it nor the stage before saves does not count beside what it saves.
        progress: called with the current task and the share done, 0 to 1.

    Returns:
        The chain; `provenance` says on what it was measured and how far the times spread.

    Raises:
        CaptureError: where no chain is found, or running it in stages would not give the same numbers; for arguments
            that are wrong.
        SampleError: where the model fails on the sample; the original error is its `__cause__`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        >>> measure(model, torch.zeros(2, 4)).num_stages
        2
    """
    check_arguments(model, stages, loss)
    check_has_data(model)
    check_progress(progress)
    optimizer = optimizer_of(model, optimizer)
    split, chain = capture_and_measure(
        model,
        sample,
        stages=stages,
        loss=loss,
        optimizer=optimizer,
        name=name,
        grads_resident=grads_resident,
        keeps_result=keeps_result,
        moves_activations=moves_activations,
        progress=progress,
    )
    return with_updates(chain, model, split, optimizer)


def capture_and_measure(
    model: nn.Module,
    sample: Any,
    *,
    stages: StageNames | None = None,
    loss: Callable[[Any], Any] | None = None,
    finest: bool = False,
    **options: Any,
) -> tuple[Split, Chain]:
    """Split and measure a model; arguments as for `measure` and `capture`."""

    def work(split: Split) -> Chain:
        return measure_split(model, split, sample, loss=loss, **options)

    return capture_for(work, model, sample, stages=stages, loss=loss, finest=finest)


def capture_for(
    work: Callable[[Split], Result],
    model: nn.Module,
    sample: Any,
    *,
    stages: StageNames | None = None,
    without_running: bool = False,
    **options: Any,
) -> tuple[Split, Result]:
    """The split of a model and what `work` makes of it; other arguments as for `capture`.

    If a stage does something else when it is recomputed, the model is cut less finely there. With `without_running`,
    the model is captured by its shapes alone where that works.
    """
    closed: frozenset[str] = frozenset()
    captured = capture_without_data if without_running else capture
    for _ in range(_MOST_ATTEMPTS):
        split = captured(model, sample, stages=stages, closed=closed, **options)
        try:
            return split, work(split)
        except UnfaithfulStageError as error:
            opened = opened_in(model, split, error.stage)
            if stages is not None or not opened - closed:
                raise
            closed |= opened
    raise CaptureError(f"found no stages that can be recomputed in {_MOST_ATTEMPTS} attempts; name them with stages=")


def opened_in(model: nn.Module, split: Split, k: int) -> frozenset[str]:
    """The submodules whose own code is glue of stage k or beside it, and all others of the same classes."""
    paths = [unit.path for unit in split.stages[k - 1].units]
    paths += [stage.units[-1].path for stage in split.stages[max(0, k - 2) : k - 1]]
    paths += [stage.units[0].path for stage in split.stages[k : k + 1]]
    kinds = {type(model.get_submodule(path)) for path in (_with_code_around(model, path) for path in paths) if path}
    return frozenset(path for path, module in model.named_modules() if path and type(module) in kinds)


def _with_code_around(model: nn.Module, path: str) -> str:
    """The path of the nearest enclosing module that has its own code; "" for the model itself."""
    path = path.rpartition(".")[0]
    while path and isinstance(model.get_submodule(path), nn.Sequential | nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    return path


def measure_split(
    model: nn.Module,
    split: Split,
    sample: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Optimizer = None,
    name: str | None = None,
    grads_resident: bool = False,
    keeps_result: bool = True,
    moves_activations: bool = True,
    progress: Progress | None = None,
    compiled: CompiledModel | None = None,
    allow_rounding: bool = False,
    of_kind: dict[str, StageFigures] | None = None,
    is_replayed: bool = False,
    visits: Visits | None = None,
    moves_side_values: bool = True,
) -> Chain:
    """Measure a model that has been captured; arguments as for `measure`.

    Where steps are replayed as CUDA graphs, launching kernels takes no time. With `moves_side_values` schedules may
    copy side values to the host, too.

    With `compiled`, its variants are measured too, those that compute the same as the stage itself (up to rounding,
    where that is allowed). Stages of kinds that are in `of_kind` were measured before, in another split of the same
    model; the others are added to it. With `visits`, weights are on the lower tier, and on the device while their stage
    runs.
    """
    called = Sample.of(sample)
    device = device_of(model, called)
    state_bytes = optimizer_state_bytes(optimizer, model.parameters())  # before anything is run: it may refuse
    if visits is not None:
        visits.visit(0)
    gc.collect()
    with Meter(device) as meter:
        start_bytes = meter.live_bytes
    with preserved(model), _no_autocast_cache(device, compiled):
        figures, skipping = measured_stages(
            model,
            split,
            called,
            loss,
            device,
            progress,
            compiled,
            keeps_result=keeps_result,
            allow_rounding=allow_rounding,
            of_kind=of_kind,
            visit=None if visits is None else visits.visit,
        )
        overhead = overhead_on(device)
        gc.collect()  # recordings refer to themselves
        wait_for_autograd(device)
        if visits is not None:
            visits.visit(0)
    kept_bytes = torch.cuda.memory_allocated(device) - start_bytes if device.type == "cuda" else 0
    if moves_activations:  # an input that goes by itself cannot be told from one that is moved away
        figures = [figure.with_input_saved() for figure in figures]
    readers = {parameter: k for k, f in enumerate(figures, start=1) for parameter in f.parameters}
    weights, outside = stage_weights(model, split, readers, state_bytes)
    there_bytes = sum(entry.weight_bytes for entry in weights) + existing_state_bytes(model, optimizer)
    there_bytes -= 0 if visits is None else visits.home_bytes
    base_bytes = start_bytes - there_bytes + kept_bytes + outside.weight_grad_bytes
    if not moves_side_values or any(map(is_compiled, model.modules())):  # what compiled code reads is not seen
        skipping = [replace(each, stays=True) for each in skipping]
    side_values = tuple(each.as_side_value(figures) for each in skipping)
    figures = with_side_values(figures, skipping)
    return Chain(
        name or type(model).__name__,
        tuple(_stages(model, split, figures, weights, readers, grads_resident, _ALL if is_replayed else overhead)),
        input_grad_bytes=sum(t.numel() * t.element_size() for t in called.tensors() if t.requires_grad),
        base_bytes=max(0, base_bytes + outside.optimizer_bytes),
        grads_resident=grads_resident,
        side_values=side_values,
        provenance=_provenance(model, called, split, figures, device)
        | {
            "overhead_seconds": [timing.launch_seconds for timing in overhead],  # in each of the launch_seconds
            "side_tensors": [each.tensor for each in skipping],  # by which the executor knows them
            "read_tensors": [list(figure.read) for figure in figures],  # and these in its first step
        },
    )


_ALL = (Timing(0.0, launch_seconds=math.inf),) * 2  # all launching is overhead


def overhead_on(device: torch.device) -> tuple[Timing, Timing]:
    """What running each stage separately adds to forward and backward; nothing on the CPU."""
    return stage_overhead(device) if device.type == "cuda" else (NOTHING, NOTHING)


def device_of(model: nn.Module, sample: Sample) -> torch.device:
    """The one device of a model."""
    devices = {tensor.device for tensor in model.parameters()} or {tensor.device for tensor in sample.tensors()}
    if len(devices) != 1:
        raise CaptureError(
            f"the model is on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}); "
            "move it to one with model.to(device)"
        )
    return devices.pop()


@contextmanager
def _no_autocast_cache(device: torch.device, compiled: CompiledModel | None) -> Iterator[None]:
    """Turn off autocast's cache, which would keep the casts of stages whose data are freed.

    Compiled code is compiled anew where that switch is another, so it is left alone where there is no autocast.
    """
    if compiled is not None and not torch.is_autocast_enabled(device.type):
        yield
        return
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _stages(
    model: nn.Module,
    split: Split,
    figures: Sequence[StageFigures],
    weights: Sequence[StageWeights],
    readers: Mapping[str, int],
    grads_resident: bool,
    overhead: tuple[Timing, Timing],
) -> list[Stage]:
    n = split.num_stages
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    names = list(dict.fromkeys(name for figure in figures for name, _ in figure.variants))
    seconds = _paced_seconds(figures, overhead)
    seconds_as = {name: _paced_seconds([figure.variant(name) for figure in figures], overhead) for name in names}
    # in the stages before the last one the caller still has the result, and the gradients with which backward began
    result_bytes = figures[-1].output_bytes + figures[-1].grad_bytes
    stages = []
    for k, (entry, figure, weight) in enumerate(zip(split.stages, figures, weights, strict=True), start=1):
        kept_bytes = result_bytes if k < n else 0
        # a gradient that a later stage has made already is added to in a third place, autograd's sum of the two
        more_bytes = max((sizes[name] for name in figure.parameters if readers[name] != k), default=0)
        if grads_resident:  # each new gradient stands beside the old one until it is added to it
            more_bytes += figure.largest_weight_grad_bytes
        # a[k-1] counts as stored until backward k; where it goes before, that much less of what stage k saves counts
        gone_bytes = _gone_bytes(figures, k, figure)
        saving_extra_bytes = figure.saving_extra_bytes + gone_bytes
        saved_bytes = figure.saved_bytes - gone_bytes
        in_backward = _backward_change(figure, weight, kept_bytes + more_bytes)
        stage = Stage(
            entry.name,
            forward_seconds=seconds[k - 1][0],
            backward_seconds=seconds[k - 1][1],
            output_bytes=figure.output_bytes,
            saved_bytes=saved_bytes,
            grad_bytes=figure.grad_bytes,
            forward_extra_bytes=max(figure.forward_extra_bytes, saving_extra_bytes) + kept_bytes,
            backward_extra_bytes=max(0, in_backward),
            weight_bytes=weight.weight_bytes,
            weight_grad_bytes=weight.weight_grad_bytes,
            optimizer_bytes=weight.optimizer_bytes,
            rerun_seconds=seconds[k - 1][0] * figure.rerun_share,
            saving_extra_bytes=saving_extra_bytes + kept_bytes,
            outliving=figure.outliving,
            freed_bytes=min(max(0, -in_backward), saved_bytes),
        )
        variants = [
            Variant(
                name,
                *seconds_as[name][k - 1],
                saved,
                each.saving_extra_bytes + gone + kept_bytes,  # only a forward that saves all is counted as a variant's
                max(0, change),
                min(max(0, -change), saved),
            )
            for name, each in figure.variants
            for gone in [_gone_bytes(figures, k, each)]
            for saved in [max(each.saved_bytes - gone, figure.output_bytes)]
            for change in [_backward_change(each, weight, kept_bytes + more_bytes)]
        ]
        stages.append(replace(stage, variants=tuple(_not_dominated(stage, variants))))
    return stages


def _paced_seconds(figures: Sequence[StageFigures], overhead: tuple[Timing, Timing]) -> list[tuple[float, float]]:
    """(forward, backward) of each stage in a step that runs all of them so."""
    forwards = [figure.forward.without_overhead(overhead[0]) for figure in figures]
    backwards = [figure.backward.without_overhead(overhead[1]) for figure in figures]
    seconds = paced([*forwards, *reversed(backwards)])
    return list(zip(seconds[: len(figures)], reversed(seconds[len(figures) :]), strict=True))


def _gone_bytes(figures: Sequence[StageFigures], k: int, figure: StageFigures) -> int:
    """What of a[k-1] is freed once stage k has saved what its backward needs."""
    if k == 1:
        return 0
    return min(unsaved_input_bytes(figures[k - 2], figure), max(0, figure.saved_bytes - figures[k - 1].output_bytes))


def _backward_change(figure: StageFigures, weight: StageWeights, more_bytes: int) -> int:
    """What a backward has at its peak beyond what was stored and its gradients; below 0 where it frees more before."""
    return figure.backward_peak_bytes - weight.weight_grad_bytes + more_bytes


def _not_dominated(stage: Stage, variants: Sequence[Variant]) -> list[Variant]:
    """The variants that neither another variant nor the stage itself equals or beats in time and in all bytes.

    So the least that a model needs does not depend on times: what saves more may have less at its backward's peak.
    """
    kept: list[Variant] = []
    for variant in sorted(variants, key=_figures):  # what beats one comes before it
        before: list[Stage | Variant] = [stage, *kept]
        if not any(all(map(le, _figures(other), _figures(variant))) for other in before):
            kept.append(variant)
    return sorted(kept, key=lambda variant: -variant.saved_bytes)


def _figures(way: Stage | Variant) -> tuple[float, ...]:
    """What is better the less it is."""
    seconds = way.forward_seconds + way.backward_seconds
    return seconds, way.saved_bytes, way.saving_extra_bytes, way.backward_extra_bytes, -way.freed_bytes


def _provenance(
    model: nn.Module, sample: Sample, split: Split, figures: Sequence[StageFigures], device: torch.device
) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "sample": [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in sample.tensors()],
        "dtype": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}),
        "notes": [note for figure in figures for note in figure.notes],
        "num_kinds": len({stage.kind for stage in split.stages}),
        "side_bytes": split.side_bytes,
        "split": split.to_dict(),  # `lowtide.attach` finds the stages by it
        "spread_seconds": [[f.forward.spread_seconds, f.backward.spread_seconds] for f in figures],
        "device_seconds": [[f.forward.seconds, f.backward.seconds] for f in figures],
        "launch_seconds": [[f.forward.launch_seconds, f.backward.launch_seconds] for f in figures],
    }
