"""Variants: blocks compiled so that they save less, checked, chosen by the solver, and run as the schedule says."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F  # noqa: N812
from tests.looping import looped
from tests.runtime.schedules import random_schedule
from tests.runtime.training import assert_equal, batches, train
from torch import nn
from torch._dynamo.backends import registry

import lowtide
from lowtide import Backward, Forward, Schedule
from lowtide.chain import Stage, Variant
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile.compiled import Compilation, CompiledStages, _compiled_function, copies_images
from lowtide.runtime.compile.regions import forget_regions
from lowtide.runtime.fitting import compiling, fit
from lowtide.runtime.fitting.compiling import CompiledPlanning
from lowtide.runtime.fitting.fit import _compilation
from lowtide.runtime.measure import figures as measure_figures
from lowtide.runtime.measure.measure import _not_dominated, measure_split
from lowtide.runtime.measure.timing import Timing
from lowtide.runtime.meter import Meter
from lowtide.runtime.plan.attach import attach
from lowtide.runtime.plan.load import plan_from_dict
from lowtide.runtime.plan.steps import RealSteps

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without 16-bit products

# The partitioner that inductor uses, with graphs run operation by operation: nothing is compiled to machine code.
# All tests share what it compiles.
BACKEND = "counted"
BUDGETS = (0.6, 0.0)
SHAPE = (64, 16)
RECOMPUTE = {"bandwidth": 0, "strategy": "rotor"}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        if self.dropout:
            y = F.dropout(y, self.dropout, self.training) * torch.sigmoid(y)
        return x + y


def deep(depth: int = 4, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(SHAPE[1], dropout) for _ in range(depth)))


class BatchNormalised(nn.Module):
    """Changes buffers, and works in place on what it made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2, self.act = nn.BatchNorm1d(width), nn.BatchNorm1d(width), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.norm2(self.second(self.act(self.norm1(self.first(x))))) + x)


def batch_normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(BatchNormalised(SHAPE[1]) for _ in range(4)))


class ReadsStatistics(BatchNormalised):
    """Its output depends on the statistics, unlike BatchNorm's own."""

    def forward(self, x):
        return super().forward(x) * (1 + self.norm1.running_var)


def reading_statistics() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(ReadsStatistics(SHAPE[1]) for _ in range(4)))


@functools.cache
def compiled_numbers(build=deep) -> dict[str, torch.Tensor]:
    """Training of the compiled model without lowtide."""
    model = build()
    for block in model:
        block.compile(backend=BACKEND, dynamic=False)
    return train(model, batches(SHAPE, 2))


def compiled_and_measured(model: nn.Module, backend=BACKEND, budgets=BUDGETS, **options):
    x = batches(SHAPE, 1)[0].requires_grad_()
    split = capture(model, x, blocks=True)
    compiled = CompiledStages(model, split, {"backend": backend, "dynamic": False}, budgets)
    return split, compiled, measure_split(model, split, x, compiled=compiled, **options)


compiled_under: list[float] = []
"""The budgets under which `BACKEND` has compiled something."""


def counted(graph, inputs):
    compiled_under.append(torch._functorch.config.activation_memory_budget)
    return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)


