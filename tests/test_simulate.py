"""The simulator, against worked examples and against a second accountant that shares no code with it."""

import random

import pytest
from tests.accountant import IllegalError, account, legal_schedule, spoiled
from tests.chains import NESTED_FEATURES, random_chain
from tests.looping import looped

from lowtide import (
    Backward,
    Chain,
    Forward,
    Offload,
    Prefetch,
    Release,
    Schedule,
    ScheduleError,
    SideValue,
    Stage,
    Update,
    Variant,
    simulate,
)
from lowtide.schedule import Start

TWO = Chain("two", [Stage("f", 1.0, 2.0, 4, 6), Stage("g", 3.0, 4.0, 8, 10, backward_extra_bytes=5)], input_bytes=2)


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


# Each seed is one chain, one legal schedule and three that are mostly illegal: 1000 schedules in all.
@looped("first", range(0, 250, 10))
def test_random_schedules_cost_what_a_second_accountant_says_or_are_refused_by_both(first):
    num_legal = 0
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        features = (
            *(feature for feature in (*NESTED_FEATURES, "outliving") if rng.random() < 0.3), "side values", "updates"
        )  # fmt: skip
        manages, updates = rng.choice([([], False), (["w"], False), (["w", "opt"], True), (["w"], True)])
        if manages and not updates:
            features = tuple(feature for feature in features if feature != "grads resident")
        chain = random_chain(seed, rng.randint(1, 5), features=features).to_dict()
        schedule = legal_schedule(chain, rng, manages=manages, updates=updates, moves=rng.choice([0, 0.4, 0.7]))
        num_legal += agree(chain, schedule, rng)
        for _ in range(3):
            agree(chain, spoiled(schedule, rng), rng)
    assert num_legal == 10


def agree(chain, schedule, rng):
    """Whether a schedule is legal; simulator and accountant must say the same, and count the same."""
    bandwidth, duplex = rng.choice([1, 3, 1000]), rng.random() < 0.7
    try:
        seconds, peak_bytes, idle_seconds = account(chain, schedule, bandwidth, duplex=duplex)
    except IllegalError:
        with pytest.raises(ScheduleError):
            simulate(chain, schedule, bandwidth=bandwidth, duplex=duplex)
        return False
    trace = simulate(chain, schedule, bandwidth=bandwidth, duplex=duplex)
    assert trace.peak_bytes == peak_bytes
    assert trace.seconds == pytest.approx(seconds, abs=1e-9)
    assert trace.idle_seconds == pytest.approx(idle_seconds, abs=1e-9)
    assert all(step.peak_bytes >= sum(step.peak_by_category) for step in trace.steps)
    assert all(sum(step.stored_by_category) == step.stored_after_bytes for step in trace.steps)
    return True


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


def test_what_is_freed_early_makes_room_for_gradients_and_for_no_more():
    chains = [
        Chain("one", [Stage("f", 1.0, 2.0, 4, 6, grad_bytes=0, freed_bytes=4)], input_bytes=2, input_grad_bytes=made)
        for made in (3, 7)
    ]
    traces = [simulate(chain, Schedule("", [Forward(1, "all"), Backward(1)])) for chain in chains]
    assert [trace.steps[1].peak_bytes for trace in traces] == [2 + 6, 2 + 6 + 7 - 4]


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
FIRST_STAGE = (Forward(1, "all"), Backward(1))


def test_a_cycle_layer_by_layer():
    trace = simulate(CYCLE, Schedule("", LAYER_BY_LAYER, ("w",), ON_HOST), bandwidth=10)
    assert trace.seconds == pytest.approx(4 + 5)  # five copies of a second each, none of them hidden
    assert trace.idle_seconds == pytest.approx(5)
    assert trace.peak_bytes == 10 + 10 + 1 + 1 + 1 + 1  # backward 2: w, its gradient, abar 1 and 2, delta 2 and 1
    # Times are counted from the beginning of the last round.
    assert [(copy.start_seconds, copy.end_seconds) for copy in trace.copies] == [(0, 1), (2, 3), (5, 6), (6, 7), (8, 9)]
    assert [(step.start_seconds, step.end_seconds) for step in trace.steps if step.operation in FIRST_STAGE] == [
        (1, 2), (7, 8)
    ]  # fmt: skip


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


