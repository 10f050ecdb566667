"""Memory of weights, gradients and optimizer state that has a second name: all names see the same numbers, as without a
plan, wherever the memory is.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.runtime.schedules import parking, recomputing, stepping_in_backward, storing
from torch import nn
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lowtide
from lowtide import Release, Schedule
from lowtide.errors import LowtideWarning, PlanError
from lowtide.runtime.execute import stepping

WIDTH, NUM_BLOCKS, NUM_STEPS = 12, 4, 4

Loop = Callable[[nn.Sequential, torch.optim.Optimizer, Callable[[], None]], list[Any]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    """A training loop; it calls its last argument where `fit` would be, and returns what it sees."""
    LOOPS[function.__name__] = function
    return function


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_BLOCKS)))


def data() -> Iterator[torch.Tensor]:
    """Batches on torch's default device, which tests on a GPU set."""
    generator, device = torch.Generator("cpu").manual_seed(1), torch.get_default_device()
    return (torch.randn(5, WIDTH, generator=generator, device="cpu").to(device) for _ in range(NUM_STEPS))


def sums(tensors: Any) -> list[float]:
    """What tensors or arrays hold, in a number each."""
    return [float(tensor.sum()) for tensor in tensors]


def weights(model: nn.Module) -> list[float]:
    return sums(p.detach().clone() for p in model.parameters())


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@loop
def views_from_before(model, optimizer, attach):
    views = [p.detach().view(-1)[3:] for p in model.parameters()] + [p.data for p in model.parameters()]
    attach()
    seen = []
    for x in data():
        loss = loss_of(model, x)
        seen.append(sums(views))
        loss.backward()
        seen.append(sums(views))
        optimizer.step()
        seen.append(sums(views))
        for view in views[NUM_BLOCKS * 2 :]:
            view.mul_(0.9)
        optimizer.zero_grad()
    return [*seen, *weights(model)]


@loop
def views_from_every_moment(model, optimizer, attach):
    """Some are kept for a step, some for good, and all are written to."""
    attach()
    seen, parameters, kept = [], list(model.parameters()), []
    for index, x in enumerate(data()):
        views = [p.detach()[..., 1:] for p in parameters]
        loss = loss_of(model, x)
        between = [p.detach() for p in parameters[index::2]]
        seen += [sums(views), sums(between)]
        loss.backward()
        after = [p.data for p in parameters[1 - index % 2 :: 3]]
        optimizer.step()
        for view in (*views, *between, *after):
            view.mul_(0.99)
        seen += [sums(views), sums(between), sums(after), sums(kept)]
        optimizer.zero_grad()
        kept += after[:1]
        del views, between, after
    return [*seen, *weights(model)]


@loop
def state_dicts_from_the_middle_of_a_step(model, optimizer, attach):
    attach()
    seen, held = [], []
    for index, x in enumerate(data()):
        loss = loss_of(model, x)
        if index == 1:
            held.append(model.state_dict())
        loss.backward()
        if index == 2:
            held.append(model.state_dict())
        optimizer.step()
        seen += [sums(state.values()) for state in held]
        optimizer.zero_grad()
    return seen


@loop
def another_model_with_the_same_memory(model, optimizer, attach):
    other, seen = blocks(), []
    for theirs, own in zip(other.parameters(), model.parameters(), strict=True):
        theirs.data = own.data
    attach()
    for x in data():
        with torch.no_grad():
            seen.append(float(other(x).sum()))
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@loop
def views_of_gradients(model, optimizer, attach):
    attach()
    seen, earlier = [], []
    for x in data():
        loss_of(model, x).backward()
        views = [p.grad.view(-1)[1:] for p in model.parameters()]
        views[0].mul_(2)
        optimizer.step()
        seen += [sums(views), sums(earlier)]
        earlier = views
        optimizer.zero_grad()
    return [*seen, *weights(model)]


