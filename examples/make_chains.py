"""Write `examples/sizes/` and `examples/chains/`: what four networks cost, by arithmetic.

No network is run. Bytes follow from the shapes and from what PyTorch saves for backward; times from the numbers of
floating-point operations and of bytes written, at the rates below. They are good for trying the command line, not for
predicting a step on any machine: `lowtide measure` writes chains that are measured.

    python examples/make_chains.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lowtide import Chain, Stage

HERE = Path(__file__).parent

# A made-up device, of the order of a data-centre GPU: a stage takes the longer of its operations at the one rate and of
# the bytes that it writes at the other.
FLOPS_PER_SECOND = 20e12
BYTES_PER_SECOND = 1e12

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
INT64_BYTES = 8  # an index of max-pooling


@dataclass(frozen=True)
class Layer:
    """One stage, for a single sample."""

    name: str
    output: int
    """Elements."""
    flops: float = 0.0
    """Of the forward; the backward takes twice as many."""
    parameters: int = 0
    inner: tuple[int, ...] = ()
    """The elements of each tensor that is saved besides the output."""
    other_bytes: int = 0
    """What else is saved: indices, statistics, tensors of another type."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an activation's element, and of a parameter: itself, its gradient, its optimizer state."""

    element: int
    weight: int
    weight_grad: int
    optimizer: int


# Stochastic gradient descent with momentum in 32 bits; Adam with a 32-bit copy beside 16-bit weights.
SGD_FLOAT32 = Precision(FLOAT32_BYTES, FLOAT32_BYTES, FLOAT32_BYTES, FLOAT32_BYTES)
ADAM_BFLOAT16 = Precision(BFLOAT16_BYTES, BFLOAT16_BYTES, BFLOAT16_BYTES, 3 * FLOAT32_BYTES)


def conv(name: str, channels_in: int, channels: int, side: int, kernel: int = 3) -> Layer:
    """A convolution with its bias and an in-place ReLU: backward needs input and output."""
    taps = channels_in * kernel * kernel
    output = channels * side * side
    return Layer(name, output, flops=2 * taps * output, parameters=(taps + 1) * channels)


def pool(name: str, channels: int, side: int) -> Layer:
    """Max-pooling, which saves the index of each maximum."""
    output = channels * side * side
    return Layer(name, output, other_bytes=INT64_BYTES * output)


def linear(name: str, features_in: int, features: int) -> Layer:
    """A fully connected layer with its bias, and an in-place ReLU or none."""
    weights = features_in * features
    return Layer(name, features, flops=2 * weights, parameters=weights + features)


def vgg19() -> list[Layer]:
    """VGG-19 as Hong counts its layers: 16 convolutions, 5 max-poolings, 3 fully connected ones."""
    layers, channels, side = [], 3, 224
    for block, (num_convs, width) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)), start=1):
        for number in range(1, num_convs + 1):
            layers.append(conv(f"conv{block}_{number}", channels, width, side))
            channels = width
        side //= 2
        layers.append(pool(f"pool{block}", channels, side))
    return [*layers, linear("fc6", 512 * 7 * 7, 4096), linear("fc7", 4096, 4096), linear("fc8", 4096, 1000)]


def alexnet() -> list[Layer]:
    """AlexNet as Hong counts its layers, flattening and dropout among them; the shapes are torchvision's."""
    flat = 256 * 6 * 6
    return [
        conv("conv1", 3, 64, 55, kernel=11),
        pool("pool1", 64, 27),
        conv("conv2", 64, 192, 27, kernel=5),
        pool("pool2", 192, 13),
        conv("conv3", 192, 384, 13),
        conv("conv4", 384, 256, 13),
        conv("conv5", 256, 256, 13),
        pool("pool5", 256, 6),
        Layer("avgpool", flat),
        Layer("flatten", flat),
        Layer("dropout6", flat, other_bytes=flat),  # a mask of a byte an element
        linear("fc6", flat, 4096),
        Layer("dropout7", 4096, other_bytes=4096),
        linear("fc7", 4096, 4096),
        linear("fc8", 4096, 1000),
    ]


