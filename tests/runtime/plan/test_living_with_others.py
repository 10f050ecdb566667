"""What users do with a model while a plan is attached to it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from tests.runtime import models
from tests.runtime.models import SHAPE, N, every_schedule
from tests.runtime.schedules import mixed, offloading, recomputing
from tests.runtime.training import assert_equal, batches, gradients, train
from torch import nn
from torch.autograd import forward_ad

import lowtide
from lowtide import Backward, CaptureError, ExecutionError, Forward, Schedule
from lowtide.runtime.model.split import Split, StageSplit, Unit


def attached(schedule: Schedule) -> tuple[nn.Sequential, lowtide.Plan]:
    model = models.stages_of_every_kind()
    return model, lowtide.attach(model, schedule)


def one_step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model(x).square().mean().backward()
    found = dict(gradients(model))
    model.zero_grad()
    return found


# Modes


@every_schedule
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_without_training_nothing_is_kept(schedule, mode):
    model, plan = attached(schedule)
    plain = models.stages_of_every_kind()
    x = batches(SHAPE, 1)[0]
    for each in (model, plain):
        each.train(mode != "eval")
    context = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]
    with context():
        torch.manual_seed(0)
        got = model(x)
        torch.manual_seed(0)
        assert torch.equal(got, plain(x))
    assert plan.stats().recomputed_per_step == 0
    for each in (model, plain):
        each.train()
    assert_equal(train(model, batches(SHAPE, 2)), train(plain, batches(SHAPE, 2)))


@every_schedule
def test_a_training_forward_without_backward_updates_buffers_once(schedule):
    model, _ = attached(schedule)
    plain = models.stages_of_every_kind()
    x = batches(SHAPE, 1)[0]
    for each in (model, plain):
        torch.manual_seed(0)
        each(x)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


# The model object


@every_schedule
def test_names_state_and_copies(schedule):
    model, plan = attached(schedule)
    plain = models.stages_of_every_kind()
    assert type(model) is nn.Sequential
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
    expected = train(plain, batches(SHAPE, 2))
    for twin in twins:
        assert not {id(t) for t in twin.parameters()} & {id(t) for t in model.parameters()}
        assert_equal(train(twin, batches(SHAPE, 2)), expected)
    assert plan.stats().num_steps == 0
    assert_equal(train(model, batches(SHAPE, 2)), expected)


def test_detaching_leaves_the_model_as_it_was():
    model = models.stages_of_every_kind()
    before = [dict(vars(module)) for module in model.modules()]
    plan = lowtide.attach(model, recomputing(N))
    with plan:
        assert plan.is_attached
        output = model(batches(SHAPE, 1)[0]).sum()
    assert [dict(vars(module)) for module in model.modules()] == before
    output.backward()  # a graph that is still there works on
    assert not plan.is_attached


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_that_share_modules_detach_in_any_order(first):
    torch.manual_seed(0)
    shared = models.stages_of_every_kind()
    one, other = nn.Sequential(*shared), nn.Sequential(*shared)
    plans = [lowtide.attach(one, recomputing(N)), lowtide.attach(other, mixed(N))]
    x, twin = batches(SHAPE, 1)[0], models.stages_of_every_kind()
    for model in (one, other):
        assert_equal(one_step(model, x), one_step(twin, x))
    plans[first].detach()
    assert_equal(one_step((one, other)[1 - first], x), one_step(twin, x))
    plans[1 - first].detach()
    assert not any("_compiled_call_impl" in vars(module) for module in (*one.modules(), *other.modules()))


def test_a_part_of_a_model_with_a_plan_cannot_run_under_its_own():
    model, twin, x = nn.Sequential(models.stages_of_every_kind()), models.stages_of_every_kind(), batches(SHAPE, 1)[0]
    settings = {"memory_budget": "1GiB", "bandwidth": 0}
    outer = lowtide.fit(model, x, stages=["0.*"], **settings)
    inner = lowtide.fit(model[0], x, **settings)
    with pytest.raises(ExecutionError, match=r"a submodule with its own plan.*call plan.detach\(\) on one"):
        one_step(model, x)
    assert_equal(one_step(model[0], x), one_step(twin, x))  # by itself it can
    with pytest.raises(CaptureError, match=r"submodule '0' already has a plan"):
        lowtide.fit(model, x, **settings)
    inner.detach()
    assert_equal({name.removeprefix("0."): value for name, value in one_step(model, x).items()}, one_step(twin, x))
    outer.detach()


def test_a_plan_attached_around_a_part_with_its_own_cannot_run_either():
    model, twin, x = nn.Sequential(models.stages_of_every_kind()), models.stages_of_every_kind(), batches(SHAPE, 1)[0]
    stages = tuple(StageSplit(f"0.{k}", (Unit(f"0.{k}"),)) for k in range(N))
    inner = lowtide.attach(model[0], mixed(N))
    with lowtide.attach(model, recomputing(N), split=Split(stages)):
        with pytest.raises(ExecutionError, match=r"a submodule with its own plan.*call plan.detach\(\) on one"):
            one_step(model, x)
        inner.detach()
        assert_equal({name.removeprefix("0."): value for name, value in one_step(model, x).items()}, one_step(twin, x))


def test_attaching_twice_replaces_the_plan():
    model, first = attached(recomputing(N))
    second = lowtide.attach(model, mixed(N))
    assert not first.is_attached
    assert_equal(train(model, batches(SHAPE, 2)), train(models.stages_of_every_kind(), batches(SHAPE, 2)))
    assert second.stats().num_steps == 2
    first.detach()
    assert second.is_attached
    second.detach()
    assert "_compiled_call_impl" not in vars(model)


# Arguments and results


@dataclass
class Result:
    main: torch.Tensor
    side: list
    note: str


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = Enter(), Middle(), Leave()

    def forward(self, batch, *, scale=None, flags=(1, None)):
        state = self.enter(batch, flags, scale=scale)
        return self.leave(self.middle(state=state, other={"n": 3}))


class Enter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch, flags, scale=None):
        y = torch.tanh(self.linear(batch["x"]))
        return {"y": y if scale is None else y * scale, "pair": (batch["more"][0], flags)}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, state, other):
        return [self.linear(state["y"]).sigmoid() * state["pair"][0], other["n"], None]


class Leave(nn.Module):
    def forward(self, things):
        return Result(things[0].exp(), [things[0] * 2, None], f"{things[1]}")


def test_tensors_inside_containers_and_keywords():
    operations = [Forward(1, "keep"), Forward(2, "drop"), Forward(3, "all"), Backward(3)]
    operations += [Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1)]
    split = lowtide.runtime.model.split.Split(
        tuple(
            lowtide.runtime.model.split.StageSplit(p, (lowtide.runtime.model.split.Unit(p),))
            for p in ("enter", "middle", "leave")
        )
    )

    def run(plan: bool):
        torch.manual_seed(0)
        model = Wrapping()
        if plan:
            lowtide.attach(model, Schedule("", operations), split=split)
        more, scale = torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        result = model({"x": torch.ones(2, 4), "more": [more]}, scale=scale, flags=(1, None))
        assert type(result) is Result
        assert result.note == "3"
        assert result.side[1] is None
        (result.main.sum() + result.side[0].sum()).backward()
        return [result.main.detach(), more.grad, scale.grad, *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


# Graphs


@every_schedule
def test_going_through_the_graph_again(schedule):
    x = batches(SHAPE, 1)[0]

    def twice(model):
        torch.manual_seed(3)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return dict(gradients(model))

    model, _ = attached(schedule)
    assert_equal(twice(model), twice(models.stages_of_every_kind()))


@every_schedule
def test_gradients_of_gradients(schedule):
    x = batches(SHAPE, 1)[0]

    def penalty(model):
        torch.manual_seed(3)
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(y).square().mean(), y, create_graph=True)
        g.square().sum().backward()
        return {**dict(gradients(model)), "x": y.grad}

    def smooth():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(N)))

    model = smooth()
    lowtide.attach(model, schedule)
    assert_equal(penalty(model), penalty(smooth()))


@every_schedule
def test_two_forwards_before_their_backwards(schedule):
    a, b = batches(SHAPE, 2)

    def both(model):
        torch.manual_seed(3)
        first, second = model(a), model(b)
        second.sum().backward()
        first.square().sum().backward()
        return {**dict(gradients(model)), **{n: t.clone() for n, t in model.named_buffers()}}

    def make():
        torch.manual_seed(0)
        model = models.stages_of_every_kind()
        model[3] = nn.BatchNorm1d(models.WIDTH)  # two forwards change a power iteration's buffer: see below
        return model

    model = make()
    lowtide.attach(model, schedule)
    assert_equal(both(model), both(make()))


@every_schedule
def test_a_buffer_changed_by_a_second_forward_is_not_taken_for_the_first_one(schedule):
    a, b = batches(SHAPE, 2)
    model, _ = attached(schedule)
    for each in (model, models.stages_of_every_kind()):
        first = each(a)
        each(b)
        if each is model and schedule.strategy != "offload":  # the stage runs again from its own snapshot
            first.sum().backward()
        else:
            with pytest.raises(RuntimeError, match=r"changed in place|inplace operation"):
                first.sum().backward()


@every_schedule
def test_parts_of_the_graph(schedule):
    """First the gradients of the last stages alone, then of all."""
    x = batches(SHAPE, 1)[0]

    def parts(model):
        torch.manual_seed(3)
        loss = model(x).square().mean()
        last = torch.autograd.grad(loss, list(model[-1].parameters()), retain_graph=True)
        first = torch.autograd.grad(loss, list(model[0].parameters()))
        return dict(enumerate((*last, *first)))

    model, _ = attached(schedule)
    assert_equal(parts(model), parts(models.stages_of_every_kind()))


@every_schedule
def test_an_output_dropped_without_backward_frees_everything(schedule):
    model, _ = attached(schedule)
    x = batches(SHAPE, 1)[0]
    seen: list[weakref.ref] = []
    handle = model[2].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    steps = len([o for o in gc.get_objects() if type(o).__name__ == "Step"])
    try:
        for _ in range(3):
            output = model(x)
            del output
        assert len([o for o in gc.get_objects() if type(o).__name__ == "Step"]) == steps
        assert all(reference() is None for reference in seen)
        output = model(x).sum()
        output.backward()
        assert all(reference() is None for reference in seen)
    finally:
        gc.enable()
        handle.remove()


class Warming(nn.Module):
    """Counts its calls, as modules with a warm-up do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls = nn.Linear(models.WIDTH, models.WIDTH), 0

    def forward(self, x):
        self.num_calls += 1
        return torch.tanh(self.linear(x)) * (1.0 if self.num_calls < 3 else 0.5)


