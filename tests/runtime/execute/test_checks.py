"""Spot checks: what differs in a recomputation is found within two rounds of stages, and nothing else is."""

from __future__ import annotations

import copy
import itertools
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Backward, Forward
from lowtide.runtime.execute import checks

NUM_BLOCKS = 4


class Leaky(nn.Module):
    """A block whose output depends on something that nobody can know of, from a step on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.disturbance: Callable[[], float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.tanh(y if self.disturbance is None else y + self.disturbance())


def network(**changes: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = {f"block{k}": Leaky(8) for k in range(1, NUM_BLOCKS + 1)}
    return nn.Sequential(OrderedDict({**blocks, **changes}))


def each_recomputed(last: int = NUM_BLOCKS) -> lowtide.Schedule:
    """Every block but the last is recomputed by itself: they cannot be joined."""
    forwards = [Forward(k, "keep") for k in range(1, last)]
    again = [op for k in range(last - 1, 0, -1) for op in (Forward(k, "all"), Backward(k))]
    return lowtide.Schedule("each", [*forwards, Forward(last, "all"), Backward(last), *again])


def steps(model: nn.Module, x: torch.Tensor, num_steps: int) -> None:
    for _ in range(num_steps):
        model(x).square().sum().backward()


def differing() -> Callable[[], float]:
    """Another number at each call, from nowhere that is watched."""
    numbers = iter(range(1, 1000))
    return lambda: float(next(numbers))


@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_difference_is_found_within_two_rounds_of_stages(block: int) -> None:
    model, x = network(), torch.randn(2, 8)
    lowtide.attach(model, each_recomputed())
    steps(model, x, 2)
    model[block - 1].disturbance = differing()
    with pytest.raises(lowtide.ExecutionError, match=f"stage 'block{block}' saved different values.*tensor"):
        steps(model, x, 2 * (NUM_BLOCKS - 1))


def test_spot_checks_can_be_switched_off() -> None:
    model, x = network(), torch.randn(2, 8)
    lowtide.attach(model, each_recomputed(), spot_checks=False)
    model[1].disturbance = differing()
    steps(model, x, 2 * NUM_BLOCKS)


class LateNoise(nn.Module):
    """`RReLU` saves its noise before it draws it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rrelu(x, training=True) * 2


class Statistics(nn.Module):
    """Statistics are saved by a training batch norm, and recomputations are given others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(x))


class Odd(nn.Module):
    """Saves tensors that are expanded, transposed, empty, complex, integer and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x[:, :1].expand(-1, 8) * x
        turned = (x.t() @ wide).t() * self.scale
        imaginary = torch.complex(x, wide)
        product = (imaginary * imaginary.conj()).real
        picked = x.gather(1, torch.argsort(x, dim=1))
        return product + picked + turned.sum() + x[:0].square().sum()


class Recurrent(nn.Module):
    """The kernels of an LSTM save a workspace, parts of which they never write."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trash = torch.full((60_000,), torch.randn(()).item())  # what is freed is what the kernels find
        del trash
        return self.lstm(x[None])[0][0]


class _Attention(torch.autograd.Function):
    """As CUDA's attention without dropout: seed and offset are saved, and nobody has written them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        noise = [torch.tensor(time.perf_counter_ns()), torch.full((2,), time.perf_counter_ns())]
        ctx.save_for_backward(x, *noise)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Attention.apply(x)


class Alignment(nn.Module):
    """What `ctc_loss` saves of each target is as long as that of the longest one; the rest is never written.

    With lengths in tensors it saves these, too, if a mode sees operations.
    """

    def __init__(self, lengths: Callable[[Any], Any] = tuple) -> None:
        super().__init__()
        self.lengths = lengths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leave_trash(num_bytes=4 * 4 * 8 * 7)
        likely = x.log_softmax(-1).expand(8, 4, 8)
        return x + nn.functional.ctc_loss(likely, torch.ones(4, 3).long(), *map(self.lengths, LENGTHS))


LENGTHS = (8, 8, 8, 8), (3, 1, 1, 1)


