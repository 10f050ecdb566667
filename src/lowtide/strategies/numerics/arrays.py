"""A chain as arrays, for the compiled loops of `offload`, `pofo` and the heuristics.

| paper | here |
| --- | --- |
| a^k | `output[k]`, k = 0..n |
| ā^k of variant v | `saved[k, v]` |
| δ^j and what else stands beside | `standing[j]`: delta[j], the weight gradients of all stages after j, side values;
during the first forward of stage k, `standing_first[k]` |
| M_{F_∅^k}, less δ^j and the stage's input | `light_peak[k]` = a[k] + forward_extra[k] |
| M_{F_all^k}, less δ^j | `heavy_peak[k, v]` = abar[k] + saving_extra[k] |
| M_{B_k} | `backward_peak[k, v]` = abar[k] + delta[k] + delta[k-1] + backward_extra[k] - freed_bytes[k] + weight
gradients from k on |

The memory that the compiled loops share out is the budget less `Chain.fixed_bytes`. The input of a sub-chain is never
in these figures; whatever keeps it counts it.

Side values (see `lowtide.strategies.sides`) are counted from above: what a forward makes is in its peak, also where it
is there already. What the code around the stages holds (`Stage.outliving`) is not counted
here: see `from_above`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.chain import Chain
from lowtide.strategies import sides

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class ChainArrays(NamedTuple):
    """The stages 1..n (row 0 is unused but for `output` and `standing`), a column for each variant.

    Where a stage has fewer variants than another, its last columns repeat its variant 0. A named tuple, because that is
    the record that compiled functions can take.
    """

    output: Integers
    standing: Integers
    standing_first: Integers
    light_seconds: Floats
    light_peak: Integers
    forward_seconds: Floats
    backward_seconds: Floats
    saved: Integers
    heavy_peak: Integers
    backward_peak: Integers
    num_variants: Integers


def from_above(chain: Chain) -> Chain:
    """The chain where every forward takes what the code around the stages may hold meanwhile, whatever is stored."""
    stages = []
    for stage in chain.stages:
        more = sum(num_bytes for _, num_bytes in stage.outliving)
        variants = [replace(each, forward_extra_bytes=each.forward_extra_bytes + more) for each in stage.variants]
        stages.append(
            replace(
                stage,
                forward_extra_bytes=stage.forward_extra_bytes + more,
                saving_extra_bytes=stage.saving_extra_bytes + more,
                variants=tuple(variants),
                outliving=(),
            )
            if more
            else stage
        )
    return replace(chain, stages=tuple(stages))


def arrays_of(chain: Chain, *, variants: bool = True) -> ChainArrays:
    """The arrays of a chain; without `variants` every stage has its own fields only."""
    n = chain.num_stages
    most = max(stage.num_variants for stage in chain.stages) if variants else 1
    weight_grad = np.array(
        [0] + [0 if chain.grads_resident else stage.weight_grad_bytes for stage in chain.stages], dtype=np.int64
    )
    gradient = np.array([chain.gradient_bytes(k) for k in range(n + 1)], dtype=np.int64)
    standing = gradient + weight_grad.sum() - weight_grad.cumsum() + sides.standing_bytes(chain)
    made_beside, made_gradients = sides.made_bytes(chain), sides.made_gradient_bytes(chain)
    standing_first = gradient[n] + np.concatenate(([0], made_beside.cumsum()[:-1]))
    output = np.array([chain.activation_bytes(k) for k in range(n + 1)], dtype=np.int64)
    light_seconds, light_peak = np.zeros(n + 1), np.zeros(n + 1, dtype=np.int64)
    forward_seconds, backward_seconds = np.zeros((n + 1, most)), np.zeros((n + 1, most))
    saved, heavy_peak, backward_peak = (np.zeros((n + 1, most), dtype=np.int64) for _ in range(3))
    num_variants = np.ones(n + 1, dtype=np.int64)
    for k, stage in enumerate(chain.stages, start=1):
        light_seconds[k] = stage.forward_seconds
        light_peak[k] = stage.output_bytes + stage.forward_extra_bytes + made_beside[k]
        num_variants[k] = min(stage.num_variants, most)
        for v in range(most):
            way = stage.variant(v if v < stage.num_variants else 0)
            forward_seconds[k, v], backward_seconds[k, v] = way.forward_seconds, way.backward_seconds
            saved[k, v] = way.saved_bytes
            heavy_peak[k, v] = way.saved_bytes + way.saving_extra_bytes + made_beside[k]
            made = gradient[k - 1] + weight_grad[k] + made_gradients[k]
            backward_peak[k, v] = way.saved_bytes + standing[k] + way.backward_more_bytes(int(made))
    return ChainArrays(
        output,
        standing,
        standing_first,
        light_seconds,
        light_peak,
        forward_seconds,
        backward_seconds,
        saved,
        heavy_peak,
        backward_peak,
        num_variants,
    )
