"""The paper's conclusions (its section 5.2) and its claim (abstract), each as numbers with a criterion.

The paper says "much better", "slightly", "similar"; what is asked for here is written at each check.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from papers.pofo.experiment import Point

# Times that differ by less than this share are called equal.
_EQUAL = 1e-3
_LARGE_MEMORY = 0.75  # the paper's "large"
_MEDIUM_MEMORY = 0.5  # above which the paper finds autocapper very good
_SMALL_MEMORY = 0.2  # that of figure 3
# "Very good", "similar": within so much of the best algorithm, as a share of the time.
_SIMILAR = 0.03
# "Works perfectly": an overhead of at most this.
_PERFECT = 0.02
CLAIMED_OVERHEAD = 0.2
_CLAIMED_FACTOR = 4.0
_CLAIMED_REMOVED = 1 / 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of the paper against the points."""

    number: str
    statement: str
    holds: int
    """On how many of `total` it holds."""
    total: int
    figures: str

    @property
    def verdict(self) -> str:
        """Whether the statement holds, in words."""
        if self.total == 0:
            return "no points"
        if self.holds == self.total:
            return "holds"
        return f"holds on {self.holds} of {self.total}" if self.holds else "does not hold"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "verdict": self.verdict}


def findings(points: Sequence[Point]) -> list[Finding]:
    """Everything that is checked, in the paper's order."""
    two = [point for point in points if point.figure == 2]
    three = [point for point in points if point.figure == 3]
    checks = [*_offloading(two), *_heuristics(two), *_pofo(points, two), *_bandwidth(three), *_claim(two)]
    return list(checks)


def _overheads(points: Sequence[Point], *algorithms: str) -> str:
    """Mean overheads over the points at which all of these algorithms have a schedule."""
    both = [point for point in points if all(point.seconds[name] is not None for name in algorithms)]
    if not both:
        return "no points"
    means = [statistics.fmean(point.overhead(name) or 0.0 for point in both) for name in algorithms]
    return "mean overhead " + ", ".join(
        f"{name} {100 * mean:z.1f} %" for name, mean in zip(algorithms, means, strict=True)
    )


def _no_slower(point: Point, one: str, other: str) -> bool:
    """Whether an algorithm has a schedule that takes no longer than the other's; none is slower than any."""
    seconds, reference = point.seconds[one], point.seconds[other]
    return seconds is not None and (reference is None or seconds <= reference * (1 + _EQUAL))


def _count(points: Sequence[Point], holds: Callable[[Point], bool]) -> tuple[int, int]:
    return sum(holds(point) for point in points), len(points)


def _offloading(two: list[Point]) -> list[Finding]:
    large = [point for point in two if point.alpha == _LARGE_MEMORY]
    small = [point for point in two if 0 < point.alpha <= _SMALL_MEMORY]
    return [
        Finding(
            "1a",
            f"at α = {_LARGE_MEMORY} offloading alone is no slower than recomputation alone",
            *_count(large, lambda point: _no_slower(point, "offload", "rotor")),
            _overheads(large, "offload", "rotor"),
        ),
        Finding(
            "1b",
            f"at α <= {_SMALL_MEMORY} offloading alone is slower than recomputation alone",
            *_count(small, lambda point: not _no_slower(point, "offload", "rotor")),
            _overheads(small, "offload", "rotor"),
        ),
    ]


def _heuristics(two: list[Point]) -> list[Finding]:
    some = [point for point in two if _SMALL_MEMORY < point.alpha < 1 and point.seconds["opportunist"] is not None]
    networks = sorted({point.network for point in two})
    without = [name for name in networks if any(p.network == name and p.seconds["opportunist"] is None for p in two)]
    large = [point for point in two if point.alpha > _MEDIUM_MEMORY]
    return [
        Finding(
            "2a",
            f"above α = {_SMALL_MEMORY}, where opportunist has a schedule, it is no slower than recomputation alone",
            *_count(some, lambda point: _no_slower(point, "opportunist", "rotor")),
            _overheads(some, "opportunist", "rotor"),
        ),
        Finding(
            "2b",
            "opportunist has no schedule at some small memory",
            len(without),
            len(networks),
            ", ".join(without) or "it always has one",
        ),
        Finding(
            "2c",
            f"above α = {_MEDIUM_MEMORY} autocapper is within {100 * _SIMILAR:.0f} % of pofo",
            *_count(large, lambda point: _ratio(point, "autocapper", "pofo") <= 1 + _SIMILAR),
            _overheads(large, "autocapper", "pofo"),
        ),
    ]