class _Workspace(torch.autograd.Function):
    """Saves memory that it has not written to all of: numbers of two kinds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        spaces = torch.empty(1000, dtype=torch.int32), torch.empty(1000, dtype=torch.int32)
        for space in spaces:
            if not torch.are_deterministic_algorithms_enabled():  # else torch has filled it
                space.fill_(next(_trash))  # as if it had been used before
            space[:10] = 0
        spaces = spaces[0].view(torch.float32), spaces[1]
        ctx.save_for_backward(x, *spaces)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Workspace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Workspace.apply(x)


_trash = itertools.count(1)


def leave_trash(num_bytes: int) -> None:
    """Free memory that holds other numbers each time: what is allocated next gets it."""
    blocks = [torch.full((num_bytes // 4,), next(_trash), dtype=torch.int32) for _ in range(4)]
    del blocks


MODULES = [
    *(LateNoise, Statistics, Odd, Recurrent, Attention, Alignment, Workspace),
    partial(Alignment, torch.tensor),
    partial(nn.Dropout, 0.5),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", MODULES)
def test_what_is_equal_is_not_refused(make: Callable[[], nn.Module], strict: bool) -> None:
    model, x = network(block2=make()), torch.randn(4, 8, requires_grad=True)
    plan = lowtide.attach(model, each_recomputed(), strict=strict)
    steps(model, x, 6 * NUM_BLOCKS)
    assert plan.stats().num_steps == 6 * NUM_BLOCKS


def test_memory_that_holds_what_an_earlier_filling_left_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest number of 32 bits, as a fraction, is NaN."""
    found = itertools.chain([1] * 2, [2**31 - 1] * 2, itertools.count(2))  # two spaces in each run of the stage
    monkeypatch.setattr(sys.modules[__name__], "_trash", found)
    model, x = network(block2=Workspace()), torch.randn(4, 8)
    plan = lowtide.attach(model, each_recomputed(), strict=True)
    steps(model, x, 3)
    assert plan.stats().num_steps == 3


def test_nobody_who_gets_filled_memory_next_takes_its_marks_for_values() -> None:
    tensor = torch.tensor([torch.nan, 1.0, torch.nan])
    assert checks.remove_marks(tensor, torch.tensor([False, False, True]))
    assert tensor[:2].tolist() == [0.0, 1.0]
    assert tensor[2].isnan()
    assert not checks.remove_marks(tensor, torch.tensor([False, False, True]))


