"""The measured figures of a model's stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.runtime.measure.timing import NOTHING, Timing
from lowtide.runtime.replay.tape import Origin


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
        own_held_bytes: tensors that it makes and that are held: side values, and what it returns to the caller.
        saved_held: the numbers of those of them that its own backward needs.
        saves_input: whether any of its input stays after its forward: for its backward, or as a part of its output.
        saves_output: whether autograd keeps any of its output for its backward.
        parameters: the names of those that its backward reaches.
        held: the origins of the held tensors whose gradients its backward adds to, and what these gradients take: that
            of a concatenated tensor is a view of a larger one.
        passed_on: which of these gradients, by place, are the gradient of its output, or views of it: a sum and a
            concatenation make none.
        forward: time of a forward that saves all.
        backward: time of the backward.
        rerun: time of a forward that ends with the last tensor that it saves; None where that is its end.
        variants: the names and figures of other ways to run it, each found to compute the same.
        notes: what people should know of it, such as variants that were refused.
        outliving: see `lowtide.chain.Stage`.
        read: the numbers of its tensors that later stages, or the caller, read.
    """

    output_bytes: int = 0
    saved_bytes: int = 0
    grad_bytes: int = 0
    forward_extra_bytes: int = 0
    saving_extra_bytes: int = 0
    backward_peak_bytes: int = 0
    largest_weight_grad_bytes: int = 0
    own_held_bytes: int = 0
    saved_held: tuple[int, ...] = ()
    saves_input: bool = True
    saves_output: bool = True
    parameters: tuple[str, ...] = ()
    held: tuple[tuple[Origin, int], ...] = ()
    forward: Timing = NOTHING
    backward: Timing = NOTHING
    rerun: Timing | None = None
    passed_on: tuple[int, ...] = ()
    variants: tuple[tuple[str, StageFigures], ...] = ()
    notes: tuple[str, ...] = ()
    outliving: tuple[tuple[int, int], ...] = ()
    read: tuple[int, ...] = ()

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

    def with_less_gradient(self, num_bytes: int) -> StageFigures:
        """The stage, and its variants, where so much of the gradient of its output is counted as something else's."""
        variants = tuple((name, each.with_less_gradient(num_bytes)) for name, each in self.variants)
        return replace(self, grad_bytes=max(0, self.grad_bytes - num_bytes), variants=variants)


def unsaved_input_bytes(before: StageFigures, figure: StageFigures) -> int:
    """The bytes of a stage's input that are freed after its forward: neither it nor its maker saves them.

    A normalisation that computes in float32 saves its own copy, and so may compiled code that lays out its input anew.

    Args:
        before: the stage that makes the input, and its variants.
        figure: the stage, or a variant of it.
    """
    is_saved = before.saves_output or any(each.saves_output for _, each in before.variants) or figure.saves_input
    return 0 if is_saved else before.output_bytes
