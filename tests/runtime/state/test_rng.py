"""Whatever generator a stage draws from, it draws the same numbers again, and leaves the generator as it was."""

from __future__ import annotations

import copy
import random
import sys
from functools import partial

import numpy
import pytest
import torch
from tests.runtime.schedules import random_schedule, recomputing
from tests.runtime.training import assert_equal, gradients, train
from torch import nn

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.plan.attach import split_for
from lowtide.runtime.state import rng
from lowtide.runtime.state.rng import Source


class Noisy(nn.Module):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x):
        x = self.linear(x) * (1 + 0.1 * random.random()) + 0.1 * float(numpy.random.rand())
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return torch.tanh(x) * (torch.rand_like(x) > 0.3)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Noisy() if k % 2 else nn.Linear(8, 8) for k in range(6)))


def numbers(model: nn.Module, num_samples: int = 4) -> dict[str, torch.Tensor]:
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    found = {}
    for step in range(3):
        model.zero_grad()
        output = model(torch.ones(num_samples, 8))
        output.square().mean().backward()
        found[f"{step} output"] = output.detach()
        found.update({f"{step} {name}": gradient for name, gradient in gradients(model)})
        following = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        found[f"{step} next numbers"] = torch.tensor(following)
        found[f"{step} own"] = torch.stack([m.generator.get_state() for m in model if isinstance(m, Noisy)])
    return found


def test_generators_of_every_kind():
    model = make()
    lowtide.attach(model, recomputing(6))
    assert_equal(numbers(model), numbers(make()))


@pytest.mark.filterwarnings("ignore:a step took")  # the loop keeps the result of each step
def test_planning_for_a_model_with_generators_of_every_kind():
    model, num_samples = make(), 4096  # so many that the generators' states, which count on a CPU, do not matter
    options = {"bandwidth": 0, "optimizer": "sgd"}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, torch.ones(num_samples, 8), memory_budget=1000, **options)
    budget = caught.value.minimum_bytes + 3 * num_samples * 8 * 4  # other tests may have left something in memory
    with lowtide.fit(model, torch.ones(num_samples, 8), memory_budget=budget, **options) as plan:
        assert_equal(numbers(model, num_samples), numbers(make(), num_samples))
        assert plan.stats().recomputed_per_step > 0


