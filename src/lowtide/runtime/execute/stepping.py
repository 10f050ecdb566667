"""The optimizer's own step, stage by stage: the user calls `optimizer.step()` as ever.

A hook runs before the step. It walks what is left of the list and, for each stage, has its weights, gradients and
optimizer state on the device and runs the optimizer's step with that stage's parameters alone in its groups. The step
that was called then finds the parameters that no stage moves, and a hook after it puts the groups together again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.errors import ExecutionError, PlanError
from lowtide.runtime.execute.program import Placement
from lowtide.runtime.execute.weights import Weights, has_other_users, is_whole
from lowtide.runtime.model.split import Split
from lowtide.runtime.transfer.cargo import Tier
from lowtide.schedule import Update

# Until tests on a GPU have passed, weights of models on one stay there; tests set this.
CUDA_IS_ALLOWED = False


def check_can_move(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse to move the weights of a model where that does not work.

    Raises:
        PlanError: with the reason.
    """
    if any(parameter.device.type == "cuda" for parameter in model.parameters()) and not CUDA_IS_ALLOWED:
        raise PlanError(
            "the schedule moves weights, which is not ready for CUDA devices yet; use a strategy that moves "
            "activations alone"
        )
    _check_is_alone()
    if optimizer is None:
        raise PlanError("the schedule moves weights and optimizer state; pass the optimizer itself with optimizer=")
    trained = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = next((name for key, name in trained.items() if key not in held), None)
    if missing is not None:
        raise PlanError(
            f"the optimizer does not have parameter {missing!r}, so its state and steps cannot be followed; pass the "
            "one optimizer that has all trained parameters, or freeze the others"
        )


