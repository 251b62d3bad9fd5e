"""Train on several ranks, lose one, and go on from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/ranks.py DIRECTORY [STEPS]

The directory is shared by all ranks. Kill a worker (`kill -9`): the others end with an error that names it, torchrun
starts all of them again, and training goes on as if nothing had been. Start it with another `--nproc-per-node` that
divides the 16 rows of a batch: it goes on from the same checkpoints. `KILL_AT=30` makes the last rank kill itself once
before that step, to see it happen.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import outsize


def main(directory: Path, steps: int) -> float:
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    disk = directory / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    outsize.prepare(model, optimizer, device="cpu", disk=disk, **outsize.presets["zero-infinity-nvme"])
    several = dist.is_initialized()  # prepare has joined the job, if it has more than one process
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    step, loss = 0, torch.zeros(())
    if any((directory / "ckpts").glob("step-*")):
        step = outsize.load(directory / "ckpts", model, optimizer)["step"]
    while step < steps:
        _maybe_die(directory, step, last=rank == ranks - 1)
        # Every rank takes its own rows of the batch of this step.
        rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0 or step == steps:
            outsize.save(directory / "ckpts" / f"step-{step}", model, optimizer, {"step": step}, keep=2)
    loss = loss.detach() / ranks
    if several:
        dist.all_reduce(loss)
        dist.destroy_process_group()
    if rank == 0:
        print(f"after {step} steps on {ranks} ranks: loss {loss.item()!r}", flush=True)
    return loss.item()


def _maybe_die(directory: Path, step: int, last: bool) -> None:
    died = directory / "died"
    if last and step == int(os.environ.get("KILL_AT", "-1")) and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
