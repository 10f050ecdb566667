"""Regions: all that a model's forward does is compiled, joined where the schedule treats stages alike."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import itertools
import json
import logging
import math
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.looping import looped
from tests.runtime.schedules import random_schedule
from tests.runtime.training import assert_equal, gradients, train
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide import Backward, Forward, Schedule
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile.compiled import Compilation, _compiled_function, _is_padded, num_alike
from lowtide.runtime.compile.cutting import NoRegionsError
from lowtide.runtime.compile.regions import forget_regions, regions_of
from lowtide.runtime.execute.checks import Checks
from lowtide.runtime.fitting import compiling, fit, trials
from lowtide.runtime.fitting.shares import in_one_stage
from lowtide.runtime.fitting.solving import Settings
from lowtide.runtime.measure.measure import measure_split
from lowtide.runtime.meter import exclude
from lowtide.runtime.plan.attach import attach
from lowtide.runtime.plan.steps import RealSteps

# The partitioner that inductor uses, with graphs run operation by operation: nothing is compiled to machine code.
BACKEND = "aot_eager_decomp_partition"
# Dynamo's graphs as they are: where only what is compiled, and as how many graphs, is asked for. A fifth of the time.
UNPARTITIONED = "eager"
WORDS, LENGTH, WIDTH = 40, 6, 16
OPTIONS = {"bandwidth": 0, "strategy": "rotor", "variants": False}
LOGGER = logging.getLogger("model")
REGIONS = {"regions": True, "backend": BACKEND}
SETTINGS = Settings(2**30, "rotor", 0, 0, "sgd", None, None, False, True, None, Checks.SPOT, None)


class Block(nn.Module):
    """Changes buffers, draws random numbers, and hands two tensors on."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        gate, value = self.up(self.norm(x.flatten(0, 1)).view(x.shape)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.gelu(gate) * value))


class Language(nn.Module):
    """Embeddings, a mask that every block could read, code between the blocks, a head and a loss."""

    def __init__(self, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.loss = F.cross_entropy

    def forward(self, text):
        mask = torch.sigmoid(torch.arange(text.shape[1], device=text.device) / LENGTH).unsqueeze(-1)
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x) * mask
        scores = self.head(self.norm(x))
        return self.loss(scores.flatten(0, 1), text.flatten())


class SimpleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.sigmoid(F.gelu(self.linear(x)))


class Simple(nn.Module):
    """Traced in a third of the time: where only what is compiled, and which plan is taken, is asked for."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(SimpleBlock() for _ in range(depth))

    def scores(self, text):
        x = self.tokens(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, text):
        return F.cross_entropy(self.scores(text).flatten(0, 1), text.flatten())


def texts(number: int = 2, batch: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (batch, LENGTH), generator=generator) for _ in range(number)]


@functools.cache
def compiled_numbers(build=Language, *settings, backend=BACKEND, batch: int = 4) -> dict[str, torch.Tensor]:
    """Training of the model compiled as a whole, without lowtide."""
    model = build(*settings)
    model.compile(backend=backend, dynamic=False)
    return {name: exclude(number) for name, number in train(model, texts(batch=batch)).items()}


class Counting:
    """A backend that keeps the functions of torch in each graph that it compiles."""

    def __init__(self, backend: str = UNPARTITIONED) -> None:
        self.graphs: list[set[object]] = []
        self._backend = backend

    def __call__(self, graph, inputs):
        self.graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return torch._dynamo.lookup_backend(self._backend)(graph, inputs)


def regions_with(backend) -> dict[str, object]:
    return {"compile_stages": {"regions": True, "backend": backend}}


def auto_with(backend) -> dict[str, object]:
    return {"compile_stages": {"regions": "auto", "backend": backend}}


def less_than_all(plan: lowtide.Plan) -> int:
    """A budget in which a step that stores everything does not fit; not a share of what else lives in this process."""
    base_bytes = plan.chain.base_bytes
    return base_bytes + int(0.8 * (plan.stats().predicted_peak_bytes - base_bytes))


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind():
    """Other tests count all live tensors, and compilations."""
    yield
    compiled_numbers.cache_clear()
    forget_regions()
    _compiled_function.cache_clear()
    torch._dynamo.reset()
    gc.collect()


def in_regions(model, backend=BACKEND, budgets=(), **options):
    split = capture(model, texts()[0], blocks=True)
    compiled = Compilation({"backend": backend, "dynamic": False}, tuple(budgets), regions=True).of(model, split)
    return split, compiled, measure_split(model, split, texts()[0], compiled=compiled, **options)


def solution_of(chain: lowtide.Chain, schedule: Schedule) -> lowtide.Solution:
    solution = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all", manage_weights=False)
    return dataclasses.replace(solution, schedule=schedule)


def stored(num_stages: int) -> Schedule:
    stages = range(1, num_stages + 1)
    return Schedule("stored", [*(Forward(k, "all") for k in stages), *(Backward(k) for k in reversed(stages))])


@pytest.fixture(scope="module")
def expected():
    return compiled_numbers(Language, 3, 0.1)


@pytest.fixture(scope="module", params=[(0.1, ()), (0.0, (0.0,))], ids=["dropout", "variants"])
def measured(request):
    dropout, budgets = request.param
    model = Language(dropout=dropout)
    split, compiled, chain = in_regions(model, budgets=budgets)
    assert any(stage.num_variants > 1 for stage in chain.stages) == bool(budgets)
    yield model, split, chain, compiled_numbers(Language, 3, dropout)
    compiled.remove()
    assert regions_of(model) is None


@looped("seed", range(5))
def test_any_schedule_in_regions_gives_the_numbers_of_the_compiled_model(measured, seed: int) -> None:
    model, split, chain, expected = measured
    model.load_state_dict(Language().state_dict())
    drawn = random_schedule(chain.num_stages, seed, moves=0.4 * (seed % 3 == 2))
    operations = [
        Forward(op.stage, "all", seed % chain.stage(op.stage).num_variants)
        if isinstance(op, Forward) and op.save == "all"
        else op
        for op in drawn.operations
    ]
    with attach(model, solution_of(chain, Schedule("random", operations)), split=split, strict=seed == 0):
        assert_equal(train(model, texts()), expected)


def test_everything_that_runs_is_compiled_and_equal_stages_share_it() -> None:
    backend, model = Counting(), Simple(depth=5)
    num_before = counters["stats"]["unique_graphs"]
    split, compiled, chain = in_regions(model, backend)
    assert split.num_stages > 5
    # the first block is compiled with what comes before it, the last one with nothing, the middle ones once
    assert len(backend.graphs) <= split.num_stages - 3
    assert any(F.embedding in graph for graph in backend.graphs)
    assert any(F.cross_entropy in graph for graph in backend.graphs)
    num_graphs = len(backend.graphs)
    with attach(model, solution_of(chain, stored(split.num_stages)), split=split):
        train(model, texts())
    compiled.remove()
    assert len(backend.graphs) == num_graphs + 1  # all stages joined
    assert {F.embedding, F.cross_entropy, F.gelu} <= backend.graphs[-1]
    # the model is traced once, however often it is cut, and its pieces not at all
    _, compiled, _ = in_regions(model, backend)
    compiled.remove()
    assert counters["stats"]["unique_graphs"] - num_before == 1


class Counted(nn.Module):
    """Calls methods of what it is given, and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(self.norm(x.view(-1, WIDTH)))).mean()


