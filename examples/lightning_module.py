"""A Lightning module that trains within a memory budget: the plan is made when training starts.

    python examples/lightning_module.py --budget 4GiB
    python examples/lightning_module.py --tiny

It needs Lightning, which lowtide does not install: `pip install lightning`.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn

import lowtide


class Regression(lightning.LightningModule):
    """A deep network that learns to add its inputs up."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        ]
        self.network = nn.Sequential(*blocks, nn.Linear(width, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """As without lowtide."""
        (x,) = batch
        return nn.functional.mse_loss(self.network(x), x.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As without lowtide."""
        return torch.optim.AdamW(self.network.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help='bytes, such as "4GiB"; default: what is free')
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    width, depth, batch = (16, 4, 32) if arguments.tiny else (512, 24, 4096)
    data = torch.utils.data.TensorDataset(torch.randn(4 * batch, width))
    loader = torch.utils.data.DataLoader(data, batch_size=batch)
    budget = arguments.budget or ("190kB" if arguments.tiny else None)  # too little to keep everything
    within_budget = lowtide.LightningCallback(budget)
    trainer = lightning.Trainer(
        callbacks=[within_budget],
        max_steps=3,
        accelerator="cpu" if arguments.tiny else "auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(width, depth), loader)
    print(within_budget.plan)
    print(within_budget.plan.stats())


if __name__ == "__main__":
    main()
