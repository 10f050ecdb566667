"""The simulator, against worked examples and against a second accountant that shares no code with it."""

import random

import pytest
from tests.chains import random_chain
from tests.runtime.schedules import random_schedule

from lowtide import (
    Backward,
    Chain,
    Forward,
    Offload,
    Prefetch,
    Release,
    Schedule,
    ScheduleError,
    Stage,
    Variant,
    simulate,
)
from lowtide.schedule import Start

TWO = Chain("two", [Stage("f", 1.0, 2.0, 4, 6), Stage("g", 3.0, 4.0, 8, 10, backward_extra_bytes=5)], input_bytes=2)


class Ledger:
    """A second accountant: recounts everything at every operation, from plain lists in the file format."""

    def __init__(self, chain, operations, bandwidth, duplex=True):
        self.chain, self.bandwidth, self.duplex = chain, bandwidth, duplex
        self.there = {"a0", f"d{chain.num_stages}"}
        self.grads = 0
        self.clock, self.busy, self.compute = 0.0, [0.0, 0.0], 0.0
        self.arrives, self.leaves, self.way = {}, {}, {}
        self.peak = 0
        for operation in operations:
            getattr(self, operation[0])(*operation[1:])

    def size(self, value):
        kind, k = value.rstrip("0123456789"), int(value.lstrip("abrd"))
        stages, chain = self.chain.stages, self.chain
        if kind == "a":
            return stages[k - 1].output_bytes if k else chain.input_bytes
        if kind == "d":
            return stages[k - 1].grad_bytes if k else chain.input_grad_bytes
        variant = self.way.get(k, 0)
        return (stages[k - 1].variants[variant - 1] if variant else stages[k - 1]).saved_bytes

    def stored(self):
        stages = self.chain.stages
        total = self.chain.base_bytes + sum(s.weight_bytes + s.optimizer_bytes for s in stages)
        total += sum(s.weight_grad_bytes for s in stages) if self.chain.grads_resident else self.grads
        return total + sum(self.size(value) for value in self.there)

    def use(self, *choices):
        self.clock = max(self.clock, min(self.arrives.get(v, 0.0) for v in choices if v in self.there))

    def gone(self, value):
        self.clock = max(self.clock, self.leaves.pop(value, 0.0), self.arrives.pop(value, 0.0))
        self.there.discard(value)

    def forward(self, k, save, variant=0):
        stage = self.chain.stages[k - 1]
        self.use(f"a{k - 1}", *([] if save == "drop" else [f"abar{k - 1}"]))
        if save == "all":
            self.way[k] = variant
        way = stage.variants[variant - 1] if variant else stage
        made = f"abar{k}" if save == "all" else f"a{k}"
        self.peak = max(
            self.peak,
            self.stored() + self.size(made) + (way.saving_extra_bytes if save == "all" else way.forward_extra_bytes),
        )
        # once the gradient of its output is there, nobody wants the output itself
        ends_early = save == "all" and not variant and f"d{k}" in self.there and k < self.chain.num_stages
        self.clock += way.rerun_seconds if ends_early else way.forward_seconds
        self.compute += way.rerun_seconds if ends_early else way.forward_seconds
        self.there.add(made)
        if save == "drop":
            self.gone(f"a{k - 1}")

    def backward(self, k):
        stage = self.chain.stages[k - 1]
        way = stage.variants[self.way[k] - 1] if self.way[k] else stage
        self.use(f"abar{k}")
        self.use(f"a{k - 1}", f"abar{k - 1}")
        new = self.size(f"d{k - 1}") + (0 if self.chain.grads_resident else stage.weight_grad_bytes)
        self.peak = max(self.peak, self.stored() + new + way.backward_extra_bytes)
        self.clock += way.backward_seconds
        self.compute += way.backward_seconds
        self.there.add(f"d{k - 1}")
        self.grads += stage.weight_grad_bytes
        for value in (f"d{k}", f"abar{k}", f"a{k - 1}"):
            if value in self.there:
                self.gone(value)

    def copy(self, value, channel):
        channel = channel if self.duplex else 0
        self.busy[channel] = max(self.busy[channel], self.clock) + self.size(value) / self.bandwidth
        return self.busy[channel]

    def offload(self, kind, k):
        self.use(f"{kind}{k}")
        self.leaves[f"{kind}{k}"] = self.copy(f"{kind}{k}", 0)

    def release(self, kind, k):
        self.use(f"{kind}{k}")
        self.gone(f"{kind}{k}")

    def prefetch(self, kind, k):
        self.there.add(f"{kind}{k}")
        self.arrives[f"{kind}{k}"] = self.copy(f"{kind}{k}", 1)
        self.peak = max(self.peak, self.stored())

    def __getattr__(self, name):  # await is a word of the language
        assert name == "await"
        return lambda kind, k: self.use(f"{kind}{k}")


