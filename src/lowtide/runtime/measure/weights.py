"""Parameters, their gradients and the optimizer's state, stage by stage."""

from __future__ import annotations

import inspect
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.chain import Chain
from lowtide.errors import CaptureError, shown
from lowtide.runtime.meter import Meter
from lowtide.runtime.model.split import Split

# How many tensors of the parameter's size each kind of optimizer keeps for it (torch.optim's defaults).
OPTIMIZER_KINDS = {
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "lion": 1,
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
    "adadelta": 2,
    "amsgrad": 3,
}

# How to make one of each; lion is not torch's, and takes what SGD with momentum does.
_KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "lion": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
}

# The size of the tensors that tell what a step takes: on CUDA large beside what its allocator rounds up.
_TRIED_BYTES = {"cuda": 2**20}
_TRIED_BYTES_ELSEWHERE = 2**12

Optimizer = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | str | None

# What constructors and steps raise that do not work with what they are tried on.
_FAILURES = (TypeError, RuntimeError, ValueError, AttributeError, LookupError, AssertionError)

# What learning-rate schedulers put into groups, which not all constructors take.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Bytes of one stage's parameters; a parameter that several stages read is counted once.

    Its weight belongs to the first stage that reads it, its gradient to the last one, whose backward comes first and
    makes it.
    """

    weight_bytes: int = 0
    weight_grad_bytes: int = 0
    optimizer_bytes: int = 0


def stage_weights(
    model: nn.Module, split: Split, readers: Mapping[str, int], state_bytes: Mapping[int, int]
) -> tuple[list[StageWeights], StageWeights]:
    """Bytes of the parameters of each stage, and of those that belong to none.

    Args:
        model: the model.
        split: its stages.
        readers: for each parameter that takes part in backward, by name, the last stage (from 1) that reads it.
        state_bytes: the optimizer's state of each parameter, by its id.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    owner = {id(by_name[name]): k for k, stage in enumerate(split.stages, start=1) for name in stage.parameters}
    last = {id(by_name[name]): k for name, k in readers.items()}
    totals = [[0, 0, 0] for _ in range(split.num_stages + 1)]
    for parameter in model.parameters():
        k = owner.get(id(parameter), 0)
        totals[k][0] += parameter.numel() * parameter.element_size()
        if parameter.requires_grad:
            totals[last.get(id(parameter), k)][1] += parameter.numel() * parameter.element_size()
            totals[k][2] += state_bytes.get(id(parameter), 0)
    made = [StageWeights(*entry) for entry in totals]
    return made[1:], made[0]


