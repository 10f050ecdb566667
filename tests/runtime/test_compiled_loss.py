"""A large loss between a model's submodules is compiled with its blocks, and counted and run as such."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.training import assert_equal, train
from torch import nn

import lowtide
from lowtide.runtime import compiled_loss
from lowtide.runtime.compiled import Compilation
from lowtide.runtime.compiled_loss import functions_of

# Graphs run operation by operation, so that nothing is compiled to machine code; the second splits operations up, and
# its sums are not those of eager mode.
EXACT, PARTITIONED = "aot_eager", "aot_eager_decomp_partition"
WORDS, WIDTH = 97, 16
OPTIONS = {"bandwidth": 0, "strategy": "rotor", "keeps_result": False, "variants": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Its loss, a function, is computed between its last submodule and its end."""

    def __init__(self, loss=F.cross_entropy, **settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.loss, self.settings = loss, settings

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(x).flatten(0, 1), words.roll(-1, 1).flatten(), **self.settings).sum()


def texts(number: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (8, 32), generator=generator) for _ in range(number)]


def least_budget(model: nn.Module, text: torch.Tensor, backend: str) -> int:
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, text, memory_budget=1, compile_stages={"backend": backend}, **OPTIONS)
    return caught.value.minimum_bytes


@pytest.fixture(autouse=True)
def _all_losses_are_large(monkeypatch):
    monkeypatch.setattr(compiled_loss, "_WORTH_BYTES", 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ignore_index": 3, "label_smoothing": 0.1},
        {"reduction": "none"},
        {"weight": torch.linspace(0.5, 1.5, WORDS), "reduction": "sum"},
    ],
    ids=["plain", "smoothed", "each", "weighted"],
)
def test_it_computes_the_same_whatever_is_asked_of_it(settings):
    model = Language(**settings)
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS):
        (loss,) = functions_of(model).values()
        assert loss.is_used
        assert_equal(train(model, texts()), train(Language(**settings), texts()))
    assert not functions_of(model)


def test_plans_within_any_budget_compute_what_the_compiled_parts_compute_by_themselves():
    def compiled(*args, **kwargs):
        return F.cross_entropy(*args, **kwargs)

    by_hand = Language(torch.compile(compiled, backend=PARTITIONED))
    for block in by_hand.blocks:
        block.compile(backend=PARTITIONED)
    expected = train(by_hand, texts())
    model = Language()
    for budget in (least_budget(model, texts()[0], PARTITIONED), "1GiB"):
        with lowtide.fit(
            model,
            texts()[0],
            memory_budget=budget,
            compile_stages={"backend": PARTITIONED},
            optimizer="sgd",
            **OPTIONS,
        ) as plan:
            assert functions_of(model)
            found = train(model, texts())
            assert plan.stats().recomputed_per_step > 0 or budget == "1GiB"
        assert_equal(found, expected)
        model = Language()


def test_a_small_loss_is_left_alone_and_nothing_looks_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled_loss, "_WORTH_BYTES", 2**30)
    model = Language()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS) as plan:
        assert not functions_of(model)
        plan.save(tmp_path / "plan.json")
        assert_equal(train(model, texts()), train(Language(), texts()))
    assert json.loads((tmp_path / "plan.json").read_text())["compilation"]["loss"] is False


def test_outside_of_training_the_loss_is_that_of_torch():
    model = Language()
    with (
        lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS),
        torch.no_grad(),
    ):
        (loss,) = functions_of(model).values()
        loss.is_used = False
        assert torch.equal(model.eval()(texts()[0]), Language().eval()(texts()[0]))
        assert not loss.is_used


def test_a_saved_plan_knows_of_it(tmp_path):
    path, model = tmp_path / "plan.json", Language()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS) as plan:
        plan.save(path)
    again = Language()
    with lowtide.load_plan(path, again):
        train(again, texts())
        (loss,) = functions_of(again).values()
        assert loss.is_used
    values = json.loads(path.read_text())["compilation"]
    assert values["loss"] is True
    del values["loss"]  # a file of before
    assert not Compilation.from_dict(values).loss


def test_the_loss_of_a_transformers_model_is_found():
    transformers = pytest.importorskip("transformers")

    def make():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    def gradients(model):
        model(**batch).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    model, batch = make(), {"input_ids": texts()[0], "labels": texts()[0]}
    with lowtide.fit(model, batch, memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS):
        (loss,) = functions_of(model).values()
        assert loss.is_used
        assert_equal(gradients(model), gradients(make()))
