"""How hot loops are compiled: once, with the result kept on disk, and without holding Python's lock while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile a function when it is first called."""
    return _compiled(function, fastmath=False)


def fast_kernel(function: _Function) -> _Function:
    """Compile a function in which no NaN and no signed zero occurs: there the compiler may use vector minima."""
    return _compiled(function, fastmath={"nnan", "nsz"})


def _compiled(function: _Function, *, fastmath: bool | set[str]) -> _Function:
    try:
        compiled: _Function = njit(function, cache=True, nogil=True, fastmath=fastmath)
    except RuntimeError:  # nowhere to keep it: a read-only installation, and no home directory
        compiled = njit(function, nogil=True, fastmath=fastmath)
    return compiled
