"""Data-parallel training within a memory budget on each device.

    torchrun --nproc-per-node 2 examples/ddp.py --budget 4GiB
    torchrun --nproc-per-node 2 examples/ddp.py --tiny

`lowtide.fit` comes before the wrapping; all processes take the plan of rank 0.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide


def network(width: int, depth: int) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help='bytes on each device, such as "4GiB"; default: what is free')
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    budget = arguments.budget or ("190kB" if arguments.tiny else None)  # too little to keep everything
    on_cuda = torch.cuda.is_available() and not arguments.tiny
    dist.init_process_group("nccl" if on_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    width, depth, batch = (16, 4, 32) if arguments.tiny else (512, 24, 4096)
    torch.manual_seed(0)  # the same weights everywhere
    model = network(width, depth).to(device)
    x = torch.randn(batch, width, device=device)

    # DDP keeps its buckets from step to step. Gradients are views of them, so they are there when a forward begins.
    plan = lowtide.fit(model, x, memory_budget=budget, optimizer="adamw", grads_resident=True)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())  # other data on each
    for step in range(3):
        x = torch.randn(batch, width, device=device)
        loss = nn.functional.mse_loss(wrapped(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
