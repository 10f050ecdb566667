"""Images enter compiled blocks with channels last where trial steps are faster so, and numbers stay the same."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from tests.looping import looped
from tests.runtime.schedules import random_schedule
from tests.runtime.training import assert_equal, gradients
from torch import nn

import lowtide
from lowtide import Schedule
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile.compiled import Compilation, _compiled_function
from lowtide.runtime.compile.layouts import ChannelsLast
from lowtide.runtime.compile.regions import regions_of
from lowtide.runtime.fitting import compiling, layouts, trials
from lowtide.runtime.measure import variants
from lowtide.runtime.measure.measure import measure_split
from lowtide.runtime.model.call_site import layers_of
from lowtide.runtime.plan.attach import attach

# Dynamo's graphs as they are, and the partitioner that inductor uses, with graphs run operation by operation.
BACKEND, PARTITIONED = "eager", "aot_eager_decomp_partition"
OPTIONS = {"bandwidth": 0, "strategy": "rotor", "variants": False, "keeps_result": False, "optimizer": "sgd"}
CHANNELS = 6


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind():
    yield
    _compiled_function.cache_clear()
    torch._dynamo.reset()
    gc.collect()


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
        self.dropout = dropout

    def forward(self, x):
        y = torch.relu(self.norm(self.convolution(x)))
        return x + (nn.functional.dropout(y, self.dropout) if self.dropout else y)


class Network(nn.Module):
    def __init__(self, dropout: float = 0.0, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, CHANNELS, 3)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.head = nn.Linear(CHANNELS, 5)

    def forward(self, images):
        return self.end(self.features(images))

    def features(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return x

    def end(self, x):
        return self.head(x.mean((2, 3))).square().mean()


class Views(Network):
    """Fails where images have another layout."""

    def end(self, x):
        return self.head(x.view(len(x), -1)[:, :CHANNELS]).square().mean()


class Reads(Network):
    """Reads memory in the order in which it lies."""

    def end(self, x):
        return self.head(x.as_strided((len(x), CHANNELS), (x.stride(0), 1))).square().mean()


class Permutes(Network):
    """Returns images whose channels are last without lowtide."""

    def end(self, x):
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


class Drops(Network):
    """Draws a number for each entry in the order in which memory lies."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)


class DropsLater(Network):
    def end(self, x):
        return self.head(nn.functional.dropout(x.mean((2, 3)), 0.5)).square().mean()


class ReturnsImages(Network):
    def end(self, x):
        return {"images": x, "loss": super().end(x)}


def images(number: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(number))


class Strides:
    """A backend that keeps how the images are laid out that each compiled block reads."""

    def __init__(self) -> None:
        self.have_channels_last: list[bool] = []

    def __call__(self, graph, inputs):
        own = [each for each in inputs if isinstance(each, torch.Tensor) and each.dim() == 4 and len(each) == 4]
        self.have_channels_last += [each.is_contiguous(memory_format=torch.channels_last) for each in own]
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)


@pytest.fixture(params=[0.001], ids=["faster"])
def trial(request, monkeypatch):
    """Trial steps are timed, as on CUDA: those with channels last take so long, in regions 1.9 ms, others 2 ms."""
    tried = trials._tried

    def timed(model, sample, planned, settings, **others):
        is_so = settings.compilation is not None and settings.compilation.channels_last
        found = tried(model, sample, planned, settings, **others)
        return dataclasses.replace(found, seconds=request.param if is_so else 0.0019 if regions_of(model) else 0.002)

    for module in (trials, compiling, layouts):
        monkeypatch.setattr(module, "is_timed", lambda device: True)
    monkeypatch.setattr(trials, "_tried", timed)
    monkeypatch.setattr(compiling, "copies_images", lambda *_: True)  # as with inductor, which takes long
    # Without a compiler's rounding there is nothing else that another layout, which adds in another order, may cost.
    monkeypatch.setattr(variants, "_NUM_LAST_PLACES", 1000)


def fitted(model: nn.Module, backend=BACKEND, sample=None, **options) -> lowtide.Plan:
    sample = images() if sample is None else sample
    compiled = {"compile_stages": {"backend": backend, "regions": False}}
    return lowtide.fit(model, sample, memory_budget="1GiB", **OPTIONS, **compiled, **options)


def steps(model: nn.Module, call=None) -> dict[str, torch.Tensor]:
    """Losses, gradients and buffers of two steps."""
    found = {}
    for number in range(2):
        loss = (call or model)(images(number))
        loss.backward()
        found[f"loss {number}"] = loss.detach()
    return found | dict(gradients(model)) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.usefixtures("trial")
