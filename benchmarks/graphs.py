"""Steps replayed as CUDA graphs beside steps that the host launches: plain, and under a plan at two budgets.

    python -m benchmarks.graphs                            # the networks of the table, on a GPU, 4 minutes
    python -m benchmarks.graphs --only ViT --compiled      # one of them, also compiled as a whole

For each network, in one run: plain training; plain training captured whole, as `torch.cuda.graph` does it by hand; with
a checkpoint around every block (`torch.utils.checkpoint`); with everything stored under a plan; then `fit` within
shares of the plain peak, without graphs and with them. A step is forward, loss, backward and `zero_grad`.
"Reserved" is what the pool of the graphs holds, beside what the plan was predicted to take.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import Timed, machine_facts, release, time_steps, without_state
from benchmarks.refusing import Parser, refuse, refuse_unless_chosen, usable_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.units import format_bytes, format_seconds

SHARES = (0.6, 0.35)


@dataclass
class Row:
    """One line of the table."""

    network: str
    way: str
    seconds: float
    peak_bytes: int
    budget_bytes: int | None = None
    predicted_seconds: float | None = None
    clock_seconds: float | None = None
    """From the beginning of forward to the end of backward, as a plan measures it: what is predicted."""
    predicted_peak_bytes: int | None = None
    pool_bytes: int | None = None
    recomputed: float | None = None
    fit_seconds: float | None = None
    notes: list[str] = field(default_factory=list)


def networks() -> dict[str, tuple[Callable[[], nn.Module], int, torch.dtype]]:
    """Networks of small kernels: how each is made, how many images of 224 px, and in which dtype."""
    import timm
    import torchvision.models as vision

    return {
        "DenseNet-201": (vision.densenet201, 32, torch.float32),
        "EfficientNetV2-S": (lambda: vision.efficientnet_v2_s(stochastic_depth_prob=0.0), 32, torch.float32),
        "ViT-S with dropout": (
            lambda: timm.create_model("vit_small_patch16_224", drop_rate=0.1, proj_drop_rate=0.1),
            16,
            torch.float32,
        ),
        "Swin-B": (
            lambda: timm.create_model("swin_base_patch4_window7_224", drop_path_rate=0.0),
            64,
            torch.bfloat16,
        ),
    }


def captured(model: nn.Module, x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Plain training captured whole: forward, loss and backward in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss(model(x)).backward()
            model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss(model(x)).backward()
    return graph.replay


BLOCKS = frozenset({"_DenseLayer", "MBConv", "FusedMBConv", "Block", "SwinTransformerBlock"})


def _checkpointed(forward: Callable[..., Any], *args: Any) -> Any:
    """A checkpoint around one call; lists are copied, since DenseNet goes on appending to its own."""
    return checkpoint(forward, *(list(arg) if isinstance(arg, list) else arg for arg in args), use_reentrant=False)


@contextmanager
def checkpoints(model: nn.Module) -> Iterator[None]:
    """Each block is a checkpoint, as by hand."""
    blocks = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    for block in blocks:
        block.forward = functools.partial(_checkpointed, block.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def show(rows: list[Row], row: Row) -> None:
    """Add a row and print it."""
    rows.append(row)
    predicted = ""
    if row.predicted_seconds is not None and row.clock_seconds is not None:
        clock, expected = format_seconds(row.clock_seconds), format_seconds(row.predicted_seconds)
        predicted = f" (by its clock {clock}, predicted {expected})"
    expected = "" if row.predicted_peak_bytes is None else f" (predicted {format_bytes(row.predicted_peak_bytes)})"
    pool = "" if row.pool_bytes is None else f", of which the pool reserves {format_bytes(row.pool_bytes)}"
    figures = f"{format_seconds(row.seconds)}{predicted}, {format_bytes(row.peak_bytes)}{expected}{pool}"
    print(f"{row.way:28s} {figures} {'; '.join(row.notes)}", flush=True)


def bench(
    name: str, make: Callable[[], nn.Module], num_images: int, dtype: torch.dtype, *, is_compiled: bool
) -> list[Row]:
    """All rows of one network."""
    print(f"\n{name}, {num_images} images of 224 px, {dtype}", flush=True)
    device, rows = torch.device("cuda"), list[Row]()
    torch.manual_seed(0)
    model = make().to(device, dtype).train()
    x = torch.randn(num_images, 3, 224, 224, device=device, dtype=dtype)
    labels = torch.randint(0, 1000, (num_images,), device=device)

    def loss(result: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(result.float(), labels)

    def step() -> None:
        loss(model(x)).backward()
        model.zero_grad(set_to_none=True)

    def timed(work: Callable[[], None]) -> Timed:
        release(device)
        return time_steps(work, device)

    plain = timed(step)
    show(rows, Row(name, "plain", plain.seconds, plain.peak_bytes))
    replay = captured(model, x, loss)
    whole = timed(replay)
    show(rows, Row(name, "plain, captured whole", whole.seconds, torch.cuda.memory_reserved()))
    del replay
    model.zero_grad(set_to_none=True)
    with checkpoints(model):
        by_hand = timed(step)
    show(rows, Row(name, "a checkpoint a block", by_hand.seconds, by_hand.peak_bytes))

    def planned(way: str, budget: int, *, cuda_graphs: bool) -> None:
        release(device)
        options: dict[str, Any] = {"optimizer": without_state(model), "loss": loss, "bandwidth": 0, "progress": False}
        begin = time.perf_counter()
        try:
            plan = lowtide.fit(model, x, memory_budget=budget, cuda_graphs=cuda_graphs, **options)
        except lowtide.InfeasibleBudgetError as error:
            print(f"{way:28s} {error}", flush=True)
            return
        fit_seconds = time.perf_counter() - begin
        with plan:
            for _ in range(3):
                step()  # two run as ever, and one is captured
            found, stats, graphs = timed(step), plan.stats(), plan._part.graphs
            row = Row(name, way, found.seconds, stats.measured_peak_bytes or 0, budget)
            row.predicted_seconds, row.predicted_peak_bytes = stats.predicted_seconds, stats.predicted_peak_bytes
            row.clock_seconds = stats.measured_seconds
            row.pool_bytes = None if graphs is None else graphs.held_bytes
            row.recomputed, row.fit_seconds = stats.recomputed_per_step, fit_seconds
            row.notes = [note for note in plan.notes if "without CUDA graphs" in note]
            show(rows, row)

    planned("lowtide, everything stored", 2 * plain.peak_bytes, cuda_graphs=False)
    for share in SHARES:
        for cuda_graphs in (False, True):
            way = f"lowtide at {share:.0%}{', graphs' if cuda_graphs else ''}"
            planned(way, int(share * plain.peak_bytes), cuda_graphs=cuda_graphs)
    if is_compiled:
        whole_model = torch.compile(model, mode="reduce-overhead")

        def compiled_step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            loss(whole_model(x)).backward()
            model.zero_grad(set_to_none=True)

        found = timed(compiled_step)
        show(rows, Row(name, "compiled, reduce-overhead", found.seconds, torch.cuda.memory_reserved()))
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    parser.add_argument("--only", help="only networks whose name contains this")
    parser.add_argument("--compiled", action="store_true", help="also compile each as a whole; takes minutes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        refuse("CUDA graphs need a CUDA device, and there is none")
    chosen = networks()
    if arguments.only is not None:
        refuse_unless_chosen("--only", [arguments.only], list(chosen))
        chosen = {name: each for name, each in chosen.items() if arguments.only.lower() in name.lower()}
    if arguments.output is not None:
        usable_file(arguments.output)
    rows: list[Row] = []
    for name, (make, num_images, dtype) in chosen.items():
        rows += bench(name, make, num_images, dtype, is_compiled=arguments.compiled)
        release(torch.device("cuda"))
        if arguments.output is not None:
            report = {**machine_facts(torch.device("cuda")), "rows": [asdict(row) for row in rows]}
            arguments.output.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
