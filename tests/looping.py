"""Many cases in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def looped(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for each value of one of its arguments, as one test; the value that fails is named.

    For seeds, of which there are many and none has a name. The test must not skip, and gets its fixtures once.
    """
    cases = list(values)
    assert cases

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            for value in cases:
                try:
                    test(**others, **{name: value})
                except BaseException as error:
                    error.add_note(f"{name} = {value!r}")
                    raise

        parameters = inspect.signature(test).parameters
        assert name in parameters
        run.__signature__ = inspect.Signature([each for key, each in parameters.items() if key != name])
        del run.__wrapped__
        return run

    return decorate
