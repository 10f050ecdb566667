"""What a model would save as one region, found before it is compiled."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.training import assert_equal, gradients
from torch import nn

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile import saved
from lowtide.runtime.compile.compiled import Compilation, _compiled_function
from lowtide.runtime.compile.regions import forget_regions, regions_of
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

    def forward(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class ReadsOnHost(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)


def sample() -> torch.Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


def found_for(model: nn.Module, share: float = 0.5, compilation: Compilation = COMPILATION) -> saved.Saved | None:
    split = capture(model, sample(), blocks=True)
    return compilation.saved_as_one(model, split, Sample.of(sample()), share)


def test_it_is_what_the_compiled_model_saves() -> None:
    model = Net()
    compiled = torch.compile(model, dynamic=False)
    given = sample()
    own = {tensor.untyped_storage()._cdata for tensor in (given, *model.parameters(), *model.buffers())}
    storages = [tensor.untyped_storage() for tensor in compiled(given).grad_fn.saved_tensors]
    kept = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in own}
    found = found_for(Net())
    assert found is not None
    assert found.all_bytes == pytest.approx(sum(kept.values()), rel=0.01)  # less what is rounded up to whole words
    assert 0 < found.marked_bytes < found.all_bytes


def test_less_kept_means_more_that_is_kept_besides() -> None:
    model = Net()
    less, more = found_for(model, 0.2), found_for(model, 0.9)
    assert less.all_bytes == more.all_bytes
    assert less.marked_bytes > more.marked_bytes  # milestones


def test_nothing_is_compiled_and_nothing_is_left_behind(monkeypatch) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", None)
    model = Net()
    assert found_for(model.eval()) is not None
    assert regions_of(model) is None
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_has_no_backward_saves_nothing() -> None:
    model = Net()
    split = capture(model, sample(), blocks=True)
    model.requires_grad_(requires_grad=False)
    assert COMPILATION.saved_as_one(model, split, Sample.of(sample()), 0.5) is None


@pytest.mark.parametrize("why", ["not one graph", "another backend", "a partitioner of the user's"])
def test_where_it_cannot_be_told(why: str) -> None:
    from torch._inductor import config

    model, compilation = (ReadsOnHost() if why == "not one graph" else Net()), COMPILATION
    if why == "another backend":
        compilation = Compilation({"dynamic": False, "backend": "eager"}, (0.5,), regions=True)
    with config.patch(custom_partitioner_fn=saved._partitioner(None) if "user" in why else None):
        assert found_for(model, compilation=compilation) is None


def test_what_cannot_fit_is_not_compiled(monkeypatch) -> None:
    for module in (trials, compiling):
        monkeypatch.setattr(module, "is_timed", lambda device: True)
    monkeypatch.setattr(compiling.CompiledPlanning, "_joint", lambda *_: [])  # times on a CPU vary
    monkeypatch.setattr(compiling, "_faster", lambda best, _: best)
    tried, with_room = [], trials.Trials.with_room_for_all
    monkeypatch.setattr(trials.Trials, "with_room_for_all", lambda self: tried.append(with_room(self)) or tried[-1])
    model, plain = Net().eval(), Net().eval()  # dropout would draw other numbers than without compilation
    options = {"bandwidth": 0, "strategy": "rotor"}
    with lowtide.fit(model, sample(), memory_budget="1GiB", **options) as plan:
        base = plan.chain.base_bytes  # what else lives in this process counts, too
        budget = base + int(0.7 * (plan.stats().predicted_peak_bytes - base))
    with lowtide.fit(model, sample(), memory_budget=budget, compile_stages=True, **options) as plan:
        model(sample()).backward()
        assert {each.split.num_stages for each in tried} == {1}  # as parts; the whole model has four
        assert len(tried) <= 2
        assert any("one compiled region that keeps" in note for note in plan.notes)
        assert plan.stats().predicted_peak_bytes <= budget
    plain(sample()).backward()
    assert_equal(dict(gradients(model)), dict(gradients(plain)))
