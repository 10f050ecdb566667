"""Train a language model whose weights, gradients and optimizer state do not fit the budget.

    python examples/weights_on_host.py --budget 1GiB
    python examples/weights_on_host.py --tiny

They live on the host and are fetched while they are needed; without a budget, half of what they take is given. The loop
is an ordinary one, with clipping, a scheduler and a checkpoint. This runs on the CPU, where a mapped file takes the
place of host memory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same shape."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Predicts the next token; the head has the weights of the embedding."""

    def __init__(self, num_tokens: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of predicting each token from those before it."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help='bytes, such as "1GiB"; default: half of weights, gradients and state')
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    num_tokens, width, depth, shape = (64, 64, 4, (4, 17)) if arguments.tiny else (8192, 512, 12, (8, 257))
    torch.manual_seed(0)
    model = LanguageModel(num_tokens, width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    tokens = torch.randint(num_tokens, shape)
    resident = 4 * sum(parameter.nbytes for parameter in model.parameters())

    budget = arguments.budget or resident // 2
    plan = lowtide.fit(model, tokens, memory_budget=budget, strategy="joint", optimizer=optimizer)
    for step in range(3):
        loss = model(torch.randint(num_tokens, shape))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print(plan)
    save_and_load(model, optimizer)


def save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint is an ordinary one: it loads into a model with or without a plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        found: dict[str, Any] = torch.load(path)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    print(f"saved and loaded {len(found['model'])} tensors of weights")


if __name__ == "__main__":
    main()
