"""What it costs to keep weights, gradients and optimizer state on the host: time, peak and bits, beside plain training.

    python -m benchmarks.parked                                    # blocks of an MLP on the CPU, whose host is a file
    python -m benchmarks.parked --model 1b --device cuda --budgets 25% --autocast --clip --steps 10
    python -m benchmarks.parked --model 7b --device cuda --budgets 24GiB 16GiB --dtype bfloat16
    python -m benchmarks.parked --model 7b --device cuda --ways fsdp2 torchao --dtype bfloat16
    python -m benchmarks.parked --model 17b --device cuda --budgets 24GiB --ways in-backward --dtype bfloat16
    python -m benchmarks.parked --model 7b --device cuda --budgets 12GiB --ways default --dtype bfloat16 --from-cpu
    python -m benchmarks.parked --model tiny --dtype bfloat16

Trains a model with AdamW: plainly with its blocks recomputed, within budgets of device memory with lowtide, in both of
its forms, with FSDP2, which keeps everything on the host and steps there, and with torchao, which keeps weights on the
device and the rest on the host, where it steps. A budget counts everything; "25%" is
meant of what plain training takes. Every way begins with the same weights, and its bits are those of plain training or
not, after all steps.

Beside a row of lowtide's stands a bound: steps in backward take at least as long as computing or as the link, and other
steps as long as computing and then bringing what the budget has no room for, once over the link. Computing takes what
plain training takes in the same run, or, where that is not among the ways, what the stages take one by one with blocks
forward twice.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: deterministic matrix products

import torch
import torch.nn.functional as F  # noqa: N812
from benchmarks.link_use import Profile
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.runtime.meter import Meter
from lowtide.runtime.transfer.bandwidth import measured_bandwidth
from lowtide.units import format_bytes, parse_bytes

# The first steps make the optimizer's state, and compare weights with their copies.
_NUM_LEFT_OUT = 2

PLAIN, IN_BACKWARD = "plain, recomputed", ", in backward"


@dataclass(frozen=True)
class Size:
    """A model like Llama, and the tokens of a step."""

    layers: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    batch: int
    length: int


SIZES = {
    "17b": Size(53, 5120, 13824, 40, 32000, 8, 2048),
    "13b": Size(40, 5120, 13824, 40, 32000, 8, 2048),
    "7b": Size(32, 4096, 11008, 32, 32000, 8, 2048),
    "1b": Size(20, 2048, 5632, 16, 32000, 4, 1024),
    "tiny": Size(4, 64, 176, 4, 96, 2, 32),
}


class Block(nn.Module):
    """Attention with rotated positions and a gated MLP, both normalised before."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        y, shape = self.norm1(x), (*x.shape[:2], self.heads, -1)
        query, key, value = (of(y).view(shape).transpose(1, 2) for of in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(rotated(query, angles), rotated(key, angles), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Llama(nn.Module):
    """Predicts each next token; the result is the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        self.half, self.recomputes = size.width // size.heads // 2, False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        frequencies = 10000.0 ** -(torch.arange(self.half, device=tokens.device) / self.half)
        angles = torch.arange(tokens.shape[1] - 1, device=tokens.device)[:, None] * frequencies
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, angles, use_reentrant=False) if self.recomputes else block(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class MLP(nn.Module):
    """Blocks of two linear layers; the result is a loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()) for _ in range(depth)]
        self.blocks = nn.Sequential(*(nn.Sequential(*block, nn.Linear(4 * width, width)) for block in blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of what the blocks make."""
        return (self.blocks(x) ** 2).mean()


@dataclass(frozen=True)
class Row:
    """How one way trained."""

    way: str
    seconds: float
    predicted_seconds: float
    peak_bytes: int
    predicted_bytes: int
    budget_bytes: int
    fit_seconds: float
    bits: str
    moved_bytes: int = 0
    away_bytes: int = 0
    """What the budget has no room for: weights and optimizer state, and gradients unless they are used up."""
    bound_seconds: float = 0.0


class Bench:
    """One model, trained in several ways.

    Args:
        given: the command line.
        link: bytes per second each way while both are busy.
        rows: of ways that trained before.
    """

    def __init__(self, given: argparse.Namespace, link: float, rows: list[Row]) -> None:
        self.given, self.link = given, link
        self.device, self.dtype = torch.device(given.device), getattr(torch, given.dtype)
        with Meter(self.device) as meter:
            self.others = meter.live_bytes
        begin = time.perf_counter()
        self.model = self._made()
        initialise(self.model, self.device)
        num_parameters = sum(p.numel() for p in self.model.parameters())
        print(f"{num_parameters / 1e9:.3f} G parameters, made in {time.perf_counter() - begin:.1f} s", flush=True)
        self.expected: list[int] | None = None
        self.plain_bytes = 0
        self.rows = rows

    def _made(self) -> nn.Module:
        given, size = self.given, SIZES.get(self.given.model)
        with torch.device("meta"):
            model = MLP(given.width, given.depth) if size is None else Llama(size)
        return model.to(self.dtype).to_empty(device="cpu" if given.from_cpu else self.device)

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        size = SIZES.get(self.given.model)
        if size is None:
            return torch.randn(self.given.rows, self.given.width, generator=generator).to(self.device, self.dtype)
        shape = (size.batch, size.length + 1)
        return torch.randint(size.vocabulary, shape, generator=generator).to(self.device)

    def stages(self) -> list[str] | None:
        """Whole blocks: half of the stages that fit would cut, which are solved for in a tenth of the time."""
        is_cut = isinstance(self.model, Llama) and not self.given.finer
        return ["embed", "blocks.*", "norm", "head"] if is_cut else None

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Without torch's cache of casts, which keeps a copy of every weight until the end of the forward."""
        cast = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with cast if self.given.autocast else nullcontext():
            yield

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=not self.given.foreach)

    def train(self, optimizer: torch.optim.Optimizer, *, clips: bool) -> float:
        """The median of the steps' seconds, the first ones left out."""
        generator, seconds = torch.Generator().manual_seed(7), []
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)

        def step() -> torch.Tensor:
            x, begin = self.batch(generator), now(self.device)
            with self.casting():
                loss: torch.Tensor = self.model(x)
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seconds.append(now(self.device) - begin)
            return loss.detach()

        for _ in range(self.given.steps):
            loss = step()
        print("  steps of " + ", ".join(f"{each:.3f}" for each in seconds) + f" s, loss {loss.item():.4f}", flush=True)
        median = statistics.median(seconds[min(_NUM_LEFT_OUT, len(seconds) - 1) :])
        if self.given.profile:
            with Profile() as profile:
                step()
            print(profile.report(), flush=True)
        return median

    def plainly(self) -> None:
        """Everything on the device, blocks recomputed."""
        initialise(self.model, self.device)
        optimizer = self.optimizer()
        self.model.recomputes = True  # type: ignore[assignment]
        with Meter(self.device) as meter:
            seconds = self.train(optimizer, clips=self.given.clip)
            self.plain_bytes = meter.peak_bytes - self.others
        self.model.recomputes = False  # type: ignore[assignment]
        self.expected = checksums(self.model, optimizer)
        self.add(Row(PLAIN, seconds, 0.0, self.plain_bytes, 0, 0, 0.0, ""))

    def with_torchao(self) -> None:
        """Weights on the device, gradients and state on the host, stepped there, blocks recomputed."""
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            print(f"torchao: left out, since it cannot be imported ({error})", flush=True)
            return
        initialise(self.model, self.device)
        optimizer = CPUOffloadOptimizer(self.model.parameters(), lr=1e-4, fused=True, offload_gradients=True)
        self.model.recomputes = True  # type: ignore[assignment]
        with Meter(self.device) as meter:
            seconds = self.train(optimizer, clips=False)
            peak_bytes = meter.peak_bytes - self.others
        self.model.recomputes = False  # type: ignore[assignment]
        self.add(Row("torchao, CPU offload", seconds, 0.0, peak_bytes, 0, 0, 0.0, ""))

    def within(self, budget: str, *, in_backward: bool) -> None:
        """With lowtide."""
        share = float(budget[:-1]) / 100 if budget.endswith("%") else None
        num_bytes = self.others + (parse_bytes(budget) if share is None else int(share * self.plain_bytes))
        initialise(self.model, self.device)
        optimizer, begin = self.optimizer(), now(self.device)
        name = f"{budget}{IN_BACKWARD if in_backward else ''}"
        x = self.batch(torch.Generator().manual_seed(7))
        try:
            with self.casting():
                plan = lowtide.fit(
                    self.model,
                    x,
                    memory_budget=num_bytes,
                    host_memory_budget=self.given.host,
                    optimizer=optimizer,
                    device=self.device if self.given.from_cpu else None,
                    step_in_backward=in_backward,
                    keeps_result=False,
                    stages=self.stages(),
                    progress=said(),
                )
        except lowtide.LowtideError as error:
            print(f"{name}: {error}", flush=True)
            return
        fit_seconds = now(self.device) - begin
        print(plan, flush=True)
        with plan:
            with Meter(self.device) as meter:
                seconds = self.train(optimizer, clips=self.given.clip and not in_backward)
                peak_bytes = meter.peak_bytes - self.others
            stats = plan.stats()
            has_reference = self.expected is not None and not (in_backward and self.given.clip)
            bits = "" if not has_reference else self.compared(optimizer)
            weight_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
            resident = weight_bytes * (1 if in_backward else 2) + state_bytes(optimizer)
            self.add(
                Row(
                    name,
                    seconds,
                    stats.predicted_seconds or 0.0,
                    peak_bytes,
                    (stats.predicted_peak_bytes or 0) - self.others,
                    num_bytes - self.others,
                    fit_seconds,
                    bits,
                    int(stats.moved_bytes_per_step),
                    max(0, resident - (num_bytes - self.others)),
                )
            )

    def add_bounds(self) -> None:
        """Print the rows once more, those of lowtide's with the bound, unless they had it at once."""
        if self._plain_seconds() is not None:
            return
        compute_seconds = self._measured_seconds()
        self.rows = [self._bounded(row, compute_seconds) for row in self.rows]
        for row in self.rows:
            print(line(row), flush=True)
        save(self.given, self.rows)

    def _bounded(self, row: Row, compute_seconds: float | None) -> Row:
        if not (row.budget_bytes and compute_seconds):
            return row
        link_seconds = row.away_bytes / self.link
        least = bound(compute_seconds, link_seconds, in_backward=row.way.endswith(IN_BACKWARD))
        return replace(row, bound_seconds=least)

    def _plain_seconds(self) -> float | None:
        return next((row.seconds for row in self.rows if row.way == PLAIN), None)

    def _measured_seconds(self) -> float | None:
        """What the stages take one by one on a device that has room for the model, blocks forward twice."""
        if self.given.from_cpu or not any(row.budget_bytes for row in self.rows):
            return None
        with self.casting():
            chain = lowtide.measure(self.model, self.batch(torch.Generator().manual_seed(7)), stages=self.stages())
        repeated = [stage for stage in chain.stages if isinstance(self.model, Llama) and "blocks" in stage.name]
        return chain.compute_seconds + sum(stage.forward_seconds for stage in repeated)

    def compared(self, optimizer: torch.optim.Optimizer) -> str:
        return "equal" if checksums(self.model, optimizer) == self.expected else "OTHER"

    def add(self, row: Row) -> None:
        self.rows.append(self._bounded(row, self._plain_seconds()))
        print(line(self.rows[-1]), flush=True)
        save(self.given, self.rows)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def save(given: argparse.Namespace, rows: list[Row]) -> None:
    """Write the rows that there are, after each of them: a run that is cut short keeps what it has."""
    if given.json is not None:
        given.json.write_text(json.dumps({"given": vars(given) | {"json": ""}, "rows": [asdict(row) for row in rows]}))


