"""A DataLoader as a sample, and optimizers that frameworks have wrapped."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lowtide
from lowtide.runtime.fitting.loader import largest_batch_of
from lowtide.runtime.measure.weights import unwrapped


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


class Augmented(Dataset[Any]):
    """Draws from every generator, and the length differs from sample to sample."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(numpy.random.rand()) + float(torch.rand(()))
        return torch.full((1 + index % 4, 8), noise)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_largest_batch_is_taken_and_no_generator_moves(num_workers: int) -> None:
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(
        Augmented(), batch_size=1, shuffle=True, generator=own, num_workers=num_workers, collate_fn=lambda rows: rows[0]
    )
    before, of_loader = states(), own.get_state()
    assert largest_batch_of(loader).shape == (4, 8)
    assert states() == before
    assert torch.equal(own.get_state(), of_loader)


def test_a_training_loop_sees_the_batches_that_it_would_have_seen() -> None:
    data = TensorDataset(torch.arange(256.0).reshape(32, 8), torch.arange(32))

    def batches(*, fits: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loader, model = DataLoader(data, batch_size=4, shuffle=True), network()
        if fits:
            lowtide.fit(model, loader, memory_budget="1GiB", bandwidth=0)
        return [x for x, _ in loader]

    for one, other in zip(batches(fits=True), batches(fits=False), strict=True):
        assert torch.equal(one, other)


def test_what_the_model_does_not_take_is_for_the_loss() -> None:
    data = TensorDataset(torch.randn(8, 8), torch.randn(8, 8))
    plan = lowtide.fit(network(), DataLoader(data, batch_size=4), memory_budget="1GiB", bandwidth=0)
    assert plan.signature is not None

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return nn.functional.mse_loss(self.network(x), y) * scale

    lowtide.fit(Named(), DataLoader(data, batch_size=4), memory_budget="1GiB", bandwidth=0)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.randn(8) for _ in range(6)])


def test_streams_and_empty_loaders() -> None:
    assert largest_batch_of(DataLoader(Stream(), batch_size=3)).shape == (3, 8)
    with pytest.raises(lowtide.CaptureError, match="is empty"):
        largest_batch_of(DataLoader(TensorDataset(torch.randn(0, 8)), batch_size=4))
    with pytest.raises(lowtide.CaptureError, match="no tensors"):
        largest_batch_of(DataLoader(["a", "b"], batch_size=2))  # type: ignore[arg-type]


def test_optimizers_are_found_inside_what_frameworks_put_around_them() -> None:
    accelerate = pytest.importorskip("accelerate")
    lightning = pytest.importorskip("lightning")
    optimizer = torch.optim.AdamW(network().parameters())
    accelerated = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    of_lightning = lightning.pytorch.core.optimizer.LightningOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for each in (optimizer, accelerated, of_lightning, scheduler):
        assert unwrapped(each) is optimizer
    assert unwrapped("adam") == "adam"