def test_what_was_compiled_is_found_on_disk_at_the_next_start() -> None:
    def step() -> collections.Counter[str]:
        before, model, x = collections.Counter(counters["aot_autograd"]), Counted(), torch.ones(2, 3, WIDTH)
        split = capture(model, x).with_at_most(1)
        chain = in_one_stage(measure_split(model, split, x), split.stages[0].name, 0.5)
        compiled = Compilation({"dynamic": False}, (0.5,), regions=True).of(model, split)
        in_part = Schedule("in part", [Forward(1, "all", 1), Backward(1)])
        with attach(model, solution_of(chain, in_part), split=split):
            model(x).backward()
        compiled.remove()
        forget_regions()
        torch._dynamo.reset()
        return collections.Counter(counters["aot_autograd"]) - before

    with fresh_cache():
        first, second = step(), step()
    assert first["autograd_cache_saved"] > 0
    assert first["autograd_cache_bypass"] == second["autograd_cache_bypass"] == 0
    assert second["autograd_cache_hit"] == first["autograd_cache_miss"] + first["autograd_cache_hit"]


def test_a_model_with_another_block_is_traced_anew() -> None:
    model, found = Simple(depth=2), []
    for _ in range(2):
        _, compiled, chain = in_regions(model, UNPARTITIONED)
        compiled.remove()
        found.append([stage.saved_bytes for stage in chain.stages])
        model.blocks[1] = SimpleBlock()
    assert found[0] == found[1]


def test_stages_that_are_recomputed_together_are_one_region() -> None:
    backend, model = Counting(), Language(depth=4, dropout=0.0)
    split, compiled, chain = in_regions(model, backend)
    n, num_graphs = split.num_stages, len(backend.graphs)
    forwards = [Forward(1, "keep"), Forward(2, "drop"), Forward(3, "drop")]
    forwards += [Forward(k, "all") for k in range(4, n + 1)]
    again = [Forward(k, "all") for k in (1, 2, 3)]
    operations = [*forwards, *(Backward(k) for k in range(n, 3, -1)), *again, *(Backward(k) for k in (3, 2, 1))]
    with attach(model, solution_of(chain, Schedule("segment", operations)), split=split):
        found = train(model, texts())
    compiled.remove()
    assert len(backend.graphs) == num_graphs + 2
    assert_equal(found, compiled_numbers(Language, 4, 0.0, backend=UNPARTITIONED))


@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the numbers of each step
def test_fit_stores_everything_as_one_region_where_there_is_room(expected, tmp_path) -> None:
    backend, model = Counting(), Language()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages=REGIONS, **OPTIONS) as plan:
        assert plan.schedule.strategy == "store-all"
        assert regions_of(model) is not None
        plan.save(tmp_path / "plan.json")
        assert_equal(train(model, texts()), expected)
    assert regions_of(model) is None
    again = Language()
    with lowtide.load_plan(tmp_path / "plan.json", again):
        assert_equal(train(again, texts()), expected)
    model = Simple()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", **OPTIONS, **regions_with(backend)):
        train(model, texts())
        assert len(backend.graphs) == 1
        train(model, texts(batch=3))  # of another shape, regions are single stages, which equal ones share
        assert 2 < len(backend.graphs) < 1 + len(regions_of(model).split.stages)
        with torch._dynamo.config.patch(recompile_limit=1):
            model(texts(batch=2)[0]).backward()  # of one shape more than the compiler's limit
    assert json.loads((tmp_path / "plan.json").read_text())["compilation"]["regions"] is True


class WithScores(Simple):
    """Returns what its loss is computed of, too, as models of transformers do."""

    def forward(self, text):
        scores = self.scores(text)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), text.flatten()), "scores": scores}


