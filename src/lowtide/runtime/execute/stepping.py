"""The optimizer's own step, stage by stage: the user calls `optimizer.step()` as ever.

torch wraps the step of each class of optimizers into a function that runs the hooks, and that function calls what is
here instead of the class's own step. It walks what is left of the list and, for each stage, has its weights, gradients
and optimizer state on the device and runs the class's step with that stage's parameters alone in the groups; last come
the parameters that no stage moves. So hooks, schedulers and whoever calls the step see one step with all groups.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import CellType
from typing import Any

import torch
from torch import nn

from lowtide.errors import ExecutionError, PlanError
from lowtide.runtime.execute.program import Placement
from lowtide.runtime.execute.weights import Spent, Weights, has_other_names, is_whole
from lowtide.runtime.model.processes import is_distributed
from lowtide.runtime.model.split import Split
from lowtide.runtime.replay.tape import versions_of
from lowtide.runtime.transfer.cargo import Mirror, Tier
from lowtide.schedule import Update


def check_can_move(model: nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    """Refuse to move the weights of a model where that does not work; else return its optimizer.

    Raises:
        PlanError: with the reason.
    """
    _check_is_alone()
    if isinstance(optimizer, tuple):
        raise PlanError(
            "several optimizers step this model's parameters, and only one can be followed; make one optimizer with "
            "several groups, or use a strategy that moves activations alone"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            "the optimizer itself is not known, without which no weights move; pass it with optimizer=optimizer"
        )
    trained = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = next((name for key, name in trained.items() if key not in held), None)
    if missing is not None:
        raise PlanError(
            f"the optimizer does not have parameter {missing!r}, so its state and steps cannot be followed; pass the "
            "one optimizer that has all trained parameters, or freeze the others"
        )
    return optimizer


def _check_is_alone() -> None:
    """Refuse several processes: they exchange gradients that are not there any more."""
    if is_distributed():
        raise PlanError(
            "the schedule moves weights, which does not work with several processes (DDP, FSDP); use a strategy that "
            "moves activations alone"
        )


def weights_of(
    model: nn.Module,
    split: Split,
    tier: Tier,
    optimizer: torch.optim.Optimizer | None,
    homes: dict[int, Mirror] | None = None,
) -> Weights:
    """What a schedule may move besides activations; `homes` as for `Weights`.

    Raises:
        PlanError: where weights of this model cannot be moved.
    """
    check_can_move(model, optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return Weights(tier, movable_parameters(model, split, tier.smallest_bytes, homes or ()), names, optimizer, homes)


def movable_parameters(
    model: nn.Module, split: Split, smallest_bytes: int, homes: Collection[int] = ()
) -> dict[int, list[nn.Parameter]]:
    """The parameters of each stage that are in no other stage's modules, and all of their memory; smaller ones than
    `smallest_bytes` stay. `homes` are the storages, by address, that are places on the lower tier.
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
        if parameter.layout is torch.strided and parameter.untyped_storage()._cdata in homes:
            return is_own
        # Memory that a file, numpy or another library gave has names that nobody can count.
        return is_own and parameter.untyped_storage().resizable() and not has_other_names(parameter)

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
        self._num_states = len(self._optimizer.state)
        self._is_stepping = False
        self._awaits_step = False  # whether backward has updated weights, and the user has not called the step yet
        self._used: list[dict[str, Any]] = []  # the groups' settings in the last update in backward
        self._versions: dict[int, list[int]] = {}  # of the weights of a stage, after its update in backward
        self._spent: list[nn.Parameter] = []  # those that were updated in backward
        self._loading: Any = None
        self._ending: Callable[[], Any] = lambda: None

    def install(self) -> None:
        """From now on what the list does not start with is on the lower tier."""
        _followed(self._optimizer).followers[id(self._optimizer)] = self
        ending = weakref.finalize(self, _unfollow, id(self._optimizer))  # also where nobody detaches the plan
        ending.atexit = False
        self._ending = ending
        self._loading = self._optimizer.register_load_state_dict_pre_hook(self._load)
        self._weights.change()
        self._weights.settle(self._placement.start, fetch=False)
        if not self._placement.steps_in_backward:
            self._weights.make_room()

    def remove(self, successor: StagedSteps | None = None) -> None:
        """Have everything on the device again; what another schedule goes on with stays where it is."""
        if self._loading is not None:
            self._loading.remove()
            self._loading = None
            self._ending()
        if successor is None:
            self._weights.bring_back()
        else:
            self._weights.hand_to(successor._weights)

    def begin(self) -> None:
        """A forward begins."""
        _check_is_alone()
        if self._awaits_step:
            self._awaits_step = False
            self._versions.clear()
            self._spent.clear()
            raise ExecutionError(
                "weights were updated in the last backward (step_in_backward=True), but optimizer.step() was not "
                "called after it; accumulating gradients or skipping steps needs step_in_backward=False"
            )
        self._weights.forget_spent()
        self._weights.begin(self._placement.start)

    def step(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user has called `optimizer.step()`, and hooks before it have run."""
        if self._is_stepping:
            return plain(self._optimizer, *args, **kwargs)
        self._weights.check()
        self._is_stepping = True
        try:
            args, kwargs = _after_closure(args, kwargs)
            self._weights.begin_updates()
            if self._awaits_step:
                self._awaits_step = False
                self._check_same_since_backward()
            elif any(type(p.grad) is Spent for own in self._weights.parameters.values() for p in own):
                raise ExecutionError(
                    "optimizer.step() was called again after one backward, but step_in_backward=True has used its "
                    "gradients up; use step_in_backward=False for several steps"
                )
            with _without_hooks(self._optimizer):
                for operation in self._placement.updates:
                    if isinstance(operation, Update):
                        self._update(operation.stage, plain, args, kwargs)
                    else:
                        assert not hasattr(operation, "save")
                        self._weights.execute(operation)  # type: ignore[arg-type]
                if self._placement.steps_in_backward:
                    # What else reads a weight (a penalty from before the forward) may complete its gradient too late.
                    for k in filter(self._weights.has_gradients, self._weights.parameters):
                        self._update(k, plain, args, kwargs)
                rest = {id(p) for group in self._optimizer.param_groups for p in group["params"]} - self._moved
                with _restricted(self._optimizer, rest):
                    result = plain(self._optimizer, *args, **kwargs)
        finally:
            self._is_stepping = False
            self._weights.hand_over()
        self._put_state_in_order()
        self._on_end()
        return result

    def update_in_backward(self, k: int) -> None:
        """The gradients of stage k are complete: update its weights and use the gradients up."""
        self._weights.check([k])
        self._awaits_step = True
        with _without_hooks(self._optimizer):
            self._update(k, _plain_step(self._optimizer), (), {})
        self._used = _settings_of(self._optimizer)
        self._versions[k] = versions_of(self._weights.parameters.get(k, ()))
        self._spent += [p for p in self._weights.parameters.get(k, ()) if type(p.grad) is Spent]

    def _check_same_since_backward(self) -> None:
        """Refuse what was done between backward and the step, and would have been of effect there."""
        what = "" if _settings_of(self._optimizer) == self._used else "settings of the optimizer (such as lr)"
        for k, versions in self._versions.items():
            if versions_of(self._weights.parameters.get(k, ())) != versions:
                what = f"weights of stage {k}"
        if any(type(parameter.grad) is not Spent for parameter in self._spent):
            what = "gradients"
        self._versions.clear()
        self._spent.clear()
        if what:
            raise ExecutionError(
                f"{what} were changed between backward and optimizer.step(), but step_in_backward=True has updated "
                "weights in backward already; change them before backward or after the step, or use "
                "step_in_backward=False"
            )

    def leave_out_update(self, k: int) -> None:
        """As an update without the optimizer's step, which would change the weights."""
        if self._weights.has_gradients(k):
            self._weights.need_all(k)
            self._weights.stand_in_for_step(k)
            spends = self._placement.steps_in_backward
            self._weights.end_update(k, are_gradients_changed=False, spends_gradients=spends)

    def leave_out_updates(self) -> None:
        """As the user's call of the step: all that it moves, without the optimizer's step."""
        self._weights.begin_updates()
        for operation in self._placement.updates:
            if isinstance(operation, Update):
                self.leave_out_update(operation.stage)
            else:
                self._weights.execute(operation)  # type: ignore[arg-type]
        self._weights.stand_in_for_step(0)
        self._weights.hand_over()
        self._on_end()

    def _update(self, k: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = {id(parameter) for parameter in self._weights.parameters.get(k, ()) if type(parameter.grad) is not Spent}
        if not own:
            return
        has_gradients = self._weights.has_gradients(k)
        if has_gradients:
            self._weights.need_all(k)
        with _restricted(self._optimizer, own):
            plain(self._optimizer, *args, **kwargs)
        # A fused step divides by the scale of a GradScaler in place.
        is_scaled = getattr(self._optimizer, "grad_scale", None) is not None
        if has_gradients:
            spends = self._placement.steps_in_backward
            self._weights.end_update(k, are_gradients_changed=is_scaled, spends_gradients=spends)

    def _put_state_in_order(self) -> None:
        """State was made stage by stage: put it in the order in which one step makes it."""
        state = self._optimizer.state
        if len(state) == self._num_states:
            return
        self._num_states = len(state)
        for parameter in [p for group in self._optimizer.param_groups for p in group["params"] if p in state]:
            state[parameter] = state.pop(parameter)

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


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of the groups, to be compared: those that are tensors as numbers."""
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]


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


def _after_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step whose closure, if there is one, has been called."""
    closure = kwargs.get("closure", args[0] if args else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[1:], {**kwargs, "closure": lambda: loss}


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A step that calls that of its base class would run the hooks once more, for each stage."""
    hooks: Any = optimizer
    before, after = hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks
    hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks = before, after


class _Followed:
    """The step of a class of optimizers, some of which step stage by stage.

    Args:
        cell: where torch's function around it, which runs the hooks, has it.
    """

    def __init__(self, cell: CellType) -> None:
        self.cell = cell
        self.plain: Callable[..., Any] = cell.cell_contents
        self.followers: weakref.WeakValueDictionary[int, StagedSteps] = weakref.WeakValueDictionary()
        cell.cell_contents = self._step

    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        steps = self.followers.get(id(optimizer))
        if steps is None:
            return self.plain(optimizer, *args, **kwargs)
        return steps.step(self.plain, args, kwargs)


_all_followed: dict[Callable[..., Any], _Followed] = {}
"""By torch's function around the step."""


def _followed(optimizer: torch.optim.Optimizer) -> _Followed:
    """Take the place of the step of an optimizer's class.

    Raises:
        PlanError: where torch's function around it is not the one that is known.
    """
    wrapper = type(optimizer).step
    found = _all_followed.get(wrapper)
    if found is None:
        plain = getattr(wrapper, "__wrapped__", None)
        cells = [cell for cell in getattr(wrapper, "__closure__", None) or () if cell.cell_contents is plain]
        if not getattr(wrapper, "hooked", False) or len(cells) != 1:
            raise PlanError(
                f"the step of {type(optimizer).__name__} cannot be taken stage by stage, since it is not a function "
                "that torch has wrapped; use a strategy that moves activations alone"
            )
        found = _all_followed[wrapper] = _Followed(cells[0])
    return found


def _unfollow(key: int) -> None:
    """Have an optimizer, given by its id, step as ever; the last of its class puts the class's own step back."""
    for wrapper, found in list(_all_followed.items()):
        found.followers.pop(key, None)
        if not found.followers:
            found.cell.cell_contents = found.plain
            del _all_followed[wrapper]


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's own step, without the hooks of the optimizer."""
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
    except (TypeError, RuntimeError, ValueError, AttributeError, LookupError, AssertionError):
        return False
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _ends_of_steps(make: Maker, device: torch.device, *, is_split: bool) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)  # torch's default device may be another

    def drawn() -> torch.Tensor:
        return torch.randn(4, 6, generator=generator, device="cpu").to(device)

    parameters = [nn.Parameter(drawn()) for _ in range(2)]
    optimizer = make(parameters)
    for _ in range(3):
        for scale, parameter in zip((0.1, 30.0), parameters, strict=True):
            parameter.grad = scale * drawn()
        for some in ([parameters[0]], [parameters[1]]) if is_split else (parameters,):
            with _restricted(optimizer, set(map(id, some))):
                _plain_step(optimizer)(optimizer)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [*(p.detach() for p in parameters), *(v for v in state if isinstance(v, torch.Tensor))]
