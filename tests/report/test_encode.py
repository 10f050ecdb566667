from __future__ import annotations

import base64
import json
import zlib

import pytest
from tests.report.chains import (
    MIB,
    bare_survey,
    deep_chain,
    moving_schedule,
    periodic_schedule,
    recomputing_schedule,
    small_chain,
    store_all_schedule,
)

from lowtide import (
    Chain,
    Forward,
    Offload,
    Prefetch,
    Release,
    Schedule,
    SideValue,
    Stage,
    Update,
    Variant,
    simulate,
    solve,
)
from lowtide.report.encode import compressed, encode
from lowtide.report.palette import LAYERS
from lowtide.report.survey import ShownPlan
from lowtide.report.text import plan_text
from lowtide.report.timeline import spans
from lowtide.schedule import Start


def decoded(data, number):
    """A plan spelled out as the page does it: for each operation its words, its layers and its times."""
    plan = data["plans"][number]
    waits = {index: (before, after, copied_by) for index, before, after, copied_by in plan["waits"]}
    stored, clock, effect = [*plan["start"], 0], 0.0, 0
    for index, step in enumerate(plan["steps"]):
        effect += step
        code, repeated, stage, variant, seconds, during, after = data["effects"][effect]
        held = list(stored)
        for layer, change in zip(during[::2], during[1::2], strict=True):
            held[layer] += change
        before_wait, after_wait, copied_by = waits.get(index, (0.0, 0.0, None))
        start = clock + before_wait
        clock = start + seconds + after_wait
        yield data["codes"][code], bool(repeated), stage, variant, held, (start, start + seconds, clock), copied_by
        for layer, change in zip(after[::2], after[1::2], strict=True):
            stored[layer] += change


def check(chain, schedules, bandwidth=None):
    plans = [ShownPlan(10**12, s, simulate(chain, s, bandwidth=bandwidth)) for s in schedules]
    data = json.loads(json.dumps(encode(bare_survey(chain), plans, own=None, measured=None)))
    for number, plan in enumerate(plans):
        found = list(decoded(data, number))
        assert len(found) == len(plan.trace.steps)
        tolerance = 1e-6 * plan.trace.seconds
        for span, (name, repeated, stage, variant, held, times, copied_by) in zip(
            spans(plan.trace), found, strict=True
        ):
            listed = [str(part) for part in span.step.operation.to_list()]
            assert stage == span.step.operation.stage
            assert name.split() == [part for part in listed if part != str(stage)][:2]
            assert variant == getattr(span.step.operation, "variant", 0)
            assert repeated == span.step.repeated
            assert held == list(span.during)
            assert times == pytest.approx((span.start, span.end, span.finish), abs=tolerance)
            assert copied_by == span.step.waits_for
        assert [entry[3] for entry in data["plans"][number]["copies"]] == [c.num_bytes for c in plan.trace.copies]
    return data


def test_recomputation_comes_back():
    check(small_chain(), [recomputing_schedule(), store_all_schedule(4)])


def test_copies_and_waits_come_back():
    data = check(small_chain(), [moving_schedule()], bandwidth="4GB/s")
    plan = data["plans"][0]
    assert [wait[0] for wait in plan["waits"]] == [4, 9]
    assert plan["copies"][0][1:] == pytest.approx([3e-3, 3e-3 + 20 * MIB / 4e9, 20 * MIB])


def test_many_schedules_share_their_operations():
    data = check(deep_chain(60), [periodic_schedule(60, length) for length in (2, 3, 5, 8, 13)])
    num_operations = sum(len(plan["steps"]) for plan in data["plans"])
    assert len(data["effects"]) < num_operations / 2


def test_variants_come_back():
    stage = Stage("a", 1.0, 2.0, output_bytes=4, saved_bytes=10, variants=[Variant("lean", 1.5, 3.0, saved_bytes=5)])
    schedule = Schedule("by hand", [Forward(1, "all", 1), Forward(2, "all"), *store_all_schedule(2).operations[2:]])
    data = check(Chain("two", [stage, stage]), [schedule, store_all_schedule(2)])
    assert data["plans"][0]["variants"] == [1, 0]


def test_managed_weights_come_back():
    stages = [Stage(f"s{k}", 0.1, 0.2, output_bytes=10, saved_bytes=20, weight_bytes=100) for k in range(6)]
    chain = Chain("heavy", stages)
    solution = solve(chain, memory_budget=700, strategy="weights-l2l", bandwidth=2000)
    data = check(chain, [solution.schedule], bandwidth=2000)
    weights = LAYERS.index("weights")
    assert any(held[weights] for _, _, _, _, held, _, _ in decoded(data, 0))


def test_optimizer_steps_weight_gradients_and_side_values_come_back():
    stage = Stage("a", 1.0, 2.0, output_bytes=4, saved_bytes=10, weight_bytes=100, update_seconds=0.5)
    chain = Chain("two", [stage, stage], side_values=[SideValue("skip", 30, 1, (2,))])
    first, second, *backwards = store_all_schedule(2).operations
    schedule = Schedule(
        "by hand",
        [
            *(first, Offload("s", 1), second, Release("s", 1), Prefetch("s", 1)),
            *(backwards[0], Offload("g", 2), Update(2), backwards[1], Update(1)),
        ],
        ("w",),
        Start(frozenset({("w", 1), ("w", 2)})),
    )
    data = check(chain, [schedule], bandwidth=20)
    assert data["chain"]["sides"] == ["skip"]
    assert data["plans"][0]["stageMoved"] == [60, 100]  # a side value's bytes count for its maker
    # plain training and the same optimizer steps take 7 s
    assert "above plain training (7.00 s)" in plan_text(chain, simulate(chain, schedule, bandwidth=20))


def test_the_text_is_json_under_base_64():
    data = {"name": "</script><b>", "number": 1.5}
    text = compressed(data)
    assert json.loads(zlib.decompress(base64.b64decode(text))) == data
    assert "<" not in text
