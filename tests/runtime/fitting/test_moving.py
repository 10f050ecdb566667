"""`fit` where weights, gradients and optimizer state do not fit the budget: they live on the host."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.report.chains import data_of
from tests.runtime.models import residuals
from tests.runtime.training import Numbers, assert_equal, seed_all
from torch import nn

import lowtide
from lowtide import Backward, Offload, Prefetch, Release, Update
from lowtide.errors import ExecutionError, InfeasibleBudgetError, PlanError
from lowtide.runtime.execute.checks import Checks
from lowtide.runtime.execute.stepping import StagedSteps
from lowtide.runtime.fitting import trials, ways
from lowtide.runtime.fitting.moving import Moving, as_timed, host_bytes_of, is_faster, joint_solution, moving_chain
from lowtide.runtime.fitting.solving import Settings
from lowtide.runtime.measure import timing, weights
from lowtide.runtime.measure.measure import capture_and_measure
from lowtide.runtime.meter import Meter, exclude, is_excluded
from lowtide.runtime.plan.steps import RealSteps
from lowtide.units import format_bytes

WIDTH, NUM_BLOCKS = 96, 2
RELEASES = [Release("opt", k) for k in range(1, 4)]
LINK = "2GB/s"

# Losses and norms that `train` notes while it runs, which a budget counts.
_NOTED_BYTES = 4096


class Block(nn.Module):
    """Two stages, both with weights: what else it does is no module, so that there is little to solve."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(nn.functional.layer_norm(x, [WIDTH])))
        return x + nn.functional.dropout(self.down(inner), 0.1, self.training)