FEATURES = ["weight gradients", "grads resident", "large extras", "odd gradients", "base", "reruns"]


def test_a_forward_that_runs_again_for_its_backward_alone_may_end_early():
    chain = Chain("three", [Stage(name, 4.0, 1.0, 1, 3, rerun_seconds=1.0) for name in "fgh"])
    listed = [
        *(["forward", k, "keep"] for k in (1, 2)), ["forward", 3, "all"], ["backward", 3],
        ["forward", 2, "all"], ["backward", 2], ["forward", 1, "all"], ["backward", 1],
    ]  # fmt: skip
    again = Schedule.from_dict({"format": "lowtide.schedule/1", "strategy": "", "operations": listed})
    assert simulate(chain, again).seconds == 3 * 4.0 + 2 * 1.0 + 3 * 1.0
    saved = Schedule("", (*(Forward(k, "all") for k in (1, 2, 3)), *(Backward(k) for k in (3, 2, 1))))
    assert simulate(chain, saved).seconds == 3 * 4.0 + 3 * 1.0
    # here the output of the first is wanted by the second
    both = Schedule(
        "",
        (
            Forward(1, "keep"), Forward(2, "drop"), Forward(3, "all"), Backward(3),
            Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1),
        ),
    )  # fmt: skip
    assert simulate(chain, both).seconds == 3 * 4.0 + (4.0 + 1.0) + 3 * 1.0


@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("seed", range(150))
def test_random_schedules_cost_what_a_second_accountant_says(seed, duplex):
    rng = random.Random(seed)
    features = tuple(rng.sample(FEATURES, rng.randint(0, 3)))
    chain = random_chain(
        seed, rng.randint(1, 6), sizes=rng.choice(["mixed", "heavy-tailed", "zero"]), features=features
    )
    schedule = random_schedule(chain.num_stages, seed, moves=0.5)
    bandwidth = rng.choice([1, 3, 1000])
    trace = simulate(chain, schedule, bandwidth=bandwidth, duplex=duplex)
    ledger = Ledger(chain, schedule.to_dict()["operations"], bandwidth, duplex)
    assert trace.peak_bytes == ledger.peak
    assert trace.seconds == pytest.approx(ledger.clock)
    assert trace.idle_seconds == pytest.approx(ledger.clock - ledger.compute, abs=1e-9)
    assert trace.compute_seconds == pytest.approx(ledger.compute)


def test_by_hand():
    schedule = Schedule("", [Forward(1, "keep"), Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)])
    trace = simulate(TWO, schedule)
    assert [step.stored_before_bytes for step in trace.steps] == [10, 14, 24, 6, 12]
    assert [step.peak_bytes for step in trace.steps] == [14, 24, 33, 12, 12]
    assert (trace.seconds, trace.peak_bytes, trace.idle_seconds, trace.peak_index) == (11.0, 33, 0.0, 2)
    assert [step.repeated for step in trace.steps] == [False, False, False, True, False]


def test_a_late_copy_makes_compute_wait_and_says_for_which():
    order = [Forward(1, "all"), Offload("abar", 1), Forward(2, "all"), Release("abar", 1)]
    order += [Prefetch("abar", 1), Backward(2), Backward(1)]
    trace = simulate(TWO, Schedule("", order), bandwidth=1)
    out, back = trace.copies
    assert (out.start_seconds, out.end_seconds) == (1.0, 7.0)
    assert (trace.steps[3].idle_seconds, trace.steps[3].waits_for) == (3.0, 1)  # forward 2 ended at 4
    assert (back.start_seconds, back.end_seconds) == (7.0, 13.0)
    assert trace.steps[5].start_seconds == 13.0  # backward 2 reads a[1] inside abar[1]
    assert trace.idle_seconds == 9.0