# Updates as operations

TRAINED = Chain(
    "trained",
    [Stage(name, 1.0, 2.0, 1, 3, weight_bytes=10, weight_grad_bytes=6, optimizer_bytes=20, update_seconds=4.0)
     for name in "fg"],
)  # fmt: skip
EVERYTHING = frozenset((kind, k) for kind in ("w", "opt") for k in (1, 2))
PLAIN_STEP = [Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1)]


def test_an_update_takes_its_time_and_frees_the_weight_gradients():
    operations = [*PLAIN_STEP, Update(2), Update(1)]
    trace = simulate(TRAINED, Schedule("", operations, ("w", "opt"), Start(EVERYTHING)))
    assert (trace.seconds, trace.compute_seconds, trace.update_seconds) == (14.0, 14.0, 8.0)
    assert [step.stored_after_bytes for step in trace.steps] == [64, 67, 70, 72, 66, 60]
    assert trace.peak_bytes == 76  # backward 1: weights and state 60, abar 3, delta 1, weight gradients 12
    between = [*PLAIN_STEP[:3], Update(2), PLAIN_STEP[3], Update(1)]
    assert simulate(TRAINED, Schedule("", between, ("w", "opt"), Start(EVERYTHING))).peak_bytes == 74  # backward 2


def test_weight_gradients_and_optimizer_state_wait_on_the_host_until_their_update():
    operations = [
        *PLAIN_STEP[:3], Offload("g", 2), Release("g", 2), PLAIN_STEP[3], Prefetch("opt", 1), Update(1),
        Offload("opt", 1), Release("opt", 1), Prefetch("g", 2), Prefetch("opt", 2), Update(2), Offload("opt", 2),
        Release("opt", 2),
    ]  # fmt: skip
    weights, state = frozenset({("w", 1), ("w", 2)}), frozenset({("opt", 1), ("opt", 2)})
    schedule = Schedule("", operations, ("w", "opt"), Start(weights, state))
    trace = simulate(TRAINED, schedule, bandwidth=10)
    assert trace.peak_bytes == 20 + 6 + 20  # both weights, and the gradients and the state of one stage
    assert trace.seconds == pytest.approx(14 + 3 * 2.0 + 2.0 + 2 * 0.6)  # no copy is hidden


@pytest.mark.parametrize(
    ("operations", "start", "reason"),
    [
        ([*PLAIN_STEP, Update(2)], EVERYTHING, "ends before update 1"),
        ([*PLAIN_STEP, Update(2), Update(2)], EVERYTHING, "update 2 has already run"),
        ([*PLAIN_STEP[:2], Update(2)], EVERYTHING, "must come after backward 2, which has not run"),
        ([*PLAIN_STEP, Update(3)], EVERYTHING, "2 stages"),
        ([*PLAIN_STEP, Update(2), Update(1)], EVERYTHING - {("opt", 2)}, "opt[2] is not on the device"),
        ([*PLAIN_STEP, Update(2), Offload("g", 2), Update(1)], EVERYTHING, "g[2] is not on the device"),
        ([*PLAIN_STEP, Offload("g", 2)], EVERYTHING, "only in a schedule that lists updates"),
        ([*PLAIN_STEP, Update(2), Update(1)], EVERYTHING | {("g", 1)}, "grads_resident"),
    ],
)
def test_an_illegal_update_is_refused(operations, start, reason):
    with pytest.raises(ScheduleError) as caught:
        simulate(TRAINED, Schedule("", operations, ("w", "opt"), Start(start)), bandwidth=10)
    assert reason in str(caught.value)


def test_updates_need_a_schedule_that_manages_weights():
    with pytest.raises(ScheduleError, match="only a schedule that manages weights") as caught:
        simulate(TRAINED, Schedule("", [*PLAIN_STEP, Update(2)]))
    assert caught.value.index == 4


def test_an_update_makes_the_host_copies_stale_and_a_backward_does_not():
    start = Start(EVERYTHING, frozenset({("w", 2)}))
    kept = [*PLAIN_STEP[:2], Release("w", 2), Prefetch("w", 2), Backward(2), Release("w", 2), Prefetch("w", 2)]
    kept += [Backward(1), Update(1), Update(2)]
    with pytest.raises(ScheduleError, match="no current copy"):
        simulate(TRAINED, Schedule("", [*kept, Release("w", 2)], ("w", "opt"), start), bandwidth=10)
    simulate(TRAINED, Schedule("", [*kept, Offload("w", 2)], ("w", "opt"), start), bandwidth=10)


