"""Small models, each with a habit that makes it hard to run in stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Residual(nn.Module):
    """x + mlp(norm(x)), twice: the sums are glue."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.mlp1 = nn.LayerNorm(width), Mlp(width)
        self.norm2, self.mlp2 = nn.LayerNorm(width), Mlp(width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.mlp1(self.norm1(x)), self.dropout, self.training)
        return x + self.mlp2(self.norm2(x))


class Transformerlike(nn.Module):
    def __init__(self, num_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Residual(dropout=dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InplaceBlock(nn.Module):
    """A basic block as torchvision writes it: ReLUs in place, the last one on the sum."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class InplaceResnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layers = nn.Sequential(*(InplaceBlock() for _ in range(3)))
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.relu(self.bn(self.conv(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class ListAssigning(nn.Module):
    """As HRNet's modules do: writes into the list that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Mlp() for _ in range(2))
        self.fuse = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        for index, branch in enumerate(self.branches):
            xs[index] = branch(xs[index])
        fused = self.fuse(torch.cat(xs, 1))
        return [F.relu(fused), fused]


class HighResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.merge = nn.Linear(2 * WIDTH, WIDTH)
        self.modules_ = nn.ModuleList(ListAssigning() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for module in self.modules_:
            x = self.merge(torch.cat(module([x, x * 2]), 1))
        return self.head(x)


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(F.relu(self.bn1(torch.cat(features, 1))))
        return self.conv2(F.relu(self.bn2(x)))


class Dense(nn.Module):
    """Every layer reads all that came before it."""

    def __init__(self, num_layers: int = 12, growth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(DenseLayer(width + index * growth, growth) for index in range(num_layers))
        self.head = nn.Linear(width + num_layers * growth, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        return self.head(torch.cat(features, 1).mean((2, 3)))


@dataclass
class Answer:
    logits: Tensor
    auxiliary: Tensor | None = None
    label: str = "answer"


class Auxiliary(nn.Module):
    """An auxiliary head half way, returned in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), Residual())
        self.auxiliary, self.head = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Answer:
        x = self.first(x)
        auxiliary = self.auxiliary(x)
        return Answer(self.head(self.second(x)), auxiliary)


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.cross = nn.LayerNorm(WIDTH), Mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x)) * mask
        return x + self.cross(memory)


class EncoderDecoder(nn.Module):
    """The encoder's output is read by every block of the decoder."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.encoder = nn.ModuleList(Residual() for _ in range(num_blocks))
        self.decoder = nn.ModuleList(DecoderBlock() for _ in range(num_blocks))

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        mask = (target.sum(-1, keepdim=True) > 0).float()
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, memory, mask=mask)
        return {"logits": self.head(x)}


class CrossAttending(nn.Module):
    """Attention that looks whether its key is its value, as `nn.MultiheadAttention` does."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, num_blocks)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(self.embed(target), torch.tanh(self.embed(source)))


class Recurrent(nn.Module):
    """One block called several times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(8, WIDTH), Residual(), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class Tied(nn.Module):
    """Input embedding and output projection share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, WIDTH), nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


class Checkpointing(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, WIDTH), nn.ModuleList(Residual() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class SideChannel(nn.Module):
    """A block leaves a tensor in an attribute; a later one picks it up there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.writer, self.embed = Writer(), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.writer(self.embed(x))
        x = self.blocks[0](x)
        x = self.blocks[1](x) * self.writer.gate
        return self.blocks[2](x)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.gate = torch.sigmoid(y * 2)
        return y


class TwoStreams(nn.Module):
    """Two activations pass from block to block, and both are changed by each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Mlp() for _ in range(3))
        self.right = nn.ModuleList(Mlp() for _ in range(3))
        self.start = nn.Linear(8, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.start(x).tanh().tensor_split(2, -1)
        a, b = a.exp(), b.exp()
        for left, right in zip(self.left, self.right, strict=True):
            a = a + left(b)
            b = b + right(a)
        return a * b


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class LowRank(nn.Module):
    """A frozen linear layer with a trained addition of low rank."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(3) for layer in (LowRank(), nn.Tanh())))


class InParts(nn.Module):
    """Calls one module for each part of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.mlp(part) for part in x.chunk(4)])


class Reversed(torch.autograd.Function):
    """A gradient that changes its sign; nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0]


class CustomFunctions(nn.Module):
    """Functions of its own between the blocks, one that saves something and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.first, self.second, self.third = Residual(), Residual(), Residual()

    def forward(self, x: Tensor) -> Tensor:
        x = Reversed.apply(self.first(self.embed(x)), 0.3)
        return self.head(self.third(Squared.apply(self.second(x))))


class Reversible(torch.autograd.Function):
    """Calls a module, saves no more than its own result, and calls the module again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: nn.Module, *parameters: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        ctx.inner = inner
        ctx.save_for_backward(second)
        return torch.cat([first + inner(second), second], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second = grad.chunk(2, -1)
        with torch.enable_grad():
            given = ctx.saved_tensors[0].detach().requires_grad_()
            gradients = torch.autograd.grad(ctx.inner(given), [given, *ctx.inner.parameters()], first)
        return torch.cat([first, second + gradients[0]], -1), None, *gradients[1:]


class ReversibleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.apply(x, self.inner, *self.inner.parameters()).roll(WIDTH // 2, -1)


class FailsAtTheEnd(nn.Module):
    """Counts, draws, and then raises an error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_tries = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("tries", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.num_tries += 1
        self.tries += 1
        F.dropout(self.inner(x), 0.5)
        raise ValueError("this way is closed")


class FallsBack(nn.Module):
    """Tries one way, catches its error, and takes another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = FailsAtTheEnd(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.first(x)
        except ValueError:
            return F.dropout(self.second(x), 0.3) * self.first.tries.clone() / self.first.num_tries


class Hypernetwork(nn.Module):
    """Calls a part, again and again, with weights that another part computes."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.part = nn.Linear(4, WIDTH * WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.codes = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        for code in self.codes:
            weight = self.maker(code).view(WIDTH, WIDTH) + self.part[0].weight
            x = torch.func.functional_call(self.part, {"0.weight": weight}, (x,))
        return x


def hooked() -> nn.Module:
    """Full backward hooks, on a part and on the whole: each is a function around its module."""
    model = Transformerlike()
    model.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    model.blocks[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    return model
