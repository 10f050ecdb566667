"""In which memory parameters are that recomputations read.

`param.data = other` gives a parameter other memory, and no version counts that. Autograd's graph keeps what the forward
has read; a recomputation would read what is there by now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary


class Storages:
    """The storages of some parameters at one moment.

    They are known by their addresses. Weak references keep no memory, and see to it that no other storage gets such an
    address: where memory is exchanged twice, the second one would often have that of the first.

    Args:
        parameters: the parameters.
        addresses: of their storages, as `addresses_of` gives them.
    """

    __slots__ = ("_kept", "addresses")

    def __init__(self, parameters: Sequence[nn.Parameter], addresses: list[int]) -> None:
        self.addresses = addresses
        with torch._C.DisableTorchFunction():
            pairs = zip(parameters, addresses, strict=True)
            self._kept = [StorageWeakRef(parameter.untyped_storage()) for parameter, address in pairs if address]


class StorageWatch:
    """Notes the storages of parameters in each forward; they seldom change from one to the next.

    Some models give weights other memory in each forward (`weight.data = weight.data * mask`, and what
    `flatten_parameters` does on CUDA), in recomputations too. These parameters are found out and left alone.
    """

    def __init__(self) -> None:
        self._known: Storages | None = None
        self._begun: dict[int, int] = {}
        self._is_unsettled = True  # so that each forward is looked at when it begins, too
        self._exchanged = WeakIdKeyDictionary()

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """A forward begins; these are the parameters that its recomputations will read."""
        self._begun = dict(zip(map(id, parameters), addresses_of(parameters), strict=True))

    @property
    def is_unsettled(self) -> bool:
        """Whether it matters what `begin` sees: not where the last forwards have left the same storages."""
        return self._is_unsettled

    def end(self, parameters: Sequence[nn.Parameter]) -> Storages:
        """A forward has ended; the same object is returned as for the one before where nothing has changed."""
        addresses, known = addresses_of(parameters), self._known
        self._is_unsettled = known is None or known.addresses != addresses
        if known is None or self._is_unsettled:
            for parameter, address in zip(parameters, addresses, strict=True):
                if self._begun.get(id(parameter), address) != address:
                    self._exchanged[parameter] = True
            known = self._known = Storages(parameters, addresses)
        self._begun.clear()
        return known

    def given_other(self, parameters: Sequence[nn.Parameter], then: Storages) -> list[nn.Parameter]:
        """The parameters that somebody has given other memory since."""
        now = addresses_of(parameters)
        if now == then.addresses:
            return []
        found = zip(parameters, now, then.addresses, strict=True)
        return [p for p, address, before in found if address != before and p not in self._exchanged]


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The addresses of the storages of tensors; 0 where one has none, as sparse ones."""
    with torch._C.DisableTorchFunction():  # whoever watches the model's operations is not to see these
        try:
            return [tensor.untyped_storage()._cdata for tensor in tensors]
        except NotImplementedError:
            return [tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0 for tensor in tensors]