def _check_is_alone() -> None:
    """Refuse several processes: they exchange gradients that are not there any more."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise PlanError(
            "the schedule moves weights, which does not work with several processes (DDP, FSDP); use a strategy that "
            "moves activations alone"
        )


def weights_of(model: nn.Module, split: Split, tier: Tier, optimizer: torch.optim.Optimizer | None) -> Weights:
    """What a schedule may move besides activations.

    Raises:
        PlanError: where weights of this model cannot be moved.
    """
    check_can_move(model, optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return Weights(tier, movable_parameters(model, split, tier.smallest_bytes), names, optimizer)


def movable_parameters(model: nn.Module, split: Split, smallest_bytes: int) -> dict[int, list[nn.Parameter]]:
    """The parameters of each stage that are in no other stage's modules, and all of their memory; smaller ones than
    `smallest_bytes` stay.
    """
    by_stage: dict[int, list[nn.Parameter]] = {k: [] for k in range(1, split.num_stages + 1)}
    stages: dict[int, set[int]] = {}
    inside: set[int] = set()
    for unit, k in split.stage_of().items():
        for module in model.get_submodule(unit.path).modules():
            inside.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    if k not in stages.setdefault(id(parameter), set()):
                        by_stage[k].append(parameter)
                    stages[id(parameter)].add(k)
    outside = {id(p) for module in model.modules() if id(module) not in inside for p in module._parameters.values()}
    num_in_storage: dict[int, int] = {}
    for parameter in model.parameters():
        if parameter.layout is torch.strided:
            address = parameter.untyped_storage()._cdata
            num_in_storage[address] = num_in_storage.get(address, 0) + 1

    def can_move(parameter: nn.Parameter) -> bool:
        is_own = len(stages[id(parameter)]) == 1 and id(parameter) not in outside
        is_own = is_own and parameter.numel() * parameter.element_size() >= smallest_bytes
        is_own = is_own and is_whole(parameter) and num_in_storage[parameter.untyped_storage()._cdata] == 1
        return is_own and not has_other_users(parameter)

    return {k: [parameter for parameter in own if can_move(parameter)] for k, own in by_stage.items()}


class StagedSteps:
    """Runs the steps of one optimizer stage by stage, and keeps the values that a list moves in their places.

    Args:
        weights: what is moved.
        placement: where values are between the parts of a step.
        on_end: called after each step.
    """

    def __init__(self, weights: Weights, placement: Placement, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        assert weights.optimizer is not None
        self._weights = weights
        self._placement = placement
        self._optimizer = weights.optimizer
        self._moved = {id(parameter) for own in weights.parameters.values() for parameter in own}
        self._groups: list[list[Any]] | None = None  # the parameters of each group, while they are not all there
        self._num_states = len(self._optimizer.state)
        self._depth = 0
        self._in_closure = False
        self._awaits_step = False  # whether backward has updated weights, and the user has not called the step yet
        self._hooks: list[Any] = []

    def install(self) -> None:
        """From now on what the list does not start with is on the lower tier."""
        optimizer = self._optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]
        self._weights.change()
        self._weights.settle(self._placement.start, fetch=False)
        if not self._placement.steps_in_backward:
            self._weights.make_room()

    def remove(self) -> None:
        """Have everything on the device again."""
        self._put_groups_back()
        while self._hooks:
            self._hooks.pop().remove()
        self._weights.bring_back()

    def begin(self) -> None:
        """A forward begins."""
        _check_is_alone()
        if self._awaits_step:
            self._awaits_step = False
            raise ExecutionError(
                "weights were updated in the last backward (step_in_backward=True), but optimizer.step() was not "
                "called after it; accumulating gradients or skipping steps needs step_in_backward=False"
            )
        self._weights.forget_spent()
        if not self._in_closure:
            self._depth = 0  # a step that ended in an exception has run no hook
            self._put_groups_back()
        self._weights.begin(self._placement.start, self._placement.copied)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user has called `optimizer.step()`."""
        self._depth += 1
        if self._depth > 1:  # a step that calls that of its base class runs the hooks twice
            return None
        self._put_groups_back()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            self._in_closure = True
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                self._in_closure = False
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        self._weights.change()
        self._awaits_step = False
        for operation in self._placement.updates:
            if isinstance(operation, Update):
                self._update(operation.stage)
            else:
                assert not hasattr(operation, "save")
                self._weights.execute(operation)  # type: ignore[arg-type]
        self._weights.arrive()
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in self._moved]
        return (args, kwargs)

    def update_in_backward(self, k: int) -> None:
        """The gradients of stage k are complete: update its weights and use the gradients up."""
        self._awaits_step = True
        self._update(k)

    def leave_out_update(self, k: int) -> None:
        """As an update in backward without the optimizer's step."""
        if self._weights.has_gradients(k):
            self._weights.need_all(k)
            self._weights.end_update(k, are_gradients_changed=False, spends_gradients=True)

    def _update(self, k: int) -> None:
        own = {id(parameter) for parameter in self._weights.parameters.get(k, ())}
        if not own:
            return
        has_gradients = self._weights.has_gradients(k)
        if has_gradients:
            self._weights.need_all(k)
        with _restricted(self._optimizer, own):
            _plain_step(self._optimizer)(self._optimizer)
        # A fused step divides by the scale of a GradScaler in place.
        is_scaled = getattr(self._optimizer, "grad_scale", None) is not None
        if has_gradients:
            spends = self._placement.steps_in_backward
            self._weights.end_update(k, are_gradients_changed=is_scaled, spends_gradients=spends)

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._put_groups_back()
        state = self._optimizer.state
        if len(state) != self._num_states:  # made stage by stage: put it in the order in which one step makes it
            self._num_states = len(state)
            for parameter in [p for group in self._optimizer.param_groups for p in group["params"] if p in state]:
                state[parameter] = state.pop(parameter)
        self._on_end()

    def _put_groups_back(self) -> None:
        if self._groups is not None:
            for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=False):
                group["params"] = parameters
            self._groups = None

    def _load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Loaded state goes to the lower tier at once: all of it may not fit the device."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = dict(zip(numbers, parameters, strict=False))
        state = {
            number: self._adopted(values, owners.get(number)) if isinstance(values, Mapping) else values
            for number, values in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def _adopted(self, values: Mapping[str, Any], owner: Any) -> dict[str, Any]:
        if id(owner) not in self._moved:
            return dict(values)
        return {
            name: self._weights.adopt(value, owner)
            if isinstance(value, torch.Tensor) and value.shape == owner.shape and owner.is_floating_point()
            else value
            for name, value in values.items()
        }


@contextmanager
def _restricted(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> Iterator[None]:
    """Leave only some parameters, given by their ids, in the groups of an optimizer."""
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, listed in groups:
            group["params"] = [parameter for parameter in listed if id(parameter) in parameters]
        yield
    finally:
        for group, listed in groups:
            group["params"] = listed


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's own step, without the hooks of the optimizer, which run once around all stages."""
    step: Callable[..., Any] = type(optimizer).step
    inner: Callable[..., Any] | None = getattr(step, "__wrapped__", None)
    return inner if getattr(step, "hooked", False) and inner is not None else step


Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def steps_alone(make: Maker, device: torch.device) -> bool:
    """Whether such an optimizer treats each parameter by itself: two of them, stepped together and one by one, end with
    the same bits. One that keeps something for a whole group, looks across parameters or needs a closure does not.
    """
    try:
        one, other = (_ends_of_steps(make, device, is_split=is_split) for is_split in (False, True))
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):
        return False
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _ends_of_steps(make: Maker, device: torch.device, *, is_split: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 6, generator=generator).to(device)) for _ in range(2)]
    optimizer = make(parameters)
    for _ in range(3):
        for scale, parameter in zip((0.1, 30.0), parameters, strict=True):
            parameter.grad = (scale * torch.randn(4, 6, generator=generator)).to(device)
        for some in ([parameters[0]], [parameters[1]]) if is_split else (parameters,):
            with _restricted(optimizer, set(map(id, some))):
                _plain_step(optimizer)(optimizer)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [*(p.detach() for p in parameters), *(v for v in state if isinstance(v, torch.Tensor))]