def _ratio(point: Point, one: str, other: str) -> float:
    seconds, reference = point.seconds[one], point.seconds[other]
    return float("inf") if seconds is None else 0.0 if reference is None else seconds / reference


def _pofo(points: Sequence[Point], two: list[Point]) -> list[Finding]:
    small = [point for point in two if 0 < point.alpha <= _SMALL_MEMORY]
    better = [_ratio(point, "pofo", "autocapper") - 1 for point in points if point.seconds["autocapper"] is not None]
    worst = max(better, default=0.0)
    return [
        Finding(
            "3a",
            "pofo is no slower than recomputation alone and offloading alone",
            *_count(points, lambda p: _no_slower(p, "pofo", "rotor") and _no_slower(p, "pofo", "offload")),
            _overheads(points, "pofo", "rotor", "offload"),
        ),
        Finding(
            "3b",
            f"for α <= {_SMALL_MEMORY} pofo is faster than autocapper",
            *_count(small, lambda point: _ratio(point, "autocapper", "pofo") > 1 + _EQUAL),
            _overheads(small, "pofo", "autocapper"),
        ),
        Finding(
            "3c",
            f"autocapper is never faster than pofo by more than {100 * _SIMILAR:.0f} %",
            sum(ratio <= _SIMILAR for ratio in better),
            len(better),
            f"faster by more than 0.1 % at {sum(ratio > _EQUAL for ratio in better)} points, by {100 * worst:.2f} % at "
            "most",
        ),
    ]


def _bandwidth(three: list[Point]) -> list[Finding]:
    fastest = max((point.bandwidth for point in three), default=0)
    slowest = min((point.bandwidth for point in three), default=0)
    high = [point for point in three if point.bandwidth == fastest]
    low = [point for point in three if point.bandwidth == slowest]
    return [
        Finding(
            "4a",
            f"with three times the bandwidth offloading alone has an overhead of at most {100 * _PERFECT:.0f} %",
            *_count(high, lambda point: (overhead := point.overhead("offload")) is not None and overhead <= _PERFECT),
            _overheads(high, "offload", "pofo"),
        ),
        Finding(
            "4b",
            "at the lowest bandwidth pofo is faster than offloading alone",
            *_count(low, lambda point: _ratio(point, "offload", "pofo") > 1 + _EQUAL),
            _overheads(low, "offload", "pofo"),
        ),
    ]


def _claim(two: list[Point]) -> list[Finding]:
    networks = sorted({point.network for point in two})
    factors = [_largest_factor([point for point in two if point.network == name]) for name in networks]
    removed = [_removed([point for point in two if point.network == name]) for name in networks]
    listed = ", ".join(f"{name} {factor:.1f}" for name, factor in zip(networks, factors, strict=True))
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in zip(networks, removed, strict=True))
    return [
        Finding(
            "5a",
            f"{_CLAIMED_FACTOR:.0f} times less memory for activations with an overhead of pofo below "
            f"{100 * CLAIMED_OVERHEAD:.0f} %",
            sum(factor >= _CLAIMED_FACTOR for factor in factors),
            len(factors),
            f"at the smallest α computed with such an overhead: {listed}",
        ),
        Finding(
            "5b",
            "offloading removes a third of the overhead of recomputation",
            sum(share >= _CLAIMED_REMOVED for share in removed),
            len(removed),
            f"of the overhead, summed over 0 < α < 1: {shares}",
        ),
    ]


def _largest_factor(points: list[Point]) -> float:
    """By how much activations shrink at the smallest budget at which pofo stays below the claimed overhead."""
    cheap = [
        p.activation_factor for p in points if (found := p.overhead("pofo")) is not None and found < CLAIMED_OVERHEAD
    ]
    return max(cheap, default=1.0)


def _removed(points: list[Point]) -> float:
    """The share of the overhead of recomputation alone that pofo does without."""
    inner = [point for point in points if 0 < point.alpha < 1]
    rotor = sum(point.overhead("rotor") or 0.0 for point in inner)
    pofo = sum(point.overhead("pofo") or 0.0 for point in inner)
    return 1 - pofo / rotor if rotor > 0 else 0.0
