"""Places a model that is still on the CPU because the device has no room for it: its weights go to the lower tier.

A weight on the lower tier is a tensor of the device all the same, whose memory is the host's: see
`lowtide.runtime.execute.weights`. So the model is on the device for whoever uses it, and what it takes there is what
visits. Parameters stay the same objects, and an optimizer that has them goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lowtide.errors import PlanError, shown
from lowtide.runtime.execute.stepping import movable_parameters
from lowtide.runtime.execute.weights import Weights, is_plain
from lowtide.runtime.measure.weights import Optimizer, each_of
from lowtide.runtime.model.split import Split
from lowtide.runtime.transfer.arena import rounded
from lowtide.runtime.transfer.cargo import Mirror, Tier

Progress = Callable[[str, float], None]


def device_to_use(model: nn.Module, device: Any) -> torch.device:
    """The device that was asked for.

    Raises:
        PlanError: where there is none, or the model is on a device that is neither that one nor the CPU.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise PlanError(f"device is {shown(device)}, expected 'cuda', 'cuda:1' or 'cpu'") from None
    if found.type not in ("cuda", "cpu"):
        raise PlanError(f"device is {str(found)!r}; lowtide trains on 'cuda' and 'cpu'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f"device is {str(found)!r}, but torch finds no CUDA device here; leave device= out")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    other = next((p.device for p in model.parameters() if p.device.type != "cpu" and p.device != found), None)
    if other is not None:
        raise PlanError(f"device is {str(found)!r}, but the model is on {str(other)!r}; move it to the CPU first")
    return found


def comes_from_cpu(model: nn.Module) -> bool:
    """Whether a model is on the CPU, where it goes back to in the end."""
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


class Placed:
    """A model whose weights are on the lower tier of a device.

    Args:
        model: the model, on the CPU.
        optimizer: its optimizer, whose state comes along.
        device: where it is trained.
        tier: the device's lower tier.
        progress: is told how far this is; None: nobody is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        tier: Tier,
        progress: Progress | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self.tier = tier
        self.homes: dict[int, Mirror] = {}
        """The places of what is on the tier, by the address of the storage."""
        try:
            self._place(progress)
        except BaseException:
            self.take_back()
            raise

    def _place(self, progress: Progress | None) -> None:
        parameters = list(self._model.parameters())
        self.tier.expect(sum(rounded(parameter.nbytes) for parameter in parameters))
        for number, parameter in enumerate(parameters):
            if progress is not None:
                progress("moving weights to the host", number / len(parameters))
            gradient, parameter.grad = parameter.grad, None
            parameter.data = self._at_home(parameter.data)
            if gradient is not None:
                parameter.grad = self._at_home(gradient)
        _move_buffers(self._model, self._device)
        _move_state(self._optimizer, parameters, self._device, self._at_home)

    def _at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor of the CPU holds, in a place on the tier; small and odd ones go to the device."""
        if not is_plain(tensor) or tensor.nbytes < self.tier.smallest_bytes or not _is_dense(tensor):
            return tensor.to(self._device)
        mirror = self.tier.mirror(tensor)
        mirror.fill(tensor)
        self.homes[mirror.tensor.untyped_storage()._cdata] = mirror
        return mirror.tensor.detach()

    def settle(self, split: Split) -> dict[int, list[nn.Parameter]]:
        """The weights of each stage, which visit the device; those that no stage has to itself, or that are shared, are
        there from now on.
        """
        movable = movable_parameters(self._model, split, self.tier.smallest_bytes, self.homes)
        moved = {id(parameter) for own in movable.values() for parameter in own}
        for parameter in self._model.parameters():
            if id(parameter) not in moved and self.homes.pop(_address(parameter), None) is not None:
                parameter.data = parameter.data.clone()
        return movable

    def visits(self, split: Split) -> Weights:
        """The weights of each stage, to be on the device while it is measured."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return Weights(self.tier, self.settle(split), names, None, self.homes)

    @property
    def num_bytes(self) -> int:
        """The room that places on the tier take."""
        return sum(rounded(mirror.tensor.nbytes) for mirror in self.homes.values())

    def take_back(self) -> None:
        """Have the model on the CPU again, with what it holds now."""
        parameters = list(self._model.parameters())
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = _on_cpu(parameter.data)
            parameter.grad = None if gradient is None else _on_cpu(gradient)
        cpu = torch.device("cpu")
        _move_buffers(self._model, cpu)
        _move_state(self._optimizer, parameters, cpu, _on_cpu)
        self.homes.clear()


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of the CPU's own: a copy, where it was on the lower tier."""
    return tensor.detach().to("cpu", copy=True)


def move(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Have all of a model, and of its optimizer's state, on a device."""
    model.to(device)
    for each in each_of(optimizer):
        _move_state(each, model.parameters(), device, lambda tensor: tensor.to(device))


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def _move_state(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    moved: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Move the state of parameters as `load_state_dict` would: the number of steps stays on the CPU unless the kernels
    of the step read it.
    """
    own = set(map(id, parameters))
    for group in optimizer.param_groups:
        reads_steps = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {}) if id(parameter) in own else {}
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or (name == "step" and not reads_steps):
                    continue
                state[name] = moved(value) if value.shape == parameter.shape else value.to(device)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no gaps, and the strides of a copy of it."""
    return tensor.is_contiguous() or tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
