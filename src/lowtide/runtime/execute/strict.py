"""Strict mode: does a repeated forward save the same values, byte by byte? For finding out, not for training."""

from __future__ import annotations

import zlib
from collections.abc import Collection

import torch

from lowtide.errors import ExecutionError
from lowtide.runtime.execute.saved import Sink


class Fingerprints:
    """Of the tensors that one run of a stage saves; taken when it ends, since some are filled late."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._sums: list[int | None] = []

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> Fingerprints:
        """Those of tensors that are complete."""
        made = cls()
        made._tensors = [*tensors]
        made.finish()
        return made

    def add(self, tensor: torch.Tensor) -> None:
        """Take in the next saved tensor."""
        self._tensors.append(tensor.detach())

    def finish(self, ignored: Collection[int] = ()) -> None:
        """The run has ended: keep the fingerprints alone.

        Args:
            ignored: addresses of storages that the run may have changed after it had saved them.
        """
        self._sums = [_fingerprint(tensor, ignored) for tensor in self._tensors]
        self._tensors = []

    def compare(self, first: Fingerprints, name: str) -> None:
        """Refuse values that are not those of the first run."""
        for index, (one, other) in enumerate(zip(first._sums, self._sums, strict=True)):
            if one is not None and one != other:
                raise ExecutionError(
                    f"stage {name!r} saved other values when it ran again (tensor {index} of {len(self._sums)}): it or "
                    "a stage before it depends on something besides its input, parameters, buffers and random numbers"
                )


def noting(sink: Sink | None, fingerprints: Fingerprints) -> Sink:
    """A sink that also takes fingerprints."""

    def noting(tensor: torch.Tensor) -> None:
        fingerprints.add(tensor)
        if sink is not None:
            sink(tensor)

    return noting


def _fingerprint(tensor: torch.Tensor, ignored: Collection[int]) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.untyped_storage()._cdata in ignored:
        return None
    data = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().tobytes())
