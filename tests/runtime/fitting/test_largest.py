"""The largest batch that trains within a budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli import main
from lowtide.runtime.fitting.largest import RESOLUTION, Search

SETTINGS = {"bandwidth": 0, "optimizer": "sgd", "strategy": "rotor"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))


def budget_for(batch: int) -> int:
    """The least with which a batch trains."""
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(network(), torch.randn(batch, 32), memory_budget=1000, **SETTINGS)
    return caught.value.minimum_bytes


def test_the_largest_batch_trains_and_the_next_that_was_tried_does_not() -> None:
    x = torch.randn(48, 32)  # it counts, too
    model, budget = network(), budget_for(64)
    found = lowtide.largest_batch(model, x, memory_budget=budget, **SETTINGS)
    assert found.batch >= 64 * (1 - 2 / RESOLUTION)
    assert found.too_large is not None
    assert found.batch < found.too_large <= found.batch * (1 + 2 / RESOLUTION) + 1
    assert found.seconds is not None
    assert found.seconds > 0
    assert found.peak_bytes is not None
    assert found.peak_bytes <= budget
    assert f"batch {found.batch} trains within" in str(found)
    with lowtide.fit(model, torch.randn(found.batch, 32), memory_budget=budget, **SETTINGS):
        model(torch.randn(found.batch, 32)).sum().backward()
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.fit(model, torch.randn(found.too_large, 32), memory_budget=budget, **SETTINGS)


def test_the_model_is_left_as_it_was_and_progress_is_told() -> None:
    model, told = network(), []
    before = [parameter.clone() for parameter in model.parameters()]
    generator = torch.get_rng_state()
    found = lowtide.largest_batch(
        model,
        torch.randn(4, 32, generator=torch.Generator().manual_seed(0)),
        memory_budget="1GiB",
        most=9,
        progress=lambda what, share: told.append((what, share)),
        **SETTINGS,
    )
    assert found.batch == 9
    assert found.too_large is None
    assert told
    assert all(0 <= share <= 1 for _, share in told)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hasattr(model, "_forward_hooks") or not model._forward_hooks


def test_where_nothing_fits_the_least_is_told() -> None:
    x = torch.randn(4, 32)  # it counts, too
    found = lowtide.largest_batch(network(), x, memory_budget=1000, **SETTINGS)
    assert found.batch == 0
    assert found.seconds is None
    assert found.minimum_bytes == budget_for(1)
    assert "not even a batch of 1" in str(found)


def test_another_dimension_may_grow() -> None:
    found = lowtide.largest_batch(network(), torch.randn(2, 3, 32), memory_budget="1GiB", dim=1, most=5, **SETTINGS)
    assert found.batch == 5
    with pytest.raises(lowtide.CaptureError, match="dimension 3"):
        lowtide.largest_batch(network(), torch.randn(2, 3, 32), memory_budget="1GiB", dim=3, **SETTINGS)


@pytest.mark.parametrize("largest", [1, 7, 100, 1000])
@pytest.mark.parametrize("start", [1, 8, 300])
def test_a_search_ends_within_its_resolution(largest: int, start: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= largest

    found = Search(fits).run(start)
    assert found <= largest
    assert largest - found < max(1, found // RESOLUTION)
    assert len(tried) == len(set(tried)), "nothing is tried twice"


MODULE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    return model, torch.zeros(2, 16)
"""


@pytest.mark.parametrize(("memory", "status"), [("1GiB", 0), ("10KB", 3)])
def test_the_command(
    memory: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "batched.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--memory", memory, "--most", "4", "--bandwidth", "0B/s", "--strategy", "rotor", "--json"]
    assert main(["batch", "batched:make", *options]) == status
    sys.modules.pop("batched", None)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["batch"] == (4 if status == 0 else 0)
    assert ("raise it" in printed.err) == (status == 3)
