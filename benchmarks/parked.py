"""What it costs to keep weights, gradients and optimizer state on the host: time, peak and bits, beside plain training.

    python -m benchmarks.parked --rows 4096 --width 1024 --depth 12
    python -m benchmarks.parked --tiny

Trains blocks of an MLP with AdamW, plainly and within shares of the memory that weights, gradients and state take; the
budget counts everything. On the CPU the host is a mapped file.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.units import format_bytes

SHARES = (0.75, 0.5, 0.25)
NUM_STEPS = 6


def network(width: int, depth: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*(nn.Sequential(*block, nn.Linear(4 * width, width)) for block in blocks)).to(device)


def square(result: torch.Tensor) -> torch.Tensor:
    return (result**2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Seconds of a step, the first two left out, and a sum of all weights."""
    begin = 0.0
    for step in range(NUM_STEPS):
        if step == 2:
            begin = now(x.device)
        square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = (now(x.device) - begin) / (NUM_STEPS - 2)
    return seconds, torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measured(make: Any, x: torch.Tensor, share: float | None) -> tuple[float, int, torch.Tensor, Any]:
    """A step's seconds and peak, the weights, and the plan; None as a share: plainly."""
    gc.collect()
    with Meter(x.device) as meter:
        others = meter.live_bytes
    model = make()
    resident = 4 * sum(parameter.nbytes for parameter in model.parameters())
    optimizer, plan = torch.optim.AdamW(model.parameters(), lr=1e-3), None
    if share is not None:
        budget = others + int(share * resident)
        plan = lowtide.fit(model, x, memory_budget=budget, strategy="joint", optimizer=optimizer, loss=square)
    with Meter(x.device) as meter:
        square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = meter.peak_bytes - others
    seconds, weights = train(model, optimizer, x)
    if plan is not None:
        plan.detach()
    return seconds, peak, weights, plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    rows, width, depth = (32, 64, 4) if given.tiny else (given.rows, given.width, given.depth)
    x = torch.randn(rows, width, device=given.device)

    def make() -> nn.Module:
        return network(width, depth, given.device)

    seconds, peak, expected, _ = measured(make, x, None)
    print(f"{'way':22} {'a step':>10} {'predicted':>10} {'peak':>12} {'bits':>6}")
    print(f"{'plain':22} {seconds * 1e3:8.1f}ms {'':>10} {format_bytes(peak):>12}")
    for share in SHARES:
        name = f"{share:.0%} of the resident"
        try:
            seconds, peak, weights, plan = measured(make, x, share)
        except lowtide.LowtideError as error:
            print(f"{name:22} {error}")
            continue
        same = "equal" if torch.equal(weights, expected) else "OTHER"
        predicted = plan.stats().predicted_seconds
        figures = f"{seconds * 1e3:8.1f}ms {predicted * 1e3:8.1f}ms {format_bytes(peak):>12} {same:>6}"
        print(f"{name:22} {figures} {plan.schedule.strategy}")


if __name__ == "__main__":
    main()
