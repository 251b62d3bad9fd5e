"""The models of random programs: a row of small layers, each of which uses its parameters in a way of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, LENGTH = 11, 5


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor | tuple[Tensor, Any] = super().forward(x)
        return x + (out[0] if isinstance(out, tuple) else out)


class Across(nn.Module):
    """A layer for [rows, channels, length] where all others have [rows, length, channels]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return out


class Attention(nn.Module):
    """Reads the weight of a child that it never calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(width, 2, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads(x, x, x, need_weights=False)[0]
        return out


class _Gain(torch.autograd.Function):
    """x * gain, with both saved for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return grad * gain, (grad * x).sum()


class Oddities(nn.Module):
    """A scalar parameter in a custom function, one without elements, and one that nothing uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.1))
        self.empty = nn.Parameter(torch.empty(0, width))
        self.unused = nn.Parameter(torch.randn(3, width))
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Gain.apply(self.mix(x), self.gain) + self.empty.sum()
        return out


class InPlace(nn.Module):
    """Operations in place on what the layer itself has made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.shift = nn.Parameter(torch.randn(width) / 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mix(x).mul_(0.5).add_(self.shift).relu_()
        return out


class SumOfWeights(nn.Module):
    """Two parameters whose gradient is one tensor, one of which is used in two pieces besides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.added = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        upper, lower = self.added.chunk(2)
        pieces = torch.cat([x @ upper.t(), x @ lower.t()], -1)
        return torch.tanh(functional.linear(x, self.weight + self.added)) + pieces


def _feed_forward(width: int, dropout: float) -> nn.Module:
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return Residual(nn.LayerNorm(width), up, nn.GELU(), nn.Dropout(dropout), down)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "feed": lambda width: _feed_forward(width, 0.0),
    "dropout": lambda width: _feed_forward(width, 0.2),
    "batch norm": lambda width: Residual(Across(nn.BatchNorm1d(width)), nn.Linear(width, width), nn.Tanh()),
    "conv": lambda width: Residual(Across(nn.Conv1d(width, width, 3, padding=1)), nn.Tanh()),
    "gru": lambda width: Residual(nn.GRU(width, width, batch_first=True)),
    "lstm": lambda width: Residual(nn.LSTM(width, width, batch_first=True)),
    "attention": lambda width: Residual(Attention(width)),
    "odd": Oddities,
    "in place": lambda width: Residual(InPlace(width)),
    "sum": lambda width: Residual(SumOfWeights(width)),
}


@dataclass(frozen=True)
class NetSpec:
    """`layers` are names of `LAYERS`; `shared`: the first layer is also the last; `twice`: it runs twice in a row."""

    width: int
    layers: tuple[str, ...]
    tied: bool = False
    shared: bool = False
    twice: bool = False


class Net(nn.Module):
    def __init__(self, spec: NetSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, spec.width)
        self.layers = nn.ModuleList([LAYERS[kind](spec.width) for kind in spec.layers])
        if spec.shared:
            self.layers.append(self.layers[0])
        self.side = nn.Linear(spec.width, spec.width)
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, TOKENS, bias=False)
        if spec.tied:
            self.head.weight = self.embedding.weight
        self._twice = spec.twice

    def forward(self, tokens: Tensor, skipped: int, by_side: bool) -> Tensor:
        """Scores [rows, LENGTH, TOKENS] of tokens [rows, LENGTH]; without one layer, and by a branch or not."""
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = layer(x)
                if index == 0 and self._twice:
                    x = layer(x)
        if by_side:
            x = x + torch.tanh(self.side(x))
        scores: Tensor = self.head(self.norm(x))
        return scores


def batch(seed: int, part: int, rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and the target of each, [rows, LENGTH], of one rank's part."""
    made = torch.Generator().manual_seed(1000 * seed + part)
    tokens, targets = torch.randint(TOKENS, (2, rows, LENGTH), generator=made)
    return tokens, targets
