from tests.looping import looped
from tests.strategies.weight_chains import random_weight_chain

from lowtide import Offload, Prefetch, Release, Schedule, simulate
from lowtide.schedule import Start
from lowtide.strategies.weights.periods import cyclic_schedule, period_of


@looped("seed", range(30))
def test_a_period_counts_what_the_simulator_counts(seed: int) -> None:
    chain = random_weight_chain(seed, num_stages=1 + seed % 6, optimizer=seed % 2 == 0)
    period = period_of(chain)
    device = frozenset(("w", k) for k in range(1, chain.num_stages + 1))
    trace = simulate(chain, Schedule("resident", period.computations, ("w",), Start(device)))
    resident = period.resident_bytes
    assert [step.stored_before_bytes for step in trace.steps] == [resident + gap for gap in period.gap_bytes]
    assert [step.peak_bytes for step in trace.steps] == [resident + standing for standing in period.standing_bytes]
    assert period.most_bytes == trace.peak_bytes
    assert sum(period.seconds) == trace.seconds


def test_the_start_is_where_the_operations_lead_back_to() -> None:
    chain = random_weight_chain(1, num_stages=2, zeros=False)
    forward_1, forward_2, backward_2, backward_1 = period_of(chain).computations
    operations = [
        *(forward_1, Offload("w", 1), Release("w", 1), forward_2, backward_2, Offload("w", 2)),
        *(Prefetch("w", 1), backward_1),
    ]
    schedule = cyclic_schedule("by hand", 2, operations)
    assert schedule.start == Start(frozenset({("w", 1), ("w", 2)}), frozenset({("w", 2)}))
    assert schedule.manages == ("w",)
    simulate(chain, schedule, bandwidth=1)