@loop
def gradients_that_are_kept(model, optimizer, attach):
    attach()
    seen, kept = [], []
    for index, x in enumerate(data()):
        loss_of(model, x).backward()
        seen.append(sums(kept))
        kept += [p.grad for p in model.parameters()]
        optimizer.step()
        if index % 2:
            optimizer.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
        seen.append(sums(kept))
    return seen


@loop
def gradient_objects_that_are_zeroed(model, optimizer, attach):
    attach()
    seen, objects = [], []
    for x in data():
        loss_of(model, x).backward()
        objects = objects or [p.grad for p in model.parameters()]
        seen.append(sums(objects))
        optimizer.step()
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), objects, strict=True))
        for gradient in objects:
            gradient.zero_()
    return [*seen, *weights(model)]


@loop
def gradients_in_one_buffer(model, optimizer, attach):
    flat, seen, start = torch.zeros(sum(p.numel() for p in model.parameters())), [], 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    attach()
    for x in data():
        loss_of(model, x).backward()
        seen.append(float(flat.norm()))
        flat.mul_(0.5)
        optimizer.step()
        flat.zero_()
    return [*seen, *weights(model)]


@loop
def gradients_with_other_memory(model, optimizer, attach):
    attach()
    for index, x in enumerate(data()):
        loss_of(model, x).backward()
        for parameter in model.parameters():
            if index == 0:
                parameter.grad.data = parameter.grad.data.sign()
            elif index == 1:
                parameter.grad.set_(parameter.grad.sign())
            else:
                parameter.grad = parameter.grad.sign()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@loop
