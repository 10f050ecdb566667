"""Random small chains of every kind of sizes that has ever broken a recursion."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from lowtide import Chain, SideValue, Stage, Variant

Sizes = Callable[[random.Random, int], list[int]]


def _rising(rng: random.Random, n: int) -> list[int]:
    return sorted(rng.randint(0, 12) for _ in range(n))


# Sizes of a[0..n-1]; small enough for every budget to be exact in 500 slots of one byte.
SIZES: dict[str, Sizes] = {
    "zero": lambda rng, n: [0] * n,
    "equal": lambda rng, n: [rng.randint(1, 6)] * n,
    "rising": _rising,
    "falling": lambda rng, n: _rising(rng, n)[::-1],
    "heavy-tailed": lambda rng, n: [rng.choice((0, 1, 1, 2, 3, 30)) for _ in range(n)],
    "mixed": lambda rng, n: [rng.randint(0, 9) for _ in range(n)],
}

# What else a chain can have; each changes the memory model somewhere.
FEATURES = (
    "saved = output", "large extras", "weight gradients", "grads resident", "odd gradients", "variants", "base",
    "lean saving", "freed early",
)  # fmt: skip
# What the strategies of offloading pass over: they are valid with it, and not optimal.
NESTED_FEATURES = (*FEATURES, "reruns")


def random_chain(seed: int, num_stages: int, *, sizes: str = "mixed", features: tuple[str, ...] = ()) -> Chain:
    """A chain of whole-second times, so that sums are exact and ties happen."""
    rng = random.Random(f"{seed} {num_stages} {sizes} {features}")
    outputs = SIZES[sizes](rng, num_stages + 1)
    stages = tuple(_stage(rng, f"stage {k}", outputs[k], features) for k in range(1, num_stages + 1))
    if "outliving" in features:
        stages = tuple(
            dataclasses.replace(stage, outliving=[(m, rng.randint(1, 9)) for m in range(1, k) if rng.random() < 0.4])
            for k, stage in enumerate(stages)
        )
    return Chain(
        f"{sizes} {' '.join(features)} {seed}",
        stages,
        input_bytes=outputs[0],
        input_grad_bytes=rng.choice((0, outputs[0])),
        base_bytes=rng.randint(0, 5) if "base" in features else 0,
        grads_resident="grads resident" in features,
        side_values=_side_values(rng, num_stages) if "side values" in features else (),
    )


def random_chains(count: int, num_stages: int, *, features: tuple[str, ...] = FEATURES) -> list[Chain]:
    """Chains of every kind of sizes, each with a random choice of features."""
    rng = random.Random(f"chains {count} {num_stages}")
    made = []
    for seed in range(count):
        chosen = tuple(feature for feature in features if rng.random() < 0.3)
        made.append(random_chain(seed, num_stages, sizes=list(SIZES)[seed % len(SIZES)], features=chosen))
    return made


def with_random_seconds(chain: Chain, seed: int) -> Chain:
    """The same chain with times that are not whole, so that no two sums are equal."""
    rng = random.Random(f"seconds {seed}")
    stages = tuple(
        dataclasses.replace(
            stage,
            forward_seconds=(forward := rng.random()),
            rerun_seconds=forward * (stage.rerun_seconds / stage.forward_seconds if stage.forward_seconds else 1.0),
            backward_seconds=rng.random(),
            variants=tuple(
                dataclasses.replace(variant, forward_seconds=rng.random(), backward_seconds=rng.random())
                for variant in stage.variants
            ),
        )
        for stage in chain.stages
    )
    return dataclasses.replace(chain, stages=stages)


def long_chain(num_stages: int, seed: int = 0) -> Chain:
    """A chain of megabytes, so that slots round."""
    rng = random.Random(f"long {num_stages} {seed}")
    stages = []
    for k in range(1, num_stages + 1):
        output = rng.randint(10**6, 10**7)
        saved = output + rng.randint(0, 5 * 10**7)
        extra = rng.choice((0, rng.randint(0, 10**7)))
        stages.append(
            Stage(
                f"stage {k}",
                rng.random(),
                2 * rng.random(),
                output,
                saved,
                forward_extra_bytes=extra,
                backward_extra_bytes=rng.randint(0, 10**7),
                weight_bytes=rng.randint(0, 10**6),
            )
        )
    return Chain(f"long {num_stages} {seed}", tuple(stages), input_bytes=10**6, base_bytes=12345)


def _side_values(rng: random.Random, num_stages: int) -> tuple[SideValue, ...]:
    made = []
    for i in range(rng.randint(1, 3) if num_stages > 1 else 0):
        maker = rng.randint(1, num_stages - 1)
        readers = rng.sample(range(maker + 1, num_stages + 1), rng.randint(1, min(2, num_stages - maker)))
        made.append(SideValue(f"side {i}", rng.randint(0, 9), maker, tuple(readers), rng.choice((None, 0, 3))))
    return tuple(made)


def _stage(rng: random.Random, name: str, output: int, features: tuple[str, ...]) -> Stage:
    large = "large extras" in features
    weight = rng.randint(0, 4) if {"weight gradients", "grads resident"} & set(features) else 0

    def saved() -> int:
        return output + (0 if "saved = output" in features else rng.randint(0, 12))

    def extra() -> int:
        return rng.choice((0, rng.randint(0, 25))) if large else rng.choice((0, 0, rng.randint(0, 3)))

    def freed(saved_bytes: int) -> int:
        return rng.randint(0, saved_bytes) if "freed early" in features else 0

    variants = tuple(
        Variant(f"way {v}", rng.randint(0, 5), rng.randint(0, 5), size := saved(), extra(), extra(), freed(size))
        for v in range(1, rng.randint(1, 3) if "variants" in features else 1)
    )
    forward = rng.randint(0, 5)
    return Stage(
        name,
        forward,
        rng.randint(0, 5),
        output,
        size := saved(),
        grad_bytes=rng.randint(0, 9) if "odd gradients" in features else None,
        forward_extra_bytes=(forward_extra := extra()),
        backward_extra_bytes=extra(),
        weight_bytes=weight,
        weight_grad_bytes=rng.choice((0, weight)),
        optimizer_bytes=rng.choice((0, weight)),
        variants=variants,
        rerun_seconds=rng.randint(0, forward) if "reruns" in features else None,
        saving_extra_bytes=rng.randint(0, forward_extra) if "lean saving" in features else None,
        update_seconds=rng.randint(0, 3) if "updates" in features else 0.0,
        freed_bytes=freed(size),
    )
