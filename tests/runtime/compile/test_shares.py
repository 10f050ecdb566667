"""The model as one region that keeps a share of what it would save: how much, and that its numbers stay the same."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.looping import looped
from tests.runtime.training import assert_equal, gradients, train
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile import compiled as compiled_module
from lowtide.runtime.compile import op_times
from lowtide.runtime.compile.compiled import Compilation, _backend, _compiled_function
from lowtide.runtime.compile.cutting import NoRegionsError
from lowtide.runtime.compile.must_save import mark
from lowtide.runtime.compile.op_times import measured_times
from lowtide.runtime.compile.regions import forget_regions, regions_of
from lowtide.runtime.compile.saved import Saved
from lowtide.runtime.fitting import compiling, shares, trials
from lowtide.runtime.fitting.planning import Asked
from lowtide.runtime.fitting.shares import as_tried, in_one_stage, next_share, share_for

# The partitioner that inductor uses, with graphs run operation by operation: nothing is compiled to machine code.
BACKEND = "aot_eager_decomp_partition"
WIDTH = 16
OPTIONS = {"bandwidth": 0, "strategy": "rotor", "compile_stages": {"regions": "auto", "backend": BACKEND}}

# Shares and GiB of a step, measured on an H200, at 0 by the line through them. The last, which ends flat, is made up.
SWIN = {0.0: 0.36, 0.38: 2.815, 0.41: 3.009, 0.48: 3.467, 1.0: 6.82}
CONVNEXT = {0.0: 0.76, 0.18: 2.031, 0.22: 2.313, 0.46: 3.907, 0.49: 4.253, 1.0: 7.33}
FLAT_BELOW = {0.0: 3.0, 0.3: 3.1, 0.5: 3.6, 1.0: 6.8}


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind():
    """Other tests count all live tensors, and compilations."""
    yield
    forget_regions()
    _compiled_function.cache_clear()
    torch._dynamo.reset()
    gc.collect()


def on_line(points: dict[float, float], share: float) -> int:
    (one, first), (other, second) = next(
        pair for pair in itertools.pairwise(sorted(points.items())) if pair[0][0] <= share <= pair[1][0]
    )
    return int(2**30 * (first + (second - first) * (share - one) / (other - one)))


@pytest.mark.parametrize(
    ("points", "least", "budget", "stored", "most"),
    [
        (SWIN, 0.5, 3.647, 6.82, 1),
        (SWIN, 1.64, 3.297, 6.25, 2),  # where both ends are estimates
        (CONVNEXT, 0.5, 4.168, 7.25, 1),
        (CONVNEXT, 0.5, 2.204, 7.25, 2),
        (FLAT_BELOW, 1.5, 3.3, 6.8, 3),
    ],
)
def test_a_share_is_found_in_a_few_trials(points, least, budget, stored, most) -> None:
    seen = [(1.0, int(2**30 * stored))]
    while (share := next_share(seen, int(2**30 * least), int(2**30 * budget))) is not None:
        seen.append((share, on_line(points, share)))
    fitting = [taken / 2**30 for _, taken in seen[1:] if taken <= 2**30 * budget]
    assert len(seen) <= 1 + most
    assert max(fitting) > 0.75 * budget


@pytest.mark.parametrize(
    ("seen", "least"),
    [
        ([(1.0, 1000)], 490),  # almost everything would be computed again
        ([(1.0, 400)], 500),  # no line meets the budget
        ([(1.0, 1000), (0.5, 700), (0.4, 650), (0.2, 600)], 100),  # each one compiles the model
        ([(1.0, 1000), (0.5, 300), (0.7, 600)], 100),  # one of them fits
    ],
)
def test_there_is_an_end(seen, least) -> None:
    assert next_share(seen, least, 500) is None


def narrowing(*sizes: int) -> lowtide.Chain:
    stages = [lowtide.Stage(f"{size}", 1.0, 2.0, 10, size, weight_bytes=5, backward_extra_bytes=20) for size in sizes]
    return lowtide.Chain("net", tuple(stages), input_bytes=10, base_bytes=100)


def test_the_first_share_is_what_stages_let_expect() -> None:
    chain, budget = narrowing(100, 100, 100, 100), 400
    share = share_for(chain, Saved(all_bytes=400, marked_bytes=0), budget)
    # By hand: 120 are there in any case, the input takes 10, and all four stages are kept in part. When the last one
    # goes backward, its rest is there again, with 20 besides, two gradients of 10, and one of 5 for its weights.
    peak_bytes = [155 + 4 * 100 * each + 100 * (1 - each) + 20 for each in (share, share + 0.02)]
    assert peak_bytes[0] <= 120 + 0.97 * (budget - 120) < peak_bytes[1]
    others = dataclasses.replace(chain, base_bytes=chain.base_bytes + 10_000)
    assert share_for(others, Saved(all_bytes=400, marked_bytes=0), budget + 10_000) == share
    assert share_for(chain, Saved(all_bytes=400, marked_bytes=40), budget) == pytest.approx(share - 0.1)
    assert share_for(chain, Saved(all_bytes=200, marked_bytes=0), budget) > share  # a compiler saves less
    too_large = narrowing(310, 30, 30, 30)
    assert share_for(too_large, Saved(all_bytes=400, marked_bytes=0), budget) is None


@looped("more_bytes", [-3000, -200, 0, 500])
def test_one_stage_is_priced_as_it_was_tried(more_bytes: int) -> None:
    stages = [lowtide.Stage(f"{k}", 1.0, 2.0, 100, 1000, weight_bytes=50, backward_extra_bytes=7) for k in range(4)]
    chain = in_one_stage(lowtide.Chain("net", tuple(stages), input_bytes=100, base_bytes=10), "all", 0.5)
    found = lowtide.solve(chain, memory_budget="1GiB", strategy="rotor", manage_weights=False)
    assert found.schedule.operations[0] == lowtide.Forward(1, "all", 1)
    tried = found.on(as_tried(chain, 6.0, more_bytes))
    assert tried.peak_bytes == found.peak_bytes + more_bytes
    assert tried.chain.compute_seconds == pytest.approx(6.0)
    assert tried.chain.fixed_bytes == 10 + 4 * 50


@pytest.mark.parametrize(
    ("took", "most_seconds", "shares_tried", "taken"),
    [
        ([(700, 1.1), (480, 1.2)], 2.0, 2, 1.2),
        ([(700, 2.1), (480, 2.2)], 2.0, 1, None),  # with less kept it takes longer still
        ([(300, 1.5), (470, 1.2)], 1.0, 2, 1.2),  # more of it may be kept
        ([(300, 1.2), (470, 1.5)], 2.0, 2, 1.5),  # it computes less again, whatever a noisy trial says
        ([(700, 1.1), (650, 1.2), (600, 1.3)], 2.0, 3, None),
        ([(torch.OutOfMemoryError(), 0.0), (480, 1.2)], 1.0, 2, 1.2),  # less is tried
        ([(300, 1.5), (NoRegionsError("no"), 0.0)], 1.0, 2, 1.5),  # what was found stays
    ],
)
@pytest.mark.parametrize("others", [0, 10_000])
@pytest.mark.parametrize("first", [0.7, None])
def test_shares_are_tried_as_long_as_one_may_be_faster(
    monkeypatch, took, most_seconds, shares_tried, taken, others, first
) -> None:
    """Whatever else is there throughout."""
    outcomes, installed, shares_of = iter(took), [], []

    def tried(self, share):
        shares_of.append(share)
        peak_bytes, seconds = next(outcomes)
        if isinstance(peak_bytes, Exception):
            raise peak_bytes
        return SimpleNamespace(solution=SimpleNamespace(peak_bytes=others + peak_bytes, seconds=seconds))

    def compiled(self, model, split):
        return SimpleNamespace(install=lambda: installed.append(True), remove=lambda: None)

    monkeypatch.setattr(shares.KeptInPart, "_tried", tried)
    monkeypatch.setattr(shares.KeptInPart, "_least_bytes", lambda _: others + 100)
    monkeypatch.setattr(shares.KeptInPart, "_draws_in_backward", lambda *_: False)
    monkeypatch.setattr(Compilation, "of", compiled)
    split = capture(Net(), batches()[0], blocks=True)
    chain = lowtide.Chain("net", (lowtide.Stage("all", 1.0, 2.0, 10, 1000),), base_bytes=others)
    trials_of = lambda *_: SimpleNamespace(asked=Asked(others + 500))  # noqa: E731
    compilation = Compilation({}, (0.5,), regions=True)
    part = shares.KeptInPart(Net(), compilation, split, chain, trials_of, others + 1000, 1.0, first)
    if taken is None:
        with pytest.raises(lowtide.InfeasibleBudgetError, match="no part of one region"):
            part.keeping_most(most_seconds)
    else:
        assert part.keeping_most(most_seconds)[0].solution.seconds == taken
    assert len(shares_of) == shares_tried
    assert shares_of[0] == (first or 0.4)  # by the line
    assert len(installed) == (taken is not None)


class Block(nn.Module):
    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), draws

    def forward(self, x):
        y = self.down(torch.sigmoid(F.gelu(self.up(x))))
        return x + (y * (torch.rand(len(x), 1) < 0.7) if self.draws else y)


class Net(nn.Module):
    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(draws=draws) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Layers(nn.Sequential):
    """No module of it has parts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        widths = WIDTH, 4 * WIDTH
        layers = ((nn.Linear(*widths), nn.GELU(), nn.Sigmoid(), nn.Linear(*reversed(widths))) for _ in range(6))
        super().__init__(*(each for some in layers for each in some))

    def forward(self, x):  # torch compiles no forward of its own
        return super().forward(x)


