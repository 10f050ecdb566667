"""Takes a sample from a DataLoader: the largest of a few batches, without changing what the training loop sees."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from lowtide.errors import CaptureError, shown
from lowtide.runtime.model.sample import Sample, tensors_in
from lowtide.runtime.plan.attach import device_of
from lowtide.runtime.state.rng import Generators

# How many batches are looked at; where lengths differ, the largest of eight is near the largest of all, and a larger
# one is planned for when it comes.
_NUM_LOOKED_AT = 8


def sample_from(model: nn.Module, sample: Any) -> Any:
    """The user's sample; for a DataLoader, the arguments for its largest batch.

    A mapping gives keyword arguments. Of a tuple or list the model takes as many as its `forward` requires, at least
    one: the rest is for the loss.

    Raises:
        CaptureError: where the loader gives no batch, or one that holds no tensors.
    """
    if not isinstance(sample, DataLoader):
        return sample
    batch = largest_batch_of(sample)
    if isinstance(batch, tuple | list):
        batch = tuple(batch[: max(1, _num_required(model))])
    device = device_of(model)
    return Sample.of(tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch))


def largest_batch_of(loader: DataLoader[Any]) -> Any:
    """The largest of a loader's first batches, by bytes; no generator moves, neither the loader's own nor another."""
    generators = Generators(set(), _generators_of(loader))
    with generators.replayed(generators.state()):
        batches = list(itertools.islice(_batches(loader), _NUM_LOOKED_AT))
    if not batches:
        raise CaptureError("the DataLoader passed as a sample is empty; pass one with batches, or a batch")
    largest = max(batches, key=_num_bytes)
    if _num_bytes(largest) == 0:
        raise CaptureError(f"the DataLoader yields {shown(largest)}, which has no tensors; pass a batch as the sample")
    return largest


def _batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The first batches, made in this process: worker processes would go on and prefetch others."""
    if loader.batch_sampler is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        yield from loader
        return
    for indices in loader.batch_sampler:
        yield loader.collate_fn([loader.dataset[index] for index in indices])


def _generators_of(loader: DataLoader[Any]) -> Iterator[torch.Generator]:
    holders = (loader, loader.sampler, loader.batch_sampler, loader.dataset)
    for each in (getattr(holder, "generator", None) for holder in holders):
        if isinstance(each, torch.Generator):
            yield each


def _num_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def _num_required(model: nn.Module) -> int:
    """How many arguments a model's forward requires."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
    return sum(each.kind in kinds and each.default is each.empty for each in parameters.values())
