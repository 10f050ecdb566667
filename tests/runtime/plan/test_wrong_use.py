"""What a caller got wrong is said in one line that names the argument, with the original error as its cause."""

from __future__ import annotations

import copy
import pickle
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from lowtide import Backward, Forward
from lowtide.runtime.capture import watch as capture_watch
from lowtide.runtime.fitting import ways

WIDTH = 8


def chain_of_blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def fit(model: nn.Module, sample: object, **options: object) -> lowtide.Plan:
    return lowtide.fit(model, sample, **{"memory_budget": "1GiB", "bandwidth": 0, **options})


both = pytest.mark.parametrize("call", [fit, lowtide.measure], ids=["fit", "measure"])


@both
@pytest.mark.parametrize(
    ("sample", "kind", "shown"),
    [
        (torch.zeros(2, 3), RuntimeError, r"mat1 and mat2.*\[2, 3\] float32"),
        (torch.zeros(2, WIDTH, dtype=torch.float64), RuntimeError, r"dtype.*\[2, 8\] float64"),
        (
            {"pictures": torch.zeros(2, WIDTH)},
            TypeError,
            r"unexpected keyword.*pictures=\[2, 8\] float32.*takes \(input\)",
        ),
        ((torch.zeros(2, WIDTH), 3), TypeError, r"positional.*\[2, 8\] float32 on cpu, 3.*takes \(input\).*out labels"),
        (torch.zeros(2, WIDTH, device="meta"), RuntimeError, r"device meta.*\[2, 8\] float32 on meta"),
    ],
    ids=["shape", "dtype", "keyword", "number", "device"],
)
def test_a_sample_on_which_the_model_fails(call, sample, kind, shown):
    with pytest.raises(lowtide.CaptureError, match=rf"on the sample.*{kind.__name__}.*{shown}") as caught:
        call(chain_of_blocks(), sample)
    assert type(caught.value.__cause__) is kind
    assert str(caught.value.__cause__) in str(caught.value)
    assert "\n" not in str(caught.value)


@both
@pytest.mark.parametrize(
    ("sample", "name"), [((iter([torch.zeros(2, WIDTH)]),), "0"), ({"parts": zip([1], [2], strict=True)}, "'parts'")]
)
def test_an_argument_that_can_be_read_once(call, sample, name):
    with pytest.raises(lowtide.CaptureError, match=rf"^argument {name} of the sample is an iterator.*pass a list"):
        call(chain_of_blocks(), sample)


@pytest.mark.parametrize("call", [lowtide.measure, lambda model, given: lowtide.estimate(model, given, device="t4")])
def test_a_loader_where_one_batch_is_expected(call):
    loader = DataLoader(TensorDataset(torch.zeros(4, WIDTH)))
    for given in (loader, iter(loader), loader.dataset):
        with pytest.raises(
            lowtide.CaptureError, match=r"the sample is .*; take one batch, such as next\(iter\(loader\)\)"
        ):
            call(chain_of_blocks(), given)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (lowtide.measure, {"progress": True}, "progress is True, expected a function"),
        (lowtide.estimate, {"device": "t4", "progress": True}, "progress is True, expected a function"),
        (
            lowtide.estimate,
            {"device": torch.device("cuda")},
            r"unknown device device\(.*; expected one of 't4', 'v100'",
        ),
        (lowtide.largest_batch, {"memory_budget": "1GiB", "progress": True}, "progress is True, expected a function"),
        (lowtide.largest_batch, {"memory_budget": "1GiB", "most": 2.5}, r"most is 2\.5, expected a whole number"),
        (lowtide.largest_batch, {"memory_budget": "1GiB", "dim": -1}, "dim is -1, expected a whole number from 0"),
    ],
)
def test_wrong_options_beside_a_sample(call, options, message):
    with pytest.raises(lowtide.LowtideError, match=message):
        call(chain_of_blocks(), torch.zeros(2, WIDTH), **options)


def test_a_model_of_keywords_alone():
    class OfKeywords(nn.Sequential):
        def forward(self, *, x: torch.Tensor, **more: object) -> torch.Tensor:
            return super().forward(x)

    with pytest.raises(lowtide.SampleError, match=r"its forward takes \(x, \*\*more\): pass these.* in a dict by name"):
        fit(OfKeywords(*chain_of_blocks()), torch.zeros(2, WIDTH))


@both
def test_stages_by_a_function_of_one_argument(call):
    with pytest.raises(lowtide.CaptureError, match=r"^stages= failed with TypeError.* with a path and a module"):
        call(chain_of_blocks(), torch.zeros(2, WIDTH), stages=lambda path: path == "0")


