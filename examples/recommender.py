"""Train a recommender whose table of items is larger than memory: 20 M rows of 64, 15 GB with its optimizer state.

    python examples/recommender.py DIRECTORY [--rows 20_000_000] [--host-memory 512MiB] [--steps 50]

Two towers: one for a user's last clicks, one for the item shown. The click log is made on the spot; which items are
clicked follows a Zipf distribution, and their numbers say nothing about how often.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import outsize


class TwoTowers(nn.Module):
    """How well an item fits a user's history: scores [batch]."""

    def __init__(self, items: Tensor) -> None:
        super().__init__()
        width = items.shape[1]
        self.items = nn.Embedding.from_pretrained(items, freeze=False, sparse=True)
        self.user = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.item = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, history: Tensor, shown: Tensor) -> Tensor:
        user, item = self.user(self.items(history).mean(1)), self.item(self.items(shown))
        return (user * item).sum(-1) / math.sqrt(item.shape[-1])


def first_values(path: Path, rows: int, width: int) -> Tensor:
    """Random values for a table that memory does not hold: a mapped file, filled a million values at a time."""
    table = torch.from_file(str(path), shared=True, size=rows * width)
    for part in table.split(1 << 20):
        part.normal_(0, 0.1)
    return table.view(rows, width)


def click_log(rows: int, batch: int, steps: int, exponent: float = 1.05) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of (the last 7 clicks of each user, the item shown, whether it was clicked)."""
    generator = torch.Generator().manual_seed(0)

    def zipf(*size: int) -> Tensor:
        u = torch.rand(*size, generator=generator, dtype=torch.float64)
        rank = (1 - u * (1 - (rows + 1.0) ** (1 - exponent))) ** (1 / (1 - exponent))  # the inverse of the integral
        return (rank.long() - 1).clamp(0, rows - 1) * 7_368_787 % rows

    for _ in range(steps):
        history, shown = zipf(batch, 7), zipf(batch)
        yield history, shown, ((history[:, 0] + shown) % 3 == 0).float()


def main(directory: Path, rows: int, host_memory: str, steps: int, batch: int = 2048, width: int = 64) -> float:
    """Returns the last loss."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = TwoTowers(first_values(directory / "items", rows, width))
    optimizer = outsize.optim.LazyAdamW(model.parameters(), lr=1e-3)
    outsize.prepare(model, optimizer, host_memory=host_memory, disk=directory)
    (directory / "items").unlink()
    print(outsize.plan(model))

    loss = torch.zeros(())
    began, before = time.perf_counter(), outsize.memory(model)
    for step, (history, shown, clicked) in enumerate(outsize.lookahead(click_log(rows, batch, steps), model), 1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(history, shown), clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps:
            seconds, after = time.perf_counter() - began, outsize.memory(model)
            asked = max(after.rows - before.rows, 1)
            known = after.row_hits - before.row_hits - (after.rows_ahead - before.rows_ahead)
            moved = after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written
            print(
                f"step {step}: loss {loss.item():.4f}; {asked / seconds:,.0f} rows/s; hit rate "
                f"{max(known, 0) / asked:.1%}; {moved / (step % 10 or 10) / 1e6:,.1f} MB a step",
                flush=True,
            )
            began, before = time.perf_counter(), after
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    main(given.directory, given.rows, given.host_memory, given.steps)
