from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import lowtide
from lowtide.runtime import meter as meter_module
from lowtide.runtime.meter import Meter, _is_frozen, exclude, settled


def test_each_storage_counts_once_and_until_it_dies() -> None:
    before = torch.zeros(100)
    with Meter("cpu") as meter:
        start = meter.live_bytes
        x = torch.zeros(1000)
        views = [x.view(10, 100), x[3:], x.t()]
        assert meter.live_bytes - start == 4000
        del x
        assert meter.live_bytes - start == 4000
        del views
        assert meter.live_bytes == start
        assert meter.peak_bytes - start == 4000
        before = before * 2
        assert meter.live_bytes == start
        assert meter.peak_bytes - start == 4000
    assert meter.start_bytes == start
    assert before.numel() == 100


def test_tensors_that_compilers_trace_with_are_not_searched() -> None:
    with FakeTensorMode():
        traced = torch.zeros(100)
    found = list(meter_module._existing_tensors())
    assert not any(each is traced for each in found)


def test_what_autograd_saves_is_live_until_backward() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    x = torch.ones(32, 64)
    with Meter("cpu") as meter:
        loss = (x @ weight).exp().sum()
        assert meter.live_bytes - meter.start_bytes == 32 * 64 * 4 + 4  # exp saves its output
        loss.backward()
        # the gradient of exp's output is expanded from one number; mul makes a new one, and the result of exp goes
        assert meter.live_bytes - meter.start_bytes == 64 * 64 * 4 + 4
        assert meter.peak_bytes - meter.start_bytes >= 2 * 32 * 64 * 4 + 4


def test_figures_are_the_same_in_each_run() -> None:
    def step() -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten())
        optimizer = torch.optim.Adam(model.parameters())
        with Meter("cpu") as meter:
            model(torch.randn(2, 3, 16, 16)).square().mean().backward()
            optimizer.step()
        return meter.peak_bytes - meter.start_bytes, meter.live_bytes - meter.start_bytes

    step()  # torch makes and keeps a few tensors the first time
    assert step() == step()


def test_peak_can_start_again() -> None:
    with Meter("cpu") as meter:
        start = meter.live_bytes
        torch.zeros(1000)
        assert meter.peak_bytes == start + 4000
        meter.reset_peak()
        assert meter.peak_bytes == start
        torch.zeros(10)
        assert meter.peak_bytes == start + 40


def test_resized_storages() -> None:
    plain = torch.UntypedStorage.resize_
    with Meter("cpu") as meter:
        start = meter.live_bytes
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == start
        x.untyped_storage().resize_(8000)
        assert meter.live_bytes == start + 8000
        y = torch.zeros(1).resize_(10)
        assert meter.live_bytes == start + 8000 + y.untyped_storage().nbytes()
        del x
    assert torch.UntypedStorage.resize_ is plain


def test_nested_meters() -> None:
    with Meter("cpu") as outer:
        start = outer.live_bytes
        x = torch.zeros(1000)
        with Meter("cpu") as inner:
            assert inner.start_bytes == start + 4000
            torch.zeros(500)
        torch.zeros(100)
        assert inner.peak_bytes == start + 6000
        assert outer.peak_bytes == start + 6000
        del x
        assert outer.live_bytes == start


def test_memory_from_elsewhere_is_seen_when_it_is_used_and_can_be_excluded() -> None:
    with Meter("cpu") as meter:
        start = meter.live_bytes
        x = torch.from_numpy(numpy.ones(100, dtype=numpy.float32))
        assert meter.live_bytes == start + 400
        y = exclude(torch.frombuffer(bytearray(400), dtype=torch.float32))
        z = y + x
        assert meter.live_bytes == start + 800
        del z


def test_existing_gradients_are_counted() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    with Meter("cpu") as meter:
        without = meter.live_bytes
    parameter.sum().backward()
    with Meter("cpu") as meter:
        assert meter.live_bytes - without == 4000


