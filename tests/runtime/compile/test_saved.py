"""What a model would save as one region, found before it is compiled."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.training import assert_equal, gradients
from torch import nn
from torch._inductor.utils import fresh_cache

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile import pieces, saved
from lowtide.runtime.compile.compiled import Compilation, _compiled_function
from lowtide.runtime.compile.regions import forget_regions, not_one_graph, regions_of
from lowtide.runtime.fitting import compiling, trials
from lowtide.runtime.model.sample import Sample

WIDTH = 16
COMPILATION = Compilation({"dynamic": False}, (0.5,), regions=True)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    forget_regions()
    _compiled_function.cache_clear()
    torch._dynamo.reset()
    gc.collect()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))

    def features(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.features(x).square().mean()


class Scores(Net):
    """Its loss alone, or with what it is computed from, which ends a graph."""

    def __init__(self, *, beside: bool) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x):
        scores = self.features(x).view(-1, WIDTH)
        loss = F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.int64))
        return (scores, loss) if self.beside else loss


class Shuffling(Net):
    """Adds into places in backward."""

    def features(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x)[torch.arange(len(x) - 1, -1, -1)]
        return x


class Attending(Net):
    """Its backward reads one tensor in several views."""

    def features(self, x):
        self.calls += 1
        for block in self.blocks:
            rows = block(x).sin().view(8, -1, WIDTH)
            x = torch.softmax(rows @ rows.mT, -1) @ rows
        return x


class ReadsOnHost(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)


def sample() -> torch.Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


def found_for(
    model: nn.Module, share: float = 0.5, compilation: Compilation = COMPILATION, *, is_kept: bool = False
) -> saved.Saved | None:
    from torch._inductor import config

    split = capture(model, sample(), blocks=True)
    with config.patch(force_disable_caches=not is_kept):
        return compilation.saved_as_one(model, split, Sample.of(sample()), share)


@pytest.mark.parametrize("net", [Net, Attending])
def test_it_is_what_the_compiled_model_saves(net) -> None:
    model = net()
    compiled = torch.compile(model, dynamic=False)
    given = sample()
    own = {tensor.untyped_storage()._cdata for tensor in (given, *model.parameters(), *model.buffers())}
    loss = compiled(given)  # saves as long as it lives
    storages = [tensor.untyped_storage() for tensor in loss.grad_fn.saved_tensors]
    kept = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in own}
    found = found_for(net())
    assert found is not None
    assert found.all_bytes == pytest.approx(sum(kept.values()), rel=0.01)  # less what is rounded up to whole words
    assert 0 < found.marked_bytes < found.all_bytes


def test_less_kept_means_more_that_is_kept_besides() -> None:
    model = Net()
    less, more = found_for(model, 0.2), found_for(model, 0.9)
    assert less.all_bytes == more.all_bytes
    assert less.marked_bytes > more.marked_bytes  # milestones


def test_what_was_found_is_found_on_disk_at_the_next_start(monkeypatch) -> None:
    from torch._inductor import compile_fx

    traced, trace = [], compile_fx.compile_fx
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *args, **options: traced.append(1) or trace(*args, **options))
    model = Scores(beside=True)  # of two graphs

    def next_start(share: float = 0.5, *, is_kept: bool = True) -> tuple[saved.Saved | None, int]:
        forget_regions()
        torch._dynamo.reset()
        traced.clear()
        return found_for(model, share, is_kept=is_kept), len(traced)

    with fresh_cache():
        found, num_calls = next_start()
        assert num_calls > 0
        assert next_start() == (found, 0)
        assert next_start(0.2)[1] == num_calls
        assert next_start(is_kept=False) == (found, num_calls)
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "lowtide")
        for broken in ("[]", '{"all_bytes": 1, "marked_bytes": "2"}'):
            for path in folder.iterdir():
                path.write_text(broken)
            assert next_start() == (found, num_calls)
        shutil.rmtree(folder)
        folder.write_text("no folder")
        assert next_start() == (found, num_calls)


def test_what_was_found_is_for_the_same_surroundings() -> None:
    with fresh_cache():
        found = found_for(Net(), is_kept=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert found_for(Net(), is_kept=True).all_bytes < found.all_bytes
        assert found_for(Net(), is_kept=True) == found


def test_nothing_is_compiled_and_nothing_is_left_behind(monkeypatch) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", None)
    model = Net()
    assert found_for(model.eval()) is not None
    assert regions_of(model) is None
    assert not pieces._kept
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_result_beside_the_loss_changes_nothing() -> None:
    beside, alone = (found_for(Scores(beside=each)) for each in (True, False))
    assert beside.all_bytes == pytest.approx(alone.all_bytes, rel=0.01)
    crossing = sample().nbytes  # the scores, which the second graph saves whatever share is kept
    of_rows = 2 * 4 * len(sample())  # their largest, and their sums
    assert crossing <= beside.marked_bytes - alone.marked_bytes <= crossing + of_rows


def test_what_backward_adds_up_is_not_saved() -> None:
    found = found_for(Net())
    assert found_for(Shuffling()).marked_bytes == found.marked_bytes


def test_what_has_no_backward_saves_nothing(monkeypatch) -> None:
    from torch._inductor import compile_fx

    model = Net()
    split = capture(model, sample(), blocks=True)
    model.requires_grad_(requires_grad=False)
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", None)
    assert COMPILATION.saved_as_one(model, split, Sample.of(sample()), 0.5) is None


OF_THE_USERS = {"custom_partitioner_fn": saved._partitioner(None)}


@pytest.mark.parametrize("given", [{"backend": "eager"}, {"options": OF_THE_USERS}])
def test_it_cannot_be_told_for_other_compilers_and_partitioners(given) -> None:
    assert found_for(Net(), compilation=Compilation({"dynamic": False, **given}, (0.5,), regions=True)) is None


def test_it_cannot_be_told_under_settings_of_the_users() -> None:
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    with config.patch(OF_THE_USERS):
        assert found_for(Net()) is None
    with functorch_config.patch(activation_memory_budget=0.3):
        assert found_for(Net()) is None


def test_it_is_told_with_the_options_of_the_compiler() -> None:
    from torch._inductor import config

    seen = []
    given = {"joint_custom_pre_pass": lambda graph: seen.append(config.shape_padding), "shape_padding": False}
    assert found_for(Net(), compilation=Compilation({"dynamic": False, "options": given}, (0.5,), regions=True))
    assert seen == [False]
    assert config.shape_padding


def test_it_is_found_where_gradients_are_off() -> None:
    with torch.no_grad():
        found = found_for(Net())
    assert found == found_for(Net())


def test_a_model_that_is_not_one_graph_is_not() -> None:
    with pytest.raises(not_one_graph()):
        found_for(ReadsOnHost())


def budget_below_all(model: nn.Module, **options) -> int:
    with lowtide.fit(model, sample(), memory_budget="1GiB", **options) as plan:
        base = plan.chain.base_bytes  # what else lives in this process counts, too
        return base + int(0.7 * (plan.stats().predicted_peak_bytes - base))


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError()])
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_not_one_graph_is_traced_once(monkeypatch, error, asked) -> None:
    for module in (trials, compiling):
        monkeypatch.setattr(module, "is_timed", lambda device: True)
    traced, trace = [], Compilation.saved_as_one

    def tracing(*args):
        traced.append(True)
        if error is not None:
            raise error
        return trace(*args)

    found, ways = [], compiling.CompiledPlanning._ways
    monkeypatch.setattr(Compilation, "saved_as_one", tracing)
    monkeypatch.setattr(compiling.CompiledPlanning, "_ways", lambda *args: found.append(ways(*args)) or found[-1])
    model, options = ReadsOnHost().eval(), {"bandwidth": 0, "strategy": "rotor", "variants": False}
    compile_stages = {"backend": "eager", **({"regions": True} if asked else {})}
    budget = budget_below_all(model, **options)
    with lowtide.fit(model, sample(), memory_budget=budget, compile_stages=compile_stages, **options) as plan:
        assert regions_of(model) is None
        assert plan.stats().predicted_peak_bytes <= budget
    assert len(traced) == 1
    assert [len(each) for each in found] == [1]  # blocks are all that is left


def test_what_cannot_fit_is_not_compiled(monkeypatch) -> None:
    for module in (trials, compiling):
        monkeypatch.setattr(module, "is_timed", lambda device: True)
    monkeypatch.setattr(compiling.CompiledPlanning, "_joint", lambda *_: [])  # times on a CPU vary
    monkeypatch.setattr(compiling, "_faster", lambda best, _: best)
    tried, calls, with_room = [], [], trials.Trials.with_room_for_all

    def trying(asked):
        calls.append(model.calls.item())
        tried.append(with_room(asked))
        return tried[-1]

    monkeypatch.setattr(trials.Trials, "with_room_for_all", trying)
    model, plain = Net().eval(), Net().eval()  # dropout would draw other numbers than without compilation
    options = {"bandwidth": 0, "strategy": "rotor"}
    budget = budget_below_all(model, **options)
    with lowtide.fit(model, sample(), memory_budget=budget, compile_stages=True, **options) as plan:
        model(sample()).backward()
        assert {each.split.num_stages for each in tried} == {1}  # as parts; the whole model has four
        assert len(tried) <= 2
        assert not any(calls)  # what tracing made up has left nothing behind
        assert any("one compiled region that keeps" in note for note in plan.notes)
        assert plan.stats().predicted_peak_bytes <= budget
    plain(sample()).backward()
    assert_equal(dict(gradients(model)), dict(gradients(plain)))
