"""Stages of a pipeline: `python -m benchmarks.pipelines [row ...] --disk DIR`. Rows: speed reads memory.

Two stages under torch's 1F1B with 8 micro-batches, as processes of this machine. Ratios are taken within one run, step
by step in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import outsize
from benchmarks.common import Row, run_rows
from tests.ranks.launching import run_on_ranks

WIDTH, LAYERS, MICRO_BATCHES, STEPS = 512, 8, 8, 15


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


LAYER_BYTES = sum(param.numel() * param.itemsize for param in Layer().parameters())


def stage(layers: int, micro_batches: int, fields: dict[str, Any] | None) -> tuple[nn.Module, Callable[[int], float]]:
    """A stage of this rank, prepared with these fields or plain; a step with so many rows gives its loss."""
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(rank)
    model = nn.Sequential(*[Layer() for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fields is None)
    if fields is not None:
        outsize.prepare(model, optimizer, mesh=mesh, activations="keep", **fields)
    pipe = PipelineStage(model, rank, dist.get_world_size(), torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(pipe, n_microbatches=micro_batches, loss_fn=nn.functional.mse_loss)

    def step(rows: int) -> float:
        losses: list[torch.Tensor] = []
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
        schedule.step(*([] if rank else [x]), **({"target": x.flip(1), "losses": losses} if last else {}))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if last else 0.0

    return model, step


def compare(tier: str, rows: int) -> tuple[float, float, float]:
    """Seconds of a step over torch's, then with outsize, and how far the losses are apart."""
    places = dict.fromkeys(("params", "grads", "states"), tier)
    steps = {"torch": stage(LAYERS, MICRO_BATCHES, None)[1]}
    steps["outsize"] = stage(LAYERS, MICRO_BATCHES, {"host_memory": "4GiB", **places})[1]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for number in range(STEPS):
        for name in sorted(steps, reverse=bool(number % 2)):
            dist.barrier()
            began = time.perf_counter()
            losses[name] = steps[name](rows)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    ratios = [mine / theirs for mine, theirs in zip(seconds["outsize"][3:], seconds["torch"][3:], strict=True)]
    apart = abs(losses["outsize"] - losses["torch"])
    return statistics.median(ratios), statistics.median(seconds["outsize"][3:]), apart


def speed(directory: str) -> list[Row]:
    """Everything in memory, beside torch's stages."""
    found = []
    for tier in ("device", "host"):
        *_, (ratio, seconds, apart) = run_on_ranks(2, compare, tier, 256, limit=600.0)
        what = f"a step of 256 rows, all on {tier!r}, over torch's ({seconds:.2f} s; losses {apart:.0e} apart)"
        found.append(Row(what, f"{ratio:.2f} x", "<= 1.03 x", ratio <= 1.03))
    return found


def moved(layers: int, memory: int, micro_batches: int, fields: dict[str, Any], directory: str) -> tuple[float, int]:
    """What a stage reads of its weights in a step, in sizes of the stage, and the peak of what outsize holds."""
    model, step = stage(layers, micro_batches, {"host_memory": memory, "disk": directory, **fields})
    read = 0
    for _ in range(3):
        before = outsize.memory(model).bytes_read
        step(256)
        read = outsize.memory(model).bytes_read - before
    peak = outsize.memory(model).peak
    return read / (layers * LAYER_BYTES), sum(value for name, value in peak.items() if not name.startswith("disk"))


def reads(directory: str) -> list[Row]:
    """Weights alone on disk, in the last stage, by the layers that stay in memory."""
    found = []
    resting = {"params": "disk", "grads": "device", "states": "device"}
    for held, micro_batches, within in ((4, 8, 1), (7, 8, 1), (4, 2, 4)):
        memory = (3 * LAYERS + held + 1) * LAYER_BYTES + (64 << 20)  # of staging
        fields = {**resting, "micro_batches": within}
        *_, (read, _) = run_on_ranks(2, moved, LAYERS, memory, micro_batches, fields, directory, limit=600.0)
        formula = 2 * micro_batches * (1 - held / LAYERS)
        what = f"weights read a step, {held} of {LAYERS} layers stay, {micro_batches} micro-batches"
        what += f" of {within} parts" if within > 1 else ""
        found.append(Row(what, f"{read:.2f} x the stage", f"<= {formula:.2f} x", read <= formula + 0.13))
    return found


def memory(directory: str) -> list[Row]:
    """All on disk, within a budget of three layers, a gradient and staging: as deep as you like."""
    places = dict.fromkeys(("params", "grads", "states"), "disk")
    budget = 5 * LAYER_BYTES
    shallow, deep = (
        max(peak for _, peak in run_on_ranks(2, moved, layers, budget, MICRO_BATCHES, places, directory, limit=600.0))
        for layers in (4, 16)
    )
    what = f"all on disk, budget of 5 layers: peak of 16 layers over that of 4 (sum of kinds {deep / LAYER_BYTES:.1f})"
    return [Row(what, f"{deep / shallow:.2f} x", "<= 1.00 x", deep <= shallow)]


if __name__ == "__main__":
    raise SystemExit(run_rows(__doc__, {"speed": speed, "reads": reads, "memory": memory}))
