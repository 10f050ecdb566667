"""Checks that a recomputed stage saves what its first run saved.

Shapes and dtypes are compared always (`saved`). Values are compared in two ways:

- *Spot checks*, always on: in each step one recomputed stage, in turn, and of it a few elements of a few tensors, so
  that a step does not feel it. What makes a recomputation differ, another draw of dropout, a setting that has changed,
  a hook that was removed, changes values everywhere, so a few elements tell; and which ones are looked at changes from
  step to step. The same is done with small tensors that no run has changed so far: a recomputation that changes one in
  a way that counts no version would change it twice. Nothing is wrong in silence for longer than one round of stages.
  Now and then a step has two stages looked at, and a stage's visits go through its tensors in an order that changes:
  otherwise what differs in every tenth step only, or in one of many tensors, could be out of step with the checks for
  ever.
- *Strict mode*: every stage in each step, byte by byte. For finding out, not for training.

Some kernels save memory that they have never written, and read no more of it in backward. Where values differ, the
stage therefore runs once more with all fresh memory filled with a value that stands out: a tensor that holds it then,
and not as a rule, is not compared from then on, and what does not is an error.
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Callable, Collection, Container, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from lowtide.errors import ExecutionError
from lowtide.runtime.execute.saved import Pack, Sink

# How much of a stage a spot check looks at. A sample takes up to 10 µs of the host's time; a tensor has two or three.
# Elements that are drawn anew differ with a probability of a few percent at the least, and so do all that are computed
# from them: 64 elements of each of 2 to 4 tensors seldom miss that.
_MOST_TENSORS = 4
_FEWEST_TENSORS = 2
_NUM_PER_SAMPLE = 16  # tensors that a stage saves for each that is looked at: what a check takes follows from its size
_NUM_ELEMENTS = 64
_NUM_RUNS = 2  # in which the elements of a tensor on the CPU lie side by side
_NUM_ALONE = 8  # elements of such a tensor where they do not
_BITS_OF_A_SHIFT = 48  # more than tensors have elements
_TWO_STAGES = 0.25  # how often a step has two stages looked at: a round then begins at any stage after a few rounds

# Some of what kernels save is never written, and holds anything. Known without a further run: the workspaces of LSTM,
# which are bytes, and the seed and the offset of attention without dropout, which are whole numbers by themselves.
_WORKSPACE = torch.uint8
_MOST_IN_A_SEED = 2


def _may_be_unwritten(tensor: torch.Tensor) -> bool:
    is_number = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return tensor.dtype is _WORKSPACE or (is_number and tensor.numel() <= _MOST_IN_A_SEED)


_FEWEST_BYTES_OF_A_MARK = 2  # what marks fresh memory in smaller numbers, 127 or 255, may as well have been computed


def marks(tensor: torch.Tensor) -> torch.Tensor | None:
    """Where a tensor holds what `filling_memory` fills fresh memory with; None: that proves nothing there."""
    if tensor.layout is not torch.strided or tensor.dtype.itemsize < _FEWEST_BYTES_OF_A_MARK:
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.isnan()
        return tensor == torch.iinfo(tensor.dtype).max


def remove_marks(tensor: torch.Tensor, usual: torch.Tensor | None) -> bool:
    """Remove the marks of filled memory that a tensor does not have as a rule, so that nobody who gets the memory next
    takes them for values.

    Returns:
        Whether there were any.
    """
    found = marks(tensor)
    if found is None or usual is None or found.shape != usual.shape:
        return False
    more = found & ~usual
    if not more.any():
        return False  # and it may be memory of somebody else's: nothing is written to it
    if 0 not in tensor.stride():  # else elements share memory, and torch does not write to it
        with torch._C.DisableTorchFunction(), torch.no_grad():
            tensor.masked_fill_(more, 0)
    return True


ADVICE = (
    "something that it reads besides its input, parameters, buffers and random numbers has changed since its first run "
    "in this step. fit(..., strict=True) names the first stage that differs; spot_checks=False switches this check off"
)


class Checks(Enum):
    """Which values of recomputed stages are compared with those of their first run."""

    NONE = "none"
    SPOT = "spot"
    ALL = "all"

    @classmethod
    def of(cls, *, strict: bool, spot_checks: bool) -> Checks:
        """As a user asks for them."""
        return cls.ALL if strict else cls.SPOT if spot_checks else cls.NONE


class Difference(NamedTuple):
    """A saved tensor, by its position, that holds other values than that of the first run, and the error for that."""

    position: int
    error: ExecutionError


class Fingerprints:
    """Of the tensors that one run of a stage saves; taken when it ends, since some are filled late."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._sums: list[int | None] = []

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> Fingerprints:
        """Those of tensors that are complete."""
        made = cls()
        made._tensors = [*tensors]
        made.finish()
        return made

    def add(self, tensor: torch.Tensor) -> None:
        """Take in the next saved tensor."""
        self._tensors.append(tensor.detach())

    def finish(self, ignored: Collection[int] = ()) -> None:
        """The run has ended: keep the fingerprints alone.

        Args:
            ignored: addresses of storages that the run may have changed after it had saved them.
        """
        self._sums = [_fingerprint(tensor, ignored) for tensor in self._tensors]
        self._tensors = []

    def differences(self, first: Fingerprints, name: str) -> list[Difference]:
        """Which tensors differ from those of the first run; the name is the stage's, for messages."""
        pairs = enumerate(zip(first._sums, self._sums, strict=True))
        found = [index for index, (one, other) in pairs if one is not None and one != other]
        return [Difference(index, _differs(name, f"tensor {index} of {len(self._sums)}")) for index in found]