def each_of(optimizer: Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that are given themselves: none where there is only a kind's name."""
    if optimizer is None or isinstance(optimizer, str):
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


def _with_groups(optimizer: Optimizer) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    for each in each_of(optimizer):
        for group in each.param_groups:
            yield each, group


def optimizer_of(model: nn.Module, given: Any) -> Optimizer:
    """The optimizer of a model, without what frameworks put around it (accelerate, Lightning); of several, those that
    have parameters of the model; a kind's name, or None, as it is.

    Raises:
        CaptureError: for anything else, a learning-rate scheduler included.
    """
    if not isinstance(given, list | tuple) or not given:
        return _unwrapped(given)
    found = {}
    for number, each in enumerate(given):
        one = _unwrapped(each, f"optimizer[{number}]")
        if not isinstance(one, torch.optim.Optimizer):
            raise CaptureError(f"optimizer[{number}] is {shown(each)}, expected a torch optimizer")
        found[id(one)] = one
    own = tuple(each for each in found.values() if trains(each, model)) or tuple(found.values())
    return own if len(own) > 1 else own[0]


def _unwrapped(optimizer: Any, name: str = "optimizer") -> torch.optim.Optimizer | str | None:
    if isinstance(optimizer, str) and optimizer.lower() not in OPTIMIZER_KINDS:
        raise CaptureError(
            f"unknown optimizer {shown(optimizer)}; pass the optimizer itself, or one of "
            f"{', '.join(sorted(OPTIMIZER_KINDS))}"
        )
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    inner, wraps = getattr(optimizer, "optimizer", None), hasattr(optimizer, "param_groups")  # a scheduler has none
    while wraps and isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        which = "; pass the optimizer that this scheduler drives" if isinstance(inner, torch.optim.Optimizer) else ""
        raise CaptureError(
            f"{name} is {shown(optimizer)}, expected a torch optimizer, a list of them or a name such as 'adamw'{which}"
        )
    return optimizer


def with_parameters(optimizer: Optimizer, instead: Mapping[int, nn.Parameter]) -> Optimizer:
    """An optimizer of the same kind and settings, without state, that has other parameters instead of its own, by id.

    The given one is left as it is. The other one makes no steps: where fused kernels cannot run, it counts as well.
    """
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    return tuple(_with_parameters(each, instead) for each in each_of(optimizer))


def _with_parameters(optimizer: torch.optim.Optimizer, instead: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.state = defaultdict(dict)
    other.param_groups = [
        {
            **group,
            "params": [instead.get(id(parameter), parameter) for parameter in group["params"]],
            **({"fused": None} if "fused" in group else {}),
        }
        for group in optimizer.param_groups
    ]
    return other


def optimizer_state_bytes(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """The bytes of state that an optimizer keeps, or will keep, on each parameter's device, by the parameter's id."""
    if isinstance(optimizer, str):
        copies = OPTIMIZER_KINDS[optimizer.lower()]
        return {id(p): copies * p.numel() * p.element_size() for p in parameters}
    wanted, found = {id(parameter) for parameter in parameters}, dict[int, int]()
    for each, group in _with_groups(optimizer):
        tried: dict[tuple[torch.dtype, str, int], list[_StateForm]] = {}
        for parameter in group["params"]:
            if id(parameter) not in wanted:
                continue
            state = each.state.get(parameter, {})
            if any(isinstance(value, torch.Tensor) for value in state.values()):  # else its first step is to come
                num_bytes = sum(_bytes_on(parameter.device, value) for value in state.values())
            else:
                key = (parameter.dtype, parameter.device.type, parameter.dim())
                if key not in tried:
                    tried[key] = _kept_for(each, group, parameter)
                num_bytes = sum(form.num_bytes(parameter) for form in tried[key])
            found[id(parameter)] = found.get(id(parameter), 0) + num_bytes
    if wanted and not found and any(group["params"] for _, group in _with_groups(optimizer)):
        which = "the optimizer has none" if len(each_of(optimizer)) == 1 else "none of the optimizers has any"
        raise CaptureError(f"{which} of this model's parameters; pass the one made from model.parameters()")
    return found


def trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer may be that of a model: it has one of the model's parameters, or is only named."""
    own = set(map(id, model.parameters()))
    groups = [group for _, group in _with_groups(optimizer)]
    return not groups or any(id(parameter) in own for group in groups for parameter in group["params"])


def has_all(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether all that a model trains is known to be stepped by optimizers that are given themselves."""
    held = {id(parameter) for _, group in _with_groups(optimizer) for parameter in group["params"]}
    return all(id(parameter) in held for parameter in model.parameters() if parameter.requires_grad)


def existing_state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """The bytes of gradients and optimizer state that already exist."""
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    return gradients + state_bytes_there(optimizer, model.parameters())


def state_bytes_there(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> int:
    """The bytes of optimizer state that some parameters already have."""
    states = [(p.device, each.state.get(p, {})) for p in parameters for each in each_of(optimizer)]
    return sum(_bytes_on(device, value) for device, state in states for value in state.values())


def optimizer_step_bytes(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> int:
    """What an optimizer's step allocates for its own duration, found by steps of such an optimizer on small tensors."""
    trained = [p for p in parameters if p.requires_grad]
    if isinstance(optimizer, str):
        kind = _KINDS.get(optimizer.lower())
        return 0 if kind is None or not trained else _step_bytes(kind, trained)
    ids, found = set(map(id, trained)), 0
    for each, group in _with_groups(optimizer):
        own = [parameter for parameter in group["params"] if id(parameter) in ids]
        if own:
            found = max(found, _step_bytes(partial(like_of, each, group), own))
    return found


def _step_bytes(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parameters: list[nn.Parameter]) -> int:
    """Of one group of parameters: a share of all of them where the optimizer works on them at once, and of the largest
    where it takes one after the other. Steps of two and of three equal tensors tell both shares, for each proportion.
    """
    alike = defaultdict[tuple[torch.Size, torch.dtype], list[int]](list)
    for parameter in parameters:
        alike[_tried_shape(parameter), parameter.dtype].append(parameter.numel() * parameter.element_size())
    of_all, of_largest = 0.0, 0.0
    for (shape, dtype), sizes in alike.items():
        try:
            of_two, of_three = (
                _temporary_bytes(make, shape, dtype, parameters[0].device, num_tensors) for num_tensors in (2, 3)
            )
        except (*_FAILURES, CaptureError):
            of_largest = max(of_largest, 2 * max(sizes))  # as torch's own for one tensor after the other
            continue
        tried_bytes, of_each = shape.numel() * dtype.itemsize, max(0, of_three - of_two)
        of_all += of_each * sum(sizes) / tried_bytes
        of_largest = max(of_largest, max(0, of_two - 2 * of_each) * max(sizes) / tried_bytes)
    return math.ceil(of_all + of_largest)


def _tried_shape(like: nn.Parameter) -> torch.Size:
    """A small shape; of a matrix with its proportions, by which steps differ that take products of it (Muon)."""
    numel = _TRIED_BYTES.get(like.device.type, _TRIED_BYTES_ELSEWHERE) // like.element_size()
    if like.dim() != 2:
        return torch.Size((64, numel // 64))
    scale = math.sqrt(numel / max(1, like.numel()))
    return torch.Size(max(1, round(side * scale)) for side in like.shape)


def _temporary_bytes(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    num_tensors: int,
) -> int:
    """What a step of an optimizer for so many tensors takes."""
    tensors = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(num_tensors)]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer, found = make(tensors), 0
    for _ in range(2):  # the first one makes the state
        with Meter(device, search=False) as meter:
            gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
            for each in (*tensors, *gradients, *_state_of(optimizer)):
                meter.see(each)
            optimizer.step()
            found = max(found, meter.peak_bytes - meter.live_bytes)
    return found


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """What an optimizer's step of one stage takes with everything on the device: its time, and the bytes that it uses
    for its own duration.
    """

    seconds: float = 0.0
    extra_bytes: int = 0


def update_figures(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> UpdateFigures:
    """Measure steps of such an optimizer on tensors like some parameters, which are gone afterwards."""
    trained, found = [parameter for parameter in parameters if parameter.requires_grad], UpdateFigures()
    if isinstance(optimizer, str):
        kind = _KINDS.get(optimizer.lower())
        return found if kind is None or not trained else _measured_steps(kind, trained)
    ids = set(map(id, trained))
    for each, group in _with_groups(optimizer):
        own = [parameter for parameter in group["params"] if id(parameter) in ids]
        if own:
            measured = _measured_steps(partial(like_of, each, group), own)
            found = UpdateFigures(found.seconds + measured.seconds, max(found.extra_bytes, measured.extra_bytes))
    return found


def updates_of(optimizer: Optimizer, stages: Iterable[Sequence[nn.Parameter]]) -> Iterator[UpdateFigures]:
    """What the optimizer's step of each stage takes, given by its parameters; stages of one kind are measured once."""
    known: dict[tuple[object, ...], UpdateFigures] = {}
    for own in stages:
        kind = tuple((tuple(parameter.shape), parameter.dtype) for parameter in own if parameter.requires_grad)
        if kind not in known:
            known[kind] = update_figures(optimizer, own)
        yield known[kind]


def with_updates(chain: Chain, model: nn.Module, split: Split, optimizer: Optimizer) -> Chain:
    """A chain with the times of the optimizer's steps; those of one that cannot be made anew stay unknown."""
    if optimizer is None:
        return chain
    by_name, owned, stages = dict(model.named_parameters(remove_duplicate=False)), set[int](), []
    for stage in split.stages:  # a parameter that several stages share belongs to the first
        own = [by_name[name] for name in stage.parameters if id(by_name[name]) not in owned]
        owned |= set(map(id, own))
        stages.append(own)
    try:
        found = list(updates_of(optimizer, stages))
    except _FAILURES:
        return chain
    pairs = zip(chain.stages, found, strict=True)
    return replace(chain, stages=tuple(replace(stage, update_seconds=each.seconds) for stage, each in pairs))


def _measured_steps(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], like: list[nn.Parameter]
) -> UpdateFigures:
    tensors = [nn.Parameter(torch.zeros_like(parameter)) for parameter in like]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer, device, seconds = make(tensors), tensors[0].device, []
    optimizer.step()  # makes the state
    with Meter(device, search=False) as meter:
        for each in (*tensors, *(tensor.grad for tensor in tensors), *_state_of(optimizer)):
            assert each is not None
            meter.see(each)
        there_bytes = meter.live_bytes
        meter.reset_peak()
        optimizer.step()
        extra_bytes = meter.peak_bytes - there_bytes
    for _ in range(2):
        begin = _now(device)
        optimizer.step()
        seconds.append(_now(device) - begin)
    return UpdateFigures(min(seconds), extra_bytes)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def like_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings for other parameters; its steps leave the group as it is."""
    accepted, apart = inspect.signature(type(optimizer)).parameters, ("params", "param_names")
    own = {name: value for name, value in group.items() if name not in apart}
    own = tree_map_only(torch.Tensor, torch.clone, own)  # and lists and dicts are others
    settings = {name: value for name, value in own.items() if name in optimizer.defaults and name in accepted}
    plain = {name: value for name, value in own.items() if name not in _OF_SCHEDULERS}
    for given in ([{**own, "params": parameters}], [{**plain, "params": parameters}]):
        with suppress(*_FAILURES):
            return type(optimizer)(given, **settings)
    return type(optimizer)(parameters, **settings)  # it makes groups itself


def _bytes_on(device: torch.device, value: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.device == device]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# The sizes of a parameter on which an optimizer is tried out: each tells which side of the parameter a state has.
_TRIED_SIZES = (8, 16, 6, 10, 14)


@dataclass(frozen=True, slots=True)
class _StateForm:
    """A tensor that an optimizer keeps for a parameter: the sides of the parameter that it has, and what it takes."""

    sides: tuple[int, ...]
    others: int
    """The elements for each element of those sides."""
    element_bytes: int

    @classmethod
    def of(cls, value: torch.Tensor, trial: torch.Tensor) -> _StateForm:
        """Seen with a parameter of `_TRIED_SIZES`."""
        if value.numel() == trial.numel():  # of whatever shape
            return cls(tuple(range(trial.dim())), 1, value.element_size())
        sides = tuple(trial.shape.index(size) for size in value.shape if size in trial.shape)
        others = math.prod(size for size in value.shape if size not in trial.shape)
        return cls(sides, others, value.element_size())

    def num_bytes(self, parameter: torch.Tensor) -> int:
        """What it takes for another parameter."""
        return self.element_bytes * self.others * math.prod(parameter.shape[side] for side in self.sides)


def _kept_for(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: nn.Parameter) -> list[_StateForm]:
    """What an optimizer will keep for a parameter for which it has nothing yet."""
    try:
        return _tried_out(optimizer, group, like)
    except CaptureError:
        if any(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values()):
            return []  # it has made a step, and keeps nothing for this parameter
        raise


def _tried_out(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: nn.Parameter) -> list[_StateForm]:
    """What such an optimizer keeps for a parameter of so many dimensions, found by one step of a tiny one."""
    sizes = [_TRIED_SIZES[axis % len(_TRIED_SIZES)] for axis in range(like.dim())]
    trial = nn.Parameter(torch.zeros(sizes, dtype=like.dtype, device=like.device))
    trial.grad = torch.ones_like(trial)
    try:
        tiny = like_of(optimizer, group, [trial])
        tiny.step()
    except _FAILURES:
        raise CaptureError(
            f"cannot tell how much state {type(optimizer).__name__} keeps before its first step; "
            "pass the name of a kind of optimizer, or call fit after a step"
        ) from None
    values: Sequence[Any] = list(tiny.state[trial].values())
    return [_StateForm.of(value, trial) for value in values if _bytes_on(like.device, value)]