@pytest.fixture(scope="module", autouse=True)
def _named():
    """Plans that are saved have the backend's name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(registry._BACKENDS, BACKEND, None)
        patched.setitem(registry._COMPILER_FNS, BACKEND, counted)
        yield


def test_a_block_is_measured_in_each_of_its_variants_and_equal_ones_share_them() -> None:
    _compiled_function.cache_clear()
    compiled_under.clear()
    model = deep()
    split, compiled, chain = compiled_and_measured(model)
    assert sorted(compiled_under) == [0.0, 0.6, 1.0]
    assert [stage.name for stage in chain.stages] == ["0", "1", "2", "3"]
    for stage in chain.stages:
        assert stage.variants[-1].name == "budget 0"  # the leanest is never dominated
        assert all(variant.saved_bytes < stage.saved_bytes for variant in stage.variants)
        assert stage.variants[-1].saved_bytes == stage.output_bytes
    assert not chain.provenance["notes"]
    assert torch._functorch.config.activation_memory_budget == 1.0
    variants = [stage.num_variants - 1 for stage in chain.stages]
    forwards = [Forward(k, "all", variant) for k, variant in enumerate(variants, start=1)]
    operations = [*forwards, *(Backward(k) for k in range(len(variants), 0, -1))]
    with attach(model, _as_solution(chain, Schedule("leanest", operations)), split=split):
        train(model, batches(SHAPE, 1))
    compiled.remove()
    assert sorted(compiled_under) == [0.0, 0.6, 1.0]  # training compiles nothing again
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


class Numbered(Block):
    """Asks for its own number: Dynamo compiles it for each."""

    def __init__(self, number: int) -> None:
        super().__init__(SHAPE[1], 0.0)
        self.number = number

    def forward(self, x):
        return super().forward(x) if self.number >= 0 else x


def test_blocks_that_dynamo_cannot_take_for_equal_are_all_compiled() -> None:
    num_compiled, num_blocks = 0, 4  # more than Dynamo's own limit here

    def counting(graph, inputs):
        nonlocal num_compiled
        num_compiled += 1
        return graph

    model = nn.Sequential(*(Numbered(k) for k in range(num_blocks)))
    options = {"compile_stages": {"backend": counting}, "variants": False}
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        lowtide.fit(model, batches(SHAPE, 1)[0], memory_budget="1GiB", **RECOMPUTE, **options),
    ):
        assert num_compiled == num_blocks


def test_hooks_of_a_compiled_block_that_come_and_go_after_planning_are_noticed() -> None:
    model, x = deep(), batches(SHAPE, 1)[0]
    first = model[1].register_forward_hook(lambda module, args, output: output * 0.5)
    options = {"compile_stages": {"backend": "eager"}, "variants": False}
    with lowtide.fit(model, x, memory_budget="1GiB", **RECOMPUTE, **options):
        plain = deep()
        first.remove()
        assert torch.equal(model(x), plain(x))
        for each in (model, plain):
            each[2].register_forward_hook(lambda module, args, output: output * 0.25)
        assert_equal(train(model, batches(SHAPE, 2)), train(plain, batches(SHAPE, 2)))


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind():
    """Other tests count all live tensors."""
    yield
    compiled_numbers.cache_clear()
    _compiled_function.cache_clear()
    forget_regions()
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture(autouse=True)
def _few_variants(monkeypatch):
    """Each is compiled, and they differ in what they save alone."""
    monkeypatch.setattr(fit, "DEFAULT_BUDGETS", BUDGETS)


@pytest.fixture(scope="module", params=[deep, batch_normalised])
def compiled_model(request):
    model = request.param()
    split, compiled, chain = compiled_and_measured(model)
    yield request.param, model, split, chain
    compiled.remove()


@looped("seed", range(6))
def test_any_schedule_with_variants_gives_the_numbers_of_the_compiled_model(compiled_model, seed: int) -> None:
    build, model, split, chain = compiled_model
    model.load_state_dict(build().state_dict())
    drawn = random_schedule(chain.num_stages, seed, moves=0.4 * (seed % 2))
    variant = {k: (k + seed) % chain.stage(k).num_variants for k in range(1, chain.num_stages + 1)}
    operations = [
        Forward(op.stage, "all", variant[op.stage]) if isinstance(op, Forward) and op.save == "all" else op
        for op in drawn.operations
    ]
    solution = _as_solution(chain, Schedule("random", operations))
    with attach(model, solution, split=split, strict=seed == 0):
        assert_equal(train(model, batches(SHAPE, 2)), compiled_numbers(build))


def test_statistics_that_a_block_reads_are_as_they_were_when_it_runs_again() -> None:
    model = reading_statistics()
    split, compiled, chain = compiled_and_measured(model, budgets=())
    operations = [Forward(1, "all"), Forward(2, "keep"), Forward(3, "all"), Forward(4, "all"), Backward(4), Backward(3)]
    operations += [Forward(2, "all"), Backward(2), Backward(1)]
    with attach(model, _as_solution(chain, Schedule("by hand", operations)), split=split):
        assert_equal(train(model, batches(SHAPE, 2)), compiled_numbers(reading_statistics))
    compiled.remove()


def _as_solution(chain: lowtide.Chain, schedule: Schedule) -> lowtide.Solution:
    solution = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all", manage_weights=False)
    return dataclasses.replace(solution, schedule=schedule)


def share_of_plain_peak(share: float) -> int:
    """What is live anyhow, and a share of what plain training takes on top."""
    gc.collect()
    with Meter("cpu") as meter:
        live_bytes = meter.live_bytes
        model = deep()
        model(batches(SHAPE, 1)[0]).square().mean().backward()
        return live_bytes + int(share * (meter.peak_bytes - live_bytes))


@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the numbers of each step
def test_fit_chooses_variants_and_gives_the_numbers_of_the_compiled_model(tmp_path, monkeypatch) -> None:
    # all take the same time: what saves less is always preferred, whatever else runs on this machine
    monkeypatch.setattr(measure_figures, "timed", lambda *_: Timing(1e-3))
    model, x = deep(), batches(SHAPE, 1)[0].requires_grad_()
    budget = share_of_plain_peak(0.9) + 2 * sum(parameter.nbytes for parameter in model.parameters()) + 1024  # Adam's
    options = {"optimizer": "adam", "loss": lambda y: y.square().mean(), "compile_stages": {"backend": BACKEND}}
    with lowtide.fit(model, x, memory_budget=budget, **RECOMPUTE, **options) as plan:
        chosen = {op.stage for op in plan.schedule.operations if isinstance(op, Forward) and op.variant}
        assert chosen
        plan.save(tmp_path / "plan.json")  # before steps from which it may be planned again
        assert plan.stats().measured_peak_bytes <= budget
        assert "variants" in str(plan)
        assert "budget 0" in str(plan)
        assert_equal(train(model, batches(SHAPE, 2)), compiled_numbers())
        model.eval()
        with torch.no_grad():
            evaluated = model(x)
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(evaluated, model(x))  # compiled, and not
    _check_saved_plan(tmp_path / "plan.json", chosen)


def test_variants_are_compiled_only_where_not_everything_fits(monkeypatch) -> None:
    budgets = []

    def counting(graph, inputs):
        budgets.append(torch._functorch.config.activation_memory_budget)
        return graph

    order = itertools.count(1)  # variants, which are measured after the stage itself, are quicker
    monkeypatch.setattr(measure_figures, "timed", lambda *_: Timing(1 / next(order)))
    model, x = deep(), batches(SHAPE, 1)[0].requires_grad_()
    options = {"optimizer": "sgd", "loss": lambda y: y.square().mean(), "compile_stages": {"backend": counting}}
    with lowtide.fit(model, x, memory_budget="1GiB", **RECOMPUTE, **options) as plan:
        num_graphs = len(budgets)
        assert_equal(train(model, batches(SHAPE, 2)), train(deep(), batches(SHAPE, 2)))
        assert all(not stage.variants for stage in plan.chain.stages)
    assert budgets == num_graphs * [1.0]
    with lowtide.fit(deep(), x, memory_budget=share_of_plain_peak(0.7), **RECOMPUTE, **options) as plan:
        assert sorted(budgets) == sorted(num_graphs * [1.0, *BUDGETS])  # what was compiled is used
        assert any(stage.variants for stage in plan.chain.stages)


def test_a_plan_with_variants_is_corrected_where_a_real_step_takes_more(monkeypatch) -> None:
    monkeypatch.setattr(measure_figures, "timed", lambda *_: Timing(1e-3))
    model, x = deep(), batches(SHAPE, 1)[0].requires_grad_()
    budget = share_of_plain_peak(0.9) + 2 * sum(parameter.nbytes for parameter in model.parameters()) + 1024  # Adam's
    options = {"optimizer": "adam", "loss": lambda y: y.square().mean(), "compile_stages": {"backend": BACKEND}}
    with lowtide.fit(model, x, memory_budget=budget, **RECOMPUTE, **options) as plan:
        first = plan.schedule
        model(x).square().mean().backward()
        model.zero_grad()
        with monkeypatch.context() as patched:
            patched.setattr(RealSteps, "peak_bytes", property(lambda _: budget + 100))  # as CUDA might say
            with pytest.warns(lowtide.LowtideWarning, match="planning again"):
                model(x)
        assert plan.schedule != first
        assert any(op.variant for op in plan.schedule.operations if isinstance(op, Forward))
        assert_equal(train(model, batches(SHAPE, 2)), compiled_numbers())
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


class WrongForOtherShapes:
    """Stands for a partitioner that chooses anew for each shape what to compute again: lean variants are right for one.

    Notes how many rows each run as a lean variant had.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    def backend(self, graph, inputs):
        is_lean = torch._functorch.config.activation_memory_budget < 1

        def run(*args):
            outputs = graph(*args)
            if not is_lean:
                return outputs
            self.rows.append(len(outputs[0]))
            return tuple(_Scaled.apply(out, 1.0 if len(out) == SHAPE[0] else 1.1) for out in outputs)

        return run


