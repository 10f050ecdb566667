"""Custom autograd functions, which are one call each, whatever modules they call inside.

`torch.autograd.Function.apply` is no function that a mode is shown: it would see the operations inside, and the result
would come from nowhere. While a forward is followed, `apply` is handed to it instead. Modules' full backward hooks are
such functions, too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function

FunctionHandler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with a name, the function and its arguments; returns what the function returns."""


class _CurrentHandler(threading.local):
    """Who is handed the functions that this thread applies."""

    handler: FunctionHandler | None = None


_current = _CurrentHandler()
_lock = threading.Lock()
_plain: list[Any] = []  # what stood there before, once for each forward under way


@contextmanager
def functions_handed_to(handler: FunctionHandler) -> Iterator[None]:
    """Pass each custom function that this thread applies to a handler; those applied inside it run plainly."""
    previous, _current.handler = _current.handler, handler
    with _lock:
        _plain.append(_plain[-1] if _plain else Function.__dict__["apply"])
        if len(_plain) == 1:
            Function.apply = _handing_over(_plain[0].__func__)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _current.handler = previous
        with _lock:
            plain = _plain.pop()
            if not _plain:
                Function.apply = plain  # type: ignore[method-assign]


def _handing_over(plain: Callable[..., Any]) -> Any:
    @functools.wraps(plain)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        handler = _current.handler
        if handler is None:
            return plain(cls, *args, **kwargs)
        _current.handler = None
        try:
            return handler(cls.__name__, functools.partial(plain, cls), args, kwargs)
        finally:
            _current.handler = handler

    return classmethod(apply)
