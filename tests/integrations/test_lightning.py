"""Lightning within a budget: one line, the same numbers."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.runtime.plan.plan import attached_plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")

WIDTH = 16


def trained(how: str, callbacks: list[Any], kind: str = "Regression", **settings: Any) -> tuple[Any, Any]:
    module = importlib.import_module("tests.integrations.lightning_training")
    return module.trained(how, callbacks, kind=getattr(module, kind), **settings)


@pytest.mark.parametrize(
    ("how", "settings"),
    [("itself", {}), ("its network", {"accumulate_grad_batches": 2}), ("its network", {"precision": "bf16-mixed"})],
)
def test_the_numbers_are_those_of_plain_training(how: str, settings: dict[str, Any]) -> None:
    expected, _ = trained(how, [], **settings)
    callback = lowtide.LightningCallback("1GiB", bandwidth=0, strategy="chen")
    found, recorder = trained(how, [callback], **settings)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.plan.stats().num_steps == 4 * settings.get("accumulate_grad_batches", 1)
    assert recorder.metrics["lowtide/predicted_peak_gib"] > 0
    assert attached_plan(found) is None
    assert attached_plan(found.network) is None


def test_several_optimizers_count() -> None:
    expected, _ = trained("itself", [], kind="Apart")
    callback = lowtide.LightningCallback("1GiB", bandwidth=0)
    found, _ = trained("itself", [callback], kind="Apart")
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    state = 6 * (2 * WIDTH * WIDTH * 4 + 4 + WIDTH * 4)  # Adam's with its step count, and momenta of biases
    assert sum(stage.optimizer_bytes for stage in callback.plan.chain.stages) == state


def test_a_part_of_what_is_trained_must_be_named() -> None:
    with pytest.raises(lowtide.PlanError, match=r"'head.weight'.*module="):
        trained("two networks", [lowtide.LightningCallback("1GiB", bandwidth=0)])
    callback = lowtide.LightningCallback("1GiB", module="network", bandwidth=0)
    trained("two networks", [callback])
    assert callback.plan.stats().num_steps == 4


def test_a_wrong_name_is_told_with_those_that_there_are() -> None:
    with pytest.raises(lowtide.PlanError, match=r"'trunk'.*'network'"):
        trained("itself", [lowtide.LightningCallback("1GiB", module="trunk", bandwidth=0)])


@pytest.mark.parametrize("callback", [lowtide.LightningCallback, lowtide.TransformersCallback])
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1GiB",), {"sample": torch.zeros(1)}, "sample= is not an option of this callback.* first training step"),
        (("1GiB",), {"budget": "1GiB"}, "budget= is not an option of this callback, which takes those of lowtide.fit"),
        ((torch.nn.Tanh(),), {}, r"Tanh\(\) is not a number of bytes"),
        ((8,), {}, "memory_budget=8 is 8 bytes.* did you mean '8GiB'"),
    ],
)
def test_wrong_options_are_refused_before_training(
    callback: Any, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(lowtide.LowtideError, match=message):
        callback(*arguments, **options)


def test_a_module_is_given_by_its_name() -> None:
    with pytest.raises(lowtide.PlanError, match=r"module is Tanh\(\), expected the name of a submodule"):
        lowtide.LightningCallback("1GiB", module=torch.nn.Tanh())


def test_training_that_is_saved_and_resumed(tmp_path: Path) -> None:
    """As without a plan, where Lightning's resumed run sees its loader's batches from the start."""

    def in_two_runs(folder: Path, *callbacks: Any) -> list[list[torch.Tensor]]:
        saving = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint(
            dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1
        )
        settings = {"resume": None, "enable_checkpointing": True}
        first, _ = trained("itself", [*callbacks[:1], saving], **settings)
        second, _ = trained("itself", [*callbacks[1:], saving], **{**settings, "resume": str(folder / "step=2.ckpt")})
        return [[parameter.detach() for parameter in module.parameters()] for module in (first, second)]

    planned = [lowtide.LightningCallback("1GiB", bandwidth=0, strategy="chen") for _ in range(2)]
    for found, expected in zip(
        in_two_runs(tmp_path / "planned", *planned), in_two_runs(tmp_path / "plain"), strict=True
    ):
        assert all(map(torch.equal, found, expected))
    assert [callback.plan.stats().num_steps for callback in planned] == [4, 2]


class Growing(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows in batches of different sizes, the largest not first."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(8 + 8 * (index % 3), WIDTH)


@pytest.mark.parametrize("how", ["itself", "its network"])
def test_the_sample_is_the_largest_of_a_few_batches(how: str, caplog: pytest.LogCaptureFixture) -> None:
    callback = lowtide.LightningCallback("1GiB", bandwidth=0)
    loader = torch.utils.data.DataLoader(Growing(), batch_size=1, collate_fn=list)
    with caplog.at_level("INFO", "lowtide"):
        trained(how, [callback], loader=loader)
    assert callback.plan.signature.tensors[0][0] == (24, WIDTH)
    assert callback.plan.num_shapes == 1
    assert not [record for record in caplog.records if "planned again" in record.message]


class Position(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A stream that goes on where it stopped, wherever it is read; functions are not copied with it."""

    def __init__(self) -> None:
        numbers = iter(range(64))
        self.read = lambda: torch.full((WIDTH,), float(next(numbers)))

    def __iter__(self) -> Any:
        for _ in range(16):
            yield [self.read()]


def test_no_batch_of_a_stream_is_lost() -> None:
    expected, _ = trained("itself", [], loader=torch.utils.data.DataLoader(Position(), batch_size=4))
    callback = lowtide.LightningCallback("1GiB", bandwidth=0)
    found, _ = trained("itself", [callback], loader=torch.utils.data.DataLoader(Position(), batch_size=4))
    assert callback.plan.stats().num_steps == 4
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_updates_in_backward_need_steps_by_hand() -> None:
    options = {"bandwidth": "2GB/s", "strategy": "joint", "step_in_backward": True}
    with pytest.raises(lowtide.PlanError, match=r"step_in_backward=True.*automatic_optimization = False"):
        trained("itself", [lowtide.LightningCallback("1GiB", **options)])
    expected, _ = trained("itself", [], kind="ByHand")
    callback = lowtide.LightningCallback("1GiB", **options)
    found, _ = trained("itself", [callback], kind="ByHand")
    assert callback.plan.stats().num_steps == 4
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
