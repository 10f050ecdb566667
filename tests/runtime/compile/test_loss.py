"""A large loss between a model's submodules is compiled with its blocks, and counted and run as such."""

from __future__ import annotations

import dataclasses
import json
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.schedules import random_schedule
from tests.runtime.training import assert_equal, train
from torch import nn

import lowtide
from lowtide import Backward, Forward, Schedule
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.compile import loss as compiled_loss
from lowtide.runtime.compile.compiled import Compilation, CompiledStages
from lowtide.runtime.compile.loss import functions_of
from lowtide.runtime.fitting import fit
from lowtide.runtime.measure.measure import measure_split
from lowtide.runtime.plan.attach import attach

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without 16-bit products

# Graphs run operation by operation, so that nothing is compiled to machine code; the second splits operations up, and
# its sums are not those of eager mode.
EXACT, PARTITIONED = "eager", "aot_eager_decomp_partition"
WORDS, WIDTH = 128, 16  # as many words as there are places in a batch: scores can be turned
OPTIONS = {"bandwidth": 0, "strategy": "rotor", "keeps_result": False, "variants": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Its loss, a function, is computed between its last submodule and its end, and where asked for halfway, too."""

    def __init__(self, loss=F.cross_entropy, *, halfway: bool = False, **settings) -> None:
        super().__init__()
        self.halfway = halfway
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4 if halfway else 2))
        self.loss, self.settings = loss, settings

    def forward(self, words):
        x, following, total = self.words(words), words.roll(-1, 1).flatten(), 0
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.halfway and index == 1:
                total = self.loss(self.head(x).flatten(0, 1), following)
        return total + self.loss(self.head(x).flatten(0, 1), following, **self.settings).sum()


def texts(number: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (8, 16), generator=generator) for _ in range(number)]


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
        loss = functions_of(model)[F.cross_entropy]
        assert loss.is_used
        assert_equal(train(model, texts()), train(Language(**settings), texts()))
    assert not functions_of(model)


@pytest.mark.parametrize("halfway", [False, True], ids=["at the end", "halfway too"])
def test_any_schedule_computes_what_the_compiled_parts_compute_by_themselves(halfway):
    def compiled_by_hand(*args, **kwargs):
        return F.cross_entropy(*args, **kwargs)

    by_hand = Language(torch.compile(compiled_by_hand, backend=PARTITIONED), halfway=halfway)
    for block in by_hand.blocks:
        block.compile(backend=PARTITIONED)
    expected = train(by_hand, texts())
    model = Language(halfway=halfway)
    split = capture(model, texts()[0], blocks=True)
    compiled = CompiledStages(model, split, {"backend": PARTITIONED})
    for seed in range(8):
        model.load_state_dict(Language(halfway=halfway).state_dict())
        with attach(model, random_schedule(split.num_stages, seed, moves=0.0), split=split, strict=seed == 0):
            assert_equal(train(model, texts()), expected)
    compiled.remove()


def test_a_loss_halfway_is_compiled_in_stages_that_autograd_looks_after_alone():
    model = Language(halfway=True)
    split = capture(model, texts()[0], blocks=True)
    compiled = CompiledStages(model, split, {"backend": PARTITIONED}, [0.0])
    chain = measure_split(model, split, texts()[0], compiled=compiled)
    stages = range(1, chain.num_stages + 1)
    solution = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all", manage_weights=False)
    assert chain.stage(5).num_variants == 2
    found = []
    for variant in (0, 1):  # of the stage after the one with the loss: where it is 1, the latter is none with the last
        variants = dict.fromkeys(stages, 0) | {5: variant}
        forwards = [Forward(k, "all", variants[k]) for k in stages]
        schedule = Schedule("by hand", [*forwards, *(Backward(k) for k in reversed(stages))])
        model.load_state_dict(Language(halfway=True).state_dict())
        with attach(model, dataclasses.replace(solution, schedule=schedule), split=split):
            found.append(train(model, texts()))
    compiled.remove()
    assert_equal(*found)


def converting(scores, target, **settings):
    """As models of transformers do."""
    return F.cross_entropy(scores.float().view(-1, WORDS), target, **settings)


def doubled(scores, target):
    scores = scores.float()
    scores.mul_(2)
    return F.cross_entropy(scores, target)


def doubled_before(scores, target):
    converted = scores.to(torch.float32)
    with torch.no_grad():
        scores.mul_(2)
    return F.cross_entropy(converted, target)


def of_some(scores, target):
    return F.cross_entropy(scores.float()[:-1], target[:-1])


def turned(scores, target):
    return F.cross_entropy(scores.float().t(), target)


class TwoHeads(Language):
    """Converts scores before it calls another submodule, and computes the loss after it."""

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks[:-1]:
            x = block(x)
        scores = self.head(x)
        converted = scores.float()
        x = self.blocks[-1](x)
        following = words.roll(-1, 1).flatten()
        return F.cross_entropy(converted.flatten(0, 1), following) + x.square().mean()


@pytest.mark.parametrize("loss", [converting, doubled, doubled_before, of_some, turned])
def test_scores_that_are_converted_first_give_the_same_loss(loss):
    model, plain = Language(loss).bfloat16(), Language(loss).bfloat16()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS):
        assert functions_of(model)[F.cross_entropy].is_used
        assert_equal(train(model, texts()), train(plain, texts()))


def test_scores_that_are_converted_first_are_saved_as_they_were():
    model, text = Language(converting).bfloat16(), texts()[0]
    with lowtide.fit(model, text, memory_budget="1GiB", compile_stages={"backend": PARTITIONED}, **OPTIONS):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            model(text).backward()
    types = {tensor.dtype for tensor in saved if tensor.numel() == text.numel() * WORDS}
    assert types == {torch.bfloat16}


@pytest.mark.parametrize("build", [lambda: Language(converting), TwoHeads], ids=["at once", "a stage later"])
def test_scores_that_are_converted_first_are_recomputed_as_they_were(build):
    plain = build().bfloat16()
    for block in plain.blocks:
        block.compile(backend=EXACT, dynamic=False)
    expected = train(plain, texts())
    model = build().bfloat16()
    split = capture(model, texts()[0], blocks=True)
    compiled = CompiledStages(model, split, {"backend": EXACT, "dynamic": False})
    for seed in range(8):
        model.load_state_dict(build().bfloat16().state_dict())
        moves = 0.4 * (seed % 2)
        with attach(model, random_schedule(split.num_stages, seed, moves=moves), split=split, strict=seed == 0):
            assert_equal(train(model, texts()), expected)
    assert functions_of(model)[F.cross_entropy].is_used
    compiled.remove()


def test_scores_from_before_a_conversion_live_no_longer_for_it():
    loss = compiled_loss.CompiledLoss(F.cross_entropy)
    scores = torch.zeros(4, WORDS, dtype=torch.bfloat16)
    converted = scores.float()
    loss.note_conversion(scores, converted)
    assert loss.instead((converted, None))[1][0] is scores
    alive = weakref.ref(scores)
    del scores
    assert alive() is None
    assert loss.instead((converted, None)) == (loss, (converted, None))


def test_a_small_loss_is_left_alone_and_nothing_looks_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled_loss, "_WORTH_BYTES", 2**30)
    model = Language()
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS) as plan:
        assert not functions_of(model)
        plan.save(tmp_path / "plan.json")
        assert_equal(train(model, texts()), train(Language(), texts()))
    assert json.loads((tmp_path / "plan.json").read_text())["compilation"]["loss"] is False


def test_a_small_loss_under_the_plan_of_a_large_one_is_compiled_as_that_was(monkeypatch, tmp_path):
    text = texts()[0]
    monkeypatch.setattr(compiled_loss, "_WORTH_BYTES", text.numel() * WORDS * 4)
    model, again, smaller = Language(), Language(), [each[:7] for each in texts()]
    with lowtide.fit(model, text, memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS) as plan:
        plan.save(tmp_path / "plan.json")
        loss = functions_of(model)[F.cross_entropy]
        loss.is_used = False
        assert_equal(train(model, smaller), train(Language(), smaller))
        assert loss.is_used
        assert plan.num_shapes == 1
    values = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**values, "signature": None}))  # for all shapes
    with lowtide.load_plan(tmp_path / "plan.json", again):
        loss = functions_of(again)[F.cross_entropy]
        train(again, smaller)
        assert loss.is_used


def test_after_a_small_loss_a_large_one_is_looked_for_again(monkeypatch):
    text = texts()[0]
    monkeypatch.setattr(compiled_loss, "_WORTH_BYTES", text.numel() * WORDS * 2)
    monkeypatch.setattr(fit, "DEFAULT_BUDGETS", (0.0,))
    model, options = Language(), OPTIONS | {"variants": True}
    with lowtide.fit(model, text, memory_budget="1GiB", compile_stages={"backend": EXACT}, **options) as plan:
        monkeypatch.setattr(type(plan._part.execution), "has_variants", True)  # it serves no smaller shapes
        found = []
        for number in (8, 2, 6):
            model(text[:number]).backward()
            found.append(F.cross_entropy in plan._part.execution.machine.functions)
        assert found == [True, False, True]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [(lambda target: target[:-1], ValueError), (lambda target: target + WORDS, IndexError)],
    ids=["shape", "value"],
)
def test_wrong_targets_raise_what_they_raise_without_a_plan(wrong, kind):
    def on_wrong(scores, target):
        return F.cross_entropy(scores, wrong(target))

    model = Language()
    with pytest.raises(kind) as expected:
        Language(on_wrong)(texts()[0])
    with lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS):
        model.loss = on_wrong
        with pytest.raises(kind) as found:
            model(texts()[0])
        assert str(found.value) == str(expected.value)
        model.loss = F.cross_entropy
        assert_equal(train(model, texts()), train(Language(), texts()))


def test_outside_of_training_the_loss_is_that_of_torch():
    model = Language()
    with (
        lowtide.fit(model, texts()[0], memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS),
        torch.no_grad(),
    ):
        loss = functions_of(model)[F.cross_entropy]
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
        loss = functions_of(again)[F.cross_entropy]
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
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    def gradients(model):
        model(**batch).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    model, batch = make(), {"input_ids": texts()[0], "labels": texts()[0]}
    with lowtide.fit(model, batch, memory_budget="1GiB", compile_stages={"backend": EXACT}, **OPTIONS):
        loss = functions_of(model)[F.cross_entropy]
        assert loss.is_used
        assert_equal(gradients(model), gradients(make()))
