"""Room on the lower tier: taken, given back, limited; what comes back is what went."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from tests.runtime import models
from tests.runtime.models import SHAPE, N
from tests.runtime.schedules import offloading, random_schedule
from tests.runtime.training import assert_equal, batches, train
from torch import nn

import lowtide
from lowtide.errors import ExecutionError
from lowtide.runtime.transfer.arena import Arena, Pieces, rounded
from lowtide.runtime.transfer.bandwidth import measured_bandwidth
from lowtide.runtime.transfer.cargo import Cargo
from lowtide.runtime.transfer.file_tier import FileTier


class SimplePiece:
    def __init__(self, num_bytes: int) -> None:
        self.arena = Arena(num_bytes)


def test_room_is_never_given_twice_and_all_of_it_comes_back():
    rng, arena = random.Random(0), Arena(100 * 512)
    taken: dict[int, int] = {}
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            offset = rng.choice(list(taken))
            arena.give_back(offset, taken.pop(offset))
        else:
            num_bytes = rng.randint(0, 5000)
            offset = arena.take(num_bytes)
            if offset is not None:
                for other, size in taken.items():
                    assert offset + rounded(num_bytes) <= other or other + rounded(size) <= offset
                taken[offset] = num_bytes
    for offset, num_bytes in taken.items():
        arena.give_back(offset, num_bytes)
    assert arena.free_bytes == arena.capacity_bytes
    assert arena.take(arena.capacity_bytes) == 0


def test_the_garbage_collector_may_give_room_back_while_some_is_taken():
    arena = Arena(8 * 512)
    offset = arena.take(512)
    thread = threading.Thread(target=arena.give_back, args=(offset, 512), daemon=True)
    with arena._lock:  # as while `take` looks for room, where the collector may run at any allocation
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert arena.free_bytes == arena.capacity_bytes


def test_pieces_are_made_as_they_are_needed_up_to_a_limit():
    pieces = Pieces(SimplePiece, 4 * 512, 2 * 512, limit_bytes=7 * 512)
    rooms = [pieces.take(3 * 512)]
    assert [piece.arena.capacity_bytes for piece in pieces.made] == [4 * 512]
    rooms += [pieces.take(512), pieces.take(512)]
    assert [pieces.made.index(piece) for piece, _ in rooms] == [0, 0, 1]
    assert [piece.arena.capacity_bytes for piece in pieces.made] == [4 * 512, 2 * 512]
    rooms.append(pieces.take(512))
    rooms.append(pieces.take(512))  # what the limit leaves is less than a piece has otherwise
    assert pieces.capacity_bytes == 7 * 512
    with pytest.raises(ExecutionError, match="no room for"):
        pieces.take(512)
    del rooms[0]
    assert pieces.take(1024)[0] is pieces.made[0]


def test_a_piece_serves_one_schedule_after_the_other():
    pieces = Pieces(SimplePiece, 4 * 512, 512, limit_bytes=9 * 512)
    rooms = [pieces.take(512)]
    first = pieces.made[0]
    rooms.clear()
    pieces.expect(3 * 512)
    rooms.append(pieces.take(512))
    assert pieces.made == [first]  # it has room
    pieces.expect(4 * 512)
    rooms.append(pieces.take(512))
    assert [piece.arena.capacity_bytes for piece in pieces.made] == [4 * 512, 4 * 512]  # the first one is in use
    rooms.clear()
    pieces.expect(9 * 512)
    rooms.append(pieces.take(9 * 512))
    assert [piece.arena.capacity_bytes for piece in pieces.made] == [9 * 512]


def test_where_the_limit_is_reached_what_is_free_serves_the_next_schedule():
    pieces = Pieces(SimplePiece, 4 * 512, 512, limit_bytes=4 * 512)
    rooms = [pieces.take(512)]
    pieces.expect(4 * 512)
    rooms.append(pieces.take(3 * 512))
    assert [piece.arena.capacity_bytes for piece in pieces.made] == [4 * 512]  # and none without any bytes


def test_views_of_one_storage_move_once_and_come_back_as_they_were():
    tier = FileTier()
    base = torch.randn(64, 30)
    views = [base, base.T, base[:, 10:20], base[::2, ::3], base[5].expand(4, 30), base.view(-1)[7:100]]
    expected = [view.clone() for view in views]
    cargo = Cargo()
    kept = [cargo.view(view) for view in views]
    assert cargo.offload(tier) == base.untyped_storage().nbytes()
    cargo.leave()
    base.fill_(float("nan"))
    assert cargo.prefetch(tier) == base.untyped_storage().nbytes()
    cargo.arrive()
    for view, value, before in zip(kept, expected, views, strict=True):
        assert torch.equal(view.tensor(), value)
        assert view.tensor().stride() == before.stride()
    tier.close()


class Spectral(nn.Module):
    """Saves tensors that are marked as conjugated or negated, with other numbers in their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(models.WIDTH, models.WIDTH, dtype=torch.cfloat) / 4)

    def forward(self, x):
        y = x.conj() @ self.weight
        z = torch.complex(y.real.tanh(), y.conj().imag)
        return (z * x.conj() + y.conj().imag * y.abs()).conj()


