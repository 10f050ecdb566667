"""What a model would save as one compiled region, found before anything of it is compiled to machine code.

A compiler traces forward and backward, and then decides what the one saves for the other. That takes a fraction of the
time of a compilation, and tells what there is at once when forward ends: where that is too much, nothing need be
compiled to know it. What was found is kept on disk beside what compilers keep there: the next start, and the next plan
during training, would find the same.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx, nn

from lowtide.errors import LowtideError
from lowtide.files import read_json, write_json
from lowtide.runtime.compile.milestones import bytes_of, forward_of, mark_milestones, owner_of
from lowtide.runtime.compile.modes import in_training
from lowtide.runtime.compile.must_save import mark, pass_that_marks
from lowtide.runtime.compile.op_times import made_up
from lowtide.runtime.compile.regions import Grouping, RegionLayer, regions_handed_to
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split


@dataclass(frozen=True, slots=True)
class Saved:
    """The bytes that forward leaves for backward.

    Args:
        all_bytes: where the compiler saves what it likes.
        marked_bytes: of what a part saves beside its share: what must not be recomputed, and milestones.
    """

    all_bytes: int
    marked_bytes: int

    def and_also(self, other: Saved) -> Saved:
        """By two graphs."""
        return Saved(self.all_bytes + other.all_bytes, self.marked_bytes + other.marked_bytes)

    def less(self, other: Saved) -> Saved:
        """By one of two graphs."""
        return Saved(self.all_bytes - other.all_bytes, self.marked_bytes - other.marked_bytes)


def saved_as_one(
    model: nn.Module, split: Split, sample: Sample, options: Mapping[str, Any], share: float
) -> Saved | None:
    """What a model would save as one region that inductor compiles; None: it saves nothing, or torch does not tell.

    The model is called, but none of what Dynamo traces runs: its result is made up.

    Args:
        model: the model.
        split: its stages.
        sample: what it is called with.
        options: for inductor.
        share: of what it saves, that a part would keep: milestones depend on it.

    Raises:
        NoRegionsError, and Dynamo's own errors: where the model has no regions.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    own = "custom_partitioner_fn"
    if getattr(config, own, True) is not None or own in options:  # torch has no such setting, or the user has set it
        return None
    if functorch_config.activation_memory_budget != 1:  # less is saved already, as the user has set it
        return None
    foresight = _Foresight(options, share)
    layer = RegionLayer(model, split, ((foresight,), (foresight,)), [1] * split.num_stages, None)
    with in_training(model), torch.enable_grad():
        layer.push()
        try:
            with regions_handed_to(lambda _, region, args: region(*args), model, Grouping((split.num_stages,))):
                sample.call(model)
        finally:
            layer.remove()
    found = foresight.saved
    return found if found.all_bytes else None


class _EnoughError(Exception):
    """All that was asked is known."""


class _Foresight:
    """Takes graphs as a compiler does, and finds what they would save; what it makes of them computes nothing.

    A region may be more than one graph: it is cut behind results that it goes on computing with. Of what crosses from
    one graph to the next, what is saved is there whatever share is kept.
    """

    is_kept = False

    def __init__(self, options: Mapping[str, Any], share: float) -> None:
        self._options, self._share = options, share
        self._crossing: list[torch.Tensor] = []
        self._enters: list[bool] = []
        """For each input of the graph that is looked at, whether another graph has made it."""
        self.saved = Saved(0, 0)

    def compiled_graph(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Find what the graph saves, if it has a backward."""
        from torch._inductor.compile_fx import compile_fx  # importing it takes seconds

        results = [node.meta["example_value"] for node in graph.graph.output_node().all_input_nodes]
        self._enters = [any(tensor is other for other in self._crossing) for tensor in inputs]
        path = _path_for(graph, inputs, self._enters, self._options, self._share)
        before, known = self.saved, _kept_in(path)
        patches = {**self._options, "custom_partitioner_fn": _partitioner(self._found), "force_disable_caches": True}
        if known is not None:
            self.saved = before.and_also(known)
        else:
            with suppress(_EnoughError):
                compile_fx(graph, inputs, inner_compile=_enough, config_patches=patches)
            _keep_in(path, self.saved.less(before))
        made = tuple(made_up(each).requires_grad_(each.requires_grad) for each in results)
        self._crossing += made
        return lambda *_: made

    def _found(self, joint: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> NoReturn:
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch.utils.checkpoint import CheckpointPolicy

        marked = copy.deepcopy(joint.graph)
        placeholders = joint.graph.find_nodes(op="placeholder")  # gradients of results come last
        entering = {node.name for node, enters in zip(placeholders, self._enters, strict=False) if enters}
        forward, _ = min_cut_rematerialization_partition(joint, inputs, **more)
        ends: Any = forward.graph.output_node().args[0]
        saved = {owner_of(each) for each in ends[more["num_fwd_outputs"] :] if isinstance(each, fx.Node)}
        own_bytes = sum(bytes_of(each) for each in saved if each.op != "placeholder")
        crossing_bytes = sum(bytes_of(each) for each in saved if each.name in entering)
        mark(marked)
        mark_milestones(marked, self._share)
        must_save = [n for n in forward_of(marked) if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
        returned = set(map(owner_of, marked.output_node().all_input_nodes))
        marked_bytes = sum(bytes_of(node) for node in must_save if node not in returned)
        self.saved = self.saved.and_also(Saved(own_bytes + crossing_bytes, marked_bytes + crossing_bytes))
        raise _EnoughError


def _enough(*_: Any, **__: Any) -> NoReturn:
    raise _EnoughError


def _partitioner(found: Callable[..., NoReturn]) -> Any:
    """What inductor calls with the graph of forward and backward, after its own passes over it."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Foreseeing(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **more: Any) -> NoReturn:
            found(gm, joint_inputs, **more)

        def uuid(self) -> None:
            """It has none: nothing is kept on disk."""

    return Foreseeing()


# On disk


def _path_for(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], *settings: Any) -> Path | None:
    """Where it is kept what a graph saves; None: nowhere, since its code and its inputs do not tell all of it, or the
    compiler keeps nothing either.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    if any(node.op in ("get_attr", "call_module") for node in graph.graph.nodes):
        return None
    devices = sorted({tensor.device.type for tensor in inputs})
    casts = [torch.is_autocast_enabled(each) and str(torch.get_autocast_dtype(each)) for each in devices]
    around = torch.are_deterministic_algorithms_enabled(), casts
    version = torch.__version__, pass_that_marks(milestones=True).uuid()
    try:
        told = json.dumps([version, graph.code, list(map(_described, inputs)), around, settings], sort_keys=True)
    except TypeError:  # options that are functions
        return None
    return Path(cache_dir()) / "lowtide" / f"{hashlib.sha256(told.encode()).hexdigest()}.json"


def _described(tensor: torch.Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return f"{tensor.dtype} {tuple(tensor.shape)} {strides} {tensor.device} {tensor.requires_grad}"


def _kept_in(path: Path | None) -> Saved | None:
    """What was kept; None: nothing, or something else, so that it is found anew."""
    if path is None:
        return None
    try:
        values = read_json(path, LowtideError)
    except LowtideError:
        return None
    is_whole = isinstance(values, dict) and {*values} == {"all_bytes", "marked_bytes"}
    return Saved(**values) if is_whole and all(type(each) is int for each in values.values()) else None


def _keep_in(path: Path | None, found: Saved) -> None:
    if path is not None:
        with suppress(LowtideError, OSError):  # a folder that cannot be written to: it is found anew each time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(found))