def hooks_that_hold_gradients(model, optimizer, attach):
    seen, held = [], []

    def hold(parameter: nn.Parameter) -> None:
        held.append(parameter.grad if parameter.ndim == 1 else parameter.grad[1:])

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hold)
    attach()
    for x in data():
        held.clear()
        loss_of(model, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen.append(sums(held))
        optimizer.step()
        seen.append(sums(held))
        optimizer.zero_grad()
    return [*seen, *weights(model)]


@loop
def views_of_optimizer_state(model, optimizer, attach):
    attach()
    seen, views = [], []
    for x in data():
        loss_of(model, x).backward()
        optimizer.step()
        if not views:
            views = [optimizer.state[p]["exp_avg"].view(-1)[1:] for p in model.parameters()]
        views[1].mul_(0.5)
        seen.append(sums(views))
        optimizer.zero_grad()
    return [*seen, *weights(model)]


@loop
def arrays(model, optimizer, attach):
    attach()
    seen, kept = [], []
    for x in data():
        kept.append(model[0][0].weight.detach().numpy())
        loss = loss_of(model, x)
        kept.append(model[1][0].weight.detach().numpy())
        loss.backward()
        kept += [model[2][0].weight.detach().numpy(), model[0][0].weight.grad.numpy()]
        optimizer.step()
        kept += [optimizer.state[model[3][0].weight]["exp_avg"].numpy(), model[1][0].weight.grad.numpy()]
        seen.append(sums(kept))
        kept[0] *= 0.9
        optimizer.zero_grad()
        seen.append(sums(kept))
    return [*seen, *weights(model)]


@loop
def shared_memory(model, optimizer, attach):
    model[:2].share_memory()
    attach()
    seen = []
    for index, x in enumerate(data()):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if index == 1:
            model.share_memory()
        seen.append(float(loss.detach()))
    assert all(p.is_shared() for p in model.parameters())
    return [*seen, *weights(model)]


@loop
def memory_of_numpy(model, optimizer, attach):
    given = [p.detach().clone().numpy() for p in model.parameters()]
    for parameter, array in zip(model.parameters(), given, strict=True):
        parameter.data = torch.from_numpy(array)
    attach()
    seen = []
    for x in data():
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(sums(given))
    return seen


@loop
def a_gradient_penalty(model, optimizer, attach):
    attach()
    seen = []
    for x in data():
        x.requires_grad_()
        y = model(x).sum(-1)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return [*seen, *weights(model)]


@loop
def other_weights_for_a_call(model, optimizer, attach):
    attach()
    seen = []
    for x in data():
        scaled = {name: 0.9 * p for name, p in model.named_parameters()}
        loss = functional_call(model, scaled, (x,)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return [*seen, *weights(model)]


@loop
def a_module_that_keeps_a_view_of_its_weight(model, optimizer, attach):
    seen: list[Any] = []
    first = model[0][0]

    def keep(module: nn.Module, *_: Any) -> None:
        if not hasattr(module, "view"):
            module.view = module.weight.detach().view(-1)

    first.register_forward_pre_hook(keep)
    attach()
    for x in data():
        loss_of(model, x).backward()
        optimizer.step()
        seen.append(float(first.view.sum()))
        first.view.mul_(0.9)
        optimizer.zero_grad()
    return [*seen, *weights(model)]


@functools.cache
def resident() -> Schedule:
    """As `joint` has it: some of what moves is on the device when a step begins, and when its forward ends."""
    stages = [lowtide.Stage(str(k), 1.0, 2.0, 8, 8, weight_bytes=80, optimizer_bytes=160) for k in range(NUM_BLOCKS)]
    chain = lowtide.Chain("", stages)
    schedule = lowtide.solve(chain, memory_budget=550, strategy="joint", bandwidth=100).schedule
    moved = {operation.value for operation in schedule.operations if isinstance(operation, Release)}
    assert {kind for kind, _ in moved & schedule.start.device} == {"w", "opt"}
    return schedule


# Made when they are needed: a solver is compiled for the last one, which is nothing for collecting tests to wait for.
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "stored": lambda: parking(storing(NUM_BLOCKS)),
    "recomputed": lambda: parking(recomputing(NUM_BLOCKS)),
    "resident": resident,
}


def ran(name: str, schedule: Callable[[], Schedule] | None) -> list[Any]:
    model = blocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plans: list[lowtide.Plan] = []

    def attach() -> None:
        if schedule is not None:
            plans.append(lowtide.attach(model, schedule(), optimizer=optimizer))

    return LOOPS[name](model, optimizer, attach)


@functools.lru_cache(maxsize=1)  # the schedules of a loop follow each other
def ran_plainly(name: str) -> list[Any]:
    return ran(name, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", LOOPS)
def test_every_name_sees_the_same_numbers(name, schedule):
    assert ran(name, SCHEDULES[schedule]) == ran_plainly(name)


def test_what_has_no_second_name_moves_again():
    """A view keeps a weight where it is only for as long as it is there."""
    model = blocks()
    optimizer = torch.optim.Adam(model.parameters())
    weight, x = model[0][0].weight, next(data())
    with lowtide.attach(model, parking(storing(NUM_BLOCKS)), optimizer=optimizer) as plan:
        home = weight.untyped_storage().data_ptr()
        views: list[torch.Tensor] = []
        handle = model[0].register_forward_hook(lambda *_: views.append(weight.detach()))
        loss = loss_of(model, x)
        assert weight.untyped_storage().data_ptr() != home  # its memory on the device has a name
        assert weight.untyped_storage().data_ptr() == views[0].untyped_storage().data_ptr()
        handle.remove()
        views.clear()
        loss.backward()
        assert weight.untyped_storage().data_ptr() == home
        assert plan.is_attached


def test_detaching_leaves_what_has_a_second_name_where_that_is():
    plain, model = blocks(), blocks()
    plain_optimizer, optimizer = (torch.optim.Adam(m.parameters()) for m in (plain, model))
    plan = lowtide.attach(model, parking(storing(NUM_BLOCKS)), optimizer=optimizer)
    view = model[0][0].weight.detach().view(-1)
    with pytest.warns(LowtideWarning, match="1 weights, gradients or tensors of optimizer state stay in host memory"):
        plan.detach()
    del plan
    gc.collect()
    for x in data():
        for each, its_optimizer in ((plain, plain_optimizer), (model, optimizer)):
            loss_of(each, x).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert torch.equal(view, plain[0][0].weight.detach().view(-1))
    assert weights(model) == weights(plain)


def test_other_memory_for_a_weight_is_refused():
    model = blocks()
    with lowtide.attach(model, SCHEDULES["stored"](), optimizer=torch.optim.Adam(model.parameters())):
        model[1][0].weight.data = model[1][0].weight.data * 0.5
        with pytest.raises(PlanError, match=r"parameter '1\.0\.weight' was moved or given other memory"):
            model(next(data()))


# What the optimizer's step looks like to others


def hooked_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, attach: Callable[[], None], *, are_late: bool
) -> list[Any]:
    """Hooks that go through the groups, from before the plan or after it."""
    seen: list[Any] = []

    def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        seen.append(("before", len(parameters_of(optimizer)), sums(gradients)))
        for gradient in gradients:
            gradient.div_(2)
        nn.utils.clip_grad_norm_(parameters_of(optimizer), 1e-2)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(("after", len(parameters_of(optimizer)), sums(p.detach() for p in parameters_of(optimizer))))
        with torch.no_grad():
            for parameter in parameters_of(optimizer):
                parameter.mul_(0.99)

    def register() -> None:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    if not are_late:
        register()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    attach()
    if are_late:
        register()
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: seen.append(len(parameters_of(o)))),
        register_optimizer_step_post_hook(lambda o, *_: seen.append(len(parameters_of(o)))),
    ]
    try:
        for x in data():
            loss_of(model, x).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    finally:
        for handle in handles:
            handle.remove()
    return [*seen, *weights(model)]


