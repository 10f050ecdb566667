"""What the executor's own code costs on the CPU, per recomputed stage.

    python -m benchmarks.overhead            # half a minute anywhere

On a GPU the time that Python needs to launch a step is hidden as long as it is shorter than the step. Tiny tensors on
one core show it bare: from the time of a step under a schedule the time of plain training and of the forwards that run
again is taken away; what is left is divided by the number of recomputed stages. Under `offload` every stage but
the last leaves and comes back, and nothing is recomputed; nothing is copied, so that what is left is the bookkeeping.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.refusing import Parser, count
from torch import nn

import lowtide
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.measure.measure import measure_split
from lowtide.zoo import make

NUM_WARM = 3
NUM_SEGMENTS = 6
UNCHECKED = "unchecked"  # the same segments without spot checks


class Bottleneck(nn.Module):
    """A block of ResNet-101, with as many calls and next to no arithmetic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, size, padding=size // 2) for size in (1, 3, 1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        y = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = torch.relu(norm(convolution(y)))
        return x + y


class Blocks(nn.Module):
    """A stack of them, and a loss."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Bottleneck(width) for _ in range(num_blocks)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Any loss."""
        loss: torch.Tensor = self.blocks(images).square().mean()
        return loss


def blocks() -> tuple[nn.Module, dict[str, Any]]:
    """36 blocks, as many as ResNet-101 has stages."""
    return Blocks(36, 4), {"images": torch.randn(2, 4, 4, 4)}


def gpt() -> tuple[nn.Module, dict[str, Any]]:
    """A small GPT."""
    return make("gpt2", batch=1, length=8, layers=12, width=16, heads=2, vocabulary=32)


NETWORKS = {"blocks": blocks, "gpt": gpt}


def step_seconds(model: nn.Module, batch: dict[str, Any]) -> tuple[float, float]:
    """The time of a forward and of its backward."""
    begin = time.process_time()
    loss = model(**batch)
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    for parameter in model.parameters():
        parameter.grad = None
    return middle - begin, end - middle


def bench(name: str, repeats: int) -> None:
    """Print the lines of one network."""
    torch.manual_seed(0)
    model, batch = NETWORKS[name]()
    split = capture(model, batch)
    chain = measure_split(model, split, batch)
    models, plans = {"plain": model}, {}
    everything = lowtide.solve(chain, memory_budget="1TiB", strategy="store-all")
    segments = lowtide.solve(chain, memory_budget="1TiB", strategy="segments", segments=NUM_SEGMENTS)
    for way, solution in (("store-all", everything), ("segments", segments), (UNCHECKED, segments)):
        models[way] = copy.deepcopy(model)
        plans[way] = lowtide.attach(models[way], solution, split=split, spot_checks=way != UNCHECKED)
    models["offload"] = copy.deepcopy(model)
    plans["offload"] = lowtide.attach(models["offload"], offloading(chain.num_stages), split=split)
    plans["offload"]._part.execution.machine.tier = NoTier()
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in models}
    ways = list(models.items())
    for _ in range(NUM_WARM + repeats):  # in turn: what others do on the machine meets all ways alike
        for way, one in ways:
            times[way].append(step_seconds(one, batch))
        ways.reverse()  # a step after one of another kind was seen to take 0.6 % longer than one before it
    least = {way: [min(column) for column in zip(*found[NUM_WARM:], strict=True)] for way, found in times.items()}
    forward, backward = least["plain"]
    print(f"\n{name}, {chain.num_stages} stages: milliseconds of forward and of backward")
    print(f"{'plain':<10} {forward * 1e3:7.2f} {backward * 1e3:7.2f}")
    for way, plan in plans.items():
        again = repeated_share(chain, plan.schedule) * forward
        extra_forward, extra_backward = least[way][0] - forward, least[way][1] - backward - again
        num = plans[way].stats().recomputed_per_step or chain.num_stages
        what = "repeated stage" if again else "stage"
        print(
            f"{way:<10} {least[way][0] * 1e3:7.2f} {least[way][1] * 1e3:7.2f}  "
            f"{sum(least[way]) / (forward + backward + again):.3f} x plain with the repeats; per {what} ({num:.0f}) "
            f"{extra_forward / num * 1e6:.0f} us in forward, {extra_backward / num * 1e6:.0f} us in backward",
            flush=True,
        )
    share = statistics.median(
        sum(checked) / sum(unchecked) - 1
        for checked, unchecked in zip(times["segments"][NUM_WARM:], times[UNCHECKED][NUM_WARM:], strict=True)
    )
    print(f"spot checks take {share:.1%} of such a step (the median of steps side by side)", flush=True)


class NoTier:
    """Keeps storages where they are, and copies them back: nothing goes down, and gradients are right all the same."""

    smallest_bytes = 1

    def store(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Kept, Kept]:
        """Keep them."""
        kept = Kept(storages)
        return kept, kept

    def load(self, region: Kept, storages: Sequence[torch.UntypedStorage]) -> Kept:
        """Fill storages with what was kept; they are tiny."""
        for storage, kept in zip(storages, region.storages, strict=True):
            storage.copy_(kept)
        return region


class Kept:
    """Some storages: a region of `NoTier`, and a copy that has ended."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.storages = list(storages)
        self.num_bytes = sum(storage.nbytes() for storage in storages)

    def wait(self) -> None:
        """There is nothing to wait for."""


def offloading(num_stages: int) -> lowtide.Schedule:
    """Every stage but the last is moved away after its forward, and fetched before its backward."""
    operations: list[lowtide.Operation] = []
    for k in range(1, num_stages + 1):
        operations.append(lowtide.Forward(k, "all"))
        if k > 1:
            operations.append(lowtide.Release("abar", k - 1))
        if k < num_stages:
            operations.append(lowtide.Offload("abar", k))
    for k in range(num_stages, 0, -1):
        if k > 1:
            operations += [lowtide.Prefetch("abar", k - 1), lowtide.Await("abar", k - 1)]
        operations.append(lowtide.Backward(k))
    return lowtide.Schedule("offload everything", operations)


def repeated_share(chain: lowtide.Chain, schedule: lowtide.Schedule) -> float:
    """The time of the recomputed forwards, as a share of one forward of everything."""
    forwards = [op.stage for op in schedule.operations if isinstance(op, lowtide.Forward)]
    seconds = [chain.stages[k - 1].forward_seconds for k in forwards]
    return sum(seconds) / sum(stage.forward_seconds for stage in chain.stages) - 1


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=sorted(NETWORKS))
    parser.add_argument("--repeats", type=count, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in NETWORKS:
        if arguments.only in (None, name):
            bench(name, arguments.repeats)


if __name__ == "__main__":
    main()