def test_a_stage_without_weight_gradients_needs_no_update():
    frozen = Stage("frozen", 1.0, 1.0, 1, 1, weight_bytes=10, weight_grad_bytes=0)
    chain = Chain("adapted", [frozen, TRAINED.stage(1)])
    weights = frozenset({("w", 1), ("w", 2)})
    operations = [Release("w", 1), Prefetch("w", 1), *PLAIN_STEP, Update(2)]
    schedule = Schedule("", operations, ("w",), Start(weights, weights))
    with pytest.raises(ScheduleError, match=r"'w', 2\] is on the host at its start"):
        simulate(chain, schedule, bandwidth=10)
    schedule = Schedule("", schedule.operations, ("w",), Start(weights, frozenset({("w", 1)})))
    assert simulate(chain, schedule, bandwidth=10).seconds > 0  # w[1] never has to be copied out again


def test_gradients_that_are_there_from_the_start_are_added_to():
    chain = Chain("accumulated", TRAINED.stages, grads_resident=True)
    operations = [*PLAIN_STEP, Update(2), Update(1)]
    trace = simulate(chain, Schedule("", operations, ("w", "opt"), Start(EVERYTHING)))
    assert trace.peak_bytes == 60 + 12 + 6 + 2  # backward 2: all weight gradients are there, and none is made
    # or they wait on the host, and are fetched for their backward, after which that copy is stale
    away = Start(EVERYTHING, frozenset({("g", 1), ("g", 2)}))
    with pytest.raises(ScheduleError, match=r"g\[2\] is not on the device"):
        simulate(chain, Schedule("", operations, ("w", "opt"), away), bandwidth=10)
    fetched = [*PLAIN_STEP[:2], Prefetch("g", 2), Backward(2), Release("g", 2)]
    with pytest.raises(ScheduleError, match="no current copy"):
        simulate(chain, Schedule("", [*fetched, Update(1)], ("w", "opt"), away), bandwidth=10)
    fetched = [*fetched[:4], Update(2), Prefetch("g", 1), Backward(1), Update(1)]
    assert simulate(chain, Schedule("", fetched, ("w", "opt"), away), bandwidth=10).peak_bytes == 60 + 6 + 6 + 2


# Side values

SKIP = Chain(
    "skip", [Stage(str(k), 1.0, 2.0, 4, 6) for k in (1, 2, 3)], side_values=[SideValue("skip", 100, 1, (3,), 50)]
)


def test_a_side_value_stays_from_its_maker_to_the_backward_of_its_maker():
    operations = [*(Forward(k, "all") for k in (1, 2, 3)), *(Backward(k) for k in (3, 2, 1))]
    trace = simulate(SKIP, Schedule("", operations))
    assert [step.stored_after_bytes for step in trace.steps] == [110, 116, 122, 166, 160, 0]
    assert trace.peak_bytes == 122 + 4 + 50  # its gradient is made by the backward of its last reader


def test_a_side_value_may_be_freed_and_made_again_by_another_forward_of_its_maker():
    again = [Forward(1, "keep"), Forward(2, "all"), Release("s", 1), Forward(1, "all"), Forward(3, "all")]
    trace = simulate(SKIP, Schedule("", [*again, Backward(3), Release("s", 1), Backward(2), Backward(1)]))
    assert trace.seconds == 4 + 6
    assert trace.num_recomputed == 1
    with pytest.raises(ScheduleError, match=r"s\[1\] is not on the device"):
        simulate(SKIP, Schedule("", [*again[:3], Forward(3, "all")]))


def test_a_forward_that_finds_its_side_value_on_the_device_leaves_it_as_it_is():
    operations = [Forward(1, "keep"), Forward(1, "all"), Forward(2, "all"), Forward(3, "all")]
    trace = simulate(SKIP, Schedule("", [*operations, *(Backward(k) for k in (3, 2, 1))]))
    assert [step.stored_after_bytes for step in trace.steps[:2]] == [4 + 104, 4 + 110]


