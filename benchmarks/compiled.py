"""Layers that inductor has compiled, one graph a layer: a step with them on host and on disk against plain torch's.

    python -m benchmarks.compiled --disk DIR

Each layer is compiled before `prepare`, with `fullgraph=True`. Plain torch and outsize take turns, step by step, in one
process; the numbers are medians of the steps. What is recomputed is compared with layers that plain torch checkpoints.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import outsize
from benchmarks.common import Row, run_rows

LAYERS, WIDTH, HEADS, BATCH, TOKENS = 6, 384, 6, 4, 128
STEPS, WARM_UP = 21, 4
MOST_DIFFERENCE = 1e-5
"""Of a loss: inductor adds up in another order where a buffer has another alignment."""


class Layer(nn.Module):
    """A transformer layer, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [BATCH, TOKENS, WIDTH], both
        parts = self.into(self.first(x)).view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Stack(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        for layer in self.layers:
            layer.compile(fullgraph=True)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> tuple[float, float]:
    """(seconds, loss) of one step."""
    began = time.perf_counter()
    loss = model(rows).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began, loss.item()


def measure(directory: str, tier: str, activations: str) -> tuple[float, float]:
    """(median of the ratios of a step with outsize to plain torch's next to it, largest difference of two losses)."""
    torch.compiler.reset()
    plain = Stack(activations == "recompute")
    ours = Stack(False)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for model in (plain, ours)]
    places: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), tier)
    outsize.prepare(
        ours, optimizers[1], device="cpu", host_memory="1GiB", disk=directory, activations=activations, **places
    )
    ratios, apart = [], 0.0
    for number in range(STEPS):
        rows = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))
        theirs, expected = step(plain, optimizers[0], rows)
        taken, loss = step(ours, optimizers[1], rows)
        apart = max(apart, abs(loss - expected))
        if number >= WARM_UP:
            ratios.append(taken / theirs)
    outsize.release(ours)
    return statistics.median(ratios), apart


def compiled(directory: str) -> list[Row]:
    """A step with compiled layers, by tier and by what layers keep."""
    rows = []
    for tier in ("host", "disk"):
        for activations in ("keep", "recompute"):
            ratio, apart = measure(directory, tier, activations)
            what = f"a step with compiled layers on {tier}, activations={activations!r}, over plain torch's with them"
            measured = f"{ratio:.3f} x; losses within {apart:.1e}"
            rows.append(Row(what, measured, "<= 1.05 x", ratio <= 1.05 and apart <= MOST_DIFFERENCE))
    return rows


if __name__ == "__main__":
    run_rows(__doc__ or "", {"compiled": compiled})
