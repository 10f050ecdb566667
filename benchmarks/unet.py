"""A classic U-Net, whose skips live from its first half to its last: plain, with checkpoints by hand, and with lowtide.

    python -m benchmarks.unet --device cuda          # 64 to 512 channels, 256 px, 16 images, fp32: about a minute
    python -m benchmarks.unet --device cpu --tiny    # to see that it works

Convolutions compute in TF32 where torch does by default. In full fp32 (`--no-tf32`) cuDNN's workspaces take most of the
memory on an H200, whatever is recomputed.

Each line also says how much of its peak is no tensor: workspaces that convolutions take while they run. They are the
same whatever is recomputed, so no plan can go below them.

By hand, each double convolution and each upsampling is a checkpoint (`torch.utils.checkpoint`). lowtide gets what that
takes, with and without offloading, and then the least budget that `fit` names. Each line is printed when it is known.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.coverage_shapes import UNet
from benchmarks.harness import Timed, add_device_argument, machine_facts, release, time_steps, without_state
from benchmarks.refusing import Parser
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.units import format_bytes, format_seconds


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def network(device: torch.device, *, tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = UNet(8 if tiny else 64, 3).to(device)
    return model, torch.randn(2 if tiny else 16, 3, *(2 * [64 if tiny else 256]), device=device)


def checkpointed(model: nn.Module) -> nn.Module:
    """The same model with each block a checkpoint."""
    for name in ("down", "grow", "up"):
        for block in model.get_submodule(name).children():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    bottom = model.get_submodule("bottom")
    bottom.forward = functools.partial(checkpoint, bottom.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def stepped(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        loss_of(model(x)).backward()
        model.zero_grad(set_to_none=True)

    return step


def measured(step: Callable[[], None], device: torch.device) -> tuple[Timed, int]:
    """Times and peak of a step, and the peak of its tensors alone."""
    timed = time_steps(step, device)
    with Meter(device, tensors_alone=True) as meter:
        step()
    return timed, meter.peak_bytes


def show(name: str, timed: Timed, tensor_bytes: int, more: str = "") -> None:
    spread = format_seconds(timed.spread_seconds)
    figures = f"{format_seconds(timed.seconds)} (spread {spread}), peak {format_bytes(timed.peak_bytes)}"
    workspaces = format_bytes(max(0, timed.peak_bytes - tensor_bytes))
    print(f"{name:34s} {figures} ({timed.peak_bytes} bytes; {workspaces} of it no tensors){more}", flush=True)


def planned(name: str, device: torch.device, budget: int, *, tiny: bool, **options: Any) -> None:
    """Train with a plan within a budget; a budget that is refused is raised to the least once."""
    model, x = network(device, tiny=tiny)
    optimizer = without_state(model)
    begin = time.perf_counter()
    fit = functools.partial(lowtide.fit, model, x, loss=loss_of, optimizer=optimizer, progress=False, **options)
    try:
        plan = fit(memory_budget=budget)
    except lowtide.InfeasibleBudgetError as error:
        seconds = format_seconds(time.perf_counter() - begin)
        print(f"{name:34s} {format_bytes(budget)} refused in {seconds}: {error}", flush=True)
        budget, begin = error.minimum_bytes, time.perf_counter()
        plan = fit(memory_budget=budget)
    seconds = time.perf_counter() - begin
    with plan:
        figures = measured(stepped(model, x), device)
        more = f"; budget {format_bytes(budget)}, {described(plan)}, planned in {format_seconds(seconds)}"
    show(name, *figures, more)
    release(device)


def described(plan: lowtide.Plan) -> str:
    stats, predicted = plan.stats(), plan.schedule.predicted
    assert predicted is not None
    return (
        f"predicted {format_seconds(predicted.seconds)} and {format_bytes(predicted.peak_bytes)}, "
        f"{plan.schedule.strategy}, {plan.split.num_stages} stages, {stats.recomputed_per_step:g} recomputed, "
        f"{format_bytes(int(stats.moved_bytes_per_step))} moved"
    )


def main() -> None:
    parser = Parser(__doc__)
    add_device_argument(parser)
    parser.add_argument("--tiny", action="store_true", help="a small network, to see that it works")
    parser.add_argument("--no-tf32", action="store_true", help="convolutions in full fp32; default: as torch has it")
    arguments = parser.parse_args()
    device, tiny = torch.device(arguments.device), arguments.tiny
    if arguments.no_tf32:
        torch.backends.cudnn.allow_tf32 = False
    facts = machine_facts(device)
    print(f"{facts['machine']}, torch {facts['torch']}, lowtide {facts['lowtide']}, {facts['date']}", flush=True)
    model, x = network(device, tiny=tiny)
    show("plain", *measured(stepped(model, x), device))
    release(device)
    by_hand, tensor_bytes = measured(stepped(checkpointed(model), x), device)
    show("each block a checkpoint, by hand", by_hand, tensor_bytes)
    del model, x
    release(device)
    planned("lowtide, recomputing", device, by_hand.peak_bytes, tiny=tiny, bandwidth=0)
    planned("lowtide's least, recomputing", device, 1, tiny=tiny, bandwidth=0)
    planned("lowtide", device, by_hand.peak_bytes, tiny=tiny)
    planned("lowtide's least", device, 1, tiny=tiny)


if __name__ == "__main__":
    main()
