"""What goes wrong is told, with names, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from tests.looping import looped
from tests.runtime import models
from tests.runtime.models import SHAPE, N, every_schedule
from tests.runtime.schedules import random_schedule, recomputing
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide import Backward, ExecutionError, Forward, Offload, PlanError, Prefetch, Release, Schedule, ScheduleError
from lowtide.runtime.model.split import Split, StageSplit, Unit


class Failing(nn.Module):
    """Raises when told to: at which call, and whether in forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)
        self.error: BaseException | None = None
        self.when = ""

    def forward(self, x):
        if self.error is not None:
            if self.when == ("recomputation" if lowtide.is_recomputing() else "forward"):
                raise self.error
            if self.when == "backward" and not lowtide.is_recomputing():
                x = x * 1
                x.register_hook(self._fail)
        return self.linear(x).tanh()

    def _fail(self, gradient):
        raise self.error


def failing_model() -> nn.Sequential:
    model = models.stages_of_every_kind()
    torch.manual_seed(1)
    model[4] = Failing()
    return model


class OutOfMemoryError(RuntimeError):
    pass


@every_schedule
@pytest.mark.parametrize("when", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), OutOfMemoryError()], ids=["own", "ctrl-c", "oom"]
)
def test_the_original_error_and_the_next_step_as_plain(schedule, when, error):
    if when == "recomputation" and schedule.strategy == "offload":
        pytest.skip("nothing runs again there")
    model, plain = failing_model(), failing_model()
    lowtide.attach(model, schedule)
    x = batches(SHAPE, 1)[0]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model[4].error, model[4].when = error, when
    with pytest.raises(type(error)) as caught:
        model(x).square().mean().backward()
    assert caught.value is error
    assert not lowtide.is_recomputing()
    model[4].error = None
    model.zero_grad()
    model.load_state_dict(state)
    assert_equal(train(model, batches(SHAPE, 3)), train(plain, batches(SHAPE, 3)))


@every_schedule
def test_a_failed_step_keeps_nothing(schedule):
    model = failing_model()
    lowtide.attach(model, schedule)
    counts = []
    for _ in range(5):
        model[4].error, model[4].when = ValueError("mine"), "forward"
        with pytest.raises(ValueError, match="mine"):
            model(batches(SHAPE, 1)[0])
        model[4].error = None  # its traceback holds the frames that it went through
        gc.collect()
        counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert counts[1:] == counts[:1] * 4


class FailingLate(nn.Module):
    """Raises when something was saved already: in the first run, or when it runs again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        notes: list[weakref.ref] = []  # not the module's own: what a recomputation appends to such a list is taken out
        self.recall = lambda: notes

    @property
    def seen(self) -> list[weakref.ref]:
        return self.recall()

    def forward(self, x):
        saved = x.exp()
        self.seen.append(weakref.ref(saved))
        y = saved.sin()
        if lowtide.is_recomputing() == self.again:
            raise ValueError("mine")
        return y


@pytest.mark.parametrize("again", [False, True])
def test_a_stage_that_is_to_be_moved_and_fails_frees_what_it_saved_without_the_collector(again):
    model = nn.Sequential(nn.Linear(4, 4), FailingLate(again), nn.Linear(4, 4))
    moved = [Offload("abar", 2), Release("abar", 2), Prefetch("abar", 2)]
    first = [Forward(1, "keep"), Forward(2, "keep" if again else "all"), Forward(3, "all")]
    then = [Backward(3), Forward(2, "all"), *moved] if again else [*moved, Backward(3)]
    lowtide.attach(model, Schedule("by hand", [*first, *then, Backward(2), Forward(1, "all"), Backward(1)]))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            model(torch.randn(2, 4)).sum().backward()
        assert len(model[1].seen) == 1 + again
        assert all(reference() is None for reference in model[1].seen)
    finally:
        gc.enable()


# In-place changes


@every_schedule
@pytest.mark.parametrize("name", ["0.weight", "1.1.weight", "2.project.weight", "7.weight"])
def test_a_weight_changed_before_backward_is_named(schedule, name):
    model = models.stages_of_every_kind()
    lowtide.attach(model, schedule)
    loss = model(batches(SHAPE, 1)[0]).sum()
    with torch.no_grad():
        model.get_parameter(name).add_(1)
    with pytest.raises(ExecutionError, match=f"'{name}'"):
        loss.backward()


def test_where_everything_is_stored_changes_are_as_in_plain_training():
    """Autograd refuses a change of what it has saved, and no other."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lowtide.attach(model, Schedule("", [Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1)]))
    for changed, is_refused in ((model[1].weight, True), (model[1].bias, False)):
        loss = model(torch.randn(2, 4)).sum()
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace") if is_refused else contextlib.nullcontext():
            loss.backward()


@pytest.mark.parametrize("strategy", ["recompute", "store all"])
def test_an_input_changed_before_backward_is_told(strategy):
    n = N
    store_all = Schedule("", [*(Forward(k, "all") for k in range(1, n + 1)), *(Backward(k) for k in range(n, 0, -1))])
    model = models.stages_of_every_kind()
    lowtide.attach(model, recomputing(N) if strategy == "recompute" else store_all)
    x = batches(SHAPE, 1)[0]
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"model's input.*changed in place|modified by an inplace"):
        loss.backward()