def test_a_side_value_may_wait_on_the_host():
    operations = [
        Forward(1, "all"), Offload("s", 1), Forward(2, "all"), Release("s", 1), Prefetch("s", 1), Forward(3, "all"),
        *(Backward(k) for k in (3, 2, 1)),
    ]  # fmt: skip
    trace = simulate(SKIP, Schedule("", operations), bandwidth=10)
    assert trace.copies[0].end_seconds == 11.0
    assert trace.seconds == 9 + 9 + 10  # forward 2 hides a second of its way out, and nothing its way back


def test_a_side_value_that_is_held_counts_in_first_forwards_also_where_it_is_freed_without_a_copy():
    held = SideValue("skip", 100, 1, (2,), 0, held_until=3)
    chain = Chain("held", [Stage(str(k), 1.0, 1.0, 4, 4) for k in (1, 2, 3)], side_values=[held])
    ahead = [Forward(1, "keep"), Forward(2, "drop"), Release("s", 1), Forward(3, "all"), Backward(3)]
    behind = [Forward(1, "all"), Forward(2, "all"), Backward(2), Backward(1)]
    freed = simulate(chain, Schedule("", [*ahead, *behind]))
    assert [step.peak_bytes for step in freed.steps[3:5]] == [4 + 4 + 4 + 100, 4 + 4 + 4 + 4]
    copied = [*ahead[:2], Offload("s", 1), *ahead[2:], *behind]
    assert simulate(chain, Schedule("", copied), bandwidth=10).steps[4].peak_bytes == 4 + 4 + 4


@pytest.mark.parametrize(
    ("operations", "reason"),
    [
        ([Release("s", 1)], "s[1] is not on the device"),
        ([Offload("s", 2)], "1 side values"),
        ([Forward(1, "all"), Prefetch("s", 1)], "already on the device"),
        ([Forward(1, "all"), Release("s", 1), Prefetch("s", 1)], "no current copy on the host"),
        ([Forward(1, "all"), Release("s", 1), Forward(1, "all")], "abar[1] is already stored"),
    ],
)
def test_a_side_value_that_is_not_there_is_refused(operations, reason):
    with pytest.raises(ScheduleError) as caught:
        simulate(SKIP, Schedule("", operations), bandwidth=10)
    assert reason in str(caught.value)


def test_managed_weights_without_updates_and_resident_gradients_exclude_each_other():
    chain = Chain("kept", CYCLE.stages, grads_resident=True)
    with pytest.raises(ScheduleError, match="grads_resident"):
        simulate(chain, Schedule("", LAYER_BY_LAYER, ("w",), ON_HOST), bandwidth=10)


@pytest.mark.parametrize("operation", [Forward(10**5000, "all"), Backward(10**5000), Offload("a", 10**5000)])
def test_a_stage_of_thousands_of_digits_is_refused_like_any_other(operation):
    with pytest.raises(ScheduleError, match="thousands of digits"):
        simulate(CYCLE, Schedule("", [operation]))


def test_what_the_code_around_the_stages_holds_counts_where_it_was_dropped():
    stages = [Stage(str(k), 1.0, 2.0, 4, 6) for k in (1, 2)]
    chain = Chain("held", [*stages, Stage("3", 1.0, 2.0, 4, 6, outliving=[(1, 100)])], 4)
    backwards = [Backward(3), Backward(2), Backward(1)]

    def peak(*forwards):
        return simulate(chain, Schedule("by hand", [*forwards])).peak_bytes

    kept = [Forward(k, "all") for k in (1, 2, 3)]
    dropped = [Forward(1, "keep"), Forward(2, "drop"), Forward(3, "all"), Backward(3), Forward(1, "all")]
    assert peak(*kept, *backwards) < 100
    assert 100 < peak(*dropped, Forward(2, "all"), *backwards[1:]) < 130
    again = [Forward(1, "keep"), Forward(2, "keep"), Forward(3, "all"), Backward(3), Forward(1, "all")]
    assert (
        peak(
            *again[:2],
            Forward(3, "keep"),
            Forward(3, "all"),
            Backward(3),
            Forward(2, "all"),
            Backward(2),
            again[4],
            Backward(1),
        )
        < 100
    )