@pytest.mark.parametrize("are_late", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_see_one_step_with_all_groups(schedule, are_late):
    def run(base: Schedule | None) -> list[Any]:
        model = blocks()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        plans: list[lowtide.Plan] = []

        def attach() -> None:
            if base is not None:
                plans.append(lowtide.attach(model, base, optimizer=optimizer))

        return hooked_loop(model, optimizer, attach, are_late=are_late)

    assert run(SCHEDULES[schedule]()) == run(None)


def test_optimizers_of_one_class_with_plans_of_their_own():
    """Each is staged by itself, others of the class step as ever, and the class is as it was afterwards."""

    class Mine(torch.optim.SGD):
        pass

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        for x in data():
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = blocks()
        return model, Mine(model.parameters(), lr=1e-2, momentum=0.9)

    expected = train(*make())
    (first, first_optimizer), (second, second_optimizer), other = make(), make(), make()
    cells = [cell.cell_contents for cell in Mine.step.__closure__]
    one = lowtide.attach(first, SCHEDULES["stored"](), optimizer=first_optimizer)
    two = lowtide.attach(second, SCHEDULES["recomputed"](), optimizer=second_optimizer)
    assert train(first, first_optimizer) == expected
    assert train(*other) == expected
    one.detach()
    assert train(second, second_optimizer) == expected
    two.detach()
    assert [cell.cell_contents for cell in Mine.step.__closure__] == cells
    assert Mine.step not in stepping._all_followed


def test_a_plan_that_nobody_detaches_goes_with_its_model():
    model = blocks()
    optimizer = torch.optim.RAdam(model.parameters())
    step = torch.optim.RAdam.step
    lowtide.attach(model, SCHEDULES["stored"](), optimizer=optimizer)
    assert step in stepping._all_followed
    loss_of(model, next(data())).backward()
    optimizer.step()
    weight = weakref.ref(model[0][0].weight)
    del model, optimizer
    gc.collect()
    assert weight() is None
    assert step not in stepping._all_followed


def test_hooks_with_steps_in_backward():
    model, counted = blocks(), []
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_post_hook(lambda o, *_: counted.append(sum(len(g["params"]) for g in o.param_groups)))
    with lowtide.attach(model, stepping_in_backward(storing(NUM_BLOCKS)), optimizer=optimizer):
        for x in data():
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counted == [2 * NUM_BLOCKS] * NUM_STEPS