@pytest.fixture
def _unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program that freezes nothing, unlike all these tests."""
    monkeypatch.setattr(meter_module, "_is_frozen", _is_frozen)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("_unfrozen")
def test_in_a_settled_heap_all_tensors_count_and_only_new_objects_are_looked_at() -> None:
    parameter, dies = nn.Parameter(torch.ones(1000)), torch.ones(500)
    gc.collect()  # what other tests have left
    with Meter("cpu") as meter:
        before = meter.live_bytes
    with settled(torch.device("cpu")):
        assert len(gc.get_objects()) < 1000
        parameter.sum().backward()
        ring = [torch.ones(2000)]
        ring.append(ring)
        with settled(torch.device("cpu")), Meter("cpu") as meter:
            assert meter.live_bytes - before == 4000 + 8000
            del ring, dies
            gc.collect()
            assert meter.live_bytes - before == 4000 - 2000
        assert gc.get_freeze_count() > 0  # the inner block leaves the outer one's alone
        with Meter("cpu") as meter:
            assert meter.live_bytes - before == 4000 - 2000
    assert gc.get_freeze_count() == 0
    with Meter("cpu") as meter:
        assert meter.live_bytes - before == 4000 - 2000


@pytest.mark.usefixtures("_unfrozen")
def test_a_fit_that_fails_leaves_the_heap_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    looked_at = []
    monkeypatch.setattr(gc, "collect", lambda collect=gc.collect: (looked_at.append(len(gc.get_objects())), collect()))
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.fit(model, torch.ones(2, 4), memory_budget=1, bandwidth=0)
    assert gc.get_freeze_count() == 0
    assert len(looked_at) > 1
    assert looked_at[1] < looked_at[0] / 4


@pytest.mark.usefixtures("_unfrozen")
def test_what_a_program_has_frozen_stays_frozen() -> None:
    before: list[object] = [[]]
    gc.freeze()
    after: list[object] = [[]]

    def is_frozen(given: list[object]) -> bool:  # how many are changes with those that other threads free
        return all(each is not given for each in gc.get_objects())

    with settled(torch.device("cpu")):
        assert is_frozen(before)
        assert not is_frozen(after)
    assert is_frozen(before)
    assert not is_frozen(after)


def test_an_exception_closes_the_meter() -> None:
    plain = torch.UntypedStorage.resize_
    meter = Meter("cpu")
    with pytest.raises(RuntimeError, match="size"), meter:
        torch.zeros(1000) + torch.zeros(1001)
    assert meter.peak_bytes - meter.start_bytes == 8004
    assert torch.UntypedStorage.resize_ is plain


def test_changes_count_in_versions_as_they_do_without_a_meter() -> None:
    def versions() -> list[int]:
        tensors = [torch.ones(4), torch.ones(4)]
        torch._foreach_mul_(tensors, torch.tensor(2.0))
        torch._foreach_zero_(tensors)
        torch._foreach_lerp_(tensors, tensors, 0.5)
        torch._foreach_add(tensors, tensors)
        tensors[0].add_(1)
        return [tensor._version for tensor in tensors]

    plain = versions()
    with Meter("cpu"):
        assert versions() == plain


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="mps"):
        Meter("mps")


def test_a_lazy_module_that_has_no_shape_yet_does_not_count() -> None:
    lazy = torch.nn.LazyLinear(4)
    with Meter("cpu") as meter:
        assert meter.live_bytes >= 0
    assert torch.nn.parameter.is_lazy(lazy.weight)


def test_sparse_tensors_count():
    dense = torch.eye(100)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        with Meter("cpu") as meter:
            copy = sparse.clone()
        assert meter.live_bytes - meter.start_bytes >= 4 * 100 + 8 * 200  # values and indices
        with Meter("cpu") as again:
            pass
        assert again.start_bytes == meter.live_bytes
        del copy


def test_the_gradient_of_a_sparse_embedding_counts():
    embedding, numbers = torch.nn.Embedding(10, 64, sparse=True), torch.zeros(50, dtype=torch.long)
    with Meter("cpu") as meter:
        embedding(numbers).sum().backward()
    assert meter.live_bytes - meter.start_bytes == 50 * 64 * 4 + 50 * 8
