"""The same promises with the computation on a GPU. Run with `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import outsize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIXTURES = list(itertools.product(("device", "host", "disk"), repeat=3))


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 8)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: int = 5) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 32, generator=generator).to("cuda", dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tiers", MIXTURES)
def test_every_mixture_of_tiers_trains_like_torch(tiers: tuple[str, str, str], tmp_path: Path) -> None:
    plain = build(torch.float32).cuda()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), torch.float32)
    model = build(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    places = dict(zip(("params", "grads", "states"), tiers, strict=True))
    outsize.prepare(model, optimizer, device="cuda", device_memory="8MiB", host_memory="64MiB", disk=tmp_path, **places)
    assert train(model, optimizer, torch.float32) == pytest.approx(expected, rel=1e-5)


def test_offloaded_bf16_trains_like_bf16_on_the_device(tmp_path: Path) -> None:
    results = []
    for places in (("host", "host", "host"), ("disk", "disk", "disk"), ("device", "host", "disk")):
        model = build(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        fields = dict(zip(("params", "grads", "states"), places, strict=True))
        outsize.prepare(
            model, optimizer, device="cuda", device_memory="8MiB", host_memory="64MiB", disk=tmp_path, **fields
        )
        results.append(train(model, optimizer, torch.bfloat16))
    assert results[0] == results[1] == results[2]