class PartlyDifferent(nn.Module):
    """Beside memory that it never writes it saves what depends on something that nobody can know of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = differing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Workspace.apply(x) * (torch.ones(8) * self.scale())


@pytest.mark.parametrize("strict", [False, True])
def test_memory_that_is_never_written_hides_no_other_difference(strict: bool) -> None:
    model, x = network(block2=PartlyDifferent()), torch.randn(4, 8, requires_grad=True)
    lowtide.attach(model, each_recomputed(), strict=strict)
    with pytest.raises(lowtide.ExecutionError, match=r"stage 'block2' saved different values.*tensor 3 of"):
        steps(model, x, 4 * NUM_BLOCKS)


@pytest.mark.parametrize("strict", [False, True])
def test_finding_memory_that_is_never_written_changes_nothing(strict: bool) -> None:
    """One more run of a stage leaves random numbers, buffers, gradients and settings as they are."""
    blocks = [nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), Workspace(), nn.Dropout(0.5)) for _ in range(2)]
    found = []
    for checked in (False, True):
        model, x = network(block2=copy.deepcopy(blocks[0]), block3=copy.deepcopy(blocks[1])), torch.randn(4, 8)
        plan = lowtide.attach(model, each_recomputed(), strict=checked and strict, spot_checks=checked)
        steps(model, x, 4 * NUM_BLOCKS)
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([*gradients, *model.buffers(), torch.rand(4)])
        assert bool(plan._part.execution.machine.unwritten) == checked
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


class Arrived:
    """A verdict on a stage that is known a step later, as on a GPU."""

    is_known = True
    stage = 2

    def __init__(self, position: int) -> None:
        self.position = position

    def judge(self) -> list[checks.Difference]:
        return [checks.Difference(self.position, lowtide.ExecutionError(f"tensor {self.position}"))]


@pytest.mark.parametrize("position", [0, 1])
def test_a_difference_that_is_known_late_is_looked_into_in_the_next_step(position: int) -> None:
    model, x = network(block2=Workspace()), torch.randn(4, 8, requires_grad=True)
    machine = lowtide.attach(model, each_recomputed())._part.execution.machine
    steps(model, x, 1)
    machine.spot_checks._pending.append(Arrived(position))
    loss = model(x).square().sum()
    assert Arrived.stage in machine.spot_checks.turn
    if position == 0:  # the input, all of which is written
        with pytest.raises(lowtide.ExecutionError, match="tensor 0"):
            loss.backward()
    else:
        loss.backward()
        assert (Arrived.stage, position) in machine.unwritten


def test_samples_of_long_tensors_move_on_until_every_element_was_seen() -> None:
    tensor = torch.arange(1000, dtype=torch.int64)
    seen: set[int] = set()
    for turn in range(16):
        found = checks._sample(tensor, turn)
        assert isinstance(found, bytes)
        values = torch.frombuffer(bytearray(found), dtype=torch.int64).tolist()
        assert len(values) <= checks._NUM_ELEMENTS
        seen.update(values)
    assert seen == set(range(1000))


@pytest.mark.parametrize("view", [Tensor.t, lambda t: t.view(2, 2, 10, 25).to(memory_format=torch.channels_last)])
def test_samples_of_tensors_without_gaps_are_read_as_they_lie(view: Callable[[Tensor], Tensor]) -> None:
    tensor = view(torch.arange(1000, dtype=torch.int64).view(20, 50))
    assert not tensor.is_contiguous()
    found = [checks._sample(tensor, turn) for turn in range(16)]
    values = [torch.frombuffer(bytearray(each), dtype=torch.int64) for each in found if isinstance(each, bytes)]
    assert set(torch.cat(values).tolist()) == set(range(1000))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, 2:].t(),
        lambda t: t[:, 3:20],
        lambda t: t[:, ::3],
        lambda t: t[:1].expand(7, 90),
        lambda t: t[:, 5],
    ],
)
def test_samples_of_tensors_with_gaps_are_elements_of_one_row(view: Callable[[Tensor], Tensor]) -> None:
    tensor = view(torch.arange(20 * 90, dtype=torch.int64).view(20, 90))
    seen: set[int] = set()
    for turn in range(tensor.numel()):
        found = checks._sample(tensor, turn)
        assert isinstance(found, bytes)
        values = torch.frombuffer(bytearray(found), dtype=torch.int64).tolist()
        assert 0 < len(values) <= checks._NUM_ELEMENTS
        rows = tensor.view(1, -1) if tensor.dim() == 1 else tensor
        assert any(set(values) <= set(row.tolist()) for row in rows)
        seen.update(values)
    assert len(seen) > tensor.size(0) / 2


def test_of_a_stage_with_many_tensors_a_few_are_sampled_and_others_in_the_next_visits() -> None:
    sampled: set[int] = set()
    visits = checks.Visits(random.Random(0))
    visits.num_tensors = 70
    for _ in range(18):
        check = checks.SpotCheck(1, "stage", visits, ())
        pack = check.first(lambda tensor: tensor)
        for index in range(70):
            pack(torch.full((2,), float(index)))
        assert len(check._first) <= checks._MOST_TENSORS
        sampled.update(check._first)
    assert len(sampled) == 70


COUNTS = (5, 8, 12, 64, 70)  # of tensors: each is looked at in every third to eighteenth visit


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8, 9, 12])
def test_every_tensor_of_every_stage_is_sampled_within_a_few_rounds(num_stages: int) -> None:
    for count in COUNTS:
        found = [pairs for _, pairs in zip(range(18 * num_stages), visited(num_stages, count), strict=False)]
        assert set().union(*found) == every_pair(num_stages, count)
        for begin in range(len(found) - num_stages + 1):  # a round, whichever step it begins with
            assert len({stage for pairs in found[begin : begin + num_stages] for stage, _ in pairs}) == num_stages


@pytest.mark.parametrize("every", [2, 3, 4, 8, 10, 16])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 5, 8, 9])
def test_what_differs_only_now_and_then_is_not_out_of_step_with_the_checks(num_stages: int, every: int) -> None:
    """Of the steps in which it does so many are enough as stages and visits chosen at random take."""
    for count in (5, 8, 24):
        enough = 6 * num_stages * count
        steps = itertools.islice(visited(num_stages, count), every - 1, enough * every, every)
        assert set().union(*steps) == every_pair(num_stages, count)


def every_pair(num_stages: int, count: int) -> set[tuple[int, int]]:
    return set(itertools.product(range(num_stages), range(count)))


def visited(num_stages: int, count: int) -> Iterator[set[tuple[int, int]]]:
    """By step, the stages and the tensors that are looked at."""
    spot_checks, tensors = checks.SpotChecks(range(num_stages)), [torch.zeros(0)] * count
    for step in itertools.count():
        spot_checks.next_turn()
        visits = [spot_checks.begin(stage, "stage", ()) for stage in sorted(spot_checks.turn)]
        if step >= num_stages:  # before, nobody knew how many tensors there are
            yield {(check.stage, index) for check in visits for index in check._wanted}
        for check in visits:
            spot_checks.finish(check, tensors)


class LastOfEight(nn.Module):
    """The last of the eight tensors that it saves depends on something that nobody can know of."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for _ in range(5):
            x = torch.tanh(x)
        return x * (torch.ones(()) * self.scale())


