"""What the tests of Lightning train; not imported before one runs, since importing Lightning takes seconds."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn

WIDTH = 16


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(6)))


class Regression(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.network = blocks()
        if how == "two networks":
            self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        y = self(x) if self.how == "itself" else self.network(x)
        if self.how == "two networks":
            y = self.head(y)
        return nn.functional.mse_loss(y, x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Recorder(lightning.pytorch.loggers.Logger):  # type: ignore[misc]
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    name, version = "recorder", "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class ByHand(Regression):
    """Steps itself."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()
        optimizer.zero_grad()


class Apart(ByHand):
    """Has two optimizers."""

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.manual_backward(Regression.training_step(self, batch, index))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        own = list(self.parameters())
        return [
            torch.optim.Adam([p for p in own if p.dim() == 2], lr=1e-3),
            torch.optim.SGD([p for p in own if p.dim() != 2], lr=1e-3, momentum=0.9),
        ]


def trained(
    how: str,
    callbacks: list[Any],
    resume: str | None = None,
    loader: Any = None,
    kind: Any = Regression,
    **settings: Any,
) -> tuple[Regression, Recorder]:
    module, recorder = kind(how), Recorder()
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, WIDTH))
    if loader is None:
        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=4,
        accelerator="cpu",
        devices=1,
        logger=recorder,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **{"enable_checkpointing": False, **settings},
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return module, recorder
