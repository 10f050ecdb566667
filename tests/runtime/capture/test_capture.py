from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from benchmarks.coverage_shapes import FAMILIES
from benchmarks.gradient_check import check_gradients
from tests.runtime.awkward import structure as awkward
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import lowtide
from lowtide import CaptureError
from lowtide.runtime.capture.capture import capture
from lowtide.runtime.model.split import Split, Unit


def paths(split: Split) -> list[list[str]]:
    return [[str(unit) for unit in stage.units] for stage in split.stages]


def share_of_largest(split: Split) -> float:
    return split.largest_stage_bytes / split.activation_bytes


def test_a_sequence_of_modules_becomes_a_chain() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Tanh())
    split = capture(model, torch.randn(4, 8))
    # what Linear returns is saved by nobody: a stage that ended there would keep it for nothing
    assert paths(split) == [["0", "1.0"], ["1.1", "2"]]
    assert split.side_bytes == 0
    assert [stage.parameters for stage in split.stages] == [("0.weight", "0.bias"), ("1.1.weight", "1.1.bias")]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Linear(8, 8), nn.Linear(8, 2)], [["0"], ["1"]]),
        ([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)], [["0", "1"], ["2"]]),
        ([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))], [["0.0"], ["0.1"]]),
    ],
)
def test_two_layers_are_two_stages(layers: list[nn.Module], expected: list[list[str]]) -> None:
    # one activation is saved, or none: no cut makes stages smaller
    model, sample = nn.Sequential(*layers), torch.randn(4, 8)
    split = capture(model, sample)
    assert paths(split) == expected
    assert check_gradients(model, split, sample).equal


def test_an_in_place_operation_stays_with_what_it_changes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Tanh())
    split = capture(model, torch.randn(2, 3, 8, 8))
    assert ["1", "2"] in paths(split)


def test_residual_blocks_are_cut_between_their_halves() -> None:
    split = capture(awkward.Transformerlike(num_blocks=8), torch.randn(4, 6, 8))
    names = [stage.name for stage in split.stages]
    assert "blocks.1.norm1..mlp1" in names
    assert "blocks.1.norm2..mlp2" in names
    assert next(s for s in split.stages if s.name == "blocks.1.norm1..mlp1").trailing_glue
    halves = [stage for stage in split.stages if stage.name.startswith("blocks")]
    assert len(halves) == 16
    assert len({stage.kind for stage in halves if "norm1" in stage.name}) == 1


def test_in_place_resnet_is_cut_between_blocks_and_where_nothing_is_changed_afterwards() -> None:
    split = capture(awkward.InplaceResnet(), torch.randn(2, 3, 8, 8))
    assert ["layers.1.conv1"] in paths(split)
    assert ["layers.1.bn1", "layers.1.relu"] in paths(split)
    assert share_of_largest(split) < 0.25


@pytest.mark.parametrize("name", ["unet", "unet-diffusion", "detector-pyramid", "detector-paths", "detector-queries"])
def test_networks_whose_values_skip_stages_are_cut_finely(name: str) -> None:
    model, sample = FAMILIES[name]()
    split = capture(model, sample)
    assert split.num_stages > 20
    assert share_of_largest(split) <= 0.25
    assert split.side_bytes > 0


@pytest.mark.parametrize(
    "name",
    ["experts-routed", "losses-in-closures", "shared-object", "long-sequences", "repeated-block", "encoder-decoder"],
)
def test_no_stage_of_a_network_of_another_shape_is_large(name: str) -> None:
    model, sample = FAMILIES[name]()
    split = capture(model, sample)
    assert share_of_largest(split) <= 0.25
    assert check_gradients(model, split, sample).equal


def test_dense_concatenation_skips_stages() -> None:
    split = capture(awkward.Dense(), torch.randn(2, 3, 8, 8))
    assert split.num_stages > 10
    assert 0 < split.side_bytes <= 0.05 * split.activation_bytes
    assert share_of_largest(split) < 0.25


def test_encoder_output_skips_stages() -> None:
    model = awkward.EncoderDecoder()
    split = capture(model, (torch.randn(4, 6, 8), torch.randn(4, 6, 8)))
    assert any(stage.name.startswith("decoder.2") for stage in split.stages)
    assert split.side_bytes >= 4 * 6 * awkward.WIDTH * 4


def test_auxiliary_output_skips_stages() -> None:
    model = awkward.Auxiliary()
    blocks = frozenset(path for path, module in model.named_modules() if isinstance(module, awkward.Residual))
    split = capture(model, torch.randn(4, 6, 8 * 2), closed=blocks)
    assert any(stage.name.startswith("second") for stage in split.stages)
    assert split.side_bytes == 4 * 6 * 3 * 4


def test_list_assignment_inside_a_unit() -> None:
    split = capture(awkward.HighResolution(), torch.randn(4, 8))
    assert split.num_stages >= 4


