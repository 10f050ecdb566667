"""The networks of `benchmarks.peers`, and how each is checkpointed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lowtide import zoo

Made = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Network:
    """A network and a batch, and where its layers are."""

    name: str
    title: str
    make: Callable[[str, int | None], Made]
    """Given a device and a batch size (None: the one of the title)."""
    trunk: str | None
    """The path of the submodule whose children run one after the other; None: transformers checkpoints it itself."""
    group: int
    """Networks of a lower group are finished first."""


def from_zoo(
    name: str, dtype: str = "float32", *, channels_last: bool = False, **sizes: int
) -> Callable[[str, int | None], Made]:
    """A network of lowtide's zoo; with `channels_last` its weights and the images are laid out so."""

    def make(device: str, batch: int | None) -> Made:
        given = sizes if batch is None else {**sizes, "batch": batch}
        with torch.device(device):  # made where it is used: quicker than moving it there
            model, sample = zoo.make(name, device=device, dtype=dtype, **given)
        if not channels_last:
            return model, sample
        layout = torch.channels_last
        images = {key: value.to(memory_format=layout) for key, value in sample.items() if value.dim() == 4}
        return model.to(memory_format=layout), {**sample, **images}

    return make


def vit(dtype: torch.dtype, batch: int, image: int, **config: int) -> Callable[[str, int | None], Made]:
    """The vision transformer of transformers, with random weights."""

    def make(device: str, given: int | None) -> Made:
        import transformers

        with torch.device(device):
            model = transformers.ViTForImageClassification(
                transformers.ViTConfig(image_size=image, num_labels=1000, **config)
            )
        images = torch.randn(given or batch, 3, image, image)
        labels = torch.randint(0, 1000, (given or batch,))
        sample = {"pixel_values": images.to(device, dtype), "labels": labels.to(device)}
        return model.to(device=device, dtype=dtype).train(), sample

    return make


def llama(dtype: torch.dtype, batch: int, length: int, **config: int) -> Callable[[str, int | None], Made]:
    """The Llama of transformers, with random weights."""

    def make(device: str, given: int | None) -> Made:
        import transformers

        settings = transformers.LlamaConfig(max_position_embeddings=length, use_cache=False, **config)
        with torch.device(device):
            model = transformers.LlamaForCausalLM(settings)
        tokens = torch.randint(3, settings.vocab_size, (given or batch, length), device=device)
        return model.to(dtype=dtype).train(), {"input_ids": tokens, "labels": tokens.clone()}

    return make


def gpt2(dtype: torch.dtype, batch: int, length: int, **config: int) -> Callable[[str, int | None], Made]:
    """The GPT-2 of transformers, with random weights and without dropout."""

    def make(device: str, given: int | None) -> Made:
        import transformers

        settings = transformers.GPT2Config(
            n_positions=length, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **config
        )
        with torch.device(device):
            model = transformers.GPT2LMHeadModel(settings)
        tokens = torch.randint(3, settings.vocab_size, (given or batch, length), device=device)
        return model.to(dtype=dtype).train(), {"input_ids": tokens, "labels": tokens.clone()}

    return make


def images_of(kind: str, dtype: torch.dtype, batch: int, **config: Any) -> Callable[[str, int | None], Made]:
    """An image classifier of transformers for 224 pixels, with random weights: `Swin` or `ConvNext`."""

    def make(device: str, given: int | None) -> Made:
        import transformers

        settings = getattr(transformers, f"{kind}Config")(image_size=224, num_labels=1000, **config)
        with torch.device(device):
            model = getattr(transformers, f"{kind}ForImageClassification")(settings)
        images = torch.randn(given or batch, 3, 224, 224)
        labels = torch.randint(0, 1000, (given or batch,))
        sample = {"pixel_values": images.to(device, dtype), "labels": labels.to(device)}
        return model.to(device=device, dtype=dtype).train(), sample

    return make


# GPT-2's 50257 tokens, padded to a multiple of 64 as is usual: in bfloat16 on an H200 the head takes 48 ms of a step of
# 117 ms without the padding and 13 ms of 82 ms with it.
PADDED_VOCABULARY = 50304