def line(row: Row) -> str:
    figures = f"{row.seconds * 1e3:9.1f} ms (predicted {row.predicted_seconds * 1e3:9.1f})"
    peaks = f"{format_bytes(row.peak_bytes):>10} (predicted {format_bytes(row.predicted_bytes):>10})"
    share = f"bound {row.bound_seconds * 1e3:.1f} ms, reached to {row.bound_seconds / row.seconds:.2f}"
    told = share if row.bound_seconds else ""
    return f"| {row.way:24} | {figures} | {peaks} | fit {row.fit_seconds:6.1f} s | {row.bits} | {told} |"


def bound(compute_seconds: float, link_seconds: float, *, in_backward: bool) -> float:
    """The least that a step takes whose optimizer state and weights have to come and go."""
    return max(compute_seconds, link_seconds) if in_backward else compute_seconds + link_seconds


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of all tensors that an optimizer has, wherever they are."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def said() -> Callable[[str, float], None]:
    """Prints each task once, with the time."""
    begin, last = time.perf_counter(), [""]

    def say(task: str, share: float) -> None:
        if task != last[0]:
            last[0] = task
            print(f"  {time.perf_counter() - begin:6.1f} s {task}", flush=True)

    return say


def initialise(model: nn.Module, device: torch.device) -> None:
    """The same weights each time, wherever they are; the device draws them."""
    seed = 0
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator(device).manual_seed(seed := seed + 1)
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                parameter.copy_(drawn.normal_(0.0, 0.02, generator=generator))