def test_scores_that_are_returned_beside_the_loss_have_no_gradient_of_their_own() -> None:
    backend, model, text = Counting(BACKEND), WithScores(2), texts(batch=64)[0]
    with lowtide.fit(model, text, memory_budget="1GiB", **OPTIONS, **regions_with(backend)):
        assert len(backend.graphs) == 2
        assert F.cross_entropy in backend.graphs[-1]
        plain = WithScores(2)
        plain.compile(backend=BACKEND, dynamic=False)
        for each in (model, plain):
            result = each(text)
            (result["loss"] + result["scores"].square().mean()).backward()
        assert_equal(dict(gradients(model)), dict(gradients(plain)))
        loss = model(text)["loss"]
        with Zeros() as seen:
            loss.backward()
        assert not seen.sizes


class Zeros(TorchDispatchMode):
    """Sees the sizes of tensors of zeros that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.zeros.default:
            self.sizes.append(result.shape)
        return result


class ReadsOnHost(Simple):
    """Is not one graph."""

    def forward(self, text):
        if text.float().mean().item() < 0:
            raise ValueError
        return super().forward(text)


def test_a_model_that_is_not_one_graph_has_its_blocks_compiled() -> None:
    backend, model = Counting(), ReadsOnHost()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", **OPTIONS, **regions_with(backend)):
        assert regions_of(model) is None
        assert backend.graphs
        by_hand = ReadsOnHost()
        for block in by_hand.blocks:
            block.compile(backend=UNPARTITIONED, dynamic=False)
        assert_equal(train(model, texts()), train(by_hand, texts()))


class Tied(Simple):
    """One block under two names, which is called under both of them, and under one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]

    def scores(self, text):
        return self.head(self.blocks[0](self.blocks[1](self.blocks[2](self.blocks[0](self.tokens(text))))))


def test_a_block_with_two_names_is_compiled_in_regions() -> None:
    backend = Counting(BACKEND)
    model = Tied()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", **OPTIONS, **regions_with(backend)) as plan:
        found = train(model, texts())
    assert not any("no regions" in note for note in plan.notes)
    assert len(backend.graphs) == 1
    assert_equal(compiled_numbers(Tied), found)


class InOnePrecision(Simple):
    """Is one graph that cannot be cut: what ends the precision needs what began it."""

    def forward(self, text):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(text)


def test_a_graph_that_cannot_be_cut_runs_as_one_for_other_shapes_too() -> None:
    model, inputs = InOnePrecision(), [*texts(1), *texts(1, batch=3)]
    with lowtide.fit(model, inputs[0], memory_budget="1GiB", **OPTIONS, **regions_with(UNPARTITIONED)) as plan:
        assert_equal(train(model, inputs), train(InOnePrecision(), inputs))
        assert plan.stats().num_steps == len(inputs)
        assert regions_of(model) is not None
    with pytest.raises(NoRegionsError, match=r"^_enter_autocast gives something else than a tensor"):
        in_regions(InOnePrecision(), UNPARTITIONED)


class Watched(Language):
    """From some step on, it reads values on the host, or numbers that it computes with."""

    reads = ""

    def forward(self, text):
        loss = super().forward(text)
        if self.reads == "compares":
            return loss if loss.item() > 0 else -loss
        return loss * (1 + 0 * loss.item()) if self.reads else loss


@pytest.mark.parametrize("reads", ["compares", "computes"])
@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the numbers of each step
def test_a_model_that_is_one_graph_no_more_trains_on_in_blocks(reads: str, tmp_path) -> None:
    model, by_hand = Watched(), Watched()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages=REGIONS, **OPTIONS) as plan:
        train(model, texts())
        assert regions_of(model) is not None
        plan.save(tmp_path / "plan.json")
        model.load_state_dict(by_hand.state_dict())
        model.reads = by_hand.reads = reads
        with pytest.warns(lowtide.LowtideWarning, match="does not run in regions any more: .*one by one from now on"):
            found = train(model, texts(4))
        assert regions_of(model) is None
        assert plan.stats().num_steps == 2 + 4
    for block in by_hand.blocks:
        block.compile(backend=BACKEND, dynamic=False)
    assert_equal(found, train(by_hand, texts(4)))
    model = Watched()
    model.reads = reads
    with lowtide.load_plan(tmp_path / "plan.json", model), pytest.raises(lowtide.PlanError, match="call fit again"):
        model(texts()[0])


def test_errors_of_the_model_are_its_own() -> None:
    model, wrong = Language(), torch.full((4, LENGTH + 1), 1)
    with pytest.raises(IndexError) as expected:
        Language()(wrong)
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages=REGIONS, **OPTIONS) as plan:
        with pytest.raises(IndexError) as found:
            model(wrong)
        assert str(found.value) == str(expected.value)
        model(texts()[0]).backward()
        assert plan.stats().num_steps == 1


def test_a_variant_of_a_region_that_draws_new_random_numbers_is_refused() -> None:
    model = Language(depth=2)
    _, compiled, chain = in_regions(model, budgets=(0.0,))
    compiled.remove()
    assert any("draws new random numbers" in note for note in chain.provenance["notes"])


def test_a_variant_of_a_region_that_does_not_compile_is_refused_alone() -> None:
    def failing(graph, inputs):
        if torch._functorch.config.activation_memory_budget < 1:
            raise AssertionError("not in part")
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

    _, compiled, chain = in_regions(Simple(), failing, budgets=(0.5,))
    compiled.remove()
    assert any("budget 0.5" in note and "not in part" in note for note in chain.provenance["notes"])
    assert all(stage.num_variants == 1 for stage in chain.stages)


def test_what_is_switched_off_is_told() -> None:
    model = Simple()
    split, compiled, chain = in_regions(model, UNPARTITIONED)
    with (
        attach(model, solution_of(chain, stored(split.num_stages)), split=split),
        torch.compiler.set_stance("force_eager"),
        pytest.raises(NoRegionsError, match="compiling is switched off"),
    ):
        model(texts()[0])
    compiled.remove()