def resnet50() -> list[Layer]:
    """ResNet-50 with a stage for each bottleneck, and the loss."""
    stem = conv("stem", 3, 64, 112, kernel=7)
    layers = [Layer("stem", stem.output, stem.flops, stem.parameters, inner=(stem.output,)), pool("pool", 64, 56)]
    channels, side = 64, 56
    for group, (num_blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(num_blocks):
            stride = 2 if group > 1 and block == 0 else 1
            layers.append(bottleneck(f"layer{group}.{block}", channels, width, side, stride))
            channels, side = 4 * width, side // stride
    classes = 1000
    head = linear("avgpool+fc", channels, classes)
    return [
        *layers,
        Layer(head.name, classes, head.flops, head.parameters, inner=(channels,)),
        Layer("loss", 1, inner=(classes,)),
    ]


def bottleneck(name: str, channels: int, width: int, side: int, stride: int) -> Layer:
    """Three convolutions, each with batch normalisation, which saves its input; an in-place ReLU saves its output."""
    before, after, wide = width * side**2, width * (side // stride) ** 2, 4 * width * (side // stride) ** 2
    inner = [before, before, after, after, wide]
    parameters = channels * width + 9 * width * width + 4 * width * width + 12 * width  # and scale and shift
    flops = 2 * (channels * before + 9 * width * after + width * wide)
    if stride > 1 or channels != 4 * width:  # the shortcut's convolution
        inner.append(wide)
        parameters += 4 * channels * width + 8 * width
        flops += 2 * channels * wide
    return Layer(name, wide, flops, parameters, inner=tuple(inner))


def gpt(num_blocks: int = 24, width: int = 1024, num_heads: int = 16, length: int = 1024) -> list[Layer]:
    """A transformer like GPT-2 medium: one sample is a sequence; attention keeps no scores (as in FlashAttention)."""
    vocabulary = 50257
    plane = length * width
    statistics = 2 * length * FLOAT32_BYTES  # mean and deviation of a normalisation
    block = Layer(
        "block",
        plane,
        flops=24 * plane * width + 4 * plane * length,
        parameters=12 * width**2 + 13 * width,
        # normalised input; queries, keys, values; attention; the sum with the input; that normalised; hidden layer
        inner=(plane, 3 * plane, plane, plane, plane, 4 * plane, 4 * plane),
        other_bytes=2 * statistics + num_heads * length * FLOAT32_BYTES,
    )
    blocks = [
        Layer(f"block{k}", plane, block.flops, block.parameters, block.inner, block.other_bytes)
        for k in range(num_blocks)
    ]
    logits = length * vocabulary
    return [
        Layer("embedding", plane, parameters=(vocabulary + length) * width),
        *blocks,
        Layer("head", logits, 2 * logits * width, vocabulary * width, inner=(plane,), other_bytes=statistics),
        Layer("loss", 1, other_bytes=FLOAT32_BYTES * logits),  # logarithms of the probabilities, in 32 bits
    ]


def sizes(layers: list[Layer], *, batch: int, input_elements: int) -> list[int]:
    """d_0..d_n as Hong counts them: the output of each layer, in 32-bit numbers."""
    return [FLOAT32_BYTES * batch * elements for elements in (input_elements, *(layer.output for layer in layers))]


def chain(name: str, layers: list[Layer], *, batch: int, sample_bytes: int, precision: Precision) -> Chain:
    """The chain of a network: `sample_bytes` is the input of one sample."""
    provenance = {
        "source": "examples/make_chains.py: arithmetic; nothing was measured",
        "bytes": "shapes, and what PyTorch saves for backward; backward_extra_bytes is the largest inner gradient",
        "seconds": f"the longer of operations at {FLOPS_PER_SECOND:g}/s and bytes written at {BYTES_PER_SECOND:g}/s; "
        "backward twice forward",
    }
    stages = tuple(_stage(layer, batch, precision) for layer in layers)
    return Chain(name, stages, input_bytes=batch * sample_bytes, provenance=provenance)


def _stage(layer: Layer, batch: int, precision: Precision) -> Stage:
    scale = batch * precision.element
    output = scale * layer.output
    saved = output + scale * sum(layer.inner) + batch * layer.other_bytes
    seconds = max(batch * layer.flops / FLOPS_PER_SECOND, saved / BYTES_PER_SECOND)
    return Stage(
        layer.name,
        forward_seconds=float(f"{seconds:.4g}"),
        backward_seconds=float(f"{2 * seconds:.4g}"),
        output_bytes=output,
        saved_bytes=saved,
        backward_extra_bytes=scale * max(layer.inner, default=0),
        weight_bytes=precision.weight * layer.parameters,
        weight_grad_bytes=precision.weight_grad * layer.parameters,
        optimizer_bytes=precision.optimizer * layer.parameters,
    )


IMAGE = 3 * 224 * 224  # elements


def all_sizes() -> dict[str, list[int]]:
    """The contents of `examples/sizes/`, by file name."""
    networks = {"vgg19-b128.json": vgg19(), "alexnet-b128.json": alexnet()}
    return {name: sizes(layers, batch=128, input_elements=IMAGE) for name, layers in networks.items()}


def all_chains() -> dict[str, Chain]:
    """The contents of `examples/chains/`, by file name."""
    image_bytes = FLOAT32_BYTES * IMAGE
    images = {"vgg19-b128": (vgg19(), 128), "alexnet-b128": (alexnet(), 128), "resnet50-b64": (resnet50(), 64)}
    chains = {
        f"{name}.json": chain(name, layers, batch=batch, sample_bytes=image_bytes, precision=SGD_FLOAT32)
        for name, (layers, batch) in images.items()
    }
    name = "gpt-24x1024-b8"
    chains[f"{name}.json"] = chain(name, gpt(), batch=8, sample_bytes=INT64_BYTES * 1024, precision=ADAM_BFLOAT16)
    return chains


def main() -> None:
    for folder in ("sizes", "chains"):
        (HERE / folder).mkdir(exist_ok=True)
    for name, values in all_sizes().items():
        (HERE / "sizes" / name).write_text(json.dumps(values) + "\n")
    for name, made in all_chains().items():
        made.save(HERE / "chains" / name)


if __name__ == "__main__":
    main()
