"""What the ranks of a test train, beside plain torch on the whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import outsize
from outsize.api.assemble import prepared_of
from tests.small_models import Stack

WIDTH, HIDDEN, DEPTH = 48, 100, 3


def stack(depth: int = DEPTH) -> nn.Module:
    return Stack(WIDTH, HIDDEN, depth, out=8)


def batch(step: int, part: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(rows, WIDTH, generator=made), torch.randn(rows, 8, generator=made)


def batches(step: int, parts: Iterable[int], rows: int = 8) -> tuple[Tensor, Tensor]:
    """Those of several ranks in one."""
    pairs = [batch(step, part, rows) for part in parts]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def prepared(model: nn.Module) -> Any:
    """What outsize knows of a model; None of a plain one."""
    return prepared_of(next(model.parameters()))


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole, of a prepared model, on every rank, or of a plain one."""
    with outsize.gathered(model) if prepared(model) else nullcontext():
        return {name: whole(param.detach()).cpu().clone() for name, param in model.named_parameters()}


def weights_of(model: nn.Module) -> list[Tensor]:
    return list(named_weights(model).values())


def assert_near(found: Iterable[Tensor], expected: Iterable[Tensor], rtol: float = 1e-5, atol: float = 1e-5) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=rtol, atol=atol)


def same_bits(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    stage: int = 3
    tiers: str = "host"
    accumulate: int = 1
    clip: float | None = None
    dtype: torch.dtype = torch.float32
    fields: dict[str, Any] = field(default_factory=dict)
    no_sync: bool = False
    uneven: bool = False
    steps: int = 3
    mesh: tuple[int, ...] = ()
    device: str = "cpu"


@dataclass
class Result:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def _rows(setting: Setting, part: int) -> int:
    return 4 + 3 * part if setting.uneven else 8


def fields_of(setting: Setting, disk: str) -> dict[str, Any]:
    tier = setting.tiers
    places: dict[str, Any] = {"params": tier, "grads": tier, "states": tier}
    if setting.stage in (1, 2):
        places["params"] = "device"
    memory = "64MiB"
    if tier == "squeezed":
        places = dict.fromkeys(("params", "grads", "states"), "disk")
        memory = "448KiB"
    mesh = {"mesh": init_device_mesh("cpu", setting.mesh)} if setting.mesh else {}
    return {
        **mesh,
        "host_memory": memory,
        "disk": disk,
        "stage": setting.stage,
        "device": setting.device,
        **places,
        **setting.fields,
    }


def make(setting: Setting, seed: int = 0, depth: int = DEPTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = stack(depth).to(setting.dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def made(setting: Setting, disk: str, seed: int = 0, depth: int = DEPTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepared."""
    model, optimizer = make(setting, seed, depth)
    outsize.prepare(model, optimizer, **fields_of(setting, disk))
    return model, optimizer


def _clip(model: nn.Module, setting: Setting) -> float:
    if setting.clip is None:
        return float(
            torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
        )
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip))


def plain(setting: Setting, ranks: int) -> Result:
    """Plain torch on the batches of all ranks together."""
    torch.set_num_threads(1)
    model, optimizer = make(setting)
    losses, norms = [], []
    for step in range(setting.steps):
        total = 0.0
        for micro in range(setting.accumulate):
            parts = [batch(step * 10 + micro, part, _rows(setting, part)) for part in range(ranks)]
            rows = sum(len(x) for x, _ in parts)
            x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
            loss = nn.functional.mse_loss(model(x.to(setting.dtype)).float(), y)
            (loss / setting.accumulate).backward()
            total += loss.item() * rows / rows
        norms.append(_clip(model, setting))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / setting.accumulate)
    return Result(losses, norms, named_weights(model))


def train(setting: Setting, disk: str) -> Result:
    """The same on this rank's part, with outsize."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = made(setting, disk)
    losses, norms = [], []
    for step in range(setting.steps):
        total = torch.zeros(())
        for micro in range(setting.accumulate):
            x, y = (each.to(setting.device) for each in batch(step * 10 + micro, rank, _rows(setting, rank)))
            rows = sum(_rows(setting, part) for part in range(ranks))
            last = micro == setting.accumulate - 1
            loss = nn.functional.mse_loss(model(x.to(setting.dtype)).float(), y)
            loss = loss * (len(x) * ranks / rows)
            if setting.no_sync and not last:
                with outsize.no_sync(model):
                    (loss / setting.accumulate).backward()
            else:
                (loss / setting.accumulate).backward()
            total += loss.detach().cpu()
        norms.append(_clip(model, setting))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / ranks / setting.accumulate)
    return Result(losses, norms, named_weights(model))
