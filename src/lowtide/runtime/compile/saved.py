"""What a model would save as one compiled region, found before anything of it is compiled to machine code.

A compiler traces forward and backward, and then decides what the one saves for the other. That takes a fraction of the
time of a compilation, and tells what there is at once when forward ends: where that is too much, nothing need be
compiled to know it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn

from lowtide.runtime.compile.cutting import NoRegionsError
from lowtide.runtime.compile.milestones import bytes_of, mark_milestones, owner_of
from lowtide.runtime.compile.modes import in_training
from lowtide.runtime.compile.must_save import mark
from lowtide.runtime.compile.regions import Grouping, RegionLayer, not_one_graph, regions_handed_to
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


def saved_as_one(
    model: nn.Module, split: Split, sample: Sample, options: Mapping[str, Any], share: float
) -> Saved | None:
    """What a model would save as one region that inductor compiles; None: it has none, or torch does not tell.

    The model is called, up to where its region would run.

    Args:
        model: the model.
        split: its stages.
        sample: what it is called with.
        options: for inductor.
        share: of what it saves, that a part would keep: milestones depend on it.
    """
    from torch._inductor import config

    if getattr(config, "custom_partitioner_fn", True) is not None:  # there is none, or one of the user's
        return None
    foresight = _Foresight(options, share)
    layer = RegionLayer(model, split, ((foresight,), (foresight,)), [1] * split.num_stages, None)
    stops: tuple[type[Exception], ...] = (_EnoughError, *not_one_graph())
    with in_training(model), torch.enable_grad():
        layer.push()
        try:
            grouping = Grouping((split.num_stages,))
            with regions_handed_to(lambda _, region, args: region(*args), model, grouping):
                sample.call(model)
        except stops:
            pass
        finally:
            layer.remove()
    return foresight.saved


class _EnoughError(Exception):
    """All that was asked is known."""


class _Foresight:
    """Takes graphs as a compiler does, and finds what they would save; what it makes of them cannot be run."""

    def __init__(self, options: Mapping[str, Any], share: float) -> None:
        self._options, self._share = options, share
        self.saved: Saved | None = None

    def compiled_graph(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., NoReturn]:
        """Find what the graph saves."""
        from torch._inductor.compile_fx import compile_fx  # importing it takes seconds

        patches = {**self._options, "custom_partitioner_fn": _partitioner(self._found), "force_disable_caches": True}
        try:
            compile_fx(graph, inputs, config_patches=patches)
        except _EnoughError:
            return _stop
        raise NoRegionsError("there is no backward")

    def _found(self, joint: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> NoReturn:
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch.utils.checkpoint import CheckpointPolicy

        marked = copy.deepcopy(joint)
        forward, _ = min_cut_rematerialization_partition(joint, inputs, **more)
        ends: Any = forward.graph.output_node().args[0]
        saved = {owner_of(each) for each in ends[more["num_fwd_outputs"] :] if isinstance(each, fx.Node)}
        num_bytes = sum(bytes_of(each) for each in saved if each.op != "placeholder")
        mark(marked.graph)
        mark_milestones(marked.graph, self._share)
        must_save = (n for n in marked.graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE)
        self.saved = Saved(num_bytes, sum(map(bytes_of, must_save)))
        raise _EnoughError


def _stop(*_: Any) -> NoReturn:
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
