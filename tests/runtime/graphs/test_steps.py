"""When steps are captured, when they are replayed, and when they run as ever; what a capture does needs a GPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from tests.runtime.schedules import recomputing
from torch import nn

import lowtide
from lowtide.runtime.execute.execution import Execution
from lowtide.runtime.graphs import step as graph_step
from lowtide.runtime.graphs import steps as graph_steps
from lowtide.runtime.graphs.steps import GraphedSteps
from lowtide.runtime.plan.attach import split_for
from lowtide.runtime.transfer.file_tier import FileTier

WIDTH = 4


class FakePool:
    def __init__(self) -> None:
        self.steps: list[FakeStep] = []
        self.reserved_bytes = 0
        self.is_busy = False

    def measure(self) -> None:
        self.reserved_bytes = 100 if self.steps else 0


class FakeStep:
    """Stands for two graphs: a replay runs the schedule."""

    def __init__(self, execution, plain, args, kwargs, *, wanted, around_backward, pool) -> None:
        self._run = lambda *given: execution.call(plain, *given)
        execution.call(plain, args, kwargs, is_captured=True)
        self.wanted = wanted
        self.leaves = list(execution.machine.model.parameters())
        self.gradients = [torch.zeros_like(parameter) for parameter in self.leaves]
        self.is_current = True
        self.num_calls = 0
        pool.steps.append(self)
        pool.measure()

    def call(self, args, kwargs):
        self.num_calls += 1
        return self._run(args, kwargs)


@dataclass
class Setting:
    model: nn.Module
    steps: GraphedSteps
    pool: FakePool

    def step(self, x: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
        result = self.model(torch.ones(2, WIDTH) if x is None else x, **kwargs)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        return result

    @property
    def num_captured(self) -> int:
        return len(self.pool.steps)


def setting(model: nn.Module | None = None, **options) -> Setting:
    torch.manual_seed(0)
    model = model or nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    execution = Execution(model, split_for(model, None), recomputing(len(model)), None, FileTier())
    pool = FakePool()
    steps = GraphedSteps(execution, pool, **{"make": FakeStep, **options})

    def call(plain, args, kwargs):
        return plain(*args, **kwargs) if execution.is_busy else steps.call(plain, args, kwargs)

    execution.install(call)
    return Setting(model, steps, pool)


def test_a_step_is_captured_after_two_and_replayed_from_then_on():
    s = setting()
    replayed = []
    for _ in range(5):
        s.step()
        replayed.append(s.steps.num_replayed)
    assert replayed == [0, 0, 1, 2, 3]
    assert s.num_captured == 1
    assert s.pool.steps[0].wanted == [True]
    assert s.steps.notes == ("steps are replayed as CUDA graphs; their memory, 100 B, stays reserved between steps",)


def test_each_shape_has_its_own_graph_up_to_a_number():
    s = setting()
    for _ in range(3):
        for rows in range(1, graph_steps.MOST_GRAPHS + 3):
            s.step(torch.ones(rows, WIDTH))
    assert s.num_captured == graph_steps.MOST_GRAPHS
    assert s.steps.num_replayed == graph_steps.MOST_GRAPHS
    assert not s.steps.refusal


def test_one_shape_too_many_without_room_for_both_ends_it():
    s = setting(spare_bytes=0)
    for _ in range(3):
        s.step(torch.ones(1, WIDTH))
    for rows in range(2, graph_steps.MOST_GRAPHS + 1):
        s.step(torch.ones(rows, WIDTH))
    s.step(torch.ones(1, WIDTH))
    assert not s.steps.refusal
    s.step(torch.ones(graph_steps.MOST_GRAPHS + 1, WIDTH))
    assert "pad batches" in s.steps.refusal


def test_graphs_make_room_for_a_step_that_runs_as_ever():
    s = setting(spare_bytes=50)
    for _ in range(3):
        s.step()
    s.pool.steps.clear()
    s.step(torch.ones(3, WIDTH))
    assert s.steps.held_bytes == 0
    s.step()
    assert s.steps.num_replayed == 2
    assert s.num_captured == 1  # at once: what a step does is known


class Keeping(nn.Linear):
    def __init__(self, change) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change
        self.count = 0
        self.seen: list[float] = []
        self.config = {"loss": None}

    def forward(self, x):
        self.change(self)
        return super().forward(x)


def counts(module: Keeping) -> None:
    module.count += 1


def appends(module: Keeping) -> None:
    module.seen.append(1.0)


def replaces_data(module: Keeping) -> None:
    module.weight.data = module.weight.data.clone()


def adds(module: Keeping) -> None:
    setattr(module, f"step_{len(vars(module))}", 1)


def sets_another_type(module: Keeping) -> None:
    module.config["loss"] = "known" if module.config["loss"] is None else None


def draws(module: Keeping) -> None:
    random.random()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (counts, "'1.count'"),
        (appends, "'1.seen'"),
        (adds, "'1.step_"),
        (sets_another_type, "'1.config.loss'"),
        (replaces_data, "data of a parameter"),
        (draws, "random numbers on the host"),
    ],
)
def test_what_a_forward_does_on_the_host_is_not_left_out(change, reason):
    s = setting(nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping(change), nn.Linear(WIDTH, WIDTH)))
    for _ in range(4):
        s.step()
    assert reason in s.steps.refusal
    assert s.num_captured == 0
    assert s.model[1].count in (0, 4)
    assert any(reason in note for note in s.steps.notes)


def sets_once(module: Keeping) -> None:
    module.count = "known"


def test_what_the_first_forward_alone_sets_is_left_as_it_is():
    s = setting(nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping(sets_once), nn.Linear(WIDTH, WIDTH)))
    for _ in range(3):
        s.step()
    assert s.steps.num_replayed == 0  # two that set nothing come first
    s.step()
    assert not s.steps.refusal
    assert s.steps.num_replayed == 1
    assert s.model[1].count == "known"


def test_what_every_second_forward_sets_is_not_left_out():
    turns = itertools.cycle([1, 0])
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping(lambda module: counts(module) if next(turns) else None))
    s = setting(model)
    for _ in range(4):
        s.step()
    assert "'1.count'" in s.steps.refusal
    assert model[1].count == 2


@pytest.mark.parametrize("is_global", [True, False])
def test_hooks_are_not_left_out(is_global):
    s, seen = setting(), []
    if is_global:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    else:
        handle = s.model[1].register_forward_hook(lambda *_: seen.append(1))
    for _ in range(4):
        s.step()
    handle.remove()
    assert "hook" in s.steps.refusal
    assert len(seen) >= 4


def test_hooks_that_come_later_are_not_left_out():
    s, seen = setting(), []
    for _ in range(4):
        s.step()
    s.model[1].register_forward_hook(lambda *_: None if lowtide.is_recomputing() else seen.append(1))
    for _ in range(2):
        s.step()
    assert len(seen) == 2
    assert s.steps.num_replayed == 2


def test_settings_that_change_are_captured_anew():
    s = setting(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.5), nn.Linear(WIDTH, WIDTH)))
    for slope in (0.5, 0.1):
        s.model[1].negative_slope = slope
        for _ in range(4):
            s.step()
    assert s.num_captured == 2
    assert s.steps.num_replayed == 3  # after a change one step shows it, and two more are watched


class Batch:
    """An object of the user's own."""


