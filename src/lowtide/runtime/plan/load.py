"""`lowtide.load_plan`: attach a plan from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.chain import Chain
from lowtide.errors import ChainError, PlanError, ScheduleError, shown
from lowtide.files import read_json
from lowtide.progress import DelayedProgress, check_progress
from lowtide.runtime.compile.compiled import Compilation
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.execute.stepping import check_can_move
from lowtide.runtime.measure.weights import Optimizer, optimizer_of
from lowtide.runtime.model.split import Split
from lowtide.runtime.plan.attach import (
    check_can_graph,
    check_is_model,
    check_legal,
    check_steps_alone,
    check_switches,
    device_of,
    expected_bytes,
    graphs_of,
    tier_on,
)
from lowtide.runtime.plan.placing import Placed, comes_from_cpu, device_to_use, move
from lowtide.runtime.plan.plan import FORMAT, Part, Plan, attached_plan
from lowtide.runtime.plan.signature import Signature, fingerprint
from lowtide.runtime.transfer.arena import rounded
from lowtide.runtime.transfer.cargo import Mirror, Tier
from lowtide.schedule import Schedule


def load_plan(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    host_memory_budget: int | str | None = None,
    optimizer: Optimizer = None,
    device: str | torch.device | None = None,
    cuda_graphs: bool = False,
    progress: Callable[[str, float], None] | bool | None = None,
) -> Plan:
    """Attach a plan that was saved with `plan.save`.

    Args:
        path: the file.
        model: the same model as then, on the same kind of device, or on the CPU (see `device`).
        host_memory_budget: bytes of host memory for what is moved; None: what the schedule needs.
        optimizer: the optimizer of all trained parameters, for a plan that moves weights.
        device: where to train, for a model that is still on the CPU, as for `lowtide.fit`. None: where the model is.
        cuda_graphs: on CUDA, capture steps as graphs and replay them.
        progress: called with the current task and the share done, 0 to 1: pinning host memory for weights takes
            seconds. True: show a bar; False: do not; None: show one on a terminal, after 2 seconds.

    Raises:
        PlanError: for a file that is not a plan, or a plan for another model, device or version; in one line that says
            what has changed. Calls with larger shapes are refused when they come; smaller ones run under the plan.
        CaptureError: for what is no optimizer.
    """
    check_progress(progress, may_switch=True)
    check_switches(cuda_graphs=cuda_graphs)
    values = read_json(path, PlanError)
    try:
        with DelayedProgress(enabled=progress is not False, always=progress is True) as bar:
            return plan_from_dict(
                values,
                model,
                host_memory_budget=host_memory_budget,
                optimizer=optimizer,
                device=device,
                cuda_graphs=cuda_graphs,
                progress=progress if callable(progress) else bar,
            )
    except (PlanError, ChainError, ScheduleError) as error:
        raise PlanError(f"{os.fspath(path)}: {error}") from None


def plan_from_dict(
    values: Any,
    model: nn.Module,
    *,
    host_memory_budget: int | str | None = None,
    optimizer: Optimizer = None,
    device: str | torch.device | None = None,
    cuda_graphs: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> Plan:
    """Attach a plan from its plain data; see `load_plan`."""
    check_is_model(model)
    optimizer = optimizer_of(model, optimizer)
    if not isinstance(values, Mapping):
        raise PlanError(f"a plan is a JSON object, not {shown(values)}")
    if values.get("format") != FORMAT:
        raise PlanError(f"format is {shown(values.get('format'))}, expected {FORMAT!r}; write one with plan.save")
    used = device_of(model) if device is None else device_to_use(model, device)
    _check_fingerprint(values.get("model"), fingerprint(model, used))
    split = _split_from(values.get("split"))
    _check_units(split, model)
    schedule = Schedule.from_dict(values.get("schedule") or {})
    chain = None if values.get("chain") is None else Chain.from_dict(values["chain"])
    check_legal(schedule, split.num_stages, chain)
    signature = None if values.get("signature") is None else Signature.from_dict(values["signature"])
    compilation = None if values.get("compilation") is None else Compilation.from_dict(values["compilation"])
    checked = None if values.get("checked") is None else Signature.from_dict(values["checked"])
    numbers = {name: _whole_number(name, values.get(name)) for name in ("memory_budget", "rehearsed_peak_bytes")}
    bandwidth = _whole_number("bandwidth", values.get("bandwidth")) or 0
    if cuda_graphs:
        check_can_graph(used, are_moved=bool(schedule.manages))
    previous = attached_plan(model)
    if previous is not None:
        previous.detach()
    stepped = check_steps_alone(check_can_move(model, optimizer)) if schedule.manages else None
    tier = tier_on(used, host_memory_budget, progress=progress)
    is_placed = device is not None and comes_from_cpu(model)
    if stepped is not None and is_placed:
        homes, take_back = _placed(model, split, stepped, tier, used, progress)
    else:
        homes, take_back = None, _moved(model, optimizer, used)
    compiled = None
    try:
        compiled = None if compilation is None else compilation.of(model, split)
        there = sum(rounded(mirror.tensor.nbytes) for mirror in (homes or {}).values())
        tier.expect(max(0, expected_bytes(model, chain, schedule, are_placed=homes is not None) - there))
        execution = Execution(model, split, schedule, chain, tier, optimizer=stepped, homes=homes)
    except BaseException:
        if compiled is not None:
            compiled.remove()
        take_back()
        raise
    part = Part(
        execution,
        signature,
        numbers["memory_budget"],
        bandwidth,
        numbers["rehearsed_peak_bytes"],
        compiled=compiled,
        checked=checked,
        graphs=graphs_of(execution) if cuda_graphs else None,
    )
    return Plan(model, part, on_detach=take_back)


def _placed(
    model: nn.Module,
    split: Split,
    optimizer: torch.optim.Optimizer,
    tier: Tier,
    device: torch.device,
    progress: Callable[[str, float], None] | None,
) -> tuple[dict[int, Mirror], Callable[[], None]]:
    """Have the weights of a model on the lower tier of a device; returns their places, and what takes it back."""
    placed = Placed(model, optimizer, device, tier, progress)
    placed.settle(split)
    return placed.homes, placed.take_back


def _moved(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Callable[[], None]:
    """Have a model on a device; returns what takes it back."""
    if device == device_of(model):
        return lambda: None
    move(model, optimizer, device)
    return partial(move, model, optimizer, torch.device("cpu"))


def _check_fingerprint(saved: Any, now: Mapping[str, str]) -> None:
    if not isinstance(saved, Mapping):
        raise PlanError(f"model is {shown(saved)}, expected the fingerprint of a model")
    for part, value in now.items():
        if saved.get(part) != value:
            raise PlanError(
                f"the model's {part} have changed since the plan was made; call fit again"
                if part != "device"
                else f"the plan was made for device {shown(saved.get(part))}, but the model is on {value!r}; "
                "move the model there, or call fit again"
            )


def _split_from(values: Any) -> Split:
    try:
        return Split.from_dict(values)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PlanError(f"split is {shown(json.dumps(values))}, which is invalid; was the file edited?") from None


def _check_units(split: Split, model: nn.Module) -> None:
    known = dict(model.named_modules(remove_duplicate=False))
    for unit in split.stage_of():
        if unit.path not in known:
            raise PlanError(f"split names submodule {shown(unit.path)}, which the model does not have; call fit again")


def _whole_number(name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise PlanError(f"{name} is {shown(value)}, expected whole bytes or null")