@pytest.mark.parametrize("schedule", [recomputing(4), mixed(4)], ids=lambda s: s.strategy)
def test_a_module_that_counts_its_calls_counts_each_step_once(schedule):
    torch.manual_seed(0)
    model = nn.Sequential(*(Warming() for _ in range(4)))
    plain = copy.deepcopy(model)
    lowtide.attach(model, schedule)
    assert_equal(train(model, batches(SHAPE, 4)), train(plain, batches(SHAPE, 4)))
    assert [module.num_calls for module in model] == [4] * 4


# Other parameters


@every_schedule
def test_parameters_that_stand_in_for_a_call(schedule):
    others = {
        name: (p.detach() * 0.9 + 0.01).requires_grad_() for name, p in models.stages_of_every_kind().named_parameters()
    }

    def gradients_of(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        output = torch.func.functional_call(model, others, (batches(SHAPE, 1)[0],))
        return list(torch.autograd.grad(output.square().sum(), list(others.values())))

    expected = gradients_of(models.stages_of_every_kind())
    model, _ = attached(schedule)
    registered = list(model.parameters())
    got = gradients_of(model)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), registered, strict=True))


def test_a_transform_of_torch_func_is_refused():
    model, _ = attached(recomputing(N))
    with pytest.raises(ExecutionError, match=r"torch\.func"):
        torch.func.grad(lambda x: model(x).sum())(batches(SHAPE, 1)[0])


