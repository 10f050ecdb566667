"""Which variant each stage of a program runs as.

Autograd's graph is made by the first forward, which so decides what backward does: a stage whose backward runs as a
variant runs forward as that variant, whenever it runs. What the schedule keeps or drops of it is the same in all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from lowtide.chain import Chain
from lowtide.errors import PlanError
from lowtide.runtime.compile.compiled import VariantChoice, choice_of
from lowtide.runtime.execute.program import Program
from lowtide.runtime.model.split import Split


class StageVariants:
    """Switches the compiled units of a model to the variant of the stage that runs.

    Args:
        choice: that the units look at; None: there is nothing to choose.
        indices: the variant of each stage among those compiled, from stage 1 on, behind an unused entry.
    """

    __slots__ = ("_choice", "_indices")

    def __init__(self, choice: VariantChoice | None, indices: tuple[int, ...] = ()) -> None:
        self._choice = choice
        self._indices = indices

    @classmethod
    def of(cls, model: nn.Module, split: Split, program: Program, chain: Chain | None) -> StageVariants:
        """The variants that a program names.

        Raises:
            PlanError: where they are not compiled.
        """
        choice = choice_of(model, split)
        if not any(program.variants):
            return cls(choice, (0,) * len(program.variants))
        if choice is None:
            raise PlanError(
                "the schedule uses variants, but this model has no compiled blocks; use "
                "lowtide.fit(..., compile_stages=True), or solve for a chain without variants"
            )
        if chain is None:
            raise PlanError(
                "the schedule uses variants, whose names are in the chain; attach the solution, not only its schedule"
            )
        indices = [0]
        for k, variant in list(enumerate(program.variants))[1:]:
            stage = chain.stage(program.origin_of(k))  # stages that run as variants are never joined
            name = stage.variants[variant - 1].name if variant else ""
            if name not in choice.names:
                raise PlanError(
                    f"stage {stage.name!r} needs variant {name!r}, which is not compiled; the compiled ones are "
                    f"{', '.join(choice.names[1:])}"
                )
            indices.append(choice.names.index(name))
        return cls(choice, tuple(indices))

    @property
    def are_used(self) -> bool:
        """Whether any stage runs as a variant other than 0."""
        return any(self._indices)

    def left_out(self) -> StageVariants:
        """All stages as variant 0."""
        return StageVariants(self._choice, (0,) * len(self._indices))

    def begin(self, k: int) -> None:
        """Stage k is about to run for the first time in this step."""
        if self._choice is not None:
            self._choice.index = self._indices[k]

    def end(self) -> None:
        """The forward has ended: from here on, calls of the model's parts run as variant 0."""
        if self._choice is not None:
            self._choice.index = 0

    def running(self, k: int) -> AbstractContextManager[None]:
        """Recompute stage k within the block."""
        return nullcontext() if self._choice is None else self._choice.running(self._indices[k])
