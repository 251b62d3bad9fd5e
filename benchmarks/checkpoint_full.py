"""Runs that are killed inside a save on a disk that is 95 % full. `python -m benchmarks.checkpoint_full DIRECTORY N`.

DIRECTORY is best a small file system of its own (`mount -t tmpfs -o size=320m tmpfs DIRECTORY`); it is filled up. Each
life prepares, loads the last checkpoint, trains, and is killed when its save has linked the files of the state. Every
restart must find room again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import outsize
from outsize.checkpoint import writer

WIDTH = 512
FULL = 0.95


def live(root: Path, killed: bool) -> None:
    """One life of the run."""
    writer.AT_ONCE_BYTES = -1  # small state is linked, too
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    places = dict.fromkeys(("params", "grads", "states"), "disk")
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=root / "disk", device="cpu", **places)
    steps = outsize.load(root / "saves", model, optimizer) if (root / "saves").exists() else 0
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    if killed:
        writer.UnfinishedCheckpoint.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    outsize.save(root / "saves" / f"step-{steps + 1}", model, optimizer, steps + 1, keep=1).wait()


def life(root: Path, killed: bool) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.checkpoint_full", str(root), "0", *(["--killed"] if killed else [])]
    return subprocess.run([*command, "--live"], capture_output=True, text=True, check=False)


def fill(root: Path) -> None:
    """Leave a twentieth of the file system, beside what the killed run holds."""
    stat = os.statvfs(root)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    with open(root / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free - int(total * (1 - FULL)), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("restarts", type=int)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--killed", action="store_true")
    options = parser.parse_args()
    root: Path = options.directory
    (root / "disk").mkdir(exist_ok=True)
    if options.live:
        live(root, options.killed)
        return
    failed = []
    life(root, killed=False)
    for number in range(options.restarts):
        done = life(root, killed=True)
        if done.returncode != -signal.SIGKILL:
            failed.append(f"{number}: {done.stderr.strip().splitlines()[-1:]}")
        if number == 0:
            fill(root)
    last = life(root, killed=False)
    print(json.dumps({"restarts": options.restarts, "failed": failed, "last": last.returncode}))


if __name__ == "__main__":
    main()