def test_forward_mode_differentiation_is_refused():
    (model, _), plain = attached(recomputing(N)), models.stages_of_every_kind()
    x = batches(SHAPE, 1)[0]
    with forward_ad.dual_level(), pytest.raises(ExecutionError, match="forward-mode differentiation"):
        model(forward_ad.make_dual(x, torch.ones_like(x)))
    assert_equal(train(model, batches(SHAPE, 2)), train(plain, batches(SHAPE, 2)))
    model.eval()
    with forward_ad.dual_level():  # without a plan, as ever
        assert forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent is not None


# Hooks


@every_schedule
def test_hooks_still_run_and_can_tell(schedule):
    calls: dict[bool, int] = {True: 0, False: 0}
    grads: list[str] = []

    def count(*_):
        calls[lowtide.is_recomputing()] += 1

    def hooked():
        model = models.stages_of_every_kind()
        model[2].register_forward_hook(
            lambda *_: calls.__setitem__(lowtide.is_recomputing(), calls[lowtide.is_recomputing()] + 1)
        )
        model[2].register_full_backward_hook(lambda *_: grads.append("module"))
        model[0].weight.register_hook(lambda g: grads.append("weight"))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: grads.append("accumulated"))
        return model

    expected = one_step(hooked(), batches(SHAPE, 1)[0])
    plain_calls, plain_grads = dict(calls), list(grads)
    calls.update({True: 0, False: 0})
    grads.clear()
    model = hooked()
    lowtide.attach(model, schedule)
    assert_equal(one_step(model, batches(SHAPE, 1)[0]), expected)
    assert calls[False] == plain_calls[False] == 1
    assert calls[True] == (0 if schedule.strategy == "offload" else 1)
    assert grads == plain_grads
    assert not lowtide.is_recomputing()