def test_outside_of_training_the_model_is_as_it_is() -> None:
    backend, model, plain = Counting(), Simple(), Simple()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", **OPTIONS, **regions_with(backend)) as plan:
        num_graphs = len(backend.graphs)
        with torch.no_grad():
            assert torch.equal(model.eval()(texts()[0]), plain.eval()(texts()[0]))
        assert plan.stats().num_steps == 0
        assert len(backend.graphs) == num_graphs


class TwoTexts(Simple):
    def forward(self, text, labels):
        return super().forward(text) + 0 * labels.sum()


def test_a_tensor_that_is_given_twice_is_compiled_once() -> None:
    backend, model, text = Counting(), TwoTexts(), texts()[0]
    batch = {"text": text, "labels": text}
    with lowtide.fit(model, batch, memory_budget="1GiB", **OPTIONS, **regions_with(backend)):
        num_graphs = len(backend.graphs)
        model(**batch).backward()
        assert len(backend.graphs) == num_graphs


def test_the_faster_of_two_plans_is_taken_and_the_other_leaves_nothing() -> None:
    model = Simple()
    split, compiled, _ = in_regions(model, UNPARTITIONED)
    one = (_Planned(2.0), compiled)
    for seconds, is_other in ((3.0, False), (1.0, True)):
        other = Compilation({"backend": UNPARTITIONED, "dynamic": False}).of(model, split)
        other.remove()

        def find(other=other, seconds=seconds):
            assert regions_of(model) is None
            other.install()
            return _Planned(seconds), other

        found = compiling._faster(one, find)
        assert (found[1] is other) == is_other
        assert (regions_of(model) is None) == is_other
        found[1].remove()
        assert not any("_compiled_call_impl" in vars(module) for module in model.modules())

    def refuse():
        raise lowtide.InfeasibleBudgetError("no", minimum_bytes=1)

    assert compiling._faster(one, refuse) == one
    compiled.remove()


@pytest.fixture
def _timed(monkeypatch):
    """Plan as on CUDA, where trial steps are timed."""
    for module in (trials, compiling):
        monkeypatch.setattr(module, "is_timed", lambda device: True)


@pytest.fixture
def _even(monkeypatch):
    """All stages take the same time, so that schedules do not depend on what else the machine does."""
    measured_for = compiling.measured_for

    def measured(*args):
        split, (chain, compiled) = measured_for(*args)
        return split, (chain.with_times(lambda one: 1e-3, lambda one: 2e-3), compiled)

    monkeypatch.setattr(compiling, "measured_for", measured)


def test_blocks_are_compiled_where_no_trial_can_decide() -> None:
    model = Simple()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", **OPTIONS, compile_stages={"backend": UNPARTITIONED}):
        assert regions_of(model) is None


@pytest.mark.usefixtures("_host_bound")
def test_what_trials_compile_is_bounded() -> None:
    backend, model, text = Counting(), Simple(depth=2), texts(batch=64)[0]
    options = {**OPTIONS, "variants": True}
    with lowtide.fit(model, text, memory_budget="1GiB", **options, **auto_with(backend)) as plan:
        assert len(backend.graphs) == 2  # all as one, and a block
        model(text).backward()
        assert len(backend.graphs) == 2
        budget = less_than_all(plan)
    backend = Counting()
    model.zero_grad()
    with lowtide.fit(model, text, memory_budget=budget, **options, **auto_with(backend)) as plan:
        model(text).backward()
        assert len(backend.graphs) <= 2 * plan.chain.num_stages  # those of both ways, the variants of one, and a joint


