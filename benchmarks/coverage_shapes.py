"""Networks whose values skip stages, small and with random weights: U-Nets, detectors, mixtures of experts, losses that
blocks leave in attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Made = tuple[nn.Module, Any]


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """The classic: double convolutions with BatchNorm, concatenated skips."""

    def __init__(self, width: int = 8, num_levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(num_levels + 1)]
        self.down = nn.ModuleList(map(double_convolution, [3, *widths], widths[:-1]))
        self.bottom = double_convolution(widths[-2], widths[-1])
        pairs = [(widths[i + 1], widths[i]) for i in reversed(range(num_levels))]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(double_convolution(a, b) for a, b in pairs)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, block, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = block(torch.cat([skip, grow(x)], 1))
        result: torch.Tensor = self.head(x)
        return result


class ResidualBlock(nn.Module):
    """As in diffusion models: GroupNorm, and the time added between two convolutions."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.time = nn.Linear(time, outputs)
        self.second = nn.Sequential(
            nn.GroupNorm(4, outputs), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + self.time(functional.silu(time))[:, :, None, None]
        result: torch.Tensor = self.skip(x) + self.second(h)
        return result


class ImageAttention(nn.Module):
    """Attention over the pixels, and over a text where there is one."""

    def __init__(self, width: int, text: int = 0) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.own = nn.MultiheadAttention(width, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(width, 2, kdim=text, vdim=text, batch_first=True) if text else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor:
        h = self.norm(x).flatten(2).transpose(1, 2)
        h = h + self.own(h, h, h, need_weights=False)[0]
        if self.cross is not None:
            h = h + self.cross(h, text, text, need_weights=False)[0]
        h = h + self.mlp(h)
        return x + h.transpose(1, 2).reshape(x.shape)


class DiffusionUNet(nn.Module):
    """Predicts noise: a skip after every block, concatenated on the way up, time in every block."""

    def __init__(self, width: int = 16, num_blocks: int = 2, *, attention: bool = False, text: int = 0) -> None:
        super().__init__()
        widths, time = [width, 2 * width, 4 * width], 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, inputs = [width], width
        for level, outputs in enumerate(widths):
            for _ in range(num_blocks):
                self.down.append(self._block(inputs, outputs, time, text, attends=attention and level > 0))
                inputs = outputs
                skips.append(inputs)
            if level < 2:
                self.down.append(nn.Conv2d(inputs, inputs, 3, stride=2, padding=1))
                skips.append(inputs)
        self.middle = self._block(inputs, inputs, time, text, attends=attention)
        for level, outputs in reversed(list(enumerate(widths))):
            for index in range(num_blocks + 1):
                self.up.append(self._block(inputs + skips.pop(), outputs, time, text, attends=attention and level > 0))
                inputs = outputs
                if level and index == num_blocks:
                    self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(inputs, inputs, 3, padding=1)))
        self.head = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    @staticmethod
    def _block(inputs: int, outputs: int, time: int, text: int, *, attends: bool) -> nn.ModuleList:
        block = ResidualBlock(inputs, outputs, time)
        return nn.ModuleList([block, ImageAttention(outputs, text)] if attends else [block])

    @staticmethod
    def _through(layer: nn.Module, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(layer, nn.ModuleList):
            return layer(x)  # type: ignore[no-any-return]
        for part in layer:
            x = part(x, time if isinstance(part, ResidualBlock) else text)
        return x

    def forward(self, x: torch.Tensor, step: torch.Tensor, text: torch.Tensor | None = None) -> torch.Tensor:
        rates = torch.exp(-torch.arange(self.width // 2, device=x.device) * (math.log(10000) / (self.width // 2)))
        angles = step[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.stem(x)
        skips = [x]
        for layer in self.down:
            x = self._through(layer, x, time, text)
            skips.append(x)
        x = self._through(self.middle, x, time, text)
        for layer in self.up:
            if isinstance(layer, nn.ModuleList):
                x = torch.cat([x, skips.pop()], 1)
            x = self._through(layer, x, time, text)
        result: torch.Tensor = self.head(x)
        return result


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class Bottleneck(nn.Module):
    """One part of a network below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = convolution(width, width // 2, 1), convolution(width // 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(self.first(x))
        return result


class Backbone(nn.Module):
    """Feature maps of several sizes, in a list."""

    def __init__(self, width: int = 8, num_levels: int = 4) -> None:
        super().__init__()
        self.widths = [width * 2**level for level in range(num_levels)]
        self.stem = convolution(3, width, stride=2)
        self.levels = nn.ModuleList(
            nn.Sequential(convolution(a, b, stride=2), Bottleneck(b), Bottleneck(b))
            for a, b in zip([width, *self.widths], self.widths, strict=False)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x, found = self.stem(x), []
        for level in self.levels:
            x = level(x)
            found.append(x)
        return found


class Pyramid(nn.Module):
    """A feature pyramid: from the coarsest map to the finest, each with the map of the backbone beside it."""

    def __init__(self, widths: list[int], width: int = 16) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(each, width, 1) for each in widths)
        self.outer = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in widths)

    def forward(self, maps: list[torch.Tensor]) -> list[torch.Tensor]:
        x = self.inner[-1](maps[-1])
        found = [self.outer[-1](x)]
        for index in reversed(range(len(maps) - 1)):
            x = self.inner[index](maps[index]) + functional.interpolate(x, scale_factor=2.0)
            found.insert(0, self.outer[index](x))
        return found


class PyramidDetector(nn.Module):
    """One stage, anchors on every map of a pyramid; the heads are shared by all maps."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.pyramid = Pyramid(self.backbone.widths)
        self.classes = nn.Sequential(*(convolution(16, 16) for _ in range(3)), nn.Conv2d(16, 12, 3, padding=1))
        self.boxes = nn.Sequential(*(convolution(16, 16) for _ in range(3)), nn.Conv2d(16, 12, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.pyramid(self.backbone(x))
        loss = x.new_zeros(())
        for each in maps:
            loss = loss + self.classes(each).sigmoid().mean() + self.boxes(each).abs().mean()
        return loss


class PathDetector(nn.Module):
    """Down to a pyramid and up again, maps concatenated both ways; a head for each map."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        a, b, c, d = self.backbone.widths
        self.top = nn.ModuleList([convolution(d + c, c), convolution(c + b, b), convolution(b + a, a)])
        self.shrink = nn.ModuleList(
            [convolution(a, a, stride=2), convolution(b, b, stride=2), convolution(c, c, stride=2)]
        )
        self.bottom = nn.ModuleList([convolution(a + b, b), convolution(b + c, c), convolution(c + d, d)])
        self.heads = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in (a, b, c, d))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        maps = self.backbone(x)
        x, down = maps[-1], [maps[-1]]
        for block, other in zip(self.top, reversed(maps[:-1]), strict=True):
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), other], 1))
            down.insert(0, x)
        found = [x]
        for shrink, block, other in zip(self.shrink, self.bottom, down[1:], strict=True):
            x = block(torch.cat([shrink(x), other], 1))
            found.append(x)
        return [head(each) for head, each in zip(self.heads, found, strict=True)]


class QueryDetector(nn.Module):
    """A convolutional backbone, an encoder over its last map, a decoder of queries, and a loss after each of its
    layers.
    """

    def __init__(self, width: int = 32, num_layers: int = 4) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.project = nn.Conv2d(self.backbone.widths[-1], width, 1)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, 0.1, batch_first=True) for _ in range(num_layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 64, 0.1, batch_first=True) for _ in range(num_layers)
        )
        self.queries = nn.Parameter(torch.randn(12, width))
        self.position = nn.Parameter(torch.randn(1, 64, width))
        self.classes, self.boxes = nn.Linear(width, 5), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        memory = self.project(self.backbone(x)[-1]).flatten(2).transpose(1, 2)
        position = self.position[:, : memory.shape[1]]
        for layer in self.encoder:
            memory = layer(memory + position)
        h = self.queries.expand(x.shape[0], -1, -1)
        between = []
        for layer in self.decoder:
            h = layer(h, memory + position)
            between.append(h)
        answers = [{"classes": self.classes(each), "boxes": self.boxes(each).sigmoid()} for each in between]
        return {**answers[-1], "earlier": answers[:-1]}


class Experts(nn.Module):
    """A router and experts; what balances their load is left in an attribute."""

    def __init__(self, width: int, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        largest, chosen = weights.max(-1)
        used = functional.one_hot(chosen, len(self.experts)).to(x.dtype)
        self.balance = len(self.experts) * (used.mean((0, 1)) * weights.mean((0, 1))).sum()
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            out = out + expert(x) * (largest * used[..., index]).unsqueeze(-1)
        return out


class ExpertBlock(nn.Module):
    """One part of a network below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.experts = Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        result: torch.Tensor = x + self.experts(self.norm(x))
        return result


class BalancedExperts(nn.Module):
    """Experts whose losses are read from their attributes and summed at the end."""

    def __init__(self, width: int = 32, num_layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(ExpertBlock(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss + 0.01 * sum(block.experts.balance for block in self.blocks)


class LossyBlock(nn.Module):
    """Leaves a penalty of its activations in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.penalty: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        self.penalty = h.square().mean()
        result: torch.Tensor = x + self.down(h)
        return result


class LossyBlocks(nn.Module):
    """Penalties of all blocks, summed at the end."""

    def __init__(self, width: int = 32, num_layers: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList(LossyBlock(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x).square().mean() + sum(block.penalty for block in self.blocks)
        return result


class SparseExperts(nn.Module):
    """Each token is handed to two experts; its result comes with the router's logits."""

    def __init__(self, width: int, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return out.view_as(x), logits


class SharedExpertBlock(nn.Module):
    """An expert for all tokens beside those that are chosen; logits are passed on from block to block in a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.shared = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.experts = SparseExperts(width)

    def forward(
        self, x: torch.Tensor, logits: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        h = self.attention_norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = self.norm(x)
        chosen, own = self.experts(h)
        return x + self.shared(h) + chosen, (*logits, own)


class RoutedExperts(nn.Module):
    """All routers' logits are read at the end, by a loss over all layers."""

    def __init__(self, width: int = 32, num_layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(SharedExpertBlock(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, logits = self.embed(ids), ()
        for block in self.blocks:
            x, logits = block(x, logits)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss + 0.01 * torch.cat(logits).logsumexp(-1).square().mean()


class LongBlock(nn.Module):
    """A residual branch that is one long sequence of layers."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layers = [[nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.GELU()] for _ in range(num_layers)]
        self.body = nn.Sequential(*(layer for each in layers for layer in each))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.body(x)
        return result


class LongSequences(nn.Module):
    """Two blocks alone: whatever there is to choose is inside their sequences."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(LongBlock(width, 8) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


class RepeatedBlock(nn.Module):
    """One block that is called again and again; it is given the first activation each time, and one more norm of its
    own.
    """

    def __init__(self, width: int = 32, num_rounds: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, 0.1, batch_first=True)
        self.mix = nn.Linear(2 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_rounds))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(ids)
        for norm in self.norms:
            x = norm(self.block(self.mix(torch.cat([x, first], -1))))
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Translator(nn.Module):
    """An encoder and a decoder: every layer of the decoder reads what the encoder has made, and two masks."""

    def __init__(self, width: int = 32, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width, padding_idx=0)
        layer = {"nhead": 4, "dim_feedforward": 64, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, **layer) for _ in range(num_layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, **layer) for _ in range(num_layers))
        self.head = nn.Linear(width, 64)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        padding = source == 0
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class ReportingBlock(nn.Module):
    """Hands its penalty to a function that it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, report: Callable[[torch.Tensor], None]) -> torch.Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        report(h.square().mean())
        result: torch.Tensor = x + self.down(h)
        return result


class ReportingBlocks(nn.Module):
    """Penalties that blocks hand to a closure over a list, summed at the end."""

    def __init__(self, width: int = 32, num_layers: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList(ReportingBlock(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reported: list[torch.Tensor] = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, reported.append)
        return self.head(x).square().mean() + torch.stack(reported).sum()


class Board:
    """What blocks share."""

    left: torch.Tensor


class BoardBlock(nn.Module):
    """Reads, in its own forward, what the block before it has left on a board, and leaves something of its own."""

    def __init__(self, width: int, board: Board) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate, self.board = nn.Linear(width, width), board

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.gate(self.board.left))
        x = x + gate * self.down(functional.gelu(self.up(self.norm(x))))
        self.board.left = torch.tanh(x)
        return x


class BoardBlocks(nn.Module):
    """Blocks that hand on a second stream in an object that all of them have."""

    def __init__(self, width: int = 32, num_layers: int = 8) -> None:
        super().__init__()
        self.board = Board()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList(BoardBlock(width, self.board) for _ in range(num_layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        self.board.left = x
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


def image(make: Callable[[], nn.Module], *, batch: int = 2, size: int = 64) -> Callable[[], Made]:
    return lambda: (make(), torch.randn(batch, 3, size, size))


def diffusion(*, text: int = 0, **settings: Any) -> Callable[[], Made]:
    def make() -> Made:
        sample = (torch.randn(2, 3, 32, 32), torch.randint(0, 1000, (2,)))
        return DiffusionUNet(text=text, **settings), (*sample, torch.randn(2, 8, text)) if text else sample

    return make


FAMILIES: dict[str, Callable[[], Made]] = {
    "unet": image(UNet),
    "unet-diffusion": diffusion(),
    "unet-diffusion-attention": diffusion(attention=True),
    "unet-diffusion-text": diffusion(attention=True, text=24),
    "detector-pyramid": image(PyramidDetector),
    "detector-paths": image(PathDetector),
    "detector-queries": image(QueryDetector, size=128),
    "experts-balanced": lambda: (BalancedExperts(), torch.randint(0, 64, (4, 32))),
    "experts-routed": lambda: (RoutedExperts(), torch.randint(0, 64, (4, 32))),
    "losses-in-attributes": lambda: (LossyBlocks(), torch.randn(64, 16)),
    "losses-in-closures": lambda: (ReportingBlocks(), torch.randn(64, 16)),
    "shared-object": lambda: (BoardBlocks(), torch.randn(64, 16)),
    "long-sequences": image(LongSequences, size=32),
    "repeated-block": lambda: (RepeatedBlock(), torch.randint(0, 64, (4, 32))),
    "encoder-decoder": lambda: (Translator(), (torch.randint(0, 64, (4, 24)), torch.randint(0, 64, (4, 32)))),
}