def noting(sink: Sink | None, note: Sink) -> Sink:
    """A sink that also passes each tensor on."""
    if sink is None:
        return note

    def noting(tensor: torch.Tensor) -> None:
        note(tensor)
        sink(tensor)

    return noting


def _fingerprint(tensor: torch.Tensor, ignored: Collection[int]) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_quantized or _may_be_unwritten(tensor):
        return None
    if tensor.untyped_storage()._cdata in ignored:
        return None
    data = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(ctypes.string_at(data.data_ptr(), data.nbytes))  # numpy's view would keep FSDP from resizing it


def _differs(name: str, tensor: str) -> ExecutionError:
    return ExecutionError(f"stage {name!r} saved different values when it was recomputed ({tensor}): {ADVICE}")


def _changes(name: str, tensor: str) -> ExecutionError:
    return ExecutionError(
        f"stage {name!r} changed {tensor!r} when it was recomputed, in a way that autograd does not count (.data), and "
        "did not in its first steps, so the last steps have changed it twice; load your last checkpoint and call fit "
        "again while it changes, or change it without .data"
    )


class Rounds:
    """The numbers below a limit, each once a round, in an order that is another one in each round.

    Args:
        generator: chooses the orders; none of the user's.
    """

    __slots__ = ("_generator", "_limit", "_rest")

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._limit = 0
        self._rest: list[int] = []

    def next(self, limit: int) -> int:
        """The next number; another limit than before begins a new round."""
        if limit != self._limit or not self._rest:
            self._limit = limit
            self._rest = self._generator.sample(range(limit), limit)
        return self._rest.pop()


