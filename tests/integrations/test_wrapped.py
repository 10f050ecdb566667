"""Models that were wrapped or sharded before `fit`: one line that says what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ddp_comes_after_fit():
    wrapped = nn.parallel.DistributedDataParallel(network())
    with pytest.raises(lowtide.PlanError, match="call fit before DistributedDataParallel"):
        lowtide.fit(wrapped, torch.zeros(2, 4), memory_budget="1GiB")


@pytest.mark.usefixtures("group")
def test_sharding_comes_after_fit():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(lowtide.PlanError, match="call fit before fully_shard"):
        lowtide.fit(model, torch.zeros(2, 4), memory_budget="1GiB")