def test_variants_are_used_for_the_shapes_that_they_were_checked_for(monkeypatch) -> None:
    # variants, which are measured after the stage itself, are quicker: they are preferred wherever they are compiled,
    # which they are here under any budget
    with_variants = functools.partialmethod(CompiledPlanning._planned_with, regions=False)
    monkeypatch.setattr(CompiledPlanning, "_only_blocks", with_variants)
    order = itertools.count(1)
    monkeypatch.setattr(measure_figures, "timed", lambda *_: Timing(1 / next(order)))
    wrong = WrongForOtherShapes()
    monkeypatch.setitem(registry._BACKENDS, "wrong_for_other_shapes", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "wrong_for_other_shapes", wrong.backend)
    options = {"optimizer": "sgd", "loss": lambda y: y.square().mean()}
    options |= {"compile_stages": {"backend": "wrong_for_other_shapes"}}
    sizes = (SHAPE[0], SHAPE[0] // 2, SHAPE[0] // 4, SHAPE[0])
    steps = [batches((size, SHAPE[1]), 1)[0] for size in sizes]
    plain, model, shared = deep(2), deep(2), deep(2)
    expected = train(plain, steps)
    x = batches(SHAPE, 1)[0].requires_grad_()
    with lowtide.fit(model, x, memory_budget="1GiB", **RECOMPUTE, **options) as plan:
        values = plan.to_dict()
        wrong.rows.clear()
        assert_equal(train(model, steps), expected)
        assert plan.num_shapes == 2  # one for the sample, one for all that are smaller
    assert set(wrong.rows) == {SHAPE[0]}
    wrong.rows.clear()
    # as processes share it, which cannot plan again
    with plan_from_dict({**values, "signature": None, "checked": values["signature"]}, shared):
        assert_equal(train(shared, steps), expected)
    assert set(wrong.rows) == {SHAPE[0]}


def _check_saved_plan(path, chosen: set[int]) -> None:
    model = deep()
    with lowtide.load_plan(path, model) as plan:
        assert {op.stage for op in plan.schedule.operations if isinstance(op, Forward) and op.variant} == chosen
        assert_equal(train(model, batches(SHAPE, 2)), compiled_numbers())
    values = json.loads(path.read_text())
    for edit, complaint in (
        ({"compilation": {**values["compilation"], "torch": "1.0"}}, "checked with torch '1.0'"),
        ({"compilation": {"budgets": "many"}}, "which is invalid; was the file edited"),
        ({"compilation": None}, "has no compiled blocks"),
        ({"memory_budget": "much"}, "memory_budget is 'much'"),
    ):
        path.write_text(json.dumps({**values, **edit}))
        with pytest.raises(lowtide.PlanError, match=complaint):
            lowtide.load_plan(path, model)
        assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_a_plan_whose_backend_is_a_function_is_not_saved(tmp_path) -> None:
    options = {"backend": OffBy(1.0).backend}
    with (
        lowtide.fit(
            deep(2), batches(SHAPE, 1)[0], memory_budget="1GiB", **RECOMPUTE, compile_stages=options, variants=False
        ) as plan,
        pytest.raises(lowtide.PlanError, match="give the backend as a string"),
    ):
        plan.save(tmp_path / "plan.json")


def refusal_of(variant: str, chain: lowtide.Chain) -> str:
    """Why a variant was refused: once for all equal stages, in one line."""
    (note,) = [note for note in chain.provenance["notes"] if repr(variant) in note]
    assert "\n" not in note
    return note


def test_a_variant_that_draws_dropout_anew_is_refused_in_one_line() -> None:
    build = functools.partial(deep, dropout=0.3)
    model = build()
    split, compiled, chain = compiled_and_measured(model, budgets=(0.0,))
    assert "draws new random numbers (dropout)" in refusal_of("budget 0", chain)
    assert all(variant.name != "budget 0" for stage in chain.stages for variant in stage.variants)
    solution = lowtide.solve(chain, memory_budget="1GiB", strategy="rotor", manage_weights=False)
    with attach(model, solution, split=split):
        assert_equal(train(model, batches(SHAPE, 2)), compiled_numbers(build))
    compiled.remove()


class OffBy(nn.Module):
    """Stands for a compiler's mistake: the gradient is a little off where the budget is below 1."""

    def __init__(self, factor: float, compiler: str = "eager") -> None:
        super().__init__()
        self.factor, self.compiler = factor, compiler

    def backend(self, graph, inputs):
        factor = 1.0 if torch._functorch.config.activation_memory_budget == 1.0 else self.factor
        graph = torch._dynamo.lookup_backend(self.compiler)(graph, inputs)

        def run(*args):
            return tuple(_Scaled.apply(out, factor) for out in graph(*args))

        return run


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize(
    ("factor", "allow_rounding", "refused"),
    [
        (1.001, False, True),
        (1.001, True, True),
        (1 + 2**-23, False, True),
        (1 + 2**-23, True, False),
        (1.0, False, False),
    ],
)
def test_a_variant_with_other_gradients_is_refused(factor: float, allow_rounding: bool, refused: bool) -> None:
    _, compiled, chain = compiled_and_measured(deep(2), backend=OffBy(factor).backend, allow_rounding=allow_rounding)
    compiled.remove()
    assert bool(chain.provenance["notes"]) == refused
    if refused:
        assert "its gradients differ from those of the stage itself" in chain.provenance["notes"][0]


class Counting(Block):
    """Changes a buffer that lean variants save for their backward, which autograd then refuses to run."""

    def __init__(self) -> None:
        super().__init__(SHAPE[1], 0.0)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.num_calls += 1
        return super().forward(x) * (1 + 1 / self.num_calls)


def counting() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Counting() for _ in range(4)))


