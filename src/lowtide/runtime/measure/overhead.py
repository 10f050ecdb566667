"""What running a stage separately costs beyond the stage's own work."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.runtime.measure.figures import Measurer
from lowtide.runtime.measure.stages import StagedModel
from lowtide.runtime.measure.timing import Timing
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split, StageSplit, Unit


def stage_overhead(device: torch.device) -> tuple[Timing, Timing]:
    """What running a stage separately costs beyond the stage's own work, in forward and in backward.

    A stage of one view is measured as all others are: what it takes is finding the inputs, following the recording and
    calling autograd, once for each stage here and never, or once, within a step.
    """
    x = torch.zeros(1, device=device, requires_grad=True)
    split = Split(tuple(StageSplit(name, (Unit(name),)) for name in ("0", "1")))
    staged = StagedModel(nn.Sequential(_View(), _View()), split, Sample.of(x))
    staged.record()
    figure = Measurer(staged, device, keeps_result=True).measured(1, staged.first_inputs())
    return figure.forward, figure.backward


class _View(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)