def test_what_removes_a_leaving_value_waits_for_its_copy():
    chain = Chain("three", [Stage(str(k), 1.0, 1.0, 4, 4) for k in range(3)], input_bytes=2)
    order = [Forward(1, "keep"), Offload("a", 1), Forward(2, "drop"), Forward(3, "all"), Backward(3)]
    order += [Prefetch("a", 1), Forward(2, "all"), Backward(2), Forward(1, "all"), Backward(1)]
    trace = simulate(chain, Schedule("", order), bandwidth=1)
    assert trace.steps[2].end_seconds == 2.0
    assert trace.steps[2].idle_seconds == 3.0  # the copy ends at 5
    assert trace.steps[3].start_seconds == 5.0


def test_variants_have_times_and_bytes_of_their_own():
    slim = Variant("slim", 1.5, 2.5, saved_bytes=5, forward_extra_bytes=7, backward_extra_bytes=11)
    chain = Chain("one", [Stage("f", 1.0, 2.0, 4, 6, variants=(slim,))], input_bytes=2)
    trace = simulate(chain, Schedule("", [Forward(1, "all", 1), Backward(1)]))
    assert trace.seconds == 4.0
    assert [step.peak_bytes for step in trace.steps] == [2 + 4 + 5 + 7, 2 + 4 + 5 + 11]


@pytest.mark.parametrize(
    ("operations", "index", "reason"),
    [
        ([Forward(2, "all")], 0, "neither a[1] nor abar[1] is on the device"),
        ([Forward(3, "all")], 0, "2 stages"),
        ([Forward(1, "all"), Forward(1, "all")], 1, "abar[1] is already stored"),
        ([Forward(1, "keep"), Forward(1, "keep")], 1, "a[1] is already stored"),
        ([Forward(1, "all"), Forward(2, "drop")], 1, "a[1] is not on the device"),
        ([Forward(1, "all"), Backward(1)], 1, "backward 2 comes next"),
        ([Forward(1, "all"), Forward(2, "keep"), Backward(2)], 2, "abar[2] is not on the device"),
        ([Forward(1, "drop"), Forward(2, "all"), Backward(2), Forward(1, "all")], 3, "a[0] is not on the device"),
        ([Forward(1, "all", 1)], 0, "1 variants"),
        ([Release("a", 0)], 0, "no current copy on the host"),
        ([Prefetch("a", 0)], 0, "already on the device"),
        ([Prefetch("abar", 1)], 0, "no current copy on the host"),
        ([Offload("abar", 1)], 0, "abar[1] is not on the device"),
        ([Offload("w", 1)], 0, 'does not manage "w"'),
        ([Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1), Backward(1)], 4, "all have run"),
    ],
)
def test_an_illegal_schedule_is_refused_with_index_operation_and_reason(operations, index, reason):
    with pytest.raises(ScheduleError) as caught:
        simulate(TWO, Schedule("", operations), bandwidth=5)
    assert reason in str(caught.value)
    assert str(operations[index].to_list()) in str(caught.value)
    assert (caught.value.index, caught.value.operation) == (index, operations[index].to_list())


@pytest.mark.parametrize(("num_stages", "index"), [(1, 1), (3, 2)])
def test_a_schedule_for_another_number_of_stages_is_refused_with_both_and_the_first_operation_that_is_wrong(
    num_stages, index
):
    stages = range(1, num_stages + 1)
    operations = [*(Forward(k, "all") for k in stages), *(Backward(k) for k in reversed(stages))]
    schedule = Schedule("rotor", operations)
    assert schedule.num_stages == num_stages
    with pytest.raises(
        ScheduleError, match=rf"is for {num_stages} stages, but chain 'two' has 2; .*operation"
    ) as caught:
        simulate(TWO, schedule)
    assert caught.value.index == index
    assert caught.value.operation == operations[index].to_list()


def test_an_incomplete_schedule_and_a_copy_without_a_link_are_refused():
    with pytest.raises(ScheduleError, match="before backward 2"):
        simulate(TWO, Schedule("", [Forward(1, "all"), Forward(2, "all")]))
    for bandwidth in (None, 0):
        with pytest.raises(ScheduleError, match="bandwidth above 0"):
            simulate(TWO, Schedule("", [Offload("a", 0)]), bandwidth=bandwidth)


# Weights: one period of a cycle