def batches(number: int = 2, batch: int = 512) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, WIDTH, generator=generator) for _ in range(number)]


@pytest.fixture
def _as_on_cuda(monkeypatch):
    """Trial steps decide; and of what fits, a part of one region is taken."""
    for module in (trials, compiling):
        monkeypatch.setattr(module, "is_timed", lambda device: True)
    ways = compiling.CompiledPlanning._ways
    monkeypatch.setattr(
        compiling.CompiledPlanning, "_ways", lambda *args: sorted(ways(*args), key=lambda way: way.part is None)
    )
    monkeypatch.setattr(compiling, "_faster", lambda best, _: best)


def budget_below_all(model: nn.Module) -> int:
    with lowtide.fit(model, batches()[0], memory_budget="1GiB", **OPTIONS) as plan:
        base_bytes = plan.chain.base_bytes
        return base_bytes + int(0.7 * (plan.stats().predicted_peak_bytes - base_bytes))


@pytest.mark.usefixtures("_as_on_cuda")
@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the numbers of each step
def test_a_part_is_kept_with_the_same_numbers(tmp_path) -> None:
    model, plain = Net(), Net()
    budget = budget_below_all(model)
    plain.compile(backend=BACKEND, dynamic=False)
    expected = train(plain, batches())
    with lowtide.fit(model, batches()[0], memory_budget=budget, **OPTIONS) as plan:
        assert regions_of(model) is not None
        assert [stage.num_variants for stage in plan.chain.stages] == [2]
        assert plan.schedule.operations[0] == lowtide.Forward(1, "all", 1)
        assert "budget 0." in str(plan)
        assert any("one compiled region that keeps" in note for note in plan.notes)
        plan.report(tmp_path / "report.html")
        assert plan.stats().predicted_peak_bytes <= budget
        plan.save(tmp_path / "plan.json")
        assert_equal(train(model, batches()), expected)
        assert plan.stats().recomputed_per_step == 0
        plain(batches(batch=64)[0]).backward()
        model(batches(batch=64)[0]).backward()  # a smaller batch has a plan without variants
        assert_equal(dict(gradients(model)), dict(gradients(plain)))
    again = Net()
    with lowtide.load_plan(tmp_path / "plan.json", again):
        assert_equal(train(again, batches()), expected)


