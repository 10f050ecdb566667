"""Every error and warning of lowtide.

Catch `LowtideError` to catch them all. Each message is one line: what was given, what is needed, what to do next. The
command line maps `InfeasibleBudgetError` to exit status 3 and every other `LowtideError` to 2.
"""

from __future__ import annotations


class LowtideError(Exception):
    """Base class of all errors of lowtide."""


class UnitError(LowtideError, ValueError):
    """A quantity such as `"8GiB"` or `"12GB/s"` cannot be parsed."""


class ChainError(LowtideError, ValueError):
    """A chain or chain file is invalid."""


class SizesError(LowtideError, ValueError):
    """A list or file of sizes is invalid."""


class ScheduleError(LowtideError, ValueError):
    """A schedule is invalid, or illegal for its chain.

    Attributes:
        index: position of the wrong operation in the list, if it is about one.
        operation: that operation in its file form, for instance `["forward", 3, "all"]`.
    """

    def __init__(self, message: str, *, index: int | None = None, operation: list[object] | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.operation = operation


class StrategyError(LowtideError, ValueError):
    """A strategy is unknown, does not apply to the problem, or has a wrong setting."""


class CaptureError(LowtideError):
    """The model cannot be split into stages, or would not give the same numbers in stages."""


class SampleError(CaptureError, RuntimeError):
    """The model failed on the sample; its own error is the `__cause__`."""


class InfeasibleBudgetError(LowtideError):
    """The budget is too small.

    Attributes:
        minimum_bytes: the smallest budget that works; one byte less does not.
    """

    def __init__(self, message: str, *, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class PlanError(LowtideError, ValueError):
    """A plan does not match its model, or a plan file is invalid."""


class ExecutionError(LowtideError, RuntimeError):
    """A plan found something during training that would make gradients wrong; the message names the stage."""


def shown(value: object) -> str:
    """Format a value for an error message: short, on one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:
        has_digits = isinstance(error, ValueError) and "digits" in str(
            error
        )  # Python prints no more than some thousand
        text = "a number of thousands of digits" if has_digits else f"an object of {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class LowtideWarning(UserWarning):
    """Something works, but slower or not as asked; the message says what to do."""
