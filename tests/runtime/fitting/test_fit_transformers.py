"""Public transformer models as they are: found stages, random legal schedules, equal gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.runtime.schedules import random_schedule
from tests.runtime.training import assert_equal, gradients

import lowtide
from lowtide.runtime.capture.capture import capture

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 60}


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=60, n_positions=32)
    )


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def t5():
    config = transformers.T5Config(
        num_layers=2, d_model=32, d_ff=64, d_kv=8, num_heads=4, vocab_size=60, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [gpt2, llama, bert, t5])
def test_equal_gradients_under_random_schedules(make):
    torch.manual_seed(0)
    model = make().train()
    twin = copy.deepcopy(model)
    ids = torch.randint(0, 60, (2, 12))
    sample = {"input_ids": ids, "labels": ids}
    split = capture(model, sample)
    assert split.num_stages >= 4

    def numbers(each):
        torch.manual_seed(1)
        each.zero_grad()
        result = each(**sample)
        result.loss.backward()
        return {**dict(gradients(each)), "loss": result.loss.detach(), "logits": result.logits.detach()}

    expected = numbers(twin)
    for seed, moves in ((1, 0.0), (2, 0.4)):
        schedule = random_schedule(split.num_stages, seed, moves=moves, drops=0.8)
        with lowtide.attach(model, schedule, split=split):
            for _ in range(2):
                assert_equal(numbers(model), expected)


def test_a_cache_that_is_asked_for_is_switched_off_in_training():
    torch.manual_seed(0)
    model = llama().train()
    twin = copy.deepcopy(model)
    ids = torch.randint(0, 60, (8, 24))
    sample = {"input_ids": ids, "labels": ids, "use_cache": True}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.fit(model, sample, memory_budget=1000, bandwidth=0, optimizer="sgd")
    budget = caught.value.minimum_bytes + 100_000
    with lowtide.fit(model, sample, memory_budget=budget, bandwidth=0, optimizer="sgd") as plan:
        assert any("use_cache=True is ignored in training" in note for note in plan.notes)
        result, expected = model(**sample), twin(**sample)
        assert result.past_key_values is None
        assert expected.past_key_values is not None
        for each in (result, expected):
            each.loss.backward()
        assert plan.stats().recomputed_per_step > 0
        assert torch.equal(result.logits, expected.logits)
        assert_equal(dict(gradients(model)), dict(gradients(twin)))
        model.eval()
        with torch.no_grad():
            assert model(**sample).past_key_values is not None
