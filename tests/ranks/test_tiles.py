"""Tiles of the sequence on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from tests.conftest import squeeze, take_step
from tests.ranks.launching import run_on_ranks
from tests.ranks.training import assert_near, named_weights
from tests.small_models import Built

WIDTH, POSITIONS, TILES = 16, 125, 4


class Mlp(Built, up=(WIDTH, 48), down=(48, WIDTH), widest=lambda: 0):
    """Notes the most positions that it sees at once."""

    def forward(self, x: Tensor) -> Tensor:
        self.widest = max(self.widest, x.shape[1])
        return x + self.down(torch.relu(self.up(x)))


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(step: int, rank: int, rows: int) -> Tensor:
    return torch.randn(rows, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Any, optimizer: Any, steps: list[Tensor]) -> list[float]:
    return [take_step(model(x).square().mean(), optimizer).item() for x in steps]


WAYS = [(1, 1, "recompute"), (1, 2, "offload"), (3, 1, "offload"), (3, 2, "recompute")]
"""Stage, rows, activations."""


def tiled(disk: str) -> list[tuple[list[float], dict[str, Tensor], int]]:
    found = []
    for stage, rows, mode in WAYS:
        model, optimizer = make()
        for mlp in model:
            outsize.tiled(mlp, dim=1, tiles=TILES)
        places = dict.fromkeys(("params", "grads", "states"), "host" if stage == 3 else "device")
        outsize.prepare(model, optimizer, stage=stage, host_memory="16MiB", disk=disk, activations=mode, **places)
        losses = train(model, optimizer, [data(step, dist.get_rank(), rows) for step in range(3)])
        found.append((losses, named_weights(model), model[0].widest))
    return found


def test_two_mlps_of_125_positions_in_4_tiles_train_as_the_whole_batch_does(tmp_path: Any) -> None:
    ranks = run_on_ranks(2, tiled, str(tmp_path))
    for (_, rows, _), each in zip(WAYS, zip(*ranks, strict=True), strict=True):
        model, optimizer = make()
        expected = train(
            model, optimizer, [torch.cat([data(step, rank, rows) for rank in (0, 1)]) for step in range(3)]
        )
        assert [sum(both) / 2 for both in zip(*(losses for losses, _, _ in each), strict=True)] == pytest.approx(
            expected
        )
        for _, found, widest in each:
            assert_near(found.values(), named_weights(model).values())
            assert widest == -(-POSITIONS // TILES)


def three() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH)) for _ in range(3)), nn.Linear(WIDTH, 4)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


LONG = (8192, 64)
"""Positions of each rank: the first one's MLPs exceed the budget."""

CHOSEN = [(1, "keep"), (3, "keep"), (3, "recompute"), (3, "auto")]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(1, LONG[rank], WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def cuts(mlp: Any) -> int:
    """In how many ways the MLP was cut."""
    forward = mlp.forward
    return len((forward if hasattr(forward, "_layers") else forward.__wrapped__)._layers)


def chosen(disk: str) -> list[tuple[list[float], dict[str, Tensor], int]]:
    found = []
    for stage, mode in CHOSEN:
        model, optimizer = three()
        places = dict.fromkeys(("params", "grads", "states"), "disk" if stage == 3 else "device")
        outsize.prepare(model, optimizer, stage=stage, host_memory="2MiB", disk=disk, activations=mode, **places)
        if stage == 3:
            squeeze(model)
        losses = train(model, optimizer, [batch(step, dist.get_rank()) for step in range(3)])
        found.append((losses, named_weights(model), sum(map(cuts, model[:3]))))
    return found


def test_one_rank_chooses_tiles_and_another_does_not(tmp_path: Any) -> None:
    """Its batch is shorter. Units come and go all the time."""
    model, optimizer = three()
    for step in range(3):
        (sum(model(batch(step, rank)).square().mean() for rank in (0, 1)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for rank, ways in enumerate(run_on_ranks(2, chosen, str(tmp_path))):
        for _, found, in_tiles in ways:
            assert_near(found.values(), named_weights(model).values())
            assert in_tiles == (3 if rank == 0 else 0)
