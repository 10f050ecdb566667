"""Parameters that stand in for others during a forward and are gone by backward, as `functional_call` has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

Table = dict[str, nn.Parameter | None]
"""A module's parameters by name."""

Entry = tuple[Table, str, nn.Parameter | None]


def registered_again(entries: Iterable[Entry]) -> AbstractContextManager[None]:
    """Run the block with the parameters that a stage's first run found, each with its table and its name there."""
    others = [entry for entry in entries if entry[0].get(entry[1]) is not entry[2]]
    return _exchanged(others) if others else nullcontext()


@contextmanager
def _exchanged(entries: Sequence[Entry]) -> Iterator[None]:
    present = [(table, name, table.get(name)) for table, name, _ in entries]
    pairs = [
        (then, now) for then, now in zip(entries, present, strict=True) if not (_is_shard(then[2]) or _is_shard(now[2]))
    ]
    try:
        for (table, name, parameter), _ in pairs:
            table[name] = parameter
        yield
    finally:
        for _, (table, name, parameter) in pairs:
            table[name] = parameter


def _is_shard(parameter: nn.Parameter | None) -> bool:
    """FSDP exchanges a shard for the whole and back in hooks of its own, which run in repeated forwards, too."""
    return type(parameter).__name__ == "DTensor"
