"""Recording a forward and running its stages again, one after the other, from the caller's input."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lowtide.errors import ExecutionError
from lowtide.runtime.model.split import Split, StageSplit, Unit
from lowtide.runtime.replay.replay import Recording


def split_of(*stages: list[str], trailing: tuple[int, ...] = ()) -> Split:
    """Stages given by the paths of their units; a path that comes again is the next call of that submodule."""
    counts: dict[str, int] = {}
    made = []
    for k, paths in enumerate(stages, start=1):
        units = []
        for path in paths:
            units.append(Unit(path, counts.get(path, 0)))
            counts[path] = counts.get(path, 0) + 1
        made.append(StageSplit(f"s{k}", tuple(units), trailing_glue=k in trailing))
    return Split(tuple(made))


def replayed(model: nn.Module, split: Split, *args, **kwargs):
    """The model's result, and what its stages give when run one after the other."""
    with Recording(model, split) as recording:
        result = model(*args, **kwargs)
    values = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    for k in range(1, split.num_stages + 1):
        stage = recording.stage(k)
        if k == 1:
            values = values[: len(stage.inputs)]
        assert [tuple(v.shape) for v in values] == [tuple(form.shape) for form in stage.inputs]
        values = stage.run(values)
        assert len(values) == len(stage.outputs)
    return result, values


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.feed = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        x = x + F.gelu(self.feed(self.norm2(x)))
        x += 0.5
        return x


class Net(nn.Module):
    """Glue of every sort between the units: sums, in-place sums, views, masks, keyword arguments."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        x = self.embed(ids) + torch.arange(ids.shape[1])[:, None]
        keep = (ids > 2).unsqueeze(-1)
        for block in self.blocks:
            x = block(x=x) * keep
        rows = list(x)
        logits = self.head(torch.stack(rows))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


WHOLE_BLOCKS = split_of(["embed"], ["blocks.0"], ["blocks.1"], ["head"])
HALF_BLOCKS = split_of(
    ["embed"],
    ["blocks.0.norm1", "blocks.0.mix"],
    ["blocks.0.norm2", "blocks.0.feed"],
    ["blocks.1.norm1", "blocks.1.mix", "blocks.1.norm2", "blocks.1.feed"],
    ["head"],
    trailing=(1, 2, 3),
)


@pytest.mark.parametrize("split", [WHOLE_BLOCKS, HALF_BLOCKS], ids=["whole", "half"])
def test_stages_run_again_with_equal_results(split):
    torch.manual_seed(0)
    model, ids = Net(), torch.randint(0, 11, (3, 5))
    result, values = replayed(model, split, ids)
    assert len(values) == 1
    assert torch.equal(values[0], result)


def test_a_loss_in_the_model_is_part_of_the_last_stage():
    model, ids, labels = Net(), torch.randint(0, 11, (3, 5)), torch.randint(0, 11, (3, 5))
    with Recording(model, WHOLE_BLOCKS) as recording:
        result = model(ids, labels=labels)
    hidden = recording.stage(1).run([ids])
    hidden = recording.stage(2).run(hidden)
    hidden = recording.stage(3).run(hidden)
    outputs = recording.stage(4).run(hidden)
    assert any(torch.equal(output, result["loss"]) for output in outputs)


def test_gradients_of_a_stage_run_again():
    torch.manual_seed(0)
    model, ids = Net(), torch.randint(0, 11, (3, 5))
    with Recording(model, HALF_BLOCKS) as recording:
        result = model(ids)
    result.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    values = [ids]
    for k in range(1, 6):
        values = recording.stage(k).run(values)
    values[0].sum().backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


def test_the_recording_keeps_no_activation_alive():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    alive = []
    model[1].register_forward_hook(lambda m, a, out: alive.append(__import__("weakref").ref(out)))
    with Recording(model, split_of(["0"], ["1"], ["2"])) as recording, torch.no_grad():
        model(torch.randn(2, 4))
    assert alive[0]() is None
    assert recording.stage(2).inputs[0].shape == (2, 4)


def test_dropout_between_units_is_repeated_with_the_same_numbers():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(F.dropout(self.a(x), 0.5, self.training)).clamp_(min=0)

    model, x = Dropped(), torch.randn(4, 8)
    before = torch.get_rng_state()
    with Recording(model, split_of(["a"], ["b"])) as recording:
        result = model(x)
    hidden = recording.stage(1).run([x])
    torch.set_rng_state(before)
    assert torch.equal(recording.stage(2).run(hidden)[0], result)


@dataclass
class Bundle:
    x: torch.Tensor
    scale: float
    extra: dict


def test_containers_are_rebuilt():
    class First(nn.Module):
        def forward(self, x):
            return Bundle(x + 1, 2.0, {"list": [x, None, 3]})

    class Second(nn.Module):
        def forward(self, bundle):
            things = bundle.extra["list"]
            things[0] = things[0] * bundle.scale  # writes into its argument
            things.append(1)
            return bundle.x * things[0] + len(things)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = First(), Second()

        def forward(self, x):
            return self.second(self.first(x))

    model, x = Both(), torch.randn(3)
    with Recording(model, split_of(["first"], ["second"])) as recording:
        result = model(x)
    for _ in range(2):
        assert torch.equal(recording.stage(2).run(recording.stage(1).run([x]))[0], result)


def test_modules_are_as_before_afterwards():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = [dict(m.__dict__) for m in model.modules()]
    with Recording(model, split_of(["0"], ["1"])):
        assert copy.deepcopy(model)[0].__dict__.get("_compiled_call_impl") is None
        pickle.loads(pickle.dumps(model))
        model(torch.zeros(1, 2))
    assert [dict(m.__dict__) for m in model.modules()] == before


def test_a_stage_that_changes_its_input_in_place_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    with Recording(model, split_of(["0"], ["1"], ["2"])) as recording:
        model(torch.randn(3, 2))
    assert "'s2' changes its input in place" in recording.stage(2).refusal
    with pytest.raises(ExecutionError, match="changes its input in place"):
        recording.stage(2).run([torch.randn(3, 2)])


def test_another_order_of_calls_is_refused():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.swap = False

        def forward(self, x):
            return self.a(self.b(x)) if self.swap else self.b(self.a(x))

    model = Fork()
    model.swap = True
    with Recording(model, split_of(["a"], ["b"])), pytest.raises(ExecutionError, match=r"'b' .* 'a' .* was expected"):
        model(torch.zeros(1, 2))
    model.swap = False
    model(torch.zeros(1, 2))


def test_transformers_models():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 50, (2, 8))
    blocks = [f"transformer.h.{k}" for k in range(2)]
    split = split_of(["transformer.wte", "transformer.wpe"], [blocks[0]], [blocks[1]], ["transformer.ln_f", "lm_head"])
    with Recording(model, split) as recording:
        result = model(input_ids=ids, labels=ids, use_cache=False)
    values = [ids][: len(recording.stage(1).inputs)]
    for k in range(1, 5):
        values = recording.stage(k).run(values)
    assert any(torch.equal(value, result.loss) for value in values)
    assert any(torch.equal(value, result.logits) for value in values)
