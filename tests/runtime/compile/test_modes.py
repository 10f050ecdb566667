"""Variants of compiled blocks are used as they were checked: not where other things are trained or switched off."""

from __future__ import annotations

import gc
import itertools
from functools import partialmethod

import pytest
import torch
import torch._dynamo
from tests.runtime.training import assert_equal, gradients
from torch import nn

import lowtide
from lowtide import Forward
from lowtide.runtime.compile.compiled import _compiled_function
from lowtide.runtime.compile.modes import Modes
from lowtide.runtime.fitting import fit
from lowtide.runtime.fitting.compiling import CompiledPlanning
from lowtide.runtime.measure import figures as measure_figures
from lowtide.runtime.measure.timing import Timing

WIDTH, DEPTH = 16, 4


class Block(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.first, self.second = nn.Dropout(share), nn.Dropout(share)

    def forward(self, x):
        return x + self.second(self.narrow(self.first(nn.functional.gelu(self.wide(self.norm(x))))))


class Net(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(share) for _ in range(DEPTH))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def switch_off(model: Net) -> None:
    for block in model.blocks[:3]:
        block.first.eval()


def switch_on(model: Net) -> None:
    model.train()
    for block in model.blocks:
        block.first.p = block.second.p = 0.3


def one_step(model: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model(x).backward()
    found = {**dict(gradients(model)), "the generator's state": torch.get_rng_state()}
    model.zero_grad()
    return found


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind():
    """Other tests count all live tensors."""
    yield
    _compiled_function.cache_clear()
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def quick_variants(monkeypatch):
    """Variants are compiled under any budget; measured after the stage itself, they are quicker, and preferred."""
    order = itertools.count(1)
    monkeypatch.setattr(measure_figures, "timed", lambda *_: Timing(1 / next(order)))
    monkeypatch.setattr(fit, "DEFAULT_BUDGETS", (0.8, 0.0))  # the first can run with dropout
    monkeypatch.setattr(CompiledPlanning, "_only_blocks", partialmethod(CompiledPlanning._planned_with, regions=False))


class WrongForOtherModes:
    """Stands for a partitioner that chooses anew what to compute again: lean variants are right as they were checked.

    Counts the runs of lean variants.
    """

    def __init__(self) -> None:
        self.is_planning = True
        self.num_runs = 0

    def backend(self, graph, inputs):
        is_lean = torch._functorch.config.activation_memory_budget < 1
        is_right = self.is_planning

        def run(*args):
            self.num_runs += is_lean
            outputs = graph(*args)
            return outputs if is_right or not is_lean else tuple(1.1 * output for output in outputs)

        return run


@pytest.mark.parametrize(
    ("share", "changes"),
    [(0.3, [(switch_off, 1), (switch_on, 4)]), (0.0, [(switch_on, 0), (switch_off, 0)])],
    ids=["switched off", "switched on"],
)
@pytest.mark.parametrize("regions", [False, True], ids=["blocks", "regions"])
@pytest.mark.usefixtures("quick_variants")
def test_variants_are_not_used_for_what_they_were_not_checked_for(monkeypatch, share, changes, regions):
    """In each step as many of the four blocks run as variants as have the modes for which those were checked.

    Where other parameters are trained, a new plan is made.
    """
    x, wrong = torch.randn(64, WIDTH), WrongForOtherModes()
    torch.manual_seed(0)
    model = Net(share)
    if regions:  # one for each stage, though all of them would fit as one
        monkeypatch.setattr(CompiledPlanning, "_planned", partialmethod(CompiledPlanning._planned_with, regions=True))
    compiled = {"compile_stages": {"backend": wrong.backend, "dynamic": False, "regions": regions}}
    with lowtide.fit(model, x, memory_budget="1GiB", strategy="rotor", bandwidth=0, optimizer="sgd", **compiled):
        wrong.is_planning = False
        torch.manual_seed(0)
        plain = Net(share)
        for change, num_lean in ((lambda model: None, DEPTH), *changes):
            for each in (model, plain):
                change(each)
            wrong.num_runs = 0
            assert_equal(one_step(model, x), one_step(plain, x))
            assert wrong.num_runs == num_lean


@pytest.mark.usefixtures("quick_variants")
def test_variants_of_a_plan_from_a_file_are_used_whatever_mode_the_model_was_in(monkeypatch, tmp_path):
    x, options = torch.randn(64, WIDTH), {"strategy": "rotor", "bandwidth": 0, "compile_stages": {"backend": "eager"}}
    with lowtide.fit(Net(0.3), x, memory_budget="1GiB", **options) as plan:
        assert any(op.variant for op in plan.schedule.operations if isinstance(op, Forward))
        plan.save(tmp_path / "plan.json")
    used = []
    monkeypatch.setattr(
        Modes, "are_as_then", lambda modes, block, asked=Modes.are_as_then: used.append(asked(modes, block)) or used[-1]
    )
    for mode in ("train", "eval"):
        model = Net(0.3)
        getattr(model, mode)()
        with lowtide.load_plan(tmp_path / "plan.json", model):
            assert model.training == (mode == "train")
            model.train()
            used.clear()
            model(x).backward()
            assert used
            assert all(used)


def test_modes_of_a_block():
    block = Block(0.1)
    modes = Modes(block)
    assert modes.are_as_then(block)
    block.first.p = 0.2
    assert modes.are_as_then(block)  # the same computations
    for change, back in [
        (lambda: setattr(block.first, "p", 0.0), lambda: setattr(block.first, "p", 0.1)),
        (block.second.eval, block.second.train),
        (lambda: block.wide.weight.requires_grad_(False), lambda: block.wide.weight.requires_grad_(True)),
        (block.eval, block.train),
    ]:
        change()
        assert not modes.are_as_then(block)
        back()
        assert modes.are_as_then(block)
