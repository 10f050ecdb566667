"""How much fits? `lowtide.largest_batch` searches the largest batch, or sequence, that trains within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.errors import CaptureError, InfeasibleBudgetError, shown
from lowtide.progress import check_progress
from lowtide.runtime.fitting.fit import fit
from lowtide.runtime.fitting.rehearsal import let_go
from lowtide.runtime.meter import settled
from lowtide.runtime.model.containers import Held, build, template
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.plan.attach import check_is_model, device_of
from lowtide.solve import checked_count
from lowtide.units import format_bytes, format_seconds, parse_budget

# Sizes are searched to within one in so many: a trial takes seconds, and a few percent of a batch decide nothing.
RESOLUTION = 16


class Search:
    """Looks for the largest whole number for which `fits` holds, to within one in `RESOLUTION`; 0: it does for none.

    Args:
        fits: holds up to some number and not beyond it.
        low: a number for which it is known to hold; 0: none is known.
        high: one for which it is known not to.

    Example:
        >>> Search(lambda number: number <= 100).run(8) in range(94, 101)
        True
    """

    def __init__(self, fits: Callable[[int], bool], low: int = 0, high: int | None = None) -> None:
        self._fits = fits
        self.low = low
        """The largest seen to fit."""
        self.high = high
        """The least seen not to fit; None: none was."""

    def run(self, start: int) -> int:
        """Go up or down from `start` in steps that double, then halve the last of them."""
        step = _resolution(start)
        tried = max(1, start, self.low + 1) if self.high is None else max(1, (self.low + self.high) // 2)
        while self.high is None or self.high - self.low > _resolution(self.low):
            if self._fits(tried):
                self.low = tried
            else:
                self.high = tried
            if self.high is None or self.low == 0:
                tried = max(1, tried + step if self.high is None else tried - step)
                step *= 2
            else:
                tried = (self.low + self.high) // 2
        return self.low


def _resolution(number: int) -> int:
    return max(1, number // RESOLUTION)


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch that trains within a budget.

    Attributes:
        batch: its size; 0: even one sample does not fit.
        seconds: the predicted time of a step; None where nothing fits.
        peak_bytes: the predicted peak; None where nothing fits.
        too_large: the smallest size that was seen not to fit; sizes in between were not tried. None: `most` fits.
        memory_budget: the bytes that were allowed.
        minimum_bytes: what the smallest size that was refused needs at the least; None: none was refused.
    """

    batch: int
    seconds: float | None
    peak_bytes: int | None
    too_large: int | None
    memory_budget: int
    minimum_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        budget = format_bytes(self.memory_budget)
        if self.seconds is None or self.peak_bytes is None:
            least = "" if self.minimum_bytes is None else f"; it needs {format_bytes(self.minimum_bytes)}"
            return f"not even a batch of 1 trains within {budget}{least}"
        beyond = "" if self.too_large is None else f"; {self.too_large} does not fit"
        each = f"{format_seconds(self.seconds)} a step, {format_seconds(self.seconds / self.batch)} a sample"
        return f"batch {self.batch} trains within {budget}: {each}, peak {format_bytes(self.peak_bytes)}{beyond}"


def largest_batch(
    model: nn.Module,
    sample: Any,
    *,
    memory_budget: int | str,
    dim: int = 0,
    most: int | None = None,
    progress: Callable[[str, float], None] | None = None,
    **options: Any,
) -> LargestBatch:
    """Search the largest batch that trains within a memory budget.

    Each size is tried as `fit` would: measured, solved and tried in a step. The model is not changed. As with `fit`,
    weights may move to the host only if `optimizer` is one optimizer itself; with its name they stay on the device.

    Args:
        model: the model, on the device where it is trained.
        sample: what a training step calls it with. Tensors whose size along `dim` is that of the first one grow with
            the batch; their rows are repeated.
        memory_budget: bytes, as for `fit`.
        dim: the dimension that grows: 0 the batch, 1 most often the length of sequences.
        most: the largest size to try; None: there is no limit.
        progress: called with what is being tried and the share done, 0 to 1.
        options: more arguments of `fit`: `optimizer`, `loss`, `strategy`, `bandwidth`, ... With `compile_stages` each
            size that is tried is compiled, too: more may fit, and the search takes much longer.

    Returns:
        The size and its predicted time, within one in 16.

    Raises:
        CaptureError: where the sample has no tensor with such a dimension.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        >>> largest_batch(model, torch.zeros(8, 64), memory_budget="1GiB", most=16, bandwidth=0).batch
        16
    """
    check_is_model(model)
    check_progress(progress)
    most = checked_count("most", most)
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise CaptureError(f"dim is {shown(dim)}, expected a whole number from 0 up")
    budget, called = parse_budget(memory_budget), Sample.of(sample)
    size = _size_along(called, dim)
    found: dict[int, tuple[float | None, int | None]] = {}
    refused: dict[int, int] = {}

    def fits(number: int) -> bool:
        if most is not None and number > most:
            return False
        if progress is not None:
            progress(f"trying {number}", _share_done(search))
        try:
            plan = fit(model, _resized(called, dim, size, number), memory_budget=budget, **options)
        except InfeasibleBudgetError as error:
            refused[number] = error.minimum_bytes
            return False
        except torch.OutOfMemoryError:
            refused[number] = budget
            return False
        finally:
            let_go(device_of(model))
        with plan:
            stats = plan.stats()
            found[number] = stats.predicted_seconds, stats.predicted_peak_bytes
        return True

    search = Search(fits, high=None if most is None else most + 1)
    with settled(device_of(model)):
        best = search.run(min(size, most or size))
    seconds, peak_bytes = found.get(best, (None, None))
    least = refused[min(refused)] if refused else None
    return LargestBatch(best, seconds, peak_bytes, min(refused, default=None), budget, least)


def _share_done(search: Search) -> float:
    """Nobody knows before a size was too large; from then on the interval is halved."""
    if search.high is None or search.low == 0:
        return 0.0
    return min(1.0, _resolution(search.low) / max(1, search.high - search.low))


def _size_along(sample: Sample, dim: int) -> int:
    for tensor in sample.tensors():
        if tensor.dim() > dim:
            return tensor.size(dim)
    raise CaptureError(f"no tensor of the sample has a dimension {dim} that could grow; pass a batch of tensors")


def _resized(sample: Sample, dim: int, size: int, wanted: int) -> Sample:
    """The same call with another batch: the first rows, or all of them again and again."""

    def encode(tensor: torch.Tensor) -> Held:
        if tensor.dim() <= dim or tensor.size(dim) != size:
            return Held(tensor)
        rows = torch.arange(wanted, device=tensor.device) % size
        return Held(tensor.detach().index_select(dim, rows).requires_grad_(tensor.requires_grad))

    args, kwargs = build(template((sample.args, dict(sample.kwargs)), encode), [])
    return Sample(args, kwargs)
