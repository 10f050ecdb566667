from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.zoo import ZooError

# ResNet 18 to 152, DenseNet, Inception v3 (with auxiliary classifier), VGG-19 and AlexNet: torchvision's model cards.
# ResNet-200: the pre-activated one of He et al. 2016 as facebook's fb.resnet.torch has it, 64.7 million.
# GPT-2 small: 124 439 808 as in the released checkpoint.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception_v3": 27_161_264,
    "vgg19": 143_667_240,
    "alexnet": 61_100_840,
    "gpt2": 124_439_808,
}


def made_without_memory(name: str) -> nn.Module:
    entry = zoo.find(name)
    function = getattr(importlib.import_module(entry.module), entry.function)
    with torch.device("meta"):
        model, _ = function(**entry.settings, **{**entry.defaults, "batch": 1})
    return model


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert num_parameters(made_without_memory(name)) == PUBLISHED[name]


def test_resnet200_has_64_7_million_parameters() -> None:
    assert round(num_parameters(made_without_memory("resnet200")) / 1e6, 1) == 64.7


def test_resnet1001_has_10_2_million_weights() -> None:
    """He et al. 2016, table 4: 10.2 M; convolutions and the classifier, without normalisation."""
    model = made_without_memory("resnet1001")
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert round(sum(num_parameters(layer) for layer in layers) / 1e6, 1) == 10.2
    assert sum(isinstance(module, nn.Conv2d) for module in layers) == 333 * 3 + 1 + 3  # 3 projections


def test_bert_encoder_has_the_parameters_of_bert_base() -> None:
    """bert-base-uncased, the encoder with its pooler: 109 482 240."""
    assert num_parameters(made_without_memory("bert").encoder) == 109_482_240


SMALL = {
    "resnet18": {"batch": 1, "image": 32},
    "resnet50": {"batch": 1, "image": 32},
    "resnet200": {"batch": 1, "image": 32},
    "densenet121": {"batch": 1, "image": 64},
    "gpt2": {"batch": 1, "length": 8, "layers": 2, "width": 32, "heads": 2, "vocabulary": 50},
    "bert": {"batch": 1, "length": 8, "layers": 2, "width": 32, "heads": 2, "vocabulary": 50},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_step_runs(name: str) -> None:
    model, sample = zoo.make(name, **SMALL[name])
    check_step(model.eval(), sample)  # statistics of one value cannot be normalised


def check_step(model: nn.Module, sample: dict[str, torch.Tensor]) -> None:
    loss = model(**sample)
    loss.backward()
    assert loss.dim() == 0
    assert loss.is_meta or torch.isfinite(loss)
    reached = [p.grad is not None for name, p in model.named_parameters() if not name.startswith("encoder.pooler")]
    assert all(reached)


def test_other_types_and_results_without_labels() -> None:
    model, sample = zoo.make("gpt2", dtype="bfloat16", **SMALL["gpt2"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(sample["tokens"]).shape == (1, 8, 50)


def test_a_network_with_an_auxiliary_classifier() -> None:
    """It takes images of one size, and results without labels are those of the main classifier."""
    model, sample = zoo.make("inception_v3", batch=2, image=299)
    with torch.no_grad():
        assert torch.isfinite(model(**sample))
    model, sample = model.to("meta"), {name: tensor.to("meta") for name, tensor in sample.items()}
    check_step(model, sample)
    assert model(sample["images"]).shape == (2, 1000)
    calls: list[nn.Module] = []
    model.network.register_forward_hook(lambda network, args, output: calls.append(network))
    assert model.eval()(sample["images"]).shape == (2, 1000)
    assert len(calls) == 1


def test_wrong_names_and_sizes_are_refused() -> None:
    with pytest.raises(ZooError, match="resnet1001"):
        zoo.make("resnet100")
    with pytest.raises(ZooError, match="length"):
        zoo.make("resnet18", length=3)
    with pytest.raises(ZooError, match=r"width 30 .* 4 heads"):
        zoo.make("gpt2", width=30, heads=4)
    with pytest.raises(ZooError, match="dtype"):
        zoo.make("resnet18", dtype="int8")


def test_the_list_does_not_import_torch() -> None:
    code = "import sys; from lowtide import zoo; zoo.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