def checksums(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Sums of the bits of each weight and each tensor of its state."""
    tensors = [p.detach() for p in model.parameters()]
    tensors += [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    kinds: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [int(t.view(kinds[t.element_size()]).sum(dtype=torch.int64)) for t in tensors]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measured_link(device: torch.device) -> float:
    """The link's speed each way while both are busy, bytes per second; on CUDA printed, with that of each way alone."""
    if device.type != "cuda":
        return float(measured_bandwidth(device, both_ways=True))
    num_bytes = 2**30
    memory = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def gigabytes_a_second(*ways: int) -> float:
        begin = now(device)
        for way in ways:
            with torch.cuda.stream(streams[way]):
                to, of = (hosts[0], memory[0]) if way else (memory[1], hosts[1])
                to.copy_(of, non_blocking=True)
        return num_bytes / (now(device) - begin) / 1e9

    gigabytes_a_second(0, 1)
    alone = [gigabytes_a_second(0), gigabytes_a_second(1)]
    both = gigabytes_a_second(0, 1)
    print(f"link: {alone[0]:.1f} GB/s up, {alone[1]:.1f} GB/s down, {both:.1f} GB/s each way at once", flush=True)
    return both * 1e9


def with_fsdp2(given: argparse.Namespace) -> Row:
    """FSDP2 on one device, with its `CPUOffloadPolicy`: weights, gradients and state on the host, stepped there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"})
    device, dtype, size = torch.device(given.device), getattr(torch, given.dtype), SIZES[given.model]
    mesh = init_device_mesh(device.type, (1,))
    with torch.device("meta"):
        model = Llama(size).to(dtype)
    model.recomputes = True
    casts = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if given.autocast else MixedPrecisionPolicy()
    settings = {"mesh": mesh, "mp_policy": casts, "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.copy_(torch.randn(local.shape, device=device, dtype=dtype) * 0.02)
    optimizer, seconds = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), []
    generator = torch.Generator().manual_seed(7)
    with Meter(device) as meter:
        for _ in range(given.steps):
            x = torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=generator).to(device)
            begin = now(device)
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(now(device) - begin)
        peak_bytes = meter.peak_bytes
    torch.distributed.destroy_process_group()
    print("  steps of " + ", ".join(f"{each:.3f}" for each in seconds) + " s", flush=True)
    return Row("FSDP2, CPU offload", statistics.median(seconds[1:] or seconds), 0.0, peak_bytes, 0, 0, 0.0, "")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp", choices=["mlp", *SIZES])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ways", nargs="+", default=["plain", "default", "in-backward"])
    parser.add_argument("--budgets", nargs="+", default=["75%", "50%"])
    parser.add_argument("--host", help="bytes of host memory; default: what is free, minus a reserve")
    parser.add_argument("--from-cpu", action="store_true", help="the model is on the CPU when fit is called")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--clip", action="store_true", help="clip gradients by their norm")
    parser.add_argument("--foreach", action="store_true", help="AdamW's foreach form, not the fused one")
    parser.add_argument("--deterministic", action="store_true", help="kernels that give the same bits each time")
    parser.add_argument("--profile", action="store_true", help="one step more, and what device and link did in it")
    parser.add_argument("--finer", action="store_true", help="let fit cut inside blocks")
    parser.add_argument("--rows", type=int, default=1024, help="of the MLP")
    parser.add_argument("--width", type=int, default=512, help="of the MLP")
    parser.add_argument("--depth", type=int, default=12, help="of the MLP")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    given = parsed()
    if given.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    link = measured_link(torch.device(given.device))
    rows = [with_fsdp2(given)] if "fsdp2" in given.ways else []
    for row in rows:
        print(line(row), flush=True)
    save(given, rows)
    if given.ways != ["fsdp2"]:
        bench = Bench(given, link, rows)
        if "plain" in given.ways:
            bench.plainly()
        if "torchao" in given.ways:
            bench.with_torchao()
        for budget in given.budgets:
            for way in [way for way in given.ways if way in ("default", "in-backward")]:
                bench.within(budget, in_backward=way == "in-backward")
        bench.add_bounds()


if __name__ == "__main__":
    main()