CYCLE = Chain("cycle", [Stage("f", 1.0, 1.0, 1, 1, weight_bytes=10), Stage("g", 1.0, 1.0, 1, 1, weight_bytes=10)])
LAYER_BY_LAYER = [
    Prefetch("w", 1), Forward(1, "all"), Release("w", 1),
    Prefetch("w", 2), Forward(2, "all"), Backward(2), Offload("w", 2), Release("w", 2),
    Prefetch("w", 1), Backward(1), Offload("w", 1), Release("w", 1),
]  # fmt: skip
ON_HOST = Start(host=frozenset({("w", 1), ("w", 2)}))


def test_a_cycle_layer_by_layer():
    trace = simulate(CYCLE, Schedule("", LAYER_BY_LAYER, ("w",), ON_HOST), bandwidth=10)
    assert trace.seconds == pytest.approx(4 + 5)  # five copies of a second each, none of them hidden
    assert trace.idle_seconds == pytest.approx(5)
    assert trace.peak_bytes == 10 + 10 + 1 + 1 + 1 + 1  # backward 2: w, its gradient, abar 1 and 2, delta 2 and 1


def test_copies_that_cross_the_seam_are_hidden_in_the_steady_state():
    # w[1] is fetched for the next round while backward 2 runs, and w[2] leaves over the seam
    operations = [Forward(1, "all"), Forward(2, "all"), Backward(2), Offload("w", 2), Backward(1), Release("w", 2)]
    operations += [Prefetch("w", 2)]
    start = Start(device=frozenset({("w", 1), ("w", 2)}), host=frozenset({("w", 2)}))
    trace = simulate(CYCLE, Schedule("", operations, ("w",), start), bandwidth=10)
    assert trace.seconds == pytest.approx(4.0)  # the first round alone would not show that forward 2 need not wait
    slow = simulate(CYCLE, Schedule("", operations, ("w",), start), bandwidth=4)
    assert slow.seconds == pytest.approx(4.0 + 1.5 + 1.5)


@pytest.mark.parametrize(
    ("operations", "start", "reason"),
    [
        (LAYER_BY_LAYER[1:], ON_HOST, "w[1] is not on the device"),
        (LAYER_BY_LAYER[:-1], ON_HOST, "on the device at its end and not at its start"),
        ([op for op in LAYER_BY_LAYER if op != Offload("w", 2)], ON_HOST, "no current copy"),  # backward 2 changed it
        (LAYER_BY_LAYER, Start(host=frozenset({("w", 9)})), "2 stages"),
    ],
)
def test_an_illegal_cycle_is_refused(operations, start, reason):
    with pytest.raises(ScheduleError) as caught:
        simulate(CYCLE, Schedule("", operations, ("w",), start), bandwidth=10)
    assert reason in str(caught.value)


def test_optimizer_state_is_needed_and_changed_by_backward_alone():
    chain = Chain("one", [Stage("f", 1.0, 1.0, 1, 1, weight_bytes=10, optimizer_bytes=20)])
    operations = [Forward(1, "all"), Prefetch("opt", 1), Backward(1), Offload("opt", 1), Release("opt", 1)]
    start = Start(device=frozenset({("w", 1)}), host=frozenset({("opt", 1)}))
    trace = simulate(chain, Schedule("", operations, ("w", "opt"), start), bandwidth=20)
    assert trace.seconds == pytest.approx(4.0)
    assert trace.peak_bytes == 10 + 20 + 10 + 1 + 1
    with pytest.raises(ScheduleError, match="no current copy"):
        simulate(
            chain,
            Schedule("", [op for op in operations if not isinstance(op, Offload)], ("w", "opt"), start),
            bandwidth=20,
        )


def test_managed_weights_and_resident_gradients_exclude_each_other():
    chain = Chain("kept", CYCLE.stages, grads_resident=True)
    with pytest.raises(ScheduleError, match="grads_resident"):
        simulate(chain, Schedule("", LAYER_BY_LAYER, ("w",), ON_HOST), bandwidth=10)


@pytest.mark.parametrize("operation", [Forward(10**5000, "all"), Backward(10**5000), Offload("a", 10**5000)])
def test_a_stage_of_thousands_of_digits_is_refused_like_any_other(operation):
    with pytest.raises(ScheduleError, match="thousands of digits"):
        simulate(CYCLE, Schedule("", [operation]))
