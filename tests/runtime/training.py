"""Train a model for a few steps and give back every number that training without lowtide gives: outputs, losses,
gradients of inputs and parameters, buffers, optimizer state, and the generators' states.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from lowtide.runtime.meter import exclude, held_bytes
from lowtide.runtime.model.containers import tensors_of

Numbers = dict[str, torch.Tensor]


def batches(shape: tuple[int, ...], num_steps: int, *, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(num_steps)]


def square_loss(output: Any) -> torch.Tensor:
    return sum((t.float() ** 2).mean() for t in tensors_of(output) if t.is_floating_point())


def train(
    model: nn.Module,
    inputs: list[Any],
    *,
    loss: Callable[[Any], torch.Tensor] = square_loss,
    micro_batches: int = 1,
    input_grads: bool = True,
    seed: int = 5,
    lr: float = 1e-2,
) -> Numbers:
    """Every number of the steps, by name."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # where each operation takes the host's time, a step of the optimizer, which nothing here is about, is one
    optimizer = torch.optim.Adam(trained, lr=lr, fused=all(p.device.type == "cpu" for p in trained))
    seed_all(seed)
    numbers: Numbers = {}
    for index, batch in enumerate(inputs):
        x = batch.clone().requires_grad_() if input_grads and batch.is_floating_point() else batch
        output = model(x)
        value = loss(output)
        value.backward()
        has_stepped = (index + 1) % micro_batches == 0
        if has_stepped:
            optimizer.step()
        # after the step, whose memory is the budget's: what is noted here is not
        noted = len(numbers)
        numbers.update({f"{index} output {i}": t.detach().clone() for i, t in enumerate(tensors_of(output))})
        numbers[f"{index} loss"] = value.detach().clone()
        if x.grad is not None:
            numbers[f"{index} input gradient"] = x.grad.clone()
        numbers.update({f"{index} gradient of {n}": t for n, t in gradients(model)})
        if has_stepped:
            optimizer.zero_grad()
        numbers.update({f"{index} buffer {n}": b.clone() for n, b in model.named_buffers()})
        for number in list(numbers.values())[noted:]:
            exclude(number)
    # what is only ever added to, so that it is different in the end if it was in any step
    numbers.update({f"generator {i}": state for i, state in enumerate(generator_states())})
    for i, state in enumerate(optimizer.state.values()):
        numbers.update({f"state {i} {n}": t.clone() for n, t in state.items() if isinstance(t, torch.Tensor)})
    numbers.update({f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()})
    return numbers


def above_the_least(share: float, least: int, model: nn.Module) -> int:
    """A budget of so many times what a model needs: the least that was named holds all other tensors in memory, too."""
    own = {tensor.untyped_storage()._cdata: tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    others = left_bytes() - sum(own.values())
    return others + int((least - others) * share)


def left_bytes() -> int:
    """What all tensors take that are there now, those that earlier tests left behind included: meters count them."""
    gc.collect()
    return held_bytes()


def gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad.clone()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def generator_states() -> list[torch.Tensor]:
    """Those of torch, Python and numpy."""
    _, keys, *others = numpy.random.get_state()
    states = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    states += [torch.from_numpy(keys.copy()), torch.tensor(others, dtype=torch.float64)]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return states


def assert_equal(got: Numbers, expected: Numbers) -> None:
    """Bit by bit, and nothing missing."""
    assert got.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not _same(got[name], value)]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ: {wrong[:8]}"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype == other.dtype and torch.equal(one, other):
        return True
    has_nan = one.is_floating_point() and bool(other.isnan().any())
    return has_nan and torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
