"""On a GPU: blocks that run as variants give the numbers of the compiled model, and the budget holds."""

from __future__ import annotations

import gc

import pytest
import torch
import torch._inductor.config
from tests.runtime.training import assert_equal, gradients
from torch import nn

import lowtide
from lowtide import Forward
from lowtide.runtime.compile import loss as compiled_loss
from lowtide.zoo import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]


def build(dtype: str) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    sizes = {"batch": 8, "length": 256, "layers": 4, "width": 256, "heads": 4, "vocabulary": 512}
    return make("gpt2", device="cuda", dtype=dtype, **sizes)


def run(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    for _ in range(2):
        model(**batch).backward()
    return dict(gradients(model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_variants_give_the_numbers_of_the_compiled_model(dtype):
    plain, batch = build(dtype)
    options = {"emulate_precision_casts": True} if dtype == "bfloat16" else {}
    if hasattr(torch._inductor.config, "deterministic"):
        options["deterministic"] = True
    for block in plain.blocks:
        block.compile(dynamic=False, options=options)
    run(plain, batch)
    plain.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    expected = run(plain, batch)
    taken = torch.cuda.max_memory_allocated() - before
    model, _ = build(dtype)
    gc.collect()  # what an earlier test left and planning frees would be room for more
    budget = torch.cuda.memory_allocated() + int(0.7 * taken)
    settings = {"strategy": "rotor", "bandwidth": 0, "optimizer": "sgd", "grads_resident": True}
    with lowtide.fit(model, batch, memory_budget=budget, compile_stages={"regions": False}, **settings) as plan:
        chosen = [op for op in plan.schedule.operations if isinstance(op, Forward) and op.variant]
        assert chosen or plan.notes, "variants are used, or it is said why not"
        assert_equal(run(model, batch), expected)
        assert plan.stats().measured_peak_bytes <= budget


def test_a_large_loss_is_compiled_and_takes_less(monkeypatch):
    def with_many_words() -> tuple[nn.Module, dict]:
        torch.manual_seed(0)
        sizes = {"batch": 8, "length": 512, "layers": 3, "width": 256, "heads": 4, "vocabulary": 32768}
        return make("gpt2", device="cuda", dtype="bfloat16", **sizes)

    settings = {"strategy": "rotor", "bandwidth": 0, "optimizer": "sgd", "variants": False}
    settings |= {"compile_stages": {"regions": False}}

    def least_budget() -> int:
        model, batch = with_many_words()
        with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
            lowtide.fit(model, batch, memory_budget=1, **settings)
        return caught.value.minimum_bytes

    least = least_budget()
    scores_bytes = 8 * 512 * 32768 * 2
    found = []
    for budget in (int(1.05 * least), least + 2**30):
        model, batch = with_many_words()
        with lowtide.fit(model, batch, memory_budget=budget, **settings) as plan:
            found.append(run(model, batch))
            assert plan.stats().measured_peak_bytes <= budget
        del model, plan
        gc.collect()
    assert_equal(*found)
    monkeypatch.setattr(compiled_loss, "_WORTH_BYTES", 2**40)
    assert least_budget() >= least + scores_bytes
