"""Every algorithm against the enumeration of all sets of checkpoints, with the paper's objectives taken literally."""

import random
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.looping import looped

from lowtide.strategies.checkpoints import sets as checkpoint_sets
from lowtide.strategies.checkpoints.sets import select_dynamic, select_static


def all_sets(n):
    for count in range(n):
        for chosen in combinations(range(1, n), count):
            yield [0, *chosen, n]


def equation_6(kept, saved, chosen):
    """Every checkpoint throughout, and one recomputed segment at a time, with what its end saves beyond its output."""
    segments = [sum(saved[h + 1 : i]) + (saved[i] - kept[i]) for h, i in pairwise(chosen)]
    return sum(kept[k] for k in chosen) + max(segments)


def algorithm_4(sizes, chosen):
    """The backward phase of algorithm 4, step by step, with what is in memory; the most there ever is."""
    memory = {k: sizes[k] for k in chosen}
    peak = buffer = 0
    for i in range(len(sizes) - 1, 0, -1):
        if i in chosen:
            h = max(k for k in chosen if k < i)
            memory.update({k: sizes[k] for k in range(h + 1, i)})
            buffer = max(sizes[h:i])
        peak = max(peak, sum(memory.values()) + buffer)
        del memory[i]
    return peak


def check_all(answers, sizes, objective):
    n = len(sizes) - 1
    least = min(map(objective, all_sets(n))) if n else sizes[0]
    for cost, chosen in answers:
        assert chosen[0] == 0
        assert chosen[-1] == n
        assert chosen == sorted(set(chosen))
        assert cost == least
        assert not n or cost == objective(chosen)


def check(sizes, extra=None):
    """All on one instance; `extra` is what a value takes in a segment beyond what it takes as a checkpoint."""
    saved = sizes if extra is None else [one + other for one, other in zip(sizes, extra, strict=True)]
    check_all([select_static(sizes, saved)], sizes, lambda chosen: equation_6(sizes, saved, chosen))
    dynamic = [select_dynamic(sizes, algorithm) for algorithm in ("linear", "quadratic")]
    check_all(dynamic, sizes, lambda chosen: algorithm_4(sizes, chosen))


def random_sizes(rng, n):
    """Sizes of one of the kinds that break a careless algorithm."""
    top = rng.choice((0, 1, 2, 3, 10, 1000, 10**9))
    sizes = [rng.randint(0, top) for _ in range(n + 1)]
    kind = rng.choice(("any", "rising", "falling", "steep", "cliff", "sparse", "equal", "sorted"))
    if kind == "rising":
        return sorted(sizes)
    if kind == "falling":
        return sorted(sizes, reverse=True)
    if kind == "steep":
        return [size * 3**k for k, size in enumerate(sizes)]
    if kind == "cliff":
        return [size * 3 ** (n - k) for k, size in enumerate(sizes)]
    if kind == "sparse":
        return [size if rng.random() < 0.3 else 0 for size in sizes]
    if kind == "equal":
        return [top] * (n + 1)
    return sizes


@looped("seed", range(8))
def test_equal_to_enumeration_on_random_instances(seed):
    rng = random.Random(seed)
    for _ in range(150):
        n = rng.randint(0, 8)
        check(random_sizes(rng, n), random_sizes(rng, n) if rng.random() < 0.3 else None)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9))
@settings(max_examples=300, deadline=None)
def test_equal_to_enumeration_with_many_ties(sizes):
    check(sizes)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_equal_to_enumeration_where_more_is_saved_than_kept(pairs):
    check([kept for kept, _ in pairs], [extra for _, extra in pairs])


def test_all_lists_of_six_small_sizes():
    for number in range(3**6):
        check([number // 3**k % 3 for k in range(6)])


@looped("seed", range(5))
def test_linear_equals_quadratic_on_long_lists(seed):
    rng = random.Random(seed)
    for _ in range(40):
        sizes = random_sizes(rng, rng.randint(20, 150))
        cost, chosen = select_dynamic(sizes, "linear")
        assert cost == select_dynamic(sizes, "quadratic")[0]
        assert cost == algorithm_4(sizes, chosen)


def test_compiled_loops_give_the_same_as_interpreted_ones(monkeypatch):
    rng = random.Random(5)
    instances = [[rng.randint(0, 99) for _ in range(rng.randint(2, 60))] for _ in range(20)]
    solvers = (
        lambda sizes: select_static(sizes, sizes),
        lambda sizes: select_dynamic(sizes, "linear"),
        lambda sizes: select_dynamic(sizes, "quadratic"),
    )
    interpreted = [[solver(sizes) for sizes in instances] for solver in solvers]
    monkeypatch.setattr(checkpoint_sets, "_LARGEST_NUM_INTERPRETED_STEPS", 0)
    assert [[solver(sizes) for sizes in instances] for solver in solvers] == interpreted


def test_sums_beyond_64_bits_are_exact(monkeypatch):
    monkeypatch.setattr(checkpoint_sets, "_LARGEST_NUM_INTERPRETED_STEPS", 0)
    for factor in (2**60, 2**70):
        sizes = [factor * size for size in (1, 8, 8, 1, 8, 8, 1)]
        assert select_static(sizes, sizes)[0] == 19 * factor
        assert select_dynamic(sizes, "linear")[0] == 26 * factor
