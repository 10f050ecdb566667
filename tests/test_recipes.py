"""The programs of all pages under docs/ run, on tiny networks.

A page is one program: its ```python blocks, one after the other, with what the reader has (a model, a loader, ...)
given here. Budgets such as "20GiB" of `fit` are replaced by one just above the least that the tiny network needs, so
that something is recomputed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pages import blocks
from tests.processes import run_two
from tests.runtime.training import above_the_least
from torch import nn

import lowtide
from lowtide import Chain, Forward, Stage

DOCS = Path(__file__).parents[1] / "docs"

pytestmark = pytest.mark.usefixtures("short_reports")

# Above the least budget by this share, a part is kept and a part recomputed.
ABOVE_THE_LEAST = 1.15


class Classifier(nn.Module):
    """Blocks of convolutions with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6))
        )
        self.head = nn.Linear(8, 4)

    def forward(self, images: Any) -> Any:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class UNet(nn.Module):
    """Two levels down, two up, a skip connection at each, and an embedding of the time step."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> Any:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

        self.time = nn.Embedding(1000, width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Sequential(block(width, width), block(width, width)) for _ in range(2))
        self.middle = nn.Sequential(block(width, width), block(width, width))
        self.up = nn.ModuleList(nn.Sequential(block(2 * width, width), block(width, width)) for _ in range(2))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Any, steps: Any) -> Any:
        x = self.stem(images) + self.time(steps)[:, :, None, None]
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = level(torch.cat([x, skips.pop()], 1))
        return self.head(x)


def layered(width: int = 16) -> Any:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)))


def with_optimizer(**given: Any) -> dict[str, Any]:
    model = given.get("model", given.get("unet"))
    return {**given, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "device": torch.device("cpu")}


def rows(num_rows: int = 256) -> dict[str, Any]:
    """A network of layers and a loader of pairs."""
    return with_optimizer(model=layered(), loader=pairs(num_rows), loss_fn=nn.functional.mse_loss)


def small_card() -> dict[str, Any]:
    given = rows()
    return {**given, "x": next(iter(given["loader"]))[0]}


def images() -> dict[str, Any]:
    pair = torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))
    last = torch.randn(5, 3, 16, 16), torch.randint(0, 4, (5,))
    return with_optimizer(model=Classifier(), loader=[pair, last], loss_fn=nn.functional.cross_entropy)


def diffusion() -> dict[str, Any]:
    return with_optimizer(unet=UNet(), loader=[torch.randn(8, 3, 16, 16)] * 2)


def language_model() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def tokens(length: int) -> dict[str, Any]:
    ids = torch.randint(0, 64, (4, length))
    return {"input_ids": ids, "labels": ids}


def long_context() -> dict[str, Any]:
    loader = torch.utils.data.DataLoader([tokens(32), tokens(24)], batch_size=None)
    return with_optimizer(model=language_model(), loader=loader)


def trainer(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    settings = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    dataset = [{name: tensor[0] for name, tensor in tokens(16).items()} for _ in range(8)]

    def collate(entries: Any) -> Any:
        return torch.utils.data.default_collate(list(entries))

    return {"model": language_model(), "dataset": dataset, "settings": settings, "collate": collate}


def lightning_module() -> dict[str, Any]:
    lightning = pytest.importorskip("lightning")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = layered()

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return nn.functional.mse_loss(self.network(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return {"module": Regression(), "loader": pairs(), "settings": {"accelerator": "cpu", "devices": 1, **quiet}}


def accelerated() -> dict[str, Any]:
    accelerate = pytest.importorskip("accelerate")
    given = with_optimizer(model=layered(), loader=pairs(), loss_fn=nn.functional.mse_loss)
    return {**given, "accelerator": accelerate.Accelerator(cpu=True)}


def pairs(num_rows: int = 256) -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(4 * num_rows, 16), torch.randn(4 * num_rows, 16))
    return torch.utils.data.DataLoader(data, batch_size=num_rows, shuffle=True)


def run_in_a_group(rank: int, folder: str) -> None:
    """The page on several processes, in one of two; called in a process of its own."""
    dist, made = torch.distributed, []
    x, y = torch.randn(2048, 16), torch.randn(2048, 16)
    given = {**rows(), "loader": [(x, y)] * 4, "torch": torch, "sharded": layered()}
    shared = [0]
    if rank == 0:  # a group is not told the least budget
        options = {"optimizer": "adamw", "loss": lambda out: given["loss_fn"](out, y)}
        shared = [least_budget(lowtide.fit, given["model"], x, **options)]
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    dist.broadcast_object_list(shared)
    (least,) = shared
    # The second plan finds the optimizer of the first in memory.
    lowtide.fit = recomputing(made, [least + 9 * x.nbytes // 4, least + 13 * x.nbytes // 4])
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    run(DOCS / "recipes" / "distributed.md", {**given, "mesh": mesh}, made)
    dist.destroy_process_group()


def least_budget(fit: Callable[..., Any], model: Any, sample: Any, **options: Any) -> int:
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        fit(model, sample, memory_budget=1, **options)
    return refused.value.minimum_bytes


def recomputing(made: list[Any], budgets: list[int] | None = None) -> Callable[..., Any]:
    """A `fit` for a budget at which something is recomputed, or for given ones in turn; `made` gets its plans."""
    fit = lowtide.fit

    def fitted(model: Any, sample: Any, *, memory_budget: Any = None, **options: Any) -> Any:
        if options.get("strategy") != "joint":
            options.setdefault("bandwidth", 0)  # timing trials with offloading would take longer than all the rest
        if memory_budget == 1:
            return fit(model, sample, memory_budget=1, **options)
        if budgets is not None:
            chosen = budgets[len(made)]
        else:
            chosen = above_the_least(ABOVE_THE_LEAST, least_budget(fit, model, sample, **options), model)
        made.append(fit(model, sample, memory_budget=chosen, **options))
        return made[-1]

    return fitted


@pytest.fixture
def plans(monkeypatch):
    """The plans that a program makes; each for a budget at which something is recomputed."""
    made: list[Any] = []
    monkeypatch.setattr(lowtide, "fit", recomputing(made), raising=False)
    yield made
    for plan in made:
        plan.detach()


def execute(page: Path, given: dict[str, Any]) -> None:
    program = "\n".join(body for _, body in blocks(page, "python"))
    exec(compile(program, page.name, "exec"), {"__name__": "recipe", **given})


def run(page: Path, given: dict[str, Any], made: list[Any]) -> None:
    """Run a page as one program: it trains, and under each of its plans something is recomputed."""
    torch.manual_seed(0)
    models = [value for value in given.values() if isinstance(value, nn.Module)]
    before = pickle.dumps([model.state_dict() for model in models])
    execute(page, given)
    assert made
    for plan in made:
        forwards = [operation.stage for operation in plan.schedule.operations if isinstance(operation, Forward)]
        assert len(forwards) > len(set(forwards)), f"nothing is recomputed:\n{plan}"
        assert plan.stats().num_steps > 0
    assert pickle.dumps([model.state_dict() for model in models]) != before


class Block(nn.Module):
    """A layer of an encoder or a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return x + self.linear(x).tanh()


