"""Measuring on CUDA: peaks against the allocator, times against a plain step, nothing left behind."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gradient_check import check_gradients, plain_noise
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide import zoo
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.measure.backward import wait_for_autograd
from lowtide.runtime.meter import Meter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NETWORKS = {
    "resnet50": {"batch": 8, "image": 224},
    "densenet121": {"batch": 8, "image": 224},
    "vgg19": {"batch": 8, "image": 224},
    "gpt2": {"batch": 4, "length": 512, "layers": 6, "width": 512, "heads": 8, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_predicted_peak_of_store_all_is_near(name: str) -> None:
    model, sample = zoo.make(name, device="cuda", **NETWORKS[name])
    chain = lowtide.measure(model, sample)
    predicted = lowtide.solve(chain, memory_budget="1TiB", strategy="store-all").peak_bytes
    with Meter("cuda") as meter:
        model(**sample).backward()
    assert abs(predicted - meter.peak_bytes) <= 0.05 * meter.peak_bytes


def test_nothing_is_left_behind_on_the_device() -> None:
    model, sample = zoo.make("resnet18", device="cuda", batch=4, image=64)
    model(**sample).backward()  # workspaces are there from now on
    model.zero_grad(set_to_none=True)
    lowtide.measure(model, sample)
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    buffers = {key: value.clone() for key, value in model.state_dict().items()}
    allocated = torch.cuda.memory_allocated() - before
    lowtide.measure(model, sample)
    assert torch.cuda.memory_allocated() == before + allocated
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(torch.equal(value, buffers[key]) for key, value in model.state_dict().items())


def test_autograd_holds_nothing_after_waiting() -> None:
    leaf = torch.ones(2**22, device="cuda", requires_grad=True)
    live = []
    for _ in range(300):
        gradients = torch.autograd.grad((leaf * 2).sum(), leaf)
        del gradients
        wait_for_autograd(leaf.device)
        live.append(torch.cuda.memory_allocated())
    assert max(live) - min(live) < 2**20  # the gradient has 16 MiB


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_stages_run_again(name: str) -> None:
    """Other kernels of attention add in no fixed order: one of 60 plain steps differed, beside other processes."""
    torch.backends.cudnn.deterministic = True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            model, sample = zoo.make(name, device="cuda", **NETWORKS[name])
            split = capture(model, sample)
            check = check_gradients(model, split, sample)
            assert check.equal or check.largest_difference <= 10 * plain_noise(model, split, sample)
    finally:
        torch.backends.cudnn.deterministic = False


def test_provenance_names_the_device_and_the_launching() -> None:
    model, sample = zoo.make("resnet18", device="cuda", batch=2, image=64)
    chain = lowtide.measure(model, sample)
    assert chain.provenance["device"] == torch.cuda.get_device_name()
    assert all(launch > 0 for pair in chain.provenance["launch_seconds"] for launch in pair)