def test_a_kept_activation_changed_before_backward_is_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    operations = [Forward(1, "keep"), Forward(2, "keep"), Forward(3, "all"), Backward(3)]
    operations += [Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)]
    lowtide.attach(model, Schedule("", operations))
    kept = []
    model[0].register_forward_hook(lambda m, a, out: kept.append(out))
    loss = model(torch.randn(2, 4)).sum()
    with torch.no_grad():
        kept[0].mul_(2)
    with pytest.raises(ExecutionError, match=r"output of stage '0'.*changed in place"):
        loss.backward()


def test_a_stage_that_works_in_place_on_its_input():
    """Where it is not run again it works as always; where it is, it is refused."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))

    operations = [*(Forward(k, "all") for k in (1, 2, 3)), *(Backward(k) for k in (3, 2, 1))]
    model = make()
    lowtide.attach(model, Schedule("", operations))
    assert_equal(train(model, batches(SHAPE, 2)), train(make(), batches(SHAPE, 2)))
    operations = [Forward(1, "keep"), Forward(2, "keep"), Forward(3, "all"), Backward(3)]
    operations += [Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)]
    lowtide.attach(model, Schedule("", operations))
    with pytest.raises(ExecutionError, match="'1' changes its input in place"):
        model(batches(SHAPE, 1)[0]).sum().backward()


# A recomputation that differs


class Fickle(nn.Module):
    """Does something else each time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = itertools.count()  # a number, or a list, would be put back before a repeated run

    def forward(self, x):
        again = next(self.calls) % 2 == 1
        if self.kind == "number":
            return x.exp().sin() if again else x.exp()
        if self.kind == "dtype":
            return (x.double().exp() if again else x.exp()).float()
        if self.kind == "shape":
            return (x[:1] if again else x).exp().sum(0, keepdim=True) + torch.zeros_like(x)
        return x.exp() * (2 if again else 1)  # "value"


@pytest.mark.parametrize("kind", ["number", "dtype", "shape"])
def test_a_recomputation_that_differs_is_told(kind):
    model = nn.Sequential(nn.Linear(4, 4), Fickle(kind), nn.Linear(4, 4))
    lowtide.attach(model, recomputing(3))  # the two stages that are let go together run as one
    with pytest.raises(ExecutionError, match=r"stage '0 \+ 1'.* the first time"):
        model(torch.randn(3, 4)).sum().backward()


def test_values_are_compared_in_strict_mode():
    def make(fickle):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), fickle, nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))

    model = make(Fickle("value"))
    lowtide.attach(model, recomputing(5), strict=True)
    with pytest.raises(ExecutionError, match=r"stage '2' .*different values"):
        model(torch.randn(3, 4)).sum().backward()
    model = make(nn.Tanh())
    lowtide.attach(model, recomputing(5), strict=True)
    assert_equal(train(model, batches((6, 4), 3)), train(make(nn.Tanh()), batches((6, 4), 3)))


class ReadsVariance(nn.Module):
    """Multiplies by the statistics that its own BatchNorm has just changed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x) * self.norm.running_var


def test_strict_mode_takes_statistics_that_are_read():
    """They are put back when the module is recomputed."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), ReadsVariance(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    with lowtide.attach(make(), recomputing(5), strict=True) as plan:
        inputs = batches((6, 4), 3)
        assert_equal(train(plan.model, inputs), train(make(), inputs))


@looped("seed", range(4))
def test_strict_mode_takes_what_repeats_itself(seed):
    """Statistics of BatchNorm, dropout, buffers that change: all are as they were in the first run."""
    schedule = random_schedule(8, seed, drops=0.0)
    inputs = batches(SHAPE, 3)
    with lowtide.attach(models.stages_of_every_kind(), schedule, strict=True) as plan:
        assert_equal(train(plan.model, inputs), train(models.stages_of_every_kind(), inputs))
        assert plan.stats().recomputed_per_step > 0


def test_a_backward_inside_the_forward_is_told():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            energy = self.b(self.a(x).tanh()).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model = Forces()
    split = Split((StageSplit("a", (Unit("a"),)), StageSplit("b", (Unit("b"),))))
    operations = [
        Forward(1, "keep"),
        Forward(2, "keep"),
        Forward(2, "all"),
        Backward(2),
        Forward(1, "all"),
        Backward(1),
    ]
    lowtide.attach(model, Schedule("", operations), split=split)
    with pytest.raises(ExecutionError, match="before the model's forward had ended"):
        model(torch.randn(2, 4, requires_grad=True))


# Attaching what does not fit


def test_schedules_that_do_not_fit_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(ScheduleError, match="backward 1"):
        lowtide.attach(model, Schedule("", [Forward(1, "all"), Forward(2, "all"), Backward(2)]))
    with pytest.raises(ScheduleError, match=r"is for 3 stages, but the model has 2"):
        lowtide.attach(model, recomputing(3))
    with pytest.raises(PlanError, match="split="):
        lowtide.attach(models.tangle(), recomputing(3))
    split = Split((StageSplit("0", (Unit("0"),)), StageSplit("middle", (Unit("middle"),))))
    with pytest.raises(PlanError, match="no submodule 'middle'"):
        lowtide.attach(model, recomputing(2), split=split)
    weights = Schedule.from_dict(
        {
            "format": "lowtide.schedule/1",
            "strategy": "",
            "operations": [["forward", 1, "all"], ["forward", 2, "all"], ["backward", 2], ["backward", 1]],
            "manages": ["w"],
            "start": {"device": [["w", 1], ["w", 2]], "host": []},
        }
    )
    with pytest.raises(PlanError, match="updates weights inside backward without saying when"):
        lowtide.attach(model, weights)
    assert "_compiled_call_impl" not in vars(model)
    assert "_compiled_call_impl" not in vars(model[0])
