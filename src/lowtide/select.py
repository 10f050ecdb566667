"""Checkpoints for a plain list of sizes: Hong's two problems, without times or stages.

d_0 is the input of a network, d_1..d_n are the outputs of its layers; d_0 and d_n are always checkpoints.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lowtide.errors import SizesError, StrategyError, shown
from lowtide.files import read_json
from lowtide.strategies.checkpoints.sets import Algorithm, select_dynamic, select_static

Model = Literal["static", "dynamic"]


@dataclass(frozen=True, slots=True)
class Selection:
    """A cheapest set of checkpoints.

    Attributes:
        cost: the least memory, in the unit of the sizes.
        checkpoints: their indices, rising, 0 and n included.
    """

    cost: int
    checkpoints: tuple[int, ...]


def select(sizes: Iterable[int], model: Model = "dynamic", algorithm: Algorithm = "linear") -> Selection:
    """Choose the checkpoints with which training takes the least memory.

    Args:
        sizes: d_0..d_n, whole numbers from 0 up, in any unit.
        model: `"static"` counts all checkpoints and the largest segment between two of them (equation 6);
            `"dynamic"` what PyTorch does: values are freed as soon as they are not needed, and a segment's backward
            has a buffer as large as its largest gradient (equation 12).
        algorithm: for `"dynamic"`, `"linear"` (algorithm 6) or `"quadratic"` (algorithm 5, kept as a check); the cost
            is the same. `"static"` has one algorithm, cubic in the worst case, and ignores this.

    Raises:
        SizesError: for a list that is empty or holds something else.
        StrategyError: for an unknown model or algorithm.

    Example:
        >>> select([1, 8, 8, 1, 8, 8, 1], model="static")
        Selection(cost=19, checkpoints=(0, 3, 6))
        >>> select([1, 8, 8, 1, 8, 8, 1], model="dynamic")
        Selection(cost=26, checkpoints=(0, 3, 5, 6))

    Hong, Tsai, Wang, Liu, Wu: GPU memory usage optimization for backward propagation in deep network training.
    """
    _check_choice("model", model, get_args(Model))
    _check_choice("algorithm", algorithm, get_args(Algorithm))
    checked = _checked(sizes)
    cost, checkpoints = select_static(checked, checked) if model == "static" else select_dynamic(checked, algorithm)
    return Selection(cost, tuple(checkpoints))


def load_sizes(path: str | os.PathLike[str]) -> list[int]:
    """Read a file of sizes, a JSON list of whole numbers; a wrong one is refused with one line that names it."""
    values = read_json(path, SizesError, check=_checked)
    try:
        return _checked(values)
    except SizesError as error:
        raise SizesError(f"{os.fspath(path)}: {error}") from None


def _checked(sizes: Any) -> list[int]:
    if isinstance(sizes, str | bytes | dict) or not isinstance(sizes, Iterable):
        raise SizesError(f"sizes is {shown(sizes)}, expected a list of whole numbers")
    listed = sizes.tolist() if hasattr(sizes, "tolist") else list(sizes)  # numpy's arrays become Python's numbers
    if not listed:
        raise SizesError("sizes is empty, expected d_0..d_n, at least one whole number")
    if set(map(type, listed)) != {int} or min(listed) < 0:
        for k, size in enumerate(listed):
            if type(size) is not int or size < 0:
                raise SizesError(f"d_{k} is {shown(size)}, expected a whole number from 0 up")
    return listed


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise StrategyError(f"there is no {name} {shown(value)}; {hint}")