NETWORKS = [
    Network(
        "gpt",
        "GPT-like 24 x 1024, vocabulary 50304, batch 16 x 1024 tokens, bf16",
        from_zoo(
            "gpt2", "bfloat16", batch=16, length=1024, layers=24, width=1024, heads=16, vocabulary=PADDED_VOCABULARY
        ),
        "blocks",
        0,
    ),
    Network(
        "resnet101",
        "ResNet-101, batch 16, 500 px, fp32",
        from_zoo("resnet101", batch=16, image=500),
        "network.blocks",
        0,
    ),
    Network(
        "resnet101-channels-last",
        "ResNet-101 with channels last, batch 16, 500 px, fp32",
        from_zoo("resnet101", channels_last=True, batch=16, image=500),
        "network.blocks",
        0,
    ),
    Network(
        "vit",
        "ViT-L/16, batch 64, 384 px, bf16",
        vit(
            torch.bfloat16, 64, 384, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
            intermediate_size=4096, patch_size=16,
        ),
        None,
        1,
    ),
    Network(
        "llama",
        "Llama-like 1B, batch 4 x 4096 tokens, bf16",
        llama(
            torch.bfloat16, 4, 4096, hidden_size=2048, num_hidden_layers=22, num_attention_heads=32,
            num_key_value_heads=4, intermediate_size=5632, vocab_size=32000,
        ),
        None,
        1,
    ),
    Network(
        "densenet201",
        "DenseNet-201, batch 16, 500 px, fp32",
        from_zoo("densenet201", batch=16, image=500),
        "network.features",
        2,
    ),
    Network(
        "gpt2-medium",
        "GPT-2 medium of transformers, batch 16 x 1024 tokens, bf16",
        gpt2(torch.bfloat16, 16, 1024, n_layer=24, n_embd=1024, n_head=16),
        None,
        3,
    ),
    Network(
        "swin",
        "Swin-B of transformers, batch 64, 224 px, bf16",
        images_of("Swin", torch.bfloat16, 64, embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32]),
        None,
        3,
    ),
    Network(
        "convnext",
        "ConvNeXt-B of transformers, batch 64, 224 px, bf16",
        images_of("ConvNext", torch.bfloat16, 64, depths=[3, 3, 27, 3], hidden_sizes=[128, 256, 512, 1024]),
        None,
        3,
    ),
]  # fmt: skip
TINY = [
    Network(
        "gpt",
        "GPT-like 2 x 32, batch 8 x 32 tokens",
        from_zoo("gpt2", batch=8, length=32, layers=2, width=32, heads=4, vocabulary=64),
        "blocks",
        0,
    ),
    Network("resnet18", "ResNet-18, batch 2, 64 px", from_zoo("resnet18", batch=2, image=64), "network.blocks", 0),
    Network(
        "resnet18-channels-last",
        "ResNet-18 with channels last, batch 2, 64 px",
        from_zoo("resnet18", channels_last=True, batch=2, image=64),
        "network.blocks",
        0,
    ),
    Network(
        "vit",
        "ViT 4 x 64, batch 4, 32 px",
        vit(
            torch.float32, 4, 32, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
            patch_size=8,
        ),
        None,
        1,
    ),
    Network(
        "llama",
        "Llama-like 4 x 64, batch 4 x 64 tokens",
        llama(
            torch.float32, 4, 64, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=128, vocab_size=256,
        ),
        None,
        1,
    ),
]  # fmt: skip


class InSegments(nn.Module):
    """Layers under `checkpoint_sequential`."""

    def __init__(self, layers: Sequence[nn.Module], segments: int) -> None:
        super().__init__()
        self.layers, self.segments = nn.ModuleList(layers), segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's result."""
        return checkpoint_sequential(list(self.layers), self.segments, x, use_reentrant=False)


class EachCheckpointed(nn.Module):
    """Layers that each are recomputed in backward: what transformers' gradient checkpointing does."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's result."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def layers_of(model: nn.Module, trunk: str) -> list[nn.Module]:
    """The layers below a path, those in nested `nn.Sequential`s of blocks one by one."""
    layers: list[nn.Module] = []
    for child in model.get_submodule(trunk).children():
        if isinstance(child, nn.Sequential) and trunk.endswith("blocks"):
            layers += child.children()
        else:
            layers.append(child)
    return layers


@contextmanager
def trunk_replaced(model: nn.Module, trunk: str, module: nn.Module) -> Iterator[None]:
    """Run a model with another module instead of its trunk."""
    parent_path, _, name = trunk.rpartition(".")
    parent = model.get_submodule(parent_path)
    before = getattr(parent, name)
    setattr(parent, name, nn.ModuleList([module]) if isinstance(before, nn.ModuleList) else module)
    try:
        yield
    finally:
        setattr(parent, name, before)


@contextmanager
def gradient_checkpointing(model: nn.Module, trunk: str | None) -> Iterator[None]:
    """Recompute every layer of the trunk; by transformers itself if the model is one of its own."""
    if trunk is not None:
        with trunk_replaced(model, trunk, EachCheckpointed(layers_of(model, trunk))):
            yield
        return
    own: Any = model
    own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        own.gradient_checkpointing_disable()