@pytest.mark.usefixtures("_as_on_cuda")
@pytest.mark.filterwarnings("ignore:a step took")
def test_a_part_whose_backward_draws_new_random_numbers_is_not_used(monkeypatch) -> None:
    found, drawn = [], shares.KeptInPart._draws_in_backward
    monkeypatch.setattr(shares.KeptInPart, "_draws_in_backward", lambda *args: found.append(drawn(*args)) or found[-1])
    model, plain = Net(draws=True), Net(draws=True)
    budget = budget_below_all(model)
    plain.compile(backend=BACKEND, dynamic=False)
    expected = train(plain, batches())
    with lowtide.fit(model, batches()[0], memory_budget=budget, **OPTIONS) as plan:
        assert any(found)  # BACKEND has no passes
        assert plan.chain.num_stages > 1
        assert_equal(train(model, batches()), expected)


@pytest.mark.usefixtures("_as_on_cuda")
@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the numbers of each step
def test_a_model_of_single_layers_is_kept_in_part() -> None:
    model, plain = Layers(), Layers()
    budget = budget_below_all(model)
    plain.compile(backend=BACKEND, dynamic=False)
    expected = train(plain, batches())
    with lowtide.fit(model, batches()[0], memory_budget=budget, **OPTIONS) as plan:
        assert [stage.num_variants for stage in plan.chain.stages] == [2]
        assert_equal(train(model, batches()), expected)


