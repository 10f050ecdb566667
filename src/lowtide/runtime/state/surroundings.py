"""What surrounds a computation besides its arguments: gradient mode, autocast, and the choice of kernels.

A stage that runs again in the backward pass must find these as its first run did, although by then the user's `with`
blocks have ended. Random numbers are in `lowtide.runtime.state.rng`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch

_DEVICE_TYPES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class Surroundings(NamedTuple):
    """Gradient mode and autocast as they were at one moment; two are equal where nothing has changed."""

    grad_enabled: bool
    autocast: tuple[torch.dtype | None, ...]
    """For each type of device the dtype, None where autocast is off."""
    autocast_cache: bool

    @classmethod
    def now(cls) -> Surroundings:
        """As they are for this thread."""
        if not torch._C._is_any_autocast_enabled():
            return _WITHOUT_AUTOCAST[torch.is_grad_enabled(), torch.is_autocast_cache_enabled()]
        autocast = tuple(
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
            for device_type in _DEVICE_TYPES
        )
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the block in these surroundings; they are seldom others than now, so look first."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device_type, dtype in zip(_DEVICE_TYPES, self.autocast, strict=True):
                enabled = dtype is not None
                stack.enter_context(torch.autocast(device_type, dtype, enabled, self.autocast_cache))
            yield


# Made once: they are asked for at every recorded call.
_WITHOUT_AUTOCAST = {
    (grad_enabled, cache): Surroundings(grad_enabled, (None,) * len(_DEVICE_TYPES), cache)
    for grad_enabled in (False, True)
    for cache in (False, True)
}


class Kernels(NamedTuple):
    """The process-wide switches that decide which kernel an operation takes."""

    cudnn: tuple[bool, bool, bool]
    attention: tuple[bool, bool, bool, bool]

    @classmethod
    def now(cls) -> Kernels:
        """As they are for this process."""
        # What the properties of `torch.backends` read; asked once for each repeated stage, so without their detours.
        get = torch._C
        attention = (
            get._get_flash_sdp_enabled(),
            get._get_mem_efficient_sdp_enabled(),
            get._get_math_sdp_enabled(),
            get._get_cudnn_sdp_enabled(),
        )
        cudnn = (get._get_cudnn_enabled(), get._get_cudnn_benchmark(), get._get_cudnn_deterministic())
        return cls(cudnn, attention)

    def apply(self) -> None:
        """Set them."""
        cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = self.cudnn
        flash, efficient, math, from_cudnn = self.attention
        cuda.enable_flash_sdp(flash)
        cuda.enable_mem_efficient_sdp(efficient)
        cuda.enable_math_sdp(math)
        cuda.enable_cudnn_sdp(from_cudnn)

    def applied(self) -> AbstractContextManager[None]:
        """Run the block with these switches; they are seldom others than now."""
        before = Kernels.now()
        return nullcontext() if self == before else self._applied(before)

    @contextmanager
    def _applied(self, before: Kernels) -> Iterator[None]:
        self.apply()
        try:
            yield
        finally:
            before.apply()
