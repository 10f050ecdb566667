"""One owner of a module's call: layers come and go in any order, and what stood there before comes back."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from lowtide.runtime.model.call_site import CallSite, Layer, Rank, code_of, is_compiled, layers_of

X = torch.ones(2, 3)


class Telling(Layer):
    """Writes its name down and passes the call on."""

    def __init__(self, module: nn.Module, name: str, rank: Rank, heard: list[str]) -> None:
        super().__init__(module)
        self.name, self.rank, self.heard = name, rank, heard

    def __call__(self, *args, **kwargs):
        self.heard.append(self.name)
        return self.pass_on(*args, **kwargs)


class Replacing(Telling):
    """Runs something else in the module's place, as compiled code does."""

    def __call__(self, *args, **kwargs):
        self.heard.append(self.name)
        return self.module.forward(*args, **kwargs) * 0


def layers(module: nn.Module, heard: list[str]) -> list[Layer]:
    return [
        Telling(module, "unit", Rank.UNIT, heard),
        Telling(module, "model", Rank.MODEL, heard),
        Telling(module, "report", Rank.REPORT, heard),
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_layers_come_and_go_in_any_order(order, compiled):
    module, heard = nn.Linear(3, 3), []
    if compiled:
        module.__dict__["_compiled_call_impl"] = module._call_impl
    expected, before = module(X), dict(vars(module))
    made = layers(module, heard)
    for index in order:
        made[index].push()
        made[index].push()  # twice is once
    assert torch.equal(module(X), expected)
    assert heard == ["report", "model", "unit"]
    assert is_compiled(module) == compiled
    for count, index in enumerate(order, start=1):
        made[index].remove()
        made[index].remove()
        heard.clear()
        assert torch.equal(module(X), expected)
        assert len(heard) == 3 - count
    assert vars(module) == before


def test_layers_of_one_rank_come_in_the_order_in_which_they_are_pushed_the_last_first():
    module, heard = nn.Linear(3, 3), []
    made = [Telling(module, name, Rank.UNIT, heard) for name in "abc"]
    for layer in made:
        layer.push()
    made[1].remove()
    module(X)
    assert heard == ["c", "a"]
    assert layers_of(module, Telling) == [made[2], made[0]]


def test_a_layer_keeps_to_the_code_that_it_was_made_with():
    module, heard = nn.Linear(3, 3), []
    code = Replacing(module, "code", Rank.CODE, heard)
    code.push()
    unit = Telling(module, "unit", Rank.UNIT, heard)
    unit.push()
    assert code_of(module) is code
    code.remove()
    assert not is_compiled(module)
    assert torch.equal(unit.plain(X), torch.zeros(2, 3))  # as when it was made
    assert not torch.equal(module(X), torch.zeros(2, 3))  # for others the code is gone
    unit.remove()
    assert torch.equal(unit.plain(X), torch.zeros(2, 3))
    assert "_compiled_call_impl" not in vars(module)


def test_a_module_that_is_compiled_while_it_has_layers_stays_compiled():
    module, heard = nn.Linear(3, 3), []
    before, after = (Telling(module, name, Rank.UNIT, heard) for name in ("before", "after"))
    before.push()
    compiled = module._call_impl
    module._compiled_call_impl = compiled  # as Module.compile does
    after.push()
    module(X)
    assert heard == ["after"]
    before.remove()
    module(X)
    after.remove()
    assert vars(module)["_compiled_call_impl"] is compiled


def test_an_exception_in_a_call_leaves_the_layers_in_place():
    module, heard = nn.Linear(3, 3), []
    for layer in layers(module, heard):
        layer.push()
    with pytest.raises(RuntimeError):
        module(torch.ones(2, 4))
    heard.clear()
    module(X)
    assert heard == ["report", "model", "unit"]


def test_a_layer_that_is_removed_within_its_own_call():
    module, heard = nn.Linear(3, 3), []
    unit, model, report = made = layers(module, heard)
    for layer in made:
        layer.push()

    def remove_all(*_) -> None:
        for layer in made:
            layer.remove()

    module.register_forward_pre_hook(remove_all)
    expected = module.forward(X)
    assert torch.equal(module(X), expected)
    assert CallSite.of(module) is None
    assert all(torch.equal(layer.pass_on(X), expected) for layer in (unit, model, report))


def test_copies_have_no_layers():
    module, heard = nn.Linear(3, 3), []
    for layer in layers(module, heard):
        layer.push()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert CallSite.of(twin) is None
        twin(X)
    assert not heard
