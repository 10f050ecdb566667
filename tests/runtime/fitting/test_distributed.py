"""Two processes: DDP and FSDP2 under a plan give what they give without."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.processes import run_two
from torch import nn

import lowtide
from lowtide import Backward, Forward, Schedule
from lowtide.runtime.compile.compiled import CompiledLayer
from lowtide.runtime.model.call_site import layers_of

WIDTH, DEPTH = 16, 3


def make() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(DEPTH)
    ]
    return nn.Sequential(*blocks)


def recompute() -> Schedule:
    operations = [Forward(1, "keep"), *(Forward(k, "drop") for k in range(2, DEPTH)), Forward(DEPTH, "all")]
    operations += [Backward(DEPTH), *(Forward(k, "all") for k in range(1, DEPTH))]
    return Schedule("", [*operations, *(Backward(k) for k in range(DEPTH - 1, 0, -1))])


def numbers_of(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(8, WIDTH)
        loss = model(x).square().mean()
        loss.backward()
        found.append(loss.detach().clone())
        found += [_local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found += [_local(p.detach()).clone() for p in model.parameters()]
        found += [b.clone() for b in model.buffers()]
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def ddp(rank: int, attach) -> list[torch.Tensor]:
    model = make()
    attach(model)
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: ready.append(name))
    wrapped = nn.parallel.DistributedDataParallel(model)
    found = numbers_of(wrapped, rank)
    assert len(ready) == 3 * len(set(ready)), "each parameter is ready once a step"
    return found


def fsdp(rank: int, attach) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = make()
    attach(model)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return numbers_of(model, rank)


def by_hand(model: nn.Module) -> None:
    lowtide.attach(model, recompute())


def fitted(model: nn.Module) -> None:
    torch.manual_seed(7)
    plan = lowtide.fit(model, torch.randn(8, WIDTH), memory_budget="1GiB", bandwidth=0, strategy="segments")
    plans = [None, None]
    torch.distributed.all_gather_object(plans, plan.to_dict())
    assert plans[0] == plans[1], "all ranks take rank 0's plan"


def fitted_and_compiled(model: nn.Module) -> None:
    options = {"bandwidth": 0, "strategy": "segments", "compile_stages": {"backend": "aot_eager"}, "variants": False}
    lowtide.fit(model, torch.randn(8, WIDTH), memory_budget="1GiB", **options)
    assert all(layers_of(block, CompiledLayer) for block in model), "all ranks run compiled blocks"


def compiled(model: nn.Module) -> None:
    for block in model:
        block.compile(backend="aot_eager", dynamic=False)


def nothing(model: nn.Module) -> None:
    pass


CASES = {
    "ddp": (ddp, nothing, by_hand),
    "ddp fitted": (ddp, nothing, fitted),
    "ddp fitted and compiled": (ddp, compiled, fitted_and_compiled),
    "fsdp": (fsdp, nothing, by_hand),
}


def worker(rank: int, folder: str) -> None:
    """All cases, one after the other, in one of two processes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert {name: differing(rank, *case) for name, case in CASES.items()} == {case: [] for case in CASES}
    torch.distributed.destroy_process_group()


@functools.cache
def without_a_plan(rank: int, run, plain) -> list[torch.Tensor]:
    return run(rank, plain)


def differing(rank: int, run, plain, attach) -> list[int]:
    """Which of all numbers are not those without a plan."""
    expected, got = without_a_plan(rank, run, plain), run(rank, attach)
    return [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
def test_two_processes_as_without_a_plan(tmp_path):
    run_two(worker, tmp_path, seconds=300)