class TakesAnything(nn.Sequential):
    def forward(self, x, other=None):
        return super().forward(x)


@pytest.mark.parametrize("other", [Batch(), {"a": Batch()}])
def test_arguments_that_cannot_be_followed_are_refused(other):
    s = setting(TakesAnything(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    s.step(other=other)
    assert "object of Batch" in s.steps.refusal


def test_numbers_and_words_among_arguments_have_their_own_graphs():
    s = setting(TakesAnything(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    for _ in range(3):
        for other in (1, 2, "a", (1.5, None)):
            s.step(other=other)
    assert s.num_captured == 4


def test_several_backwards_of_one_forward_are_not_captured():
    s = setting()
    for _ in range(4):
        result = s.model(torch.ones(2, WIDTH))
        result[0].sum().backward(retain_graph=True)
        result[1].sum().backward()
    assert "more than once" in s.steps.refusal


def test_a_backward_that_is_differentiated_is_not_captured():
    s = setting()
    x = torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(4):
        torch.autograd.grad(s.model(x).sum(), x, create_graph=True)
    assert "create_graph" in s.steps.refusal


class FailsWhenCaptured(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls: list[int] = []
        self.fails = False

    def forward(self, x):
        if self.fails:
            self.calls.append(1)
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().forward(x)


def test_a_failed_capture_says_where_and_changes_nothing():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), FailsWhenCaptured(), nn.Linear(WIDTH, WIDTH))

    def make(execution, plain, args, kwargs, **_):
        torch.rand(1)
        model[1].fails = True
        try:
            execution.call(plain, args, kwargs, is_captured=True)
        finally:
            model[1].fails = False

    s = setting(model, make=make)
    s.step()
    s.step()
    state = torch.get_rng_state()
    s.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert model[1].calls == []
    assert "not permitted when stream is capturing (module '1', test_steps.py, line" in s.steps.refusal
    s.step()
    assert s.steps.num_replayed == 0


def test_a_forward_whose_backward_may_still_come_is_not_written_over():
    s = setting()
    for _ in range(3):
        s.step()
    s.pool.is_busy = True
    s.step()
    assert s.steps.num_replayed == 1


def test_gradients_move_out_of_the_way_and_kept_ones_are_not_written_over():
    s = setting()
    for _ in range(3):
        s.step()
    leaf, memory = s.pool.steps[0].leaves[0], s.pool.steps[0].gradients[0]
    leaf.grad = memory.detach()
    s.step()
    assert s.steps.num_replayed == 2
    assert leaf.grad.data_ptr() != memory.data_ptr()
    leaf.grad = memory.detach()
    kept = leaf.grad
    s.step()
    assert kept is leaf.grad  # it was moved itself
    assert kept.data_ptr() != memory.data_ptr()
    leaf.grad = memory.detach()
    kept = leaf.grad[0]
    s.step()
    assert s.steps.num_replayed == 3  # somebody has a part of it
    assert kept.data_ptr() == memory.data_ptr()


# Parts of a captured step that need no GPU


def test_arguments_keep_their_strides():
    base = torch.arange(24.0)
    for given in (
        base.view(4, 6).t(),
        base.view(4, 6)[:, ::2],
        base[:4].expand(3, 4),
        base[2:6],
        torch.tensor(3.0),
        base[:0],
        base.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ):
        own = graph_step._Input(given, given.device)
        assert own.tensor.stride() == given.stride()
        assert torch.equal(own.tensor, given)
        assert given.numel() == 0 or own.tensor.data_ptr() != given.data_ptr()
        own.fill(given + 0 if given.is_contiguous() else given)
        assert torch.equal(own.tensor, given)


def test_gradients_that_share_memory_are_told_apart():
    shared, own = torch.ones(3), torch.ones(2)
    held = torch.ones(4)
    found = graph_step._apart((shared, shared, own, None, held.view(2, 2)))
    assert len({t.data_ptr() for t in found if t is not None} | {shared.data_ptr(), held.data_ptr()}) == 5
    assert found[3] is None


def test_accumulators_are_made_anew():
    parameter = nn.Parameter(torch.ones(3))
    loss = (2 * parameter).sum()
    version, address = parameter._version, parameter.data_ptr()
    before = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    graph_step._forget_accumulators([parameter])
    other = (3 * parameter).sum()
    assert other.grad_fn.next_functions[0][0].next_functions[0][0] is not before
    assert (parameter._version, parameter.data_ptr()) == (version, address)
    loss.backward()
    other.backward()
    assert torch.equal(parameter.grad, torch.full((3,), 5.0))


def test_cuda_graphs_need_cuda():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(lowtide.PlanError, match="needs a model on a CUDA device, but this one is on 'cpu'"):
        lowtide.fit(model, torch.ones(2, WIDTH), memory_budget="1GiB", cuda_graphs=True)
    with pytest.raises(lowtide.PlanError, match="needs a model on a CUDA device"):
        lowtide.attach(model, recomputing(2), cuda_graphs=True)
    with pytest.raises(lowtide.PlanError, match="expected True, False or 'auto'"):
        lowtide.fit(model, torch.ones(2, WIDTH), memory_budget="1GiB", cuda_graphs="yes")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    lowtide.fit(model, torch.ones(256, 64), memory_budget="1GiB", cuda_graphs="auto", bandwidth=0).detach()
