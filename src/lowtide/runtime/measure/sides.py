"""Side values: the memory that skips stages, and where it counts.

A side value is one storage that a stage makes and that a later stage than the next one, or the caller, reads. It is
neither in what its maker leaves nor in what its readers save. A schedule frees it after the backward of its first
reader; where the maker's own backward needs it too, the next stage counts as a reader (it is there anyway), and the
backward of the maker takes its bytes besides. What the caller has in hand stays beyond that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lowtide.chain import SideValue
from lowtide.runtime.measure.stage_figures import StageFigures
from lowtide.runtime.measure.stages import StagedModel
from lowtide.runtime.replay.tape import Origin


@dataclass(frozen=True, slots=True)
class Skipping:
    """One storage that skips stages.

    Args:
        name: for people.
        num_bytes: its size; 0 for what is there anyway, such as a view of a parameter.
        maker: the stage that makes it.
        readers: the stages that read it.
        origins: the tensors in it that skip stages.
        is_returned: the caller has it in hand while backward runs.
        held_until: the last stage at whose beginning the model's own code holds it.
        stays: it cannot be moved: the caller has it in hand at some time, or a recomputation holds it as it is (what no
            gradient flows through, and what is left in an attribute).
    """

    name: str
    num_bytes: int
    maker: int
    readers: frozenset[int]
    origins: frozenset[Origin]
    is_returned: bool = False
    stays: bool = False
    held_until: int = 0

    @property
    def tensor(self) -> int:
        """Its number among the tensors of its maker."""
        return min(number for stage, number in self.origins if stage == self.maker)

    def is_saved(self, figures: Sequence[StageFigures]) -> bool:
        """Whether the backward of its maker needs it."""
        maker = figures[self.maker - 1]
        ways = (maker, *(each for _, each in maker.variants))
        return any((self.maker, number) in self.origins for each in ways for number in each.saved_held)

    def as_side_value(self, figures: Sequence[StageFigures]) -> SideValue:
        """The side value in a chain with these figures."""
        readers = set(self.readers)
        if self.is_saved(figures):
            readers.add(self.maker + 1)
        if self.is_returned:
            readers.add(len(figures))
        if self.is_passed_on(figures):
            readers.add(max(readers) + 1)
        grad_bytes = self.grad_bytes(figures)
        held_until = self.held_until if self.held_until > max(readers) else 0
        return SideValue(
            self.name, self.num_bytes, self.maker, tuple(sorted(readers)), grad_bytes, self.stays, held_until
        )

    def is_passed_on(self, figures: Sequence[StageFigures]) -> bool:
        """Whether its gradient is the gradient of its last reader's output, and so made by the stage after that."""
        last = max(self.readers)
        if last == len(figures) or self.is_returned:
            return False
        held = figures[last - 1].held
        return any(held[place][0] in self.origins for place in figures[last - 1].passed_on)

    def grad_bytes(self, figures: Sequence[StageFigures]) -> int:
        """What its gradient takes; that of what only the caller reads is among those with which backward begins."""
        return max(sum(size for origin, size in figure.held if origin in self.origins) for figure in figures)


def skipping_in(staged: StagedModel, *, keeps_result: bool) -> list[Skipping]:
    """What skips stages in a recorded forward, in the order in which it is made."""
    there = _addresses((*staged.model.parameters(), *staged.model.buffers(), *staged.inputs()))
    groups: dict[int, list[Origin]] = {}
    for origin in sorted(staged.held):
        for address in _addresses([staged.held[origin]]):
            groups.setdefault(address, []).append(origin)
    found = []
    for address, origins in groups.items():
        maker = origins[0][0]
        readers = {k for origin in origins for k in (origin[0], *staged.readers[origin]) if k > maker}
        is_returned = not staged.returned.isdisjoint(origins)
        is_differentiable = any(staged.held[origin].requires_grad for origin in origins)
        num_bytes = 0 if address in there else staged.held[origins[0]].untyped_storage().nbytes()
        found.append(
            Skipping(
                staged.split.stages[maker - 1].units[-1].path,
                num_bytes,
                maker,
                frozenset(readers or {maker + 1}),  # else a loop has it that is done with it before backward
                frozenset(origins),
                is_returned and keeps_result,
                is_returned or not num_bytes or not is_differentiable or min(origins)[1] < 0,
                max((k for k, alive in enumerate(staged.first_alive, 1) if alive.keys() & set(origins)), default=0),
            )
        )
    return found