class LeavesNoTrace(nn.Module):
    """Draws, and puts the generator back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            noise = torch.rand_like(x)
        return torch.tanh(self.linear(x) * noise)


def test_a_submodule_that_draws_and_puts_the_generator_back():
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*(LeavesNoTrace() for _ in range(4)))

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean() * torch.rand(())  # moves the generator between forward and backward

    inputs, model = [torch.randn(8, 16) for _ in range(3)], make()
    with lowtide.attach(model, recomputing(4)) as plan:
        assert_equal(train(model, inputs, loss=loss), train(make(), inputs, loss=loss))
        assert plan.stats().recomputed_per_step > 0


class SetsGenerators(nn.Module):
    """Its own code, between its submodules, sets generators or hands them on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16)) for _ in range(5)
        )

    def forward(self, x):
        for k, block in enumerate(self.blocks):
            x = x + getattr(self, self.way)(k, block, x)
        return x

    def seeded(self, k, block, x):
        torch.manual_seed(k)
        return block(x) * torch.rand_like(x)

    def forked(self, k, block, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(k)
            return block(x)

    def one_mask(self, k, block, x):
        state = torch.get_rng_state()
        y = block(x)
        torch.set_rng_state(state)
        return y

    def unmoved(self, k, block, x):
        state = torch.get_rng_state()
        noise = torch.rand_like(x)
        torch.set_rng_state(state)
        return block(x) * noise

    def handed_on(self, k, block, x):
        return block(x) * torch.rand(x.shape, generator=torch.Generator().manual_seed(k))

    def others(self, k, block, x):
        random.seed(k)
        numpy.random.seed(k)
        return block(x) * random.random() * float(numpy.random.rand())


@pytest.mark.parametrize("way", ["seeded", "forked", "one_mask", "unmoved", "handed_on", "others"])
def test_generators_that_are_set_between_submodules(way):
    def make() -> SetsGenerators:
        torch.manual_seed(1)
        return SetsGenerators(way)

    x = torch.randn(512, 16)
    model = make()
    split = capture(model, x)
    expected = train(make(), [x, x, x])
    for strict in (False, True):
        with lowtide.attach(model, recomputing(split.num_stages), split=split, strict=strict) as plan:
            assert_equal(train(model, [x, x, x]), expected)
            assert plan.stats().recomputed_per_step > 0
        model = make()
    measured = lowtide.measure(model, x)  # refuses stages that do not compute the same
    assert measured.num_stages == split.num_stages


class OwnGenerator(nn.Module):
    """Draws from a generator of its own that is not torch's."""

    def __init__(self, generator) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.generator = generator

    def forward(self, x):
        draw = getattr(self.generator, "random", None) or self.generator.random_sample
        return torch.tanh(self.linear(x) * (0.5 + float(draw())))


@pytest.mark.parametrize("kind", [random.Random, numpy.random.default_rng, numpy.random.RandomState])
def test_generators_of_python_and_numpy_that_modules_keep(kind):
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        shared = kind(3)
        return nn.Sequential(*(OwnGenerator(shared if k % 2 else kind(k)) for k in range(5)))

    inputs, model = [torch.randn(64, 16) for _ in range(3)], make()
    assert lowtide.measure(model, inputs[0]).num_stages == 5
    with lowtide.attach(model, recomputing(5)) as plan:
        assert_equal(train(model, inputs), train(make(), inputs))
        assert plan.stats().recomputed_per_step > 0


class Gaussian(nn.Module):
    """numpy makes normal numbers two at a time and keeps one: every other time its generator does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(x) * numpy.random.randn())


def test_a_normal_number_that_numpy_has_kept():
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*(Gaussian() for _ in range(5)))

    inputs = [torch.randn(8, 16) for _ in range(4)]
    numpy.random.seed(1)
    expected = train(make(), inputs)
    numpy.random.seed(1)
    model = make()
    with lowtide.attach(model, random_schedule(5, 0)):
        assert_equal(train(model, inputs), expected)


class Seldom(nn.Module):
    """Draws only where its input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        factor = random.random() if float(x.detach().abs().max()) > 10 else 1.0
        return x + torch.tanh(self.linear(x) * factor)


def test_a_generator_that_is_drawn_from_in_a_later_step():
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*(Seldom() for _ in range(4)))

    calm, wild = torch.ones(8, 16), torch.full((8, 16), 20.0)
    inputs, model = [calm, calm, wild, calm, wild], make()
    random.seed(1)
    with lowtide.attach(model, recomputing(4)):
        got = train(model, inputs)
    random.seed(1)
    assert_equal(got, train(make(), inputs))


def test_a_generator_that_only_a_stage_draws_from_which_never_runs_again():
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), OwnGenerator(random))

    inputs, model = [torch.randn(8, 16) for _ in range(3)], make()
    random.seed(1)
    expected = train(make(), inputs)
    random.seed(1)
    with lowtide.attach(model, recomputing(3)):
        assert_equal(train(model, inputs), expected)


class HandedOn(nn.Module):
    """Hands the caller's generator on to its submodules, not by the name that torch gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DrawsFrom() for _ in range(5))

    def forward(self, x, generator):
        for k, block in enumerate(self.blocks):
            x = block(x, generator) if k % 2 else block(x, source=generator)
        return x


class DrawsFrom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, source):
        return torch.tanh(self.linear(x) * torch.rand(x.shape, generator=source))


def test_a_generator_that_the_caller_hands_to_the_model():
    def make() -> HandedOn:
        torch.manual_seed(1)
        return HandedOn()

    def numbers(model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
        for _ in range(3):
            model(torch.ones(64, 16), generator).square().mean().backward()
        return {**dict(gradients(model)), "state": generator.get_state()}

    model, generator = make(), torch.Generator().manual_seed(7)
    chain = lowtide.measure(model, (torch.ones(64, 16), generator))
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())
    schedule = recomputing(chain.num_stages)
    with lowtide.attach(model, schedule, split=split_for(model, chain)):
        assert_equal(numbers(model, generator), numbers(make(), torch.Generator().manual_seed(7)))


class HandsOn(nn.Module):
    """Keeps a generator and hands it to its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(4))
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.generator)
        return x


class NoisyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, generator):
        return torch.tanh(self.linear(x)) + torch.randn(x.shape, generator=generator)