class EncoderDecoder(nn.Module):
    """Two stacks of layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 16)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.layer = nn.ModuleList(Block() for _ in range(2))
        self.decoder.layer = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        x = self.tokens(input_ids)
        for block in (*self.encoder.layer, *self.decoder.layer):
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def measuring() -> dict[str, Any]:
    sample = tokens(8)
    return {"model": EncoderDecoder(), "ids": sample["input_ids"], "sample": sample, "Block": Block}


def planning() -> dict[str, Any]:
    """A chain with weights."""
    stages = [Stage(f"s{k}", 1e-3, 2e-3, 2**20, 4 * 2**20, weight_bytes=2**20) for k in range(6)]
    return {"chain": Chain("six", stages)}


def moving() -> dict[str, Any]:
    """A chain with weights, and a network with batches."""
    batch = torch.randn(64, 16)
    return {**planning(), "model": layered(), "batch": batch, "loader": [batch] * 2, "loss_fn": torch.sum}


def reporting() -> dict[str, Any]:
    return {**small_card(), **planning()}


# What is not about training: it runs, and that is all.
OTHERS = {
    "runtime": long_context,
    "measuring": measuring,
    "report": reporting,
    "strategies": planning,
    "weights": moving,
}

GIVEN = {
    "own-loop": rows,
    "vision": images,
    "diffusion": diffusion,
    "long-context": long_context,
    "small-card": small_card,
    "lightning": lightning_module,
    "accelerate": accelerated,
}


def test_the_quick_start(plans, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(DOCS / "quick-start.md", rows(), plans)
    assert (tmp_path / "plan.html").exists()


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so
@pytest.mark.filterwarnings("ignore:a step took")  # loaders and frameworks keep a batch or two more
def test_recipe(name, plans):
    run(DOCS / "recipes" / f"{name}.md", GIVEN[name](), plans)


@pytest.mark.slow
def test_recipe_for_several_processes(tmp_path):
    run_two(run_in_a_group, tmp_path)


def test_recipe_for_the_trainer(plans, tmp_path):
    run(DOCS / "recipes" / "trainer.md", trainer(tmp_path), plans)


@pytest.mark.parametrize("name", OTHERS)
def test_page(name, plans, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(DOCS / f"{name}.md", {"lowtide": lowtide, **OTHERS[name]()})


def test_the_page_of_cuda_graphs_without_a_cuda_device():
    given = {"lowtide": lowtide, "model": nn.Linear(4, 4), "batch": torch.zeros(2, 4)}
    with pytest.raises(lowtide.LowtideError, match="needs a model on a CUDA device"):
        execute(DOCS / "graphs.md", given)


def test_every_page_with_a_program_is_run():
    with_programs = {page.stem for page in DOCS.rglob("*.md") if list(blocks(page, "python"))}
    assert with_programs == {*GIVEN, *OTHERS, "quick-start", "distributed", "trainer", "graphs"}