class Visits:
    """What the spot checks of one stage have looked at.

    Args:
        generator: chooses what a visit looks at.
    """

    __slots__ = ("_generator", "_state", "_tensors", "num_tensors")

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._tensors = Rounds(generator)
        self._state = Rounds(generator)
        self.num_tensors = 0
        """How many tensors the stage saves at the most; 0: not known."""

    def next_tensors(self) -> range:
        """The positions of the tensors that a visit looks at, evenly spread; if nothing is known, the first ones."""
        if self.num_tensors <= _MOST_TENSORS:
            return range(self.num_tensors or _MOST_TENSORS)
        num_wanted = max(_FEWEST_TENSORS, min(self.num_tensors // _NUM_PER_SAMPLE, _MOST_TENSORS))
        every = -(-self.num_tensors // num_wanted)
        return range(self._tensors.next(every), self.num_tensors, every)

    def next_state(self, count: int) -> range:
        """The same of the tensors that no run has changed."""
        if count <= _MOST_TENSORS:
            return range(count)
        every = -(-count // _MOST_TENSORS)
        return range(self._state.next(every), count, every)

    def shift(self) -> int:
        """Chooses the elements of a tensor that a visit looks at."""
        return self._generator.getrandbits(_BITS_OF_A_SHIFT)


Sample = bytes | torch.Tensor  # of a tensor on the CPU, and of one on CUDA


class SpotCheck:
    """Samples of what one stage saves in its first run and in its first recomputation within one step.

    Some operations fill what they save while they run (the noise of `RReLU`), so that a sample that is taken when a
    tensor is saved may hold anything. After the recomputation all its tensors are there: samples that have changed by
    then are not compared.

    Args:
        stage: the stage.
        name: its name, for messages.
        visits: the stage's earlier ones; they say which tensors and which elements are to be looked at.
        ignored: addresses of storages whose values need not be those of the first run (BatchNorm's statistics).
        unwritten: the stages and positions of tensors that are not compared, since parts of them are never written.
    """

    __slots__ = ("_again", "_first", "_ignored", "_name", "_shift", "_state", "_visits", "_wanted", "stage")

    def __init__(
        self,
        stage: int,
        name: str,
        visits: Visits,
        ignored: Collection[int],
        unwritten: Container[tuple[int, int]] = (),
    ) -> None:
        self.stage = stage
        self._name = name
        self._visits = visits
        self._wanted = frozenset(index for index in visits.next_tensors() if (stage, index) not in unwritten)
        self._shift = visits.shift()
        self._ignored = ignored
        self._first: dict[int, tuple[tuple[int, ...], torch.dtype, Sample]] = {}
        self._again: dict[int, Sample] = {}
        self._state: list[tuple[str, torch.Tensor, Sample]] = []

    def first(self, pack: Pack) -> Pack:
        """The packing hook of the first run, which also takes samples."""

        def see(index: int, tensor: torch.Tensor) -> None:
            if self._can_sample(tensor):
                self._first[index] = tensor.stride(), tensor.dtype, _sample(tensor, self._shift)

        return self._seeing(pack, see)

    def again(self, pack: Pack) -> Pack:
        """The packing hook of the recomputation, which also takes samples."""

        def see(index: int, tensor: torch.Tensor) -> None:
            known = self._first.get(index)
            if known is not None and tensor.stride() == known[0]:
                self._again[index] = _sample(tensor, self._shift)

        return self._seeing(pack, see)

    def _seeing(self, pack: Pack, see: Callable[[int, torch.Tensor], None]) -> Pack:
        """A packing hook that shows the tensors whose turn it is; it runs between one kernel and the next."""
        wanted, count = self._wanted, 0

        def seeing(tensor: torch.Tensor) -> Any:
            nonlocal count
            if count in wanted:
                with torch._C.DisableTorchFunction():  # whoever watches the model's operations is not to see these
                    see(count, tensor)
            count += 1
            return pack(tensor)

        return seeing

    def _can_sample(self, tensor: torch.Tensor) -> bool:
        return self._can_be_read(tensor) and tensor.untyped_storage()._cdata not in self._ignored

    @staticmethod
    def _can_be_read(tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)  # not a subclass with ideas of its own
            and tensor.layout is torch.strided
            and tensor.numel() > 0
            and not _may_be_unwritten(tensor)
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
            and (tensor.is_cpu or tensor.is_cuda)
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        )

    def watch(self, state: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The recomputation begins, which is to change none of these tensors."""
        for index in self._visits.next_state(len(state)):
            name, tensor = state[index]
            if self._can_be_read(tensor):
                self._state.append((name, tensor, _sample(tensor, self._shift)))

    def finish(self, tensors: list[torch.Tensor]) -> tuple[list[Difference], Verdict | None]:
        """The recomputation has ended, with these tensors.

        Returns:
            Which of those on the CPU differ, and what is not known yet: samples on CUDA are compared when they have
            arrived on the host.

        Raises:
            ExecutionError: where the recomputation has changed a tensor on the CPU.
        """
        differences: list[Difference] = []
        on_device: list[_Samples] = []
        for index, again in self._again.items():
            _, dtype, first = self._first[index]
            if isinstance(first, bytes) and first == again:
                continue
            last = _sample(tensors[index], self._shift)
            error = _differs(self._name, f"tensor {index} of {len(tensors)}, {dtype}")
            if isinstance(first, torch.Tensor) and isinstance(again, torch.Tensor) and isinstance(last, torch.Tensor):
                on_device.append(_Samples(index, error, first, again, last))
            elif again == last:
                differences.append(Difference(index, error))
        for name, tensor, before in self._state:
            after = _sample(tensor, self._shift)
            if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
                on_device.append(_Samples(None, _changes(self._name, name), before, after, after))
            elif before != after:
                raise _changes(self._name, name)
        self._first.clear()
        self._again.clear()
        self._state.clear()
        return differences, Verdict(self.stage, on_device) if on_device else None


class SpotChecks:
    """The spot checks of a plan: whose turn it is, and what is not known yet.

    Args:
        stages: those that are recomputed.
        unwritten: the stages and positions of tensors that are not compared, since parts of them are never written.
    """

    def __init__(self, stages: Collection[int], unwritten: Container[tuple[int, int]] = ()) -> None:
        self._stages = tuple(stages)
        self._unwritten = unwritten
        # Seeded alike, so that all processes check the same stages in a step; apart, since what is drawn for a visit
        # depends on what a stage saves.
        self._turns, self._generator = random.Random(0), random.Random(0)
        self._num_looked_at = 0
        self._visits: dict[int, Visits] = {}
        self._pending: list[Verdict] = []
        self._late: dict[int, list[Difference]] = {}  # by stage, those that were known only after its recomputation
        self.turn: frozenset[int] = frozenset()
        """The stages that are looked at in this step."""

    def next_turn(self) -> None:
        """A step begins; stages that have differed before are looked at beside those whose turn it is."""
        if not self._stages:
            return
        begin = self._num_looked_at
        self._num_looked_at += 2 if self._turns.random() < _TWO_STAGES else 1
        turn = (self._stages[place % len(self._stages)] for place in range(begin, self._num_looked_at))
        self.turn = frozenset((*turn, *self._late))

    def begin(self, stage: int, name: str, ignored: Collection[int]) -> SpotCheck:
        """Look at a stage whose turn it is."""
        if stage not in self._visits:
            self._visits[stage] = Visits(self._generator)
        return SpotCheck(stage, name, self._visits[stage], ignored, self._unwritten)

    def finish(self, check: SpotCheck, tensors: list[torch.Tensor]) -> list[Difference]:
        """The recomputation has ended, with these tensors.

        Returns:
            Which of them differ, or did the last time, as far as that is known by now.

        Raises:
            ExecutionError: where the recomputation has changed a tensor that no run has changed before.
        """
        visits = self._visits[check.stage]
        visits.num_tensors = max(visits.num_tensors, len(tensors))
        differences, verdict = check.finish(tensors)
        if verdict is not None:
            self._pending.append(verdict)
        return self._late.pop(check.stage, []) + differences

    def judge(self, can_repeat: Callable[[int], bool]) -> None:
        """Compare the samples that have arrived; wait for none.

        Args:
            can_repeat: whether a stage can run once more to find memory that is never written.

        Raises:
            ExecutionError: where they differ, and the stage cannot run once more to find out why.
        """
        while self._pending and self._pending[0].is_known:
            verdict = self._pending.pop(0)
            differences = [each for each in verdict.judge() if (verdict.stage, each.position) not in self._unwritten]
            if differences and not can_repeat(verdict.stage):
                raise differences[0].error
            if differences:
                self._late[verdict.stage] = differences


class _Samples(NamedTuple):
    """Of one tensor: from its first run, from the recomputation, and from its end; and the error if they differ.

    The position is None where the stage does not save it.
    """

    position: int | None
    error: ExecutionError
    first: torch.Tensor
    again: torch.Tensor
    last: torch.Tensor


class Verdict:
    """Samples of one stage on their way from a CUDA device to the host, to be compared there once they have arrived."""

    def __init__(self, stage: int, samples: list[_Samples]) -> None:
        self.stage = stage
        self._places = [(each.position, each.error, each.first.dtype, each.first.nbytes) for each in samples]
        parts = [part.view(torch.uint8) for each in samples for part in (each.first, each.again, each.last)]
        self._host = torch.cat(parts).to("cpu", non_blocking=True)  # into pinned memory: nobody waits
        self._arrived: Any = torch.cuda.Event()
        self._arrived.record()

    @property
    def is_known(self) -> bool:
        """Whether the samples have arrived."""
        return bool(self._arrived.query())

    def judge(self) -> list[Difference]:
        """Compare the samples.

        Returns:
            Which of the tensors that the stage saves differ.

        Raises:
            ExecutionError: where the recomputation has changed a tensor that it does not save.
        """
        begin, differences = 0, []
        for index, error, dtype, num_bytes in self._places:
            first, again, last = self._host[begin : begin + 3 * num_bytes].clone().view(3, num_bytes)
            begin += 3 * num_bytes
            is_settled = (again == last).view(num_bytes // dtype.itemsize, -1).all(1)
            if are_close(first.clone().view(dtype)[is_settled], again.clone().view(dtype)[is_settled]):
                continue
            if index is None:
                raise error
            differences.append(Difference(index, error))
        return differences


def are_close(first: torch.Tensor, again: torch.Tensor) -> bool:
    """Whether two samples are equal, as far as a GPU's kernels repeat their own numbers.

    With deterministic algorithms that is bit by bit. Without them some add up in another order each time; what
    `torch.testing` takes for rounding of a dtype is rounding here, too.
    """
    if torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (first, again))):
        return True
    if torch.are_deterministic_algorithms_enabled() or not (first.is_floating_point() or first.is_complex()):
        return False
    try:
        torch.testing.assert_close(again, first, equal_nan=True)
    except AssertionError:
        return False
    return True


def _sample(tensor: torch.Tensor, shift: int) -> Sample:
    """A few elements of a tensor, evenly spread, from a place on that the shift says."""
    if tensor.is_cpu:
        return _runs_of(tensor, shift) if tensor.is_contiguous() or _is_dense(tensor) else _row_of(tensor, shift)
    row = tensor.detach()
    if not row.is_contiguous():
        while row.dim() > 1:
            shift, index = divmod(shift, row.size(0))
            row = row.select(0, index)
    count = row.numel()
    step = -(-count // _NUM_ELEMENTS)
    begin = shift % step
    stride = row.stride(-1) if row.dim() == 1 and count > 1 else 1
    length = -(-(count - begin) // step)
    return row.as_strided((length,), (step * stride,), row.storage_offset() + begin * stride).clone()


def _runs_of(tensor: torch.Tensor, shift: int) -> bytes:
    """A few runs of elements, read from memory: operations would take ten times as long."""
    address, num_bytes, count = tensor.data_ptr(), tensor.element_size(), tensor.numel()
    if count <= _NUM_ELEMENTS:
        return ctypes.string_at(address, count * num_bytes)
    apart, length = -(-count // _NUM_RUNS), _NUM_ELEMENTS // _NUM_RUNS
    starts = range(shift * length % apart, count, apart)
    return b"".join([ctypes.string_at(address + n * num_bytes, min(length, count - n) * num_bytes) for n in starts])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie side by side, in whatever order: a transposed weight, channels last."""
    count = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride != count:
                return False
            count *= size
    return True


def _row_of(tensor: torch.Tensor, shift: int) -> bytes:
    """A few elements of one row of a tensor that has gaps, read in the same way."""
    sizes, strides, num_bytes = tensor.size(), tensor.stride(), tensor.element_size()
    start = tensor.data_ptr()
    for size, stride in zip(sizes[:-1], strides[:-1], strict=True):
        shift, index = divmod(shift, size)
        start += num_bytes * index * stride
    count, apart = sizes[-1], strides[-1] * num_bytes
    if apart == num_bytes:
        first = shift % max(1, count - _NUM_ELEMENTS + 1)
        return ctypes.string_at(start + first * num_bytes, min(count, _NUM_ELEMENTS) * num_bytes)
    step = -(-count // _NUM_ALONE)
    return b"".join([ctypes.string_at(start + n * apart, num_bytes) for n in range(shift % step, count, step)])
