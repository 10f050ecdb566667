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
        return njit(function, nogil=True, fastmath=fastmath)  # type: ignore[no-any-return]
    _forget_what_cannot_be_read(compiled)
    return compiled


def _forget_what_cannot_be_read(compiled: Any) -> None:
    """Compile anew where what is on disk comes from a version whose records had other names.

    The files on disk name the records that a function takes, and are read before anybody looks how old they are.
    """
    cache: Any = getattr(compiled, "_cache", None)
    if not hasattr(cache, "flush"):
        return
    load = cache.load_overload

    def load_overload(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except (AttributeError, ImportError):
            cache.flush()
            return None

    cache.load_overload = load_overload
