"""A chain file and a schedule file that are given together."""

from __future__ import annotations

import warnings

from lowtide.chain import Chain
from lowtide.errors import LowtideWarning, ScheduleError
from lowtide.schedule import Schedule
from lowtide.simulate import simulate
from lowtide.trace import Trace


def simulated(
    chain_file: str, chain: Chain, schedule_file: str, *, bandwidth: int | None, duplex: bool
) -> tuple[Schedule, Trace]:
    """Read a schedule file and say what the schedule uses on a chain.

    A schedule file does not say which chain it was made for. The number of stages does, as far as it goes, and the peak
    that the file predicts: memory follows from the order of the operations alone, so on the same chain it is the same
    to the byte.

    Args:
        chain_file: where the chain was read from, for the message.
        chain: the network.
        schedule_file: what to do.
        bandwidth: bytes per second each way; None: a schedule that copies is refused.
        duplex: both directions at once.

    Raises:
        ScheduleError: where the schedule is illegal for the chain, with the file.

    Warns:
        LowtideWarning: where it was made for other figures.
    """
    schedule = Schedule.load(schedule_file)
    try:
        trace = simulate(chain, schedule, bandwidth=bandwidth, duplex=duplex)
    except ScheduleError as error:
        raise ScheduleError(f"{schedule_file}: {error}", index=error.index, operation=error.operation) from None
    predicted = schedule.predicted
    if predicted is not None and predicted.peak_bytes != trace.peak_bytes:
        warnings.warn(
            f"{schedule_file} was made for other figures than those of {chain_file}: it predicts a peak of "
            f"{predicted.peak_bytes} bytes, and here it is {trace.peak_bytes}; take the chain that it was made for, or "
            "solve this one",
            LowtideWarning,
            stacklevel=2,
        )
    return schedule, trace