def test_images_enter_with_channels_last_where_steps_are_faster_so(tmp_path) -> None:
    backend, model, given = Strides(), Network(), images().requires_grad_()
    with fitted(model, backend, given) as plan:
        assert backend.have_channels_last[0] is False
        backend.have_channels_last.clear()
        torch._dynamo.reset()
        model(given).backward()
        assert backend.have_channels_last
        assert all(backend.have_channels_last)
        assert given.is_contiguous()
        assert torch.equal(given, images())
        assert any("images enter with channels last" in note for note in plan.notes)
    other = images().requires_grad_()
    Network()(other).backward()
    torch.testing.assert_close(given.grad, other.grad)
    assert given.grad.stride() == other.grad.stride()


@pytest.mark.usefixtures("trial")
def test_beside_the_whole_model_which_converts_images_once_blocks_are_tried_as_they_are() -> None:
    backend, model = Strides(), Network(depth=4)
    with lowtide.fit(model, images(), memory_budget="1GiB", **OPTIONS, compile_stages={"backend": backend}):
        assert regions_of(model) is not None
        assert len(backend.have_channels_last) > 1  # blocks, too
        assert not any(backend.have_channels_last)


@pytest.mark.usefixtures("trial")
def test_a_plan_keeps_the_layout_in_its_file(tmp_path) -> None:
    model, again = Network(), Network()
    with fitted(model) as plan:
        plan.save(tmp_path / "plan.json")
        found = steps(model)
    assert_near(found, steps(Network()))
    with lowtide.load_plan(tmp_path / "plan.json", again):
        assert layers_of(again, ChannelsLast)
        assert_equal(steps(again), found)
    assert not layers_of(again, ChannelsLast)


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("trial", [0.003], indirect=True)
def test_they_stay_as_they_are_where_steps_are_slower_so() -> None:
    backend, model = Strides(), Network()
    with fitted(model, backend) as plan:
        torch._dynamo.reset()
        backend.have_channels_last.clear()
        model(images()).backward()
        assert backend.have_channels_last
        assert not any(backend.have_channels_last)
        assert any("a step takes 2.0 ms so, and 3.0 ms" in note for note in plan.notes)


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize(
    ("build", "note"),
    [
        (Views, "a step fails: "),
        (Reads, "its "),
        (Permutes, "it returns different tensors"),
        (Drops, "its "),
    ],
    ids=["views", "reads", "permutes", "dropout"],
)
def test_they_stay_as_they_are_where_a_step_gives_something_else_so(build, note: str) -> None:
    model, plain = build(), build()
    with fitted(model) as plan:
        assert any(f"images stay in the usual layout: with channels last {note}" in each for each in plan.notes)
        assert not layers_of(model, ChannelsLast)
        for block in plain.blocks:
            block.compile(backend=BACKEND, dynamic=False)
        torch.manual_seed(3)
        found = model(images())
        torch.manual_seed(3)
        expected = plain(images())
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.usefixtures("trial")
def test_dropout_that_is_drawn_in_the_same_order_does_not_keep_them() -> None:
    model, plain = DropsLater(), DropsLater()
    with fitted(model):
        assert layers_of(model, ChannelsLast)
        torch.manual_seed(3)
        found = model(images())
    torch.manual_seed(3)
    torch.testing.assert_close(found, plain(images()))


@pytest.mark.usefixtures("trial")
def test_a_result_is_laid_out_as_without_lowtide() -> None:
    model, plain = ReturnsImages(), ReturnsImages()
    with fitted(model):
        assert layers_of(model, ChannelsLast)
        found, expected = model(images()), plain(images())
        assert found["images"].stride() == expected["images"].stride()
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(images()), plain.eval()(images()))


@pytest.fixture(scope="module")
def measured():
    model = Network()
    split = capture(model, images(), blocks=True)
    compiled = Compilation({"backend": PARTITIONED, "dynamic": False}, channels_last=True).of(model, split)
    by_hand = Network()
    for block in by_hand.blocks:
        block.compile(backend=PARTITIONED, dynamic=False)
    expected = steps(by_hand, lambda batch: by_hand(batch.to(memory_format=torch.channels_last)))
    yield model, split, measure_split(model, split, images(), compiled=compiled), expected
    compiled.remove()


@looped("seed", range(4))
def test_any_schedule_gives_the_numbers_of_images_that_were_converted_by_hand(measured, seed: int) -> None:
    model, split, chain, expected = measured
    model.load_state_dict(Network().state_dict())
    model.zero_grad()
    solution = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all", manage_weights=False)
    drawn = random_schedule(chain.num_stages, seed, moves=0.4 * (seed % 2))
    solution = dataclasses.replace(solution, schedule=Schedule("random", drawn.operations))
    with attach(model, solution, split=split, strict=seed == 0):
        assert_equal(steps(model), expected)
