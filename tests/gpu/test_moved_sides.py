"""On a GPU: side values that leave for pinned memory and come back, whatever the streams do."""

from __future__ import annotations

import gc

import pytest
import torch
from benchmarks.coverage_shapes import UNet
from tests.runtime.skips import ORDERS, Popping, attached, loss, measured, moving, network, storing, trained
from tests.runtime.training import assert_equal
from torch import nn

import lowtide
from lowtide import Prefetch, Schedule
from lowtide.runtime.transfer.pinned_tier import PinnedTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

LONG_SLEEP = 50_000_000  # clock cycles, some 30 ms


def schedule_of(order: str, kind: type[UNet] = UNet) -> Schedule:
    chain = measured(kind, "cuda")
    return moving(chain, ORDERS[order](chain.num_stages))


@pytest.mark.parametrize("kind", [UNet, Popping])
@pytest.mark.parametrize("order", ORDERS)
def test_equal_numbers(order, kind):
    model, x = network(kind, "cuda")
    with attached(model, measured(kind, "cuda"), schedule_of(order, kind)) as plan:
        found = trained(model, x)
        assert plan.stats().moved_bytes_per_step > 0
    assert_equal(found, trained(network(kind, "cuda")[0], x))


@pytest.mark.parametrize("late", ["to_host", "to_device", "compute"])
@pytest.mark.parametrize("order", ORDERS)
def test_delays_in_a_stream(order, late):
    model, x = network(UNet, "cuda")
    expected = trained(network(UNet, "cuda")[0], x)
    with attached(model, measured(UNet, "cuda"), schedule_of(order)) as plan:
        tier = plan._part.execution.machine.tier
        assert isinstance(tier, PinnedTier)
        streams = {"to_host": tier.to_host, "to_device": tier.to_device, "compute": torch.cuda.current_stream()}

        def delay(*_: object) -> None:
            with torch.cuda.stream(streams[late]):
                torch.cuda._sleep(LONG_SLEEP)

        handles = [model.get_submodule(path).register_forward_pre_hook(delay) for path in ("down.0", "down.1", "up.2")]
        found = trained(model, x)
        for handle in handles:
            handle.remove()
    assert_equal(found, expected)


def numbers_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of three steps and the buffers."""
    found: list[torch.Tensor] = []
    for _ in range(3):
        model.zero_grad()
        loss(model(x)).backward()
        found += [parameter.grad.to("cpu", copy=True) for parameter in model.parameters() if parameter.grad is not None]
        found += [buffer.to("cpu", copy=True) for buffer in model.buffers()]
    return found


class Scratch(nn.Module):
    """Takes 1 GiB for a moment: more than any convolution of this network with its workspace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(2**28, device=x.device).sum()


class Peaking(UNet):
    """Takes the most by far at its bottom, where nothing needs the skips: 56 MiB with 32 images of 256 pixels."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.bottom = nn.Sequential(self.bottom, Scratch())


def test_fit_moves_them():
    """Within the least budget of `offload`, which does not recompute, they must be away at the bottom."""
    options = {"loss": loss, "strategy": "offload", "progress": False}
    x = network(Peaking, "cuda", size=256)[1].repeat(8, 1, 1, 1)
    model, plain = (network(Peaking, "cuda")[0] for _ in range(2))
    expected = numbers_of(plain, x)
    del plain
    gc.collect()
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1, **options)
    budget = caught.value.minimum_bytes
    with lowtide.fit(model, x, memory_budget=budget, **options) as plan:
        assert any(isinstance(each, Prefetch) and each.kind == "s" for each in plan.schedule.operations)
        found = numbers_of(model, x)
        stats = plan.stats()
    assert stats.moved_bytes_per_step > 0
    assert stats.measured_peak_bytes is not None
    assert stats.measured_peak_bytes <= budget
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_they_leave_the_device():
    model, x = network(UNet, "cuda")
    chain = measured(UNet, "cuda")
    listed = storing(chain.num_stages)
    sizes = []
    for schedule in (Schedule("by hand", listed), moving(chain, listed)):
        with attached(model, chain, schedule):
            seen: list[int] = []
            handle = model.get_submodule("bottom").register_forward_pre_hook(
                lambda *_, seen=seen: seen.append(torch.cuda.memory_allocated())
            )
            for _ in range(2):
                loss(model(x)).backward()
                model.zero_grad()
            handle.remove()
            sizes.append(seen[-1])
    moved_bytes = sum(side.num_bytes for side in chain.side_values if not side.stays)
    assert sizes[0] - sizes[1] >= 0.5 * moved_bytes