def with_side_values(figures: Sequence[StageFigures], skipping: Iterable[Skipping]) -> list[StageFigures]:
    """The figures where each side value is freed after the backward of its first reader."""
    found = list(figures)
    for each in skipping:
        side = each.as_side_value(figures)
        # What the caller has in hand stays until backward has ended, and what the maker saves until its own backward.
        for k in range(1, side.readers[0]) if each.is_returned else ():
            found[k - 1] = found[k - 1].with_more(each.num_bytes, each.num_bytes)
        if each.is_saved(figures) and not each.is_returned:
            found[each.maker - 1] = found[each.maker - 1].with_more(0, each.num_bytes)
        last = side.readers[-1]
        if each.is_passed_on(figures):
            found[last - 2] = found[last - 2].with_less_gradient(side.grad_bytes)
        elif any(origin in each.origins for origin, _ in figures[last - 1].held):  # its gradient is made there, and
            found[last - 1] = found[last - 1].with_more(0, -side.grad_bytes)  # counted by itself
    return found


def with_outliving(
    figures: Sequence[StageFigures], skipping: Sequence[Skipping], staged: StagedModel
) -> list[StageFigures]:
    """The figures with what of a stage is read later, and with what the model's own code holds beyond its use when a
    stage begins: a variable, the arguments of a call around it, a list.

    What of it is the output of an earlier stage counts where the schedule does not store that anyway (`outliving`). The
    rest counts in every forward; where all is saved, most of it is what an earlier stage has saved: there it counts as
    far as plain training takes no more for it.

    Args:
        figures: of each stage.
        skipping: what skips stages; a schedule counts it.
        staged: knows what was there when each stage began in the model's own run, which kept nothing for backward.
    """
    sides = [sum(each.num_bytes for each in skipping if each.maker == k) for k in range(len(figures) + 1)]
    left_bytes = sum(figure.saved_bytes for figure in figures) + sum(sides)  # until the end of a forward that saves all
    start_bytes = staged.first_start_bytes
    found = []
    for k, figure in enumerate(figures, start=1):
        counted_bytes = figures[k - 2].output_bytes + sum(sides[:k]) if k > 1 else 0
        more_bytes = max(0, start_bytes[k - 1] - start_bytes[0] - counted_bytes)
        outliving = _held_outputs(staged, skipping, k, more_bytes)
        more_bytes -= sum(num_bytes for _, num_bytes in outliving)
        left_bytes -= figure.saved_bytes + sides[k]
        found.append(
            replace(
                figure,
                outliving=outliving,
                read=tuple(staged.stage(k).output_numbers),
                forward_extra_bytes=figure.forward_extra_bytes + more_bytes,
                saving_extra_bytes=figure.saving_extra_bytes
                + min(more_bytes, max(0, left_bytes - figure.saving_extra_bytes)),
            )
        )
    return found


def _held_outputs(
    staged: StagedModel, skipping: Sequence[Skipping], k: int, most_bytes: int
) -> tuple[tuple[int, int], ...]:
    """The outputs of stages before k - 1 that are held when stage k begins: which stage's, and how many bytes."""
    alive = staged.first_alive[k - 1]
    counted = {alive[origin][0] for each in skipping for origin in each.origins if origin in alive}
    found: dict[int, int] = {}
    for (m, number), (address, num_bytes) in sorted(alive.items(), reverse=True):
        is_output = number in staged.stage(m + 1).input_numbers
        if is_output and address not in counted and num_bytes <= most_bytes:
            counted.add(address)
            most_bytes -= num_bytes
            found[m] = found.get(m, 0) + num_bytes
    return tuple(sorted(found.items()))


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