def test_a_variant_that_fails_is_refused_in_one_line() -> None:
    model = counting()
    split, compiled, chain = compiled_and_measured(model, budgets=(0.0,))
    assert "it fails: one of the variables needed for gradient computation" in refusal_of("budget 0", chain)
    solution = lowtide.solve(chain, memory_budget="1GiB", strategy="rotor", manage_weights=False)
    with attach(model, solution, split=split):
        assert_equal(train(model, batches(SHAPE, 2)), compiled_numbers(counting))
    compiled.remove()


class Flickering(OffBy):
    """Stands for sums in an open order, too, of which rounding seldom leaves anything: some backwards are off."""

    num_backwards = 0

    def backend(self, graph, inputs):
        run = super().backend(graph, inputs)

        def flickering(*args):
            outputs = run(*args)
            outputs[0].register_hook(self.flicker)
            return outputs

        return flickering

    def flicker(self, gradient):
        self.num_backwards += 1
        return gradient * (1 + 2**-20) if self.num_backwards % 5 == 0 else gradient


@pytest.mark.parametrize(("factor", "refused"), [(1.0, False), (1.001, True)])
def test_variants_of_a_stage_whose_numbers_seldom_differ(factor: float, refused: bool) -> None:
    _, compiled, chain = compiled_and_measured(deep(2), backend=Flickering(factor).backend)
    compiled.remove()
    assert bool(chain.provenance["notes"]) == refused
    if refused:
        assert "its own runs differ by" in chain.provenance["notes"][0]


