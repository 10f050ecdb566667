"""Plan and chain files that somebody has edited: they work, or one line says what is wrong."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

X = torch.ones(4, 8)

# What may stand in the place of anything: other kinds, numbers out of range, containers of the wrong things.
WRONG = (
    *(None, True, 0, -1, 5, 1.5, 1e300, 10**30, "", "x", "0", "a" * 50),
    *([], {}, [1], ["a", 1], {"a": 1}, [[]], [None]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the entries of nested lists and dicts are."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from places(entry, (*path, key))


def edited(values: Any, seed: int) -> Any:
    """A copy with one to three entries taken away, doubled, added, shuffled or replaced."""
    rng, values = random.Random(seed), copy.deepcopy(values)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *path, key = rng.choice(list(places(values)))
        around = functools.reduce(lambda value, key: value[key], path, values)
        wrong, kind = copy.deepcopy(rng.choice(WRONG)), rng.randrange(5)
        if kind == 0:
            del around[key]
        elif kind == 1 and isinstance(around, list):
            around.insert(key, copy.deepcopy(rng.choice(around)))
        elif kind == 2 and isinstance(around, dict):
            around["extra"] = wrong
        elif kind == 3 and isinstance(around, list):
            rng.shuffle(around)
        else:
            around[key] = wrong
    return values


def num_refused(use: Callable[[Any], None], values: Any, num_files: int) -> int:
    """How many edited copies are refused; each in one line, and in no other way."""
    refusals = []
    for seed in range(num_files):
        try:
            use(edited(values, seed))
        except lowtide.LowtideError as error:
            refusals.append(str(error))
    assert not any("\n" in refusal for refusal in refusals)
    return len(refusals)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


@functools.cache
def plan_values() -> str:
    options = {"memory_budget": "1GB", "bandwidth": 0, "strategy": "revolve"}
    with lowtide.fit(network(), X, **options) as plan:
        return json.dumps(plan.to_dict())


def test_plans(tmp_path) -> None:
    model, path = network(), tmp_path / "plan.json"

    def use(values: Any) -> None:
        path.write_text(json.dumps(values))
        with lowtide.load_plan(path, model) as plan:
            model(X).sum().backward()
            assert str(plan)

    assert 100 < num_refused(use, json.loads(plan_values()), 200) < 200


def test_chains() -> None:
    def use(values: Any) -> None:
        chain = lowtide.Chain.from_dict(values)
        assert lowtide.Chain.from_dict(json.loads(json.dumps(chain.to_dict()))) == chain

    assert 50 < num_refused(use, json.loads(plan_values())["chain"], 200) < 200


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda split: split["stages"][0]["units"][0].__setitem__(0, 5), "split"),
        (lambda split: split["stages"][0]["units"].__setitem__(0, 5), "split"),
        (lambda split: split.__setitem__("call_keywords", 1.5), "split"),
        (lambda split: split.__setitem__("call_keywords", [1]), "split"),
        (lambda split: split["stages"][0].__setitem__("trailing_glue", "yes"), "split"),
        (lambda split: split.__setitem__("side_bytes", True), "split"),
    ],
)
def test_a_split_that_holds_something_else(edit, name, tmp_path) -> None:
    values = json.loads(plan_values())
    edit(values["split"])
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(lowtide.PlanError, match=f"plan.json: {name} is .*, which is invalid"):
        lowtide.load_plan(tmp_path / "plan.json", network())


def test_a_chain_that_lost_a_stage_is_refused_where_values_move(tmp_path) -> None:
    """The room on the lower tier is computed from it."""
    options = {"memory_budget": "1GB", "bandwidth": "50GB/s", "strategy": "offload"}
    with lowtide.fit(model := network(), X, **options) as plan:
        values = plan.to_dict()
    stages = [["offload", "abar", 4], ["release", "abar", 4], ["prefetch", "abar", 4]]
    first_backward = next(
        n for n, operation in enumerate(values["schedule"]["operations"]) if operation[0] == "backward"
    )
    values["schedule"]["operations"][first_backward:first_backward] = stages
    del values["chain"]["stages"][-1]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(lowtide.LowtideError, match="has 3 stages, but the model has 4"):
        lowtide.load_plan(tmp_path / "plan.json", model)


def test_a_unit_that_the_model_does_not_have_is_refused_by_name(tmp_path) -> None:
    values = json.loads(plan_values())
    values["split"]["stages"][1]["units"][0][0] = "other"
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(lowtide.PlanError, match="submodule 'other', which the model does not have"):
        lowtide.load_plan(tmp_path / "plan.json", network())