@both
def test_a_loss_of_two_arguments(call):
    with pytest.raises(lowtide.CaptureError, match=r"^loss= .*TypeError.*'target'.*loss=lambda result:") as caught:
        call(chain_of_blocks(), torch.zeros(2, WIDTH), loss=nn.CrossEntropyLoss())
    assert isinstance(caught.value.__cause__, TypeError)


@both
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": 5}, "loss is 5, expected a function"),
        ({"stages": 5}, r"stages is 5, expected .*\[\"encoder\.layer\.\*\"\]"),
        ({"stages": ["0", 5]}, r"stages is \['0', 5\], expected"),
        ({"stages": "0.*"}, r"stages is '0\.\*', expected .*; write \[\"0\.\*\"\]"),
        ({"optimizer": 5}, "optimizer is 5, expected a torch optimizer"),
        ({"optimizer": "magic"}, "unknown optimizer 'magic'; pass .*sgd-momentum"),
        ({"optimizer": StepLR(torch.optim.SGD([torch.ones(1)]), 1)}, "StepLR.*; pass the optimizer that"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_before_the_model_is_run(call, options, reason, monkeypatch):
    monkeypatch.setattr(capture_watch, "_Watcher", None)
    monkeypatch.setattr(ways, "measured_for", None if call is fit else ways.measured_for)
    with pytest.raises(lowtide.CaptureError, match=reason):
        call(chain_of_blocks(), torch.zeros(2, WIDTH), **options)


@both
def test_a_result_in_which_no_tensor_is_seen(call):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = chain_of_blocks()

        def forward(self, x: torch.Tensor) -> types.SimpleNamespace:
            return types.SimpleNamespace(logits=self.blocks(x))

    with pytest.raises(lowtide.CaptureError, match=r"found no tensor.*\(SimpleNamespace\); return .*dataclasses"):
        call(Wrapped(), torch.zeros(2, WIDTH))


def test_what_is_no_model_is_not_measured():
    with pytest.raises(lowtide.LowtideError, match=r"expected an nn\.Module"):
        lowtide.measure(nn.Tanh, torch.zeros(2, WIDTH))


def test_what_is_no_model_gets_no_plan(tmp_path):
    model = chain_of_blocks()
    with fit(model, torch.zeros(2, WIDTH)) as plan:
        plan.save(tmp_path / "plan.json")
    for call in (lambda: lowtide.load_plan(tmp_path / "plan.json", 3), lambda: lowtide.attach(3, plan.schedule)):
        with pytest.raises(lowtide.PlanError, match=r"model is 3, expected an nn\.Module"):
            call()


def test_arguments_in_another_order_or_of_an_earlier_step_are_told(tmp_path):
    model = chain_of_blocks()
    chain = lowtide.measure(model, torch.zeros(2, WIDTH))
    solution = lowtide.solve(chain, memory_budget="1GiB")
    for call, message in (
        (lambda: lowtide.load_plan(model, "plan.json"), r"path is Sequential\(.*, expected the path of a file"),
        (
            lambda: lowtide.attach(model, chain),
            r"a schedule is .*, not Chain\(.*; lowtide\.solve\(chain, .* computes one",
        ),
        (lambda: lowtide.attach(solution, model), r"model is Solution\(.*, expected an nn\.Module"),
        (lambda: lowtide.attach(model, solution, split=3), "split is 3, expected a plan's .split"),
        (
            lambda: lowtide.solve(model, memory_budget=1),
            r"a chain is .*, not Sequential\(.*; lowtide\.measure\(model, ",
        ),
        (lambda: lowtide.largest_batch(torch.zeros(2), model, memory_budget="1GiB"), r"model is tensor\("),
    ):
        with pytest.raises(lowtide.LowtideError, match=message):
            call()
    with lowtide.attach(model, solution) as plan:
        for write in (plan.save, plan.report):
            with pytest.raises(lowtide.LowtideError, match="path is 3, expected the path of a file"):
                write(3)


@pytest.mark.parametrize(
    "name", ["grads_resident", "keeps_result", "step_in_backward", "replan", "strict", "spot_checks"]
)
@pytest.mark.parametrize("value", ["no", None, 1])
def test_a_switch_that_is_neither_true_nor_false_is_refused(name, value):
    with pytest.raises(lowtide.PlanError, match=f"{name} is {value!r}.*, expected True or False"):
        lowtide.fit(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.zeros(2, 8), memory_budget="1GiB", **{name: value})


def test_compile_stages_that_are_no_options_are_refused():
    with pytest.raises(lowtide.PlanError, match=r"compile_stages is .*, expected True, False or a mapping"):
        lowtide.fit(nn.Linear(8, 8), torch.zeros(2, 8), memory_budget="1GiB", compile_stages=["regions"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"slots": 0}, "slots is 0, expected a whole number of at least 1"),
        ({"slots": 10.5}, r"slots is 10\.5, expected a whole number"),
        (
            {"step_in_backward": True, "bandwidth": "1GB/s"},
            "step_in_backward=True moves weights.* pass it with optimizer=",
        ),
        (
            {"strategy": "joint"},
            r"'joint' moves weights, .*: nothing is offloaded \(bandwidth=0\); leave bandwidth= out",
        ),
        ({"compile_stages": {"shape": 3}}, "compile_stages has 'shape', which is not an option of torch.compile"),
        ({"host_memory_budget": 8}, "host_memory_budget=8 is 8 bytes.* did you mean '8GiB'"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_right_are_refused_before_the_model_is_run(options, reason, monkeypatch):
    monkeypatch.setattr(capture_watch, "_Watcher", None)
    model = chain_of_blocks()
    with pytest.raises(lowtide.LowtideError, match=reason):
        fit(model, torch.zeros(2, WIDTH), **options)


def test_a_report_of_progress_that_cannot_be_called():
    model = chain_of_blocks()
    for call in (partial(fit, model, torch.zeros(2, WIDTH)), partial(lowtide.load_plan, "no file", model)):
        with pytest.raises(lowtide.LowtideError, match="progress is 3, expected True, False or a function"):
            call(progress=3)


def test_switches_of_plans_that_are_attached_or_loaded():
    model, schedule = nn.Sequential(nn.Linear(8, 8)), lowtide.Schedule("by hand", [Forward(1, "all"), Backward(1)])
    for name in ("strict", "spot_checks", "cuda_graphs"):
        with pytest.raises(lowtide.PlanError, match=f"{name} is 3, expected True or False"):
            lowtide.attach(model, schedule, **{name: 3})
    with pytest.raises(lowtide.PlanError, match="cuda_graphs is 3, expected True or False"):
        lowtide.load_plan("no file", model, cuda_graphs=3)


def test_a_plan_for_one_shape_says_why_it_refuses_others(tmp_path):
    model = chain_of_blocks()
    with fit(model, torch.zeros(2, WIDTH), replan=False) as plan:
        plan.save(tmp_path / "plan.json")
        with pytest.raises(lowtide.PlanError, match=r"\[3, 8\].*replan=False refuses other calls; leave it out"):
            model(torch.zeros(3, WIDTH))
    loaded = lowtide.load_plan(tmp_path / "plan.json", model)
    with pytest.raises(lowtide.PlanError, match=r"\[3, 8\].*a loaded plan does not.*call fit for these shapes"):
        model(torch.zeros(3, WIDTH))
    loaded.detach()


class Differentiating(nn.Module):
    """Its forward computes the derivative of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain_of_blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.blocks(x).sum(), x, create_graph=True)
        return slope


@both
def test_a_forward_that_computes_gradients_says_where_to_compute_them(call):
    with pytest.raises(lowtide.CaptureError, match="computes gradients itself; fit only the network that is diff"):
        call(Differentiating(), torch.zeros(2, WIDTH))


@pytest.mark.parametrize("call", [lambda *given: lowtide.fit(*given, memory_budget="1GiB"), lowtide.measure])
def test_a_model_without_data(call):
    with pytest.raises(lowtide.CaptureError, match=r"parameter '0\.0\.weight' is on the meta device.*load"):
        call(chain_of_blocks().to("meta"), torch.zeros(2, WIDTH))


def test_a_solution_for_a_model_with_more_blocks():
    chain = lowtide.measure(chain_of_blocks(), torch.zeros(2, WIDTH))
    solution = lowtide.solve(chain, memory_budget="1GiB", strategy="store-all")
    with pytest.raises(lowtide.PlanError, match=r"has no submodule '3', .*measured from this model"):
        lowtide.attach(chain_of_blocks()[:3], solution)


def test_a_model_with_a_plan_is_not_measured_again():
    model = chain_of_blocks()
    plan = fit(model, torch.zeros(2, WIDTH))
    with pytest.raises(lowtide.CaptureError, match=r"the model already has a plan; call plan.detach\(\) first"):
        lowtide.measure(model, torch.zeros(2, WIDTH))
    plan.detach()
    assert lowtide.measure(model, torch.zeros(2, WIDTH)).num_stages == 4


@both
def test_an_empty_batch(call):
    sample = (torch.zeros(0, WIDTH), torch.tensor(1.0))
    with pytest.raises(lowtide.CaptureError, match=r"sample is empty.*\[0, 8\] float32.*at least one"):
        call(chain_of_blocks(), sample)


def test_a_sample_without_tensors_is_not_an_empty_batch():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = chain_of_blocks()

        def forward(self, num_rows: int) -> torch.Tensor:
            return self.blocks(torch.ones(num_rows, WIDTH))

    assert lowtide.measure(Counting(), (2,)).num_stages > 1


class Failing(nn.Module):
    """Raises an error of its own while it has one."""

    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain_of_blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.blocks(x)


@both
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.OutOfMemoryError("full"), MemoryError(), lowtide.PlanError("mine")], ids=str
)
def test_what_is_not_the_samples_fault_passes_as_it_is(call, error):
    model = Failing()
    model.error = error
    with pytest.raises(type(error)) as caught:
        call(model, torch.zeros(2, WIDTH))
    assert caught.value is error


def test_a_loss_that_does_not_suit_a_larger_batch_is_told_in_the_training_step_that_plans_again():
    model, y = chain_of_blocks(), torch.zeros(2, dtype=torch.long)
    with fit(model, torch.zeros(2, WIDTH), loss=lambda result: nn.functional.cross_entropy(result, y)):
        with pytest.raises(lowtide.CaptureError, match=r"^loss= .*ValueError.*again for larger batches"):
            model(torch.zeros(4, WIDTH))
        model(torch.zeros(2, WIDTH)).sum().backward()  # as before


def test_in_a_training_step_that_plans_again_the_models_own_error_comes_through():
    model = Failing()
    with fit(model, torch.zeros(2, WIDTH)):
        model.error = ValueError("mine")
        with pytest.raises(ValueError, match="mine") as caught:
            model(torch.zeros(4, WIDTH))  # larger than planned for
        assert caught.value is model.error


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_a_plan_is_not_copied(copied):
    model = chain_of_blocks()
    with fit(model, torch.zeros(2, WIDTH)) as plan:
        with pytest.raises(lowtide.PlanError, match=r"plan\.save\(path\).*lowtide\.load_plan\(path, model\)"):
            copied(plan)
        assert plan.is_attached
        copied(model)  # the model is


@pytest.mark.parametrize("bandwidth", [12, "999kB/s"])
def test_a_link_slower_than_any_is_pointed_out(bandwidth):
    with pytest.warns(lowtide.LowtideWarning, match=r"bandwidth is \d+ .*B/s.*\"12GB/s\""):
        fit(chain_of_blocks(), torch.zeros(2, WIDTH), bandwidth=bandwidth).detach()


@pytest.mark.parametrize("bandwidth", [0, "1MB/s"])
def test_a_slow_link_and_none_at_all_are_not(bandwidth):
    fit(chain_of_blocks(), torch.zeros(2, WIDTH), bandwidth=bandwidth).detach()  # a warning is an error here


@pytest.mark.parametrize("attached", [False, True])
def test_a_model_of_another_type_than_planned_for_is_refused(attached):
    model = nn.Sequential(nn.Embedding(8, WIDTH), *chain_of_blocks())
    tokens = torch.zeros(4, dtype=torch.long)
    if attached:
        chain = lowtide.measure(model, tokens)
        plan = lowtide.attach(model, lowtide.solve(chain, memory_budget="1GiB"))
    else:
        plan = fit(model, tokens)
    model.double()
    with pytest.raises(
        lowtide.PlanError, match=r"parameter '0.weight' is torch.float64, but was torch.float32.*fit again"
    ):
        model(tokens)
    plan.detach()
    model(tokens).sum().backward()


def normalize_spectrally(model):
    nn.utils.parametrizations.spectral_norm(model[1][0])


def replace_a_layer(model):
    model[1][0] = nn.Linear(WIDTH, WIDTH)


def take_a_layer_away(model):
    del model[3]


@pytest.mark.parametrize(
    ("change", "path"),
    [(normalize_spectrally, "1.0.parametrizations"), (replace_a_layer, "1.0"), (take_a_layer_away, "3")],
)
def test_a_model_with_other_submodules_than_planned_for_is_refused(change, path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    x = torch.ones(2, WIDTH)
    chain = lowtide.measure(model, x)
    plan = lowtide.attach(model, lowtide.solve(chain, memory_budget="1GiB"))
    change(model)
    with pytest.raises(lowtide.PlanError, match=rf"submodule '{path}.*' has changed since the plan.*call fit again"):
        model(x)
    plan.detach()
    model(x).sum().backward()


class Naming(nn.Module):
    """Gives the block that runs a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.active = self.blocks[0]

    def forward(self, x):
        for block in self.blocks:
            self.active = block
            x = torch.tanh(self.active(x))
        return x


def test_another_name_for_a_submodule_is_no_other_submodule():
    model, x = Naming(), torch.ones(2, WIDTH)
    chain = lowtide.measure(model, x)
    with lowtide.attach(model, lowtide.solve(chain, memory_budget="1GiB")) as plan:
        for _ in range(2):
            model(x).sum().backward()
        model.active = model.blocks[1]
        model(x).sum().backward()
        assert plan.stats().num_steps == 3
        model.blocks[1] = nn.Linear(WIDTH, WIDTH)  # which the other name still knows
        with pytest.raises(lowtide.PlanError, match=r"submodule 'blocks.1' has changed since the plan was made"):
            model(x)


def test_a_tensor_that_goes_past_calls_is_told_without_a_loss_that_nobody_gave():
    class Holder:
        value = None

    class Layer(nn.Module):
        def __init__(self, holder):
            super().__init__()
            self.linear, self.holder = nn.Linear(WIDTH, WIDTH), holder

        def forward(self, x):
            last = x if self.holder.value is None else self.holder.value
            self.holder.value = torch.tanh(self.linear(x)) + last
            return x + 1

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.holder = Holder()
            self.layers = nn.ModuleList(Layer(self.holder) for _ in range(3))
            for layer in self.layers:
                layer.compile(backend="eager")  # so that it stays whole

        def forward(self, x):
            self.holder.value = None
            for layer in self.layers:
                x = layer(x)
            return x * self.holder.value

    with pytest.raises(lowtide.CaptureError, match=r"a tensor made in layers\.0 is used after it") as refusal:
        fit(Net(), torch.zeros(4, WIDTH, requires_grad=True))
    assert "loss=" not in str(refusal.value)


def test_a_lazy_buffer_is_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(), nn.Tanh())
    with pytest.raises(lowtide.CaptureError, match=r"has no shape yet; call the model once"):
        lowtide.fit(model, torch.zeros(2, 4), memory_budget="1GiB")


def attach(model: nn.Module, sample: object) -> lowtide.Plan:
    steps = [*(lowtide.Forward(k, "all") for k in range(1, 5)), *(lowtide.Backward(k) for k in range(4, 0, -1))]
    return lowtide.attach(model, lowtide.Schedule("by hand", steps))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("call", [fit, lowtide.measure, attach])
@pytest.mark.parametrize("convert", [torch.jit.script, lambda part: torch.jit.trace(part, torch.zeros(2, WIDTH))])
def test_a_torchscript_part_is_refused_by_name(convert, call):
    model = chain_of_blocks()
    model[2] = convert(model[2])
    with pytest.raises(lowtide.CaptureError, match=r"submodule '2' is a TorchScript module.*use the module"):
        call(model, torch.zeros(2, WIDTH))
    with pytest.raises(lowtide.CaptureError, match=r"^the model is a TorchScript module"):
        call(model[2], torch.zeros(2, WIDTH))


def test_a_model_that_catches_an_error_of_its_part_is_told_to_move_the_try():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = chain_of_blocks()

        def forward(self, x):
            for block in self.blocks:
                try:
                    x = block(x[:, :3])
                except RuntimeError:
                    x = block(x)
            return x

    with pytest.raises(lowtide.CaptureError, match=r"catches an error of its submodule 'blocks\.0'.*into submodules"):
        fit(Net(), torch.zeros(2, WIDTH))


def test_a_model_that_gives_its_part_other_weights_is_told_so():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part, self.last = chain_of_blocks(), nn.Linear(WIDTH, WIDTH), chain_of_blocks()

        def forward(self, x):
            weights = {"weight": self.first(self.part.weight)}
            return self.last(torch.func.functional_call(self.part, weights, (x,)))

    with pytest.raises(lowtide.CaptureError, match=r"gives other weights \(functional_call\) to its submodule 'part'"):
        fit(Net(), torch.randn(2, WIDTH))
