"""Train a real network plainly, then in a third of its memory: the same gradients, a little slower.

    python examples/demo.py                 # a ResNet-101 on a GPU, a small GPT where there is none
    python examples/demo.py --figure a.svg  # the memory of the plan as a figure

It ends by writing a report of the plan, a page for the browser.

`make demo` runs this.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import lowtide
from lowtide.progress import DelayedProgress
from lowtide.report.figures import save_figure
from lowtide.runtime.meter import Meter
from lowtide.units import format_bytes, format_seconds
from lowtide.zoo import make

SHARE = 0.33
NUM_STEPS = 3
PATIENCE_SECONDS = 20.0  # for the schedules of other budgets in the report


def network(*, tiny: bool) -> tuple[nn.Module, dict[str, torch.Tensor], str]:
    """A network with a batch that uses its memory, for this machine."""
    torch.manual_seed(0)
    if torch.cuda.is_available() and not tiny:
        model, batch = make("resnet101", device="cuda", batch=16, image=500)
        return model, batch, f"ResNet-101, batch 16, 500 px, on {torch.cuda.get_device_name()}"
    layers, length, width = (8, 32, 32) if tiny else (12, 256, 128)
    sizes = {"batch": 8, "length": length, "layers": layers, "width": width, "heads": 4, "vocabulary": 2 * width}
    model, batch = make("gpt2", **sizes)
    return model, batch, f"a GPT of {layers} blocks, batch 8 x {length} tokens, on the CPU"


def steps(model: nn.Module, batch: dict[str, torch.Tensor], num_steps: int) -> list[str]:
    """Train for a few steps; fingerprints of the last one's gradients, and of the parameters after it."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    found = [fingerprint(p.grad) for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    return found + [fingerprint(p.detach()) for p in model.parameters()]


def fingerprint(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def copied(model: nn.Module) -> dict[str, np.ndarray]:
    """The model's state, where it does not count as a tensor's memory."""
    return {name: value.cpu().numpy().copy() for name, value in model.state_dict().items()}


def put_back(model: nn.Module, state: dict[str, np.ndarray]) -> None:
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})


def measured(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[int, float]:
    """The peak of a step in bytes, and its time in seconds; the model is not changed."""
    device = next(model.parameters()).device
    state = copied(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    with Meter(device) as meter:
        step()
        peak = meter.peak_bytes
    times = []
    for _ in range(NUM_STEPS):
        begin = now(device)
        step()
        times.append(now(device) - begin)
    put_back(model, state)
    return peak, statistics.median(times)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a network that trains in a second")
    parser.add_argument("--figure", help="write the memory of the plan as a figure (.svg, .png, .pdf)")
    parser.add_argument("--report", default="artefacts/demo.html", help="write the report here")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, batch, title = network(tiny=arguments.tiny)
    print(f"{title}\n\nplain training ...", flush=True)
    state = copied(model)
    plain_peak, plain_seconds = measured(model, batch)
    expected = steps(model, batch, NUM_STEPS)
    put_back(model, state)
    budget = int(plain_peak * SHARE)
    print(f"lowtide.fit(model, batch, memory_budget={format_bytes(budget)!r}) ...\n", flush=True)
    with DelayedProgress() as progress:
        plan = lowtide.fit(model, batch, memory_budget=budget, optimizer="sgd", progress=progress)
    print("training under the plan ...\n", flush=True)
    got = steps(model, batch, NUM_STEPS)
    equal = got == expected
    peak, seconds = measured(model, batch)
    print(plan)
    row = "{:<22} {:>12} {:>14} {:>16}".format
    print("\n" + row("", "peak", "time a step", "gradients"))
    print(row("plain", format_bytes(plain_peak), format_seconds(plain_seconds), ""))
    print(row("lowtide", format_bytes(peak), format_seconds(seconds), "equal" if equal else "DIFFERENT"))
    print(row("", f"{peak / plain_peak:.0%}", f"{seconds / plain_seconds:.2f} x", ""))
    if arguments.figure and plan.chain is not None:
        trace = lowtide.simulate(plan.chain, plan.schedule, bandwidth=1)
        save_figure(arguments.figure, trace=trace, memory_budget=plan.memory_budget)
        print(f"\n{arguments.figure} shows the memory of the plan")
    Path(arguments.report).parent.mkdir(parents=True, exist_ok=True)
    with DelayedProgress() as progress:
        plan.report(arguments.report, patience_seconds=PATIENCE_SECONDS, progress=progress)
    print(f"\nthe report: {arguments.report} (open it in a browser)")
    if not equal:
        raise SystemExit("the gradients differ: please report this")


if __name__ == "__main__":
    main()
