"""`lowtide.attach`: run a model under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.chain import Chain, Stage, Variant
from lowtide.errors import PlanError, ScheduleError, shown
from lowtide.runtime.execute.checks import Checks
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.execute.stepping import check_can_move, steps_alone
from lowtide.runtime.graphs.pool import Pool
from lowtide.runtime.graphs.steps import GraphedSteps
from lowtide.runtime.measure.weights import Optimizer, like_of, optimizer_of
from lowtide.runtime.model.interception import refuse_scripted
from lowtide.runtime.model.split import Split, StageSplit, Unit
from lowtide.runtime.plan.plan import Part, Plan, attached_plan
from lowtide.runtime.transfer.arena import rounded
from lowtide.runtime.transfer.cargo import Tier
from lowtide.runtime.transfer.file_tier import FileTier
from lowtide.runtime.transfer.pinned_tier import PinnedTier
from lowtide.schedule import Forward, Offload, Release, Schedule, as_schedule
from lowtide.simulate import simulate
from lowtide.solve import Solution
from lowtide.units import parse_bytes

# A weight, its gradient and up to four tensors of optimizer state, each of which has a place that is rounded up.
_PLACES_OF_PARAMETER = 6


def attach(
    model: nn.Module,
    solution: Solution | Schedule | Mapping[str, Any],
    *,
    split: Split | None = None,
    host_memory_budget: int | str | None = None,
    optimizer: Optimizer = None,
    strict: bool = False,
    spot_checks: bool = True,
    cuda_graphs: bool = False,
) -> Plan:
    """Attach a schedule to a model, which then runs under it.

    Args:
        model: the model; the object stays the same.
        solution: what `lowtide.solve` returned for the model's chain, or a schedule.
        split: which submodules make which stage. None: as the chain was measured; else the stages' names are read as
            paths of submodules; else the children of an `nn.Sequential` are the stages.
        host_memory_budget: bytes of host memory that offloaded values may take; None: what the schedule needs.
        optimizer: for a schedule that moves weights, the optimizer of all trained parameters; its state moves, too.
        strict: compare, byte by byte, what a repeated forward saves with what the first saved; slow, for finding out
            why gradients differ.
        spot_checks: in each step compare samples of what one recomputed stage saves, in turn, with its first run.
        cuda_graphs: on CUDA, capture steps as graphs and replay them.

    Returns:
        The plan; a plan that was attached before is detached.

    Raises:
        PlanError: where the model does not have the chain's stages.
        CaptureError: where a part of the model is TorchScript, and for what is no optimizer.
        ScheduleError: where a schedule is illegal.

    Example:
        >>> from lowtide import Backward, Forward, Schedule
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> recompute = [Forward(1, "keep"), Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)]
        >>> plan = attach(model, Schedule("by hand", recompute))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> plan.stats().recomputed_per_step
        1.0
    """
    check_is_model(model)
    check_switches(strict=strict, spot_checks=spot_checks, cuda_graphs=cuda_graphs)
    optimizer = optimizer_of(model, optimizer)
    chain = solution.chain if isinstance(solution, Solution) else None
    schedule = solution.schedule if isinstance(solution, Solution) else as_schedule(solution)
    if not isinstance(split, Split | None):
        raise PlanError(f"split is {shown(split)}, expected a plan's .split; leave it out to have the chain's")
    split = split or split_for(model, chain)
    _check_has_stages(model, split)
    check_legal(schedule, split.num_stages, chain)
    tier = tier_for(model, host_memory_budget, expected_bytes(model, chain, schedule))
    checks = Checks.of(strict=strict, spot_checks=spot_checks)
    budget = solution.memory_budget if isinstance(solution, Solution) else None
    bandwidth = solution.bandwidth if isinstance(solution, Solution) else 0
    previous = attached_plan(model)
    if previous is not None:
        previous.detach()
    if cuda_graphs:
        check_can_graph(device_of(model), are_moved=bool(schedule.manages))
    stepped = None
    if schedule.manages and optimizer is not None:
        stepped = check_steps_alone(check_can_move(model, optimizer))
    execution = Execution(model, split, schedule, chain, tier, checks=checks, optimizer=stepped)
    graphs = graphs_of(execution) if cuda_graphs else None
    return Plan(model, Part(execution, memory_budget=budget, bandwidth=bandwidth, graphs=graphs))


def graphs_of(execution: Execution) -> GraphedSteps:
    """What runs the steps of an execution as CUDA graphs."""
    return GraphedSteps(execution, Pool(execution.machine.device))


def check_can_graph(device: torch.device, *, are_moved: bool = False) -> None:
    """Refuse CUDA graphs where there are none.

    Raises:
        PlanError: with the reason.
    """
    if device.type != "cuda":
        raise PlanError(f"cuda_graphs=True needs a model on a CUDA device, but this one is on {device.type!r}")
    if are_moved:
        raise PlanError("steps that move weights cannot be captured as CUDA graphs; leave out cuda_graphs=True")


def check_steps_alone(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Refuse an optimizer whose step cannot be taken stage by stage; else return it.

    Raises:
        PlanError: with the kind of optimizer.
    """
    for group in optimizer.param_groups:
        device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
        if not steps_alone(partial(like_of, optimizer, group), device):
            raise PlanError(
                f"{type(optimizer).__name__} does not treat each parameter by itself, so it cannot step stage by "
                "stage; use a strategy that moves activations alone, or an optimizer such as AdamW"
            )
    return optimizer


