"""How hot loops are compiled: once, with the result kept on disk, and without holding Python's lock while they run.

A `kernel` is what Python calls, and what is kept on disk. The functions that it calls are its parts: a `kernel_part` is
compiled for compiled callers alone. Code that takes Python's records of arrays apart for it would take as long to
compile as the function itself.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.extending import register_jitable

_Function = TypeVar("_Function", bound=Callable[..., Any])

_IMPORT = re.compile(r"^from (lowtide\.strategies\.[\w.]+) import", re.MULTILINE)


def kernel(function: _Function) -> _Function:
    """Compile a function when Python first calls it."""
    options: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True}
    try:
        compiled: Any = njit(function, cache=True, **options)
    except RuntimeError:  # nowhere to keep it: a read-only installation, and no home directory
        return njit(function, **options)  # type: ignore[no-any-return]
    # By itself numba looks only at the file of the function: what is on disk would be used when a function that it
    # calls has changed in another file, and would be an error when a record that it takes has another name. Its version
    # is what it compares before all else.
    files: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(files, "_version"):
        files._version = f"{files._version} {_digest(function.__module__)}"
    return compiled  # type: ignore[no-any-return]


def kernel_part(function: _Function) -> _Function:
    """Compile a function with the kernels that call it; a call from Python is interpreted."""
    return register_jitable(no_cfunc_wrapper=True)(function)


def fast_kernel_part(function: _Function) -> _Function:
    """A part in which no NaN and no signed zero occurs: there the compiler may use vector minima."""
    return register_jitable(no_cfunc_wrapper=True, fastmath={"nnan", "nsz"})(function)


@functools.cache
def _digest(module: str) -> str:
    """A number that changes with the source of a module or of any strategy's module that it imports."""
    digest = hashlib.sha256()
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in seen or file is None:
            continue
        seen.add(name)
        source = Path(file).read_text(encoding="utf-8")
        digest.update(source.encode())
        pending.extend(sorted(_IMPORT.findall(source)))
    return digest.hexdigest()[:16]