class Growing(nn.Module):
    """Blocks that all differ, as those of a DenseNet."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = range(WIDTH, WIDTH + depth + 1)
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(widths[-1], WORDS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(one, other), nn.GELU()) for one, other in itertools.pairwise(widths)
        )

    def forward(self, text):
        x = self.tokens(text)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), text.flatten())


@pytest.mark.usefixtures("_timed", "_even")
@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the numbers of each step
def test_blocks_that_all_differ_are_compiled_in_a_few_regions(monkeypatch) -> None:
    most = 5  # as 16 of 20
    monkeypatch.setattr(compiling, "_MOST_DIFFERENT", most)
    backend, model, text = Counting(), Growing(), texts(batch=64)[0]
    options = OPTIONS  # a part of one region would be a variant
    with lowtide.fit(model, text, memory_budget="1GiB", **options, **auto_with(backend)) as plan:
        assert len(backend.graphs) == 1
        budget = less_than_all(plan)
    backend = Counting()
    with lowtide.fit(model, text, memory_budget=budget, **options, **auto_with(backend)) as plan:
        assert plan.chain.num_stages > most
        assert len(backend.graphs) <= 1 + 6  # the whole, which was too large, and what the schedule joins
        model(text).backward()
        assert plan.stats().recomputed_per_step > 0
    monkeypatch.setattr(compiling, "_LEAST_OF_EAGER", 1.0)  # the whole is known to be too large
    backend = Counting()
    model.zero_grad()
    with lowtide.fit(model, text, memory_budget=budget, **options, **auto_with(backend)) as plan:
        assert plan.chain.num_stages > most
        assert len(backend.graphs) <= 6
        assert not any(F.cross_entropy in graph and F.embedding in graph for graph in backend.graphs)
        model(text).backward()
        assert plan.stats().recomputed_per_step > 0
    monkeypatch.setattr(compiling.CompiledPlanning, "_joint", lambda *_: [])  # nothing that is joined fits
    backend = Counting()
    model.zero_grad()
    with lowtide.fit(model, text, memory_budget=budget, **options, **auto_with(backend)) as plan:
        assert plan.chain.num_stages <= most
        assert_equal(train(model, texts(batch=64)), compiled_numbers(Growing, backend=UNPARTITIONED, batch=64))
        assert plan.stats().recomputed_per_step > 0
        assert len(backend.graphs) <= most + 1


@pytest.mark.usefixtures("_timed", "_even")
def test_a_compiler_that_fails_for_the_whole_model_may_compile_smaller_regions() -> None:
    def backend(graph, inputs):
        if sum(node.op == "call_function" for node in graph.graph.nodes) > 12:
            raise RuntimeError("too large")
        return torch._dynamo.lookup_backend(UNPARTITIONED)(graph, inputs)

    model, text = Growing(), texts(batch=64)[0]
    with lowtide.fit(model, text, memory_budget="1GiB", **OPTIONS, **auto_with(backend)) as plan:
        assert regions_of(model) is None  # if all is stored, regions are joined again
        budget = less_than_all(plan)
    with lowtide.fit(model, text, memory_budget=budget, **OPTIONS, **auto_with(backend)):
        assert regions_of(model) is not None


OF_ALL, OF_JOINED, OF_BLOCKS = 0.043, 0.045, 0.088


@pytest.fixture
def _host_bound(monkeypatch):
    """Steps take as long as those of ResNet-101 on an H200, where the host launches kernels more slowly than the device
    runs them: by the sum of their stages blocks look faster than regions, and are not.
    """
    measured_for, tried = compiling.measured_for, trials._tried

    def measured(model, sample, settings, *others):
        split, (chain, compiled) = measured_for(model, sample, settings, *others)
        each = (0.06 if compiled is not None and settings.compilation.regions else 0.055) / (2 * chain.num_stages)
        return split, (chain.with_times(lambda one: each, lambda one: each), compiled)

    def timed(model, sample, planned, settings, **others):
        found, asked = tried(model, sample, planned, settings, **others), settings.compilation
        seconds = OF_ALL if asked is None else OF_JOINED if asked.regions else OF_BLOCKS
        return dataclasses.replace(found, seconds=seconds)

    for module in (trials, compiling):
        monkeypatch.setattr(module, "is_timed", lambda device: True)
    monkeypatch.setattr(compiling, "measured_for", measured)
    monkeypatch.setattr(trials, "_tried", timed)


@pytest.fixture(scope="module")
def nearly_all() -> dict[str, int]:
    """Budgets in which a step that stores everything just does not fit, and in which it does not."""
    model, text = Simple(depth=4), texts(batch=64)[0]
    with lowtide.fit(model, text, memory_budget="1GiB", **OPTIONS, **regions_with(UNPARTITIONED)) as plan:
        return {"just": plan.stats().predicted_peak_bytes - 1, "far": less_than_all(plan)}


@pytest.mark.usefixtures("_host_bound")
@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the numbers of each step
@pytest.mark.parametrize("budget", ["just", "far"])
def test_regions_are_joined_where_all_as_one_does_not_fit(nearly_all, budget: str, monkeypatch, tmp_path) -> None:
    backend, model, text = Counting(), Simple(depth=4), texts(batch=64)[0]
    monkeypatch.setitem(registry._BACKENDS, "counting", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "counting", backend)
    with lowtide.fit(model, text, memory_budget=nearly_all[budget], **OPTIONS, **auto_with("counting")) as plan:
        assert regions_of(model) is not None
        assert plan.stats().predicted_seconds == pytest.approx(OF_JOINED)
        plan.save(tmp_path / "plan.json")
        num_graphs = len(backend.graphs)
        model(text).backward()
        assert len(backend.graphs) == num_graphs
        assert plan.stats().recomputed_per_step > 0
        assert plan.stats().predicted_peak_bytes <= nearly_all[budget]
        model.zero_grad()
        found = train(model, texts(batch=64))
    assert_equal(found, compiled_numbers(Simple, 4, backend=UNPARTITIONED, batch=64))
    again = Simple(depth=4)
    with lowtide.load_plan(tmp_path / "plan.json", again) as plan:
        assert regions_of(again) is not None
        assert_equal(train(again, texts(batch=64)), found)
        assert plan.stats().recomputed_per_step > 0


@pytest.mark.usefixtures("_host_bound")
def test_all_as_one_is_tried_again_where_a_real_step_takes_more(nearly_all, monkeypatch) -> None:
    tried, planning = [], compiling.CompiledPlanning
    as_one_region = planning._as_one_region
    monkeypatch.setattr(planning, "_as_one_region", lambda *args: tried.append(as_one_region(*args)) or tried[-1])
    backend, model, text = Counting(), Simple(depth=4), texts(batch=64)[0]
    budget = nearly_all["just"] + 1000
    with lowtide.fit(model, text, memory_budget=budget, **OPTIONS, **auto_with(backend)) as plan:
        assert plan.stats().predicted_seconds == pytest.approx(OF_ALL)
        model(text).backward()
        model.zero_grad()
        with monkeypatch.context() as patched:
            patched.setattr(RealSteps, "peak_bytes", property(lambda _: budget + 100))  # as CUDA might say
            with pytest.warns(lowtide.LowtideWarning, match="planning again"):
                model(text).backward()
        assert len(tried) == 2
        assert tried[1][0].rehearsed_peak_bytes > budget  # with room for what the step took
        assert plan.stats().predicted_seconds == pytest.approx(OF_JOINED)
        assert plan.stats().recomputed_per_step > 0
        assert sum(F.cross_entropy in graph and F.embedding in graph for graph in backend.graphs) == 1


@pytest.mark.usefixtures("_host_bound")
def test_regions_that_are_joined_end_where_blocks_do() -> None:
    model, text = Growing(), texts(batch=64)[0]
    with lowtide.fit(model, text, memory_budget="1GiB", **OPTIONS, compile_stages=False) as plan:
        assert any(name.startswith("blocks.1.") for name in stage_names(plan))  # it can be cut inside blocks
        base = plan.chain.base_bytes  # what else lives in this process counts, too
        budget = base + int(0.9 * (plan.stats().predicted_peak_bytes - base))
    with lowtide.fit(model, text, memory_budget=budget, **OPTIONS, **auto_with(UNPARTITIONED)) as plan:
        assert regions_of(model) is not None
        assert plan.stats().predicted_seconds == pytest.approx(OF_JOINED)
        assert all(name.count(".") < 2 for name in stage_names(plan))
        assert not any("cuda_graphs" in note for note in plan.notes)  # what eager stages take on the device is no guide


def stage_names(plan: lowtide.Plan) -> list[str]:
    return [stage.name for stage in plan.chain.stages]


class _Compiled:
    """Stands in for a compiled model."""

    def __init__(self, regions: bool = True) -> None:
        self.compilation = Compilation({}, regions=regions)
        self.is_installed = True

    def install(self) -> None:
        self.is_installed = True

    def remove(self) -> None:
        self.is_installed = False


def planning_for(budget: int = 2**30, **others) -> compiling.CompiledPlanning:
    compilation = Compilation({"backend": BACKEND, "dynamic": False}, (0.5,))
    settings = dataclasses.replace(SETTINGS, memory_budget=budget, compilation=compilation, **others)
    return compiling.CompiledPlanning(Language(), None, settings, None, tier=None, goes_on=False)


TOO_LITTLE = lowtide.InfeasibleBudgetError("no", minimum_bytes=2**31)
JOINT, PART = (None, None), object()


@pytest.mark.parametrize(
    ("joined", "blocks", "tried", "taken"),
    [
        # Of each: what it is expected to take at the least, and what a trial step takes.
        ((0.045, 0.047), (0.055, 0.088), ["joined"], 0.047),
        ((0.045, 0.120), (0.055, 0.088), ["joined", "blocks"], 0.088),
        ((0.045, TOO_LITTLE), (0.055, 0.088), ["joined", "blocks"], 0.088),
        ((0.045, torch.OutOfMemoryError()), (0.055, 0.088), ["joined", "blocks"], 0.088),
        ((0.070, 0.072), (0.055, 0.088), ["blocks", "joined"], 0.072),
        ((0.070, 0.090), (0.055, 0.088), ["blocks", "joined"], 0.088),
        ((0.070, NoRegionsError("no")), (0.055, 0.088), ["blocks", "joined"], 0.088),
        ((0.070, 0.072), (0.055, 0.060), ["blocks"], 0.060),
        ((0.070, 0.072), (0.055, TOO_LITTLE), ["blocks", "joined"], 0.072),
        ((0.045, TOO_LITTLE), (0.055, TOO_LITTLE), ["joined", "blocks", "regions"], 0.1),
    ],
)
def test_the_way_with_the_fastest_trial_steps_is_taken(joined, blocks, tried, taken) -> None:
    seen, made, planning = [], [], planning_for()
    ways = [compiling._Way(joined[0], True, JOINT), compiling._Way(blocks[0], False), compiling._Way(math.inf, True)]
    planning._ways = lambda whole: sorted(ways, key=lambda way: way.seconds)

    def found(way, most_seconds, *, accepts):
        assert not any(each.is_installed for each in made)
        seen.append("joined" if way.joint else "regions" if way.regions else "blocks")
        outcome = {"joined": joined[1], "blocks": blocks[1], "regions": 0.1}[seen[-1]]
        if isinstance(outcome, Exception):
            raise outcome
        made.append(_Compiled())
        return _Planned(outcome), made[-1]

    planning._found = found
    planned, compiled = planning._the_faster_that_fits(None)
    assert seen == tried
    assert planned.seconds == taken
    assert [each for each in made if each.is_installed] == [compiled]


def test_where_no_way_fits_the_least_that_is_named_is_of_those_that_are_always_tried() -> None:
    planning, least = planning_for(), {True: 2**32, False: 2**31}
    planning._ways = lambda whole: [
        compiling._Way(0.0, True, JOINT),
        compiling._Way(0.1, True),
        compiling._Way(math.inf, False),
    ]

    def found(way, most_seconds, *, accepts):
        raise lowtide.InfeasibleBudgetError("no", minimum_bytes=2**30 + 1 if way.joint else least[way.regions])

    planning._found = found
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        planning._the_faster_that_fits(None)
    assert caught.value.minimum_bytes == 2**31


def four_stages(seconds: float) -> lowtide.Chain:
    return lowtide.Chain(
        "net", tuple(lowtide.Stage(f"{k}", seconds, seconds, 100, 1000) for k in range(4)), input_bytes=100
    )


@pytest.mark.parametrize("stages", [None, 4.0])
def test_blocks_that_many_share_are_known_by_the_sum_of_their_stages(monkeypatch, stages) -> None:
    """What is joined is as much faster than the stages without compilation as blocks are, and recomputes as they do."""
    asked = []

    def measured(model, sample, settings):
        asked.append(settings.compilation)
        return None, (four_stages(1.0), _Compiled(regions=False))

    monkeypatch.setattr(compiling, "measured_for", measured)
    planning = planning_for(3500)
    part = compiling._Way(99.0, True, part=PART)
    planning._in_part = lambda whole: [part]
    joint = []
    if stages is not None:
        planning._eager = None, four_stages(stages)
        solution = lowtide.solve(four_stages(1.0), memory_budget=3500, strategy="rotor", manage_weights=False)
        joint = [(pytest.approx(solution.seconds), True, None)]
    ways = planning._ways(None)
    assert [(each.regions, each.budgets) for each in asked] == [(False, ())]
    found = [(way.seconds, way.regions, way.part) for way in ways]
    assert [each for each in found if each in joint] == joint
    assert [each for each in found if each not in joint] == [
        (8.0, False, None),
        (pytest.approx(8.4), True, PART),  # as long as that, and what is computed again
        (math.inf, True, None),
    ]


@pytest.mark.parametrize(("num_alike", "after"), [(2, ["blocks", "regions"]), (1, ["regions", "blocks"])])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("budget", [4500, 3500])
def test_blocks_that_few_share_come_after_one_large_way(monkeypatch, num_alike, after, is_known, budget) -> None:
    """Where the whole model was not compiled, only the one with the least to compute again."""
    monkeypatch.setattr(compiling, "measured_for", None)  # nothing is compiled to order them
    planning = planning_for(budget)
    planning._num_alike, planning._eager = num_alike, (None, four_stages(1.0))
    planning._in_part = lambda whole: [compiling._Way(8.6, True, part=PART)]
    joint = lowtide.solve(four_stages(1.0), memory_budget=budget, strategy="rotor", manage_weights=False).seconds
    assert (joint < 8.6) == (budget == 4500)
    whole = _Planned(8.0)
    whole.split, whole.chain, whole.unknown_bytes = None, four_stages(1.0), 0
    ways = planning._ways(whole if is_known else None)
    large = [("joint", joint), ("part", 8.6)]
    large = large if budget == 4500 else large[::-1]
    if not is_known:
        large[1] = (large[1][0], math.inf)
    names = ["joint" if way.joint else "part" if way.part else "regions" if way.regions else "blocks" for way in ways]
    assert [(name, way.seconds) for name, way in zip(names, ways, strict=True)][:2] == large
    assert names[2:] == after
    assert [way.is_known for way in ways[2:]] == [num_alike == 1, True]


@pytest.mark.parametrize(("each", "tried"), [(1.0, ["part"]), (0.5, ["part", "blocks"])])
def test_variants_of_few_blocks_are_compiled_where_without_them_they_are_faster(monkeypatch, each, tried) -> None:
    part, blocks, seen = _Compiled(), _Compiled(regions=False), []

    def measured(model, sample, settings):
        assert settings.compilation.channels_last is False  # the layout is not tried
        assert not part.is_installed
        return None, (four_stages(each), blocks)

    monkeypatch.setattr(compiling, "measured_for", measured)
    planning = planning_for()
    planning._ways = lambda whole: [
        compiling._Way(0.0, True, part=PART),
        compiling._Way(0.0, False, is_known=False),
        compiling._Way(math.inf, True),
    ]

    def found(way, most_seconds, *, accepts):
        seen.append("part" if way.part else "blocks")
        return _Planned(8.2), part if way.part else _Compiled()

    planning._found = found
    assert planning._the_faster_that_fits(None)[1] is part
    assert seen == tried
    assert part.is_installed
    assert not blocks.is_installed


def test_ways_are_known_by_steps_that_store_everything_where_there_are_such(monkeypatch) -> None:
    blocks = _Compiled(regions=False)
    monkeypatch.setattr(
        compiling, "measured_for", lambda *_: (None, (four_stages(0.1), blocks))
    )  # by their sum the fastest
    monkeypatch.setattr(compiling.CompiledPlanning, "_seconds_with_all_stored", lambda *_: 4.3)
    stored = lowtide.solve(four_stages(0.5), memory_budget="1GiB", strategy="store-all", manage_weights=False)
    whole = _Planned(4.0)
    whole.split, whole.chain, whole.unknown_bytes = None, dataclasses.replace(stored.chain, base_bytes=1), 1
    first, second, last = planning_for(stored.peak_bytes)._ways(whole)
    assert (first.seconds, first.joint is None) == (4.0, False)  # the unknown byte is not counted twice
    assert (second.seconds, second.regions) == (4.3, False)
    assert (last.seconds, last.regions) == (math.inf, True)
    assert not blocks.is_installed
    first, second, _ = planning_for(stored.peak_bytes - 1)._ways(whole)
    assert first.joint is None
    assert second.seconds == pytest.approx(4.5)  # one of eight computations once more
    assert [way.joint for way in planning_for(1)._ways(whole)] == [None, None]


def test_regions_alone_are_joined_or_single() -> None:
    stored = lowtide.solve(four_stages(0.5), memory_budget="1GiB", strategy="store-all", manage_weights=False)
    whole = _Planned(4.0)
    whole.split, whole.chain, whole.unknown_bytes = None, stored.chain, 0
    ways = planning_for(stored.peak_bytes - 1, regions=True)._ways(whole)
    assert [(way.seconds, way.regions, way.joint is None) for way in ways] == [
        (4.0, True, True),  # with variants, as fast as the whole model at the best
        (pytest.approx(4.5), True, False),
    ]
    assert planning_for(regions=True)._ways(None) == [compiling._Way(0.0, True)]
    planning = planning_for(stored.peak_bytes - 1, regions=True)
    planning._eager = None, four_stages(0.5)  # the whole model was not tried
    assert [(way.seconds, way.joint is None) for way in planning._ways(None)] == [
        (0.0, True),
        (pytest.approx(4.5), False),
    ]


@pytest.mark.parametrize("asked", [{"strategy": "joint"}, {"strategy": "offload"}, {"step_in_backward": True}])
def test_what_moves_is_not_joined(monkeypatch, asked) -> None:
    monkeypatch.setattr(compiling, "measured_for", lambda *_: (None, (four_stages(1.0), _Compiled())))
    ways = planning_for(**asked, bandwidth=10**10)._ways(None)
    assert [way.joint for way in ways] == [None, None]


@pytest.mark.usefixtures("_timed")
def test_the_least_budget_that_is_named_works_whichever_way_is_faster(monkeypatch) -> None:
    model, text = Simple(depth=2), texts(batch=64)[0]
    options = {**OPTIONS, **auto_with(UNPARTITIONED)}
    named = []
    for first in (True, False):
        ways = [compiling._Way(0.0, first), compiling._Way(math.inf, not first)]
        monkeypatch.setattr(compiling.CompiledPlanning, "_ways", lambda *_, ways=ways: ways)
        with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
            lowtide.fit(model, text, memory_budget=1, **options)
        named.append(caught.value.minimum_bytes)
        lowtide.fit(model, text, memory_budget=max(named) + 8192, **options).detach()
    assert abs(named[0] - named[1]) <= 0.01 * min(named)


@pytest.mark.parametrize(("depth", "alike"), [(12, 6), (3, 1)])
def test_blocks_that_share_a_compilation_are_counted(depth: int, alike: int) -> None:
    model = Language(depth)
    split = capture(model, texts()[0], blocks=True)
    assert num_alike(model, split) == alike  # the first block has what comes before it, and is of a kind of its own


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, "auto"),
        ({}, "auto"),
        ({"regions": "auto"}, "auto"),
        ({"regions": False}, False),
        ({"regions": True}, True),
        ({"dynamic": True}, False),
        ({"mode": "x"}, False),
    ],
)
def test_regions_are_asked_for(given, expected) -> None:
    assert fit._regions(given) == expected


def test_stages_that_free_what_they_save_are_scaled_to_what_one_region_takes() -> None:
    stages = tuple(lowtide.Stage(f"{k}", 1.0, 1.0, 100, 1000, freed_bytes=900) for k in range(4))
    chain = lowtide.Chain("net", stages, input_bytes=100)
    solution = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all")
    found = compiling._within(solution, 2000)
    assert 0.9 * 2000 < found.peak_bytes <= 2000
    assert all(stage.freed_bytes < stage.saved_bytes for stage in found.chain.stages)


@pytest.mark.parametrize("peak_bytes", [2000, 3000, 6000])
def test_stages_have_the_peak_of_one_region(peak_bytes: int) -> None:
    solution = lowtide.solve(four_stages(1.0), memory_budget="1GiB", strategy="store-all", manage_weights=False)
    found = compiling._priced(solution, peak_bytes)
    assert found.peak_bytes == peak_bytes
    assert (found.chain.base_bytes > 1000) == (peak_bytes > solution.peak_bytes)  # what is saved is scaled first


class _Planned:
    def __init__(self, seconds: float) -> None:
        self.solution = self
        self.seconds = seconds


@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the numbers of each step
def test_fit_plans_for_regions_where_not_everything_fits() -> None:
    model, text = Simple(depth=2), texts(batch=64)[0]
    options = {**OPTIONS, **regions_with(UNPARTITIONED)}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, text, memory_budget=1, **options)
    # A share of it would be a share of all that lives in this process, too.
    with lowtide.fit(model, text, memory_budget=caught.value.minimum_bytes + 8192, **options) as plan:
        assert regions_of(model) is not None
        model(text).backward()
        assert plan.stats().recomputed_per_step > 0
        model.zero_grad()
        found = train(model, texts(batch=64))
    assert_equal(found, train(Simple(depth=2), texts(batch=64)))


@pytest.mark.parametrize("options", [{"regions": "yes"}, {"regions": True, "dynamic": True}])
def test_options_that_regions_do_not_go_with_are_refused(options) -> None:
    with pytest.raises(lowtide.PlanError, match="regions"):
        lowtide.fit(Language(), texts()[0], memory_budget="1GiB", compile_stages=options, **OPTIONS)


def test_settings_of_the_compiler_can_be_copied_sorted_and_written(monkeypatch) -> None:
    def warning_once(logger, message):
        warned.append(message)

    def info_once(logger, message):
        warned.append(message)

    warned: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    monkeypatch.setattr(logging.Logger, "info_once", info_once, raising=False)
    found = []

    def backend(graph, inputs):
        ignored = getattr(torch._dynamo.config, "ignore_logging_functions", None)
        found.append(len(ignored if ignored is not None else torch._dynamo.config.ignore_logger_methods))
        copy.deepcopy(torch._dynamo.config.get_config_copy())
        torch._dynamo.config.codegen_config()
        json.dumps({name: sorted(value) for name, value in _sets_of(torch._dynamo.config)})
        pickle.dumps(sorted(ignored or ()))
        torch._dynamo.utils._get_dynamo_config_for_logging()
        return torch._dynamo.lookup_backend(UNPARTITIONED)(graph, inputs)

    model = Telling()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", **OPTIONS, **regions_with(backend)):
        assert regions_of(model) is not None
        assert max(found) >= 2
        model(texts()[0]).backward()
    assert set(warned) == {"once"}


def _sets_of(config):
    ours = ("ignore_logging_functions", "ignore_logger_methods")
    return [(name, value) for name, value in config.get_config_copy().items() if name.rpartition(".")[2] in ours]


class Telling(Simple):
    """Says something, as models of transformers do."""

    def forward(self, text):
        LOGGER.warning_once("once")
        return super().forward(text)


@pytest.mark.parametrize(("words", "is_padded"), [(50257, True), (50304, False)])
def test_heads_that_a_compiler_pads_are_compiled(words: int, is_padded: bool) -> None:
    with torch.device("meta"):
        head = nn.Linear(64, words, dtype=torch.bfloat16)
    assert not _is_padded(head)  # not on CUDA
    head.weight = _OnCuda(head.weight)
    assert _is_padded(head) == is_padded
    assert not _is_padded(nn.Sequential(head))


class _OnCuda(nn.Parameter):
    is_cuda = True
