"""Repeated runs that end with the last tensor they save: what is left out, and that the numbers stay the same."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.runtime.training import assert_equal, batches, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import lowtide
from lowtide import Backward, Forward, Offload, Prefetch, Release, Schedule
from lowtide.errors import ExecutionError
from lowtide.runtime.model.split import Split, StageSplit, Unit
from lowtide.runtime.plan.attach import attach
from lowtide.runtime.replay.endings import saves_last_before_a_product

WIDTH = 8
SHAPE = (16, WIDTH)


class Feed(nn.Module):
    """A residual block that ends in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


def feeds(*, end: type[nn.Module] | None = None) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(Feed(), *([] if end is None else [end()])) for _ in range(3)), nn.Tanh())


SPLIT = Split(tuple(StageSplit(path, (Unit(path),)) for path in "0123"))
AGAIN = [Forward(1, "keep"), Forward(2, "keep"), Forward(3, "keep"), Forward(4, "all"), Backward(4)]
EACH_AGAIN = Schedule(
    "each again", [*AGAIN, *(operation for k in (3, 2, 1) for operation in (Forward(k, "all"), Backward(k)))]
)
TOGETHER = Schedule("together", [*AGAIN, *(Forward(k, "all") for k in (1, 2, 3)), *(Backward(k) for k in (3, 2, 1))])
MOVED = Schedule(
    "moved",
    [
        *[Forward(1, "keep"), Forward(2, "keep"), Forward(3, "keep"), Offload("a", 1), Release("a", 1)],
        *[Forward(4, "all"), Backward(4), Forward(3, "all"), Backward(3), Prefetch("a", 1)],
        *[Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)],
    ],
)


class Flops(TorchDispatchMode):
    """Counts as `FlopCounterMode` does, without its hooks on every module: what has hooks runs to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def flops_of_steps(model: nn.Module, schedule: Schedule, *, strict: bool = False) -> list[int]:
    found = []
    with attach(model, schedule, split=SPLIT, strict=strict):
        for x in batches(SHAPE, 3):
            with Flops() as counter:
                model(x).square().mean().backward()
            found.append(counter.total)
    return found


@pytest.mark.parametrize(("schedule", "num_left_out"), [(EACH_AGAIN, 3), (TOGETHER, 1), (MOVED, 3)])
def test_the_last_product_is_left_out_from_the_second_time_on(schedule, num_left_out):
    product = 2 * SHAPE[0] * WIDTH * 2 * WIDTH
    flops = flops_of_steps(feeds(), schedule)
    assert flops[1] == flops[2] == flops[0] - num_left_out * product
    model = feeds()
    with attach(model, schedule, split=SPLIT):
        assert_equal(train(model, batches(SHAPE, 3)), train(feeds(), batches(SHAPE, 3)))


@pytest.mark.parametrize("end", [nn.RReLU, nn.Tanh, nn.Identity])
def test_other_ends(end):
    flops = flops_of_steps(feeds(end=end), EACH_AGAIN)
    assert (flops[1] < flops[0]) == (end is nn.Identity)
    model = feeds(end=end)
    with attach(model, EACH_AGAIN, split=SPLIT):
        assert_equal(train(model, batches(SHAPE, 4)), train(feeds(end=end), batches(SHAPE, 4)))


LOCK = threading.Lock()
RANGES: list[str] = []


class Locking(Feed):
    """Holds a lock while it runs, without a `with`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert LOCK.acquire(timeout=5), "the lock was never released"
        y = super().forward(x)
        LOCK.release()
        return y


class Setting(Feed):
    """Changes a setting of the process while it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        y = super().forward(x)
        torch.set_default_dtype(torch.float32)
        return y


class Hooked(Feed):
    """Whose last layer opens and closes a range, as profilers do."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_forward_pre_hook(lambda *_: RANGES.append("open"))
        self.down.register_forward_hook(lambda *_: RANGES.remove("open"))


class Catching(Feed):
    """Takes whatever comes for a failure of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except BaseException:
            RANGES.append("failed")
            raise


class Telling(nn.Module):
    """Computes nothing, but somebody counts its calls."""

    def __init__(self, inside: Feed) -> None:
        super().__init__()
        self.inside, self.end = inside, nn.Sequential(inside, Counting())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RANGES.append("open")
        return self.end(x)


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RANGES.remove("open")
        return x


@pytest.mark.parametrize("kind", [Locking, Setting, Hooked, Catching, lambda: Telling(Feed())])
def test_a_run_does_not_end_where_code_of_the_users_has_more_to_do(kind):
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*(kind() for _ in range(3)), nn.Tanh())

    assert len(set(flops_of_steps(build(), EACH_AGAIN))) == 1  # the product is computed
    model = build()
    with attach(model, EACH_AGAIN, split=SPLIT):
        assert_equal(train(model, batches(SHAPE, 3)), train(build(), batches(SHAPE, 3)))
    assert torch.get_default_dtype() == torch.float32
    assert not LOCK.locked()
    assert not RANGES


@pytest.mark.parametrize("kind", [Locking, Setting, Hooked])
def test_measuring_does_not_end_a_run_there_either(kind):
    model = nn.Sequential(*(kind() for _ in range(2)), nn.Tanh())
    lowtide.measure(model, batches(SHAPE, 1)[0], stages=["[0-9]"])
    assert torch.get_default_dtype() == torch.float32
    assert not LOCK.locked()
    assert not RANGES


def test_in_strict_mode_every_run_goes_to_the_end():
    assert len(set(flops_of_steps(feeds(), EACH_AGAIN, strict=True))) == 1


class Switch(nn.Module):
    """A nonlinearity that somebody may take away from all of its kind; attributes of classes are not put back."""

    is_on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if self.is_on else x


def test_a_run_that_saves_other_tensors_is_refused(monkeypatch):
    model, x = feeds(), batches(SHAPE, 1)[0]
    model[1][0].dropout = Switch()
    with attach(model, EACH_AGAIN, split=SPLIT):
        model(x).sum().backward()
        loss = model(x).sum()
        monkeypatch.setattr(Switch, "is_on", False)
        with pytest.raises(ExecutionError, match="stage '1' saved tensor 4 as "):
            loss.backward()


def test_what_counts_as_an_end():
    weight = torch.ones(4, 4, requires_grad=True)
    product = weight.tanh() @ weight
    assert saves_last_before_a_product([product])
    assert saves_last_before_a_product([(product + weight).view(2, 8).transpose(0, 1)])
    assert saves_last_before_a_product([nn.functional.conv1d(weight[None], weight[:, :, None])])
    assert not saves_last_before_a_product([product * weight])
    assert not saves_last_before_a_product([product, weight.exp()])  # made later than the product
    assert not saves_last_before_a_product([weight])
    assert not saves_last_before_a_product([])