def test_a_variant_is_compared_gradient_by_gradient_with_the_stage_without_compilation() -> None:
    """Whose graph hands the gradients of parameters over in another order."""
    backend = OffBy(1.1, "aot_eager").backend
    _, compiled, chain = compiled_and_measured(deep(2), backend=backend, allow_rounding=True)
    compiled.remove()
    assert all(not stage.variants for stage in chain.stages)
    assert "its gradients differ from those of the stage itself" in chain.provenance["notes"][0]


def test_a_schedule_with_variants_is_refused_where_none_are_compiled() -> None:
    model = deep(2)
    operations = [Forward(1, "all", 1), Forward(2, "all"), Backward(2), Backward(1)]
    with pytest.raises(lowtide.PlanError, match="has no compiled blocks"):
        attach(model, Schedule("by hand", operations))
    assert "_compiled_call_impl" not in vars(model)
    split, compiled, chain = compiled_and_measured(model)
    with pytest.raises(lowtide.PlanError, match="attach the solution"):
        attach(model, Schedule("by hand", operations), split=split)
    renamed = [dataclasses.replace(stage, variants=(Variant("other", 1, 1, 2**20),)) for stage in chain.stages]
    other = dataclasses.replace(chain, stages=tuple(renamed))
    with pytest.raises(lowtide.PlanError, match="'other', which is not compiled"):
        attach(model, _as_solution(other, Schedule("by hand", operations)), split=split)
    compiled.remove()


