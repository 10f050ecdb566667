"""Estimates for cards that are not here: the bytes of a real run, and nothing allocated."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.coverage_shapes import UNet
from tests.runtime.models import residuals
from torch import nn

import lowtide
from lowtide.cli import main
from lowtide.runtime.meter import Meter
from lowtide.zoo import make

FIGURES = ("output_bytes", "grad_bytes", "weight_bytes", "weight_grad_bytes", "optimizer_bytes")
OF_KERNELS = ("saved_bytes", "forward_extra_bytes", "backward_extra_bytes")  # attention's are a card's own


def convolutions() -> tuple[nn.Module, Any]:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 64, 10)), (torch.zeros(4, 8, 8, 8),)


def transformer() -> tuple[nn.Module, Any]:
    return make("gpt2", batch=2, length=8, layers=2, width=16, heads=2, vocabulary=32)


@pytest.mark.parametrize(("network", "figures"), [(convolutions, FIGURES + OF_KERNELS), (transformer, FIGURES)])
def test_bytes_are_those_of_a_real_run(network: Any, figures: tuple[str, ...]) -> None:
    model, sample = network()
    found = lowtide.estimate(model, sample, device="a100", optimizer="adamw")
    measured = lowtide.measure(model, sample, optimizer="adamw")
    assert [stage.name for stage in found.chain.stages] == [stage.name for stage in measured.stages]
    for figure in figures:
        assert _of(found.chain, figure) == _of(measured, figure), figure
    assert all(not parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("has_stepped", [False, True], ids=["new", "stepped"])
def test_an_optimizer_counts_as_its_kind(options: dict[str, bool], has_stepped: bool) -> None:
    model, sample = convolutions()
    groups = [{"params": list(each.parameters()), "lr": 0.1 / (k + 1)} for k, each in enumerate(model)]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], **options)
    if has_stepped:
        model(*sample).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict())
    kind = "amsgrad" if "amsgrad" in options else "adamw"
    found, expected = (lowtide.estimate(model, sample, device="t4", optimizer=each) for each in (optimizer, kind))
    assert _of(found.chain, "optimizer_bytes") == _of(expected.chain, "optimizer_bytes")
    assert found.minimum_bytes == expected.minimum_bytes
    assert str(optimizer.state_dict()) == str(before)
    assert optimizer.param_groups[0]["params"][0] is model[0][0].weight
    with pytest.raises(lowtide.CaptureError, match="none of this model's parameters"):
        lowtide.estimate(convolutions()[0], sample, device="t4", optimizer=optimizer)


def _of(chain: lowtide.Chain, figure: str) -> list[int]:
    return [getattr(stage, figure) for stage in chain.stages]


def test_nothing_is_allocated() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(6)))
        x = torch.empty(16384, 4096)
    with Meter("cpu") as meter:
        found = lowtide.estimate(model, x, device="4090")
    assert meter.peak_bytes - meter.start_bytes < 2**20
    assert found.plain.peak_bytes > 2 * 2**30
    assert found.fits
    assert "fits" in str(found)


def test_times_follow_the_card() -> None:
    model, sample = convolutions()
    slow, fast = (lowtide.estimate(model, sample, device=name).plain.seconds for name in ("t4", "h200"))
    assert 0 < fast < slow


def test_a_budget_that_is_too_small_names_the_least_and_the_least_works() -> None:
    model, sample = convolutions()
    refused = lowtide.estimate(model, sample, device="t4", memory_budget=1000)
    assert not refused.fits
    assert "does not fit" in str(refused)
    assert lowtide.estimate(model, sample, device="t4", memory_budget=refused.minimum_bytes).fits


def test_a_number_that_the_model_reads_is_counted_as_a_guess() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert bool((x >= 0).all())
            return self.blocks(x)

    found = lowtide.estimate(Reads(), torch.zeros(4, 8), device="a100")
    assert found.num_guesses > 0
    assert "were assumed" in str(found)


def test_an_unknown_card_is_told_with_those_that_are_known() -> None:
    model, sample = convolutions()
    with pytest.raises(lowtide.CaptureError, match=r"'voodoo2'.*a100"):
        lowtide.estimate(model, sample, device="voodoo2")


MODULE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.Tanh()) for _ in range(4)))
    return model, torch.zeros(8192, 4096)
"""


@pytest.mark.parametrize(("memory", "status"), [("24GiB", 0), ("1MiB", 3)])
def test_the_command(
    memory: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "estimated.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["estimate", "estimated:make", "--memory", memory, "--device", "4090", "--json"]) == status
    sys.modules.pop("estimated", None)
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["feasible"] == (status == 0)
    assert found["estimated"]
    assert found["plain_peak_bytes"] > found["minimum_bytes"]
    assert ("raise it, or choose a larger card" in printed.err) == (status == 3)


def test_the_least_budget_of_a_network_with_side_values_is_the_same_for_every_budget_and_fits() -> None:
    with torch.device("meta"):
        model, x = UNet(4, 1), torch.empty(4, 3, 16, 16)
    options: dict[str, Any] = {"device": "a100", "optimizer": "sgd", "bandwidth": 0}
    ample, scarce = (lowtide.estimate(model, x, memory_budget=budget, **options) for budget in ("1GiB", 1000))
    assert scarce.chain.side_values
    assert scarce.chain.num_stages == ample.chain.num_stages
    assert scarce.minimum_bytes == ample.minimum_bytes
    assert lowtide.estimate(model, x, memory_budget=scarce.minimum_bytes, **options).fits


def test_the_least_is_that_of_finer_cuts_where_they_help_as_in_fit() -> None:
    with torch.device("meta"):
        model, x = residuals(64), torch.empty(4096, 64)
    options: dict[str, Any] = {"device": "a100", "optimizer": "sgd", "bandwidth": 0}
    ample = lowtide.estimate(model, x, memory_budget="1GiB", **options)
    with pytest.raises(lowtide.InfeasibleBudgetError) as coarse:
        lowtide.solve(ample.chain, memory_budget=1)
    assert ample.minimum_bytes < 0.9 * coarse.value.minimum_bytes
    scarce = lowtide.estimate(model, x, memory_budget=ample.minimum_bytes, **options)
    assert scarce.fits
    assert scarce.minimum_bytes == ample.minimum_bytes
    assert scarce.chain.num_stages > ample.chain.num_stages
    by_hand = lowtide.estimate(model, x, stages=["*"], memory_budget=ample.minimum_bytes, **options)
    assert not by_hand.fits
