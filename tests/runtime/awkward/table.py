"""The awkward models, a row each: whatever the schedule, they must train as they do without lowtide.

A model with a new habit is a new row here. What is not about equal training (a refusal, an error, memory) is a test of
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from benchmarks import coverage_shapes
from tests.runtime.awkward import attributes, buffers, containers, paths, shared, structure
from tests.runtime.training import Numbers, batches, train
from torch import Tensor, nn

Loop = Callable[[nn.Module, list[Tensor]], Numbers]


@dataclass(frozen=True)
class Awkward:
    """A model and how it is trained.

    Args:
        name: what it does.
        kind: makes it; the generators are seeded before.
        shape: of its input.
        num_steps: how long it is trained.
        loop: trains it and gives every number by name.
        num_stages: how many stages measuring must find at least.
        measured: makes the model that is measured in its place.
        skips: whether it leaves stages out at random.
        refused: whether measuring refuses it; its children are the stages then.
        fitted: with how large a batch it is also planned for, under a budget with which stages are recomputed; 0: it is
            not.
        tokens: whether its input is whole numbers below 11.
    """

    name: str
    kind: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_steps: int = 3
    loop: Loop = train
    num_stages: int = 4
    measured: Callable[[], nn.Module] | None = None
    skips: bool = False
    refused: bool = False
    fitted: int = 0
    tokens: bool = False

    def make(self) -> nn.Module:
        """Always the same model."""
        torch.manual_seed(0)
        return self.kind()

    def make_measured(self) -> nn.Module:
        """The model whose stages are those of this one."""
        torch.manual_seed(0)
        return (self.measured or self.kind)()

    def inputs(self, batch_size: int | None = None) -> list[Tensor]:
        """Always the same batches."""
        found = batches((batch_size or self.shape[0], *self.shape[1:]), self.num_steps)
        return [(x.abs() * 4).long() % 11 for x in found] if self.tokens else found


def stack(kind: Callable[[], nn.Module], depth: int = 4) -> Callable[[], nn.Sequential]:
    """Makes a row of such blocks."""
    return lambda: nn.Sequential(*(kind() for _ in range(depth)))


NARROW = (8, attributes.NARROW)
WIDE = (8, attributes.WIDTH)

BUFFERS = [
    *(
        Awkward(name, kind, buffers.SHAPE, num_steps=4)
        for name, kind in {
            "queue": buffers.Queued,
            "counter": buffers.Counting,
            "codebook": buffers.Quantized,
            "buffer replaced": buffers.Replacing,
            "buffer given other data": buffers.OtherData,
            "buffer replaced in a unit called twice": buffers.CalledTwice,
            "buffer read before its unit": buffers.Banked,
            "view of a buffer crosses stages": buffers.Viewing,
            "growing buffer": buffers.Growing,
        }.items()
    ),
    Awkward("average across stages", buffers.Averaging, buffers.SHAPE, num_steps=4, fitted=256),
    *(
        Awkward(f"two forwards: {name}", kind, buffers.SHAPE, 2, loop=buffers.two_forwards)
        for name, kind in {"average": buffers.Averaging, "queue": buffers.Queued, "bank": buffers.Banked}.items()
    ),
    Awkward("empty buffer is filled", stack(partial(buffers.Filled, late=False)), buffers.SHAPE, 4),
    Awkward("forward registers a buffer", stack(partial(buffers.Filled, late=True)), buffers.SHAPE, 4, refused=True),
    Awkward("functional_call", stack(buffers.AddsBuffer), buffers.SHAPE, 1, loop=buffers.with_other_buffers),
    *(
        Awkward(f"model counts steps, {name}", partial(buffers.CountsSteps, reads=reads), buffers.SHAPE, 4, fitted=256)
        for name, reads in {"unread": False, "read": True}.items()
    ),
]

ATTRIBUTES = [
    Awkward("factor changes in each call", stack(partial(attributes.Annealed, 1)), WIDE, fitted=256),
    Awkward("path changes after a warm-up", partial(attributes.WarmingUp, 2), (64, 16), 5),
    # 16 steps are longer than anything that could watch the first steps only
    Awkward("factor changes late", stack(partial(attributes.Annealed, 16)), WIDE, 18, fitted=256),
    Awkward(
        "factor set between two forwards",
        stack(partial(attributes.Annealed, 10_000)),
        WIDE,
        2,
        loop=attributes.with_other_factors,
        fitted=256,
    ),
    *(
        Awkward(f"model tells {how}", partial(attributes.Telling, shares=shares), NARROW, num_stages=5)
        for how, shares in {"each block a number": False, "all blocks a number": True}.items()
    ),
    *(
        Awkward(f"reads statistics: {way}", stack(partial(attributes.ReadsStatistics, way)), WIDE, fitted=fitted)
        for way, fitted in {"helper": 0, "named_buffers": 0, "built name": 256}.items()
    ),
    *(
        Awkward(f"attribute {way}", stack(partial(attributes.Unregistered, way)), NARROW)
        for way in (
            "averaged",
            "only_counted",
            "handed_to_the_next",
            "with_its_graph",
            "in_a_tuple",
            "in_a_dict",
            "in_an_array",
            "in_another_array",
            "made_in_the_first_call",
        )
    ),
    *(
        Awkward(f"attribute in place: {way}", stack(partial(attributes.ChangedInPlace, way)), NARROW, 6, refused=True)
        for way in ("averaged", "made_first", "made_late", "as_numpy_counts")
    ),
    *(
        Awkward(f"loop changes a {kind}", stack(partial(attributes.Scaled, kind)), NARROW, loop=attributes.decaying)
        for kind in ("buffer", "tensor", "tuple", "dict")
    ),
]

CONTAINERS = [
    *(
        Awkward(
            f"loop clears a list, {name}",
            partial(containers.Mixture, detached=detached),
            WIDE,
            loop=containers.clearing,
            num_stages=6,
            fitted=0 if detached else 256,
        )
        for name, detached in {"with graphs": False, "without graphs": True}.items()
    ),
    Awkward("list grows with each step", partial(containers.Mixture, detached=True), WIDE, num_stages=6, fitted=256),
    *(
        Awkward(f"history, {kind}", stack(partial(containers.Remembers, kind)), WIDE, 4)
        for kind in ("growing", "bounded", "deque", "long")
    ),
    *(
        Awkward(f"dict made anew, {kind}", stack(partial(containers.Reports, kind)), WIDE)
        for kind in ("tensor", "list")
    ),
    Awkward("dict that all blocks have", containers.sharing, WIDE, refused=True),
    Awkward("large dict that all blocks have", partial(containers.sharing, 5000), WIDE, refused=True),
    Awkward("dict that lets nothing be taken out", stack(containers.Sealing), WIDE),
]

PATHS = [
    *(
        Awkward(
            f"layers left out: {way}",
            partial(paths.Skipping, way),
            (16, paths.WIDTH),
            5,
            measured=paths.whole,
            skips=True,
        )
        for way in ("skips", "ends")
    ),
    *(
        Awkward(
            f"layers left out of the sample too, {share}",
            partial(paths.Skipping, "skips", share, nn.LayerNorm),
            (16, paths.WIDTH),
            5,
            skips=True,
            fitted=fitted,
        )
        for share, fitted in {0.2: 0, 0.6: 256}.items()
    ),
    Awkward(
        "layers with statistics left out of the sample too",
        partial(paths.Skipping, "skips", 0.4),
        (16, paths.WIDTH),
        5,
        skips=True,
    ),
    *(Awkward(f"{way} in a block", stack(partial(paths.Mapped, way)), (32, paths.WIDTH)) for way in ("vmap", "jvp")),
    Awkward("vmap makes a mask", paths.Masked, (32, paths.WIDTH), num_stages=2),
    Awkward("vmap between submodules of a block", paths.with_a_block, (32, paths.WIDTH)),
    Awkward("kernels chosen between submodules", paths.Attends, (4, 24, 32), 2),
]

STRUCTURE = [
    Awkward("residual blocks with dropout", partial(structure.Transformerlike, dropout=0.3), (4, 6, 8)),
    Awkward("in place, as torchvision writes it", structure.InplaceResnet, (2, 3, 8, 8)),
    Awkward("writes into the list it was given", structure.HighResolution, (4, 8)),
    Awkward("dense connections", partial(structure.Dense, 5), (2, 3, 8, 8), num_stages=3),
    Awkward("auxiliary head in a dataclass", structure.Auxiliary, (4, 6, structure.WIDTH)),
    Awkward("one block called four times", structure.Recurrent, (4, 8)),
    Awkward("tied weights", structure.Tied, (2, 5), tokens=True, num_stages=3),
    Awkward("tensor in an attribute of another block", structure.SideChannel, (4, 8), num_stages=3),
    Awkward("two streams", structure.TwoStreams, (4, 8)),
    Awkward(
        "low rank beside frozen", stack(lambda: nn.Sequential(structure.LowRank(), nn.Tanh())), (4, structure.WIDTH)
    ),
    Awkward("block called for parts", stack(structure.InParts), (8, structure.WIDTH)),
    Awkward("autograd functions between blocks", structure.CustomFunctions, (4, 8)),
    Awkward(
        "autograd functions that call modules",
        lambda: nn.Sequential(*(structure.ReversibleBlock() for _ in range(4))),
        (4, structure.WIDTH),
        num_stages=3,
    ),
    Awkward("errors that blocks catch", stack(structure.FallsBack), (8, structure.WIDTH), fitted=256),
    Awkward("weights that blocks compute", stack(structure.Hypernetwork), (64, structure.WIDTH)),
    Awkward("full backward hooks", structure.hooked, (4, 8)),
    Awkward("U-Net", partial(coverage_shapes.UNet, 4, 2), (2, 3, 8, 8), num_stages=10),
    Awkward("losses left in attributes", partial(coverage_shapes.LossyBlocks, 16, 4), (8, 16), num_stages=5),
    Awkward("losses handed to a closure", partial(coverage_shapes.ReportingBlocks, 16, 4), (8, 16), num_stages=5),
    Awkward("paths of feature maps", coverage_shapes.PathDetector, (2, 3, 32, 32), num_stages=15),
]

SHARED = [
    *(
        Awkward(f"blocks share a place: {kind}", partial(shared.sharing, kind), (8, 8), num_stages=10, fitted=fitted)
        for kind, fitted in {"object": 0, "dataclass": 0, "closure": 256}.items()
    ),
    Awkward("layers share an object", partial(shared.tapped, is_view=False), (8, 8), num_stages=6),
    Awkward("layers share an object with views", partial(shared.tapped, is_view=True), (8, 8), num_stages=6),
    Awkward("condition set in layers", shared.Conditions, (8, 8), num_stages=6, fitted=256),
]

ROWS = [*BUFFERS, *ATTRIBUTES, *CONTAINERS, *PATHS, *STRUCTURE, *SHARED]
