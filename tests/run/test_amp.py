"""`torch.amp.GradScaler` over gradients at rest: losses and scales of plain torch, overflow included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import outsize

OVERFLOWS_AT = 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses, scales = [], []
    for step in range(8):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        scaler.scale(loss * (float("inf") if step == OVERFLOWS_AT else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_the_scaler_grows_backs_off_and_skips_as_in_torch(tier: str, tmp_path: Path) -> None:
    expected_losses, expected_scales = train(*build())
    model, optimizer = build()
    outsize.prepare(model, optimizer, disk=tmp_path, host_memory="8MiB", params=tier, grads=tier, states=tier)
    losses, scales = train(model, optimizer)
    assert scales == expected_scales
    assert losses == pytest.approx(expected_losses, rel=1e-6)