@pytest.mark.usefixtures("_as_on_cuda")
def test_nothing_is_kept_in_part_without_variants_or_times(monkeypatch) -> None:
    model = Net()
    budget = budget_below_all(model)
    with lowtide.fit(model, batches()[0], memory_budget=budget, variants=False, **OPTIONS) as plan:
        assert plan.chain.num_stages > 1
    monkeypatch.setattr(compiling, "is_timed", lambda device: False)
    options = {**OPTIONS, "compile_stages": {"regions": True, "backend": BACKEND}}
    with lowtide.fit(model, batches()[0], memory_budget=budget, **options) as plan:
        assert plan.chain.num_stages > 1


@pytest.mark.usefixtures("_as_on_cuda")
def test_a_part_leaves_room_for_the_optimizers_step(monkeypatch) -> None:
    tried, find = [], shares.KeptInPart.keeping_most
    monkeypatch.setattr(shares.KeptInPart, "keeping_most", lambda *args: tried.append(True) or find(*args))
    model = Net()
    budget = budget_below_all(model)
    made = compiling.Trials.__init__

    def needing(self, *args, **more):
        made(self, *args, **more)
        self.asked = dataclasses.replace(self.asked, update_bytes=budget + 1)

    monkeypatch.setattr(compiling.Trials, "__init__", needing)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="the optimizer's state and step"):
        lowtide.fit(model, batches()[0], memory_budget=budget, **OPTIONS)
    assert not tried


def test_what_draws_is_saved() -> None:
    def drawing(x):
        y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.0) + torch.rand(len(x), 1, 1)
        return F.dropout(y, 0.1) + torch.bernoulli(y, 0.5) + F.dropout(y, 0.0)

    graph = make_fx(drawing)(torch.randn(2, 3, 4)).graph
    mark(graph)
    saved = {n.target for n in graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE}
    names = {target.name() for target in saved}
    assert {"aten::rand", "aten::bernoulli.p"} <= names
    assert not any("attention" in name or "mul" in name for name in names)
    others = make_fx(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))(torch.randn(2, 3, 4)).graph
    mark(others)
    saved = {n.target for n in others.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE}
    assert any(torch.Tag.nondeterministic_seeded in target.tags for target in saved)


