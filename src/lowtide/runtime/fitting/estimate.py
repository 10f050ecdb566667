"""Will it fit on another card? `lowtide.estimate` runs a model for its shapes only, and allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lowtide.chain import Chain
from lowtide.progress import check_progress
from lowtide.runtime.capture.capture import StageNames, capture, check_arguments
from lowtide.runtime.fitting.solving import cuts_the_peak, leanest_of
from lowtide.runtime.measure.cards import Card, find_card
from lowtide.runtime.measure.counting import counting, without_data
from lowtide.runtime.measure.measure import capture_and_measure
from lowtide.runtime.measure.weights import Optimizer, optimizer_of, with_parameters
from lowtide.solve import Solution, solve
from lowtide.units import format_bytes, format_seconds, parse_bandwidth, parse_budget

# Of a card's memory, what is left to the driver, the libraries' workspaces and gaps between blocks: what `fit` leaves.
RESERVE = 0.1


@dataclass(frozen=True, slots=True)
class Estimate:
    """What training would take on a card.

    Bytes are those of the tensors that a step would allocate, with all weights and optimizer state on the card. Times
    are what the card's peak rates allow: a real step is slower.

    Attributes:
        card: the card.
        memory_budget: the bytes that were allowed.
        chain: what each stage would cost.
        plain: training with everything stored.
        solution: the fastest schedule within the budget; None where no schedule is.
        minimum_bytes: the least that training could do with.
        num_guesses: how many numbers the model reads from tensors, which have none here: 0 and True were assumed.
    """

    card: Card
    memory_budget: int
    chain: Chain
    plain: Solution
    solution: Solution | None
    minimum_bytes: int
    num_guesses: int

    @property
    def fits(self) -> bool:
        """Whether it trains within the budget."""
        return self.solution is not None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        found = self.solution
        return {
            "device": self.card.name,
            "memory_budget": self.memory_budget,
            "feasible": self.fits,
            "strategy": None if found is None else found.strategy,
            "seconds": None if found is None else found.seconds,
            "peak_bytes": None if found is None else found.peak_bytes,
            "plain_seconds": self.plain.seconds,
            "plain_peak_bytes": self.plain.peak_bytes,
            "minimum_bytes": self.minimum_bytes,
            "num_stages": self.chain.num_stages,
            "num_guesses": self.num_guesses,
            "estimated": True,
        }

    def __str__(self) -> str:
        budget, least = format_bytes(self.memory_budget), format_bytes(self.minimum_bytes)
        plain = f"{format_bytes(self.plain.peak_bytes)}, at least {format_seconds(self.plain.seconds)} a step"
        lines = [f"{self.chain.name} on {self.card.name}, {self.chain.num_stages} stages", f"plain training  {plain}"]
        if self.solution is None:
            lines.append(f"within {budget}  does not fit")
        elif self.plain.peak_bytes <= self.memory_budget:
            lines.append(f"within {budget}  fits as it is")
        else:
            more = self.solution.seconds / self.plain.seconds
            took = f"{format_bytes(self.solution.peak_bytes)}, {more:.2f} x plain training"
            lines.append(f"within {budget}  fits with {self.solution.strategy}: {took}")
        lines.append(f"the least  {least}")
        if self.num_guesses:
            lines.append(f"note  the model reads {self.num_guesses} numbers from tensors; 0 and True were assumed")
        return "\n".join(lines)


def estimate(
    model: nn.Module,
    sample: Any,
    *,
    device: str,
    memory_budget: int | str | None = None,
    optimizer: Optimizer = "adamw",
    loss: Callable[[Any], Any] | None = None,
    stages: StageNames | None = None,
    grads_resident: bool = False,
    keeps_result: bool = True,
    bandwidth: int | str | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Estimate:
    """Estimate whether a model would train on another card, and what that would take.

    Nothing is allocated: make the model under `torch.device("meta")` where it is too large for this machine.

    Weights, gradients and optimizer state count as staying on the card. `fit` can also move them to the host, and may
    do with less memory than this says.

    Args:
        model: the model, on any device; the meta device is enough.
        sample: what a training step calls it with; only shapes and dtypes count.
        device: the name of a card, such as `"a100"` or `"4090"`.
        memory_budget: bytes on that card; None: its memory less a tenth.
        optimizer: the optimizer, a list of several, or its kind; the state counts.
        loss: what the training loop computes from the model's result; None: the loss in the result, or nothing.
        stages: the stages by hand, see `lowtide.measure`.
        grads_resident: gradients are accumulated over several calls.
        keeps_result: the training loop has the model's result in hand while backward runs.
        bandwidth: bytes per second between the card and host memory, each way; None: the card's link; 0: nothing moves.
        progress: called with the current task and the share done, 0 to 1.

    Raises:
        CaptureError: where the model cannot be cut into stages, or no card has that name.
        SampleError: where the model cannot run without data.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(8)))
        ...     x = torch.empty(65536, 4096)
        >>> estimate(model, x, device="4090", optimizer="sgd").fits
        True
    """
    card = find_card(device)
    check_arguments(model, stages, loss)
    check_progress(progress)
    budget = int(card.memory_bytes * (1 - RESERVE)) if memory_budget is None else parse_budget(memory_budget)
    link = card.link_bytes_per_second if bandwidth is None else parse_bandwidth(bandwidth)
    empty, shapes = without_data(model), tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), sample)
    without = dict(zip(map(id, model.parameters()), empty.parameters(), strict=True))
    measured = partial(
        capture_and_measure,
        empty,
        shapes,
        stages=stages,
        loss=loss,
        optimizer=with_parameters(optimizer_of(model, optimizer), without),
        name=type(model).__name__,
        grads_resident=grads_resident,
        keeps_result=keeps_result,
        progress=progress,
    )
    with counting(card) as counter:
        split, chain = measured()
        plain = solve(chain, memory_budget=2**62, strategy="store-all")
        leanest = leanest_of(partial(solve, chain, bandwidth=link))
        least = leanest.peak_bytes
        if stages is None and cuts_the_peak(capture(empty, shapes, loss=loss, finest=True), split, leanest):
            _, finer = measured(finest=True)  # as `fit` does where memory is short
            chain = finer if budget < least else chain
            least = min(least, leanest_of(partial(solve, finer, bandwidth=link)).peak_bytes)
    solution = None if budget < least else solve(chain, memory_budget=budget, bandwidth=link, progress=progress)
    return Estimate(card, budget, chain, plain, solution, least, counter.num_guesses)
