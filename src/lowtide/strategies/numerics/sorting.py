"""A stable sort for compiled loops: numba's own takes seconds to compile for each type of values."""

from __future__ import annotations

import numpy as np

from lowtide.strategies.numerics.arrays import Floats, Integers
from lowtide.strategies.numerics.kernels import kernel_part


@kernel_part
def sorted_rows(rows: Integers, values: Floats | Integers) -> Integers:
    """The rows by rising `values[row]`; those of one value stay in the order in which they were given."""
    source, target = rows.copy(), np.empty_like(rows)
    width = 1
    while width < rows.size:
        for begin in range(0, rows.size, 2 * width):
            middle, end = min(begin + width, rows.size), min(begin + 2 * width, rows.size)
            left, right = begin, middle
            for at in range(begin, end):
                if right == end or (left < middle and values[source[left]] <= values[source[right]]):
                    target[at] = source[left]
                    left += 1
                else:
                    target[at] = source[right]
                    right += 1
        source, target = target, source
        width *= 2
    return source
