"""Everything that lowtide raises on purpose.

One hierarchy: catch `LowtideError` to catch them all. Each message is a single line that says what was given, what is
needed, and what to do next. The command line maps `InfeasibleBudgetError` to exit status 3 and every other
`LowtideError` to 2.
"""

from __future__ import annotations


class LowtideError(Exception):
    """The root of every error that lowtide raises on purpose."""


class UnitError(LowtideError, ValueError):
    """A quantity such as `"8GiB"` or `"12GB/s"` that cannot be read."""


class ChainError(LowtideError, ValueError):
    """A chain, or a chain file, that is not well formed."""


class SizesError(LowtideError, ValueError):
    """A list of sizes, or a file of sizes, that is not well formed."""


class ScheduleError(LowtideError, ValueError):
    """A schedule that is not well formed, or that is illegal for its chain.

    Attributes:
        index: position of the offending operation in the list, where there is one.
        operation: that operation in its file form, for instance `["forward", 3, "all"]`.
    """

    def __init__(self, message: str, *, index: int | None = None, operation: list[object] | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.operation = operation


class StrategyError(LowtideError, ValueError):
    """An unknown strategy, or one that does not apply to what was asked."""


class CaptureError(LowtideError):
    """No chain of stages was found in a model, or running it in stages would not give the same numbers."""


class SampleError(CaptureError, RuntimeError):
    """The model raised an error when it was called with the sample; that error is the `__cause__`."""


class InfeasibleBudgetError(LowtideError):
    """No schedule of the asked kind stays within the budget.

    Attributes:
        minimum_bytes: the smallest budget with which it works; one byte less does not.
    """

    def __init__(self, message: str, *, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class PlanError(LowtideError, ValueError):
    """A plan that does not fit its model (any more), or a plan file that is not well formed."""


class ExecutionError(LowtideError, RuntimeError):
    """Something that a running plan found and that would make gradients wrong; the message names the stage."""


def shown(value: object) -> str:
    """A value as an error message shows it: short, on one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:
        has_digits = isinstance(error, ValueError) and "digits" in str(
            error
        )  # Python prints no more than some thousand
        text = "a number of thousands of digits" if has_digits else f"an object of {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class LowtideWarning(UserWarning):
    """Something works, but slower or otherwise than asked; the message says what to do about it."""