# Weights


def test_tied_frozen_and_adapted_weights():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(N)))
        model[5][0].weight = model[1][0].weight  # tied
        model[3][0].weight.requires_grad_(False)  # frozen in the middle
        for p in (*model[0].parameters(), *model[4].parameters()):
            p.requires_grad_(False)
        return model

    for schedule in (recomputing(N), offloading(N), mixed(N)):
        model = make()
        lowtide.attach(model, schedule)
        for input_grads in (False, True):
            inputs = batches(SHAPE, 3)
            assert_equal(train(model, inputs, input_grads=input_grads), train(make(), inputs, input_grads=input_grads))
            model.load_state_dict(make().state_dict())


def test_a_frozen_prefix_is_not_run_again_for_its_own_backward():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for p in model[:2].parameters():
        p.requires_grad_(False)
    calls = [0] * 4
    for k in range(4):
        model[k].register_forward_hook(lambda *_, k=k: calls.__setitem__(k, calls[k] + 1))
    operations = [Forward(1, "keep"), Forward(2, "keep"), Forward(3, "drop"), Forward(4, "all"), Backward(4)]
    operations = [Forward(1, "keep"), Forward(2, "keep"), Forward(3, "keep"), Forward(4, "all"), Backward(4)]
    operations += [Forward(3, "all"), Backward(3), Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)]
    lowtide.attach(model, Schedule("", operations))
    model(torch.randn(3, 8)).sum().backward()
    assert calls == [1, 1, 2, 1]


# Autocast and scaling


@every_schedule
def test_autocast(schedule):
    x = batches(SHAPE, 1)[0]

    def run(model):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(x)
            loss = model(x).float().square().mean()
        loss.backward()
        return dict(gradients(model))

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(N)))
        model[4][0].weight = model[2][0].weight
        return model

    model = make()
    lowtide.attach(model, schedule)
    assert_equal(run(model), run(make()))


@every_schedule
def test_grad_scaler_with_an_infinite_gradient(schedule):
    inputs = batches(SHAPE, 3)

    def run(model):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        numbers = {}
        for index, x in enumerate(inputs):
            loss = model(x).square().mean() * (float("inf") if index == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            numbers[f"scale {index}"] = torch.tensor(scaler.get_scale())
            numbers.update({f"{index} {n}": p.detach().clone() for n, p in model.named_parameters()})
        return numbers

    model, _ = attached(schedule)
    assert_equal(run(model), run(models.stages_of_every_kind()))


# Threads


def test_a_second_thread_is_refused():
    model, _ = attached(recomputing(N))
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        go_on.wait(10)

    handle = model[3].register_forward_hook(wait)
    x = batches(SHAPE, 1)[0]
    thread = threading.Thread(target=lambda: model(x))
    thread.start()
    assert inside.wait(10)
    handle.remove()
    with pytest.raises(ExecutionError, match="another thread"):
        model(x)
    go_on.set()
    thread.join()
    one_step(model, x)


def test_calling_the_model_inside_itself():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, depth=1):
            y = self.b(self.a(x))
            return y + self(y, depth - 1) if depth else y

    split = Split(tuple(StageSplit(path, (Unit(path),)) for path in ("a", "b")))
    torch.manual_seed(0)
    model = Recursive()
    twin = copy.deepcopy(model)
    operations = [Forward(1, "keep"), Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)]
    lowtide.attach(model, Schedule("", operations), split=split)
    x = torch.randn(2, 4)
    assert_equal(one_step(model, x), one_step(twin, x))


@every_schedule
def test_a_hook_that_makes_more_tensors_in_each_step(schedule):
    def hooked() -> nn.Module:
        model = models.stages_of_every_kind()
        kept: list[torch.Tensor] = []
        model.register_forward_pre_hook(lambda *_: kept.extend(torch.zeros(1) + 1 for _ in range(1 + len(kept))))
        return model

    expected = train(hooked(), batches(SHAPE, 4))
    model = hooked()
    with lowtide.attach(model, schedule):
        assert_equal(train(model, batches(SHAPE, 4)), expected)
