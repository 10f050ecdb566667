"""Fine-tune a language model with transformers' Trainer within a memory budget.

    python examples/trainer_finetuning.py --model gpt2 --budget 6GiB
    python examples/trainer_finetuning.py --tiny                       # random weights, no download

The Trainer is used as always: the plan is attached to the model first.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lowtide

TINY = {
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Sentences(torch.utils.data.Dataset):
    """Made-up text: counting upwards from a random number."""

    def __init__(self, length: int, vocabulary: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(0, vocabulary, (size, 1), generator=generator)
        self.tokens = (starts + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="a causal language model of the hub")
    parser.add_argument("--budget", help='bytes, such as "6GiB"; default: what is free')
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    budget = arguments.budget or ("1.3MiB" if arguments.tiny else None)  # too little to keep everything
    torch.manual_seed(0)
    if arguments.tiny:
        model = GPT2LMHeadModel(GPT2Config(**TINY))
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
    batch, length = (4, 16) if arguments.tiny else (8, 512)
    data = Sentences(length, model.config.vocab_size, 4 * batch)
    within_budget = lowtide.TransformersCallback(budget)

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_steps=3,
            logging_steps=1,
            report_to=[],
            use_cpu=arguments.tiny,
            save_strategy="no",
        )
        Trainer(model, settings, train_dataset=data, callbacks=[within_budget]).train()
    print(within_budget.plan)
    print(within_budget.plan.stats())


if __name__ == "__main__":
    main()
