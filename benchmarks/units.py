"""What a unit costs in Python: 24 small units of six parameters against plain torch and FSDP2, on one rank and the CPU.

    python -m benchmarks.units --disk DIR

All three take turns in one process, so a slow minute is slow for all. The numbers are medians, in milliseconds of
processor time (all threads: what else the machine does is not counted) of a unit and step, over what plain torch takes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import outsize
from benchmarks.common import Row, run_rows
from benchmarks.ranks_jobs import Small

UNITS, STEPS, WARM_UP = 24, 200, 20
PARTS = ("forward", "backward", "clip", "step", "zero_grad")
PLACES = dict.fromkeys(("params", "grads", "states"), "host")


def fully_sharded(model: nn.Sequential) -> torch.optim.Optimizer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for each in model:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def prepared(model: nn.Sequential, **fields: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outsize.prepare(model, optimizer, units=[Small], device="cpu", activations="keep", **fields)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> list[float]:
    """Seconds of processor time of each of `PARTS`."""
    times = [time.process_time()]
    loss = model(rows).square().mean()
    times.append(time.process_time())
    loss.backward()
    times.append(time.process_time())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    times.append(time.process_time())
    optimizer.step()
    times.append(time.process_time())
    optimizer.zero_grad()
    times.append(time.process_time())
    return [after - before for before, after in pairwise(times)]


def measure(directory: str) -> dict[str, list[float]]:
    """Median milliseconds of a unit and step, by kind and part."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        makers: dict[str, Any] = {
            "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            "FSDP2": fully_sharded,
            "host": lambda model: prepared(model, host_memory="1GiB", stage=0, **PLACES),
            "disk": lambda model: prepared(
                model, host_memory="16MiB", disk=folder, stage=0, **dict.fromkeys(PLACES, "disk")
            ),
        }
        runs = {}
        for kind, make in makers.items():
            torch.manual_seed(0)
            model = nn.Sequential(*[Small() for _ in range(UNITS)])
            runs[kind] = model, make(model)
        found: dict[str, list[list[float]]] = {kind: [] for kind in runs}
        for number in range(STEPS):
            rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
            for kind, (model, optimizer) in runs.items():
                taken = step(model, optimizer, rows)
                if number >= WARM_UP:
                    found[kind].append(taken)
        dist.destroy_process_group()
    return {
        kind: [statistics.median(part) * 1e3 / UNITS for part in zip(*times, strict=True)]
        for kind, times in found.items()
    }


def overhead(directory: str) -> list[Row]:
    """What a unit adds to a step."""
    found = measure(directory)
    plain = found["torch"]
    added = {kind: [mine - theirs for mine, theirs in zip(times, plain, strict=True)] for kind, times in found.items()}
    theirs = sum(added["FSDP2"])
    rows = []
    for kind in ("host", "disk"):
        parts = ", ".join(f"{name} {each:.2f}" for name, each in zip(PARTS, added[kind], strict=True))
        ratio = sum(added[kind]) / theirs
        what = f"a unit on {kind} adds to a step ({parts} ms) over what FSDP2 adds ({theirs:.2f} ms)"
        must = "<= 0.5 x" if kind == "host" else ""
        rows.append(Row(what, f"{sum(added[kind]):.2f} ms, {ratio:.2f} x", must, not must or ratio <= 0.5))
    return rows


if __name__ == "__main__":
    run_rows(__doc__ or "", {"overhead": overhead})