@pytest.mark.parametrize("strict", [False, True])
def test_conjugated_tensors_come_back_conjugated(strict):
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Spectral() for _ in range(4)))

    def numbers(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(6, models.WIDTH, dtype=torch.cfloat, generator=torch.Generator().manual_seed(1))
        model(x).abs().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = numbers(make())
    for schedule in (offloading(4), random_schedule(4, 3, moves=0.5)):
        model = make()
        with lowtide.attach(model, schedule, strict=strict) as plan:
            assert all(map(torch.equal, numbers(model), expected))
            assert plan.stats().moved_bytes_per_step > 0


def test_what_is_too_small_to_be_worth_a_copy_stays():
    tier = FileTier()
    tier.smallest_bytes = 1000
    small, large = torch.randn(100), torch.randn(1000)
    cargo = Cargo()
    kept = [(cargo.view(tensor), tensor.clone()) for tensor in (small, large)]
    assert cargo.offload(tier) == large.untyped_storage().nbytes()
    cargo.leave()
    large.fill_(float("nan"))
    assert cargo.prefetch(tier) == large.untyped_storage().nbytes()
    cargo.arrive()
    for view, value in kept:
        assert torch.equal(view.tensor(), value)
    assert kept[0][0].tensor().data_ptr() == small.data_ptr()
    tier.close()


@pytest.mark.parametrize("smallest_bytes", [1, 200, 10**9])
def test_steps_are_the_same_whatever_is_too_small(smallest_bytes, monkeypatch):
    monkeypatch.setattr(FileTier, "smallest_bytes", smallest_bytes)
    model, twin = models.stages_of_every_kind(), models.stages_of_every_kind()
    with lowtide.attach(model, offloading(N)) as plan:
        assert_equal(train(model, batches(SHAPE, 3)), train(twin, batches(SHAPE, 3)))
        assert (plan.stats().moved_bytes_per_step > 0) == (smallest_bytes < 10**9)


def test_files_are_reused_over_many_steps():
    model = models.stages_of_every_kind()
    with lowtide.attach(model, offloading(N)) as plan:
        tier = plan._part.execution.machine.tier
        train(model, batches(SHAPE, 1))
        capacity = tier.capacity_bytes
        train(model, batches(SHAPE, 8))
        assert tier.capacity_bytes == capacity
        assert all(piece.arena.free_bytes == piece.arena.capacity_bytes for piece in tier._pieces.made)


def test_the_host_budget_is_a_limit():
    model = models.stages_of_every_kind()
    with (
        lowtide.attach(model, offloading(N), host_memory_budget=600),
        pytest.raises(lowtide.ExecutionError, match="host_memory_budget 600 B has no room"),
    ):
        model(batches(SHAPE, 1)[0])
    with lowtide.attach(model, offloading(N), host_memory_budget="1MiB"):
        model(batches(SHAPE, 1)[0]).sum().backward()


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    tier = FileTier(folder=str(tmp_path / "missing"))
    with pytest.raises(lowtide.ExecutionError, match="TMPDIR"):
        tier.store([torch.zeros(10).untyped_storage()])


def test_the_bandwidth_is_measured_once():
    assert measured_bandwidth(torch.device("cpu")) == measured_bandwidth(torch.device("cpu")) > 0


def in_child(work: Callable[[], None]) -> None:
    """Run something in a forked child; an error there, and one that never ends, fails here."""
    process = os.fork()
    if not process:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    for _ in range(600):
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    pytest.fail("the child has not ended")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork of a process with threads is what this is about
def test_a_forked_child_moves_activations_in_files_of_its_own():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))), torch.randn(32, 64)
    expected = train(copy.deepcopy(model), [x, x])
    with lowtide.attach(model, offloading(4)):
        pending = model(x).sum()

        def child() -> None:
            with pytest.raises(ExecutionError, match="before this process was forked"):
                pending.backward()
            model.zero_grad()
            assert_equal(train(model, [x, x]), expected)

        in_child(child)
        pending.backward()  # what the parent has offloaded is as it was
        assert torch.equal(model[0][0].weight.grad, _gradient(copy.deepcopy(model), x))


def _gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(x).sum().backward()
    return model[0][0].weight.grad