def test_one_stage_as_two_variants_is_refused() -> None:
    twice = [Forward(1, "all", 1), Forward(2, "all"), Backward(2)]
    twice += [lowtide.Offload("abar", 1), lowtide.Release("abar", 1), Forward(1, "all", 2), Backward(1)]
    with pytest.raises(lowtide.PlanError, match="a stage must use one variant"):
        attach(deep(2), Schedule("by hand", twice))


@pytest.mark.parametrize(("compile_stages", "is_compiled"), [(False, False), (True, True), ({}, True)])
def test_no_options_are_options(compile_stages, is_compiled: bool) -> None:
    compilation = _compilation(compile_stages, variants=False)
    assert compilation == (Compilation({"dynamic": False}) if is_compiled else None)


def test_variants_wants_one_of_its_values() -> None:
    with pytest.raises(ValueError, match="expected True, False or 'rounding'"):
        lowtide.fit(deep(2), batches(SHAPE, 1)[0], memory_budget="1GiB", compile_stages=True, variants="some")


def test_dominated_variants_are_left_out() -> None:
    def way(name: str, seconds: float, saved_bytes: int, **more: int) -> Variant:
        return Variant(name, seconds, seconds, saved_bytes, **more)

    stage = Stage("s", 1.0, 1.0, output_bytes=1, saved_bytes=10)
    ways = [way("slower and larger", 1.3, 9), way("good", 1.2, 8), way("same bytes", 1.25, 8), way("lean", 2.0, 1)]
    ways += [way("no better than the stage", 1.0, 10), way("a twin", 2.0, 1)]
    assert [variant.name for variant in _not_dominated(stage, ways)] == ["good", "lean"]
    faster = way("faster and larger", 0.5, 20)
    assert _not_dominated(stage, [faster]) == [faster]
    lean = way("saves less", 1.1, 2, forward_extra_bytes=4, backward_extra_bytes=20)
    more = {"backward_extra_bytes": 10}, {"forward_extra_bytes": 3, "backward_extra_bytes": 20}
    others = [way("takes less at once", 1.2, 8, **bytes_at_once) for bytes_at_once in more]
    others += [way("frees more", 1.3, 7, forward_extra_bytes=4, backward_extra_bytes=20, freed_bytes=1)]
    tall = dataclasses.replace(stage, backward_extra_bytes=30)
    for other in others:
        assert _not_dominated(tall, [lean, other]) == [other, lean]