def test_a_generator_that_the_model_keeps_and_hands_on():
    torch.manual_seed(0)
    model = HandsOn()
    twin = copy.deepcopy(model)
    twin.generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 16)
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1000, bandwidth=0)
    with lowtide.fit(model, x, memory_budget=caught.value.minimum_bytes, bandwidth=0) as plan:
        found = {}
        for each in (model, twin):  # one after the other: a plain step takes more than the budget, and would count
            for n in range(3):
                each.zero_grad()
                each(x).square().mean().backward()
                found[each, n] = [parameter.grad.clone() for parameter in each.parameters()]
        for n in range(3):
            assert all(map(torch.equal, found[model, n], found[twin, n]))
        assert plan.stats().recomputed_per_step > 0
    assert torch.equal(model.generator.get_state(), twin.generator.get_state())


def test_printing_a_plan_draws_nothing(monkeypatch):
    """Nor does it for the first time in a process: what draws charts draws numbers when it is imported."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    plan = lowtide.fit(model, torch.zeros(2, 4), memory_budget="1GiB", bandwidth=0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    before = random.getstate()
    str(plan)
    assert "rich.text" in sys.modules
    assert random.getstate() == before


class TakesSettings(nn.Module):
    """Draws, where it is told to, from a generator that comes in a dict."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, settings):
        for block in self.blocks:
            x = torch.tanh(block(x))
            if settings["std"]:
                noise = settings["more"][0].standard_normal(tuple(x.shape), dtype=numpy.float32)
                x = x + settings["std"] * (torch.randn(x.shape, generator=settings["torch"]) + torch.from_numpy(noise))
        return x


def test_planning_during_training_moves_no_generator_that_comes_inside_arguments():
    def numbers(model: nn.Module, source: torch.Generator, other: numpy.random.Generator) -> dict[str, torch.Tensor]:
        for std in (0.0, 0.1, 0.1):  # another number is planned for
            settings = {"std": std, "torch": source, "more": [other]}
            model(torch.ones(64, 16), settings).square().mean().backward()
        return {**dict(gradients(model)), "state": source.get_state(), "other": torch.tensor(other.random())}

    torch.manual_seed(1)
    model = TakesSettings()
    expected = numbers(copy.deepcopy(model), torch.Generator().manual_seed(7), numpy.random.default_rng(7))
    source, other = torch.Generator().manual_seed(7), numpy.random.default_rng(7)
    sample = (torch.ones(64, 16), {"std": 0.1, "torch": source, "more": [other]})
    lowtide.fit(model, sample, memory_budget="1GiB", bandwidth=0, strategy="revolve")
    assert_equal(numbers(model, source, other), expected)


DRAWS = {
    "a number": lambda g: torch.rand((), generator=g),
    "a normal number": lambda g: torch.randn((), generator=g),
    "a double normal number": lambda g: torch.randn((), generator=g, dtype=torch.float64),
    "more than are at hand": lambda g: torch.rand(1300, generator=g),
    "an order": lambda g: torch.randperm(5, generator=g),
    "an exponential number": lambda g: torch.empty(1).exponential_(generator=g),
    "a seed": lambda g: g.manual_seed(g.initial_seed() + 1),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("of", [lambda: torch.default_generator, torch.Generator], ids=["default", "own"])
def test_every_draw_from_a_generator_of_torch_is_seen(of, draw):
    generator = of()
    source = Source.of(generator)
    for _ in range(4):  # every other normal number was drawn with the one before
        before = source.state()
        assert source.state() is before
        draw(generator)
        after = source.state()
        assert after != before
        assert after == generator.get_state().numpy().tobytes()
        source.set(before)
        assert before == generator.get_state().numpy().tobytes()
        draw(generator)
        assert after == generator.get_state().numpy().tobytes()


def test_every_draw_from_a_generator_of_numpys_is_seen():
    generator = numpy.random.RandomState(3)
    source = Source.of(generator)

    changes = [
        generator.random_sample,
        generator.standard_normal,
        generator.standard_normal,  # the one that was kept: its bits do not move
        generator.standard_normal,
        partial(generator.seed, 3),
        partial(generator.set_state, numpy.random.RandomState(4).get_state()),
    ]
    for change in changes:
        before = source.state()
        assert source.state() is before
        change()
        assert source.state() is not before
        source.set(before)
        assert str(generator.get_state(legacy=False)) == str(before)
        change()


def test_draws_from_other_bits_that_numpy_was_given_are_seen():
    bits = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.MT19937(5))
        for _ in range(2):
            before = rng._NUMPY.state()
            numpy.random.random()
            assert rng._NUMPY.state() is not before
    finally:
        numpy.random.set_bit_generator(bits)
