"""The measured figures of a model's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.runtime.measure.timing import NOTHING, Timing

Origin = tuple[int, int]
"""The stage that made a held tensor, and its number there."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """The measured figures of one stage.

    Args:
        output_bytes: the storages of what the next stage reads, or the caller after the last; held ones excepted.
        saved_bytes: what a forward that saves all leaves on the device, held tensors excepted.
        grad_bytes: the gradients of the outputs.
        forward_extra_bytes: the peak of a forward beyond what it leaves, whether it saves all or nothing.
        saving_extra_bytes: the same of a forward that saves all; compiled code, which frees nothing before its end,
            takes much less beyond what it leaves then.
        backward_peak_bytes: the peak of a backward beyond what was there and the gradients of its outputs and inputs;
            below 0 if much is freed before these are made.
        largest_weight_grad_bytes: the largest gradient of one parameter.
        own_held_bytes: tensors that it makes and that are held.
        saves_input: whether any of its input stays after its forward: for its backward, or as a part of its output.
        saves_output: whether autograd keeps any of its output for its backward.
        parameters: the names of those that its backward reaches.
        held: the origins of the held tensors whose gradients its backward adds to.
        forward: time of a forward that saves all.
        backward: time of the backward.
        rerun: time of a forward that ends with the last tensor that it saves; None where that is its end.
        variants: the names and figures of other ways to run it, each found to compute the same.
        notes: what people should know of it, such as variants that were refused.
    """

    output_bytes: int = 0
    saved_bytes: int = 0
    grad_bytes: int = 0
    forward_extra_bytes: int = 0
    saving_extra_bytes: int = 0
    backward_peak_bytes: int = 0
    largest_weight_grad_bytes: int = 0
    own_held_bytes: int = 0
    saves_input: bool = True
    saves_output: bool = True
    parameters: tuple[str, ...] = ()
    held: tuple[Origin, ...] = ()
    forward: Timing = NOTHING
    backward: Timing = NOTHING
    rerun: Timing | None = None
    variants: tuple[tuple[str, StageFigures], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rerun_share(self) -> float:
        """What part of a forward's time such a forward takes."""
        if self.rerun is None or self.rerun.seconds >= self.forward.seconds:
            return 1.0
        return self.rerun.seconds / self.forward.seconds

    def variant(self, name: str) -> StageFigures:
        """The figures of a variant; the stage's own where it has none of that name."""
        return next((figures for found, figures in self.variants if found == name), self)

    def with_input_saved(self) -> StageFigures:
        """The stage, and its variants, as if all of its input stayed after its forward."""
        variants = tuple((name, each.with_input_saved()) for name, each in self.variants)
        return replace(self, saves_input=True, variants=variants)

    def with_more(self, forward_bytes: int, backward_bytes: int) -> StageFigures:
        """The stage, and its variants, where forward and backward take more."""
        return replace(
            self,
            forward_extra_bytes=self.forward_extra_bytes + forward_bytes,
            saving_extra_bytes=self.saving_extra_bytes + forward_bytes,
            backward_peak_bytes=self.backward_peak_bytes + backward_bytes,
            variants=tuple((name, each.with_more(forward_bytes, backward_bytes)) for name, each in self.variants),
        )


def unsaved_input_bytes(before: StageFigures, figure: StageFigures) -> int:
    """The bytes of a stage's input that are freed after its forward: neither it nor its maker saves them.

    A normalisation that computes in float32 saves its own copy, and so may compiled code that lays out its input anew.

    Args:
        before: the stage that makes the input, and its variants.
        figure: the stage, or a variant of it.
    """
    is_saved = before.saves_output or any(each.saves_output for _, each in before.variants) or figure.saves_input
    return 0 if is_saved else before.output_bytes


def with_held_gradients(figures: Sequence[StageFigures], num_bytes: Mapping[Origin, int]) -> list[StageFigures]:
    """The figures with the gradients of held tensors; each lives from its last reader's backward to its maker's.

    A recomputed stage finds those of the stage whose backward comes next, itself or a later one.

    Args:
        figures: of each stage.
        num_bytes: of each held tensor's gradient.
    """
    last_reader: dict[Origin, int] = {}
    for k, figure in enumerate(figures, start=1):
        last_reader.update(dict.fromkeys(figure.held, k))
    found: list[StageFigures] = []
    most_bytes = 0
    for k in range(len(figures), 0, -1):
        there_bytes = sum(num_bytes[origin] for origin, last in last_reader.items() if origin[0] <= k <= last)
        most_bytes = max(most_bytes, there_bytes)
        found.append(figures[k - 1].with_more(most_bytes, there_bytes))
    return found[::-1]