def test_variants_under_autocast() -> None:
    def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return train(model, batches(SHAPE, 2))

    plain, model = deep(), deep()
    for block in plain:
        block.compile(backend=BACKEND, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        split, compiled, chain = compiled_and_measured(model, budgets=(0.0,))
    k = 2
    variant = chain.stage(k).num_variants - 1
    assert chain.stage(k).variants[variant - 1].name == "budget 0"
    forwards = [Forward(1, "all"), Forward(2, "keep"), Forward(3, "all"), Forward(4, "all")]
    operations = [*forwards, Backward(4), Backward(3), Forward(2, "all", variant), Backward(2), Backward(1)]
    with attach(model, _as_solution(chain, Schedule("by hand", operations)), split=split):
        assert_equal(numbers(model), numbers(plain))
    compiled.remove()


def test_variants_are_compiled_for_equal_numbers_wherever_a_plan_is_loaded() -> None:
    model = deep(2)
    split = capture(model, batches(SHAPE, 1)[0], blocks=True)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = CompiledStages(model, split, {"mode": "max-autotune-no-cudagraphs"}, BUDGETS)
    compiled.remove()
    again = Compilation.from_dict(json.loads(json.dumps(compiled.compilation.to_dict())))
    assert again == compiled.compilation
    assert again.options["options"]["emulate_precision_casts"]
    assert again.options["options"]["max_autotune"]  # what the mode stands for: torch takes one of the two
    assert "mode" not in again.options
    loaded = again.of(model, split)
    loaded.remove()
    assert loaded.compilation == compiled.compilation
    assert not again.options["options"].get("deterministic")  # the mode asks for trials
    plain = CompiledStages(model, split, {}, BUDGETS)
    plain.remove()
    by_rule = {}
    if hasattr(torch._inductor.config, "deterministic"):
        by_rule = {"options": {"deterministic": True, "force_shape_pad": True}}
    assert plain.compilation.options == by_rule


def test_inductor_gives_the_same_gradients_in_each_variant_in_16_bits() -> None:
    model, x = deep(2).to(torch.bfloat16), batches(SHAPE, 1)[0].to(torch.bfloat16).requires_grad_()
    split = capture(model, x, blocks=True)
    compiled = CompiledStages(model, split, {"dynamic": False}, (0.0,))
    chain = measure_split(model, split, x, compiled=compiled)
    compiled.remove()
    assert not chain.provenance["notes"]
    assert [variant.name for variant in chain.stages[0].variants] == ["budget 0"]


class Convolution(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, kernel, padding="same")

    def forward(self, x):
        return torch.relu(self.convolution(x))


@pytest.mark.parametrize(
    ("kernel", "weights_are", "images_are", "backend", "expected"),
    [
        (3, torch.contiguous_format, torch.contiguous_format, "inductor", True),
        (1, torch.contiguous_format, torch.contiguous_format, "inductor", True),
        (3, torch.channels_last, torch.contiguous_format, "inductor", False),
        (1, torch.channels_last, torch.channels_last, "inductor", False),
        (3, torch.contiguous_format, torch.contiguous_format, BACKEND, False),
    ],
)
def test_blocks_copy_images_that_are_laid_out_otherwise(
    kernel, weights_are, images_are, backend, expected: bool
) -> None:
    model = nn.Sequential(Convolution(kernel), Convolution(kernel)).to(memory_format=weights_are)
    images = torch.zeros(2, 3, 8, 8).to(memory_format=images_are)
    split = capture(model, images, blocks=True)
    assert copies_images(model, split, {"backend": backend}, [images]) == expected
    assert not copies_images(model, split, {"backend": backend}, [torch.zeros(2, 3)])  # there is nothing to convert
    compiled = CompiledStages(model, split, {"backend": backend})
    try:
        # what the compiled blocks are handed is laid out as it says
        assert model._modules["0"]._call_impl(images).is_contiguous() == (expected or backend == BACKEND)
    finally:
        compiled.remove()


def test_fit_says_how_to_lay_out_images_where_no_trial_can_show_it(monkeypatch) -> None:
    monkeypatch.setattr(compiling, "copies_images", lambda *_: True)  # as inductor, which takes long
    model = nn.Sequential(Convolution(3), Convolution(3))
    options = {**RECOMPUTE, "compile_stages": {"backend": "eager"}, "variants": False}
    with pytest.warns(lowtide.LowtideWarning, match=r"model\.to\(memory_format=torch\.channels_last\)"):
        lowtide.fit(model, torch.zeros(2, 3, 8, 8), memory_budget="1GiB", **options).detach()
