"""Steps replayed as CUDA graphs beside steps that the host launches: plain, and under a plan at two budgets.

    python -m benchmarks.graphs                                  # the networks of the table, on a GPU, 10 minutes
    python -m benchmarks.graphs --only ViT --ways graphs compiled    # one of them, and some of the ways

For each network, in one run: plain training; plain training captured whole, as `torch.cuda.graph` does it by hand; with
a checkpoint around every block (`torch.utils.checkpoint`); with everything stored under a plan; `fit` within shares of
the plain peak, without graphs, with them, and with them and copies to the host; compiled as a whole in the mode
`reduce-overhead`. A step is forward, loss, backward and `zero_grad`. Everything is written again after each row.
"Reserves" is what the pool of the graphs holds, beside what the plan was predicted to take.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Collection, Iterator
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

# Beside plain training, which is always run: the shares are of its peak.
WAYS = ("captured", "checkpoints", "stored", "eager", "graphs", "offload", "compiled")


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


def text_of(row: Row) -> str:
    """A row as it is printed."""
    predicted = ""
    if row.predicted_seconds is not None and row.clock_seconds is not None:
        clock, expected = format_seconds(row.clock_seconds), format_seconds(row.predicted_seconds)
        predicted = f" (by its clock {clock}, predicted {expected})"
    expected = "" if row.predicted_peak_bytes is None else f" (predicted {format_bytes(row.predicted_peak_bytes)})"
    pool = "" if row.pool_bytes is None else f", of which the pool reserves {format_bytes(row.pool_bytes)}"
    figures = f"{format_seconds(row.seconds)}{predicted}, {format_bytes(row.peak_bytes)}{expected}{pool}"
    return f"{row.way:28s} {figures} {'; '.join(row.notes)}"


class Network:
    """One network, and the ways to train it.

    Args:
        name: its name.
        make: makes it.
        num_images: of 224 px in a step.
        dtype: of weights and images.
        show: is handed each row.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], nn.Module],
        num_images: int,
        dtype: torch.dtype,
        show: Callable[[Row], None],
    ) -> None:
        self.name, self.show, self.device = name, show, torch.device("cuda")
        torch.manual_seed(0)
        self.model = make().to(self.device, dtype).train()
        self.x = torch.randn(num_images, 3, 224, 224, device=self.device, dtype=dtype)
        self.labels = torch.randint(0, 1000, (num_images,), device=self.device)

    def loss(self, result: torch.Tensor) -> torch.Tensor:
        """The loss of a result."""
        return nn.functional.cross_entropy(result.float(), self.labels)

    def step(self) -> None:
        """A step of training without the optimizer's."""
        self.loss(self.model(self.x)).backward()
        self.model.zero_grad(set_to_none=True)

    def timed(self, work: Callable[[], None]) -> Timed:
        """The time of a step."""
        release(self.device)
        return time_steps(work, self.device)

    def run(self, ways: Collection[str]) -> None:
        """All rows, or some."""
        plain = self.timed(self.step)
        self.show(Row(self.name, "plain", plain.seconds, plain.peak_bytes))
        if "captured" in ways:
            self._captured()
        if "checkpoints" in ways:
            with checkpoints(self.model):
                found = self.timed(self.step)
            self.show(Row(self.name, "a checkpoint a block", found.seconds, found.peak_bytes))
        if "stored" in ways:
            self._planned("lowtide, everything stored", 2 * plain.peak_bytes, bandwidth=0)
        for share in SHARES:
            way, budget = f"lowtide at {share:.0%}", int(share * plain.peak_bytes)
            if "eager" in ways:
                self._planned(way, budget, bandwidth=0)
            if "graphs" in ways:
                self._planned(f"{way}, graphs", budget, bandwidth=0, cuda_graphs=True)
            if "offload" in ways:
                self._planned(f"{way}, graphs and copies", budget, cuda_graphs=True)
        if "compiled" in ways:
            self._compiled()

    def _captured(self) -> None:
        replay = captured(self.model, self.x, self.loss)
        whole = self.timed(replay)
        self.show(Row(self.name, "plain, captured whole", whole.seconds, torch.cuda.memory_reserved()))
        del replay
        self.model.zero_grad(set_to_none=True)

    def _planned(self, way: str, budget: int, **options: Any) -> None:
        release(self.device)
        begin = time.perf_counter()
        try:
            plan = lowtide.fit(
                self.model,
                self.x,
                memory_budget=budget,
                optimizer=without_state(self.model),
                loss=self.loss,
                progress=False,
                **options,
            )
        except lowtide.InfeasibleBudgetError as error:
            print(f"{way:28s} {error}", flush=True)
            return
        fit_seconds = time.perf_counter() - begin
        with plan:
            for _ in range(3):
                self.step()  # two run as ever, and one is captured
            found, stats, graphs = self.timed(self.step), plan.stats(), plan._part.graphs
            row = Row(self.name, way, found.seconds, stats.measured_peak_bytes or 0, budget)
            row.predicted_seconds, row.predicted_peak_bytes = stats.predicted_seconds, stats.predicted_peak_bytes
            row.clock_seconds = stats.measured_seconds
            row.pool_bytes = None if graphs is None else graphs.held_bytes
            row.recomputed, row.fit_seconds = stats.recomputed_per_step, fit_seconds
            row.notes = [note for note in plan.notes if "without CUDA graphs" in note]
            self.show(row)

    def _compiled(self) -> None:
        model = torch.compile(self.model, mode="reduce-overhead")

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            self.loss(model(self.x)).backward()
            self.model.zero_grad(set_to_none=True)

        found = self.timed(step)
        self.show(Row(self.name, "compiled, reduce-overhead", found.seconds, torch.cuda.memory_reserved()))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    parser.add_argument("--only", help="only networks whose name contains this")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help=f"beside plain training; of {', '.join(WAYS)}")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        refuse("CUDA graphs need a CUDA device, and there is none")
    chosen = networks()
    if arguments.only is not None:
        refuse_unless_chosen("--only", [arguments.only], list(chosen))
        chosen = {name: each for name, each in chosen.items() if arguments.only.lower() in name.lower()}
    if arguments.ways is not None:
        refuse_unless_chosen("--ways", arguments.ways, WAYS)
    if arguments.output is not None:
        usable_file(arguments.output)
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(text_of(row), flush=True)
        if arguments.output is not None:
            report = {**machine_facts(torch.device("cuda")), "rows": [asdict(row) for row in rows]}
            arguments.output.write_text(json.dumps(report, indent=1), encoding="utf-8")

    for name, (make, num_images, dtype) in chosen.items():
        print(f"\n{name}, {num_images} images of 224 px, {dtype}", flush=True)
        Network(name, make, num_images, dtype, show).run(arguments.ways or WAYS)
        release(torch.device("cuda"))


if __name__ == "__main__":
    main()