def marked(function, *args) -> list[str]:
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    mark(graph)
    graph.lint()
    saved = [node for node in graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    made = [node.all_input_nodes[0] if node.target is torch.ops.aten.clone.default else node for node in saved]
    made = [node.all_input_nodes[0] if node.target is operator.getitem else node for node in made]
    return [node.target.name() for node in made]


def test_what_adds_up_is_saved() -> None:
    def adding(x, weight, places):
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        y = (x - mean) * variance.rsqrt() @ weight
        y = y + torch.zeros_like(y).index_add(0, places, y)
        y = y.index_put((places,), y).index_put((places,), y, accumulate=True)
        return y.logsumexp(-1) + y.amax(-1) + torch.ops.prims.sum(y, [1]) + y.view(8, 8, 2).sum(-1).norm(dim=-1)

    found = marked(adding, torch.randn(8, 4), torch.randn(4, 16), torch.arange(8))
    assert found[:2] == ["aten::var_mean.correction"] * 2  # each of its two results; the sum over two is not small
    assert found[2:] == [
        "aten::index_add",
        "aten::index_put",
        "aten::logsumexp",
        "aten::amax",
        "prims::sum",
        "aten::linalg_vector_norm",
    ]


def test_what_the_user_has_marked_stays_so() -> None:
    graph = make_fx(lambda x: x.sum(-1))(torch.randn(8, 16)).graph
    (added,) = (node for node in graph.nodes if node.op == "call_function")
    added.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    mark(graph)
    assert added.meta["recompute"] == CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.slow
def test_inductor_recomputes_where_there_is_nothing_but_sums() -> None:
    norm, x = nn.LayerNorm(64), torch.randn(32, 64, requires_grad=True)
    found = []
    for share in (1.0, 0.3, 0.0):
        torch._dynamo.reset()
        call = torch.compile(
            lambda x: F.gelu(norm(x)).max(1)[0].sum(), dynamic=False, backend=_backend({"backend": "inductor"}, share)
        )
        found.append(torch.autograd.grad(call(x), [x, *norm.parameters()]))
    for gradients_of_less in found[1:]:
        assert all(map(torch.equal, gradients_of_less, found[0]))


@pytest.fixture
def times():
    """What is measured, with nothing known before and nothing left behind."""
    measured_times.cache_clear()
    if measured_times() is None:
        pytest.skip("this version of torch does not ask for times")
    yield measured_times()
    measured_times.cache_clear()


@pytest.mark.parametrize(("in_part", "together"), [(True, False), (True, True), (False, False)])
@pytest.mark.usefixtures("times")
def test_what_a_part_recomputes_takes_little_time(monkeypatch, in_part: bool, together: bool) -> None:
    """The second product calculates more for what it frees; a time says that the first one is slow."""
    asked, measures = [], in_part and not together  # several processes choose alike

    def seconds_of(node):
        asked.append(tuple(each.meta["val"].shape for each in node.args))
        return 1.0 if asked[-1][1] == (32, 80) else 0.001

    def net(x, first, second):
        return ((x @ first).sigmoid() @ second).sigmoid().sum()

    monkeypatch.setattr(op_times, "seconds_of", seconds_of)
    monkeypatch.setattr(compiled_module, "is_distributed", lambda: together)
    saved = []
    call = torch.compile(net, dynamic=False, backend=_backend({"backend": BACKEND}, 0.6, in_part=in_part))
    generator = torch.Generator().manual_seed(0)
    x, first, second = (torch.randn(size, generator=generator) for size in ((256, 32), (32, 80), (80, 80)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(x, first.requires_grad_(), second.requires_grad_())
    torch._dynamo.reset()
    assert bool(asked) == measures
    made = [tensor for tensor in saved if tensor.shape == (256, 80)]
    assert len(made) == 1
    assert torch.equal(made[0], (x @ first).sigmoid()) == measures


def test_what_operations_take_is_measured_once_for_each_form(monkeypatch, times) -> None:
    ran = []
    monkeypatch.setattr(op_times, "_seconds", lambda run, device: ran.append(run()) or 1.0)

    def net(x, weight, places):
        bias = torch.zeros(1, 4).expand(3, 4)
        y = torch.addmm(bias, x, weight) + torch.addmm(bias, x, weight) + x @ weight
        return y + F.embedding(places, y) + torch.ops.shares_test.own(y)

    with torch.library._scoped_library("shares_test", "DEF") as library:
        library.define("own(Tensor x) -> Tensor")
        library.impl("own", lambda x: x + torch.nan, "CompositeExplicitAutograd")
        graph = make_fx(net, tracing_mode="fake")(torch.randn(3, 5), torch.randn(5, 4), torch.tensor([2, 0, 1])).graph
        for node in graph.nodes:
            if node.op == "call_function" and node.target is not torch.ops.aten.add.Tensor:
                assert times(node) == 1.0
    copied = [result for result in ran if isinstance(result, list)]
    assert len(copied) == 2  # what looks up places, and what others wrote, is not run
    assert all(len(results) == 1 and results[0].shape == (3, 4) for results in copied)
    ran = [result for result in ran if isinstance(result, torch.Tensor) and result.shape == (3, 4)]
    assert len(ran) == 3  # a table of zeros in full, the two products that are alike, the third


def test_an_operation_of_unknown_size_takes_no_time() -> None:
    graph = make_fx(lambda x: x @ x.T, tracing_mode="symbolic")(torch.randn(3, 5)).graph
    assert {op_times.seconds_of(node) for node in graph.nodes if node.op == "call_function"} == {0.0}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_only_the_whole_model_is_kept_in_part(monkeypatch, num_stages: int) -> None:
    asked, make = [], compiled_module._Compiler.__init__

    def making(self, *args, **more):
        make(self, *args, **more)
        asked.append(more.get("in_part", False))

    monkeypatch.setattr(compiled_module._Compiler, "__init__", making)
    model = Net()
    split = capture(model, batches()[0], blocks=True).with_at_most(num_stages)
    Compilation({"dynamic": False, "backend": BACKEND}, (0.5,), regions=True).of(model, split).remove()
    assert any(asked) == (num_stages == 1)


def test_a_pass_of_the_users_is_left_alone_whenever_it_is_set(monkeypatch) -> None:
    from torch._inductor import config

    seen = []

    def inductor(graph, inputs, *, config_patches):
        seen.append(config_patches)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: inductor)
    compile_graph = _backend({}, 0.5)
    for own in (None, mark, None):
        with config.patch(joint_custom_post_pass=own):
            compile_graph(None, None)
    assert ["joint_custom_post_pass" in patches for patches in seen] == [True, False, True]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_part_adds_up_by_trial_unless_torch_is_deterministic(deterministic: bool) -> None:
    compilation = Compilation({"dynamic": False}, (0.5,), regions=True)
    model = Net().to(torch.bfloat16)
    torch.use_deterministic_algorithms(deterministic)
    try:
        alone, beside_others = (compilation.options_for(model, alone=alone)["options"] for alone in (True, False))
    finally:
        torch.use_deterministic_algorithms(False)
    assert alone["emulate_precision_casts"]
    assert beside_others["emulate_precision_casts"]
    if hasattr(torch._inductor.config, "deterministic"):
        assert beside_others["deterministic"]
        assert alone.get("deterministic", False) is deterministic


@pytest.mark.slow
def test_inductor_keeps_less_with_the_same_random_numbers() -> None:
    model, x = Net(draws=True), batches(batch=32)[0]
    found, saved_bytes = [], []
    for share in (1.0, 0.3, 0.0):
        torch._dynamo.reset()
        call = torch.compile(lambda x: model(x), dynamic=False, backend=_backend({"backend": "inductor"}, share))
        saved: dict[int, int] = {}
        for _ in range(2):
            torch.manual_seed(5)
            model.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.update({t.data_ptr(): t.nbytes}) or t, lambda t: t
            ):
                loss = call(x)
            state = torch.get_rng_state()
            loss.backward()
            assert torch.equal(torch.get_rng_state(), state)
        found.append({name: gradient.clone() for name, gradient in gradients(model)})
        saved_bytes.append(sum(saved.values()))
    for other in found[1:]:
        assert_equal(other, found[0])
    assert saved_bytes[0] > saved_bytes[1] > saved_bytes[2]
