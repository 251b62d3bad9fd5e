"""A model whose units are split over ranks becomes plain on every rank, and goes on as in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outsize
from tests.conftest import take_step
from tests.ranks.launching import run_on_ranks
from tests.ranks.training import batch, stack


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rows: slice) -> None:
    for step in steps:
        x, y = batch(step)
        take_step(nn.functional.mse_loss(model(x[rows]), y[rows]), optimizer)


def release_in_mid_run(tier: str, stage: int, disk: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    places = dict.fromkeys(("params", "grads", "states"), tier)
    outsize.prepare(model, optimizer, device="cpu", host_memory="64MiB", disk=disk, stage=stage, **places)
    rank = dist.get_rank()
    train(model, optimizer, range(3), slice(4 * rank, 4 * rank + 4))
    outsize.release(model)
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    train(model, optimizer, range(3, 6), slice(None))  # nobody averages over ranks now
    outsize.prepare(model, optimizer, device="cpu", host_memory="64MiB", disk=disk, stage=stage, **places)
    train(model, optimizer, range(6, 8), slice(4 * rank, 4 * rank + 4))
    with outsize.gathered(model):
        return {name: value.detach().clone().as_subclass(torch.Tensor) for name, value in model.named_parameters()}


@pytest.mark.parametrize(("tier", "stage"), [("device", 1), ("device", 3), ("host", 3), ("disk", 3)])
def test_a_model_of_two_ranks_is_released_and_prepared_again(tier: str, stage: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = stack()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(8), slice(None))
    for found in run_on_ranks(2, release_in_mid_run, tier, stage, str(tmp_path)):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=1e-5)
