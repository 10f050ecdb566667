"""Finds the repeated blocks of a model, to compile each as a whole: a compiler cannot fuse across stages.

A block is an entry of an `nn.ModuleList` or `nn.Sequential` that has submodules of its own, and whose class appears
there more than once: a layer of a transformer, a bottleneck of a ResNet. Blocks inside blocks (the stages of a Swin,
each a list of blocks) are told apart by their bytes.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from lowtide.runtime.capture.cuts import Tally
from lowtide.runtime.capture.watch import Observation

# A block of blocks up to this share of the bytes is one stage; a larger one leaves too little to choose from.
_LARGEST_SHARE = 0.125
# And it is opened only where the blocks in it make up this share of it: else its own work would be compiled in pieces.
_INNER_SHARE = 0.5


def whole_blocks(model: nn.Module, observation: Observation) -> frozenset[str]:
    """The paths of the blocks that must not be cut inside."""
    candidates = _candidates(model)
    saved_bytes = _saved_bytes(observation, candidates)
    total = Tally(observation).total_bytes
    opened = {path for path in candidates if _is_opened(path, saved_bytes, total)}
    return frozenset(candidates - opened)


def _candidates(model: nn.Module) -> set[str]:
    found: set[str] = set()
    for path, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        entries = [(name, entry) for name, entry in container.named_children() if next(entry.children(), None)]
        num_of_class = Counter(type(entry) for _, entry in entries)
        found |= {f"{path}.{name}" if path else name for name, entry in entries if num_of_class[type(entry)] > 1}
    return found


def _saved_bytes(observation: Observation, paths: set[str]) -> dict[str, int]:
    """What the largest call of each of these submodules saves; those that are not called save nothing."""
    tally = Tally(observation)
    largest = dict.fromkeys(paths, 0)
    for call in observation.calls:
        if call.path in largest:
            largest[call.path] = max(largest[call.path], tally.saved_bytes(call.entered, call.left))
    return largest


def _is_opened(path: str, saved_bytes: dict[str, int], total_bytes: int) -> bool:
    inner = {other for other in saved_bytes if other.startswith(f"{path}.")}
    outermost = [other for other in inner if not any(other.startswith(f"{another}.") for another in inner)]
    inner_bytes = sum(saved_bytes[other] for other in outermost)
    if not saved_bytes[path]:  # a list within a list, which nobody calls
        return bool(inner)
    return saved_bytes[path] > _LARGEST_SHARE * total_bytes and inner_bytes >= _INNER_SHARE * saved_bytes[path]
