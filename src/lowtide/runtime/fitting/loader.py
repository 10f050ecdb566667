"""Takes a sample from a DataLoader: the largest of a few batches, without changing what the training loop sees."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from lowtide.errors import CaptureError, shown
from lowtide.runtime.model.sample import Sample, tensors_in
from lowtide.runtime.plan.attach import device_of
from lowtide.runtime.state.rng import Generators

# How many batches are looked at; where lengths differ, the largest of eight is near the largest of all, and a larger
# one is planned for when it comes.
_NUM_LOOKED_AT = 8


def sample_from(model: nn.Module, sample: Any) -> Any:
    """The user's sample; for a DataLoader, the arguments for its largest batch.

    A mapping gives keyword arguments, unless the model's `forward` knows none of these names: then it is the one
    argument. Of a tuple or list the model takes as many as its `forward` requires, at least one: the rest is for the
    loss.

    Raises:
        CaptureError: where the loader gives no batch, or one that holds no tensors.
    """
    if not isinstance(sample, DataLoader):
        return sample
    batch = largest_batch_of(sample)
    if isinstance(batch, tuple | list):
        batch = tuple(batch[: max(1, _num_required(model))])
    elif isinstance(batch, Mapping) and not _takes(model, batch):
        batch = (batch,)
    device = device_of(model)
    return Sample.of(tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch))


def largest_batch_of(loader: DataLoader[Any]) -> Any:
    """The largest of a loader's first batches, by bytes. What the loader reads from stays where it is: positions are
    moved in copies, and no generator moves, neither the loader's own nor another.
    """
    generators = Generators(set(), _generators_of(loader))
    before = generators.state()
    with generators.replayed(before):
        batches = list(itertools.islice(_batches(loader), _NUM_LOOKED_AT))
    if not batches:
        raise CaptureError("the DataLoader passed as a sample is empty; pass one with batches, or a batch")
    if _is_stream(loader):
        with generators.replayed(before):
            _check_starts_anew(batches[0], next(_batches(loader), None))
    largest = max(batches, key=_num_bytes)
    if _num_bytes(largest) == 0:
        raise CaptureError(f"the DataLoader yields {shown(largest)}, which has no tensors; pass a batch as the sample")
    return largest


def can_read_ahead(loader: DataLoader[Any]) -> bool:
    """Whether reading batches certainly takes none from a loop that reads the same loader. Of a stream, even one that
    can be copied, that shows only afterwards.
    """
    return not _is_stream(loader) and _copy_of(_sampler_of(loader), loader) is not None


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The first batches, made in this process from copies: worker processes would go on and prefetch others."""
    read_from = _copy_of(loader.dataset if _is_stream(loader) else _sampler_of(loader), loader)
    if read_from is None:
        raise CaptureError(
            "the DataLoader reads a stream, which fit would move on; pass a batch instead of the loader: take one from "
            "the iterator that the loop goes on with"
        )
    if _is_stream(loader):
        yield from DataLoader(
            read_from,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=loader.collate_fn,
            generator=loader.generator,
        )
        return
    for drawn in read_from:
        found = (
            [loader.dataset[index] for index in drawn] if loader.batch_sampler is not None else loader.dataset[drawn]
        )
        yield loader.collate_fn(found)


def _copy_of(read_from: Any, loader: DataLoader[Any]) -> Any:
    """A copy of a stream or sampler, to be moved on in its place; None where it cannot be copied, as files, queues and
    generators cannot. A sampler's copy refers to the dataset itself, which may be large.
    """
    memo = {} if read_from is loader.dataset else {id(loader.dataset): loader.dataset}
    try:
        return copy.deepcopy(read_from, memo)
    except Exception:  # what an object raises that cannot be copied is up to its class
        return None


def _check_starts_anew(one: Any, other: Any) -> None:
    """Refuse a stream whose copies share a position, in a closure, a global or an open file."""
    first, second = list(tensors_in(one)), list(tensors_in(other))
    if len(first) != len(second) or not all(map(_are_same, first, second)):
        raise CaptureError(
            "the DataLoader's stream gives another first batch each time it is read, so fit has moved it on (or it "
            "draws numbers without a seed); open the stream again, and pass a batch to fit instead of the loader"
        )


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.to_dense(), other.to_dense()
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is not equal to itself


def _generators_of(loader: DataLoader[Any]) -> Iterator[torch.Generator]:
    holders = (loader, loader.sampler, loader.batch_sampler, loader.dataset)
    for each in (getattr(holder, "generator", None) for holder in holders):
        if isinstance(each, torch.Generator):
            yield each


def _num_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def _takes(model: nn.Module, keywords: Mapping[Any, Any]) -> bool:
    """Whether a model's forward has a parameter of one of these names, or takes any."""
    parameters = inspect.signature(model.forward).parameters
    return any(name in keywords or each.kind is each.VAR_KEYWORD for name, each in parameters.items())


def _num_required(model: nn.Module) -> int:
    """How many arguments a model's forward requires."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
    return sum(each.kind in kinds and each.default is each.empty for each in parameters.values())
