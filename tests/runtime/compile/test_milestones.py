"""Values that a compiler saves so that little is recomputed at once: which, and what that changes."""

from __future__ import annotations

import gc
import itertools
import random

import pytest
import torch
from tests.looping import looped
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from lowtide.runtime.compile import must_save
from lowtide.runtime.compile.compiled import _backend
from lowtide.runtime.compile.milestones import _milestones, forward_of, mark_milestones, worth_saving
from lowtide.runtime.meter import Meter

NUM_BLOCKS = 12
WIDTH = 64


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    torch._dynamo.reset()
    gc.collect()


class Block(nn.Module):
    """What it adds to the stream is a product; the rest is cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return x + self.linear(torch.tanh(self.norm(x))) * mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x):
        mask = (torch.arange(x.numel()).view_as(x) % 3 != 0).float()  # for all blocks; no gradient flows through
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def as_run(graph: fx.GraphModule, _):
    def run(args):
        given = list(args)
        args.clear()  # as compiled functions do: what nobody else holds is freed on the way
        return fx.Interpreter(graph).boxed_run(given)

    run._boxed_call = True
    return run


def backend(*, marks: bool, graphs: list[fx.Graph]):
    """The partitioner that inductor uses, with graphs run operation by operation."""

    def partition(joint, inputs, **more):
        if marks:
            mark_milestones(joint.graph, config.activation_memory_budget)
        graphs.append(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **more)

    return aot_autograd(fw_compiler=as_run, bw_compiler=as_run, partition_fn=partition)


def joint_graph_of(model: nn.Module) -> fx.Graph:
    graphs: list[fx.Graph] = []
    torch._dynamo.reset()
    torch.compile(model, dynamic=False, backend=backend(marks=False, graphs=graphs))(torch.randn(512, WIDTH)).backward()
    return graphs[0]


def milestones_of(model: nn.Module) -> list[fx.Node]:
    return _milestones(forward_of(joint_graph_of(model)))


def step(share: float, *, marks: bool) -> tuple[int, list[torch.Tensor], list[fx.Node]]:
    """What a step takes at the most beside what was there, the gradients, and what was marked."""
    model, graphs = Net(), []
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=share):
        compiled = torch.compile(model, dynamic=False, backend=backend(marks=marks, graphs=graphs))
        compiled(x).backward()
        model.zero_grad()
        gc.collect()
        with Meter(torch.device("cpu")) as meter:
            compiled(x).backward()
    marked = [node for node in graphs[0].nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    return meter.peak_bytes - meter.start_bytes, [parameter.grad for parameter in model.parameters()], marked


def test_less_is_there_at_once_with_the_same_gradients() -> None:
    _, expected, _ = step(1.0, marks=False)
    for share in (0.3, 0.2):
        without, _, _ = step(share, marks=False)
        peak, found, marked = step(share, marks=True)
        assert marked
        assert {node.meta["val"].shape for node in marked} == {torch.Size((512, WIDTH))}
        assert peak < 0.85 * without
        assert all(map(torch.equal, found, expected))


def test_two_streams_have_no_milestones_but_at_their_ends_and_marks_stay() -> None:
    class TwoStreams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

        def forward(self, x):
            y = torch.tanh(x)
            for layer in self.layers:
                x, y = x + torch.tanh(layer(y)), y + torch.tanh(layer(x))
            return (x * y).mean()

    assert [node.name for node in milestones_of(TwoStreams())] == ["tanh", "mul"]
    graph = joint_graph_of(Net())
    for node in graph.nodes:
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    mark_milestones(graph, 0.2)
    assert {node.meta["recompute"] for node in graph.nodes} == {CheckpointPolicy.PREFER_RECOMPUTE}


def test_each_block_has_one_whatever_its_forms_and_what_is_small_beside_it() -> None:
    """A sum, the sum rectified and a view of that are one; a table with a gradient, which all blocks read, is small."""

    class Rectified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Parameter(torch.ones(WIDTH))
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x):
            table = self.table.exp()
            for layer in self.layers:
                x = torch.relu(x + torch.tanh(layer(x)) * table).view(512, WIDTH)
            return x.square().mean()

    found = milestones_of(Rectified())
    assert [node.name for node in found[:-1]] == ["relu", *(f"relu_{k}" for k in range(1, 5))]
    assert found[-1].meta["val"].shape == (512, WIDTH)  # the last one, squared


def taken(places, sizes, ends, share) -> float:
    """What backward takes at the most where some milestones are saved, one piece after the other."""
    most, saved_bytes = share * ends[-1] + sum(sizes[place] for place in places), 0
    for first, last in itertools.pairwise([-1, *places, len(sizes)]):
        own, between = sizes[first] if first >= 0 else 0, 0
        saved_bytes += own
        for place in range(max(first, 0), last):
            between += sizes[place] if place > first else 0
            rest = max(0, ends[place] - (ends[first - 1] if first > 0 else 0) - own - between)
            most = max(most, share * ends[place] + saved_bytes + between + (1 - share) * rest)
    return most


@looped("seed", range(40))
def test_no_other_choice_takes_less(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([1, 2, 5, 10]) for _ in range(draw.randint(1, 9))]
    ends = list(itertools.accumulate(size + draw.randint(0, 20) for size in sizes))
    share = draw.choice([0.1, 0.3, 0.5, 0.8])
    choices = (c for n in range(len(sizes) + 1) for c in itertools.combinations(range(len(sizes)), n))
    least = min(taken(choice, sizes, ends, share) for choice in choices)
    assert taken(worth_saving(sizes, ends, share), sizes, ends, share) <= 1.001 * least


@pytest.mark.parametrize("in_part", [True, False])
def test_a_part_of_a_model_has_them_and_variants_of_stages_do_not(monkeypatch, in_part: bool) -> None:
    """With the share that is compiled for; and what was compiled with them is not taken for what was not."""
    asked, passes = [], []
    monkeypatch.setattr(must_save, "mark_milestones", lambda graph, share: asked.append(share))

    def compiled(graph, inputs, *, config_patches):
        passes.append(config_patches["joint_custom_post_pass"])
        passes[-1](graph)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: compiled)
    _backend({"backend": "inductor"}, 0.5, in_part=in_part)(fx.Graph(), [])
    assert asked == [0.5] * in_part
    assert ("milestones" in passes[0].uuid()) == in_part