class Tied(nn.Module):
    """Embeds and classifies with one weight."""

    def __init__(self, num_words: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, num_words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Masked(nn.Module):
    """Takes a mask in some calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(x if mask is None else x * mask)


def square(y: torch.Tensor) -> torch.Tensor:
    return (y**2).mean()


def blocks(depth: int = NUM_BLOCKS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


def three_blocks() -> nn.Module:
    return blocks(3)


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def made(model_of: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(model_of: Any, num_rows: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if model_of is tied:
        return torch.randint(32, (num_rows,), generator=generator)
    return torch.randn(num_rows, WIDTH, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, num_steps: int = 4) -> Numbers:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
    seed_all(1)
    numbers: Numbers = {}
    for index in range(num_steps):
        loss = square(model(x))
        loss.backward()
        numbers[f"{index} norm"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        numbers[f"{index} loss"] = loss.detach()
    numbers |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    for index, state in enumerate(optimizer.state.values()):
        numbers |= {f"state {index} {name}": value.clone() for name, value in state.items()}
    return numbers


def others_bytes() -> int:
    """What this process holds besides a model that is yet to be made: a budget on the CPU counts it, too."""
    gc.collect()
    with Meter("cpu") as meter:
        return meter.live_bytes


def fitted(
    model_of: Any, own_bytes: int, num_rows: int = 16, **settings: Any
) -> tuple[lowtide.Plan, torch.optim.Optimizer]:
    """A plan within so many bytes beside what others hold."""
    budget = max(1000, others_bytes() + own_bytes)
    model, optimizer = made(model_of)
    settings = {"bandwidth": LINK, "loss": square, "optimizer": optimizer, "strategy": "joint", **settings}
    return lowtide.fit(model, batch(model_of, num_rows), memory_budget=budget, **settings), optimizer


def least_budget(model_of: Any, num_rows: int = 16, **settings: Any) -> int:
    others = others_bytes()
    with pytest.raises(InfeasibleBudgetError) as caught:
        fitted(model_of, -others, num_rows, **settings)
    return caught.value.minimum_bytes - others


@pytest.fixture(scope="module", autouse=True)
def _planned_before() -> None:
    """The first plan in a process leaves some kilobytes behind, which the budgets of later ones have in them."""
    fitted(blocks, 2 * resident_bytes(blocks), strategy="pofo")[0].detach()


def in_a_millisecond(computation: Callable[[], object]) -> float:
    computation()
    return 1e-3


def resident_bytes(model_of: Any) -> int:
    return 4 * sum(parameter.numel() * parameter.element_size() for parameter in model_of().parameters())


@pytest.mark.parametrize("model_of", [blocks, tied])
def test_a_model_whose_weights_do_not_fit_trains_with_equal_numbers_within_the_budget(model_of):
    expected = train(*made(model_of), batch(model_of))
    least, resident = least_budget(model_of, keeps_result=False), resident_bytes(model_of)
    assert least < resident / 2
    for own_bytes in (least + _NOTED_BYTES, (least + resident) // 2):
        plan, optimizer = fitted(model_of, own_bytes, keeps_result=False)
        with plan:
            assert plan.schedule.strategy == "joint"
            got = train(plan.model, optimizer, batch(model_of))
            stats = plan.stats()
            # up to what is noted on the way, and generators' states, which are there while stages are measured
            assert abs(stats.predicted_peak_bytes - stats.measured_peak_bytes) <= 2 * _NOTED_BYTES
            assert stats.measured_peak_bytes <= plan.memory_budget
            assert stats.moved_bytes_per_step > 0
        assert_equal(got, expected)
        del plan, optimizer, got


def test_it_says_what_lives_where():
    plan, _ = fitted(blocks, resident_bytes(blocks) // 2)
    with plan:
        text = str(plan)
    state = 2 * sum(p.numel() * p.element_size() for p in plan.model.parameters())
    assert "  on host    " in text
    assert f"of {format_bytes(state)[:3]}" in text  # of the state there are some bytes more, the numbers of steps
    assert "-" not in text.split("at peak")[1].split("on host")[0]  # nothing is negative


def test_the_least_budget_that_is_named_works():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(256, 64)
    asked = {"optimizer": optimizer, "strategy": "joint", "bandwidth": LINK}
    with pytest.raises(InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1, **asked)
    gc.collect()
    lowtide.fit(model, x, memory_budget=caught.value.minimum_bytes + _NOTED_BYTES, **asked)  # what is left of the first


class Remembering(nn.Module):
    """Keeps what its blocks returned in an attribute, until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        self.features: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = []
        for block in self.blocks:
            x = block(x)
            self.features.append(x)
        return x + self.features[2]


@pytest.mark.parametrize(
    ("make", "make_batch"),
    [
        pytest.param(Remembering, lambda: torch.randn(32, 64), id="what-the-model-keeps-until-after-the-step"),
        pytest.param(
            partial(Tied, num_words=4000), lambda: torch.randint(4000, (8,)), id="the-step-of-weights-that-stay"
        ),
    ],
)
def test_the_least_budget_has_room_for(make, make_batch):
    model, x = make(), make_batch()
    optimizer = torch.optim.Adam(model.parameters())
    asked = {"loss": square, "optimizer": optimizer, "strategy": "joint", "bandwidth": LINK}
    with pytest.raises(InfeasibleBudgetError) as caught:
        lowtide.fit(model, x, memory_budget=1, **asked)
    gc.collect()
    with lowtide.fit(model, x, memory_budget=caught.value.minimum_bytes + _NOTED_BYTES, **asked) as plan:
        for _ in range(3):
            square(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert plan.stats().measured_peak_bytes <= plan.memory_budget


def test_a_host_budget_is_refused_with_the_least_that_works():
    own_bytes = resident_bytes(blocks) // 2
    with pytest.raises(InfeasibleBudgetError, match="host_memory_budget 97") as caught:
        fitted(blocks, own_bytes, host_memory_budget="100kB")
    needed = int(str(caught.value).split("is below the")[1].split("(")[1].split()[0])
    plan, optimizer = fitted(blocks, own_bytes, host_memory_budget=needed)
    with plan:
        train(plan.model, optimizer, batch(blocks))
        assert plan._part.execution.machine.tier.capacity_bytes <= needed


def test_gradients_that_are_used_up_take_no_host_memory():
    """With steps in backward the host holds weights and optimizer state, and training stays within that."""
    own_bytes = resident_bytes(blocks) // 2
    needed = [least_host_budget(own_bytes, step_in_backward=in_backward) for in_backward in (False, True)]
    assert needed[1] < 0.8 * resident_bytes(blocks) < needed[0]
    plan, optimizer = fitted(blocks, own_bytes, host_memory_budget=needed[1], step_in_backward=True)
    with plan:
        assert not any("clipping" in note for note in plan.notes)  # there is none
        for _ in range(3):
            square(plan.model(batch(blocks))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert plan._part.execution.machine.tier.capacity_bytes <= needed[1]


def half_frozen() -> nn.Module:
    model = blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" not in name)
    return model


def test_the_least_host_memory_is_enough_next_to_the_least_budget():
    """Where activations have to move, and trial steps show that more of them do than was predicted."""
    num_rows = 150
    own_bytes = int(1.03 * least_budget(half_frozen, num_rows))
    host_bytes = least_host_budget(own_bytes, half_frozen, num_rows)
    plan, optimizer = fitted(half_frozen, own_bytes, num_rows, host_memory_budget=host_bytes)
    with plan:
        x = batch(half_frozen, num_rows)
        for _ in range(3):
            square(plan.model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert plan._part.execution.machine.tier.capacity_bytes <= host_bytes


def test_gradients_from_before_do_not_move_with_trial_steps():
    model, optimizer = made(blocks)
    x = batch(blocks)
    square(model(x)).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    budget = others_bytes() + resident_bytes(blocks) // 2
    settings = {"memory_budget": budget, "bandwidth": LINK, "loss": square, "strategy": "joint"}
    lowtide.fit(model, x, optimizer=optimizer, **settings).detach()
    assert not any(is_excluded(parameter.grad) for parameter in model.parameters())
    assert_equal({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


def least_host_budget(own_bytes: int, model_of: Any = blocks, num_rows: int = 16, **settings: Any) -> int:
    return named_host_bytes(lambda: fitted(model_of, own_bytes, num_rows, host_memory_budget="100kB", **settings))


def named_host_bytes(refused: Callable[[], object]) -> int:
    with pytest.raises(InfeasibleBudgetError, match="host_memory_budget") as caught:
        refused()
    return int(str(caught.value).split("is below the")[1].split("(")[1].split()[0])


def test_the_least_host_memory_does_not_depend_on_measured_times(monkeypatch):
    own_bytes, found = resident_bytes(blocks) // 2, []
    for seconds in (1e-6, 1e-3, 1.0):
        monkeypatch.setattr(timing, "_run_on_cpu", lambda computation, seconds=seconds: (computation(), seconds)[1])
        found.append(least_host_budget(own_bytes))
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "error",
    [partial(InfeasibleBudgetError, "host memory is too small", minimum_bytes=1), partial(ExecutionError, "no room")],
)
def test_training_goes_on_where_there_is_no_other_schedule(error, monkeypatch):
    """A loop that holds more than the budget has room for, and a host that has none for a leaner schedule."""
    expected = train(*made(blocks), batch(blocks))
    plan, optimizer = fitted(blocks, resident_bytes(blocks) // 2)

    def fail(*_: Any) -> None:
        raise error()

    monkeypatch.setattr(plan._planner, "part_for", fail)
    held = torch.zeros(resident_bytes(blocks), dtype=torch.uint8)
    with plan, pytest.warns(lowtide.LowtideWarning, match=f"planning again failed: {error()}; training continues"):
        assert_equal(train(plan.model, optimizer, batch(blocks)), expected)
    del held


def test_optimizer_state_that_is_loaded_without_room_on_the_host():
    own_bytes = resident_bytes(blocks) // 2
    plan, optimizer = fitted(blocks, own_bytes, host_memory_budget=least_host_budget(own_bytes))
    with plan:
        train(plan.model, optimizer, batch(blocks))
        saved = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ExecutionError, match=r"loading optimizer state takes host memory .* nothing was loaded"):
            optimizer.load_state_dict(saved)
        for one, other in zip(optimizer.state_dict()["state"].values(), saved["state"].values(), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


def six_stages() -> tuple[Moving, Settings]:
    """A chain whose activations take far more than its weights."""
    stages = [
        lowtide.Stage(
            str(k), 1.0, 2.0, 400 * 1024, 4000 * 1024, weight_bytes=1024, optimizer_bytes=2048, update_seconds=0.1
        )
        for k in range(6)
    ]
    chain = lowtide.Chain("six", stages)
    mirrors = {("w", k): 1024 for k in range(1, 7)} | {("g", k): 1024 for k in range(1, 7)}
    moving = Moving(chain, (0,) * 6, 0, {**mirrors, **{("opt", k): 2048 for k in range(1, 7)}}, {}, {}, 40_000_000)
    settings = Settings(
        12000 * 1024, "joint", 40_000_000, None, "adamw", square, None, False, True, None, Checks.SPOT, None
    )
    return moving, settings


def test_state_that_stays_on_the_device_has_room_on_the_host_for_when_it_is_loaded():
    moving, settings = six_stages()
    solution = joint_solution(moving, replace(settings, memory_budget=2**30))
    assert not any(isinstance(op, Offload | Release) and op.kind == "opt" for op in solution.schedule.operations)
    assert host_bytes_of(moving, solution) == 6 * (1024 + 2048)  # and gradients, which move


def test_activations_stay_where_the_host_has_no_room_for_them():
    moving, settings = six_stages()
    free = joint_solution(moving, settings)
    assert any(isinstance(op, Offload) and op.kind in ("a", "abar") for op in free.schedule.operations)
    weights_alone = 6 * 4096
    held = joint_solution(moving, replace(settings, host_memory_budget=weights_alone))
    assert not any(isinstance(op, Offload) and op.kind in ("a", "abar") for op in held.schedule.operations)
    assert held.peak_bytes <= settings.memory_budget
    assert held.seconds > free.seconds
    with pytest.raises(InfeasibleBudgetError, match="host_memory_budget"):
        joint_solution(moving, replace(settings, host_memory_budget=6 * 1024 - 1))


def test_the_host_memory_that_is_named_is_enough_where_trial_steps_leave_less_of_the_budget():
    """Activations could just stay, by prediction, and have to move where five percent of the budget are gone."""
    moving, settings = six_stages()
    moving = moving.with_chain(replace(moving.chain, input_bytes=4000 * 1024))  # what is recomputed begins with it
    with pytest.raises(InfeasibleBudgetError) as caught:
        joint_solution(replace(moving, moves_activations=False), replace(settings, memory_budget=1))
    just = replace(settings, memory_budget=int(1.02 * caught.value.minimum_bytes))
    needed = named_host_bytes(lambda: joint_solution(moving, replace(just, host_memory_budget=1)))
    less = replace(just, memory_budget=int(0.95 * just.memory_budget), host_memory_budget=needed)
    assert joint_solution(moving, less).peak_bytes <= less.memory_budget


def test_weights_move_where_nothing_else_stays_within_the_budget():
    """Without being asked for, if the optimizer is known; in steps of other shapes, too."""
    x = batch(blocks)
    given = (x, torch.cat([x, x]))
    plain, plain_optimizer = made(blocks)
    expected = [train(plain, plain_optimizer, each, 2) for each in given]
    plan, optimizer = fitted(blocks, resident_bytes(blocks) // 2, strategy="auto")
    with plan:
        assert plan.schedule.strategy == "joint"
        assert "with all weights and optimizer state on the device this model needs" in str(plan)
        assert any("without clipping" in note for note in plan.notes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "planning for other calls took")
            for each, numbers in zip(given, expected, strict=True):
                assert_equal(train(plan.model, optimizer, each, 2), numbers)
        assert plan.num_shapes == 2


def test_the_report_says_what_lives_on_the_host(tmp_path):
    plan, _ = fitted(blocks, resident_bytes(blocks) // 2)
    with plan:
        plan.report(tmp_path / "plan.html", patience_seconds=0.5)
        first, *notes = data_of((tmp_path / "plan.html").read_text())["notes"]
        assert first.startswith("on the host: ")
        assert "optimizer state" in first
        assert notes == list(plan.notes)


def test_what_steps_take_is_counted_once_weights_are_on_the_host(monkeypatch):
    """On CUDA the allocator's peak begins with what is there when it is reset."""
    install, forget, events = StagedSteps.install, RealSteps.forget, list[str]()
    monkeypatch.setattr(StagedSteps, "install", lambda steps: (install(steps), events.append("weights have left")))
    monkeypatch.setattr(RealSteps, "forget", lambda steps: (forget(steps), events.append("counted from here")))
    plan, _ = fitted(blocks, resident_bytes(blocks) // 2)
    plan.detach()
    assert events[-2:] == ["weights have left", "counted from here"]


def test_where_memory_is_short_a_model_whose_weights_move_is_cut_more_finely(monkeypatch):
    many_layers = partial(residuals, WIDTH)
    fine = least_budget(many_layers, 64, strategy="auto")
    with monkeypatch.context() as usual:
        usual.setattr(ways, "_frees_more", lambda *_: False)
        coarse = least_budget(many_layers, 64, strategy="auto")
    assert fine < 0.6 * coarse
    plan, optimizer = fitted(many_layers, (fine + coarse) // 2, 64, strategy="auto")
    with plan:
        found = train(plan.model, optimizer, batch(many_layers, 64))
    assert_equal(found, train(*made(many_layers), batch(many_layers, 64)))


def test_weights_stay_where_something_else_stays_within_the_budget():
    plan, _ = fitted(blocks, 2 * resident_bytes(blocks), strategy="auto")
    with plan:
        assert not plan.schedule.manages


def with_little_room(link: str, monkeypatch: pytest.MonkeyPatch) -> lowtide.Plan:
    """A plan within little more than what activations alone need, on a machine whose trial steps count.

    How long computations take is always the same.
    """
    monkeypatch.setattr(timing, "_run_on_cpu", in_a_millisecond)
    clock = itertools.count()
    monkeypatch.setattr(weights, "_now", lambda device: next(clock) * 1e-6)
    asked = {"strategy": "pofo", "bandwidth": link, "stages": ["*.up", "*.down"]}
    own_bytes = int(1.004 * least_budget(three_blocks, 300, **asked))
    for module in (trials, ways):
        monkeypatch.setattr(module, "is_timed", lambda device: True)
    return fitted(three_blocks, own_bytes, 300, **{**asked, "strategy": "auto"})[0]


def test_weights_move_where_that_is_faster_than_recomputation(monkeypatch):
    others = torch.zeros(4 * resident_bytes(three_blocks), dtype=torch.uint8)  # the budget counts what else is there
    with with_little_room("1GB/s", monkeypatch) as plan:
        del others
        assert plan.schedule.strategy == "joint"
        assert "if weights and optimizer state move, and" in str(plan)


def test_weights_stay_where_moving_them_is_slower(monkeypatch):
    with with_little_room("10MB/s", monkeypatch) as plan:
        assert not plan.schedule.manages


def test_weights_stay_where_a_trial_shows_that_moving_them_is_not_faster(monkeypatch):
    """What was predicted to be faster is tried, and the host memory that it took is given back."""
    tried, tiers = [], []
    plain = trials.accepted

    def slower(asked: Any, **settings: Any) -> Any:
        planned = plain(asked, **settings)
        if planned.moving is None:
            return planned
        tried.append(planned)
        tiers.append(planned.tier)
        chain = planned.chain.with_times(lambda one: 10 * one, lambda one: 10 * one)
        return replace(planned, solution=planned.solution.on(chain))

    monkeypatch.setattr(ways, "accepted", slower)
    with with_little_room("1GB/s", monkeypatch) as plan:
        assert len(tried) == 1
        assert not plan.schedule.manages
        assert tiers[0].capacity_bytes <= resident_bytes(three_blocks) / 2


@pytest.mark.parametrize(
    ("alone", "moved", "gradient_bytes", "expected"),
    [(10.0, 8.0, 0, True), (10.0, 9.5, 0, False), (10.0, 8.0, 20, True), (10.0, 8.0, 21, False)],
)
def test_moving_weights_has_to_be_worth_a_tenth_of_a_step_and_clipping(alone, moved, gradient_bytes, expected):
    def chain(seconds: float) -> lowtide.Chain:
        stages = [lowtide.Stage("one", seconds, 0.0, 0, 0, weight_bytes=1, weight_grad_bytes=gradient_bytes)]
        return lowtide.Chain("one", stages)

    one, other = (lowtide.solve(chain(s), memory_budget=100, strategy="store-all") for s in (alone, moved))
    moving = Moving(chain(alone), (0,), 0, {}, {}, {}, bandwidth=10)
    assert is_faster(one, other, moving) == expected


def test_weights_stay_unless_the_optimizer_is_known():
    own_bytes = resident_bytes(blocks) // 2
    with pytest.raises(InfeasibleBudgetError, match=r"state and step take alone.*pass it with optimizer=optimizer"):
        fitted(blocks, own_bytes, strategy="auto", optimizer="adamw")
    with pytest.raises(InfeasibleBudgetError, match=r"state and step take alone.*less state$"):
        fitted(blocks, own_bytes, strategy="auto", optimizer="adamw", bandwidth=0)
    with pytest.raises(PlanError, match=r"^strategy 'joint' moves weights, but .*pass it with optimizer="):
        fitted(blocks, own_bytes, strategy="joint", optimizer="adamw")


def test_a_refusal_says_why_weights_stay():
    model = blocks()
    optimizer = torch.optim.AdamW(list(model[0].parameters()))
    with pytest.raises(
        InfeasibleBudgetError, match=r"cannot live on the host: the optimizer does not have parameter '1\."
    ):
        lowtide.fit(model, batch(blocks), memory_budget="1MB", bandwidth=LINK, loss=square, optimizer=optimizer)


def test_a_budget_that_is_too_small_even_with_weights_on_the_host():
    least = least_budget(blocks, strategy="auto")
    assert least < resident_bytes(blocks) / 2
    with pytest.raises(InfeasibleBudgetError, match="with weights on the host: host_memory_budget 97") as caught:
        fitted(blocks, resident_bytes(blocks) // 2, strategy="auto", host_memory_budget="100kB")
    assert caught.value.minimum_bytes > resident_bytes(blocks)  # with which nothing has to move
    with pytest.raises(InfeasibleBudgetError, match="needs with weights on the host, measured in a trial step"):
        fitted(blocks, 1000)


def test_a_plan_file(tmp_path):
    expected = train(*made(blocks), batch(blocks))
    plan, optimizer = fitted(blocks, resident_bytes(blocks) // 2)
    with plan:
        plan.save(tmp_path / "plan.json")
    model = plan.model
    with pytest.raises(PlanError, match="pass it with optimizer="):
        lowtide.load_plan(tmp_path / "plan.json", model)
    with lowtide.load_plan(tmp_path / "plan.json", model, optimizer=optimizer) as loaded:
        assert_equal(train(model, optimizer, batch(blocks)), expected)
        assert len(loaded._part.execution.machine.tier._pieces.made) == 1  # on CUDA, memory is pinned at once


def test_a_plan_file_with_the_optimizer_of_a_framework(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = train(*made(blocks), batch(blocks))
    plan, optimizer = fitted(blocks, resident_bytes(blocks) // 2)
    plan.save(tmp_path / "plan.json")
    schedule, split = plan.schedule, plan.split
    accelerated = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    with lowtide.load_plan(tmp_path / "plan.json", plan.model, optimizer=accelerated):
        assert_equal(train(plan.model, accelerated, batch(blocks)), expected)
    model, optimizer = made(blocks)
    accelerated = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    with lowtide.attach(model, schedule, split=split, optimizer=accelerated):
        assert_equal(train(model, accelerated, batch(blocks)), expected)


def test_larger_batches_are_planned_for():
    x = batch(blocks)
    given = (x, torch.cat([x, x]), x)
    plain, plain_optimizer = made(blocks)
    expected = [train(plain, plain_optimizer, each, 2) for each in given]
    plan, optimizer = fitted(blocks, resident_bytes(blocks) // 2)

    def compare() -> None:
        for each, numbers in zip(given, expected, strict=True):
            assert_equal(train(plan.model, optimizer, each, 2), numbers)

    with plan:
        with pytest.warns(lowtide.LowtideWarning, match="planning for other calls took"):
            compare()
        assert plan.num_shapes == 2


def test_planning_again_for_the_same_calls_says_so(monkeypatch):
    plan, _ = fitted(blocks, resident_bytes(blocks) // 2)
    with plan:
        square(plan.model(batch(blocks))).backward()
        monkeypatch.setattr(RealSteps, "peak_bytes", property(lambda _: plan.memory_budget + 64))  # as CUDA might say
        with pytest.warns(lowtide.LowtideWarning) as seen:
            plan.model(batch(blocks))
        said = [str(warning.message) for warning in seen]
    assert [each for each in said if each.startswith("planning")] == [each for each in said if "again took" in each]
    assert any(each.endswith("training continues; raise the budget to avoid it") for each in said)


def test_accumulation_within_the_budget():
    """Gradients that are there when a forward begins are added to where they are, whether that was planned or not."""

    def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        seed_all(1)
        for index in range(6):
            square(model(batch(blocks))).backward()
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = accumulate(*made(blocks))
    for grads_resident in (False, True):
        plan, optimizer = fitted(blocks, int(0.7 * resident_bytes(blocks)), grads_resident=grads_resident)
        with plan:
            assert plan.schedule.strategy == "joint"
            assert_equal(accumulate(plan.model, optimizer), expected)
            assert plan.stats().measured_peak_bytes <= plan.memory_budget
        del plan, optimizer


def test_activations_beside_weights_that_move():
    """Passes take the most here, with optimizer state of some stages on the device that does not exist before."""
    num_rows = 500
    x = batch(three_blocks, num_rows)
    expected = train(*made(three_blocks), x)
    least = least_budget(three_blocks, num_rows, strategy="joint")
    for share in (1.01, 1.4):
        plan, optimizer = fitted(three_blocks, int(share * least), num_rows, strategy="joint")
        with plan:
            got = train(plan.model, optimizer, x)
            stats = plan.stats()
            assert stats.measured_peak_bytes <= plan.memory_budget
        assert_equal(got, expected)
        del plan, optimizer, got


def test_state_that_leaves_in_the_passes_leaves_in_trial_steps(monkeypatch):
    """Optimizer state does not exist before the first step: what stands in for it moves as the schedule says.

    Which schedule that is depends on measured times, and is always the same here.
    """
    clock = itertools.count()
    monkeypatch.setattr(timing, "_run_on_cpu", in_a_millisecond)
    monkeypatch.setattr(weights, "_now", lambda device: next(clock) * 1e-3)
    least = least_budget(three_blocks, 250, keeps_result=False)
    plan, optimizer = fitted(three_blocks, int(1.3 * least), 250, keeps_result=False)
    with plan:
        schedule = plan.schedule
        leaving = {op.value for op in schedule.operations[: schedule.operations.index(Backward(1))] if op in RELEASES}
        assert any(kind == "opt" for kind, _ in leaving & schedule.start.device)
        assert "a trial step took" not in str(plan)
        train(plan.model, optimizer, batch(three_blocks, 250))
        stats = plan.stats()
        assert abs(stats.predicted_peak_bytes - stats.measured_peak_bytes) <= 2 * _NOTED_BYTES


def test_the_leanest_schedule_does_not_depend_on_measured_times():
    """Else the next `fit`, which measures other times, could refuse the budget that this one has named."""
    model, optimizer = made(blocks)
    split, chain = capture_and_measure(model, batch(blocks, 1500), loss=square)
    settings = Settings(1, "joint", LINK, None, optimizer, square, None, False, True, None, Checks.SPOT, None)
    moving, generator, found = moving_chain(model, split, chain, settings), random.Random(0), []
    for scale in (1e-3, 0.1, 1.0, 30.0):
        factors = [scale * generator.uniform(0.7, 1.4) for _ in moving.chain.stages]
        stages = (
            replace(
                stage,
                forward_seconds=1e-3 * factor,
                rerun_seconds=1e-3 * factor,
                backward_seconds=2e-3 / factor,
                update_seconds=1e-3 * factor**2,
            )
            for stage, factor in zip(moving.chain.stages, factors, strict=True)
        )
        link = round(generator.uniform(2e8, 2e9))
        other = replace(moving, chain=replace(moving.chain, stages=tuple(stages)), bandwidth=link)
        with pytest.raises(InfeasibleBudgetError) as caught:
            joint_solution(other, settings)
        least = joint_solution(other, settings, is_leanest=True)
        assert least.peak_bytes == caught.value.minimum_bytes
        assert least.on(other.chain).seconds == least.seconds
        found.append(least)
    assert len({solution.schedule.operations for solution in found}) == 1


def test_a_prediction_takes_as_long_as_its_trial_step_and_the_updates():
    stages = [
        lowtide.Stage(str(k), 1.0, 2.0, 4, 6, weight_bytes=10, optimizer_bytes=20, update_seconds=0.5) for k in range(4)
    ]
    chain = lowtide.Chain("four", stages)
    solution = lowtide.solve(chain, memory_budget=90, strategy="joint", bandwidth=10)
    without = replace(chain, stages=tuple(replace(stage, update_seconds=0.0) for stage in chain.stages))
    trial_seconds = 1.25 * solution.on(without).seconds
    timed = as_timed(solution, trial_seconds)
    assert timed.seconds == pytest.approx(1.25 * solution.seconds)
    assert timed.peak_bytes == solution.peak_bytes
    assert timed.schedule.operations == solution.schedule.operations


def test_trial_steps_move_what_the_optimizer_moves(monkeypatch):
    """Their time is that of the list with its updates, but for the optimizer's own steps."""
    updates = []
    plain = StagedSteps.leave_out_update
    monkeypatch.setattr(StagedSteps, "leave_out_update", lambda steps, k: (updates.append(k), plain(steps, k)))
    moved, rehearse = [], trials.rehearse

    def noting(model: nn.Module, step: Any, execution_of: Callable[[], Any], **settings: Any) -> Any:
        made = []
        found = rehearse(model, step, lambda: made.append(execution_of()) or made[0], **settings)
        moved.append(made[0].weights.moved_bytes)
        return found

    monkeypatch.setattr(trials, "rehearse", noting)
    plan, optimizer = fitted(blocks, resident_bytes(blocks) // 2)
    with plan:
        assert set(updates) == {op.stage for op in plan.schedule.operations if isinstance(op, Update)}
        assert not optimizer.state
    num_bytes = {
        (kind, k): getattr(stage, f"{name}_bytes")
        for k, stage in enumerate(plan.chain.stages, start=1)
        for kind, name in {"w": "weight", "g": "weight_grad", "opt": "optimizer"}.items()
    }
    copies = [op.value for op in plan.schedule.operations if isinstance(op, Offload | Prefetch)]
    listed = sum(num_bytes[value] for value in copies if value in num_bytes)
    assert moved[-1] >= listed  # optimizer state, too, which does not exist yet


def test_steps_in_backward():
    def simply(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
        seed_all(1)
        for _ in range(4):
            square(model(batch(tied))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = simply(*made(tied))
    plan, optimizer = fitted(tied, resident_bytes(tied) // 2, step_in_backward=True)
    with plan:
        assert_equal(simply(plan.model, optimizer), expected)
        assert plan.stats().measured_peak_bytes <= plan.memory_budget
    with pytest.raises(PlanError, match=r"moves weights, but .*pass it with optimizer="):
        fitted(tied, resident_bytes(tied), step_in_backward=True, optimizer="adamw")


def test_what_planning_takes_is_said_and_going_from_one_schedule_to_another_takes_nothing():
    least = least_budget(blocks)
    budget = others_bytes() + 2 * least  # less than weights and state take
    x, mask = batch(blocks), torch.ones(16, WIDTH)

    def steps(masked: Masked, optimizer: torch.optim.Optimizer) -> None:
        seed_all(1)
        for given in (None, mask):
            square(masked(x, given)).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, plain_optimizer = made(blocks)
    for _ in range(3):
        steps(Masked(plain), plain_optimizer)
    expected = {name: exclude(p.detach()) for name, p in plain.named_parameters()}
    del plain, plain_optimizer
    model, optimizer = made(blocks)
    masked = Masked(model)
    plan = lowtide.fit(
        masked, (x,), memory_budget=budget, bandwidth=LINK, loss=square, optimizer=optimizer, strategy="joint"
    )
    with pytest.warns(lowtide.LowtideWarning, match="planning for other calls took") as seen:
        steps(masked, optimizer)
    said = [warning for warning in seen if "planning for" in str(warning.message)]
    assert len(said) == 1
    assert said[0].filename == __file__
    with Meter("cpu") as meter:
        for _ in range(2):
            steps(masked, optimizer)
        assert meter.peak_bytes <= budget + _NOTED_BYTES
    plan.detach()
    assert_equal({name: p.detach() for name, p in model.named_parameters()}, expected)
