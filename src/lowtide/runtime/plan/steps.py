"""Watches real training steps: which optimizer makes them, and what they take."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.runtime.measure.weights import Optimizer, has_all, trains
from lowtide.runtime.meter import StepMeter, held_bytes

# On the CPU the first steps are measured: the first optimizer step makes its state, the second shows what stays. Later
# ones are those after each power of two, as many as its exponent: what it costs goes to nothing, and loops that do
# something else every second or fourth step show all that they do. And where a forward has done more than any that was
# measured (layers left out at random), all until one has that does as much.
_NUM_MEASURED = 3

# Between them, what the loop holds when a forward begins (results that it collects, averages of weights) is looked at
# now and then, and a step that begins with too much is measured. Looking takes milliseconds in a large program, so it
# comes so many times as long after the last look as that took: 0.5 % of the time.
_TIMES_BETWEEN_LOOKS = 200


class RealSteps:
    """Watches a model while it trains.

    On CUDA the allocator has the figures. On the CPU some steps are measured, from the model's forward to the end of
    the optimizer's step, or to the next forward. Where several optimizers step, each of them ends what is counted.

    Args:
        model: the model.
        device: where it is.
        memory_budget: what steps may take; None: that is of no interest.
    """

    def __init__(self, model: nn.Module, device: torch.device, memory_budget: int | None) -> None:
        self._model = weakref.ref(model)
        self._device = device
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._have_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._meter = StepMeter()
        self._memory_budget = memory_budget
        self._is_metered = memory_budget is not None and device.type == "cpu"
        self._peak_bytes: int | None = None
        self._begun_bytes: int | None = None  # the most with which a step that was measured has begun
        self._next_look = 0.0
        self._num_begun = 0
        self._result_bytes: int | None = None
        self._node_at_start = 0
        self._most_nodes = self._most_nodes_measured = 0
        self.forget()
        looking = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps = looking()
            if steps is not None:
                steps._stepped(optimizer)

        self._hook = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, _ended, self._hook, self._meter)

    # The optimizer

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of this model or of another, has made a step."""
        if optimizer not in self._optimizers and optimizer not in self._strangers:
            model = self._model()
            is_ours = model is not None and trains(optimizer, model)
            (self._optimizers if is_ours else self._strangers).add(optimizer)
        if optimizer in self._optimizers:
            self._note()
            self._have_stepped.add(optimizer)
            if len(self._have_stepped) == len(self._optimizers):  # all that have stepped so far
                self._meter.close()

    @property
    def optimizer(self) -> Optimizer:
        """The one, or those, that step the model's parameters; None: they do not have all of them."""
        model, found = self._model(), tuple(self._optimizers)
        if model is None or not found or not has_all(found, model):
            return None
        return found if len(found) > 1 else found[0]

    def is_stepped_by_another(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether an optimizer other than this one has stepped parameters of the model."""
        return any(other is not optimizer for other in self._optimizers)

    # What steps take

    def begin(self) -> None:
        """A forward of a training step begins."""
        self.note()
        self._have_stepped.clear()
        self._num_begun += 1
        if self._is_metered and (self._is_measured() or self._begins_with_more()):
            begun_bytes = self._meter.open()
            if begun_bytes is not None:
                self._begun_bytes = max(begun_bytes, self._begun_bytes or 0)
        else:
            self._meter.close()
        self._node_at_start = _get_sequence_nr()

    def _is_measured(self) -> bool:
        exponent = self._num_begun.bit_length() - 1
        if self._num_begun <= _NUM_MEASURED or self._num_begun - 2**exponent < exponent:
            return True
        return self._most_nodes > self._most_nodes_measured

    def _begins_with_more(self) -> bool:
        """Whether the loop holds so much more than in steps that were measured that this one may exceed the budget."""
        now = time.perf_counter()
        if self._begun_bytes is None or self._peak_bytes is None or now < self._next_look:
            return False
        more_bytes = held_bytes() - self._begun_bytes
        self._next_look = now + _TIMES_BETWEEN_LOOKS * (time.perf_counter() - now)
        assert self._memory_budget is not None
        return more_bytes > 0 and self._peak_bytes + more_bytes > self._memory_budget

    def returned(self, result_bytes: int) -> None:
        """The forward has returned so much; where that is more than before, or it has done more than any forward that
        was measured, the next steps are measured.
        """
        num_nodes = _get_sequence_nr() - self._node_at_start
        self._most_nodes = max(self._most_nodes, num_nodes)
        if self._meter.is_open:
            self._most_nodes_measured = max(self._most_nodes_measured, num_nodes)
        if self._result_bytes is not None and result_bytes > self._result_bytes:
            self._num_begun = 0
        self._result_bytes = max(result_bytes, self._result_bytes or 0)

    def note(self) -> None:
        """Another forward begins: what was measured was a step, or a part of one, if no optimizer has ended it."""
        if not self._have_stepped:
            self._note()

    def _note(self) -> None:
        if self._meter.peak_bytes is not None:
            self._peak_bytes = max(self._meter.peak_bytes, self._peak_bytes or 0)

    def end(self) -> None:
        """The step, if one is measured, is over."""
        self.note()
        self._meter.close()

    @property
    def peak_bytes(self) -> int | None:
        """The most that real steps took since the last plan was made; None: not known."""
        if self._device.type == "cuda":
            # `max_memory_allocated` gives the same, and makes a table of all that the allocator counts on the way.
            counted = torch.cuda.memory_stats_as_nested_dict(self._device) if self._num_begun else {}
            return int(counted["allocated_bytes"]["all"]["peak"]) if counted else None
        return self._peak_bytes

    def forget(self) -> None:
        """Another plan is in place: what measuring, trials and steps took before it is no matter any more."""
        self._meter.close()
        self._peak_bytes, self._begun_bytes, self._num_begun = None, None, 0
        self._result_bytes = None
        self._most_nodes = self._most_nodes_measured = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        """Stop watching."""
        self.end()
        self._hook.remove()


def _ended(hook: Any, meter: StepMeter) -> None:
    """The plan is gone."""
    hook.remove()
    meter.end()


def drop_aborted_backward() -> None:
    """Free what an aborted backward has left.

    The nodes that it had still to run, and with them their graph, stay in the queue of autograd's engine until the next
    backward of this thread, so that the forward before it would run beside them. Here is that backward.
    """
    if torch._C._current_graph_task_id() != -1:  # a hook of a backward that is under way
        return
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf)
