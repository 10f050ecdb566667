"""The helper that runs many cases in one test: every case runs, and the one that fails is named."""

from __future__ import annotations

import pytest
from tests.looping import looped


def test_every_case_runs_and_the_one_that_fails_is_named() -> None:
    seen: list[tuple[int, str]] = []

    @looped("seed", range(5))
    def cases(seed: int, kind: str) -> None:
        seen.append((seed, kind))
        assert seed < 3

    with pytest.raises(AssertionError) as caught:
        cases(kind="k")
    assert seen == [(0, "k"), (1, "k"), (2, "k"), (3, "k")]
    assert caught.value.__notes__ == ["seed = 3"]


@looped("seed", range(2))
@pytest.mark.parametrize("kind", ["a", "b"])
def test_it_goes_with_parametrize(kind: str, seed: int) -> None:
    assert (kind, seed) in {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