def check_switches(**given: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        PlanError: with its name.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise PlanError(f"{name} is {shown(value)}, expected True or False")


def check_is_model(model: Any) -> None:
    """Refuse anything but a module, and modules that cannot have a plan.

    Raises:
        PlanError: with what was given.
        CaptureError: with the part that is TorchScript.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"model is {shown(model)}, expected an nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        name = type(model).__name__
        raise PlanError(f"the model is wrapped in {name} already; call fit before {name}(model), on the model itself")
    if any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__):
        raise PlanError("the model is sharded already; call fit before fully_shard(model)")
    refuse_scripted(model)


def split_for(model: nn.Module, chain: Chain | None) -> Split:
    """The stages of a model as its chain names them."""
    if chain is not None and isinstance(chain.provenance.get("split"), Mapping):
        return Split.from_dict(chain.provenance["split"])
    names = None if chain is None else [stage.name for stage in chain.stages]
    paths = {path for path, _ in model.named_modules()}
    if names is not None and all(name in paths for name in names) and len(set(names)) == len(names):
        return Split(tuple(StageSplit(name, (Unit(name),)) for name in names))
    if isinstance(model, nn.Sequential) and (names is None or len(names) == len(model)):
        children = [name for name, _ in model.named_children()]
        return Split(tuple(StageSplit(name, (Unit(name),)) for name in children))
    raise PlanError(
        f"lowtide does not know which submodules of this {type(model).__name__} make the stages; attach a solution for "
        "a chain from lowtide.measure, or pass split="
    )


def _check_has_stages(model: nn.Module, split: Split) -> None:
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    missing = next((unit.path for stage in split.stages for unit in stage.units if unit.path not in paths), None)
    if missing is not None:
        raise PlanError(
            f"this {type(model).__name__} has no submodule {missing!r}, which the stages need; attach a solution for a "
            "chain measured from this model"
        )


def check_legal(schedule: Schedule, num_stages: int, chain: Chain | None = None) -> None:
    """Refuse a schedule that is illegal for any chain of that many stages, with the side values of `chain`.

    Where no chain is given, it may free side values as it likes: the executor sees to these itself.
    """
    if schedule.num_stages not in (0, num_stages):
        raise ScheduleError(
            f"the schedule ({schedule.strategy!r}) is for {schedule.num_stages} stages, but the model has "
            f"{num_stages}; attach one that was solved for this model's chain (lowtide.measure)"
        )
    if chain is not None and chain.num_stages != num_stages:
        raise ScheduleError(
            f"the chain {chain.name!r} has {chain.num_stages} stages, but the model has {num_stages}; measure this "
            "model (lowtide.measure), or call fit"
        )
    most = max((op.variant for op in schedule.operations if isinstance(op, Forward)), default=0)
    variants = tuple(Variant(str(v), 0.0, 0.0, 1) for v in range(most))
    stages = tuple(Stage(str(k), 0.0, 0.0, 1, 1, variants=variants) for k in range(num_stages))
    if chain is None:
        kept = [op for op in schedule.operations if not (isinstance(op, Release) and op.kind == "s")]
        simulate(Chain("any", stages, 1), replace(schedule, operations=tuple(kept)), bandwidth=1)
    else:
        simulate(Chain("any", stages, 1, side_values=chain.side_values), schedule, bandwidth=1)


def tier_for(
    model: nn.Module,
    host_memory_budget: int | str | None,
    expected_bytes: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Tier:
    """Where values of this model are offloaded to: pinned memory for CUDA, a file for the CPU.

    Args:
        model: the model.
        host_memory_budget: the most bytes to use there; None: no limit.
        expected_bytes: what a schedule needs there.
        progress: is told how far pinning is; None: nobody is.
    """
    return tier_on(device_of(model), host_memory_budget, expected_bytes, progress)


def tier_on(
    device: torch.device,
    host_memory_budget: int | str | None,
    expected_bytes: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Tier:
    """Where values on a device are offloaded to; other arguments as for `tier_for`."""
    limit = None if host_memory_budget is None else parse_bytes(host_memory_budget)
    if device.type == "cuda":
        return PinnedTier(device, expected_bytes, limit, progress)
    return FileTier(expected_bytes, limit)


def expected_bytes(model: nn.Module, chain: Chain | None, schedule: Schedule, *, are_placed: bool = False) -> int:
    """What the lower tier must hold for a schedule, weights and what belongs to them included; 0: nobody knows.

    Args:
        model: the model.
        chain: what its stages cost.
        schedule: what they do.
        are_placed: whether all weights are there, also those that the schedule leaves on the device.
    """
    if chain is None:
        return 0
    leaving = {operation.value for operation in schedule.operations if isinstance(operation, Offload | Release)}
    leaving |= {("w", k) for k in range(1, chain.num_stages + 1)} if are_placed else set()
    sizes: list[int] = []
    for kind, k in leaving:
        if kind in ("w", "g", "opt"):
            stage = chain.stages[k - 1]
            sizes.append({"w": stage.weight_bytes, "g": stage.weight_grad_bytes}.get(kind, stage.optimizer_bytes))
    rounding = _PLACES_OF_PARAMETER * rounded(1) * len(list(model.parameters())) if sizes else 0
    return host_bytes(chain, schedule) + sum(sizes) + rounding


def host_bytes(chain: Chain, schedule: Schedule) -> int:
    """The most that the lower tier must hold of activations: every offloaded one, once; what a stage saves may have its
    input among it, which counts as another stage's.
    """
    values = {operation.value for operation in schedule.operations if isinstance(operation, Offload)}
    total = 0
    for kind, k in values:
        stage = chain.stages[k - 1] if k and kind != "s" else None
        if kind == "s":
            total += rounded(chain.side_value(k).num_bytes)
        elif kind == "a":
            total += rounded(chain.activation_bytes(k))
        elif kind == "abar" and stage is not None:
            total += rounded(max(stage.saved_bytes, *(v.saved_bytes for v in stage.variants), 0))
            total += 0 if ("a", k - 1) in values else rounded(chain.activation_bytes(k - 1))
    return total


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    tensor = next(iter(model.parameters()), None)
    return torch.device("cpu") if tensor is None else tensor.device
