"""Plans at a model's first training call, when device, precision and arguments are final.

Frameworks wrap a model's forward, choose an autocast and add arguments before they call it; a plan that was made ahead
would meet all of that as something new. So a callback waits for the first call of a training step, fits the model from
within it, and passes the call on to the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.runtime.model.call_site import Layer, Rank
from lowtide.runtime.model.sample import Sample


class FirstCall(Layer):
    """Waits for the first call of a module that trains.

    Args:
        module: the module.
        on_call: is handed the module and the arguments of that call; this layer is out of the way by then.
    """

    __slots__ = ("_on_call",)

    rank = Rank.REPORT

    def __init__(self, module: nn.Module, on_call: Callable[[nn.Module, Sample], None]) -> None:
        super().__init__(module)
        self._on_call = on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the module."""
        module = self.module
        if not module.training or not torch.is_grad_enabled():
            return self.pass_on(*args, **kwargs)
        self.remove()
        self._on_call(module, Sample(args, kwargs))
        return module(*args, **kwargs)
