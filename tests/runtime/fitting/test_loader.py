"""A DataLoader as a sample, and optimizers that frameworks have wrapped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import lowtide
from lowtide.runtime.fitting.loader import can_read_ahead, largest_batch_of
from lowtide.runtime.measure.weights import optimizer_of


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


class Described(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), float(index)), "y": torch.zeros(8)}


class Whole(nn.Sequential):
    """Takes a batch as it is."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(batch["x"]) - batch["y"]


class ByName(nn.Sequential):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - y


@pytest.mark.parametrize("kind", [Whole, ByName])
def test_a_batch_with_names_is_one_argument_or_several(kind: type[nn.Sequential]) -> None:
    model = kind(*network())
    with lowtide.fit(model, DataLoader(Described(), batch_size=4), memory_budget="1GiB", bandwidth=0) as plan:
        for batch in DataLoader(Described(), batch_size=4):
            result = model(batch) if kind is Whole else model(**batch)
            result.sum().backward()
        assert plan.stats().num_steps == 2


def test_streams_and_empty_loaders() -> None:
    assert largest_batch_of(DataLoader(Stream(), batch_size=3)).shape == (3, 8)
    with pytest.raises(lowtide.CaptureError, match="is empty"):
        largest_batch_of(DataLoader(TensorDataset(torch.randn(0, 8)), batch_size=4))
    with pytest.raises(lowtide.CaptureError, match="no tensors"):
        largest_batch_of(DataLoader(["a", "b"], batch_size=2))  # type: ignore[arg-type]


class Position(IterableDataset[Any]):
    """Reads on where it stopped."""

    def __init__(self, numbers: Any = None) -> None:
        self.position = 0
        self.numbers = numbers

    def __iter__(self) -> Any:
        for _ in range(4):
            self.position += 1
            yield torch.full((8,), float(self.position if self.numbers is None else next(self.numbers)))


class Shared(IterableDataset[Any]):
    """Copies share a position, since functions are not copied."""

    def __init__(self) -> None:
        numbers = itertools.count()
        self.read = lambda: torch.full((8,), float(next(numbers)))

    def __iter__(self) -> Any:
        for _ in range(4):
            yield self.read()


class Endless(Sampler[int]):
    """Goes on where it stopped."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            yield self.position % 16


def seen(loader: DataLoader[Any]) -> list[list[float]]:
    return [torch.as_tensor(batch).flatten().tolist() for batch in itertools.islice(loader, 3)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Position(), batch_size=2),
        lambda: DataLoader(Position(), batch_size=None),
        lambda: DataLoader(Position(iter(range(9))), batch_size=2),
        lambda: DataLoader(torch.arange(128.0).reshape(16, 8), batch_size=2, sampler=Endless()),  # type: ignore[arg-type]
        lambda: DataLoader(torch.arange(128.0).reshape(16, 8), batch_size=None, sampler=Endless()),  # type: ignore[arg-type]
        lambda: DataLoader(torch.arange(64.0).reshape(8, 8), batch_sampler=iter([[0, 1], [2], [3]])),  # type: ignore[arg-type]
    ],
)
def test_what_keeps_a_position_is_not_moved_on(make: Callable[[], DataLoader[Any]]) -> None:
    expected, loader = seen(make()), make()
    lowtide.fit(network(), loader, memory_budget="1GiB", bandwidth=0)
    assert seen(loader) == expected


def test_no_worker_is_started_that_would_keep_its_position() -> None:
    loader = DataLoader(Position(), batch_size=2, num_workers=1, persistent_workers=True)
    assert largest_batch_of(loader).shape == (2, 8)
    assert loader._iterator is None


def test_streams_that_cannot_be_copied_are_refused_and_not_moved_on() -> None:
    numbers = (number for number in range(9))
    with pytest.raises(lowtide.CaptureError, match="reads a stream"):
        lowtide.fit(network(), DataLoader(Position(numbers), batch_size=2), memory_budget="1GiB", bandwidth=0)
    assert next(numbers) == 0
    indices = ([number] for number in range(8))
    with pytest.raises(lowtide.CaptureError, match="reads a stream"):
        largest_batch_of(DataLoader(torch.ones(8, 8), batch_sampler=indices))  # type: ignore[arg-type]
    assert next(indices) == [0]


def test_a_stream_that_was_moved_on_all_the_same_is_told() -> None:
    with pytest.raises(lowtide.CaptureError, match="fit has moved it on"):
        lowtide.fit(network(), DataLoader(Shared(), batch_size=2), memory_budget="1GiB", bandwidth=0)


def test_nothing_is_read_from_streams_while_a_loop_reads_them() -> None:
    assert not can_read_ahead(DataLoader(Stream(), batch_size=2))
    assert not can_read_ahead(DataLoader(torch.ones(8, 8), batch_sampler=([k] for k in range(8))))  # type: ignore[arg-type]
    assert can_read_ahead(DataLoader(torch.ones(8, 8), batch_size=2, shuffle=True))  # type: ignore[arg-type]


def test_optimizers_are_found_inside_what_frameworks_put_around_them() -> None:
    accelerate = pytest.importorskip("accelerate")
    lightning = pytest.importorskip("lightning")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerated = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    of_lightning = lightning.pytorch.core.optimizer.LightningOptimizer(optimizer)
    for each in (optimizer, accelerated, of_lightning):
        assert optimizer_of(model, each) is optimizer
    assert optimizer_of(model, "adam") == "adam"