def test_a_block_called_again_and_again() -> None:
    split = capture(awkward.Recurrent(), torch.randn(4, 8), closed=frozenset({"block.mlp1", "block.mlp2"}))
    assert Unit("block.mlp1", 3) in split.units
    owners = [stage for stage in split.stages if any(name.startswith("block.") for name in stage.parameters)]
    assert all(stage.units[0].occurrence == 0 for stage in owners)


def test_tied_weights_belong_to_their_first_reader() -> None:
    split = capture(awkward.Tied(), torch.randint(0, 11, (2, 5)))
    assert set(split.stages[0].parameters) == {"embed.weight", "head.weight"}
    assert split.stages[-1].parameters == ()


def test_a_tensor_in_an_attribute_that_the_code_around_reads_is_a_side_value() -> None:
    chain = lowtide.measure(awkward.SideChannel(), torch.randn(4, 8))
    assert len({stage.name.split(".")[1] for stage in chain.stages if stage.name.startswith("blocks")}) == 3
    sides = [side for side in chain.side_values if side.name.startswith("writer")]
    assert [side.num_bytes for side in sides] == [4 * awkward.WIDTH * 4]


class Behind(nn.Module):
    """A block that reads what another has left in an attribute, by itself."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.writer, self.blocks = awkward.Writer(), nn.ModuleList(awkward.Residual() for _ in range(2))
        self.reader = nn.Sequential(nn.Linear(awkward.WIDTH, awkward.WIDTH), nn.Tanh(), awkward.FailsAtTheEnd())
        self.reader.forward = self.read  # type: ignore[method-assign]
        self.fails = fails

    def read(self, x: Tensor) -> Tensor:
        if self.fails:
            with contextlib.suppress(ValueError):
                self.reader[2](x)
        return self.reader[1](self.reader[0](x)) * self.writer.gate

    def forward(self, x: Tensor) -> Tensor:
        x = self.writer(x)
        for block in self.blocks:
            x = block(x)
        return self.reader(x)


def test_a_block_that_reads_what_another_left_is_opened() -> None:
    split = capture(nn.Sequential(nn.Linear(8, awkward.WIDTH), Behind(), awkward.Residual()), torch.randn(4, 8))
    stage_of = split.stage_of()
    assert Unit("1.reader") not in stage_of
    assert stage_of[Unit("1.blocks.0.mlp1.up")] < stage_of[Unit("1.blocks.1.mlp1.up")] < stage_of[Unit("1.reader.0")]


def test_what_is_read_in_a_block_that_cannot_be_opened_forbids_cuts_while_it_lives() -> None:
    model = nn.Sequential(nn.Linear(8, awkward.WIDTH), Behind(fails=True), awkward.Residual())
    assert Unit("1") in capture(model, torch.randn(4, 8)).units


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.mlp = nn.Linear(awkward.WIDTH, 4), awkward.Mlp()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return x + self.mlp(x) * weights.max(-1, keepdim=True).values


class Collecting(nn.Module):
    """A hook collects what the routers inside the blocks return; it is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        handles = [block.router.register_forward_hook(lambda *given: found.append(given[2])) for block in self.blocks]
        for block in self.blocks:
            x = block(x)
        for handle in handles:
            handle.remove()
        return x.mean() + sum(each.square().mean() for each in found)


def test_what_a_hook_collects_is_a_side_value() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, awkward.WIDTH), Collecting()), torch.randn(4, 8)
    split = capture(model, x)
    assert share_of_largest(split) <= 0.25
    assert Unit("1.blocks.0.router") in split.units
    assert check_gradients(model, split, x).equal


def test_two_streams_pass_together() -> None:
    split = capture(awkward.TwoStreams(), torch.randn(4, 8))
    assert split.num_stages >= 3
    assert share_of_largest(split) < 0.5


def test_frozen_layers_and_low_rank_additions() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (awkward.LowRank(), nn.Tanh())))
    split = capture(model, torch.randn(4, awkward.WIDTH))
    assert split.num_stages == 4


def test_a_keyword_sample() -> None:
    model = awkward.EncoderDecoder()
    both = capture(model, {"source": torch.randn(4, 6, 8), "target": torch.randn(4, 6, 8)})
    assert both.num_stages > 8


def test_stages_by_hand() -> None:
    split = capture(awkward.Transformerlike(), torch.randn(4, 8), stages=["blocks.*"])
    assert paths(split) == [["embed"], ["blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3"], ["head"]]
    by_function = capture(
        awkward.Transformerlike(), torch.randn(4, 8), stages=lambda path, module: isinstance(module, awkward.Residual)
    )
    assert paths(by_function) == paths(split)


def test_a_hand_named_stage_that_cannot_be() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    with pytest.raises(CaptureError, match="changed in place"):
        capture(model, torch.randn(4, 8), stages=["0"])
    with pytest.raises(CaptureError, match="matches"):
        capture(model, torch.randn(4, 8), stages=["nothing.*"])


