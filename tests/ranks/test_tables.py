"""Tables, embeddings with `sparse=True`, whose rows are split over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import outsize
from tests.ranks.launching import Ended, ends_on_ranks, run_on_ranks
from tests.ranks.training import assert_near, named_weights, same_bits

# What torch's own Adagrad says of sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS, WORDS = 3001, 40
"""Rows that no number of ranks divides, of a table whose ranks all have some; and of one that the first has alone."""

Batch = tuple[Tensor, Tensor]


class Clicks(nn.Module):
    """A table that is used twice, bags of another one, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, 16, padding_idx=3, sparse=True)
        self.words = nn.EmbeddingBag(WORDS, 4, mode="mean", sparse=True)
        self.head = nn.Linear(20, 1)

    def forward(self, batch: Batch) -> Tensor:
        items, words = batch
        found = torch.tanh(self.items(items).sum(1)) + self.items(items[:, 0])
        return self.head(torch.cat([found, self.words(words)], 1)).square().sum()


def rowless(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def lazy(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.optim.LazyAdamW(model.parameters(), lr=0.01)


def make(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Clicks()
    return model, optimizer(model)


def batch(step: int, rank: int) -> Batch:
    """Ranks have batches of different sizes; in the second step one asks for its own rows alone, and one for none."""
    made = torch.Generator().manual_seed(100 * step + rank)
    rows = (4 + 3 * rank) * (step != 1 or rank != 1)
    ids = torch.randint(0, 900 if step == 1 else ROWS, (rows, 5), generator=made)
    return ids, torch.randint(0, WORDS, (rows, 2), generator=made)


@dataclass(frozen=True)
class Way:
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lazy
    tier: str = "host"
    ahead: bool = False
    accumulate: int = 1
    fields: dict[str, Any] = field(default_factory=dict)

    def prepare(self, disk: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = make(self.optimizer)
        places = {kind: self.tier for kind in ("params", "grads", "states")}
        outsize.prepare(model, optimizer, **{"host_memory": "16MiB", "disk": disk, **places, **self.fields})
        return model, optimizer


STEPS = 4


def train(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way, first: int = 0, steps: int = STEPS) -> Tensor:
    """The losses of this rank."""
    rank, losses = dist.get_rank() if dist.is_initialized() else 0, []
    data = [batch(step, rank) for step in range(first, first + steps)]
    for at, each in enumerate(outsize.lookahead(data, model) if way.ahead else data):
        last = (at + 1) % way.accumulate == 0
        with nullcontext() if last else outsize.no_sync(model):
            loss = model(each)
            loss.backward()
        losses.append(loss.detach())
        if last:
            nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


def plain(way: Way, ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain torch on the batches of all ranks."""
    model, optimizer = make(way.optimizer)
    losses = []
    for step in range(STEPS):
        loss = sum(model(batch(step, rank)) for rank in range(ranks)) / ranks
        loss.backward()
        losses.append(loss.detach())
        if (step + 1) % way.accumulate == 0:
            nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), named_weights(model)


def trained(ways: list[Way], disk: str) -> list[tuple[Tensor, dict[str, Tensor], dict[str, int]]]:
    found = []
    for way in ways:
        model, optimizer = way.prepare(disk)
        losses = train(model, optimizer, way)
        dist.all_reduce(losses)
        report = outsize.memory(model)
        counts = {"rows": report.rows, "ahead": report.rows_ahead, "own": report.state_bytes}
        found.append((losses / dist.get_world_size(), named_weights(model), counts))
    return found


SMALL = {"host_memory": "640KiB"}
"""A budget that holds a few hundred rows."""

ALIKE = [
    [Way(optimizer), Way(optimizer, "disk"), Way(optimizer, "disk", fields=SMALL), Way(optimizer, "disk", True)]
    for optimizer in (rowless, adagrad, lazy)
]
ALIKE += [
    [Way(accumulate=2), Way(accumulate=2, tier="disk")],
    [Way(fields={"stage": 0}), Way(tier="disk", fields={"stage": 0})],
    [Way(tier="device", fields={"stage": 2})],
]
"""Ways that give the same bits."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_tables_as_plain_torch_does_on_the_whole_batch(ranks: int, tmp_path: Path) -> None:
    every = run_on_ranks(ranks, trained, [way for ways in ALIKE for way in ways], str(tmp_path))
    for rank in range(ranks):
        found = iter(every[rank])
        for ways in ALIKE:
            losses, expected = plain(ways[0], ranks)
            first, *others = [next(found) for _ in ways]
            torch.testing.assert_close(first[0], losses, rtol=1e-6, atol=1e-6)
            assert_near(first[1].values(), expected.values())
            for other in others:
                assert torch.equal(other[0], first[0])
                assert same_bits(other[1].values(), first[1].values())