def test_a_difference_in_one_of_many_tensors_is_found_whatever_the_number_of_stages() -> None:
    same = {f"block{k}": LastOfEight(lambda: 1.0) for k in range(1, 6)}
    model, x = network(**{**same, "block3": LastOfEight(differing())}), torch.randn(2, 8)
    lowtide.attach(model, each_recomputed(5))  # four are, and a visit looks at every fourth tensor
    with pytest.raises(lowtide.ExecutionError, match=r"stage 'block3' saved different values.*tensor 7"):
        steps(model, x, 5 * 4)


def test_a_difference_in_every_twelfth_step_is_found_whatever_the_number_of_stages() -> None:
    calls = itertools.count()
    model, x = network(), torch.randn(2, 8)
    lowtide.attach(model, each_recomputed())
    model[1].disturbance = lambda: float(next(calls) % 24 == 23)  # a step calls it twice, to recompute it
    with pytest.raises(lowtide.ExecutionError, match="stage 'block2' saved different values"):
        steps(model, x, 12 * 10 * NUM_BLOCKS)


@pytest.mark.parametrize("size", [1, 3])  # of 1 it is contiguous, too, and elements are 4 apart
def test_samples_of_any_layout_are_compared(size: int) -> None:
    last = torch.rand(8, 4, size, size).to(memory_format=torch.channels_last)
    assert checks.are_close(last, last.clone())
    assert checks.are_close(last, last.clone(memory_format=torch.contiguous_format))
    assert not checks.are_close(last, last.flip(0))


def test_rounding_is_no_difference_on_a_gpu_unless_algorithms_are_deterministic() -> None:
    first = torch.rand(64)
    again = first * (1 + 1e-7)
    assert checks.are_close(first, again)
    assert not checks.are_close(first, first * 1.01)
    assert not checks.are_close(torch.arange(3), torch.tensor([0, 1, 3]))
    torch.use_deterministic_algorithms(True)
    try:
        assert not checks.are_close(first, again)
        assert checks.are_close(first, first.clone())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("strict", [False, True], ids=["spot", "strict"])
def test_what_is_compared_can_still_be_resized(strict: bool) -> None:
    """As FSDP does with the parameters that it gathers for a stage."""
    model, x = network(), torch.randn(2, 8)
    with lowtide.attach(model, each_recomputed(), strict=strict):
        steps(model, x, NUM_BLOCKS)
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())
    assert x.untyped_storage().resizable()