@pytest.mark.parametrize(
    ("model", "sample", "reason"),
    [
        (nn.Bilinear(8, 8, 8), (torch.randn(4, 8), torch.randn(4, 8)), "stages="),
        (awkward.ChangesInput(), torch.randn(4, 8), "its input"),
        (awkward.Checkpointing(reentrant=False), torch.randn(4, 8), "already uses torch.utils.checkpoint"),
        (awkward.Checkpointing(reentrant=True), torch.randn(4, 8), "already uses torch.utils.checkpoint"),
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False), torch.randn(4, 8), "requires_grad"),
        (awkward.Transformerlike(), "x", "sample"),
    ],
)
def test_what_is_declined_says_why(model: nn.Module, sample: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(model, sample)
    assert "\n" not in str(caught.value)


def test_a_lazy_model_is_told_to_run_once():
    with pytest.raises(CaptureError, match="has no shape yet; call the model once"):
        capture(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 4)), torch.zeros(2, 4))


def test_a_model_without_submodules_is_told_to_have_some():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return (x @ self.weight).tanh() @ self.weight

    with pytest.raises(CaptureError, match="move parts of its forward into submodules"):
        capture(Alone(), torch.randn(4, 8))


def test_a_compiled_block_is_one_unit() -> None:
    model = awkward.Transformerlike()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[2].compile(backend="eager")
    split = capture(model, torch.randn(4, 8))
    assert ["blocks.1"] in paths(split)
    assert ["blocks.2"] in paths(split)
    with pytest.raises(CaptureError, match="the whole model is compiled"):
        capture(torch.compile(awkward.Transformerlike(), backend="eager"), torch.randn(4, 8))


def test_capture_leaves_no_trace() -> None:
    model = nn.Sequential(awkward.InplaceResnet(), nn.Dropout(0.5))
    model[0].bn.eval()
    x = torch.randn(2, 3, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    capture(model, x)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, module in model.named_modules():
        assert module.__dict__.keys() == attributes[name].keys()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failing_forward_leaves_no_trace_either() -> None:
    model = awkward.Transformerlike()
    with pytest.raises(RuntimeError, match="mat1"):
        capture(model, torch.randn(4, 9))
    assert all("_compiled_call_impl" not in module.__dict__ for module in model.modules())


def test_the_loss_counts_where_it_is_given() -> None:
    def loss(output: Tensor) -> Tensor:
        return output.exp().sum()

    model, x = awkward.Transformerlike(), torch.randn(4, 8)
    assert capture(model, x, loss=loss).activation_bytes == capture(model, x).activation_bytes + 4 * 5 * 4


def test_autocast_casts_of_shared_weights_do_not_cross() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        split = capture(awkward.Recurrent(), torch.randn(4, 8))
    assert split.num_stages >= 8


def small_gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0)
    ids = torch.randint(0, 32, (2, 8))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def test_a_language_model_builds_no_cache_unless_it_is_asked_to() -> None:
    model, sample = small_gpt2()
    assert model.config.use_cache
    split = capture(model, sample)
    assert split.call_keywords == {"use_cache": False}
    assert "use_cache=True is ignored in training" in split.notes[0]  # the result lacks what plain training has
    assert any(stage.name.startswith("transformer.h.1") for stage in split.stages)
    refused = capture(model, {**sample, "use_cache": False})
    assert (refused.call_keywords, refused.notes) == ({}, ())
    asked = capture(model, {**sample, "use_cache": True})
    assert asked.call_keywords == {"use_cache": False}
    assert "use_cache=True is ignored in training" in asked.notes[0]
    with pytest.raises(CaptureError, match="gets a key-value cache"):
        capture(model, {**sample, "past_key_values": pytest.importorskip("transformers").DynamicCache()})


def test_gradient_checkpointing_of_transformers_is_noticed() -> None:
    model, sample = small_gpt2()
    model.gradient_checkpointing_enable()
    with pytest.raises(CaptureError, match="gradient_checkpointing_disable"):
        capture(model.train(), sample)


class Yielding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, rows):
        return self.layers(torch.nested.nested_tensor(rows, layout=torch.jagged)).values()


def test_a_forward_that_yields_is_declined():
    with pytest.raises(CaptureError, match="the forward of Yielding returns a generator"):
        capture(Yielding(), torch.randn(4, 8))


def test_nested_tensors_are_declined():
    with pytest.raises(CaptureError, match="works on nested tensors"):
        capture(Jagged(), ([torch.randn(3, 8), torch.randn(5, 8)],))


class Cached(nn.Module):
    """Computes its parametrised weights once, and uses them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(weight_norm(nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x):
        with parametrize.cached():
            for layer in (*self.layers, *self.layers):
                x = torch.tanh(layer(x))
        return x


def test_a_cache_of_parametrised_weights_is_named():
    with pytest.raises(
        CaptureError, match=r"parametrizations.weight.0' is computed once inside parametrize\.cached\(\)"
    ):
        lowtide.measure(Cached(), torch.randn(64, 64))
