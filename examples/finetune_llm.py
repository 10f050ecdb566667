"""Fine-tune a language model whose weights, gradients and optimizer state are more than the device has.

    python examples/finetune_llm.py --model meta-llama/Llama-2-7b-hf --text notes.txt --budget 24GiB
    python examples/finetune_llm.py --random 7b --budget 24GiB         # random weights, no download
    python examples/finetune_llm.py --tiny                             # seconds, on the CPU

All parameters are trained, in bfloat16, with AdamW. The model stays on the CPU when it is loaded: `lowtide.fit` moves
its weights to pinned host memory and fetches them to the device while they are needed. The loop is an ordinary one,
with clipping, a scheduler and a checkpoint that any other script can load.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import lowtide

SIZES: dict[str, dict[str, int]] = {
    "7b": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "tiny": {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "vocab_size": 96,
    },
}


def loaded(arguments: argparse.Namespace) -> nn.Module:
    """The model, on the CPU: the device may not have the room."""
    if arguments.model:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    if arguments.tiny:
        return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES["tiny"]), dtype=torch.float32)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES[arguments.random]), dtype=torch.bfloat16)


def batches(arguments: argparse.Namespace, vocabulary: int) -> Iterator[torch.Tensor]:
    """Pieces of the text, or of one that counts."""
    size = (arguments.batch, arguments.length)
    if arguments.text and arguments.model:
        tokens = AutoTokenizer.from_pretrained(arguments.model)(arguments.text.read_text(), return_tensors="pt")
        text = tokens["input_ids"][0]
    else:
        text = torch.arange(10 * arguments.batch * arguments.length) % vocabulary
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - arguments.length, (size[0], 1), generator=generator)
        yield text[starts + torch.arange(size[1])]


def trained(arguments: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() and not arguments.tiny else "cpu"
    model = loaded(arguments)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    given = batches(arguments, model.config.vocab_size)
    tokens = next(given).to(device)
    resident = 4 * sum(parameter.nbytes for parameter in model.parameters())

    plan = lowtide.fit(
        model,
        {"input_ids": tokens, "labels": tokens},
        memory_budget=arguments.budget or resident // 2,
        optimizer=optimizer,
        device=device,
        keeps_result=False,
        step_in_backward=arguments.step_in_backward,
    )
    print(plan, flush=True)
    for step in range(arguments.steps):
        begin, tokens = time.perf_counter(), next(given).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if not arguments.step_in_backward:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - begin:.2f} s", flush=True)
    if arguments.output:
        found: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(found, arguments.output)
    print(plan.stats())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal language model of the hub, or a folder")
    parser.add_argument("--random", default="7b", choices=list(SIZES), help="without --model: random weights")
    parser.add_argument("--text", type=Path, help="what to learn; without it, to count")
    parser.add_argument(
        "--budget", help='bytes on the device, such as "24GiB"; default: half of what belongs to weights'
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each piece of the text")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-5, help="the learning rate")
    parser.add_argument("--step-in-backward", action="store_true", help="faster, and without clipping")
    parser.add_argument("--output", type=Path, help="where to save the checkpoint")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model on the CPU")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.batch, arguments.length, arguments.steps = 4, 16, 3
    trained(arguments)


if __name__ == "__main__":
    main()
