"""Transformers: one like GPT-2 (Radford et al., 2019) and one like BERT (Devlin et al., 2019), of any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, approximate: str) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        return self.down(self.act(self.up(x)))


_NO_LABEL = -100  # what the loss passes over by default


class NormFirst(nn.Module):
    """A block as in GPT-2: normalised before attention and before the linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal=True)
        self.norm2, self.feed = nn.LayerNorm(width), FeedForward(width, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class NormLast(nn.Module):
    """A block as in BERT: normalised after each sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads, causal=False), nn.LayerNorm(width)
        self.feed, self.norm2 = FeedForward(width, "none"), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))


class GPT2(nn.Module):
    """Predicts each next token; input and output share their table."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(NormFirst(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss if labels (the same tokens) are given, otherwise logits (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        following = F.pad(labels[:, 1:], (0, 1), value=_NO_LABEL)  # to cut the logits instead would copy them
        return F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=_NO_LABEL)


class BERT(nn.Module):
    """Encodes tokens and predicts the masked ones; `encoder` is the model without that head."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.encoder = BERTEncoder(layers, width, heads, vocabulary, positions)
        self.transform, self.act, self.norm = nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.encoder.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss if labels are given, otherwise logits (batch, length, vocabulary)."""
        logits: Tensor = self.head(self.norm(self.act(self.transform(self.encoder(tokens)))))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class BERTEncoder(nn.Module):
    """Embeddings and blocks; `pooler` is part of the published model but unused."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(NormLast(width, heads) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) to (batch, length, width)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places) + self.segments(torch.zeros_like(tokens))
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


def gpt2(
    batch: int, length: int, layers: int, width: int, heads: int, vocabulary: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model like GPT-2 with room for 1024 positions, or as many as asked."""
    tokens = torch.randint(0, vocabulary, (batch, length))
    model = GPT2(layers, width, heads, vocabulary, max(1024, length))
    return model, {"tokens": tokens, "labels": tokens.clone()}


def bert(
    batch: int, length: int, layers: int, width: int, heads: int, vocabulary: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model like BERT with room for 512 positions, or as many as asked."""
    tokens = torch.randint(0, vocabulary, (batch, length))
    model = BERT(layers, width, heads, vocabulary, max(512, length))
    return model, {"tokens": tokens, "labels": tokens.clone()}
