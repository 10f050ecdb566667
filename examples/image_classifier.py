"""Train an image classifier within a memory budget: one line more than without.

python examples/image_classifier.py --budget 4GiB
python examples/image_classifier.py --tiny          # seconds on any machine
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import lowtide


class Residual(nn.Module):
    """Two convolutions and the way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.around = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inputs, height, width) to (batch, outputs, ...)."""
        return torch.relu(self.body(x) + self.around(x))


def classifier(width: int, depth: int) -> nn.Sequential:
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1)]
    for level in range(3):
        inputs, outputs = width * 2 ** max(0, level - 1), width * 2**level
        blocks += [Residual(inputs if k == 0 else outputs, outputs, 2 if k == 0 and level else 1) for k in range(depth)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 4, 10))


def images(batch: int, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up data: the label is the brightest of ten columns."""
    x = torch.randn(batch, 3, size, size, device=device)
    return x, x.mean((1, 2)).unflatten(1, (10, -1)).mean(-1).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help='bytes, such as "4GiB"; default: what is free')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    budget = arguments.budget or ("1.5MiB" if arguments.tiny else None)  # too little to keep everything
    device = "cuda" if torch.cuda.is_available() and not arguments.tiny else "cpu"
    batch, size, width, depth = (8, 20, 8, 2) if arguments.tiny else (64, 160, 64, 4)
    torch.manual_seed(0)
    model = classifier(width, depth).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    x, y = images(batch, size, device)

    plan = lowtide.fit(  # the one line more
        model, x, memory_budget=budget, optimizer=optimizer, loss=lambda logits: loss(logits, y)
    )
    print(plan)

    for step in range(3 if arguments.tiny else arguments.steps):
        x, y = images(batch, size, device)
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {value.item():.3f}")
    print(plan.stats())


if __name__ == "__main__":
    main()
